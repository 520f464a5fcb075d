// What the kernels for the gradients of attention share. With the weights p[i, j] = exp(s[i, j] - lse[i]) of the
// scores s[i, j] = scale * Q[i] . K[j]:
//   dV[j] = sum_i p[i, j] dO[i]     ds[i, j] = p[i, j] (dO[i] . V[j] - delta[i])
//   dQ[i] = scale * sum_j ds[i, j] K[j]     dK[j] = scale * sum_i ds[i, j] Q[i]
// With a softcap c, the scores are c tanh(s / c) instead, and ds has the factor 1 - tanh(s / c)^2.
// Here are the argument, the tiles of keys with the queries that see each, and the exact gradients of one query and of
// one key. Out is the type of dO.
#pragma once

#include "common/attention.cuh"

// What a kernel computes. Where the sums of dK and dV do not fit the registers, each has a launch of its own.
enum Role { kOfQueries, kOfKeysAndValues, kOfKeys, kOfValues };
constexpr Role kRole = Role(ROLE);
constexpr bool kByKeys = kRole != kOfQueries;

// Of one query: the logarithm of its sum times log2(e), infinite if it sees nothing, so that its weights are 0; and
// what is subtracted from dO . V.
struct alignas(2 * sizeof(Sum)) Statistic { Sum lse, delta; };

// The argument. Python packs it field by field.
struct Backward {
  // Its lists are by tiles of queries, or for gradients of keys and values by tiles of keys: `columns` are tiles of
  // queries then, and `tiles`, `section` and `sequences` count or belong to tiles of keys.
  Attention attention;
  const Out* dout;
  const Statistic* statistics;  // (batches, heads, queries)
  Element *dq, *dk, *dv;
  Strides dout_strides, dq_strides, dk_strides, dv_strides;
  Sum factor, inverse_cap;      // of dQ and dK; 1 / attention.cap for kCapped
};
#ifdef BACKWARD_BYTES
CHECK_LAYOUT(Backward, BACKWARD, (attention)(dout)(statistics)(dq)(dk)(dv)(dout_strides)(dq_strides)(dk_strides)
             (dv_strides)(factor)(inverse_cap))
#endif

template <class T> __device__ __forceinline__ T* at(T* from, const Strides& strides, i64 batch, i64 head, i64 row) {
  return from + batch * strides.batch + head * strides.head + row * strides.row;
}
__device__ __forceinline__ const Statistic* statistics_of(const Backward& b, int batch, int head) {
  return b.statistics + (i64(batch) * b.attention.heads + head) * b.attention.queries;
}

// The weight of a score; `slope` is the derivative of a score that a softcap bounds.
__device__ __forceinline__ Sum weight_of(const Attention& a, Sum score, Sum lse, Sum& slope) {
  slope = 1;
  if constexpr (kScores == kCapped) {
    const Sum bent = Sum(1) - quotient(Sum(2), exp2_of(score * a.scale) + Sum(1));
    slope = Sum(1) - bent * bent;
    return exp2_of(a.cap * bent - lse);
  } else {
    return exp2_of(score * a.scale - lse);
  }
}

// ---------------------------------------------------------------------------------------------------- tiles of keys
// Keys `key` to `key` + kTileK - 1 of a head of keys, and the tiles of queries `low` to `end` - 1 whose queries may see
// them by the band. In `tile`, `head` is the head of keys (if < 0, there is no tile), `key` and `keys` are the first
// key and the end of the sequence, and `row` is to be set to the first query of a tile.
struct KeyTile { Tile tile; int number, key, begin, low, end; };

__device__ __forceinline__ int pattern_of(const Attention& a, int batch, int head) {
  return (a.pattern_batch ? batch * a.patterns : 0) + (a.pattern_group ? head / a.pattern_group : 0);
}

