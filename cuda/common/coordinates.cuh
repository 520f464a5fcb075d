// Coordinates of the stored blocks of a pattern or of its transpose: visit(p, row, column) for every block p, where
// both are -1 if the block lies outside the matrix. A thread searches indptr once and then proceeds through kNeighbors
// blocks.
#pragma once

#include "common/bsr.cuh"

constexpr int kNeighbors = 8;

// A pattern as it is stored.
template <class Index> struct StoredPattern {
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (rows + 1,)
  i64 rows, columns, blocks;
  i64 transposed;        // if not 0, rows and columns are exchanged in the calls of visit
};
#ifdef STORED_PATTERN_BYTES
CHECK_LAYOUT(StoredPattern<INDEX>, STORED_PATTERN, (indices)(indptr)(rows)(columns)(blocks)(transposed))
#endif

// All threads of a grid call this together.
template <class Index, class Visit>
__device__ __forceinline__ void for_blocks(const StoredPattern<Index>& a, Visit visit) {
  const i64 begin = a.indptr[0], end = a.indptr[a.rows];
  const i64 stride = i64(gridDim.x) * blockDim.x * kNeighbors;
  for (i64 p0 = (blockIdx.x * i64(blockDim.x) + threadIdx.x) * kNeighbors; p0 < a.blocks; p0 += stride) {
    i64 row = 0, upper = a.rows;  // searches the last row that starts at or before p0
    while (upper - row > 1) {
      const i64 middle = (row + upper) / 2;
      if (i64(a.indptr[middle]) <= p0) row = middle;
      else upper = middle;
    }
    for (i64 p = p0; p < p0 + kNeighbors && p < a.blocks; ++p) {
      while (row + 1 < a.rows && i64(a.indptr[row + 1]) <= p) ++row;
      const Index column = a.indices[p];
      const bool stored = p >= begin && p < end && in_range(column, a.columns);
      const int r = stored ? int(row) : -1, c = stored ? int(column) : -1;
      visit(p, a.transposed ? c : r, a.transposed ? r : c);
    }
  }
}
