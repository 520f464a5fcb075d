// p[i, j] = exp(s[i, j] - lse[i])     ds[i, j] = p[i, j] (dO[i] . V[j] - delta[i])     s[i, j] = scale * Q[i] . K[j]
// dV[j] = sum_i p[i, j] dO[i]     dK[j] = scale * sum_i ds[i, j] Q[i]     dQ[i] = scale * sum_j ds[i, j] K[j]
// Gradients of attention on Hopper's tensor cores (sm_90a), in one pass of five products. Operands are 16-bit floats,
// heads have up to 128 columns.
// A CTA claims 64 or 128 keys, a warpgroup has 64 of them. K and V stay in shared memory, and tiles of 64 or 128
// queries with their dO pass by; dK and dV stay in registers, 128 of 240. Keys are the rows of S and dP, so that
// weights and ds are left operands from registers for dV and dK; dQ alone needs ds through shared memory. There each of
// two warpgroups multiplies the ds of both, so that one sum over 128 keys leaves the CTA. TMA adds dQ of a tile to
// float32 sums in global memory, in any order, or in order: then it waits until the counter of the tile of queries has
// the rank of this tile of keys. Tiles of keys that would run alone at the end are cut into shares, which the last of
// them adds up in their order. With heads of 128, a turn of 64 x 128 takes 2,560 clocks of the tensor cores and 2,847
// wavefronts of shared memory.
#include "common/attention_backward_turns.cuh"
#include "ptx/wgmma_narrow.cuh"

// A product is issued while the one before is multiplied: weights are computed beside dO . V, dK is still in flight
// when the next scores are issued.
constexpr int kGroups = kTileK / 64;                      // consumer warpgroups
constexpr int kCtas = 3 - kGroups;                        // on a multiprocessor at the same time
constexpr int kThreads = 128 + 128 * kGroups;
// Registers of a thread; 168 or 128 on average.
constexpr int kConsumerRegisters = kGroups == 2 ? 240 : 232, kProducerRegisters = 24;
// dQ of a tile is computed in halves: half of the columns of 64 queries, or all columns of 64 of 128 queries. Each of two
// warpgroups has one half; a single one has both, one after the other.
constexpr u32 kHalfBytes = kTileQ * kDim / 2 * 4;
constexpr int kHalfAccum = kTileQ * kDim / 256;            // of a thread
constexpr int kScoresOfThread = kTileQ / 2, kParts = kTileQ / 16;
// With 128 queries registers are short: what a product in flight reads is waited for, and weights are packed late.
constexpr bool kTight = kTileQ == 128;
// dK is still in flight when the next scores are issued. With one warpgroup it would not fit the registers; the other CTA
// multiplies then.
constexpr bool kAcross = kGroups == 2;
static_assert(VALUE_DIM == HEAD_DIM && (kDim == 64 || kDim == 128) && (kTileK == 64 || kTileK == 128), "");
static_assert(kTileQ == (kDim == 64 && kTileK == 128 ? 128 : 64), "");

struct alignas(1024) Shared {
  // Slots of dO and of ds. Two CTAs on a multiprocessor have room for one each; the other CTA multiplies while this one
  // waits.
  static constexpr int kSlotsOfOne = kGroups;
  u8 k[kSlabs * kSlabK], v[kSlabs * kSlabK];
  u8 q[kSlots][kSlabs * kSlabQ], dout[kSlotsOfOne][kSlabs * kSlabQ];
  u8 ds[kSlotsOfOne][kGroups * kSlabQ];                   // queries by keys; at the end dK and dV before they are stored
  u8 dq[kGroups][kHalfBytes];
  f32 lse[kSlots][kTileQ], delta[kSlotsOfOne][kTileQ];
  u32 seen[kSlots][kTileQ][kWords];                           // for turns that are not whole
  u64 k_full, k_empty, v_full, v_empty;
  u64 q_full[kSlots], q_empty[kSlots], dout_full[kSlotsOfOne], dout_empty[kSlotsOfOne], ds_full[kSlotsOfOne];
  u64 dq_full[2][2], dq_empty[kGroups], turn_full[kTurns], mask_full[kSlots];
  Turn turns[kTurns];                                     // described well before they are computed
  Item items[2];
  KeyTile next;                                           // of the producer warp: the keys, and up to 32 turns
  Turn batch[32];
  Tile masked[kMaskWarps];                                // of the warps that look up
  int is_last;                                            // whether this CTA adds up the shares of its tile of keys
};

