// O[b, h, i] = sum_j softmax_j(scale * Q[b, h, i] . K[b, h / group, j]) V[b, h / group, j]
// A few queries at the end of a long cache; each sequence has its own length, which is read from memory, so that a
// captured launch follows it. 16-bit floats.
// A CTA owns a split of the keys of one KV head, and the rows (query head of the group, query) that read it.
// Its warps take tiles of 16 keys in turn, each with its own ring of stages by cp.async, softmax and accumulators; they
// meet only at the end. The last CTA of a head adds the splits, in order: one launch, the same bits every time. Two
// CTAs of a multiprocessor have 64 to 96 KB under way each. Queries are read before the copies begin: in the other
// order they arrive last, and the first product waits for them. Bytes are the limit for long caches, latency for short
// ones. See docs/kernels/decode.md.
#include "common/layout.cuh"
#include "common/registers.cuh"
#include "ptx/convert.cuh"
#include "ptx/dependents.cuh"
#include "ptx/mma.cuh"

using Element = ELEMENT;  // f16 or bf16

constexpr int kD = HEAD_DIM;
constexpr int kDv = VALUE_DIM;
constexpr int kRows = ROWS;          // rows of Q that a CTA owns
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;      // tiles of K and V in flight, per warp
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 16;            // keys of a tile
constexpr int kSlabs = kRows / 16;   // slabs of rows, the height of one mma each
constexpr int kMostSplits = 128;     // most splits of the keys of a head
constexpr bool kSharedQ = SHARED_Q;  // fragments of Q are loaded each time: with the sums they take too many registers
constexpr u32 kAll = 0xffffffffu;
static_assert(kD % 16 == 0 && kDv % 16 == 0 && kRows % 16 == 0 && kStages <= 32, "whole fragments, a lane per stage");

// The argument. decode_kernel.py packs it field by field. Strides are in elements; the capacity and the number of steps
// are below 2^30.
struct Decode {
  const Element* q;     // (batch, kv_heads * group, queries, kD)
  const Element* k;     // (pages, kv_heads, page, kD)
  const Element* v;     // (pages, kv_heads, page, kDv)
  Element* out;         // (batch, kv_heads * group, queries, kDv)
  f32* lse;             // (batch, kv_heads * group, queries), or null
  const int* lengths;   // (batch,); null: all have the capacity
  const int* table;     // (batch, table_width): pages of a sequence; null: page b holds all of sequence b
  const int* blocks;    // (batch, kv_heads, entries): blocks of keys that are read; null: all
  f32* partial;         // sums of splits, followed by their maxima and sums of weights
  int* arrived;         // splits that have arrived, per head and tile of rows; zero before and after
  i64 q_batch, q_head, q_row, q_col;
  i64 out_batch, out_head, out_row, out_col;
  i64 blocks_batch, blocks_head, blocks_entry;
  int kv_heads, group, queries;
  int capacity, pages, page, table_width;
  int entries, block_tiles;  // block_tiles: tiles of 16 keys in a block
  int left;                  // keys before its own position that a query sees; capacity or more: all of them
  int right;                 // keys after it; not 0 only where a query sees all before
  int piece_tiles;           // a split has at least this many tiles, unless it is the only one
  f32 scale, softcap, inverse_softcap;  // scale and softcap times log2(e); 1 / (softcap * log2(e)); softcap 0: none
};
#ifdef DECODE_BYTES
CHECK_LAYOUT(Decode, DECODE, (q)(k)(v)(out)(lse)(lengths)(table)(blocks)(partial)(arrived)(q_batch)(q_head)(q_row)(q_col)
             (out_batch)(out_head)(out_row)(out_col)(blocks_batch)(blocks_head)(blocks_entry)(kv_heads)(group)(queries)
             (capacity)(pages)(page)(table_width)(entries)(block_tiles)(left)(right)(piece_tiles)(scale)(softcap)
             (inverse_softcap))
#endif

