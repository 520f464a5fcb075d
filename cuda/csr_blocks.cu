// A matrix in CSR, whose rows are in order, as blocks: kCount: counts[i] = blocks of block row i;  kFill: indices and data
// kLanes lanes have a block row; a lane has one of its rows, or several. The least block column that comes next in any
// row is the next block. Each lane adds the elements of its rows in that block, in order, and goes on behind them; a
// value that comes once is not converted. Blocks are zero before. Elements are clamped, a row ends at a column that is
// outside, and a block row writes no more blocks than indptr gives it.
#include "common/bsr.cuh"

using T = ELEMENT_A;
using Index = INDEX;

constexpr bool kFill = FILL;
constexpr int kLanes = LANES;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread
constexpr int kGroups = kThreads / kLanes;
constexpr int kRows = ROWS;  // rows of a lane: kLanes * kRows >= R

struct CsrBlocks {
  const T* values;       // (elements,)
  const Index* columns;  // (elements,)
  const Index* pointers; // (block_rows * R + 1,)
  Index* counts;         // kCount: (block_rows,)
  const Index* indptr;   // kFill: (block_rows + 1,)
  Index* indices;        // kFill: (blocks,)
  T* data;               // kFill: (blocks, R, C)
  i64 block_rows, block_cols, elements, blocks;
  int R, C;
};
#ifdef CSR_BLOCKS_BYTES
CHECK_LAYOUT(CsrBlocks, CSR_BLOCKS, (values)(columns)(pointers)(counts)(indptr)(indices)(data)(block_rows)(block_cols)
             (elements)(blocks)(R)(C))
#endif

// The sum of the elements of a row from `place` on that lie before a column, written to a row of a block.
__device__ __forceinline__ i64 take_row(const CsrBlocks& m, i64 place, i64 end, i64 first_column, T* to) {
  const i64 after = first_column + m.C;
  i64 before = -1;
  for (; place < end; ++place) {
    const i64 column = m.columns[place];
    if (column < first_column || column >= after) break;
    if constexpr (kFill) {
      T& element = to[column - first_column];
      const T value = m.values[place];
      element = column == before ? Store<T>::from(add(load<ACCUMULATOR>(element), load<ACCUMULATOR>(value))) : value;
      before = column;
    }
  }
  return place;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) csr_blocks(const __grid_constant__ CsrBlocks m) {
  const int lane = threadIdx.x % kLanes;
  const i64 size = i64(m.R) * m.C;
  // All groups of a warp make the same rounds, since their lanes exchange numbers.
  for (i64 first = blockIdx.x * i64(kGroups); first < m.block_rows; first += i64(gridDim.x) * kGroups) {
    const i64 i = first + threadIdx.x / kLanes;
    i64 places[kRows], ends[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int r = lane + k * kLanes;
      const bool active = i < m.block_rows && r < m.R;
      const Range row = active ? blocks_of_row(m.pointers, i * m.R + r, m.elements) : Range{0, 0};
      places[k] = row.first, ends[k] = row.last;
    }
    i64 t = 0, stop = 0, count = 0;
    if (kFill && i < m.block_rows) {
      const Range own = blocks_of_row(m.indptr, i, m.blocks);
      t = own.first, stop = own.last;
    }
    for (;;) {
      i64 next = m.block_cols;  // the block column that comes next
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if (places[k] >= ends[k]) continue;
        const i64 column = m.columns[places[k]];
        const i64 block = u64(column) >> 32 ? column / m.C : i64(u32(column) / u32(m.C));
        if (column < 0 || block >= m.block_cols) places[k] = ends[k];
        else if (block < next) next = block;
      }
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
        const i64 other = shuffle_xor(next, lanes);
        if (other < next) next = other;
      }
      const bool more = next < m.block_cols && (!kFill || t < stop);
      if (!__any_sync(0xffffffffu, more)) break;
      if (!more) continue;
      if (kFill && lane == 0) m.indices[t] = Index(next);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        T* to = kFill ? m.data + t * size + i64(lane + k * kLanes) * m.C : nullptr;
        places[k] = take_row(m, places[k], ends[k], next * m.C, to);
      }
      ++t, ++count;
    }
    if (!kFill && lane == 0 && i < m.block_rows) m.counts[i] = Index(count);
  }
}