// Tile number t of the walk.
__device__ __forceinline__ KeyTile key_tile_at(const Attention& a, int t) {
  const int own = a.heads / a.group, heads = a.q_bounds ? own : a.batches * own;
  KeyTile y = {};
  Tile& x = y.tile;
  x.head = -1;
  if (t >= heads * a.tiles) return y;
  const int section = t / (a.section * a.tiles), width = min(a.section, heads - section * a.section);
  const int within = t - section * a.section * a.tiles, place = within / width;
  const int number = section * a.section + within % width;
  x.head = number % own;
  x.batch = number / own;
  x.rows = a.queries;
  x.keys = a.keys;
  y.number = a.order ? clamp(a.order[pattern_of(a, x.batch, x.head * a.group) * a.tiles + place], 0, a.tiles - 1)
                     : a.backwards ? a.tiles - 1 - place : place;
  if (a.q_bounds) {
    x.batch = 0;
    const int s = a.sequences[place];
    if (u32(s) >= u32(a.sequence_count)) return x.keys = 0, y;
    y.begin = clamp(a.q_bounds[s], 0, a.queries);
    x.rows = clamp(a.q_bounds[s + 1], y.begin, a.queries);
    x.key = clamp(a.k_bounds[s], 0, a.keys);
    x.keys = clamp(a.k_bounds[s + 1], x.key, a.keys);
  }
  const int place_of_first = (a.bottom_right ? x.keys - x.key - (x.rows - y.begin) : 0) + x.key - y.begin;
  x.low = place_of_first - a.left;
  x.high = place_of_first + a.right;
  y.key = x.key + y.number * kTileK;
  const int last_key = min(x.keys, y.key + kTileK) - 1;
  // Queries that see any of the keys.
  const int from = max(y.begin, y.key - x.high), to = min(x.rows, last_key - x.low + 1);
  if (y.key > last_key || from >= to) return y;
  y.low = (from - y.begin) / kTileQ;
  y.end = (to - y.begin + kTileQ - 1) / kTileQ;
  return y;
}

// The entries of a query head, those outside of the band left out. All lanes of a warp call it.
struct Entries { int first, last; };

__device__ __forceinline__ Entries entries_of(const Attention& a, const KeyTile& y, int head) {
  if (y.low >= y.end || !a.first) return {y.low, y.end};
  const int at = pattern_of(a, y.tile.batch, head) * a.tiles + y.number;
  const int first = clamp(a.first[at], 0, a.entries), last = clamp(a.first[at + 1], first, a.entries);
  if (a.left >= a.keys && a.right >= a.keys) return {first, last};
  int under = 0, over = 0;
  for (int e = first + int(threadIdx.x % 32); __any_sync(0xffffffffu, e < last); e += 32) {
    const int column = e < last ? a.columns[e] : y.low;
    under += __popc(__ballot_sync(0xffffffffu, column < y.low));
    over += __popc(__ballot_sync(0xffffffffu, column >= y.end));
  }
  return {min(first + under, last), max(last - over, min(first + under, last))};
}
// The first query of an entry.
__device__ __forceinline__ int row_of(const Attention& a, const KeyTile& y, int e) {
  return y.begin + kTileQ * (a.first ? clamp(a.columns[e], 0, (a.queries - 1) / kTileQ) : e);
}

// ------------------------------------------------------------------------------------------------------- one vector
// A row of up to kDim elements, of which a lane has every 32nd.
template <int kDim> struct Row {
  static constexpr int kEach = (kDim + 31) / 32;
  Sum x[kEach];

  __device__ __forceinline__ Row() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = 0;
  }
  template <class T> __device__ __forceinline__ Row(const T* from, i64 column, int columns) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      x[i] = d < columns ? load<Sum>(from[d * column]) : Sum(0);
    }
  }
  __device__ __forceinline__ Sum dot(const Row& y) const {
    Sum sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += x[i] * y.x[i];
    return warp_sum(sum);
  }
  __device__ __forceinline__ void add(Sum factor, const Row& y) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] += factor * y.x[i];
  }
  __device__ __forceinline__ void store(Element* to, i64 column, int columns, Sum factor) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int d = threadIdx.x % 32 + 32 * i;
      if (d < columns) to[d * column] = Store<Element>::from(x[i] * factor);
    }
  }
};