__device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  if constexpr (Same<Element, f16>::value) mma_f16(d, upper, lower, b);
  else mma_bf16(d, upper, lower, b);
}

constexpr f32 kLog2E = 1.44269504088896341f;
// The error is below 5e-7; tanhf takes ten registers more.
__device__ __forceinline__ f32 tanh_of(f32 x) { return 1 - __fdividef(2.f, exp2_of(x * (2 * kLog2E)) + 1); }
__device__ __forceinline__ f32 minus_infinity() { return __uint_as_float(0xff800000u); }
// The number that is subtracted from scores: the maximum, or 0 if no key is seen.
__device__ __forceinline__ f32 base_of(f32 maximum) { return maximum == minus_infinity() ? 0.f : maximum; }

// ---------------------------------------------------------------------------------- a tile in shared memory
// Rows of K, V or Q in pieces of 16 bytes, swizzled within groups of kGroup pieces so that the same piece of 8 rows
// lies in different banks: row r begins at bank group r * kPieces, a multiple of kGroup modulo 8.
template <int kDim> struct Tile {
  static constexpr u32 kPieces = kDim / 8;
  static constexpr u32 kGroup = kPieces % 8 == 0 ? 8 : kPieces % 4 == 0 ? 4 : 2;
  static constexpr u32 kBytes = kKeys * kDim * 2;

  static __device__ __forceinline__ u32 swizzle(u32 row) { return row * kGroup / 8 % kGroup; }

  // The warp copies rows `first` to `last` - 1 of 16 contiguous rows, and writes zeros to the others.
  static __device__ __forceinline__ void copy(u32 to, const Element* from, u32 thread, int first, int last) {
    if (first <= 0 && last >= kKeys)
      copy_if(to, from, thread, [](u32) { return true; });
    else
      copy_if(to, from, thread, [=](u32 row) { return int(row) >= first && int(row) < last; });
  }
  template <class There>
  static __device__ __forceinline__ void copy_if(u32 to, const Element* from, u32 thread, There there) {
    const u32 lane = opaque(thread) % 32;
#pragma unroll
    for (u32 i = 0; i < kPieces / 2; ++i) {
      const u32 p = i * 32 + lane, row = p / kPieces, piece = p % kPieces;
      copy_16(true, to + row * (kDim * 2) + (piece ^ swizzle(row)) * 16, from + p * 8, !there(row));
    }
  }
  // The offset of a row, and the offset in it of the first or the second piece of fragment i.
  static __device__ __forceinline__ u32 line(u32 row) { return row * (kDim * 2); }
  static __device__ __forceinline__ u32 step(u32 i, u32 second, u32 row) {
    return (i * 32) ^ ((second ^ swizzle(row)) * 16);
  }
};

constexpr u32 kStageBytes = Tile<kD>::kBytes + Tile<kDv>::kBytes;
constexpr int kFours = kDv / 4;    // groups of four columns of a row
// Distance of rows of sums in shared memory, in floats: lanes that write two floats have no bank conflicts.
constexpr int kPitch = kDv + 8;

// What the warps exchange at the end, in the memory of the tiles; then the data for adding splits.
struct Ends {
  f32 accum[kWarps][kRows][kPitch];
  f32 row_max[kWarps][kRows], row_sum[kWarps][kRows];
};
struct Join {
  f32 weights[kRows][kMostSplits];
  f32 row_max[kRows], row_sum[kRows];
};
struct Shared {
  union {
    u8 tiles[kWarps][kStages][kStageBytes];
    Ends ends;
    Join join;
  };
  alignas(128) u8 queries[kSharedQ ? kRows * kD * 2 : 16];
};

// ---------------------------------------------------------------------------------- which keys
// Positions are counted from the sequence's first key.
__device__ __forceinline__ int length_of(const Decode& p, int batch) {
  return p.lengths ? min(max(p.lengths[batch], 0), p.capacity) : p.capacity;
}
// The last key that a query sees.
__device__ __forceinline__ int last_key(const Decode& p, int length, int query) {
  return min(length - p.queries + query + p.right, length - 1);
}
// The keys that at least one query of sequence b sees, and the steps to them.
struct Keys {
  int length, begin, end;  // keys `begin` to `end` - 1 are seen by at least one query
  int steps;               // tiles, or entries of `blocks` times tiles of a block

