// dQ[i] = scale * sum_j ds[i, j] K[j]     p[i, j] = exp(scale * Q[i] . K[j] - lse[i])
// ds[i, j] = p[i, j] (dO[i] . V[j] - delta[i])     delta[i] = dO[i] . O[i] - dlse[i]
// dQ of attention on Hopper's tensor cores (sm_90a) for heads of 129 to 256 columns, by three products. Operands are
// 16-bit floats.
// A CTA has 128 queries, whose Q and dO stay in shared memory, and tiles of 64 keys with their V pass by. A warpgroup
// has 64 of the queries, and the two never wait for each other. Queries are the rows of all three products, so that ds
// and the accumulators stay in registers. There are two slots of K, which the first and the last product of a turn
// read, and one of V: 225 KB with 256 columns.
#include "common/attention_backward_turns.cuh"
#include "ptx/wgmma.cuh"

constexpr int kThreads = 384;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;  // of a thread, 168 on average
constexpr int kScoresOfThread = 32, kParts = 4;           // scores of a thread; steps of 16 keys
static_assert(VALUE_DIM == HEAD_DIM && (kDim == 192 || kDim == 256) && kTileK == 64 && kTileQ == 128, "");

struct alignas(1024) Shared {
  u8 q[kSlabs * kSlabQ], dout[kSlabs * kSlabQ];           // at the end dQ before it is stored
  u8 k[kSlots][kSlabs * kSlabK], v[kSlabs * kSlabK];
  u64 q_full, dout_full, k_full[kSlots], k_empty[kSlots], v_full, v_empty;
  Entry entries[kSlots];
  Tile tile;
};

// Has the operands copied. One thread calls it.
__device__ __forceinline__ void produce(const BackwardSm90& problem, Shared& shared, const Tile& x) {
  const Attention& a = problem.rows.backward.attention;
  const u32 q_full = shared_address(&shared.q_full), dout_full = shared_address(&shared.dout_full);
  const int head = x.head / a.group;
  barrier_expect(q_full, kSlabs * kSlabQ);
  copy_slabs(shared.q, kSlabQ, problem.q, x.row, x.head, x.batch, q_full);
  for (u32 n = 0; n < u32(x.last - x.first); ++n) {
    const u32 slot = n % kSlots;
    const Entry entry = entry_at(a, x, column_of(a, x.first + n), part_of(a, x.first + n));
    wait(shared.k_empty[slot], parity<kSlots>(n) ^ 1);
    shared.entries[slot] = entry;
    const u32 keys = shared_address(&shared.k_full[slot]), values = shared_address(&shared.v_full);
    barrier_expect(keys, kSlabs * kSlabK);
    copy_slabs(shared.k[slot], kSlabK, problem.k, entry.key, head, x.batch, keys);
    if (n == 0) {
      barrier_expect(dout_full, kSlabs * kSlabQ);
      copy_slabs(shared.dout, kSlabQ, problem.dout, x.row, x.head, x.batch, dout_full);
    }
    wait(shared.v_empty, (n & 1) ^ 1);
    barrier_expect(values, kSlabs * kSlabK);
    copy_slabs(shared.v, kSlabK, problem.v, entry.key, head, x.batch, values);
  }
}

struct Consumer : Member {
  const BackwardSm90& problem;
  Shared& shared;
  const Tile& x;
  const int group;          // warpgroup
  f32 dq[kDim / 2];
  Statistic own[2];         // of the two queries of a thread

