// y[i*R + r] = alpha * sum_p sum_c A[p, r, c] * x[col[p]*K + c] + beta * y[i*R + r],  p in block row i
// Any block, any element type, any strides of x and y. kVector divides K, and A is aligned to kVector elements.
// kLanes lanes share a block row; a lane takes every kLanes-th pair (block, kVector columns) and all R rows of it,
// kRows at a time; the grid's second dimension divides the rows of high blocks. Blocks of up to 8 x 8 are compiled in,
// so that divisions become multiplications. The accumulators of the lanes are added in one fixed tree. Bytes are the
// limit: 0.89 of the bandwidth of a copy for 3 x 3 in float64.
#include "common/elements.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kLanes = LANES;
constexpr int kRows = ROWS;        // rows of a block that are summed at a time
constexpr int kBlockR = BLOCK_R;   // 0: known at run time only
constexpr int kBlockC = BLOCK_C;
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr int kVector = VECTOR;
static_assert(kVector == 1 || !kTransposed, "columns that lie side by side");
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy
static_assert(32 % kLanes == 0, "block rows must not straddle warps");

struct alignas(kVector * sizeof(A)) Piece { A values[kVector]; };

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmv(const __grid_constant__ Problem problem) {
  const i64 block_rows = problem.block_rows, x_step = problem.b_row;
  const int R = kBlockR ? kBlockR : problem.R;
  const int K = kBlockC ? kBlockC : problem.K;
  const int lane = threadIdx.x % kLanes;
  constexpr int kRowsPerCta = kThreads / kLanes;
  const i64 row_tiles = (block_rows + kRowsPerCta - 1) / kRowsPerCta;

  for (i64 tile = blockIdx.x; tile < row_tiles * problem.batches; tile += gridDim.x) {
    const i64 batch = problem.batches == 1 ? 0 : tile / row_tiles;
    const i64 i = (tile - batch * row_tiles) * kRowsPerCta + threadIdx.x / kLanes;
    const B* __restrict__ x = problem.b + batch * problem.b_batch;
    Range row{0, 0};
    if (i < block_rows) row = blocks_of_row(problem.indptr, i, problem.blocks);
    for (int r0 = blockIdx.y * kRows; r0 < R; r0 += gridDim.y * kRows) {
      Acc acc[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) acc[r] = zero<Acc>();
      const int pieces = K / kVector;  // pieces of a row of a block
      i64 p = row.first + lane / pieces;
      int piece = lane % pieces;
      while (p < row.last) {
        const Index column = problem.indices[p];
        if (in_range(column, problem.block_cols)) {
          const int c = piece * kVector;
          Acc x_values[kVector];
#pragma unroll
          for (int v = 0; v < kVector; ++v) x_values[v] = load<Acc>(x[(i64(column) * K + c + v) * x_step]);
          const i64 block = kTransposed ? i64(problem.places[p]) : p;
          const A* __restrict__ values = problem.data + block * R * K + (kTransposed ? c * R + r0 : r0 * K + c);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            if (r0 + r >= R) continue;
            const Piece row_piece = *reinterpret_cast<const Piece*>(values + r * (kTransposed ? 1 : K));
#pragma unroll
            for (int v = 0; v < kVector; ++v) acc[r] = multiply_add(load<Acc>(row_piece.values[v]), x_values[v], acc[r]);
          }
        }
        p += kLanes / pieces;  // advances by kLanes pairs
        piece += kLanes % pieces;
        if (piece >= pieces) {
          piece -= pieces;
          ++p;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int mask = kLanes / 2; mask > 0; mask /= 2) acc[r] = add(acc[r], shuffle_xor(acc[r], mask));
        if (lane == r % kLanes && r0 + r < R && i < block_rows) {
          C* target = problem.c + batch * problem.c_batch + (i * R + r0 + r) * problem.c_row;
          store_sum(problem, target, acc[r]);
        }
      }
    }
  }
}