  __device__ __forceinline__ Keys(const Decode& p, int batch) {
    length = length_of(p, batch);
    begin = max(length - p.queries - p.left, 0);
    end = length;
    steps = end <= begin ? 0 : p.blocks ? p.entries * p.block_tiles : (end + kKeys - 1) / kKeys - begin / kKeys;
  }
};

// The tile of step n: its first key, or -1 if none of its keys is seen, and its row in K and V. A user can write to the
// numbers of blocks and pages, so numbers out of range are skipped or clamped.
__device__ __forceinline__ void look(const Decode& p, const Keys& keys, int batch, int head, int n, int& key,
                                     int& row) {
  i64 first = i64(keys.begin / kKeys + n) * kKeys;
  if (p.blocks) {
    const int block = p.blocks[batch * p.blocks_batch + head * p.blocks_head + n / p.block_tiles * p.blocks_entry];
    first = block < 0 ? -1 : (i64(block) * p.block_tiles + n % p.block_tiles) * kKeys;
  }
  key = -1, row = 0;
  if (first < 0 || first >= keys.end || first + kKeys <= keys.begin) return;
  key = int(first);
  const int page = p.table ? min(max(p.table[i64(batch) * p.table_width + key / p.page], 0), p.pages - 1) : batch;
  row = (page * p.kv_heads + head) * p.page + key % p.page;
}

// The copies of a warp, which run kStages steps ahead. A lane knows the tile of one of 32 steps, and the first key of
// one stage.
struct Copier {
  const Decode& p;
  const Keys& keys;
  int batch, head, first, last;
  u32 warp, lane, ring;
  int lane_key = -1, lane_row = 0, stage_key = -1, ahead_key = -1, ahead_row = 0;

  __device__ __forceinline__ void advance(int step) {
    if (step % 32 == 0) {
      const int n = first + int(warp) + (step + int(lane)) * kWarps;
      lane_key = -1;
      if (n < last) look(p, keys, batch, head, n, lane_key, lane_row);
    }
    ahead_key = __shfl_sync(kAll, lane_key, step % 32);
    ahead_row = __shfl_sync(kAll, lane_row, step % 32);
  }
  __device__ __forceinline__ void copy_keys(u32 stage) const {
    if (ahead_key >= 0)
      Tile<kD>::copy(ring + stage * kStageBytes, p.k + i64(ahead_row) * kD, lane, keys.begin - ahead_key,
                     keys.end - ahead_key);
    copy_commit();
  }
  __device__ __forceinline__ void copy_values(u32 stage) {
    if (ahead_key >= 0)
      Tile<kDv>::copy(ring + stage * kStageBytes + Tile<kD>::kBytes, p.v + i64(ahead_row) * kDv, lane,
                      keys.begin - ahead_key, keys.end - ahead_key);
    copy_commit();
    if (lane == stage) stage_key = ahead_key;
  }
};

// ---------------------------------------------------------------------------------- a warp's rows
struct Rows {
  u32 q[kSharedQ ? 1 : kSlabs][kSharedQ ? 1 : kD / 16][4];  // fragments: upper, lower, upper, lower rows
  f32 accum[kSlabs][kDv / 8][4];
  f32 row_max[kSlabs][2], row_sum[kSlabs][2];  // of rows lane / 4 and 8 + lane / 4; row_sum is over this lane's keys
  int first;                      // the CTA's first row within the group

  // The last key that the query of a row sees.
  __device__ __forceinline__ int place(const Decode& p, const Keys& keys, int m, int half, u32 lane) const {
    return last_key(p, keys.length, (first + m * 16 + half * 8 + int(opaque(lane) / 4)) % p.queries);
  }

