// What the attention kernels share: O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j that query i sees.
// Here are the kernels' argument, the tiles of queries with the keys that each sees, and attend_row, the exact result
// of one query. A user can write to the arrays of a mask and to the bounds of sequences, so their values are clamped.
#pragma once

#include "common/layout.cuh"
#include "ptx/convert.cuh"

using Element = ELEMENT;
using Out = ELEMENT_O;
using Sum = SUM;
// The sizes computed with; columns beyond the real sizes are 0.
constexpr int kHeadDim = HEAD_DIM, kValueDim = VALUE_DIM;
constexpr int kTileQ = TILE_Q, kTileK = TILE_K;            // queries and keys of a tile
// Keys of an entry of a mask's lists. Several pieces that are not side by side may make up a tile of keys.
#ifdef PIECE
constexpr bool kGathers = true;
constexpr int kPiece = PIECE;
#else
constexpr bool kGathers = false;
constexpr int kPiece = kTileK;
#endif
constexpr int kPiecesOfTile = kTileK / kPiece;
constexpr int kWords = kTileK / 32, kWordKeys = kPiece < 32 ? kPiece : 32;  // words of a tile, keys of an entry's word
enum Scores { kPlain, kSigned, kCapped };                  // scale > 0; any scale; softcap
constexpr Scores kScores = Scores(SCORES);
constexpr bool kFp8 = Same<Element, e4m3>::value;

struct Strides { i64 batch, head, row, column; };  // in elements
#ifdef STRIDES_BYTES
CHECK_LAYOUT(Strides, STRIDES, (batch)(head)(row)(column))
#endif

// The argument. Python packs it field by field.
struct Attention {
  const Element *q, *k, *v;
  Out* o;
  Sum* lse;  // (batches, heads, queries) or null
  Strides q_strides, k_strides, v_strides, o_strides;
  // Bounds of sequences of different lengths that are stored one after the other, and tile -> sequence; otherwise null.
  const int *q_bounds, *k_bounds, *sequences;
  const int* order;  // position in the walk -> tile, for each pattern; null: in order, or in reverse
  // A mask by tiles. first: tile of queries -> first entry. columns: entry -> tile of keys. parts: -1 if all of the
  // tile is allowed, otherwise which parts_q x parts_k blocks of `kinds` the tile touches: these have 2^31 numbers or
  // more. A kind is -1 for a whole block, -2 for a block that allows nothing, otherwise the number of an element mask
  // in `bits`.
  const int *first, *columns, *parts, *kinds;
  const u32* bits;
  int* counters;     // {tiles claimed, CTAs that are done}, zero before and after
  // For fp8, a factor above 0 for each head: (batches, heads) for q, (batches, heads / group) for k and v; null: 1.
  const f32 *q_scale, *k_scale, *v_scale;
  // Scale * log2(e), for kCapped 2 scale log2(e) / softcap; softcap * log2(e); factor of the result.
  Sum scale, cap, value_scale;
  int batches, heads, group, queries, keys, head_dim, value_dim, sequence_count;
  int left, right, bottom_right;  // the query at position i sees keys i - left to i + right
  int tiles, section, backwards;  // tiles of one head; heads whose tiles are computed together
  int entries, masks, block_q, block_k, parts_q, parts_k, bit_words;
  int patterns, pattern_batch, pattern_group;  // patterns per batch, query heads that share one; 0: all do
};
#ifdef ATTENTION_BYTES
CHECK_LAYOUT(Attention, ATTENTION, (q)(k)(v)(o)(lse)(q_strides)(k_strides)(v_strides)(o_strides)(q_bounds)(k_bounds)
             (sequences)(order)(first)(columns)(parts)(kinds)(bits)(counters)(q_scale)(k_scale)(v_scale)(scale)(cap)
             (value_scale)(batches)(heads)(group)(queries)(keys)(head_dim)(value_dim)(sequence_count)(left)(right)
             (bottom_right)(tiles)(section)(backwards)(entries)(masks)(block_q)(block_k)(parts_q)(parts_k)(bit_words)
             (patterns)(pattern_batch)(pattern_group))
#endif

// Queries `row` to `rows` - 1 of a head, and the keys that they may see: keys `key` to `keys` - 1 with low <= key -
// query <= high, in the tiles (or entries of the mask) `first` to `last` - 1. If there is no tile, head < 0.
struct Tile {
  int head, batch, row, rows, key, keys, low, high, first, last;
  Sum scale, value_scale;  // for fp8: factors of scores and of the result
  int shift;               // for fp8: from a key to its index among the values, see attention_values.cu
};

