// What three kernels for gradients on Hopper share: attention_backward_sm90, _keys_sm90, and _queries_sm90 in part.
// Warps 0 to 3 are producers: one starts copies, the others add dQ to its sums and compute mask bits, which say what
// query sees which key. With kOrdered, the sums of a tile of queries are made in one order, that of falling keys: an
// addition waits for the one before. CTAs claim tiles of keys in that order too, so that nobody waits for keys that
// nobody has claimed.
// A kernel's struct Shared has the tiles, the barriers and kSlotsOfOne, the slots of dO.
#pragma once

#include "common/attention_backward_sm90.cuh"
#include "common/pipeline.cuh"
#include "common/registers.cuh"
#include "ptx/reduce.cuh"

constexpr bool kOrdered = ORDERED;
constexpr int kSlots = 2, kTurns = 4;                     // slots of Q; turns that are described at the same time
// How often a thread asks whether it is its turn before it goes on all the same, after some 10 s: only where a user has
// written to the bounds of sequences or to a mask.
constexpr int kPatience = 1 << 24;
constexpr int kAdders = kOrdered ? 2 : 1, kMaskWarps = 3 - kAdders;  // warps
constexpr int kSteps = kDim / 16, kSlabs = kDim / 64;
constexpr u32 kSlabQ = kTileQ * 128, kSlabK = kTileK * 128;  // bytes of 64 columns of a tile

// A tile of queries that meets the keys of a CTA. If there are no more of them, row < 0.
struct Turn { int row, head, part, whole, rank, item; i64 piece; };  // piece: its first
// A tile of keys, or a share of it. count: tiles of queries; -1: no more items. cut: its number among the tiles that are
// cut, or -1.
struct Item { KeyTile keys; int count, cut, share; };

struct alignas(64) BackwardSm90 {
  TensorMap q, k, v, dout;
  BackwardRows rows;
};
#ifdef BACKWARD_SM90_BYTES
CHECK_LAYOUT(BackwardSm90, BACKWARD_SM90, (q)(k)(v)(dout)(rows))
#endif

__device__ __forceinline__ void release(u64& barrier) {
  __syncwarp();
  if (is_elected()) arrive(barrier);
}

__device__ __forceinline__ void copy_slabs(const u8* to, u32 bytes, const TensorMap& map, int row, int head, int batch,
                                           u32 barrier) {
#pragma unroll
  for (int i = 0; i < kSlabs; ++i) copy_tile(shared_address(to) + i * bytes, &map, 64 * i, row, head, batch, barrier);
}

// How many tiles of keys add to the queries from `row` on before tile `number` does: those after it that they see.
__device__ __forceinline__ int rank_of(const BackwardRows& p, const KeyTile& y, int row, int head) {
  const Attention& a = p.backward.attention;
  const Tile& x = y.tile;
  const int last = (min(row + kTileQ, x.rows) + x.high - x.key - 1) / kTileK;
  const int high = min((x.keys - x.key - 1) / kTileK, last);
  if (!p.row_first) return high - y.number;
  const int tiles = (a.queries + kTileQ - 1) / kTileQ, at = pattern_of(a, x.batch, head) * tiles + row / kTileQ;
  const int first = clamp(p.row_first[at], 0, a.entries), end = clamp(p.row_first[at + 1], first, a.entries);
  const auto after = [&](int column) {  // entries with a column up to this one
    int from = first, to = end;
    while (from < to) {
      const int middle = (from + to) / 2;
      if (p.row_columns[middle] <= column) from = middle + 1;
      else to = middle;
    }
    return from;
  };
  return after(high) - after(y.number);
}

// Describes the turn of one entry of a tile of keys.
__device__ __forceinline__ void describe(const BackwardRows& p, const KeyTile& y, int head, int entry, u32 item,
                                         Turn& turn) {
  const Attention& a = p.backward.attention;
  const Tile& x = y.tile;
  const int row = row_of(a, y, entry), part = part_of(a, entry);
  const int last_key = y.key + kTileK - 1, last_row = min(x.rows, row + kTileQ) - 1;
  turn.row = row;
  turn.head = head;
  turn.part = part;
  turn.whole = part < 0 && last_key < x.keys && y.key >= last_row + x.low && last_key <= row + x.high;
  turn.item = item & 1;
  turn.piece = (i64(x.batch) * a.heads + head) * p.padded + piece_of(a, p.padded, y.begin, row);
  turn.rank = kOrdered ? rank_of(p, y, row, head) : 0;
}