  // Loads rows from `first` on; rows beyond the last one are zeros.
  __device__ __forceinline__ Rows(const Decode& p, const Element* q_head, int first_row, u8* queries, u32 warp,
                                  u32 lane)
      : first(first_row) {
    const bool pairs = p.q_col == 1 && ((reinterpret_cast<u64>(p.q) / 2 | p.q_batch | p.q_head | p.q_row) & 1) == 0;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = minus_infinity(), row_sum[m][half] = 0;
        if (kSharedQ && (m * 2 + half) % kWarps != warp) continue;
        const u32 slab_row = m * 16 + half * 8 + lane / 4;
        const int row = first + int(slab_row);
        const bool there = row < p.group * p.queries;
        const Element* from = q_head + row / p.queries * p.q_head + row % p.queries * p.q_row;
        u32 words[kD / 8];  // two columns of every eight
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) words[i] = 0;
        if (there && pairs) {
#pragma unroll
          for (int i = 0; i < kD / 8; ++i) words[i] = *reinterpret_cast<const u32*>(from + i * 8 + lane % 4 * 2);
        } else if (there) {
#pragma unroll
          for (int i = 0; i < kD / 8; ++i) {
            const Element* two = from + (i * 8 + lane % 4 * 2) * p.q_col;
            words[i] = two[0].bits | u32(two[p.q_col].bits) << 16;
          }
        }
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) {
          if constexpr (kSharedQ) {
            const u32 at = Tile<kD>::line(slab_row) + Tile<kD>::step(i / 2, i % 2, slab_row) + lane % 4 * 4;
            *reinterpret_cast<u32*>(queries + at) = words[i];
          } else {
            q[m][i / 2][i % 2 * 2 + half] = words[i];
          }
        }
      }
    if constexpr (kSharedQ) __syncthreads();
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int s = 0; s < kDv / 8; ++s)
#pragma unroll
        for (int e = 0; e < 4; ++e) accum[m][s][e] = 0;
  }

  // scores = Q @ K.T for a tile
  __device__ __forceinline__ void multiply_keys(f32 (&scores)[kSlabs][2][4], u32 tile, u32 queries, u32 lane) const {
    using K = Tile<kD>;
    const u32 row = lane % 8 + lane / 16 * 8, at = tile + K::line(row), q_row = lane % 16;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int e = 0; e < 8; ++e) scores[m][e / 4][e % 4] = 0;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      u32 four[4];  // keys 0 to 7, both halves of 16 elements; keys 8 to 15
      load_matrices<false>(four, at + K::step(i, lane / 8 % 2, row));
