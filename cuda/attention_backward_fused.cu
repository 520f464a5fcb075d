// p[i, j] = exp(s[i, j] - lse[i])     ds[i, j] = p[i, j] (dO[i] . V[j] - delta[i])     s[i, j] = scale * Q[i] . K[j]
// dV[j] = sum_i p[i, j] dO[i]     dK[j] = scale * sum_i ds[i, j] Q[i]     dQ[i] = scale * sum_j ds[i, j] K[j]
// Gradients of attention by mma.sync in one pass of five products, on sm_80 and newer: 16-bit floats with contiguous
// columns, heads of 97 to 128 columns.
// A CTA claims tiles of 128 keys. K and V of a tile stay in shared memory, and tiles of 64 queries with their dO pass
// by, copied one turn ahead. dK and dV stay in registers, 128 of each thread. Weights and ds are rounded to 16 bits and
// pass through shared memory. dQ of a tile is added to float32 sums in global memory, in any order, 128 bytes of a warp
// at a time. The 8 warps share each product in parts of 32 x 32 or more, so that 144 ldmatrix serve 320 mma.sync, where
// two passes need 144 for 256: about 5,100 clocks of shared memory a turn beside 4,100 of the tensor cores.
#include "common/attention_backward_sm80.cuh"
#include "common/attention_backward_sm90.cuh"
#include "common/pipeline.cuh"

// Shared memory is what limits such a kernel, so a warp multiplies parts of 32 x 32 or more: 32 queries by 32 keys of
// the scores, then, with weights and ds of all warps in shared memory, 32 keys by half of the columns of dV and dK, and
// 32 queries by some of the columns of dQ.
// 0 x Inf is NaN, so something that is not finite also reaches rows that are not combined with it. Rows with a
// non-finite gradient are recomputed exactly by write_key, and by write_query in attention_backward_end.

constexpr int kColumnsOfKeys = kDim / 2;                        // of dK and dV of a warp, for 32 keys
constexpr int kColumnsOfQueries = kDim * 2 / kWarps;            // of dQ of a warp, for 32 queries
static_assert(VALUE_DIM == HEAD_DIM && kTileQ == 64 && kTileK == 16 * kWarps && kScores != kCapped, "");
static_assert(kColumnsOfQueries % 16 == 0 && kRole == kOfKeysAndValues, "whole fragments");

// A turn: the piece of its queries, whether all of them see all keys, whether no turn follows.
struct Fetched { i64 piece; int whole, last; };
struct Stage { u8 q[kTileQ * kDim * 2], dout[kTileQ * kDim * 2]; };
struct alignas(128) Shared {
  u8 k[kTileK * kDim * 2], v[kTileK * kDim * 2];
  u8 weights[kTileQ * kTileK * 2], ds[kTileQ * kTileK * 2];  // queries by keys
  Stage stages[2];
  f32 lse[kTileQ], delta[kTileQ];  // see place_of
  Fetched turns[2];
  KeyTile tile;
  int claimed;
  u32 redo[kWarps][2];             // keys with a gradient that is not finite, for each 16 keys
};

// ---------------------------------------------------------------------------------- products
// d[16 kM, 8 kN] += a * b over kK. The rows of the product are rows m, m + 1, .. of `a`, which have kWidthA elements, or
// its columns m, m + 1, .. if kTurnedA. The columns of the product are rows n, n + 1, .. of `b`, or its columns if
// kTurnedB.
template <bool kTurnedA, bool kTurnedB, int kWidthA, int kWidthB, int kK, int kM, int kN>
__device__ __forceinline__ void product(f32 (&d)[kM][kN][4], const u8* a, u32 m, const u8* b, u32 n) {
  using A = Lines<kWidthA>;
  using B = Lines<kWidthB>;
  const u32 lane = opaque(threadIdx.x) % 32, first = lane % 16, other = lane % 8 + lane / 16 * 8;
  const u32 second = lane / 16, other_second = lane / 8 % 2;
  const u32 from_a = shared_address(a) + (kTurnedA ? other : first + m) * A::kBytes;
  const u32 from_b = shared_address(b) + (kTurnedB ? first : other + n) * B::kBytes;
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    u32 x[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if constexpr (kTurnedA)
        load_matrices<true>(x[i], from_a + k * 16 * A::kBytes + A::place(m / 16 + i, other_second, other));
      else load_matrices<false>(x[i], from_a + i * 16 * A::kBytes + A::place(k, second, first));
    }
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) {
      u32 y[4];
      if constexpr (kTurnedB)
        load_matrices<true>(y, from_b + k * 16 * B::kBytes + B::place(n / 16 + j, second, first));
      else load_matrices<false>(y, from_b + j * 16 * B::kBytes + B::place(k, other_second, other));
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        multiply(d[i][2 * j], x[i], y[0], y[1]);
        multiply(d[i][2 * j + 1], x[i], y[2], y[3]);
      }
    }
  }
}
template <int kM, int kN> __device__ __forceinline__ void clear(f32 (&d)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) d[i][j][0] = d[i][j][1] = d[i][j][2] = d[i][j][3] = 0.f;
}

