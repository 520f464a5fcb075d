// p[i, j] = exp(s[i, j] - lse[i])     ds[i, j] = p[i, j] (dO[i] . V[j] - delta[i])     s[i, j] = scale * Q[i] . K[j]
// dV[j] = sum_i p[i, j] dO[i]     dK[j] = scale * sum_i ds[i, j] Q[i]     dQ[i] = scale * sum_j ds[i, j] K[j]
// Gradients of attention by mma.sync, on sm_80 and newer: dQ in one launch, dK and dV in another; beyond 128 columns
// their accumulators do not fit 255 registers together, and each has a launch. Operands are 16-bit floats with
// contiguous columns.
// A CTA has one tile of rows, which are queries or keys, a warp 16 of them. Tiles of what they are combined with, the
// other of queries and keys, pass through shared memory and are copied one turn ahead. Weights and ds stay in
// registers, in the layout in which a warp multiplies them next, because rows are queries for dQ and keys for dK and
// dV. The price is seven products instead of five; in return each sum is made by one warp in one order. Shared memory
// is the limit: 144 ldmatrix for 256 mma.sync, 4,608 clocks beside 3,226 of the tensor cores at 128 columns.
#include "common/attention_backward_sm80.cuh"

// Both kinds of rows do the same. Queries with K and V, or keys with Q and dO, are called "left" and "right" here:
//   score = left row . left column, product = right row . right column
//   sums += ds * left columns (dQ or dK), values += weight * right columns (dV)
// Weights and ds are in registers in the layout in which a warp multiplies them, because rows are queries for dQ and
// keys for dK and dV. Each sum is made by one warp in one order: results repeat bit by bit.
// 0 x Inf is NaN, so something that is not finite also reaches rows that are not combined with it. Rows with a
// non-finite gradient are recomputed exactly by write_query or write_key.

constexpr int kStages = STAGES;
constexpr int kRows = kByKeys ? kTileK : kTileQ;      // rows of a CTA
constexpr int kColumns = kByKeys ? kTileQ : kTileK;   // columns of a turn
constexpr bool kHasSums = kRole != kOfValues, kHasValues = kRole == kOfKeysAndValues || kRole == kOfValues;
static_assert(kRows == 16 * kWarps && kColumns % 32 == 0 && kTileK % 32 == 0, "whole fragments and words");
static_assert(kStages == 1 || kStages == 2, "at most one turn ahead");

struct alignas(128) Stage {
  u8 left[kColumns * kHeadDim * 2], right[kColumns * kValueDim * 2];
  alignas(8) f32 lse[kByKeys ? kColumns : 2], delta[kByKeys ? kColumns : 2];
  u32 words[kTileQ * kWords];  // unless all see all: which keys each query sees
  int whole, last;             // whether all queries see all keys, and whether no turn follows
};
struct alignas(128) Shared {
  u8 left[kRows * kHeadDim * 2], right[kRows * kValueDim * 2];  // the rows, then the results before they are stored
  Stage stages[kStages];
  KeyTile tile;                                                 // of queries, only tile.tile is set
};

// d = rows * columns: 16 rows from `rows` on with all columns, both kDim long.
template <int kDim>
__device__ __forceinline__ void products(f32 (&d)[kColumns / 8][4], u32 rows, u32 columns) {
  using L = Lines<kDim>;
  const u32 lane = opaque(threadIdx.x) % 32, row = lane % 16, column = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    u32 x[4];
    load_matrices<false>(x, rows + row * L::kBytes + L::place(step, lane / 16, row));
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      u32 y[4];  // columns 0 to 7, both halves of 16 elements; columns 8 to 15
      load_matrices<false>(y, columns + (j * 16 + column) * L::kBytes + L::place(step, lane / 8 % 2, column));
      multiply(d[2 * j], x, y[0], y[1]);
      multiply(d[2 * j + 1], x, y[2], y[3]);
    }
  }
}

// sums += weights * columns: 16 rows of weights, rounded to 16 bits.
template <int kDim>
__device__ __forceinline__ void accumulate(f32 (&accum)[kDim / 8][4], const f32 (&weights)[kColumns / 8][4], u32 columns) {
  using L = Lines<kDim>;
  const u32 lane = opaque(threadIdx.x) % 32, row = lane % 16;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const f32(&w)[4] = weights[2 * step + i / 2];
      x[i] = pack<Element>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      u32 y[4];  // dimensions 0 to 7, columns 0 to 7 and 8 to 15; dimensions 8 to 15
      load_matrices<true>(y, columns + (step * 16 + row) * L::kBytes + L::place(j, lane / 16, row));
      multiply(accum[2 * j], x, y[0], y[1]);
      multiply(accum[2 * j + 1], x, y[2], y[3]);
    }
  }
}

