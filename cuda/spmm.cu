// C[i*R + r, n] = alpha * sum_p sum_k A[p, r, k] * B[col[p]*K + k, n] + beta * C[i*R + r, n],  p in block row i
// Small blocks by few columns, on the plain cores. A warp has one block row: kLanes lanes side by side take kWidth columns
// each, and 32 / kLanes of them above each other every so-many-th block. A lane keeps the sums of all rows of the block
// for its columns, so that what it reads of B serves R products, and a value of A serves a whole group of lanes. Sums of
// the groups are added in one fixed tree.
#include "common/elements.cuh"
#include "common/stream.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kLanes = LANES;
constexpr int kWidth = WIDTH;               // columns of a lane; more than one lie side by side in B, aligned
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr int kThreads = 128;
constexpr int kGroups = 32 / kLanes;
// What is asked for of B before the first of it is used: so many columns of a block, of so many blocks.
constexpr int kDeep = kK <= 4 ? kK : kK % 4 == 0 ? 4 : kK % 3 == 0 ? 3 : kK % 5 == 0 ? 5 : kK % 7 == 0 ? 7 : kK % 2 == 0 ? 2 : 1;
constexpr int kTogether = TOGETHER;
constexpr int kCtas = CTAS;  // that share a multiprocessor; fewer leave a thread more registers
// Rows of a block whose values are in registers at once.
__device__ constexpr int rows_at_once() {
  int rows = 1;
  while (2 * rows <= kR && kR % (2 * rows) == 0 && 2 * rows * kDeep * sizeof(Acc) <= 128) rows *= 2;
  return kR * kDeep * sizeof(Acc) <= 128 ? kR : rows;
}
constexpr int kRowsAtOnce = rows_at_once();
static_assert(32 % kLanes == 0, "a block row must not straddle warps");
static_assert(kK % kDeep == 0, "whole steps");

struct alignas(kWidth * sizeof(B)) Piece { B values[kWidth]; };

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmm(const __grid_constant__ Problem problem) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const i64 rows = problem.block_rows * problem.batches;
  const i64 row_step = i64(gridDim.x) * (kThreads / 32), column_step = i64(gridDim.y) * (kLanes * kWidth);

  for (i64 n0 = blockIdx.y * i64(kLanes * kWidth); n0 < problem.N; n0 += column_step)
  for (i64 row_and_batch = blockIdx.x * i64(kThreads / 32) + threadIdx.x / 32; row_and_batch < rows;
       row_and_batch += row_step) {
    const i64 batch = problem.batches == 1 ? 0 : row_and_batch / problem.block_rows;
    const i64 i = row_and_batch - batch * problem.block_rows, n = n0 + lane * kWidth;
    const bool mine = n < problem.N;  // all kWidth of them: they divide N
    const B* __restrict__ b = problem.b + batch * problem.b_batch + (mine ? n : 0) * problem.b_col;
    Acc acc[kR][kWidth];
#pragma unroll
    for (int r = 0; r < kR; ++r)
#pragma unroll
      for (int w = 0; w < kWidth; ++w) acc[r][w] = zero<Acc>();

    const Range row = blocks_of_row(problem.indptr, i, problem.blocks);
    i64 p0 = row.first + group;
    const auto place = [&](i64 p, int u) {  // behind the last block: the last one, for nothing
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
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
              for (int k = 0; k < kDeep; ++k)
#pragma unroll
                for (int w = 0; w < kWidth; ++w)
                  acc[r0 + r][w] =
                      multiply_add(load<Acc>(values[r][k]), load<Acc>(x[u][k].values[w]), acc[r0 + r][w]);
          }
        }
      }
    }

#pragma unroll
    for (int step = 16; step >= kLanes; step /= 2)
#pragma unroll
      for (int r = 0; r < kR; ++r)
#pragma unroll
        for (int w = 0; w < kWidth; ++w) acc[r][w] = add(acc[r][w], shuffle_xor(acc[r][w], step));
    if (!mine) continue;
    C* corner = problem.c + batch * problem.c_batch + i * kR * problem.c_row + n * problem.c_col;
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      if (r % kGroups != group) continue;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        C* target = corner + r * problem.c_row + w * problem.c_col;
        store_sum(problem, target, acc[r][w]);
      }
    }
  }
}