// Copies the queries of a turn and the logarithms of their sums, and publishes the turn. One lane calls it.
template <class Shared>
__device__ __forceinline__ void copy_queries(const BackwardSm90& problem, Shared& shared, const Turn& turn, int head,
                                             int batch, u32 n) {
  const u32 slot = n % kSlots, full = shared_address(&shared.q_full[slot]);
  shared.turns[n % kTurns] = turn;
  arrive(shared.turn_full[n % kTurns]);
  barrier_expect(full, kSlabs * kSlabQ + kTileQ * 4);
  copy_slabs(shared.q[slot], kSlabQ, problem.q, turn.row, head, batch, full);
  copy_line(shared_address(shared.lse[slot]), problem.rows.logarithms + turn.piece * 64, kTileQ * 4, full);
}

// Copies their gradients and what is subtracted from these. One lane calls it.
template <class Shared>
__device__ __forceinline__ void copy_gradients(const BackwardSm90& problem, Shared& shared, const Turn& turn, int head,
                                               int batch, u32 one) {
  const u32 full = shared_address(&shared.dout_full[one]);
  barrier_expect(full, kSlabs * kSlabQ + kTileQ * 4);
  copy_slabs(shared.dout[one], kSlabQ, problem.dout, turn.row, head, batch, full);
  copy_line(shared_address(shared.delta[one]), problem.rows.deltas + turn.piece * 64, kTileQ * 4, full);
}

// Some of the turns of a tile of keys, or all: `count` of them, from number `skipped` on of those of `heads` query heads from
// `first_head` on. cut: the number of the tile among those that are cut, or -1. count < 0: there is no tile.
struct Share { int cut, number, first_head, heads, skipped, count; };

// The share that was claimed. In order it has whole heads where it can: it would wait for other shares of a head.
__device__ __forceinline__ Share share_of(const BackwardRows& p, const KeyTile& y, int claimed, int cut) {
  const Attention& a = p.backward.attention;
  const Tile& x = y.tile;
  Share s = {cut, cut < 0 ? 0 : claimed - p.whole - cut * p.shares, x.head * a.group, a.group, 0, x.head < 0 ? -1 : 0};
  const bool by_heads = cut >= 0 && kOrdered && a.group % p.shares == 0;
  if (by_heads) {
    s.heads /= p.shares;
    s.first_head += s.number * s.heads;
  }
  for (int head = s.first_head; x.head >= 0 && head < s.first_head + s.heads; ++head) {
    const Entries entries = entries_of(a, y, head);
    s.count += entries.last - entries.first;
  }
  if (cut >= 0 && !by_heads && s.count > 0) {
    s.skipped = int(i64(s.count) * s.number / p.shares);
    s.count = int(i64(s.count) * (s.number + 1) / p.shares) - s.skipped;
  }
  return s;
}

// How many turns have been produced, and values copied.
struct Produced { u32 turns = 0, values = 0; };

// Describes the turns of a share that has any, and starts their copies.
template <class Shared>
__device__ __forceinline__ void produce_turns(const BackwardSm90& problem, Shared& shared, Share s, u32 item, Produced& produced) {
  constexpr int kSlotsOfOne = Shared::kSlotsOfOne;
  const BackwardRows& p = problem.rows;
  const Attention& a = p.backward.attention;
  const KeyTile& y = shared.next;
  const Tile& x = y.tile;
  const int lane = threadIdx.x % 32;
  bool first = true;
  for (int head = s.first_head; head < s.first_head + s.heads; ++head) {
    Entries entries = entries_of(a, y, head);
    const int over = min(s.skipped, entries.last - entries.first);
    s.skipped -= over;
    entries.first += over;
    entries.last = min(entries.last, entries.first + s.count);
    s.count -= entries.last - entries.first;
    for (int e0 = entries.first; e0 < entries.last; e0 += 32) {
      if (e0 + lane < entries.last) describe(p, y, head, e0 + lane, item, shared.batch[lane]);
      __syncwarp();
      for (int i = 0; i < min(32, entries.last - e0); ++i, ++produced.turns) {
        const u32 n = produced.turns, slot = n % kSlots, phase = parity<kSlots>(n) ^ 1;
        const Turn& turn = shared.batch[i];
        wait(shared.q_empty[slot], phase);
        wait(shared.mask_full[slot], phase);  // the masks of that turn have been looked up, or it was whole
        if (lane == 0) copy_queries(problem, shared, turn, head, x.batch, n);
        __syncwarp();
        if (first) {
          first = false;
          wait(shared.v_empty, (produced.values & 1) ^ 1);
          if (lane == 0) {
            const u32 full = shared_address(&shared.v_full);
            barrier_expect(full, kSlabs * kSlabK);
            copy_slabs(shared.v, kSlabK, problem.v, y.key, x.head, x.batch, full);
          }
          __syncwarp();
          ++produced.values;
        }
        const u32 one = n % kSlotsOfOne;
        wait(shared.dout_empty[one], parity<kSlotsOfOne>(n) ^ 1);
        if (lane == 0) copy_gradients(problem, shared, turn, head, x.batch, one);
        __syncwarp();
      }
      __syncwarp();
    }
  }
}