  // The number of a thread comes through a shuffle: otherwise the compiler reads it again in the loop.
  __device__ __forceinline__ Consumer(const BackwardSm90& problem, Shared& shared, const Tile& x, int group)
      : Member{int(__shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32) % 128)}, problem(problem), shared(shared),
        x(x), group(group) {}

  __device__ __forceinline__ const Backward& b() const { return problem.rows.backward; }
  __device__ __forceinline__ int row() const { return x.row + group * 64 + warp() * 16; }  // the first of the warp

  // The statistics of a query. Pieces are numbered for tiles of 64 queries.
  __device__ __forceinline__ Statistic statistic_of(int row) const {
    const BackwardRows& p = problem.rows;
    const Attention& a = b().attention;
    if (row >= x.rows) return {__int_as_float(0x7f800000), 0.f};
    int begin = 0, piece = row / 64;
    if (a.q_bounds) {
      const int sequence = sequence_of(a, x.row);
      begin = clamp(a.q_bounds[sequence], 0, x.row);
      piece = min((begin + 63) / 64 + sequence + (row - begin) / 64, p.padded - 1);
    }
    const i64 number = (i64(x.batch) * a.heads + x.head) * p.padded + piece;
    const int place = place_of((row - begin) % 64);
    return {p.logarithms[number * 64 + place], p.deltas[number * 64 + place]};
  }

  // d[64 queries, 64 keys] = rows of q or dO times columns of k or v
  __device__ __forceinline__ void issue_scores(f32 (&d)[kScoresOfThread], const u8* rows, const u8* columns) {
    const u64 left = wgmma_descriptor(shared_address(rows) + group * 8192, 16, 1024);
    const u64 right = wgmma_descriptor(shared_address(columns), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<false, false>(d, step > 0, left + (step / 4 * kSlabQ + step % 4 * 32) / 16,
                          right + (step / 4 * kSlabK + step % 4 * 32) / 16);
    wgmma_commit();
  }
  // dq[64 queries, kDim] += ds[64 queries, keys] * rows[keys, kDim]
  __device__ __forceinline__ void issue_accum(const u32 (&ds)[kParts][4], const u8* rows) {
    const u64 y = wgmma_descriptor(shared_address(rows), kSlabK, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kParts; ++step) wgmma<true>(dq, true, ds[step], y + step * 2048 / 16);
    wgmma_commit();
  }

  // Sets to 0 the weights of keys that a query does not see. Each of four lanes looks up one of four words.
  __device__ __forceinline__ void hide(f32 (&s)[kScoresOfThread], const Entry& entry) const {
    const int c = lane() % 4, query = row() + lane() / 4 + c / 2 * 8;
    const u32 word = query < x.rows ? word_of(b().attention, x, entry, query, c % 2) : 0u;
    u32 words[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = __shfl_sync(0xffffffffu, word, lane() / 4 * 4 + i) >> 2 * c;
#pragma unroll
    for (int i = 0; i < kScoresOfThread; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (!(words[i / 2 % 2][column / 32] >> column % 32 & 1)) s[i] = 0.f;
    }
  }

  __device__ __forceinline__ void run() {
    const Attention& a = b().attention;
    const int count = x.last - x.first;
    clear(dq);
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = statistic_of(row() + lane() / 4 + 8 * i);
    wait(shared.q_full, 0);
    if (count > 0) wait(shared.dout_full, 0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const u32 slot = n % kSlots;
      f32 s[kScoresOfThread], dp[kScoresOfThread];
      u32 ds[kParts][4];
      wait(shared.k_full[slot], parity<kSlots>(n));
      const int whole = uniform(shared.entries[slot].whole);
      issue_scores(s, shared.q, shared.k[slot]);
      wait(shared.v_full, n & 1);
      issue_scores(dp, shared.dout, shared.v);
      wgmma_wait<1>();
      settle(s);
      settle(dq);  // of the turn before
      if (n > 0) release(shared.k_empty[slot ^ 1]);
#pragma unroll
      for (int i = 0; i < kScoresOfThread; ++i) {
        f32 slope;
        s[i] = weight_of(a, s[i], own[i / 2 % 2].lse, slope);
        if constexpr (kScores == kCapped) s[i] *= slope;
      }
      if (!whole) hide(s, shared.entries[slot]);
      wgmma_wait<0>();
      settle(dp);
      release(shared.v_empty);
#pragma unroll
      for (int j = 0; j < kScoresOfThread / 2; ++j) {
        const f32 delta = own[j % 2].delta;
        ds[j / 4][j % 4] = pack<Element>(s[2 * j] * (dp[2 * j] - delta), s[2 * j + 1] * (dp[2 * j + 1] - delta));
      }
      issue_accum(ds, shared.k[slot]);
    }
    wgmma_wait<0>();
    settle(dq);
    warpgroup_sync(1 + group);  // nobody reads the rows of this warpgroup any more
    u32 redo = write_rows(dq, b().factor, shared.q + (group * 64 + warp() * 16) * 128,
                          at(b().dq, b().dq_strides, x.batch, x.head, row()), b().dq_strides, x.rows - row(),
                          b().attention.head_dim);
#pragma unroll 1
    for (; redo; redo &= redo - 1) {
      const int query = row() + __ffs(redo) - 1;
      write_query(b(), x, query, statistic_of(query));
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_queries_sm90(const __grid_constant__ BackwardSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == 0) {
    const Tile found = tile_at(problem.rows.backward.attention, blockIdx.x);
    if (threadIdx.x == 0) shared.tile = found;
  }
  if (threadIdx.x == 0) {
    const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
    init(shared.q_full, 1), init(shared.dout_full, 1), init(shared.v_full, 1), init(shared.v_empty, 8);
    for (int i = 0; i < kSlots; ++i) init(shared.k_full[i], 1), init(shared.k_empty[i], 8);
    barrier_init_fence();
  }
  __syncthreads();
  const Tile& tile = shared.tile;
  if (tile.head < 0 || tile.row >= tile.rows) return;
  if (warp >= 4) {
    more_registers<kConsumerRegisters>();
    Consumer(problem, shared, tile, warp / 4 - 1).run();
  } else {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(problem, shared, tile);
  }
}
