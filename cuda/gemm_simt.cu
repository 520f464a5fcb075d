// C[i*R + r, n] = alpha * sum_p sum_c A[p, r, c] * B[col[p]*K + c, n] + beta * C[i*R + r, n],  p in block row i
// Any block, any element type, any strides, on the CUDA cores. Each thread owns kRows rows of one block row and kCols
// columns, up to 8 x 4 (4 x 4 of 64-bit types): 12 loads for 32 products. The lanes of a warp run along n, so that B is
// read in lines and A is broadcast. There is no shared memory and no barrier, and the order of sums is fixed. The tile
// comes from the grid's three dimensions, since 64-bit divisions cost registers.
#include "common/elements.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kRows = ROWS;    // rows of a block per thread
constexpr int kCols = COLS;    // columns per thread, kLanes apart
constexpr int kLanes = LANES;  // neighbouring threads along n
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr int kThreads = 128;
constexpr int kCtas = 2;  // CTAs per SM: leaves a thread all the registers it asks for, so that ptxas does not spill
constexpr int kGroups = kThreads / kLanes;  // block rows per CTA
static_assert(32 % kLanes == 0, "a block row must not straddle warps");

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
gemm_simt(const __grid_constant__ Problem problem) {
  const int R = problem.R, K = problem.K;
  const i64 N = problem.N, b_row = problem.b_row;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const i64 n_step = i64(gridDim.y) * (kLanes * kCols), i_step = i64(gridDim.x) * kGroups;

  const i64 rows = problem.block_rows * problem.batches;
  // Block rows are the fastest index: CTAs that run at the same time read the same columns of B.
  for (i64 n0 = blockIdx.y * i64(kLanes * kCols) + lane; n0 - lane < N; n0 += n_step)
  for (int r0 = blockIdx.z * kRows; r0 < R; r0 += gridDim.z * kRows)
  for (i64 row_and_batch = blockIdx.x * i64(kGroups) + group; row_and_batch < rows; row_and_batch += i_step) {
    const i64 batch = problem.batches == 1 ? 0 : row_and_batch / problem.block_rows;
    const i64 i = row_and_batch - batch * problem.block_rows;
    const B* __restrict__ b = problem.b + batch * problem.b_batch;
    Acc acc[kRows][kCols];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kCols; ++n) acc[r][n] = zero<Acc>();

    // Rows and columns beyond the edge repeat the last one; they are computed and not stored.
    i64 b_offset[kCols];
#pragma unroll
    for (int n = 0; n < kCols; ++n) {
      const i64 column = n0 + n * kLanes;
      b_offset[n] = (column < N ? column : N - 1) * problem.b_col;
    }
    int a_offset[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) a_offset[r] = (r0 + r < R ? r0 + r : R - 1) * (kTransposed ? 1 : K);

    const Range row = blocks_of_row(problem.indptr, i, problem.blocks);
    for (i64 p = row.first; p < row.last; ++p) {
      const Index column = problem.indices[p];
      if (!in_range(column, problem.block_cols)) continue;
      const A* __restrict__ block = problem.data + (kTransposed ? i64(problem.places[p]) : p) * R * K;
      const B* __restrict__ panel = b + i64(column) * K * b_row;
      for (int k = 0; k < K; ++k) {
        Acc b_value[kCols];
#pragma unroll
        for (int n = 0; n < kCols; ++n) b_value[n] = load<Acc>(panel[k * b_row + b_offset[n]]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Acc a_value = load<Acc>(block[a_offset[r] + k * (kTransposed ? R : 1)]);
#pragma unroll
          for (int n = 0; n < kCols; ++n) acc[r][n] = multiply_add(a_value, b_value[n], acc[r][n]);
        }
      }
    }

#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        const i64 column = n0 + n * kLanes;
        if (r0 + r >= R || column >= N) continue;
        C* target = problem.c + batch * problem.c_batch + (i * R + r0 + r) * problem.c_row + column * problem.c_col;
        store_sum(problem, target, acc[r][n]);
      }
    }
  }
}