// Claims tiles of keys or shares of them, describes their turns, and starts the copies. One warp calls it.
template <class Shared> __device__ __forceinline__ void produce(const BackwardSm90& problem, Shared& shared) {
  const BackwardRows& p = problem.rows;
  const Attention& a = p.backward.attention;
  const int lane = threadIdx.x % 32;
  Produced produced;
  for (u32 item = 0;; ++item) {
    int claimed = 0;
    if (lane == 0) claimed = atomicAdd(a.counters, 1);
    claimed = __shfl_sync(0xffffffffu, claimed, 0);
    const int cut = claimed < p.whole ? -1 : (claimed - p.whole) / p.shares;
    {
      const KeyTile found = key_tile_at(a, cut < 0 ? claimed : p.whole + cut);
      __syncwarp();  // all lanes have read the one before
      if (lane == 0) shared.next = found;
      __syncwarp();
    }
    const KeyTile& y = shared.next;
    const Share s = share_of(p, y, claimed, cut);
    wait(shared.k_empty, (item & 1) ^ 1);
    if (lane == 0) {
      shared.items[item & 1] = {y, s.count, cut, s.number};
      const u32 full = shared_address(&shared.k_full);
      if (s.count > 0) {
        barrier_expect(full, kSlabs * kSlabK);
        copy_slabs(shared.k, kSlabK, problem.k, y.key, y.tile.head, y.tile.batch, full);
      } else {
        arrive(shared.k_full);
      }
    }
    __syncwarp();
    if (s.count < 0) break;
    if (s.count > 0) produce_turns(problem, shared, s, item, produced);
  }
  wait(shared.q_empty[produced.turns % kSlots], parity<kSlots>(produced.turns) ^ 1);
  if (lane == 0) {
    for (u32 i = produced.turns; i < produced.turns + kAdders; ++i) {
      shared.turns[i % kTurns].row = -1;
      arrive(shared.turn_full[i % kTurns]);
    }
    leave_counters(a.counters);
  }
}

// Computes mask bits, which say which queries see which keys, unless all see all.
template <class Shared>
__device__ __forceinline__ void compute_mask_bits(const BackwardSm90& problem, Shared& shared, int thread) {
  const Attention& a = problem.rows.backward.attention;
  Tile& x = shared.masked[thread / 32];
  for (u32 n = 0;; ++n) {
    const u32 slot = n % kSlots;
    wait(shared.turn_full[n % kTurns], parity<kTurns>(n));
    const Turn& turn = shared.turns[n % kTurns];
    if (turn.row < 0) break;
    if (!turn.whole) {
      const KeyTile& y = shared.items[turn.item].keys;
      if (thread % 32 == 0) {
        x = y.tile;
        x.row = turn.row;
      }
      __syncwarp();
#pragma unroll 1
      for (int i = thread; i < kTileQ; i += 32 * kMaskWarps) {
        u32 words[kWords];
        words_of(a, x, {y.key, turn.part, 0}, x.row + i, words);
#pragma unroll
        for (int w = 0; w < kWords; ++w) shared.seen[slot][i][w] = x.row + i < x.rows ? words[w] : 0u;
      }
    }
    release(shared.mask_full[slot]);
  }
}


// ------------------------------------------------------------------------------------------------------- statistics
// The statistics of queries 16 i to 16 i + 15 of 64 that a thread has, and all of the 64.
__device__ __forceinline__ float4 statistics_at(const f32* from, int lane, int i) {
  const u32 place = shared_address(from) + lane % 4 * 64, turned = lane % 4 / 2 * 16;
  return load_floats(place + (turned ^ (i * 16)));
}
__device__ __forceinline__ void load_statistics(float4 (&x)[4], const f32* from, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = statistics_at(from, lane, i);
}
// How scores become weights, as `weight_of` does it: exp2(scale * score - lse), or with a softcap, whose tanh(x) is
// 1 - 2 / (exp(2 x) + 1), exp2(cap - lse - 2 cap / (exp2(scale * score) + 1)).
struct Weighing {
  const Backward& b;

