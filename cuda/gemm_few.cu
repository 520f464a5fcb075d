// C[m, n] = alpha * sum_p sum_k A[p, m % R, k] * B[col[p]*K + k, n] + beta * C[m, n],  p in the block row of m
// Up to 8 columns of 16-bit floats by mma.sync: reading A takes all the time. A CTA has 16 rows of a block row; its warps
// share the columns of the row's blocks in chunks of 32. A lane reads A and B straight into the registers of its
// products. The sums of the warps are added in one fixed tree. K is a multiple of 32, R of 16, and A is aligned to 16
// bytes.
#include "common/elements.cuh"
#include "ptx/mma.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kRows = 16, kChunk = 32;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kCtas = 4;      // on a multiprocessor: 8,192 rows are one wave on 132 of them
constexpr int kTogether = 4;  // chunks of a warp that are read before the first is used
constexpr bool kByColumns = B_BY_COLUMNS;  // columns of B lie side by side, aligned to 16 bytes
static_assert(Same<A, B>::value && sizeof(A) == 2 && Same<Acc, f32>::value, "16-bit floats");

// A product takes the columns of A, and the rows of B, in any order, as long as it is the same one. Of a chunk, lane l
// has the columns 8 (l % 4) to 8 (l % 4) + 7 of A, which lie side by side, as four pairs; and of B the same rows of
// column l / 4.
struct Pairs { u32 x[4]; };

// `row` is this lane's first row of B.
__device__ __forceinline__ Pairs read_b(const Problem& problem, const B* b, i64 row, bool is_there) {
  const int n = threadIdx.x % 32 / 4;
  Pairs y = {};
  if (n >= problem.N || !is_there) return y;
  if constexpr (kByColumns) {
    const uint4 all = __ldg(reinterpret_cast<const uint4*>(b + row + n * problem.b_col));
    y = {all.x, all.y, all.z, all.w};
  } else {
    const u16* from = reinterpret_cast<const u16*>(b + row * problem.b_row + n * problem.b_col);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      y.x[i] = u32(__ldg(from + 2 * i * problem.b_row)) | u32(__ldg(from + (2 * i + 1) * problem.b_row)) << 16;
  }
  return y;
}

// Rows 0 to 7 and 8 to 15 of A.
struct Rows { uint4 upper, lower; };

__device__ __forceinline__ void multiply(f32 (&sums)[4], const Rows& a, const Pairs& b) {
  const u32 upper[2][2] = {{a.upper.x, a.upper.y}, {a.upper.z, a.upper.w}};
  const u32 lower[2][2] = {{a.lower.x, a.lower.y}, {a.lower.z, a.lower.w}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 right[2] = {b.x[2 * half], b.x[2 * half + 1]};
    if constexpr (Same<A, f16>::value) mma_f16(sums, upper[half], lower[half], right);
    else mma_bf16(sums, upper[half], lower[half], right);
  }
}

// Adds up this warp's chunks of 16 rows, from `first` on, of block row i.
__device__ __forceinline__ void add_chunks(f32 (&sums)[4], const Problem& problem, const B* b, i64 i, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = problem.K / kChunk;
  const Range row = blocks_of_row(problem.indptr, i, problem.blocks);
  const int chunks = row.last > row.first ? int(row.last - row.first) * each : 0;
  for (int c0 = warp * kTogether; c0 < chunks; c0 += kWarps * kTogether) {
    Rows a[kTogether];
    Pairs right[kTogether];
    i64 columns[kTogether];
    const auto place = [&](int u, int& k) {  // the block of a chunk, and this lane's first column of it
      const int c = min(c0 + u, chunks - 1), block = c / each;
      k = (c - block * each) * kChunk + lane % 4 * 8;
      return row.first + block;
    };
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      int k;
      const i64 p = place(u, k);
      columns[u] = c0 + u < chunks ? i64(problem.indices[p]) : -1;
      const A* from = problem.data + (p * problem.R + first + lane / 4) * problem.K + k;
      a[u].upper = __ldcs(reinterpret_cast<const uint4*>(from));
      a[u].lower = __ldcs(reinterpret_cast<const uint4*>(from + 8 * problem.K));
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      int k;
      place(u, k);
      const bool is_there = in_range(columns[u], problem.block_cols);
      right[u] = read_b(problem, b, columns[u] * problem.K + k, is_there);
      if (!is_there) a[u] = {};  // NaN times 0 would count
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) multiply(sums, a[u], right[u]);
  }
}

// Grid: 16 rows each along x, batches along y. The kernel loops over what exceeds the largest grid.
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) gemm_few(const __grid_constant__ Problem problem) {
  __shared__ f32 memory[kWarps / 2][4][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = problem.R / kRows;
  for (i64 batch = blockIdx.y; batch < problem.batches; batch += gridDim.y)
    for (i64 unit = blockIdx.x; unit < problem.block_rows * parts; unit += gridDim.x) {
      const i64 i = unit / parts;
      f32 sums[4] = {};
      add_chunks(sums, problem, problem.b + batch * problem.b_batch, i, int(unit - i * parts) * kRows);
#pragma unroll
      for (int half = kWarps / 2; half > 0; half /= 2) {
        if (warp >= half && warp < 2 * half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) memory[warp - half][e][lane] = sums[e];
        }
        __syncthreads();
        if (warp < half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[e] += memory[warp][e][lane];
        }
        __syncthreads();
      }
      if (warp > 0) continue;
      C* line = problem.c + batch * problem.c_batch + (unit * kRows + lane / 4) * problem.c_row;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = lane % 4 * 2 + e % 2;
        if (n < problem.N) store_sum(problem, line + e / 2 * 8 * problem.c_row + n * problem.c_col, sums[e]);
      }
    }
}
