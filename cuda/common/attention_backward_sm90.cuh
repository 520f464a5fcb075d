// What the kernels for gradients in one pass share: attention_backward_begin, _sm90 or _fused, and _end.
// dQ is added up in float32, in pieces of 64 queries, in the order in which the threads of a warpgroup hold it. A tile
// has one or two pieces and never has queries of two sequences: with sequences of different lengths, tile m of sequence
// s, which begins at query b, has number ceil(b / kTileQ) + s + m.
#pragma once

#include "common/attention_backward.cuh"

constexpr int kDim = HEAD_DIM;       // columns of q, k, v and dO; what is missing is 0
constexpr int kPieces = kTileQ / 64, kSumsOfPiece = 64 * kDim;

struct BackwardRows {
  Backward backward;
  const Out* out;                    // null: `delta` is given
  const f32 *lse, *dlse, *delta;     // (batches, heads, queries); dlse and delta may be null
  Strides out_strides;
  // Of each query, in pieces of 64: see place_of. Then dQ so far, and how many have been added to each piece (to each
  // tile, at its first piece).
  f32 *logarithms, *deltas, *sums;
  int* turns;
  const int *row_first, *row_columns;  // the mask by tiles of queries, or null
  // Tiles of keys from number `whole` of the walk on are cut into `shares`, so that all CTAs end at about the same time: a
  // CTA has some of the turns of a tile. The sums of the shares meet in `partials`.
  f32* partials;
  int padded, whole, shares;         // padded: pieces of a head
};
#ifdef BACKWARD_ROWS_BYTES
CHECK_LAYOUT(BackwardRows, BACKWARD_ROWS, (backward)(out)(lse)(dlse)(delta)(out_strides)(logarithms)(deltas)(sums)(turns)
             (row_first)(row_columns)(partials)(padded)(whole)(shares))
#endif

// A thread with the scores of queries 8 j + 2 c and 8 j + 2 c + 1 of a piece reads its 16 statistics as four pieces of 16
// bytes, which lie in different banks for different c. This is where the statistic of query i lies.
__device__ __forceinline__ int place_of(int i) {
  const int c = i % 8 / 2, t = i / 8 * 2 + i % 2;
  return c * 16 + ((t / 4) ^ (c / 2)) * 4 + t % 4;
}

// The sequence that query `row` belongs to.
__device__ __forceinline__ int sequence_of(const Attention& a, int row) {
  int low = 0, high = a.sequence_count;  // the last sequence that begins at or before the row
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (a.q_bounds[middle] <= row ? low : high) = middle;
  }
  return low;
}
// The number of the piece of a head that query `row` is in; its sequence begins at `begin`.
__device__ __forceinline__ int piece_of(const Attention& a, int padded, int begin, int row) {
  if (!a.q_bounds) return row / 64;
  const int tile = (begin + kTileQ - 1) / kTileQ + sequence_of(a, row) + (row - begin) / kTileQ;
  return min(tile, padded / kPieces - 1) * kPieces + (row - begin) % kTileQ / 64;
}
