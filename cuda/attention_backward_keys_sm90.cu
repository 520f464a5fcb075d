// dV[j] = sum_i p[i, j] dO[i]     dK[j] = scale * sum_i ds[i, j] Q[i]     p, ds as in attention_backward_queries_sm90
// dK and dV of attention on Hopper's tensor cores (sm_90a) for heads of 129 to 256 columns, by four products; dQ has a
// kernel of its own. Operands are 16-bit floats.
// A CTA claims 64 keys at a time, K and V stay in shared memory, and tiles of 64 queries with their dO pass by. dK and
// dV of 64 keys by 256 columns take 256 registers of each thread of a warpgroup, so that there are two warpgroups for
// the same keys: one computes weights and dV, the other one ds and dK. The weights pass between them in float32 through
// shared memory, 16 bytes a thread without conflicts of banks. The first four of 16 steps of K and of V stay in
// registers. One pass for all gradients has two products less, but was no faster: it adds 64 KB to the sums of dQ in
// each turn.
#include "common/attention_backward_turns.cuh"
#include "ptx/wgmma.cuh"

constexpr int kThreads = 384;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;  // of a thread, 168 on average
constexpr int kScoresOfThread = 32, kParts = 4;           // scores of a thread; steps of 16 queries
constexpr int kKept = 4;                                  // steps of K and of V that stay in registers: 1 to 2 % faster
static_assert(VALUE_DIM == HEAD_DIM && (kDim == 192 || kDim == 256) && kTileK == 64 && kTileQ == 64, "");
static_assert(!kOrdered, "nothing is added to what others add to");

struct alignas(1024) Shared {
  static constexpr int kSlotsOfOne = 2;
  u8 k[kSlabs * kSlabK], v[kSlabs * kSlabK];
  u8 q[kSlots][kSlabs * kSlabQ], dout[kSlotsOfOne][kSlabs * kSlabQ];
  u8 weights[64 * 64 * 4];                                // as the threads hold them; at the end dK and dV
  f32 lse[kSlots][kTileQ], delta[kSlotsOfOne][kTileQ];
  u32 seen[kSlots][kTileQ][kWords];                       // for turns that are not whole
  u64 k_full, k_empty, v_full, v_empty;
  u64 q_full[kSlots], q_empty[kSlots], dout_full[kSlotsOfOne], dout_empty[kSlotsOfOne];
  u64 weights_full, weights_empty, turn_full[kTurns], mask_full[kSlots];
  Turn turns[kTurns];                                     // described well before they are computed
  Item items[2];
  u32 redo[2][2][4];                                      // rows of a warp that are not finite
  KeyTile next;                                           // of the producer warp: the keys, and up to 32 turns
  Turn batch[32];
  Tile masked[kMaskWarps];                                // of the warps that look up
};
constexpr int kSlotsOfOne = Shared::kSlotsOfOne;

// ---------------------------------------------------------------------------------------------------- the consumers
// What both warpgroups do.
struct Consumer : Member {
  const BackwardSm90& problem;
  Shared& shared;
  f32 accum[kDim / 2];   // of dV or dK
  u32 n = 0, loaded = 0;