#pragma unroll
      for (int m = 0; m < kSlabs; ++m) {
        u32 x[4];
        if constexpr (kSharedQ)
          load_matrices<false>(x, queries + K::line(m * 16 + q_row) + K::step(i, lane / 16, q_row));
        else
          x[0] = q[m][i][0], x[1] = q[m][i][1], x[2] = q[m][i][2], x[3] = q[m][i][3];
        multiply(scores[m][0], {x[0], x[2]}, {x[1], x[3]}, {four[0], four[1]});
        multiply(scores[m][1], {x[0], x[2]}, {x[1], x[3]}, {four[2], four[3]});
      }
    }
  }

  // Scores become weights; accumulators and row_sum are rescaled to the new row_max. `key` is the first key of the tile.
  __device__ __forceinline__ void softmax(const Decode& p, const Keys& keys, f32 (&scores)[kSlabs][2][4], int key,
                                          bool masked, u32 lane) {
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        f32& x = scores[m][e / 4][e % 4];
        x *= p.scale;
        if (p.softcap != 0) x = p.softcap * tanh_of(x * p.inverse_softcap);
      }
    if (masked) {
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int distance = place(p, keys, m, half, lane) - key - int(lane % 4) * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (u32(distance - e / 2 * 8 - e % 2) > u32(p.left)) scores[m][e / 2][half * 2 + e % 2] = minus_infinity();
        }
    }
    f32 factors[kSlabs][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f32 highest = fmaxf(fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]),
                        fmaxf(scores[m][1][half * 2], scores[m][1][half * 2 + 1]));
        highest = fmaxf(highest, shuffle_xor(highest, 1));
        highest = fmaxf(fmaxf(highest, shuffle_xor(highest, 2)), row_max[m][half]);
        grew |= highest > row_max[m][half];
        factors[m][half] = exp2_of(row_max[m][half] - base_of(highest));
        row_max[m][half] = highest;
      }
    if (__any_sync(kAll, grew)) {
#pragma unroll
      for (int m = 0; m < kSlabs; ++m) {
        row_sum[m][0] *= factors[m][0], row_sum[m][1] *= factors[m][1];
#pragma unroll
        for (int s = 0; s < kDv / 8; ++s)
#pragma unroll
          for (int e = 0; e < 4; ++e) accum[m][s][e] *= factors[m][e / 2];
      }
    }
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        f32& x = scores[m][e / 4][e % 4];
        x = exp2_of(x - base_of(row_max[m][e % 4 / 2]));
        row_sum[m][e % 4 / 2] += x;
      }
  }

  // sums += weights @ V for a tile
  __device__ __forceinline__ void multiply_values(const f32 (&weights)[kSlabs][2][4], u32 tile, u32 lane) {
    using V = Tile<kDv>;
    const u32 row = lane % 16, at = tile + V::line(row);
#pragma unroll
    for (int i = 0; i < kDv / 16; ++i) {
      u32 four[4];  // columns 0 to 7, keys 0 to 7 and 8 to 15; columns 8 to 15
      load_matrices<true>(four, at + V::step(i, lane / 16, row));
#pragma unroll
      for (int m = 0; m < kSlabs; ++m) {
        const f32(&w)[2][4] = weights[m];
        const u32 upper[2] = {pack<Element>(w[0][0], w[0][1]), pack<Element>(w[1][0], w[1][1])};
        const u32 lower[2] = {pack<Element>(w[0][2], w[0][3]), pack<Element>(w[1][2], w[1][3])};
        multiply(accum[m][2 * i], upper, lower, {four[0], four[1]});
        multiply(accum[m][2 * i + 1], upper, lower, {four[2], four[3]});
      }
    }
  }

  // Whether all values of a tile are finite.
  static __device__ __forceinline__ bool are_finite(const u8* values, u32 lane) {
    constexpr u32 kExponent = Same<Element, f16>::value ? 0x7c00u : 0x7f80u;
    const auto is_bad = [](u32 x) { return (x & kExponent) == kExponent || (x >> 16 & kExponent) == kExponent; };
    bool bad = false;
#pragma unroll
    for (u32 i = lane; i < Tile<kDv>::kBytes / 16; i += 32) {
      const uint4 x = reinterpret_cast<const uint4*>(values)[i];
      bad |= is_bad(x.x) || is_bad(x.y) || is_bad(x.z) || is_bad(x.w);
    }
    return !__any_sync(kAll, bad);
  }
  // The same for queries that see different keys of the tile: one query after the other, with zeros for the values that
  // it does not see, since 0 x NaN is NaN.
  __device__ __forceinline__ void multiply_values_apart(const Decode& p, const Keys& keys,
                                                        const f32 (&weights)[kSlabs][2][4], u32 tile, int key,
                                                        u32 lane) {
    using V = Tile<kDv>;
    const u32 row = lane % 16, at = tile + V::line(row);
    const int column = int(lane % 4) * 2;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
      const f32(&w)[2][4] = weights[m];
      const u32 upper[2] = {pack<Element>(w[0][0], w[0][1]), pack<Element>(w[1][0], w[1][1])};
      const u32 lower[2] = {pack<Element>(w[0][2], w[0][3]), pack<Element>(w[1][2], w[1][3])};
      const int places[2] = {place(p, keys, m, 0, lane), place(p, keys, m, 1, lane)};
#pragma unroll
      for (int s = 0; s < kDv / 8; s += 2) {
        u32 four[4];
        load_matrices<true>(four, at + V::step(s / 2, lane / 16, row));
#pragma unroll 1
        for (int query = keys.length - p.queries; query < keys.length; ++query) {
          const u32 seen[2] = {seen_pair(p, query - key - column), seen_pair(p, query - key - column - 8)};
#pragma unroll
          for (int e = 0; e < 8; e += 4) {
            f32 own[4] = {};
            multiply(own, upper, lower, {four[e / 2] & seen[0], four[e / 2 + 1] & seen[1]});
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (places[i / 2] == query) accum[m][s + e / 4][i] += own[i];
          }
        }
      }
    }
  }
  // A mask of two 16-bit halves with ones for the keys, `distance` and distance - 1 before a query, that it sees.
  static __device__ __forceinline__ u32 seen_pair(const Decode& p, int distance) {
    return (u32(distance) <= u32(p.left) ? 0xffffu : 0u) | (u32(distance - 1) <= u32(p.left) ? 0xffff0000u : 0u);
  }

  __device__ __forceinline__ void leave(Ends& ends, u32 warp, u32 lane) {
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + int(lane / 4);
        f32 total = row_sum[m][half];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        if (lane % 4 == 0) ends.row_max[warp][row] = row_max[m][half], ends.row_sum[warp][row] = total;
#pragma unroll
        for (int s = 0; s < kDv / 8; ++s)
          *reinterpret_cast<float2*>(&ends.accum[warp][row][s * 8 + lane % 4 * 2]) =
              make_float2(accum[m][s][half * 2], accum[m][s][half * 2 + 1]);
      }
  }
};