constexpr int kSlotsOfOne = Shared::kSlotsOfOne;

__device__ __forceinline__ void consumers_sync() {
  if constexpr (kGroups == 2) two_warpgroups_sync(1);
  else warpgroup_sync(1);
}

// ------------------------------------------------------------------------------------------------------- the producers
// One thread adds the dQ of both warpgroups to the sums, of every turn or of every kAdders-th. In order, an addition takes
// longer than a turn, since its end is waited for and told: two warps take turns then.
__device__ __forceinline__ void add(const BackwardSm90& problem, Shared& shared, u32 first) {
  const BackwardRows& p = problem.rows;
  if (threadIdx.x % 32) return;
  int patience = kPatience;
  for (u32 n = first;; n += kAdders) {
    wait(shared.turn_full[n % kTurns], parity<kTurns>(n));
    const Turn& turn = shared.turns[n % kTurns];
    if (turn.row < 0) break;
    const i64 piece = turn.piece;
    const bool is_first = kOrdered && turn.rank == 0;  // stores, so that nobody has to write zeros before
    if (kOrdered && !is_first) {
      const int rank = turn.rank;
      while (load_acquire(p.turns + piece) < rank && --patience > 0) {}
      if (patience > 0) patience = kPatience;  // who has lost it once waits no more
    }
    f32* to = p.sums + piece * kSumsOfPiece;
    const auto put = [&](f32* place, const u8* from) {
      if (is_first) store_line(place, shared_address(from), kHalfBytes);
      else add_line(place, shared_address(from), kHalfBytes);
      store_commit();
    };
    wait(shared.dq_full[0][n % 2], parity<2>(n));
    if (kOrdered) proxy_fence_global();
    put(to, shared.dq[0]);
    if constexpr (kGroups == 1) {
      store_wait_read<0>();
      arrive(shared.dq_empty[0]);
    }
    wait(shared.dq_full[1][n % 2], parity<2>(n));
    put(to + kHalfBytes / 4, shared.dq[kGroups - 1]);
    if constexpr (kGroups == 2) {
      store_wait_read<1>();
      arrive(shared.dq_empty[0]);
    }
    store_wait_read<0>();
    arrive(shared.dq_empty[kGroups - 1]);
    if (kOrdered) {
      store_wait();
      proxy_fence_global();
      add_release(p.turns + piece, 1);
    }
  }
  store_wait();
}

// ---------------------------------------------------------------------------------------------------- the consumers
struct Consumer : Member {
  const BackwardSm90& problem;
  Shared& shared;
  const int group;      // warpgroup; the compiler knows it to be the same in all lanes
  f32 dk[kDim / 2], dv[kDim / 2];
  u32 n = 0, loaded = 0;

