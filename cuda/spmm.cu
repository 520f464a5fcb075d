// C[i*R + r, n] = alpha * sum_p sum_k A[p, r, k] * B[col[p]*K + k, n] + beta * C[i*R + r, n],  p in block row i
// Blocks of up to 16 x 16 by few columns, on the CUDA cores. A warp has one block row: kLanes neighbouring lanes
// have kWidth columns each, and the 32 / kLanes groups of lanes take blocks in turn. A lane keeps the accumulators of
// all rows of the block for its columns, so that each element of B that it reads serves R products. Groups are added in
// one fixed tree.
// Blocks are read straight from memory, or come through shared memory (kStaged: float32 and float64, all of it aligned
// and row-major): each warp has two stages of kChunk blocks and their columns, copied by cp.async one chunk ahead, with
// no barrier but __syncwarp. The L1 is then left to B, which is the limit. One CTA stays on each multiprocessor, whose
// rows are neighbours and find in the L1 what others have read of B.
#include "common/chunks.cuh"
#include "common/elements.cuh"
#include "common/registers.cuh"
#include "common/stream.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

// kStaged: blocks and their columns are copied through shared memory (sm_80; A, B and C aligned and row-major). If each
// group of lanes reads them from global memory, they load the L1 more than B does. With kStaged the warps of a CTA have
// neighbouring rows, which share rows of B in the L1: more warps and less shared memory increase that effect.

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kLanes = LANES, kGroups = 32 / kLanes;  // neighbouring lanes, and groups of them in a warp
constexpr int kWidth = WIDTH;                         // columns of a lane; several are contiguous in B and aligned
constexpr int kTogether = TOGETHER;                   // blocks of a lane that are loaded at the same time
constexpr bool kTransposed = A_TRANSPOSED;            // stored blocks are K x R
constexpr bool kStaged = CHUNK > 0;
constexpr int kChunk = kStaged ? CHUNK : 1, kStages = 2;  // blocks copied at a time, and chunks of a warp
constexpr int kCtas = CTAS;  // CTAs that share a multiprocessor; fewer leave a thread more registers
constexpr int kThreads = THREADS, kWarps = kThreads / 32;
// The number of rows of B at a block that are loaded before the first of them is used.
constexpr int kDeep = kK <= 4 ? kK : kK % 4 == 0 ? 4 : kK % 3 == 0 ? 3 : kK % 5 == 0 ? 5 : kK % 7 == 0 ? 7 : kK % 2 == 0 ? 2 : 1;
static_assert(32 % kLanes == 0 && kK % kDeep == 0, "whole groups and steps");
static_assert(!kStaged || !kTransposed, "chunks are blocks in the order in which they are stored");

struct alignas(kWidth * sizeof(B)) Piece { B values[kWidth]; };
struct alignas(kWidth * sizeof(C)) Result { C values[kWidth]; };

__device__ __forceinline__ void clear(Acc (&acc)[kR][kWidth]) {
#pragma unroll
  for (int r = 0; r < kR; ++r)
#pragma unroll
    for (int w = 0; w < kWidth; ++w) acc[r][w] = zero<Acc>();
}
// Every group of lanes gets the sum over all groups.
__device__ __forceinline__ void add_groups(Acc (&acc)[kR][kWidth]) {
#pragma unroll
  for (int apart = 16; apart >= kLanes; apart /= 2)
#pragma unroll
    for (int r = 0; r < kR; ++r)
#pragma unroll
      for (int w = 0; w < kWidth; ++w) acc[r][w] = add(acc[r][w], shuffle_xor(acc[r][w], apart));
}
// Multiplies kRows rows of a block from r0 on, kDeep columns of it, by a lane's columns of B.
template <int kRows>
__device__ __forceinline__ void multiply(Acc (&acc)[kR][kWidth], int r0, const A (&values)[kRows][kDeep],
                                         const Piece (&x)[kDeep]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
#pragma unroll
      for (int w = 0; w < kWidth; ++w)
        acc[r0 + r][w] = multiply_add(load<Acc>(values[r][k]), load<Acc>(x[k].values[w]), acc[r0 + r][w]);
}

// ---------------------------------------------------------------------------------- blocks directly from global memory
// The number of rows of a block whose values are in registers at the same time.
__device__ constexpr int rows_at_once() {
  int rows = 1;
  while (2 * rows <= kR && kR % (2 * rows) == 0 && 2 * rows * kDeep * sizeof(Acc) <= 128) rows *= 2;
  return kR * kDeep * sizeof(Acc) <= 128 ? kR : rows;
}
constexpr int kRowsAtOnce = rows_at_once();