__device__ __forceinline__ int clamp(int x, int low, int high) { return min(max(x, low), high); }

// Factors of scores and of the result.
__device__ __forceinline__ Sum scale_of(const Attention& a, const Tile& x) { return kFp8 ? x.scale : a.scale; }
__device__ __forceinline__ Sum value_scale_of(const Tile& x) { return kFp8 ? x.value_scale : Sum(1); }

__device__ __forceinline__ void set_scales(const Attention& a, Tile& x) {
  // A factor that is not above 0 becomes NaN, and so does the result.
  const auto factor = [](const f32* scales, int i) {
    const f32 scale = scales ? scales[i] : 1.f;
    return scale > 0.f ? scale : __int_as_float(0x7fffffff);
  };
  const int head = x.batch * a.heads + x.head, kv_head = x.batch * (a.heads / a.group) + x.head / a.group;
  const Sum scale = a.scale * factor(a.q_scale, head) * factor(a.k_scale, kv_head);
  // A positive factor is clamped to these bounds, beyond which the result is the same; so scores of hidden keys stay
  // finite.
  x.scale = kScores == kPlain && scale == scale ? min(max(scale, Sum(1e-26)), Sum(1e8)) : scale;
  x.value_scale = a.value_scale * factor(a.v_scale, kv_head);
}

// Tile number t of the walk. The heads of a section are walked together, tiles with most keys first. All lanes of a
// warp call it.
__device__ __forceinline__ Tile tile_at(const Attention& a, int t) {
  const int heads = a.q_bounds ? a.heads : a.batches * a.heads;
  if (t >= heads * a.tiles) return {-1};
  const int section = t / (a.section * a.tiles), width = min(a.section, heads - section * a.section);
  const int within = t - section * a.section * a.tiles, place = within / width;
  const int number = section * a.section + within % width;
  Tile x = {number % a.heads, number / a.heads};
  if constexpr (kFp8) set_scales(a, x);
  const int pattern = (a.pattern_batch ? x.batch * a.patterns : 0) + (a.pattern_group ? x.head / a.pattern_group : 0);
  const int tile = a.order ? clamp(a.order[pattern * a.tiles + place], 0, a.tiles - 1)
                           : a.backwards ? a.tiles - 1 - place : place;
  int begin = 0;
  x.rows = a.queries;
  x.keys = a.keys;
  if (a.q_bounds) {
    x.batch = 0;
    const int s = a.sequences[place];
    if (u32(s) >= u32(a.sequence_count)) return x.rows = 0, x;
    begin = clamp(a.q_bounds[s], 0, a.queries);
    x.rows = clamp(a.q_bounds[s + 1], begin, a.queries);
    x.key = clamp(a.k_bounds[s], 0, a.keys);
    x.keys = clamp(a.k_bounds[s + 1], x.key, a.keys);
    if constexpr (kFp8) x.shift = 16 * ((x.key + 15) / 16 + s) - x.key;
  }
  const int place_of_first = (a.bottom_right ? x.keys - x.key - (x.rows - begin) : 0) + x.key - begin;
  x.low = place_of_first - a.left;
  x.high = place_of_first + a.right;
  x.row = begin + tile * kTileQ;
  const int last_row = min(x.rows, x.row + kTileQ) - 1;
  // Keys that any of the queries sees.
  const int from = max(x.key, x.row + x.low), to = min(x.keys, last_row + x.high + 1);
  if (x.row > last_row || from >= to) return x;
  const int low_tile = (from - x.key) / kPiece, end_tile = (to - x.key + kPiece - 1) / kPiece;
  if (!a.first) return x.first = low_tile, x.last = end_tile, x;
  x.first = clamp(a.first[pattern * a.tiles + tile], 0, a.entries);
  x.last = clamp(a.first[pattern * a.tiles + tile + 1], x.first, a.entries);
  if (a.left < a.keys || a.right < a.keys) {  // entries are sorted: skip those outside the band
    int under = 0, over = 0;
    for (int e = x.first + int(threadIdx.x % 32); __any_sync(0xffffffffu, e < x.last); e += 32) {
      const int column = e < x.last ? a.columns[e] : low_tile;
      under += __popc(__ballot_sync(0xffffffffu, column < low_tile));
      over += __popc(__ballot_sync(0xffffffffu, column >= end_tile));
    }
    x.first = min(x.first + under, x.last);
    x.last = max(x.last - over, x.first);
  }
  return x;
}