// Copies what a turn needs; the words of a mask are computed.
__device__ __forceinline__ void fetch(const Backward& b, Walk& walk, Stage& stage) {
  const Turn turn = walk.next();
  if (threadIdx.x == 0) {
    stage.whole = turn.whole;
    stage.last = !walk.more();
  }
  const Attention& a = b.attention;
  const int batch = walk.batch();
  Tile x = walk.y.tile;
  x.row = turn.row;
  if constexpr (kByKeys) {
    Lines<kHeadDim>::copy<kColumns>(shared_address(stage.left), at(a.q, a.q_strides, batch, turn.head, turn.row),
                                    a.q_strides.row, x.rows - turn.row, a.head_dim);
    Lines<kValueDim>::copy<kColumns>(shared_address(stage.right),
                                     at(b.dout, b.dout_strides, batch, turn.head, turn.row), b.dout_strides.row,
                                     x.rows - turn.row, a.value_dim);
    for (int i = threadIdx.x; i < kColumns; i += kThreads) {
      Statistic found = {__int_as_float(0x7f800000), 0.f};
      if (turn.row + i < x.rows) found = statistics_of(b, batch, turn.head)[turn.row + i];
      stage.lse[i] = found.lse;
      stage.delta[i] = found.delta;
    }
  } else {
    const int kv_head = turn.head / a.group;
    Lines<kHeadDim>::copy<kColumns>(shared_address(stage.left), at(a.k, a.k_strides, batch, kv_head, turn.key),
                                    a.k_strides.row, x.keys - turn.key, a.head_dim);
    Lines<kValueDim>::copy<kColumns>(shared_address(stage.right), at(a.v, a.v_strides, batch, kv_head, turn.key),
                                     a.v_strides.row, x.keys - turn.key, a.value_dim);
  }
  if (turn.whole) return;
  const Entry entry = {turn.key, turn.part, 0};
  for (int i = threadIdx.x; i < kTileQ * kWords; i += kThreads) {
    const int row = turn.row + i / kWords;
    stage.words[i] = row < x.rows ? word_of(a, x, entry, row, i % kWords) : 0u;
  }
}

// ---------------------------------------------------------------------------------- a warp's rows
struct Multiplier {
  f32 accum[kHeadDim / 8][4], values[kValueDim / 8][4];  // those that the role does not have take no registers
  Statistic own[2];  // for queries: of rows lane / 4 and 8 + lane / 4

  static __device__ __forceinline__ u32 lane() { return opaque(threadIdx.x) % 32; }
  static __device__ __forceinline__ u32 first_row() { return threadIdx.x / 32 * 16; }

  __device__ __forceinline__ Multiplier() {
#pragma unroll
    for (auto& x : accum) x[0] = x[1] = x[2] = x[3] = 0.f;
#pragma unroll
    for (auto& x : values) x[0] = x[1] = x[2] = x[3] = 0.f;
  }