// ---------------------------------------------------------------------------------- the result
// Writes four columns of a row of `out`, and its logarithm; `maximum` is multiplied by log2(e).
__device__ __forceinline__ void finish(const Decode& p, int batch, int head, int row, int column, const f32 (&sum)[4],
                                       f32 maximum, f32 total) {
  const i64 q_head = i64(head) * p.group + row / p.queries, query = row % p.queries;
  // Without a weight, a query that sees keys has no softmax. Whether it sees a key of the listed blocks is not known.
  const bool sees = total == 0 && !p.blocks && last_key(p, length_of(p, batch), query) >= 0;
  if (sees) total = maximum = __uint_as_float(0x7fffffffu);
  const f32 inverse = total == 0 ? 0.f : 1.f / total;
  Element* to = p.out + batch * p.out_batch + q_head * p.out_head + query * p.out_row + column * p.out_col;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i * p.out_col] = Store<Element>::from(total == 0 ? 0.f : sum[i] * inverse);
  if (p.lse && column == 0)
    p.lse[(i64(batch) * p.kv_heads * p.group + q_head) * p.queries + query] =
        total == 0 ? minus_infinity() : (maximum + log2f(total)) / kLog2E;
}

// Adds the warps' sums in a fixed order: they are the result, or split number `split` of `splits`.
__device__ __forceinline__ void join_warps(const Decode& p, const Shared& shared, f32* accum, float2* ends, int splits,
                                           int split, int batch, int head, int first_row, int rows) {
#pragma unroll 1
  for (int item = threadIdx.x; item < rows * kFours; item += kThreads) {
    const int row = item / kFours, column = item % kFours * 4;
    f32 maximum = minus_infinity(), total = 0, sum[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.ends.row_max[w][row]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const f32 weight = exp2_of(shared.ends.row_max[w][row] - base_of(maximum));
      const float4 x = *reinterpret_cast<const float4*>(&shared.ends.accum[w][row][column]);
      total = fmaf(weight, shared.ends.row_sum[w][row], total);
      sum[0] = fmaf(weight, x.x, sum[0]), sum[1] = fmaf(weight, x.y, sum[1]);
      sum[2] = fmaf(weight, x.z, sum[2]), sum[3] = fmaf(weight, x.w, sum[3]);
    }
    if (splits == 1) {
      finish(p, batch, head, first_row + row, column, sum, maximum, total);
    } else {
      *reinterpret_cast<float4*>(accum + (i64(split) * kRows + row) * kDv + column) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
      if (column == 0) ends[split * kRows + row] = make_float2(maximum, total);
    }
  }
}

