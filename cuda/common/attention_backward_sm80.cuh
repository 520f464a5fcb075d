// What the kernels for gradients of attention by mma.sync share: the walk of a CTA over the tiles that its rows are
// combined with, and how a warp writes rows of a result.
#pragma once

#include "common/attention_backward.cuh"
#include "common/attention_sm80.cuh"

struct Turn { int row, key, part, head, whole; };  // the first query and the first key of the pair of tiles

// The tiles that the rows of a CTA are combined with, one after the other; for keys, those of all query heads that read
// them. The tile of the CTA is in shared memory, to save registers.
struct Walk {
  const Attention& a;
  const KeyTile& y;
  int head, e, last;

  __device__ __forceinline__ Walk(const Attention& a, const KeyTile& y) : a(a), y(y) {
    if constexpr (kByKeys) {
      head = y.tile.head * a.group - 1;
      e = last = 0;
      skip();
    } else {
      head = y.tile.head;
      e = y.tile.first;
      last = y.tile.last;
    }
  }
  __device__ __forceinline__ bool more() const { return e < last; }
  // Goes to the next head that has entries.
  __device__ __forceinline__ void skip() {
    while (e >= last && head + 1 < (y.tile.head + 1) * a.group) {
      const Entries entries = entries_of(a, y, ++head);
      e = entries.first;
      last = entries.last;
    }
  }
  __device__ __forceinline__ Turn next() {
    const Tile& x = y.tile;
    Turn turn;
    turn.part = part_of(a, e);
    turn.head = head;
    turn.row = kByKeys ? row_of(a, y, e) : x.row;
    turn.key = kByKeys ? y.key : x.key + column_of(a, e) * kTileK;
    const int last_key = turn.key + kTileK - 1, last_row = min(x.rows, turn.row + kTileQ) - 1;
    turn.whole = turn.part < 0 && last_key < x.keys && turn.key >= last_row + x.low && last_key <= turn.row + x.high;
    ++e;
    if constexpr (kByKeys) skip();
    return turn;
  }
  // Of the rows of the CTA: the first, and the end of those that exist.
  __device__ __forceinline__ int first_row() const { return kByKeys ? y.key : y.tile.row; }
  __device__ __forceinline__ int end() const { return kByKeys ? y.tile.keys : y.tile.rows; }
  __device__ __forceinline__ int batch() const { return y.tile.batch; }
  __device__ __forceinline__ int own_head() const { return y.tile.head; }
};

// Writes 16 rows through shared memory, 16 bytes at a time if the result is aligned. Returns the rows with an element
// that is not finite: bit r.
template <int kDim>
__device__ __forceinline__ u32 write_rows(const f32 (&x)[kDim / 8][4], f32 factor, u8* staged, Element* out,
                                          const Strides& strides, int rows, int columns) {
  using L = Lines<kDim>;
  const u32 lane = opaque(threadIdx.x) % 32;
  f32 bad[2] = {0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const u32 row = half * 8 + lane / 4;
      const f32 y0 = x[j][2 * half] * factor, y1 = x[j][2 * half + 1] * factor;
      bad[half] = fmaf(y0, 0.f, fmaf(y1, 0.f, bad[half]));
      *reinterpret_cast<u32*>(staged + row * L::kBytes + L::place(j / 2, j % 2, row) + lane % 4 * 4) =
          pack<Element>(y0, y1);
    }
  __syncwarp();
  const bool aligned =
      strides.column == 1 && ((reinterpret_cast<u64>(out) | u64(strides.row) * sizeof(Element)) & 15) == 0;
#pragma unroll 1
  for (u32 item = lane; item < 16 * L::kPieces; item += 32) {
    const u32 row = item / L::kPieces, piece = item % L::kPieces;
    if (int(row) >= rows) break;
    const u8* from = staged + row * L::kBytes + (piece ^ L::swizzle(row)) * 16;
    Element* to = out + i64(row) * strides.row + i64(piece * 8) * strides.column;
    const int left = columns - int(piece) * 8;
    if (aligned && left >= 8) *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from);
    else
      for (int d = 0; d < min(left, 8); ++d) to[d * strides.column] = reinterpret_cast<const Element*>(from)[d];
  }
  u32 found = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 lanes = __ballot_sync(kAll, bad[half] != 0.f);  // NaN is not 0
#pragma unroll
    for (int r = 0; r < 8; ++r) found |= (lanes >> 4 * r & 15u ? 1u : 0u) << (half * 8 + r);
  }
  return found & (rows >= 16 ? 0xffffu : (1u << max(rows, 0)) - 1);
}