// ---------------------------------------------------------------------------------- copies
// Copies the statistics of a turn.
__device__ __forceinline__ void fetch_statistics(const BackwardRows& p, Shared& shared, i64 piece) {
  const u32 thread = opaque(threadIdx.x), four = thread % (kTileQ / 4) * 4;
  copy_16(thread < kTileQ / 4, shared_address(shared.lse + four), p.logarithms + piece * 64 + four, false);
  copy_16(thread / (kTileQ / 4) == 1, shared_address(shared.delta + four), p.deltas + piece * 64 + four, false);
}
// Copies the queries of a turn and their dO. Unless all see all, returns which of the warp's 32 keys a query sees: lane
// 4 g + t has the word of query 8 t + g of the warp's 32.
__device__ __forceinline__ u32 fetch(const BackwardRows& p, Walk& walk, Shared& shared, u32 n) {
  Stage& stage = shared.stages[n];
  const Turn turn = walk.next();
  const Backward& b = p.backward;
  const Attention& a = b.attention;
  const int batch = walk.batch();
  const i64 piece = (i64(batch) * a.heads + turn.head) * p.padded + piece_of(a, p.padded, walk.y.begin, turn.row);
  if (threadIdx.x == 0) shared.turns[n] = {piece, turn.whole, !walk.more()};
  Tile x = walk.y.tile;
  x.row = turn.row;
  Lines<kDim>::copy<kTileQ>(shared_address(stage.q), at(a.q, a.q_strides, batch, turn.head, turn.row), a.q_strides.row,
                            x.rows - turn.row, a.head_dim);
  Lines<kDim>::copy<kTileQ>(shared_address(stage.dout), at(b.dout, b.dout_strides, batch, turn.head, turn.row),
                            b.dout_strides.row, x.rows - turn.row, a.value_dim);
  if (turn.whole) return 0;
  const u32 thread = opaque(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int row = turn.row + int(warp % 2 * 32 + lane % 4 * 8 + lane / 4);
  return row < x.rows ? word_of(a, x, {turn.key, turn.part, 0}, row, warp / 2) : 0u;
}

// ---------------------------------------------------------------------------------- a warp
struct Multiplier {
  f32 dk[2][kColumnsOfKeys / 8][4], dv[2][kColumnsOfKeys / 8][4];

  static __device__ __forceinline__ u32 lane() { return opaque(threadIdx.x) % 32; }
  static __device__ __forceinline__ u32 warp() { return opaque(threadIdx.x) / 32; }

  __device__ __forceinline__ Multiplier() { clear(dk), clear(dv); }

  // Writes two neighbouring numbers of 16 bits in a row of weights or ds.
  static __device__ __forceinline__ void put(u8* to, u32 row, int eight, f32 x, f32 y) {
    using L = Lines<kTileK>;
    u8* at = to + row * L::kBytes + L::place(warp() / 2 * 2 + eight / 2, eight % 2, row) + lane() % 4 * 4;
    *reinterpret_cast<u32*>(at) = pack<Element>(x, y);
  }

  // Weights and ds of 32 queries and 32 keys.
  __device__ __forceinline__ void scores(const Attention& a, Shared& shared, u32 n, u32 words) {
    const Stage& stage = shared.stages[n];
    const u32 first = warp() % 2 * 32;
    f32 s[2][4][4], ds[2][4][4];
    clear(s);
    product<false, false, kDim, kDim, kDim>(s, stage.q, first, shared.k, warp() / 2 * 32);
    const bool whole = shared.turns[n].whole;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 row = first + 8 * i + lane() / 4;
      const f32 lse = shared.lse[place_of(row)];
      f32(&own)[4][4] = s[i / 2];
      const int e = i % 2 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        f32 slope;
        own[j][e] = weight_of(a, own[j][e], lse, slope);
        own[j][e + 1] = weight_of(a, own[j][e + 1], lse, slope);
      }
      if (!whole) {
        const u32 word = __shfl_sync(kAll, words, lane() / 4 * 4 + i) >> lane() % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          own[j][e] = word >> 8 * j & 1 ? own[j][e] : 0.f;
          own[j][e + 1] = word >> 8 * j & 2 ? own[j][e + 1] : 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) put(shared.weights, row, j, own[j][e], own[j][e + 1]);
    }
    clear(ds);
    product<false, false, kDim, kDim, kDim>(ds, stage.dout, first, shared.v, warp() / 2 * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 row = first + 8 * i + lane() / 4;
      const f32 delta = shared.delta[place_of(row)];
      const f32(&own)[4][4] = s[i / 2], (&dots)[4][4] = ds[i / 2];
      const int e = i % 2 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        put(shared.ds, row, j, own[j][e] * (dots[j][e] - delta), own[j][e + 1] * (dots[j][e + 1] - delta));
    }
  }

  // Adds what the weights and ds of all warps give to dV, dK and dQ.
  __device__ __forceinline__ void sums(const BackwardRows& p, const Shared& shared, u32 n) {
    const Stage& stage = shared.stages[n];
    const u32 keys = warp() / 2 * 32, columns = warp() % 2 * kColumnsOfKeys;
    product<true, true, kTileK, kDim, kTileQ>(dv, shared.weights, keys, stage.dout, columns);
    product<true, true, kTileK, kDim, kTileQ>(dk, shared.ds, keys, stage.q, columns);
    const u32 part = warp() % 2, column = warp() / 2 * kColumnsOfQueries;
    f32 dq[2][kColumnsOfQueries / 8][4];
    clear(dq);
    product<false, true, kTileK, kDim, kTileK>(dq, shared.ds, part * 32, shared.k, column);
    // Each number of a fragment has its line of 32 lanes, so that a warp adds to 128 bytes at a time.
    f32* to = p.sums + shared.turns[n].piece * kSumsOfPiece + column / 8 * 512 + part * 256 + lane();
#pragma unroll
    for (int j = 0; j < kColumnsOfQueries / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) atomicAdd(to + j * 512 + i * 128 + e * 32, dq[i][j][e]);
  }

  // -------------------------------------------------------------------------------- the result
  __device__ __forceinline__ void finish(const BackwardRows& p, const Walk& walk, Shared& shared) const {
    const Backward& b = p.backward;
    const Attention& a = b.attention;
    const KeyTile& y = walk.y;
    const u32 pair = warp() / 2, half = warp() % 2;
    const int columns = half * kColumnsOfKeys, batch = walk.batch(), head = walk.own_head();
    u8* staged = shared.weights + warp() * (16 * kColumnsOfKeys * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = y.key + int(pair) * 32 + 16 * i, rows = y.tile.keys - key;
      u32 redo = write_rows<kColumnsOfKeys>(
          dk[i], b.factor, staged, at(b.dk, b.dk_strides, batch, head, key) + columns * b.dk_strides.column,
          b.dk_strides, rows, a.head_dim - columns);
      __syncwarp();
      redo |= write_rows<kColumnsOfKeys>(
          dv[i], 1.f, staged, at(b.dv, b.dv_strides, batch, head, key) + columns * b.dv_strides.column, b.dv_strides,
          rows, a.value_dim - columns);
      __syncwarp();
      if (lane() == 0) shared.redo[warp()][i] = redo;
    }
    __syncthreads();
    u32 redo = shared.redo[2 * pair][half] | shared.redo[2 * pair + 1][half];
#pragma unroll 1
    for (; redo; redo &= redo - 1) {
      const auto statistic = [&](int head, int row) {
        const i64 number = (i64(batch) * a.heads + head) * p.padded + piece_of(a, p.padded, y.begin, row);
        const int place = place_of((row - y.begin) % 64);
        return Statistic{p.logarithms[number * 64 + place], p.deltas[number * 64 + place]};
      };
      write_key(b, y, y.key + int(pair * 32 + half * 16) + __ffs(redo) - 1, statistic);
    }
  }
};