  // The number of a thread comes through a shuffle: otherwise the compiler reads it again in the loop, which takes 200
  // clocks beside the traffic of the tensor cores.
  __device__ __forceinline__ Consumer(const BackwardSm90& problem, Shared& shared)
      : Member{int(__shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32) % 128)}, problem(problem), shared(shared) {}

  __device__ __forceinline__ const Backward& b() const { return problem.rows.backward; }

  // d[64 keys, 64 queries] = rows of k or v times columns of q or dO
  __device__ __forceinline__ void issue_scores(f32 (&d)[kScoresOfThread], const u32 (&kept)[kKept][4], const u8* rows,
                                               const u8* columns) {
    const u64 x = wgmma_descriptor(shared_address(rows), 16, 1024);
    const u64 y = wgmma_descriptor(shared_address(columns), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int offset = (step / 4 * kSlabQ + step % 4 * 32) / 16;
      if (step < kKept) wgmma<false>(d, step > 0, kept[step], y + offset);
      else wgmma<false, false>(d, step > 0, x + offset, y + offset);
    }
    wgmma_commit();
  }
  // Reads the first steps of rows.
  __device__ __forceinline__ void keep(u32 (&kept)[kKept][4], const u8* rows) {
    const int row = warp() * 16 + lane() % 16;
#pragma unroll
    for (int step = 0; step < kKept; ++step)
      load_matrix_x4<false>(kept[step], shared_address(rows) + step / 4 * kSlabK + row * 128 +
                                            ((step % 4 * 2 + lane() / 16) ^ (row & 7)) * 16);
  }
  // accum[64 keys, kDim] += weights[64 keys, queries] * rows[queries, kDim]
  __device__ __forceinline__ void issue_accum(const u32 (&weights)[kParts][4], const u8* rows) {
    const u64 y = wgmma_descriptor(shared_address(rows), kSlabQ, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kParts; ++step) wgmma<true>(accum, true, weights[step], y + step * 2048 / 16);
    wgmma_commit();
  }
  // Puts the weights of a thread where the same thread of the other warpgroup reads them.
  __device__ __forceinline__ void put(u8* to, const f32 (&x)[kScoresOfThread]) {
    const u32 place = shared_address(to) + thread * 16;
#pragma unroll
    for (int j = 0; j < kScoresOfThread; j += 4) store_words(place + j * 512, x[j], x[j + 1], x[j + 2], x[j + 3]);
  }

  // Writes dK or dV; rows that are not finite are recomputed exactly, half of them by each warpgroup. A warp has its own
  // rows.
  __device__ __forceinline__ void finish(u32 item, int group, f32 factor, u8* staged, Element* out,
                                         const Strides& strides, int columns) {
    two_places_sync(1);  // nobody reads weights any more
    const KeyTile& y = shared.items[item & 1].keys;
    const Tile& x = y.tile;
    const int key = y.key + warp() * 16;
    const u32 bad = write_rows(accum, factor, staged + warp() * 2048, at(out, strides, x.batch, x.head, key), strides,
                               x.keys - key, columns);
    u32(&all)[2][4] = shared.redo[item & 1];
    if (lane() == 0) all[group][warp()] = bad;
    two_places_sync(1);
#pragma unroll 1
    for (u32 redo = (all[0][warp()] | all[1][warp()]) & (group ? 0xff00u : 0xffu); redo; redo &= redo - 1)
      write_key_again(problem.rows, y, key + __ffs(redo) - 1);
  }
};

// Computes the weights and dV, which is still in flight when the next scores are issued.
struct OfValues : Consumer {
  using Consumer::Consumer;

  // Sets to 0 the weights of keys that a query does not see.
  __device__ __forceinline__ void hide(f32 (&s)[kScoresOfThread], u32 slot) const {
    wait(shared.mask_full[slot], parity<kSlots>(n));
    const u32(&seen)[kTileQ][kWords] = shared.seen[slot];
    const int word = warp() / 2, bit = warp() % 2 * 16 + lane() / 4;
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 bits = seen[j * 8 + lane() % 4 * 2 + i][word] >> bit;
        s[4 * j + i] = bits & 1 ? s[4 * j + i] : 0.f;
        s[4 * j + 2 + i] = bits >> 8 & 1 ? s[4 * j + 2 + i] : 0.f;
      }
  }

  __device__ __forceinline__ void run() {
    for (u32 item = 0;; ++item) {
      wait(shared.k_full, item & 1);
      const int count = uniform(shared.items[item & 1].count);
      if (count < 0) break;
      clear(accum);
      if (count > 0) loop(count);
      release(shared.k_empty);
      finish(item, 0, 1.f, shared.weights, b().dv, b().dv_strides, b().attention.value_dim);
    }
  }

  __device__ __forceinline__ void loop(int count) {
    const Weighing weighing{b()};
    u32 kept[kKept][4];
    keep(kept, shared.k);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const u32 slot = n % kSlots, one = n % kSlotsOfOne;
      f32 s[kScoresOfThread];
      float4 statistics[4];
      u32 weights[kParts][4];
      wait(shared.q_full[slot], parity<kSlots>(n));
      load_statistics(statistics, shared.lse[slot], lane());
      const int whole = uniform(shared.turns[n % kTurns].whole);
      issue_scores(s, kept, shared.k, shared.q[slot]);
      wgmma_wait<1>();
      settle(accum);  // of the turn before
      if (i > 0) release(shared.dout_empty[one ^ 1]);
      wgmma_wait<0>();
      settle(s);
#pragma unroll
      for (int j = 0; j < kParts; ++j) weighing.weigh(s + 8 * j, statistics[j]);
      if (!whole) hide(s, slot);
      if constexpr (kScores == kCapped) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          pack_weights(weights[j], s + 8 * j);
          weighing.bend(s + 8 * j, statistics[j]);
        }
      }
      release(shared.q_empty[slot]);
      wait(shared.weights_empty, (n & 1) ^ 1);
      put(shared.weights, s);
      release(shared.weights_full);
      if constexpr (kScores != kCapped) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) pack_weights(weights[j], s + 8 * j);
      }
      wait(shared.dout_full[one], parity<kSlotsOfOne>(n));
      issue_accum(weights, shared.dout[one]);
      ++n;
    }
    wgmma_wait<0>();
    settle(accum);
    release(shared.dout_empty[(n - 1) % kSlotsOfOne]);
  }
};

