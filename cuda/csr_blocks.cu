// The blocks of a matrix in CSR without duplicates, whose rows are in order: kCount: how many each block row has, and all;
// kFill: their block columns, and the elements of each row of a block, from which `block_elements` takes the values
// kLanes lanes have a block row; a lane has one of its rows, or several. The least block column that comes next in any
// row is the next block, and each lane goes on behind its elements there. Elements are clamped, a row ends at a column
// that is outside, and a block row writes no more blocks than indptr gives it.
#include "common/arrivals.cuh"
#include "common/quotient.cuh"
#include "common/runs.cuh"

using Index = INDEX;

constexpr bool kFill = FILL;
constexpr int kLanes = LANES;
constexpr int kThreads = 128;
constexpr int kRows = ROWS;  // rows of a lane: kLanes * kRows >= R
constexpr int kCtas = kRows > 1 ? 4 : 8;  // CTAs per SM: leaves 128 or 64 registers per thread
constexpr int kGroups = kThreads / kLanes;

struct CsrBlocks {
  const Index* columns;   // (elements,)
  const Index* pointers;  // (block_rows * R + 1,)
  Index* counts;          // kCount: 0, and the number of each block row (block_rows + 1,); may be none
  const Index* indptr;    // kFill: (block_rows + 1,)
  Index* indices;         // kFill: (blocks,)
  i64* runs;              // kFill: (blocks, R)
  i64* found;             // kCount: the number of all blocks
  u64* total;             // kCount: the same, and CTAs that have arrived; zero before and after
  u32* arrived;
  i64 block_rows, block_cols, elements, blocks;
  int R, C;
};
#ifdef CSR_BLOCKS_BYTES
CHECK_LAYOUT(CsrBlocks, CSR_BLOCKS, (columns)(pointers)(counts)(indptr)(indices)(runs)(found)(total)(arrived)
             (block_rows)(block_cols)(elements)(blocks)(R)(C))
#endif

// The first place behind `place` in a row whose column is `after` or larger. A row of a block that is full ends after C
// elements, which one look tells.
__device__ __forceinline__ i64 end_of_block(const CsrBlocks& m, i64 place, i64 end, i64 after) {
  i64 low = place, high = place + m.C < end ? place + m.C : end;  // low: before the end of the block; high: behind it
  if (place + m.C <= end && i64(m.columns[place + m.C - 1]) < after) return place + m.C;
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (i64(m.columns[middle]) < after) low = middle;
    else high = middle;
  }
  return high;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) csr_blocks(const __grid_constant__ CsrBlocks m) {
  const int lane = threadIdx.x % kLanes;
  u64 counted = 0, of_all;
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
        const i64 block = column < 0 ? m.block_cols : quotient(column, m.C);
        if (block >= m.block_cols) places[k] = ends[k];
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
        const i64 from = places[k], after = (next + 1) * m.C;
        if (from < ends[k] && i64(m.columns[from]) < after) places[k] = end_of_block(m, from, ends[k], after);
        if (kFill && lane + k * kLanes < m.R) m.runs[t * m.R + lane + k * kLanes] = run_of(from, places[k] - from);
      }
      ++t, ++count;
    }
    if (!kFill && lane == 0 && i < m.block_rows) {
      counted += count;
      if (m.counts) m.counts[i + 1] = Index(count);
    }
  }
  if constexpr (!kFill) {
    sum_before<kThreads>(counted, of_all);
    if (threadIdx.x == 0 && of_all) atomicAdd(m.total, of_all);
    if (!arrives_last(m.arrived) || threadIdx.x) return;
    if (m.counts) m.counts[0] = 0;
    *m.found = i64(atomicAdd(m.total, u64(0))), *m.total = 0;
  }
}
