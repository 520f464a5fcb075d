// C[i*R + r, n] = alpha * sum_p sum_k A[p, r, k] * B[col[p]*K + k, n] + beta * C[i*R + r, n],  p in block row i
// float64 blocks of 6 rows and more by few columns, on the tensor cores. A warp has up to 8 * kTiles rows of a block
// row and 16 * kPairs columns. An instruction takes eight rows, where rows that the block lacks are wasted, and four of
// K, which runs over all blocks of the row without a gap.
// A lane reads columns 2 a and 2 a + 1 of a row of B, 16 bytes, for two instructions, one of which computes the even
// and the other the odd columns: C is then written 16 bytes at a time, and no sum crosses lanes. Nothing goes through
// shared memory, so that the L1 is as large as it can be. Where a step has no block, both factors are zeros. B comes
// from the L2, which is the limit; the number of instructions matters: 92 for three steps where there were 112.
#include "common/chunks.cuh"
#include "common/registers.cuh"
#include "common/stream.cuh"
#include "ptx/mma.cuh"

using Index = INDEX;
using Problem = Product<f64, f64, f64, f64, Index>;
CHECK_PRODUCT(Problem)
using Number = typename Choose<sizeof(Index) == 4, u32, u64>::Type;  // no index is negative

// Columns of B are assigned to the instructions so that 16 bytes of B feed two of them and a lane ends with four
// neighbouring columns of C: nothing is summed across lanes. All operands are read directly from global memory by many
// warps of short-lived CTAs: block rows that are computed at the same time are neighbours, whose rows of B are in the
// caches.

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kPairs = PAIRS;        // pairs of instructions side by side
constexpr int kTogether = TOGETHER;  // consecutive instructions whose operands are loaded at the same time
constexpr int kCtas = CTAS;          // CTAs that share a multiprocessor, at least
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTiles = (kR + 7) / 8 < TILES ? (kR + 7) / 8 : TILES;
constexpr int kParts = (kR + 8 * kTiles - 1) / (8 * kTiles);  // parts of a block row, one warp each

// Reads two elements through the L1, or gives zeros unless `wanted`. The asm is volatile, so that all loads are issued
// before the first result is used.
__device__ __forceinline__ void read_two(f64 (&x)[2], const u8* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f64 %0, 0d0000000000000000;\nmov.f64 %1, 0d0000000000000000;\n"
      "@p ld.global.nc.v2.f64 {%0, %1}, [%2];\n}"
      : "=&d"(x[0]), "=&d"(x[1]) : "l"(from), "r"(int(wanted)));
}

// The most blocks of a row in one pass of a lane: few enough that 32 bits hold their offsets in bytes.
constexpr int kSome = (1 << 30) / (kR * kK * 8);
struct Line {
  const u8* values;   // this lane's first row of the first block
  u32 below[kTiles];  // offsets of its other rows from there
  const u8* indices;  // block columns of the blocks
  const u8* b;        // this lane's columns of the first row of B
  u32 pitch;          // bytes from a row of B to the next
  // Number of block columns, and the number that this lane may read: 0 after the last column.
  Number columns, read[kPairs];
};

// Adds the products of kTogether instructions from k on; kWhole: all of them are before `end`.
template <bool kWhole>
__device__ __forceinline__ void add(const Line& line, u32 k, u32 end, f64 (&accum)[kTiles][kPairs][4]) {
  u32 row[kTogether];
  Index column[kTogether];
  f64 a[kTogether][kTiles], x[kTogether][kPairs][2];
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    const u32 at = kWhole || k + 4 * u < end ? k + 4 * u : 0, block = opaque(at / kK);
    column[u] = read_global<Index>(line.indices + block * u32(sizeof(Index)));
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      a[u][t] = read_global<f64>(line.values + (at * 8 + block * u32((kR - 1) * kK * 8) + (t ? line.below[t] : 0)));
    row[u] = at - block * kK;
  }
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    const bool inside = kWhole || k + 4 * u < end;
    const u8* from = line.b + u64(u32(column[u]) * kK + row[u]) * line.pitch;