// A tile or a piece of keys: its first key, its part, and whether all queries see all of it.
struct Entry { int key, part, whole; };

__device__ __forceinline__ Entry entry_at(const Attention& a, const Tile& x, int column, int part) {
  const int key = x.key + column * kPiece, last = key + kPiece - 1, last_row = min(x.rows, x.row + kTileQ) - 1;
  return {key, part, part < 0 && last < x.keys && key >= last_row + x.low && last <= x.row + x.high};
}
__device__ __forceinline__ int column_of(const Attention& a, int e) {
  return a.first ? clamp(a.columns[e], 0, (a.keys - 1) / kPiece) : e;
}
__device__ __forceinline__ int part_of(const Attention& a, int e) { return a.parts ? a.parts[e] : -1; }

// Bit i is set if the query sees key + i by the band, for the keys of a word from `key` on.
__device__ __forceinline__ u32 word_of_band(const Tile& x, int row, int key) {
  const int from = clamp(max(row + x.low, x.key) - key, 0, kWordKeys);
  const int to = clamp(min(row + x.high + 1, x.keys) - key, 0, kWordKeys);
  return from < to ? u32(((1ull << to) - 1) & ~((1ull << from) - 1)) : 0u;
}
// The kind of block number `place` of a part.
__device__ __forceinline__ int kind_of(const Attention& a, int part, int place) {
  const u32 size = a.parts_q * a.parts_k;
  return a.kinds[u64(u32(min(part, a.entries - 1))) * size + min(u32(place), size - 1)];
}
// The same by the mask, for a key that is in the same block as the next 15 or 31 keys. `line` is the index of the
// query's block in block column 0 among the blocks of the part, `inside` is the query's row in the block.
__device__ __forceinline__ u32 bits_of(const Attention& a, int part, int line, int inside, int key) {
  const int block = key / a.block_k, at = key - block * a.block_k, kind = kind_of(a, part, line + block);
  if (u32(kind) >= u32(a.masks)) return kind == -1 ? 0xffffffffu : 0u;
  return a.bits[u64(u32(kind)) * u32(a.block_q * a.bit_words) + u32(inside * a.bit_words + at / 32)] >> at % 32;
}
__device__ __forceinline__ u32 word_of_mask(const Attention& a, int part, int line, int inside, int key) {
  if (kWordKeys < 32 || a.block_k % 32 == 0) return bits_of(a, part, line, inside, key);
  return (bits_of(a, part, line, inside, key) & 0xffffu) | bits_of(a, part, line, inside, key + 16) << 16;
}
// The words (32 keys each) of a query for a tile of keys that are side by side.
__device__ __forceinline__ void words_of(const Attention& a, const Tile& x, const Entry& entry, int row,
                                         u32 (&words)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = word_of_band(x, row, entry.key + 32 * w);
  if (entry.part < 0 || row >= x.rows) return;
  const int block = row / a.block_q, inside = row - block * a.block_q;
  const int line = (block - x.row / a.block_q) * a.parts_k - entry.key / a.block_k;
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] &= word_of_mask(a, entry.part, line, inside, entry.key + 32 * w);
}
__device__ __forceinline__ u32 word_of(const Attention& a, const Tile& x, const Entry& entry, int row, int w) {
  u32 word = word_of_band(x, row, entry.key + kWordKeys * w);
  if (entry.part >= 0 && row < x.rows && word) {
    const int block = row / a.block_q, line = (block - x.row / a.block_q) * a.parts_k - entry.key / a.block_k;
    word &= word_of_mask(a, entry.part, line, row - block * a.block_q, entry.key + kWordKeys * w);
  }
  return word;
}
// Piece number n of a tile of queries, from the last one on. After all of them: one beyond the last key.
__device__ __forceinline__ Entry piece_at(const Attention& a, const Tile& x, int n) {
  const int e = x.last - 1 - n;
  if (e < x.first) return {x.keys, -1, false};
  return entry_at(a, x, column_of(a, e), part_of(a, e));
}
// Word w of a query for the tile of keys that begins with piece number n.
__device__ __forceinline__ u32 word_of_tile(const Attention& a, const Tile& x, int n, int row, int w) {
  if constexpr (kPiece >= 32) return word_of(a, x, piece_at(a, x, n + w * 32 / kPiece), row, w % (kPiece / kWordKeys));
  return word_of(a, x, piece_at(a, x, n + 2 * w), row, 0) | word_of(a, x, piece_at(a, x, n + 2 * w + 1), row, 0) << 16;
}

