// What a kernel may believe of index arrays that a user can write to: nothing. Out-of-range entries are clamped or
// skipped, so that no kernel reads or writes outside the arrays it was given.
#pragma once

#include "common/layout.cuh"

// C = alpha * A @ B + beta * C with A in BSR: the one argument of the product kernels. One argument costs the caller
// a third of what twenty do. launch.py packs it field by field. R, K and the index arrays describe A as it is used: for
// a product with the transpose a stored block is K x R.
template <class A, class B, class C, class Acc, class Index> struct Product {
  Acc alpha, beta;
  const A* data;         // (blocks, R, K), or (blocks, K, R) where the transpose is meant
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (block_rows + 1,)
  const int* places;     // where the transpose is meant: entry of the index -> block of `data`
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

// alpha * sum + beta * old as an element of C; `old` is of no account where the old C is not read.
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

// The work list of a pattern for the tensor cores, made by schedule.py. A block row is cut into row tiles of equal height
// that divide R; a group is a few row tiles that share a CTA, walked over the union of their block columns.
struct Schedule {
  const int4* items;    // {group, first entry, end, piece or -1}, longest first
  const int4* splits;   // piece -> {first piece of its group, pieces, the group's first entry and end}
  const int* count;     // items
  const int* columns;   // entry -> block column; block_cols for what lies outside
  const int* blocks;    // entry * row tiles + row tile -> block, or -1 where the row tile's row lacks it
  const int* row_tiles;     // group * row tiles + row tile -> first row / row tile height, or -1
  int* counters;        // {tiles claimed, CTAs that are done}, zero before and after
  f32* partial;         // sums of the pieces of groups that were split
  int* arrived;         // pieces that are there, per split group, column tile and warpgroup; zero before and after
};
#ifdef SCHEDULE_BYTES
CHECK_LAYOUT(Schedule, SCHEDULE, (items)(splits)(count)(columns)(blocks)(row_tiles)(counters)(partial)(arrived))
#endif

struct Range { i64 first, last; };

// What of a range lies inside [0, blocks).
__device__ __forceinline__ Range inside(i64 first, i64 last, i64 blocks) {
  return {first < 0 ? 0 : first, last > blocks ? blocks : last};
}
// The blocks of block row i, inside [0, blocks).
template <class Index>
__device__ __forceinline__ Range blocks_of_row(const Index* __restrict__ indptr, i64 i, i64 blocks) {
  return inside(indptr[i], indptr[i + 1], blocks);
}

template <class Index> __device__ __forceinline__ bool in_range(Index column, i64 columns) {
  return u64(i64(column)) < u64(columns);
}
