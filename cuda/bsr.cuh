// What a kernel may believe of index arrays that a user can write to: nothing. Out-of-range entries are clamped or
// skipped, so that no kernel reads or writes outside the arrays it was given.
#pragma once

#include "types.cuh"

// C = alpha * A @ B + beta * C with A in BSR: the one argument of the product kernels. One argument costs the caller
// a third of what twenty do. launch.py packs it field by field.
template <class A, class B, class C, class Acc, class Index> struct Product {
  Acc alpha, beta;
  const A* data;         // (blocks, R, K)
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (block_rows + 1,)
  const B* b;            // (block_cols * K, N), strides in elements
  C* c;                  // (block_rows * R, N)
  i64 block_rows, block_cols, blocks, N;
  i64 b_row, b_col, c_row, c_col;
  int R, K, read_c;
};

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