// ------------------------------------------------------------------------------------------------------ one query
__device__ __forceinline__ f64 exp2_of(f64 x) { return exp2(x); }
__device__ __forceinline__ f32 log2_of(f32 x) { return __log2f(x); }
__device__ __forceinline__ f64 log2_of(f64 x) { return log2(x); }
__device__ __forceinline__ f32 quotient(f32 x, f32 y) { return __fdividef(x, y); }
__device__ __forceinline__ f64 quotient(f64 x, f64 y) { return x / y; }
// A score times log2(e).
template <class T> __device__ __forceinline__ T score_of(const Attention& a, Sum scale, T x) {
  if constexpr (kScores == kCapped) return T(a.cap) * (T(1) - quotient(T(2), exp2_of(x * T(scale)) + T(1)));
  else return x * T(scale);
}
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int i = 16; i; i /= 2) x += shuffle_xor(x, i);
  return x;
}

// Computes one query by one warp, key by key. Values that the query does not see are not read, since 0 x Inf is NaN.
// Calls store(column, value) for each column of the result; returns the logarithm of the sum.
template <class Store> __device__ __forceinline__ Sum attend_row(const Attention& a, const Tile& x, int row, Store store) {
  constexpr int kQ = (kHeadDim + 31) / 32, kV = (kValueDim + 31) / 32;
  const int lane = threadIdx.x % 32;
  const i64 kv_head = x.head / a.group;
  const Element* q = a.q + x.batch * a.q_strides.batch + x.head * a.q_strides.head + row * a.q_strides.row;
  const Element* k = a.k + x.batch * a.k_strides.batch + kv_head * a.k_strides.head;
  const Element* v = a.v + x.batch * a.v_strides.batch + kv_head * a.v_strides.head;
  Sum query[kQ], accum[kV], row_max = -Sum(__int_as_float(0x7f800000)), row_sum = 0;
  bool seen = false;
#pragma unroll
  for (int i = 0; i < kQ; ++i) {
    const int d = lane + 32 * i;
    query[i] = d < a.head_dim ? load<Sum>(q[d * a.q_strides.column]) : Sum(0);
  }
#pragma unroll
  for (int i = 0; i < kV; ++i) accum[i] = 0;
#pragma unroll 1
  for (int e = x.first; e < x.last; ++e) {
    const Entry entry = entry_at(a, x, column_of(a, e), part_of(a, e));
#pragma unroll 1
    for (int w = 0; w < kPiece / kWordKeys; ++w) {
      u32 word = __shfl_sync(0xffffffffu, word_of(a, x, entry, row, w), 0);
#pragma unroll 1
      for (; word; word &= word - 1) {
        const i64 j = entry.key + kWordKeys * w + __ffs(word) - 1;
        Sum dot = 0;
#pragma unroll
        for (int i = 0; i < kQ; ++i) {
          const int d = lane + 32 * i;
          if (d < a.head_dim) dot += query[i] * load<Sum>(k[j * a.k_strides.row + d * a.k_strides.column]);
        }
        const Sum score = score_of(a, scale_of(a, x), warp_sum(dot));
        const Sum higher = score > row_max ? score : row_max;
        const Sum origin = higher == -Sum(__int_as_float(0x7f800000)) ? Sum(0) : higher;
        const Sum rescale = exp2_of(row_max - origin), weight = exp2_of(score - origin);
        row_sum = row_sum * rescale + weight;
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          const int d = lane + 32 * i;
          if (d < a.value_dim)
            accum[i] = accum[i] * rescale + weight * load<Sum>(v[j * a.v_strides.row + d * a.v_strides.column]);
        }
        row_max = higher;
        seen = true;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kV; ++i) {
    const int d = lane + 32 * i;
    if (d < a.value_dim) store(d, seen ? quotient(accum[i], row_sum) * value_scale_of(x) : Sum(0));
  }
  if (!seen) return -Sum(__int_as_float(0x7f800000));
  // All scores of the keys seen are -inf: the softmax is 0 / 0 = NaN. A logarithm of -inf is only for queries without
  // keys.
  return row_sum == Sum(0) ? Sum(__int_as_float(0x7fffffff)) : (row_max + log2_of(row_sum)) * Sum(0.69314718055994530942);
}