// Computes ds and dK, which is still in flight when the next dO . V is issued.
struct OfKeys : Consumer {
  using Consumer::Consumer;

  __device__ __forceinline__ void run() {
    for (u32 item = 0;; ++item) {
      wait(shared.k_full, item & 1);
      const int count = uniform(shared.items[item & 1].count);
      if (count < 0) break;
      clear(accum);
      if (count > 0) loop(count);
      release(shared.k_empty);
      finish(item, 1, b().factor, shared.weights + 8192, b().dk, b().dk_strides, b().attention.head_dim);
    }
  }

  __device__ __forceinline__ void loop(int count) {
    wait(shared.v_full, loaded & 1);
    ++loaded;
    u32 kept[kKept][4];
    keep(kept, shared.v);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const u32 slot = n % kSlots, one = n % kSlotsOfOne;
      f32 dp[kScoresOfThread];
      float4 statistics[4], weights[kScoresOfThread / 4];
      u32 ds[kParts][4];
      wait(shared.dout_full[one], parity<kSlotsOfOne>(n));
      load_statistics(statistics, shared.delta[one], lane());
      issue_scores(dp, kept, shared.v, shared.dout[one]);
      wgmma_wait<1>();
      settle(accum);  // of the turn before
      if (i > 0) release(shared.q_empty[slot ^ 1]);
      wait(shared.weights_full, n & 1);
#pragma unroll
      for (int j = 0; j < kScoresOfThread / 4; ++j)
        weights[j] = load_floats(shared_address(shared.weights) + thread * 16 + j * 2048);
      wgmma_wait<0>();
      settle(dp);
      release(shared.weights_empty);
      release(shared.dout_empty[one]);
      if (i == count - 1) release(shared.v_empty);
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float4 x = weights[2 * j], y = weights[2 * j + 1];
        const f32 eight[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        derive(ds[j], eight, dp + 8 * j, statistics[j]);
      }
      wait(shared.q_full[slot], parity<kSlots>(n));
      issue_accum(ds, shared.q[slot]);
      ++n;
    }
    wgmma_wait<0>();
    settle(accum);
    release(shared.q_empty[(n - 1) % kSlots]);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_keys_sm90(const __grid_constant__ BackwardSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(&problem.q);
    prefetch_map(&problem.k);
    prefetch_map(&problem.v);
    prefetch_map(&problem.dout);
    const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
    init(shared.k_full, 1), init(shared.k_empty, 8), init(shared.v_full, 1), init(shared.v_empty, 4);
    for (int i = 0; i < kSlots; ++i)
      init(shared.q_full[i], 1), init(shared.q_empty[i], 8), init(shared.mask_full[i], kMaskWarps);
    for (int i = 0; i < kSlotsOfOne; ++i) init(shared.dout_full[i], 1), init(shared.dout_empty[i], 8);
    init(shared.weights_full, 4), init(shared.weights_empty, 4);
    for (int i = 0; i < kTurns; ++i) init(shared.turn_full[i], 1);
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= 4) {
    more_registers<kConsumerRegisters>();
    if (warp < 8) OfValues(problem, shared).run();
    else OfKeys(problem, shared).run();
  } else {
    fewer_registers<kProducerRegisters>();
    if (warp == 0) produce(problem, shared);
    else if (warp > kAdders) compute_mask_bits(problem, shared, threadIdx.x - 32 * (1 + kAdders));
  }
}