#pragma unroll
    for (int w = 0; w < kPairs; ++w) read_two(x[u][w], from + 128 * w, inside && Number(column[u]) < line.read[w]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) a[u][t] = inside && Number(column[u]) < line.columns ? a[u][t] : 0;
  }
#pragma unroll
  for (int u = 0; u < kTogether; ++u)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int w = 0; w < kPairs; ++w) {
        mma_f64(accum[t][w][0], accum[t][w][2], a[u][t], x[u][w][0]);
        mma_f64(accum[t][w][1], accum[t][w][3], a[u][t], x[u][w][1]);
      }
}

// The rows and columns of C that a lane has.
struct Place {
  // Two columns of B and a row of A; one of four of K; the first row of a block; the first column of the tile.
  int across, deep, top, n0;
  i64 row;
  __device__ __forceinline__ explicit Place(u32 thread)
      : across(thread % 32 / 4), deep(thread % 4), n0(blockIdx.y * (16 * kPairs)) {
    const i64 warp = blockIdx.x * i64(kWarps) + thread / 32;
    row = warp / kParts;
    top = int(warp % kParts) * (8 * kTiles) + across;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmm_f64(const __grid_constant__ Problem problem) {
  for (int batch = blockIdx.z; batch < problem.batches; batch += gridDim.z) {
    const Place at(opaque(threadIdx.x));
    if (at.row >= problem.block_rows) return;
    const Range range = blocks_of_row(problem.indptr, at.row, problem.blocks);
    const f64* b = problem.b + batch * problem.b_batch + at.n0 + 2 * at.across;
    // The choice of this kernel in Python ensures that rows of B are less than 2^32 bytes apart.
    Line line{nullptr, {}, nullptr, opaque(reinterpret_cast<const u8*>(b)), u32(problem.b_row * 8), Number(problem.block_cols)};
    const auto row_of = [&](int t) { return (at.top + 8 * t < kR ? at.top + 8 * t : kR - 1) * (kK * 8); };
#pragma unroll
    for (int t = 1; t < kTiles; ++t) line.below[t] = row_of(t) - row_of(0);
#pragma unroll
    for (int w = 0; w < kPairs; ++w)  // both columns exist, since N is even
      line.read[w] = at.n0 + 16 * w + 2 * at.across < problem.N ? line.columns : 0;
    f64 accum[kTiles][kPairs][4] = {};
    const int last = int(range.last);
#pragma unroll 1
    for (int first = int(range.first); first < last; first += kSome) {
      line.values = opaque(reinterpret_cast<const u8*>(problem.data + i64(first) * (kR * kK)) + row_of(0));
      line.indices = opaque(reinterpret_cast<const u8*>(problem.indices + first));
      const u32 end = u32(last - first < kSome ? last - first : kSome) * kK;
      u32 k = at.deep;
#pragma unroll 1
      for (; k + 4 * kTogether <= end + at.deep; k += 4 * kTogether) add<true>(line, k, end, accum);
      if (k < end + at.deep) add<false>(line, k, end, accum);
      if (last - first <= kSome) break;
    }
    const Place to(opaque(threadIdx.x));  // computed again, because keeping it takes registers
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int w = 0; w < kPairs; ++w) {
        const int r = to.top + 8 * t, n = to.n0 + 16 * w + 4 * to.deep;
        f64* target = problem.c + batch * problem.c_batch + (to.row * kR + r) * problem.c_row + n;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          if (r >= kR || n + j >= problem.N) continue;  // both columns are beyond the end
          double2 two = {0, 0};
          if (problem.read_c) two = *reinterpret_cast<const double2*>(target + j);
          two.x = fma(problem.alpha, accum[t][w][j], problem.beta * two.x);
          two.y = fma(problem.alpha, accum[t][w][j + 1], problem.beta * two.y);
          *reinterpret_cast<double2*>(target + j) = two;
        }
      }
  }
}
