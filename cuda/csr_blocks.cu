// A matrix in CSR, whose rows are in order, as blocks: kCount: counts[i] = blocks of block row i;  kFill: indices and data
// kLanes lanes have a block row; a lane has one of its rows, or several. The least block column that comes next in any
// row is the next block. Each lane adds the elements of its rows in that block, in order, and goes on behind them; a
// value that comes once is not converted. Where a warp has a block row, and no element comes twice, all its lanes copy
// kTogether rows of a wide block at a time. Blocks are zero before. Elements are clamped, a row ends at a column that is
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
constexpr int kWide = 16;      // columns of a block from which on a warp copies its rows together
constexpr int kTogether = sizeof(T) > 8 ? 4 : 8;  // rows whose loads are under way at the same time

struct CsrBlocks {
  const T* values;       // (elements,)
  const Index* columns;  // (elements,)
  const Index* pointers; // (block_rows * R + 1,)
  Index* counts;         // kCount: (block_rows,)
  const Index* indptr;   // kFill: (block_rows + 1,)
  Index* indices;        // kFill: (blocks,)
  T* data;               // kFill: (blocks, R, C)
  i64 block_rows, block_cols, elements, blocks;
  int R, C, unique;      // whether no element comes twice
};
#ifdef CSR_BLOCKS_BYTES
CHECK_LAYOUT(CsrBlocks, CSR_BLOCKS, (values)(columns)(pointers)(counts)(indptr)(indices)(data)(block_rows)(block_cols)
             (elements)(blocks)(R)(C)(unique))
#endif

// The first place behind `place` in a row whose column is `after` or larger. A row of a block that is full ends after C
// elements, which one look tells.
__device__ __forceinline__ i64 end_of_block(const CsrBlocks& m, i64 place, i64 end, i64 after) {
  i64 low = place, high = end;  // low: before the end of the block; high: behind it
  if (place + m.C <= end && m.columns[place + m.C - 1] < after) low = place + m.C - 1;
  else if (m.unique && place + m.C < end) high = place + m.C;
  if (low + 1 < high && i64(m.columns[low + 1]) >= after) return low + 1;
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (i64(m.columns[middle]) < after) low = middle;
    else high = middle;
  }
  return high;
}

// Adds some elements of a row to a row of a block, in order.
__device__ __forceinline__ void add_row(const CsrBlocks& m, i64 place, i64 end, i64 first_column, T* to) {
  i64 before = -1;
  for (; place < end; ++place) {
    const i64 column = i64(m.columns[place]) - first_column;
    if (!in_range(column, i64(m.C))) continue;  // only if the columns of a row are not in order
    const T value = m.values[place];
    to[column] = column == before ? Store<T>::from(add(load<ACCUMULATOR>(to[column]), load<ACCUMULATOR>(value))) : value;
    before = column;
  }
}

// The same for row `lane` + 32 k of each lane of a warp, by all lanes together; no element comes twice.
__device__ __forceinline__ void copy_rows(const CsrBlocks& m, i64 place, i64 end, i64 first_column, T* to) {
  for (int row = 0; row < 32; row += kTogether) {
    i64 firsts[kTogether], lasts[kTogether], longest = 0;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      firsts[u] = __shfl_sync(0xffffffffu, place, row + u), lasts[u] = __shfl_sync(0xffffffffu, end, row + u);
      longest = max(longest, lasts[u] - firsts[u]);
    }
    for (i64 e = lane_id(); e < longest; e += 32) {
      T values[kTogether];
      int columns[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const bool active = firsts[u] + e < lasts[u];
        const i64 column = active ? i64(m.columns[firsts[u] + e]) - first_column : -1;
        columns[u] = in_range(column, i64(m.C)) ? int(column) : -1;
        values[u] = active ? m.values[firsts[u] + e] : T{};
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (columns[u] >= 0) to[i64(row + u) * m.C + columns[u]] = values[u];
    }
  }
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
        const i64 from = places[k], first_column = next * m.C, after = first_column + m.C;
        if (from < ends[k] && i64(m.columns[from]) < after) places[k] = end_of_block(m, from, ends[k], after);
        if constexpr (kFill) {
          T* to = m.data + t * size + i64(k * kLanes) * m.C;
          if (kLanes == 32 && m.unique && m.C >= kWide) copy_rows(m, from, places[k], first_column, to);
          else add_row(m, from, places[k], first_column, to + i64(lane) * m.C);
        }
      }
      ++t, ++count;
    }
    if (!kFill && lane == 0 && i < m.block_rows) m.counts[i] = Index(count);
  }
}
