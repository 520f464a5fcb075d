// The arguments of product kernels, and access to index arrays. A user can write to index arrays, so out-of-range
// entries are clamped or skipped: no kernel reads or writes outside the arrays it was given.
#pragma once

#include "common/layout.cuh"

// C = alpha * A @ B + beta * C with A in BSR: the argument of the product kernels. It is one struct, because one
// argument costs the caller a third of the time of twenty. Python packs it field by field. R, K and the index arrays
// describe A as it is used: for a product with the transpose a stored block is K x R.
template <class A, class B, class C, class Acc, class Index> struct Product {
  Acc alpha, beta;
  const A* data;         // (blocks, R, K), or (blocks, K, R) for a product with the transpose
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (block_rows + 1,)
  const int* places;     // for a product with the transpose: entry of the index -> block of `data`
  const B* b;            // (batches, block_cols * K, N), strides in elements
  C* c;                  // (batches, block_rows * R, N)
  i64 block_rows, block_cols, blocks, N, batches;
  i64 b_row, b_col, b_batch, c_row, c_col, c_batch;
  int R, K, read_c;
};
#ifdef PRODUCT_BYTES
#define CHECK_PRODUCT(Type)                                                                                      \
  CHECK_LAYOUT(Type, PRODUCT, (alpha)(beta)(data)(indices)(indptr)(places)(b)(c)(block_rows)(block_cols)(blocks) \
               (N)(batches)(b_row)(b_col)(b_batch)(c_row)(c_col)(c_batch)(R)(K)(read_c))
#else
#define CHECK_PRODUCT(Type)
#endif

// alpha * sum + beta * old as an element of C; `old` is ignored unless problem.read_c.
template <class A, class B, class C, class Acc, class Index>
__device__ __forceinline__ C finish(const Product<A, B, C, Acc, Index>& problem, Acc sum, C old) {
  const Acc before = problem.read_c ? multiply_add(problem.beta, load<Acc>(old), zero<Acc>()) : zero<Acc>();
  return Store<C>::from(multiply_add(problem.alpha, sum, before));
}
template <class A, class B, class C, class Acc, class Index>
__device__ __forceinline__ void store_sum(const Product<A, B, C, Acc, Index>& problem, C* target, Acc sum) {
  const Acc before = problem.read_c ? multiply_add(problem.beta, load<Acc>(*target), zero<Acc>()) : zero<Acc>();
  *target = Store<C>::from(multiply_add(problem.alpha, sum, before));
}

// The work list of a pattern for the tensor cores, which work_list.py computes. A block row is cut into row tiles of
// equal height that divides R. A group is a few row tiles that share a CTA, which walks over the union of their block
// columns.
struct Schedule {
  const int4* items;    // {group, first entry, end, split or -1}, longest first
  const int4* splits;   // split -> {first split of its group, number of splits, the group's first entry and end}
  const int* count;     // number of items
  const int* columns;   // entry -> block column; block_cols for entries outside the matrix
  const int* blocks;    // entry * row tiles + row tile -> block, or -1 where the row tile lacks it
  const int* row_tiles; // group * row tiles + row tile -> first row / row tile height, or -1
  int* counters;        // {tiles claimed, CTAs that are done}, zero before and after
  f32* partial;         // accumulators of splits
  int* arrived;         // splits that have arrived, per cut group, column tile and warpgroup; zero before and after
};
#ifdef SCHEDULE_BYTES
CHECK_LAYOUT(Schedule, SCHEDULE, (items)(splits)(count)(columns)(blocks)(row_tiles)(counters)(partial)(arrived))
#endif

struct Range { i64 first, last; };

// The part of a range that lies inside [0, blocks).
__device__ __forceinline__ Range inside(i64 first, i64 last, i64 blocks) {
  return {first < 0 ? 0 : first, last > blocks ? blocks : last};
}
// The blocks of block row i, clamped to [0, blocks).
template <class Index>
__device__ __forceinline__ Range blocks_of_row(const Index* __restrict__ indptr, i64 i, i64 blocks) {
  return inside(indptr[i], indptr[i + 1], blocks);
}

template <class Index> __device__ __forceinline__ bool in_range(Index column, i64 columns) {
  return u64(i64(column)) < u64(columns);
}