// ---------------------------------------------------------------------------------- the kernel
// Computes the gradients of one tile of keys. There are two barriers in a turn: before the scores, when the queries are
// there and nobody reads weights and ds any more, and after them.
__device__ __forceinline__ void run(const BackwardRows& p, Shared& shared) {
  const Attention& a = p.backward.attention;
  Walk walk(a, shared.tile);
  Multiplier multiplier;
  if (walk.more()) {
    const int row = walk.first_row(), rows = walk.end() - row, batch = walk.batch(), head = walk.own_head();
    Lines<kDim>::copy<kTileK>(shared_address(shared.k), at(a.k, a.k_strides, batch, head, row), a.k_strides.row, rows,
                              a.head_dim);
    Lines<kDim>::copy<kTileK>(shared_address(shared.v), at(a.v, a.v_strides, batch, head, row), a.v_strides.row, rows,
                              a.value_dim);
    u32 next = fetch(p, walk, shared, 0), n = 0;
    __syncthreads();  // the turn is described
    fetch_statistics(p, shared, shared.turns[0].piece);
    copy_commit();
#pragma unroll 1
    for (;; n ^= 1) {
      copy_wait<0>();
      __syncthreads();
      const u32 words = next;
      if (walk.more()) {
        next = fetch(p, walk, shared, n ^ 1);
        copy_commit();
      }
      multiplier.scores(a, shared, n, words);
      __syncthreads();
      const bool last = shared.turns[n].last;
      if (!last) {
        fetch_statistics(p, shared, shared.turns[n ^ 1].piece);
        copy_commit();
      }
      multiplier.sums(p, shared, n);
      if (last) break;
    }
  }
  __syncthreads();  // nobody reads weights any more
  multiplier.finish(p, walk, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
attention_backward_fused(const __grid_constant__ BackwardRows p) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Attention& a = p.backward.attention;
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) shared.claimed = atomicAdd(a.counters, 1);
    __syncthreads();
    const KeyTile found = key_tile_at(a, shared.claimed);
    if (found.tile.head < 0) break;
    if (threadIdx.x == 0) shared.tile = found;
    __syncthreads();
    run(p, shared);
    __syncthreads();
  }
  if (threadIdx.x == 0) leave_counters(a.counters);
}