// Whether this CTA is the last of a head's splits to arrive. If so, it sees what the others wrote.
__device__ __forceinline__ bool is_last_split(int* arrived, int splits) {
  __threadfence();
  __syncthreads();
  int is_last = 0;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(arrived, 1) == splits - 1;
    if (is_last) *arrived = 0;
  }
  if (!__syncthreads_or(is_last)) return false;
  __threadfence();
  return true;
}

// Called by the CTA that arrives last: computes the weight of each split of its rows. A split has {maximum, sum of
// weights} of each row.
__device__ __forceinline__ void weigh_splits(Shared& shared, const float2* ends, int splits, int rows, u32 warp, u32 lane) {
#pragma unroll 1
  for (int row = warp; row < rows; row += kWarps) {
    f32 maximum = minus_infinity(), total = 0;
    float2 end[kMostSplits / 32];
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) {
      const int i = n * 32 + int(lane);
      end[n] = i < splits ? __ldcg(&ends[i * kRows + row]) : make_float2(minus_infinity(), 0);
    }
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) maximum = fmaxf(maximum, end[n].x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, step));
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) {
      const f32 weight = exp2_of(end[n].x - base_of(maximum));
      total = fmaf(weight, end[n].y, total);
      shared.join.weights[row][n * 32 + lane] = weight;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += shuffle_xor(total, step);
    if (lane == 0) shared.join.row_max[row] = maximum, shared.join.row_sum[row] = total;
  }
}

// Four columns of a row of the result, and what some of the splits have left for it.
constexpr int kBatch = 16;
struct Four {
  int row, column;
  const f32* from;
  float4 x[kBatch];

  __device__ __forceinline__ Four(const f32* accum, int item) : row(item / kFours), column(item % kFours * 4),
        from(accum + i64(row) * kDv + column) {}
  __device__ __forceinline__ void load(int first, int splits) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i < splits) x[i] = __ldcg(reinterpret_cast<const float4*>(from + i64(first + i) * (kRows * kDv)));
  }
  __device__ __forceinline__ void add(f32 (&sum)[4], const f32* weights, int first, int splits) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= splits) break;
      const f32 weight = weights[first + i];
      sum[0] = fmaf(weight, x[i].x, sum[0]), sum[1] = fmaf(weight, x[i].y, sum[1]);
      sum[2] = fmaf(weight, x[i].z, sum[2]), sum[3] = fmaf(weight, x[i].w, sum[3]);
    }
  }
};
// Adds what the splits of a head have left, each with its weight, and writes the rows of the result.
__device__ __forceinline__ void add_splits(const Decode& p, Shared& shared, const f32* accum, const float2* ends, int splits,
                                           int batch, int head, int first_row, int rows, u32 warp, u32 lane) {
  int item = threadIdx.x;
  const int items = rows * kFours;
  Four four(accum, item < items ? item : 0);
  four.load(0, splits);
  weigh_splits(shared, ends, splits, rows, warp, lane);
  __syncthreads();
#pragma unroll 1
  while (item < items) {
    f32 sum[4] = {};
    const f32* weights = shared.join.weights[four.row];
    four.add(sum, weights, 0, splits);
#pragma unroll 1
    for (int first = kBatch; first < splits; first += kBatch) {
      four.load(first, splits);
      four.add(sum, weights, first, splits);
    }
    const f32 maximum = shared.join.row_max[four.row], total = shared.join.row_sum[four.row];
    finish(p, batch, head, first_row + four.row, four.column, sum, maximum, total);
    item += kThreads;
    if (item >= items) break;
    four = Four(accum, item);
    four.load(0, splits);
  }
}