  __device__ __forceinline__ f32 weight(f32 score, f32 lse) const {
    const Attention& a = b.attention;
    if constexpr (kScores == kCapped)
      return exp2_of(fmaf(reciprocal_of(exp2_of(score * a.scale) + 1.f), -2.f * a.cap, a.cap - lse));
    else return exp2_of(fmaf(score, a.scale, -lse));
  }
  // A weight times the slope of its score. The slope is recovered from the weight, whose logarithm is cap * tanh - lse: to
  // keep it until dO . V is there would take as many registers as the weights do.
  __device__ __forceinline__ f32 bent(f32 weight, f32 lse) const {
    const f32 x = fmaxf((log2_of(weight) + lse) * b.inverse_cap, -1.f);  // a weight of 0 stays 0
    return weight * fmaf(-x, x, 1.f);
  }
  // Weights of 16 queries from their scores.
  __device__ __forceinline__ void weigh(f32* x, const float4& l) const {
    x[0] = weight(x[0], l.x), x[1] = weight(x[1], l.y), x[2] = weight(x[2], l.x), x[3] = weight(x[3], l.y);
    x[4] = weight(x[4], l.z), x[5] = weight(x[5], l.w), x[6] = weight(x[6], l.z), x[7] = weight(x[7], l.w);
  }
  __device__ __forceinline__ void bend(f32* x, const float4& l) const {
    x[0] = bent(x[0], l.x), x[1] = bent(x[1], l.y), x[2] = bent(x[2], l.x), x[3] = bent(x[3], l.y);
    x[4] = bent(x[4], l.z), x[5] = bent(x[5], l.w), x[6] = bent(x[6], l.z), x[7] = bent(x[7], l.w);
  }
};
__device__ __forceinline__ void pack_weights(u32 (&weights)[4], const f32* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) weights[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
}
// ds of 16 queries from their weights and dO . V.
__device__ __forceinline__ void derive(u32 (&ds)[4], const f32* x, const f32* y, const float4& l) {
  ds[0] = pack<Element>(x[0] * (y[0] - l.x), x[1] * (y[1] - l.y));
  ds[1] = pack<Element>(x[2] * (y[2] - l.x), x[3] * (y[3] - l.y));
  ds[2] = pack<Element>(x[4] * (y[4] - l.z), x[5] * (y[5] - l.w));
  ds[3] = pack<Element>(x[6] * (y[6] - l.z), x[7] * (y[7] - l.w));
}

// -------------------------------------------------------------------------------------------------------- the result
// A thread of a consumer warpgroup.
struct Member {
  const int thread;     // of the warpgroup

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }

  // Writes 16 rows through shared memory, 64 columns at a time; returns the rows with an element that is not finite:
  // bit r.
  __device__ __forceinline__ u32 write_rows(const f32 (&x)[kDim / 2], f32 factor, u8* staged, Element* out,
                                            const Strides& strides, int rows, int columns) {
    f32 bad[2] = {0.f, 0.f};
    const int line = lane() % 16;
    const bool aligned =
        strides.column == 1 && ((reinterpret_cast<u64>(out) | u64(strides.row) * sizeof(Element)) & 15) == 0;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const f32* d = x + 32 * slab + 8 * j;
#pragma unroll
        for (int i = 0; i < 8; ++i) bad[i / 2 % 2] = fmaf(d[i] * factor, 0.f, bad[i / 2 % 2]);
        store_matrix_x4<false>(shared_address(staged) + line * 128 + ((2 * j + lane() / 16) ^ (line & 7)) * 16,
                               pack<Element>(d[0] * factor, d[1] * factor), pack<Element>(d[2] * factor, d[3] * factor),
                               pack<Element>(d[4] * factor, d[5] * factor), pack<Element>(d[6] * factor, d[7] * factor));
      }
      __syncwarp();
#pragma unroll 1
      for (int item = lane(); item < 16 * 8; item += 32) {
        const int row = item / 8, chunk = item % 8, column = 64 * slab + 8 * chunk, left = columns - column;
        if (row >= rows) break;
        const u8* from = staged + row * 128 + (chunk ^ (row & 7)) * 16;
        Element* to = out + i64(row) * strides.row + i64(column) * strides.column;
        if (aligned && left >= 8) *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from);
        else
          for (int d = 0; d < min(left, 8); ++d) to[d * strides.column] = reinterpret_cast<const Element*>(from)[d];
      }
      __syncwarp();
    }
    u32 found = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 lanes = __ballot_sync(0xffffffffu, bad[half] != 0.f);  // NaN is not 0
#pragma unroll
      for (int r = 0; r < 8; ++r) found |= (lanes >> 4 * r & 15u ? 1u : 0u) << (half * 8 + r);
    }
    return found & (rows >= 16 ? 0xffffu : (1u << max(rows, 0)) - 1);
  }
};
// Writes dK and dV of one key exactly: 0 x Inf is NaN. One warp calls it.
__device__ __forceinline__ void write_key_again(const BackwardRows& p, const KeyTile& y, int key) {
  const Attention& a = p.backward.attention;
  write_key(p.backward, y, key, [&](int head, int row) {
    const i64 number = (i64(y.tile.batch) * a.heads + head) * p.padded + piece_of(a, p.padded, y.begin, row);
    const int place = place_of((row - y.begin) % 64);
    return Statistic{p.logarithms[number * 64 + place], p.deltas[number * 64 + place]};
  });
}