// The sums of a lane over its blocks of row i. `b` is B at the lane's first column; `mine` is whether that column
// exists.
__device__ __forceinline__ void sum_row(const Problem& problem, i64 i, int group, const B* __restrict__ b, bool mine,
                                        Acc (&acc)[kR][kWidth]) {
  const Range row = blocks_of_row(problem.indptr, i, problem.blocks);
  i64 p0 = row.first + group;
  const auto place = [&](i64 p, int u) {  // after the last block it is the last one, whose product is not used
    p += u * kGroups;
    return p < row.last ? p : row.last - 1;
  };
  Index column[kTogether];
#pragma unroll
  for (int u = 0; u < kTogether; ++u) column[u] = p0 < row.last ? streamed(problem.indices + place(p0, u)) : Index(0);
  for (; p0 < row.last; p0 += kGroups * kTogether) {
    bool there[kTogether];
    const B* panel[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const bool inside = in_range(column[u], problem.block_cols);
      there[u] = mine && inside && p0 + u * kGroups < row.last;
      panel[u] = b + (inside ? i64(column[u]) * kK * problem.b_row : 0);
      const i64 next = p0 + kGroups * kTogether;
      column[u] = streamed(problem.indices + place(next, u));  // for the next round
    }
#pragma unroll 1
    for (int k0 = 0; k0 < kK; k0 += kDeep) {
      Piece x[kTogether][kDeep];
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
#pragma unroll
        for (int k = 0; k < kDeep; ++k)
          x[u][k] = *reinterpret_cast<const Piece*>(panel[u] + (k0 + k) * problem.b_row);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const i64 p = place(p0, u);
        const A* __restrict__ block = problem.data + (kTransposed ? i64(problem.places[p]) : p) * (kR * kK) +
                                      k0 * (kTransposed ? kR : 1);
#pragma unroll
        for (int r0 = 0; r0 < kR; r0 += kRowsAtOnce) {
          A values[kRowsAtOnce][kDeep];
#pragma unroll
          for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
            for (int k = 0; k < kDeep; ++k)
              values[r][k] = streamed(block + (kTransposed ? k * kR + r0 + r : (r0 + r) * kK + k));
          if (!there[u]) continue;
          multiply(acc, r0, values, x[u]);
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------- blocks through shared memory
using Stage = Chunk<Index, kR * kK * int(sizeof(A)), kChunk, kChunk>;
constexpr int kRowAlign = alignment_of(kK * sizeof(A)), kPartAlign = alignment_of(kDeep * sizeof(A));
constexpr int kAlign = kRowAlign < kPartAlign ? kRowAlign : kPartAlign;

// The sums of a lane over `count` blocks of a stage. `b` is B at the lane's first column, `line` is the number of bytes
// from a row of B to the next, `panel_bytes` from a block of rows to the next.
__device__ __forceinline__ void sum_stage(const Stage& stage, const A* blocks, int count, int group, const u8* b, i64 line,
                                          i64 panel_bytes, const Within<Index>& columns, Acc (&acc)[kR][kWidth]) {
#pragma unroll 1
  for (int q0 = group; q0 < count; q0 += kGroups * kTogether) {
    bool there[kTogether];
    const u8* panel[kTogether];
    const A* block[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int q = u == 0 || q0 + u * kGroups < count ? q0 + u * kGroups : q0;
      const Index column = stage.columns[q];
      there[u] = columns.has(column);
      panel[u] = b + (there[u] ? column * panel_bytes : 0);
      block[u] = blocks + q * (kR * kK);
      if (q != q0 + u * kGroups) there[u] = false;
    }
#pragma unroll 1
    for (int k0 = 0; k0 < kK; k0 += kDeep) {
      Piece x[kTogether][kDeep];
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
#pragma unroll
        for (int k = 0; k < kDeep; ++k, panel[u] += line) x[u][k] = read_global<Piece>(panel[u]);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (!there[u]) continue;
#pragma unroll
        for (int r = 0; r < kR; ++r) {
          A values[1][kDeep];
          read_together<kAlign>(values[0], block[u] + r * kK + k0);
          multiply(acc, r, values, x[u]);
        }
      }
    }
  }
}

// Each group of lanes stores every kGroups-th row of a block.
__device__ __forceinline__ void store_rows(const Problem& problem, C* corner, int group, const Acc (&acc)[kR][kWidth]) {
#pragma unroll
  for (int r0 = 0; r0 < kR; r0 += kGroups) {
    Acc sums[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      sums[w] = acc[r0][w];
#pragma unroll
      for (int g = 1; g < kGroups; ++g)
        if (r0 + g < kR && group == g) sums[w] = acc[r0 + g][w];
    }
    if (r0 + group >= kR) continue;
    Result& target = *reinterpret_cast<Result*>(corner + (r0 + group) * problem.c_row);
    Result result;
    if (problem.read_c) result = target;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) result.values[w] = finish(problem, sums[w], result.values[w]);
    target = result;
  }
}

// ---------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) spmm(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) u8 memory[];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes, warp = threadIdx.x / 32;
  if constexpr (kStaged) {
    const auto stages = reinterpret_cast<Stage(*)[kStages]>(memory);  // the stages of each warp
    const int rows = int(problem.block_rows), step = gridDim.x * kWarps;
    const i64 line = opaque(problem.b_row * i64(sizeof(B))), panel_bytes = opaque(line * kK);
    const Within<Index> columns(problem.block_cols);
    for (i64 batch = blockIdx.z; batch < problem.batches; batch += gridDim.z)
    for (int n0 = blockIdx.y * (kLanes * kWidth); n0 < problem.N; n0 += gridDim.y * (kLanes * kWidth)) {
      const int n = n0 + lane * kWidth;
      const bool mine = n < problem.N;  // all kWidth columns exist, since kWidth divides N
      const u8* b = opaque(reinterpret_cast<const u8*>(problem.b + batch * problem.b_batch + (mine ? n : 0)));
      C* c = opaque(problem.c + batch * problem.c_batch + n);
      Rest queue[kStages + 1];  // the contents of the stages, and what follows them
      queue[0] = rest_of(problem, blockIdx.x * kWarps + warp);
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        fetch(problem, stages[warp][s], queue[s]);
        queue[s + 1] = rest_after<kChunk>(problem, queue[s], step);
      }
      Acc acc[kR][kWidth];
      clear(acc);
      for (int at = 0; queue[0].row < rows; at = at + 1 == kStages ? 0 : at + 1) {
        const Rest here = queue[0];
        const int left = here.last - here.first, count = left < kChunk ? left : kChunk;
        Stage& stage = stages[warp][at];
        copy_wait<kStages - 1>();
        __syncwarp();
        sum_stage(stage, stage.template blocks<A>(here.first), count, group, b, line, panel_bytes, columns, acc);
        __syncwarp();
        fetch(problem, stage, queue[kStages]);
#pragma unroll
        for (int s = 0; s < kStages; ++s) queue[s] = queue[s + 1];
        queue[kStages] = rest_after<kChunk>(problem, queue[kStages], step);
        if (left > kChunk) continue;
        add_groups(acc);
        if (mine) store_rows(problem, c + i64(here.row) * kR * problem.c_row, group, acc);
        clear(acc);
      }
      copy_wait<0>();
      __syncwarp();
    }
  } else {
    const i64 rows = problem.block_rows * problem.batches;
    const i64 row_step = i64(gridDim.x) * kWarps, column_step = i64(gridDim.y) * (kLanes * kWidth);
    for (i64 n0 = blockIdx.y * i64(kLanes * kWidth); n0 < problem.N; n0 += column_step)
    for (i64 row_and_batch = blockIdx.x * i64(kWarps) + warp; row_and_batch < rows; row_and_batch += row_step) {
      const i64 batch = problem.batches == 1 ? 0 : row_and_batch / problem.block_rows;
      const i64 i = row_and_batch - batch * problem.block_rows, n = n0 + lane * kWidth;
      const bool mine = n < problem.N;  // all kWidth columns exist, since kWidth divides N
      const B* __restrict__ b = problem.b + batch * problem.b_batch + (mine ? n : 0) * problem.b_col;
      Acc acc[kR][kWidth];
      clear(acc);
      sum_row(problem, i, group, b, mine, acc);
      add_groups(acc);
      if (!mine) continue;
      C* corner = problem.c + batch * problem.c_batch + i * kR * problem.c_row + n * problem.c_col;
#pragma unroll
      for (int r = 0; r < kR; ++r) {
        if (r % kGroups != group) continue;
#pragma unroll
        for (int w = 0; w < kWidth; ++w) store_sum(problem, corner + r * problem.c_row + w * problem.c_col, acc[r][w]);
      }
    }
  }
}