// Writes dQ of one query, by one warp, key by key. What the query does not see is not read, since 0 x Inf is NaN.
__device__ __forceinline__ void write_query(const Backward& b, const Tile& x, int row, const Statistic& own) {
  const Attention& a = b.attention;
  const int kv_head = x.head / a.group;
  const Row<kHeadDim> q(at(a.q, a.q_strides, x.batch, x.head, row), a.q_strides.column, a.head_dim);
  const Row<kValueDim> dout(at(b.dout, b.dout_strides, x.batch, x.head, row), b.dout_strides.column, a.value_dim);
  Row<kHeadDim> sums;
#pragma unroll 1
  for (int e = x.first; e < x.last; ++e) {
    const Entry entry = entry_at(a, x, column_of(a, e), part_of(a, e));
#pragma unroll 1
    for (int w = 0; w < kWords; ++w) {
      u32 word = __shfl_sync(0xffffffffu, word_of(a, x, entry, row, w), 0);
#pragma unroll 1
      for (; word; word &= word - 1) {
        const int j = entry.key + 32 * w + __ffs(word) - 1;
        const Row<kHeadDim> k(at(a.k, a.k_strides, x.batch, kv_head, j), a.k_strides.column, a.head_dim);
        const Row<kValueDim> v(at(a.v, a.v_strides, x.batch, kv_head, j), a.v_strides.column, a.value_dim);
        Sum slope;
        const Sum weight = weight_of(a, q.dot(k), own.lse, slope);
        sums.add(weight * (dout.dot(v) - own.delta) * slope, k);
      }
    }
  }
  sums.store(at(b.dq, b.dq_strides, x.batch, x.head, row), b.dq_strides.column, a.head_dim, b.factor);
}

__device__ __forceinline__ void write_query(const Backward& b, const Tile& x, int row) {
  write_query(b, x, row, statistics_of(b, x.batch, x.head)[row]);
}

// Writes dK and dV of one key, by one warp, query by query. statistic(head, row) is that of a query.
template <class Get>
__device__ __forceinline__ void write_key(const Backward& b, const KeyTile& y, int key, Get statistic) {
  const Attention& a = b.attention;
  const int batch = y.tile.batch, kv_head = y.tile.head, w = (key - y.key) / 32;
  const Row<kHeadDim> k(at(a.k, a.k_strides, batch, kv_head, key), a.k_strides.column, a.head_dim);
  const Row<kValueDim> v(at(a.v, a.v_strides, batch, kv_head, key), a.v_strides.column, a.value_dim);
  Row<kHeadDim> dk;
  Row<kValueDim> dv;
#pragma unroll 1
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
    const Entries entries = entries_of(a, y, head);
#pragma unroll 1
    for (int e = entries.first; e < entries.last; ++e) {
      Tile x = y.tile;
      x.row = row_of(a, y, e);
      const Entry entry = {y.key, part_of(a, e), 0};
#pragma unroll 1
      for (int first = x.row; first < min(x.rows, x.row + kTileQ); first += 32) {
        const int own = first + int(threadIdx.x % 32);
        const bool there = own < min(x.rows, x.row + kTileQ);
        u32 seen = __ballot_sync(0xffffffffu, there && word_of(a, x, entry, own, w) >> (key - y.key) % 32 & 1);
#pragma unroll 1
        for (; seen; seen &= seen - 1) {
          const int row = first + __ffs(seen) - 1;
          const Row<kHeadDim> q(at(a.q, a.q_strides, batch, head, row), a.q_strides.column, a.head_dim);
          const Row<kValueDim> dout(at(b.dout, b.dout_strides, batch, head, row), b.dout_strides.column, a.value_dim);
          const Statistic own = statistic(head, row);
          Sum slope;
          const Sum weight = weight_of(a, q.dot(k), own.lse, slope);
          dk.add(weight * (dout.dot(v) - own.delta) * slope, q);
          dv.add(weight, dout);
        }
      }
    }
  }
  if (kRole != kOfValues)
    dk.store(at(b.dk, b.dk_strides, batch, kv_head, key), b.dk_strides.column, a.head_dim, b.factor);
  if (kRole != kOfKeys)
    dv.store(at(b.dv, b.dv_strides, batch, kv_head, key), b.dv_strides.column, a.value_dim, Sum(1));
}
__device__ __forceinline__ void write_key(const Backward& b, const KeyTile& y, int key) {
  write_key(b, y, key, [&](int head, int row) { return statistics_of(b, y.tile.batch, head)[row]; });
}
