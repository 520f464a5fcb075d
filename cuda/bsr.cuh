// What a kernel may believe of index arrays that a user can write to: nothing. Out-of-range entries are clamped or
// skipped, so that no kernel reads or writes outside the arrays it was given.
#pragma once

#include "types.cuh"

struct Range { i64 first, last; };

// The blocks of block row i, inside [0, blocks).
template <class Index>
__device__ __forceinline__ Range blocks_of_row(const Index* __restrict__ indptr, i64 i, i64 blocks) {
  const i64 first = indptr[i], last = indptr[i + 1];
  return {first < 0 ? 0 : first, last > blocks ? blocks : last};
}

template <class Index> __device__ __forceinline__ bool in_range(Index column, i64 columns) {
  return u64(i64(column)) < u64(columns);
}
