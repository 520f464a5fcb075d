// Every element of each stored block, one by one: kCsr by rows, in the order of the blocks; kCoo in the order of `data`
// Element (r, c) of the t-th of the n blocks of block row i is number (indptr[i] R + r n) C + t C + c in CSR, and row
// pointers follow from indptr alone: one launch, and nothing to count. A CTA writes kTile neighbouring elements. It
// finds the block rows of the first and of the last one, between which each thread searches those of its own. Rows,
// blocks and columns are clamped, so that the result can be used whatever the index arrays say.
#include "common/bsr.cuh"

using T = ELEMENT_A;  // a type of the size of an element: elements are only moved
using Index = INDEX;
using To = TO;

enum Format { kCsr, kCoo };
constexpr Format kFormat = FORMAT;
constexpr int kThreads = 256, kItems = 8, kTile = kThreads * kItems;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread

struct BlockElements {
  const T* data;         // (blocks, R, C)
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (block_rows + 1,)
  T* values;             // kCsr: (blocks * R * C,); those of kCoo are `data`
  To* rows;              // kCsr: row pointers (block_rows * R + 1,);  kCoo: (blocks * R * C,)
  To* columns;           // (blocks * R * C,)
  i64 block_rows, block_cols, blocks;
  int R, C;
};
#ifdef BLOCK_ELEMENTS_BYTES
CHECK_LAYOUT(BlockElements, BLOCK_ELEMENTS, (data)(indices)(indptr)(values)(rows)(columns)(block_rows)(block_cols)
             (blocks)(R)(C))
#endif

__device__ __forceinline__ i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

__device__ __forceinline__ Range row_of(const BlockElements& a, i64 i) {
  const i64 first = clamp(a.indptr[i], 0, a.blocks);
  return {first, clamp(a.indptr[i + 1], first, a.blocks)};
}

// The last row from `low` on, and before `high`, that begins at or before a block.
__device__ __forceinline__ i64 row_with(const BlockElements& a, i64 block, i64 low, i64 high) {
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (i64(a.indptr[middle]) <= block) low = middle;
    else high = middle;
  }
  return low;
}

// Divides numbers that mostly fit into 32 bits, where a division takes a fifth of the time.
__device__ __forceinline__ i64 quotient(i64 x, i64 y) {
  return u64(x | y) >> 32 ? x / y : i64(u32(x) / u32(y));
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
block_elements(const __grid_constant__ BlockElements a) {
  __shared__ i64 smem_rows[2];
  const i64 size = i64(a.R) * a.C, total = a.blocks * size;
  if constexpr (kFormat == kCsr) {
    const i64 lines = a.block_rows * a.R;
    for (i64 x = blockIdx.x * i64(kThreads) + threadIdx.x; x <= lines; x += i64(gridDim.x) * kThreads) {
      if (x == lines) {
        a.rows[x] = To(total);
        continue;
      }
      const i64 i = quotient(x, a.R);
      const Range row = row_of(a, i);
      a.rows[x] = To(row.first * size + (x - i * a.R) * (row.last - row.first) * a.C);
    }
  }
  for (i64 first = blockIdx.x * i64(kTile); first < total; first += i64(gridDim.x) * kTile) {
    const i64 block0 = quotient(first, size), within0 = first - block0 * size;
    const i64 last = first + kTile < total ? first + kTile - 1 : total - 1;
    __syncthreads();
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64)
      smem_rows[threadIdx.x / 32] = row_with(a, threadIdx.x ? quotient(last, size) : block0, 0, a.block_rows);
    __syncthreads();
    const i64 low = smem_rows[0], high = smem_rows[1] + 1;
#pragma unroll 2
    for (i64 e = first + threadIdx.x; e <= last; e += kThreads) {
      const i64 ahead = within0 + (e - first), over = quotient(ahead, size), p = block0 + over;
      const i64 i = row_with(a, p, low, high);
      i64 block = p, within = ahead - over * size;
      if constexpr (kFormat == kCsr) {
        const Range row = row_of(a, i);
        const i64 length = (row.last - row.first) * a.C, place = e - row.first * size;
        if (u64(place) >= u64(length) * u64(a.R)) {  // only if the index arrays are not valid
          a.values[e] = T{}, a.columns[e] = To(0);
          continue;
        }
        const i64 r = quotient(place, length), rest = place - r * length, t = quotient(rest, a.C);
        block = row.first + t, within = r * a.C + (rest - t * a.C);
      }
      const i64 column = a.indices[block], r = quotient(within, a.C), c = within - r * a.C;
      if constexpr (kFormat == kCsr) a.values[e] = a.data[block * size + within];
      a.columns[e] = To((in_range(column, a.block_cols) ? column : 0) * a.C + c);
      if constexpr (kFormat == kCoo) a.rows[e] = To(i * a.R + r);
    }
  }
}