// ---------------------------------------------------------------------------------- the kernel
// Grid: splits, KV heads times tiles of rows, batch.
extern "C" __global__ void __launch_bounds__(kThreads, 2) decode(const __grid_constant__ Decode p) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  wait_for_prerequisites();
  const int batch = blockIdx.z, row_tiles = gridDim.y / p.kv_heads;
  const int head = blockIdx.y / row_tiles, first_row = blockIdx.y % row_tiles * kRows;
  const int rows = min(p.group * p.queries - first_row, kRows);
  // The queries come first: after the copies of keys and values they would arrive last, and no product can begin
  // without them.
  Rows own(p, p.q + batch * p.q_batch + i64(head) * p.group * p.q_head, first_row, shared.queries, warp, lane);
  const Keys keys(p, batch);
  const int wanted = (keys.steps + p.piece_tiles - 1) / p.piece_tiles;
  const int splits = min(max(wanted, 1), int(gridDim.x)), split = blockIdx.x;
  if (split >= splits) return;
  const int each = keys.steps / splits, more = keys.steps % splits;
  const int first = split * each + min(split, more), last = first + each + (split < more ? 1 : 0);
  const int count = (last - first - int(warp) + kWarps - 1) / kWarps;  // steps of this warp

  // Fill the ring of this warp.
  const u32 ring = shared_address(shared.tiles[warp]), queries = shared_address(shared.queries);
  Copier copier{p, keys, batch, head, first, last, warp, lane, ring};
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    copier.advance(i);
    copier.copy_keys(i);
    copier.copy_values(i);
  }
  // Scores, weights and values of one tile after the other; its stage is filled again at once.
  const int seen_from = keys.length - 1 - p.left, seen_to = last_key(p, keys.length, 0);  // keys that all see
  // Where weights of hidden keys meet values that are not finite, each query is multiplied by itself. A decode does so
  // wherever queries differ, which keeps the order of its sums.
  const bool differ = p.queries > 1 && p.right < p.queries - 1;
  u32 stage = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int key = __shfl_sync(kAll, copier.stage_key, stage);
    const bool masked = key < seen_from || key + kKeys - 1 > seen_to;
    const u32 tile = ring + stage * kStageBytes;
    f32 scores[kSlabs][2][4];
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    if (key >= 0) own.multiply_keys(scores, tile, queries, lane);
    __syncwarp();
    copier.advance(i + kStages);
    copier.copy_keys(stage);
    if (key >= 0) own.softmax(p, keys, scores, key, masked, lane);
    copy_wait<2 * kStages - 1>();
    __syncwarp();
    if (key >= 0) {
      const u8* values = shared.tiles[warp][stage] + Tile<kD>::kBytes;
      if (masked && differ && (p.lengths || !own.are_finite(values, lane)))
        own.multiply_values_apart(p, keys, scores, tile + Tile<kD>::kBytes, key, lane);
      else
        own.multiply_values(scores, tile + Tile<kD>::kBytes, lane);
    }
    __syncwarp();
    copier.copy_values(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  // The warps meet, and the splits of a head after them.
  copy_wait<0>();
  __syncthreads();
  own.leave(shared.ends, warp, lane);
  __syncthreads();

  const i64 tile_number = (i64(batch) * gridDim.y + blockIdx.y), all_splits = i64(gridDim.z) * gridDim.y * gridDim.x;
  f32* accum = p.partial + tile_number * gridDim.x * (kRows * kDv);
  float2* ends = reinterpret_cast<float2*>(p.partial + all_splits * (kRows * kDv)) + tile_number * gridDim.x * kRows;
  join_warps(p, shared, accum, ends, splits, split, batch, head, first_row, rows);
  if (splits == 1 || !is_last_split(p.arrived + tile_number, splits)) return;
  add_splits(p, shared, accum, ends, splits, batch, head, first_row, rows, warp, lane);
}