  __device__ __forceinline__ void turn(const Attention& a, Shared& shared, Stage& stage) {
    f32 weights[kColumns / 8][4];
    products<kHeadDim>(weights, shared_address(shared.left) + first_row() * kHeadDim * 2, shared_address(stage.left));
    f32 slopes[kColumns / 8][4];
    weigh(a, weights, slopes, stage);
    if (!stage.whole) hide(weights, stage);
    if constexpr (kHasValues) accumulate<kValueDim>(values, weights, shared_address(stage.right));
    if constexpr (kHasSums) {
      f32 ds[kColumns / 8][4];
      products<kValueDim>(ds, shared_address(shared.right) + first_row() * kValueDim * 2, shared_address(stage.right));
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 deltas = kByKeys ? pair(stage.delta, j) : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const f32 delta = kByKeys ? (i % 2 ? deltas.y : deltas.x) : own[i / 2].delta;
          f32 x = weights[j][i] * (ds[j][i] - delta);
          if constexpr (kScores == kCapped) x *= slopes[j][i];
          ds[j][i] = x;
        }
      }
      accumulate<kHeadDim>(accum, ds, shared_address(stage.left));
    }
  }

  // The two numbers of the columns of 8 that this thread has.
  __device__ __forceinline__ float2 pair(const f32* numbers, int eight) const {
    return *reinterpret_cast<const float2*>(numbers + eight * 8 + lane() % 4 * 2);
  }

  __device__ __forceinline__ void weigh(const Attention& a, f32 (&s)[kColumns / 8][4],
                                        f32 (&slopes)[kColumns / 8][4], const Stage& stage) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 logarithms = kByKeys ? pair(stage.lse, j) : make_float2(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f32 slope;
        s[j][i] = weight_of(a, s[j][i], kByKeys ? (i % 2 ? logarithms.y : logarithms.x) : own[i / 2].lse, slope);
        if constexpr (kScores == kCapped && kHasSums) slopes[j][i] = slope;
      }
    }
  }

  // Sets to 0 what belongs to keys that are not seen.
  __device__ __forceinline__ void hide(f32 (&x)[kColumns / 8][4], const Stage& stage) const {
    const u32 row = first_row() + lane() / 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const u32 column = j * 8 + lane() % 4 * 2;
      asm volatile("" ::: "memory");  // the next words are loaded only when they are needed, to save registers
      if constexpr (kByKeys) {  // a warp's 16 keys are in one word
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 word = stage.words[(column + i) * kWords + first_row() / 32] >> row % 32;
          x[j][i] = word & 1 ? x[j][i] : 0.f;
          x[j][2 + i] = word >> 8 & 1 ? x[j][2 + i] : 0.f;
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 word = stage.words[(row + half * 8) * kWords + j / 4] >> column % 32;
          x[j][2 * half] = word & 1 ? x[j][2 * half] : 0.f;
          x[j][2 * half + 1] = word & 2 ? x[j][2 * half + 1] : 0.f;
        }
      }
    }
  }

  // -------------------------------------------------------------------------------- the result
  __device__ __forceinline__ void finish(const Backward& b, const Walk& walk, Shared& shared) const {
    const Attention& a = b.attention;
    const int row = walk.first_row() + int(first_row()), rows = walk.end() - row, batch = walk.batch();
    const int head = walk.own_head();
    u32 redo = 0;
    __syncwarp();
    if constexpr (kHasSums) {
      Element* out = kByKeys ? at(b.dk, b.dk_strides, batch, head, row) : at(b.dq, b.dq_strides, batch, head, row);
      redo |= write_rows<kHeadDim>(accum, b.factor, shared.left + first_row() * kHeadDim * 2, out,
                                   kByKeys ? b.dk_strides : b.dq_strides, rows, a.head_dim);
    }
    if constexpr (kHasValues)
      redo |= write_rows<kValueDim>(values, 1.f, shared.right + first_row() * kValueDim * 2,
                                    at(b.dv, b.dv_strides, batch, head, row), b.dv_strides, rows, a.value_dim);
    __syncwarp();
#pragma unroll 1
    for (; redo; redo &= redo - 1) {
      if constexpr (kByKeys) write_key(b, walk.y, row + __ffs(redo) - 1);
      else write_query(b, walk.y.tile, row + __ffs(redo) - 1);
    }
  }
};

// ---------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, CTAS)
attention_backward_sm80(const __grid_constant__ Backward b) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Attention& a = b.attention;
  {
    KeyTile found = {};
    if constexpr (kByKeys) found = key_tile_at(a, blockIdx.x);
    else found.tile = tile_at(a, blockIdx.x);
    if (found.tile.head < 0) return;
    if (threadIdx.x == 0) shared.tile = found;
    __syncthreads();
  }
  Walk walk(a, shared.tile);
  const int row = walk.first_row(), rows = walk.end() - row, batch = walk.batch(), head = walk.own_head();
  Multiplier multiplier;
  if (walk.more()) {
    if constexpr (kByKeys) {
      Lines<kHeadDim>::copy<kRows>(shared_address(shared.left), at(a.k, a.k_strides, batch, head, row),
                                   a.k_strides.row, rows, a.head_dim);
      if constexpr (kHasSums)
        Lines<kValueDim>::copy<kRows>(shared_address(shared.right), at(a.v, a.v_strides, batch, head, row),
                                      a.v_strides.row, rows, a.value_dim);
    } else {
      Lines<kHeadDim>::copy<kRows>(shared_address(shared.left), at(a.q, a.q_strides, batch, head, row),
                                   a.q_strides.row, rows, a.head_dim);
      Lines<kValueDim>::copy<kRows>(shared_address(shared.right), at(b.dout, b.dout_strides, batch, head, row),
                                    b.dout_strides.row, rows, a.value_dim);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = int(Multiplier::first_row() + half * 8 + Multiplier::lane() / 4);
        const Statistic none = {__int_as_float(0x7f800000), 0.f};
        multiplier.own[half] = own < rows ? statistics_of(b, batch, head)[row + own] : none;
      }
    }
    fetch(b, walk, shared.stages[0]);
    copy_commit();
    u32 stage = 0;
#pragma unroll 1
    for (;;) {
      copy_wait<0>();
      __syncthreads();  // the turn is there, and all warps are done with the one before
      if (kStages == 2 && walk.more()) {
        fetch(b, walk, shared.stages[stage ^ 1]);
        copy_commit();
      }
      multiplier.turn(a, shared, shared.stages[stage]);
      if (shared.stages[stage].last) break;
      if (kStages == 2) {
        stage ^= 1;
      } else {
        __syncthreads();
        fetch(b, walk, shared.stages[0]);
        copy_commit();
      }
    }
  }
  multiplier.finish(b, walk, shared);
}
