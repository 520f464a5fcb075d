// C[m, n] = alpha * sum_p sum_k A[p, m, k] * B[col[p] * K + k, n], for elements that a product with filled blocks spoiled
// After `fill` and a dense product: an infinity or NaN of B has met zeros that A does not store, so that an element that
// is not finite is computed again from what A stores; also all of a block row with a block that is stored twice. Each
// warp reads kWide elements of a thread at once, and as a rule writes none: bound by the bytes of C.
#include "common/elements.cuh"

constexpr int kThreads = 128, kWide = 8;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy

struct Mend {
  Product<A, B, C, Acc, Index> product;
  const u8* twice;  // (block_rows, each): whether a part of the block row has a block that is stored twice
  int each, across;  // lanes run along the rows of C, otherwise along its columns
};
#ifdef MEND_BYTES
CHECK_LAYOUT(Mend, MEND, (product)(twice)(each)(across))
#endif
CHECK_PRODUCT(decltype(Mend::product))

// Infinity minus infinity is NaN.
template <class Any> __device__ __forceinline__ bool is_finite(Any x) {
  if constexpr (IsComplex<Any>::value) return x.re - x.re == 0 && x.im - x.im == 0;
  else return x - x == 0;
}

// An element of C, anew.
__device__ __forceinline__ Acc element(const Product<A, B, C, Acc, Index>& a, i64 i, int r, const B* b) {
  constexpr bool kTransposed = A_TRANSPOSED;
  Acc sum = zero<Acc>();
  const Range row = blocks_of_row(a.indptr, i, a.blocks);
#pragma unroll 1
  for (i64 entry = row.first; entry < row.last; ++entry) {
    const Index column = a.indices[entry];
    if (!in_range(column, a.block_cols)) continue;
    const A* block = a.data + (kTransposed ? i64(a.places[entry]) : entry) * a.R * a.K;
    const B* panel = b + i64(column) * a.K * a.b_row;
#pragma unroll 1
    for (int k = 0; k < a.K; ++k)
      sum = multiply_add(load<Acc>(block[kTransposed ? i64(k) * a.R + r : i64(r) * a.K + k]),
                         load<Acc>(panel[k * a.b_row]), sum);
  }
  return sum;
}

// Grid: tiles along the fastest index of C, its other index, batches. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) mend(const __grid_constant__ Mend p) {
  const auto& a = p.product;
  const i64 rows = a.block_rows * a.R, wide = p.across ? rows : a.N, high = p.across ? a.N : rows;
  const i64 step = p.across ? a.c_row : a.c_col, line = p.across ? a.c_col : a.c_row;
  for (i64 batch = blockIdx.z; batch < a.batches; batch += gridDim.z)
  for (i64 y = blockIdx.y; y < high; y += gridDim.y)
  for (i64 first = i64(blockIdx.x) * (kThreads * kWide); first < wide; first += i64(gridDim.x) * (kThreads * kWide)) {
    C* target = a.c + batch * a.c_batch + y * line;
    u32 spoiled = 0;  // a bit for each element
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const i64 x = first + j * kThreads + threadIdx.x;
      if (x < wide && !is_finite(load<Acc>(target[x * step]))) spoiled |= 1u << j;
    }
    // What is said of the block rows of these elements lies side by side.
    const i64 top = p.across ? first / a.R : y / a.R;
    const i64 bottom = p.across ? (min(wide, first + kThreads * kWide) - 1) / a.R : top;
    int said = 0;
    for (i64 i = top * p.each + threadIdx.x; i < (bottom + 1) * p.each; i += kThreads) said |= p.twice[i];
    const bool any = __syncthreads_or(said);
    if (!any && spoiled == 0) continue;
#pragma unroll 1
    for (int j = 0; j < kWide; ++j) {
      const i64 x = first + j * kThreads + threadIdx.x;
      if (x >= wide) continue;
      const i64 m = p.across ? x : y, n = p.across ? y : x, i = m / a.R;
      bool wrong = spoiled >> j & 1;
      for (int k = 0; any && k < p.each; ++k) wrong |= p.twice[i * p.each + k] != 0;
      if (wrong) store_sum(a, target + x * step, element(a, i, int(m - i * a.R), a.b + batch * a.b_batch + n * a.b_col));
    }
  }
}