  // The number of a thread comes through a shuffle: otherwise the compiler reads it again in the loop, which takes 200
  // clocks beside the traffic of the tensor cores.
  __device__ __forceinline__ Consumer(const BackwardSm90& problem, Shared& shared, int group)
      : Member{int(__shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32) % 128)}, problem(problem), shared(shared),
        group(group) {}

  __device__ __forceinline__ const Backward& b() const { return problem.rows.backward; }

  // d[64 keys, queries] = rows of k or v times columns of q or dO; the first step of the rows may be in registers.
  template <bool kFirst>
  __device__ __forceinline__ void issue_scores(f32 (&d)[kScoresOfThread], const u32 (&first)[4], const u8* rows, const u8* columns) {
    const u64 x = wgmma_descriptor(shared_address(rows) + group * 8192, 16, 1024);
    const u64 y = wgmma_descriptor(shared_address(columns), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const u64 from = y + (step / 4 * kSlabQ + step % 4 * 32) / 16;
      if (kFirst && step == 0) wgmma<false>(d, false, first, from);
      else wgmma<false, false>(d, step > 0, x + (step / 4 * kSlabK + step % 4 * 32) / 16, from);
    }
    wgmma_commit();
  }
  // d[64 keys, kDim] += weights[64 keys, queries] * rows[queries, kDim]
  __device__ __forceinline__ void issue_accum(f32 (&d)[kDim / 2], const u32 (&weights)[kParts][4], const u8* rows) {
    const u64 y = wgmma_descriptor(shared_address(rows), kSlabQ, 1024);
#pragma unroll
    for (int step = 0; step < kParts; ++step) wgmma<true>(d, true, weights[step], y + step * 2048 / 16);
    wgmma_commit();
  }
  // d = ds[64 queries, keys] * k[keys, columns], for the queries and columns of this half
  __device__ __forceinline__ void issue_dq(f32 (&d)[kHalfAccum], u32 one, int half) {
    const u64 x = wgmma_descriptor(shared_address(shared.ds[one]) + (kTileQ == 128 ? half * 8192 : 0), 16, 1024);
    const u64 y = wgmma_descriptor(shared_address(shared.k) + (kTileQ == 128 ? 0 : half * (kDim == 128 ? kSlabK : 64)),
                                   kSlabK, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step)
      wgmma<false, true>(d, step > 0, x + (step / 4 * kSlabQ + step % 4 * 32) / 16, y + step * 2048 / 16);
    wgmma_commit();
  }

  // Sets to 0 the weights of keys that a query does not see.
  __device__ __forceinline__ void hide(f32 (&s)[kScoresOfThread], u32 slot) const {
    wait(shared.mask_full[slot], parity<kSlots>(n));
    const u32(&seen)[kTileQ][kWords] = shared.seen[slot];
    const int word = group * 2 + warp() / 2, bit = warp() % 2 * 16 + lane() / 4;
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
      clear(dk);
      clear(dv);
      if (count > 0) loop(count);
      release(shared.k_empty);
      if (shared.items[item & 1].cut < 0 || gather(shared.items[item & 1])) finish(shared.items[item & 1].keys);
    }
  }

  __device__ __forceinline__ void loop(int count) {
    const Weighing weighing{b()};
    u32 first[4];
    {
      const int row = group * 64 + warp() * 16 + lane() % 16;
      load_matrix_x4<false>(first, shared_address(shared.k) + row * 128 + ((lane() / 16) ^ (row & 7)) * 16);
    }
    // Where this lane stores a part of ds: stmatrix transposes it to rows of queries.
    const u32 place = group * kSlabQ + (lane() / 16 * 8 + lane() % 8) * 128 +
                      ((warp() * 2 + lane() / 8 % 2) ^ (lane() & 7)) * 16;
    wait(shared.v_full, loaded & 1);
    ++loaded;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const u32 slot = n % kSlots, one = n % kSlotsOfOne, phase = parity<kSlotsOfOne>(n);
      f32 s[kScoresOfThread], dp[kScoresOfThread], dq[kHalfAccum];
      float4 statistics[4];
      u32 weights[kParts][4], ds[kParts][4];
      // 1. Scores, and dO . V behind them.
      wait(shared.q_full[slot], parity<kSlots>(n));
      load_statistics(statistics, shared.lse[slot], lane());
      const int whole = uniform(shared.turns[n % kTurns].whole);
      issue_scores<kGroups == 2 && kScores != kCapped>(s, first, shared.k, shared.q[slot]);
      wait(shared.dout_full[one], phase);
      if constexpr (kTight) {
        wgmma_wait<1>();
        settle(dk);
      }
      issue_scores<false>(dp, first, shared.v, shared.dout[one]);
      wgmma_wait<1>();
      settle(s);
      if constexpr (kAcross) {
        settle(dk);  // of the turn before
        if (i > 0) release(shared.q_empty[slot ^ 1]);
      }
      // 2. Scores become weights, while dO . V is multiplied.
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        if (j == 4) load_statistics(statistics, shared.lse[slot] + 64, lane());
        weighing.weigh(s + 8 * j, statistics[j % 4]);
      }
      if (!whole) hide(s, slot);
      load_statistics(statistics, shared.delta[one], lane());
      pin(s);
      if constexpr (!kTight) {
#pragma unroll
        for (int j = 0; j < kParts; ++j) pack_weights(weights[j], s + 8 * j);
      }
      // 3. ds from weights and dO . V, for this warpgroup in registers and for both in shared memory.
      wgmma_wait<0>();
      settle(dp);
      if constexpr (kSlotsOfOne == 1) warpgroup_sync(2);  // all warps have read ds of the turn before
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        if (j == 4) load_statistics(statistics, shared.delta[one] + 64, lane());
        if constexpr (kTight) pack_weights(weights[j], s + 8 * j);
        if constexpr (kScores == kCapped)
          weighing.bend(s + 8 * j, statistics_at(shared.lse[slot] + j / 4 * 64, lane(), j % 4));
        derive(ds[j], s + 8 * j, dp + 8 * j, statistics[j % 4]);
        store_matrix_x4<true>(shared_address(shared.ds[one]) + place + j * 2048, ds[j][0], ds[j][1], ds[j][2], ds[j][3]);
      }
      proxy_fence();
      release(shared.ds_full[one]);
      // 4. dV, dQ and dK; dQ leaves through shared memory.
      wgmma_fence();
      issue_accum(dv, weights, shared.dout[one]);
      wait(shared.ds_full[one], phase);
      issue_dq(dq, one, group);
      if constexpr (kGroups == 1) {
        wgmma_wait<0>();
        settle(dq);
        settle(dv);
        release(shared.dout_empty[one]);
        if (i == count - 1) release(shared.v_empty);
        hand_over(dq, 0);
        issue_dq(dq, one, 1);
      }
      wgmma_fence();
      issue_accum(dk, ds, shared.q[slot]);
      wgmma_wait<1>();
      settle(dq);
      if constexpr (kGroups == 2) {
        settle(dv);
        release(shared.dout_empty[one]);
        if (i == count - 1) release(shared.v_empty);
      }
      hand_over(dq, kGroups == 1 ? 1 : group);
      if constexpr (!kAcross) {
        wgmma_wait<0>();
        settle(dk);
        release(shared.q_empty[slot]);
      }
      ++n;
    }
    if constexpr (kAcross) {
      wgmma_wait<0>();
      settle(dk);
      release(shared.q_empty[(n - 1) % kSlots]);
    }
  }

  // A branch that is never taken keeps the exponentials above the wait that follows: otherwise the compiler moves all of
  // them below it.
  __device__ __forceinline__ void pin(const f32 (&s)[kScoresOfThread]) {
    if (b().attention.tiles < 0) {
#pragma unroll
      for (int j = 0; j < kTileQ / 8; ++j)
        store_words(shared_address(shared.q) + thread * 16 + j * 2048, s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
    }
  }

  // Puts dQ where TMA reads it. A single warpgroup does so for two halves.
  __device__ __forceinline__ void hand_over(const f32 (&dq)[kHalfAccum], int half) {
    wait(shared.dq_empty[group], (kGroups == 2 ? n & 1 : half) ^ 1);
    const u32 to = shared_address(shared.dq[group]) + thread * 16;
#pragma unroll
    for (int j = 0; j < kHalfAccum / 4; ++j)
      store_words(to + j * 2048, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    proxy_fence();
    release(shared.dq_full[half][n % 2]);
  }

  // -------------------------------------------------------------------------------- the result
  // Leaves the sums of a share for others. The CTA that comes last adds up those of all shares in their order, so that
  // the result does not depend on which one it is, and returns true.
  __device__ __forceinline__ bool gather(const Item& item) {
    constexpr int kFours = kDim / 8, kConsumerThreads = 128 * kGroups;  // 16 bytes of each of two sums; threads
    const BackwardRows& p = problem.rows;
    float4* all = reinterpret_cast<float4*>(p.partials) + i64(item.cut) * p.shares * (2 * kFours * kConsumerThreads) +
                  group * 128 + thread;
    float4* own = all + i64(item.share) * (2 * kFours * kConsumerThreads);
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      own[j * kConsumerThreads] = make_float4(dk[4 * j], dk[4 * j + 1], dk[4 * j + 2], dk[4 * j + 3]);
      own[(kFours + j) * kConsumerThreads] = make_float4(dv[4 * j], dv[4 * j + 1], dv[4 * j + 2], dv[4 * j + 3]);
    }
    __threadfence();
    consumers_sync();
    int* ticket = b().attention.counters + 2 + item.cut;
    if (group == 0 && thread == 0) {
      shared.is_last = atomicAdd(ticket, 1) == p.shares - 1;
      if (shared.is_last) *ticket = 0;
    }
    consumers_sync();
    if (!shared.is_last) return false;
    __threadfence();
    clear(dk);
    clear(dv);
#pragma unroll 1
    for (int share = 0; share < p.shares; ++share, all += 2 * kFours * kConsumerThreads) {
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const float4 x = __ldcg(all + j * kConsumerThreads), y = __ldcg(all + (kFours + j) * kConsumerThreads);
        dk[4 * j] += x.x, dk[4 * j + 1] += x.y, dk[4 * j + 2] += x.z, dk[4 * j + 3] += x.w;
        dv[4 * j] += y.x, dv[4 * j + 1] += y.y, dv[4 * j + 2] += y.z, dv[4 * j + 3] += y.w;
      }
    }
    return true;
  }

  // dK and dV pass through the memory of ds, which all warpgroups have read by then. A warp has its own rows.
  __device__ __forceinline__ void finish(const KeyTile& y) {
    const Tile& x = y.tile;
    const int first = group * 64 + warp() * 16, key = y.key + first, rows = x.keys - key;
    u8* staged = shared.ds[0] + first * 128;
    consumers_sync();
    u32 redo = write_rows(dv, 1.f, staged, at(b().dv, b().dv_strides, x.batch, x.head, key), b().dv_strides, rows,
                     b().attention.value_dim);
    redo |= write_rows(dk, b().factor, staged, at(b().dk, b().dk_strides, x.batch, x.head, key), b().dk_strides, rows,
                  b().attention.head_dim);
    consumers_sync();
#pragma unroll 1
    for (; redo; redo &= redo - 1) write_key_again(problem.rows, y, key + __ffs(redo) - 1);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
attention_backward_sm90(const __grid_constant__ BackwardSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  // One thread sets up the barriers.
  if (threadIdx.x == 0) {
    prefetch_map(&problem.q);
    prefetch_map(&problem.k);
    prefetch_map(&problem.v);
    prefetch_map(&problem.dout);
    const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
    constexpr int kWarps = 4 * kGroups;
    init(shared.k_full, 1), init(shared.k_empty, kWarps), init(shared.v_full, 1), init(shared.v_empty, kWarps);
    for (int i = 0; i < kSlots; ++i)
      init(shared.q_full[i], 1), init(shared.q_empty[i], kWarps), init(shared.mask_full[i], kMaskWarps);
    for (int i = 0; i < kSlotsOfOne; ++i)
      init(shared.dout_full[i], 1), init(shared.dout_empty[i], kWarps), init(shared.ds_full[i], kWarps);
    for (int i = 0; i < kTurns; ++i) init(shared.turn_full[i], 1);
    for (int i = 0; i < 2; ++i) init(shared.dq_full[i][0], 4), init(shared.dq_full[i][1], 4);
    for (int i = 0; i < kGroups; ++i) init(shared.dq_empty[i], 1);
    barrier_init_fence();
  }
  __syncthreads();

  // The first four warps are producers: copies, additions to dQ, mask bits. The others compute dK, dV and dQ.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp >= 4) {
    more_registers<kConsumerRegisters>();
    Consumer(problem, shared, kGroups == 1 ? 0 : warp / 4 - 1).run();
  } else {
    fewer_registers<kProducerRegisters>();
    if (warp == 0) produce(problem, shared);
    else if (warp <= kAdders) add(problem, shared, warp - 1);
    else compute_mask_bits(problem, shared, threadIdx.x - 32 * (1 + kAdders));
  }
}
