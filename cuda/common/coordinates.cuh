// Where the stored blocks of a pattern, or of its transpose, lie: visit(p, row, column) for every block p, with -1 for both
// where it lies outside the matrix. A thread searches indptr once and walks on for kNeighbors blocks.
#pragma once

#include "common/bsr.cuh"

constexpr int kNeighbors = 8;

// A pattern as it is stored.
template <class Index> struct StoredPattern {
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (rows + 1,)
  i64 rows, columns, blocks;
  i64 transposed;        // rows and columns change places as they are told
};
#ifdef STORED_PATTERN_BYTES
CHECK_LAYOUT(StoredPattern<INDEX>, STORED_PATTERN, (indices)(indptr)(rows)(columns)(blocks)(transposed))
#endif

// For all threads of a grid together.
template <class Index, class Visit>
__device__ __forceinline__ void for_blocks(const StoredPattern<Index>& a, Visit visit) {
  const i64 begin = a.indptr[0], end = a.indptr[a.rows];
  const i64 stride = i64(gridDim.x) * blockDim.x * kNeighbors;
  for (i64 p0 = (blockIdx.x * i64(blockDim.x) + threadIdx.x) * kNeighbors; p0 < a.blocks; p0 += stride) {
    i64 row = 0, upper = a.rows;  // the last row that starts at or before p0
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
