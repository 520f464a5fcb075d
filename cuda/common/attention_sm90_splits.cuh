// Keys that are split among CTAs, for few tiles of queries: the heads of a group that share keys are folded into one
// tile, so that keys are read once for all of them, and several CTAs walk over the keys of a tile, of which each leaves
// its sums in float32. The numbers of the walk are splits of tiles, and behind them the lines of tiles whose sums are to
// be added: who claims some waits until the splits, which running CTAs have claimed before, have arrived. Splits are
// added in their order, so that results repeat bit by bit.
#pragma once

#include "common/attention_sm90.cuh"
#include "ptx/reduce.cuh"

constexpr int kMostSplits = 128;  // of a tile

// Where keys are split: the number of the tile, which of its `splits` splits this is, the queries of a head in the tile,
// whose next ones belong to the next head, all lines of the tile, and the first line whose sums are to be added instead,
// or -1.
struct SplitTile : Tile {
  int slot, split, splits, fold, lines, join;
};
// The query of a line of a tile, and its head.
__device__ __forceinline__ int query_of(const SplitTile& x, int line) { return x.row + (kSplits ? line % x.fold : line); }
__device__ __forceinline__ int head_of(const SplitTile& x, int line) { return x.head + (kSplits ? line / x.fold : 0); }

// Number t of the walk: a split of a tile, of which there is nothing to do if its keys are too few, or lines to add.
__device__ __forceinline__ SplitTile next_tile(const AttentionSm90& problem, int t) {
  const Attention& a = problem.attention;
  if constexpr (!kSplits) return {tile_at(a, t)};
  const Splits& s = problem.splits;
  const bool joins = t >= s.slots * s.most;
  const int each = joins ? s.joins : s.most, number = joins ? t - s.slots * s.most : t;
  const int slot = number / each, place = number % each;
  if (slot >= s.slots) return {{-1}};
  const int parts = (a.group + s.heads - 1) / s.heads, groups = a.heads / a.group, in_batch = groups * parts;
  const int tile = slot % (a.batches * in_batch), group = tile % in_batch / parts, part = tile % parts;
  SplitTile x = {tile_of(a, group * a.group + part * s.heads, tile / in_batch, slot / (a.batches * in_batch))};
  const bool folds = s.heads > 1;
  x.slot = slot, x.split = place, x.join = joins ? place * s.lines : -1;
  x.fold = folds ? a.queries : kTileQ;
  x.lines = folds ? min(s.heads, a.group - part * s.heads) * a.queries : min(kTileQ, max(x.rows - x.row, 0));
  const int entries = x.last - x.first;
  x.splits = min((entries + s.least - 1) / s.least, s.most);
  if (joins || place >= x.splits) return x.last = x.first, x;
  const int share = entries / x.splits, more = entries % x.splits;
  x.first += place * share + min(place, more);
  x.last = x.first + share + (place < more ? 1 : 0);
  return x;
}

// The sums of a line of a split, and {maximum, sum of weights} of a line.
__device__ __forceinline__ f32* sums_of(const Splits& s, i64 slot, int split, int line) {
  return s.sums + ((slot * s.most + split) * kTileQ + line) * kValueDim;
}
__device__ __forceinline__ float2* end_of(const Splits& s, i64 slot, int split, int line) {
  f32* ends = s.sums + i64(s.slots) * s.most * (kTileQ * kValueDim);
  return reinterpret_cast<float2*>(ends) + (slot * s.most + split) * kTileQ + line;
}
// Stores the maxima and the sums of weights of a quad's two lines.
__device__ __forceinline__ void store_ends(const Splits& s, const SplitTile& x, int line, Two maxima, Two sums) {
  if (threadIdx.x % 4) return;
  if (line < x.lines) *end_of(s, x.slot, x.split, line) = make_float2(maxima.x, sums.x);
  if (line + 8 < x.lines) *end_of(s, x.slot, x.split, line + 8) = make_float2(maxima.y, sums.y);
}
// Stores the sums of the upper or the lower eight lines of a warp; the result has bits of the lanes with sums that are
// not finite.
template <int kHalf, int kCount>
__device__ __forceinline__ u32 store_sums(const Splits& s, const SplitTile& x, int upper, const f32 (&sums)[kCount],
                                          f32 factor) {
  const int line = upper + kHalf * 8;
  f32* to = sums_of(s, x.slot, x.split, line) + threadIdx.x % 4 * 2;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const f32 first = sums[4 * j + kHalf * 2] * factor, second = sums[4 * j + kHalf * 2 + 1] * factor;
    bad |= !(first * 0.f == 0.f && second * 0.f == 0.f);
    if (line < x.lines) *reinterpret_cast<float2*>(to + j * 8) = make_float2(first, second);
  }
  return __ballot_sync(0xffffffffu, bad && line < x.lines);
}
// Computes a line of a split by one warp, key by key.
__device__ __forceinline__ void attend_line(const AttentionSm90& problem, const SplitTile& x, int line) {
  if constexpr (kSplits) {
    Tile own = x;
    own.head = head_of(x, line);
    f32* to = sums_of(problem.splits, x.slot, x.split, line);
    attend_row(problem.attention, own, query_of(x, line), [&](int d, f32 y) { to[d] = y; },
               end_of(problem.splits, x.slot, x.split, line));
  }
}

// Splits of each tile that have arrived, counted by warps, in other lines of the L2 than what is claimed.
constexpr int kCounters = 32;
__device__ __forceinline__ int* arrived_of(const Attention& a, int slot) { return a.counters + kCounters + slot; }
// Called by each warp once it has left its sums.
__device__ __forceinline__ void leave_sums(const Attention& a, int slot) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) atomicAdd(arrived_of(a, slot), 1);
}
// Called by one lane: waits until as many warps have left their sums.
__device__ __forceinline__ void wait_sums(const Attention& a, int slot, int warps) {
  while (load_acquire(arrived_of(a, slot)) < warps) __nanosleep(100);
}

// A warp adds the sums of all splits of some lines, each with its weight, and stores the results. The loads of several
// splits, and of all its lines, are under way together.
constexpr int kTogether = 8, kOwnLines = kTileQ > 64 ? 1 : 2;  // splits; lines of a warp: 8 of all warps
struct Weights {
  f32 of[kOwnLines][kSplits ? kMostSplits : 1];
};
__device__ __forceinline__ void join_lines(const AttentionSm90& problem, const SplitTile& x, int first, int step,
                                           Weights& weights) {
  const Attention& a = problem.attention;
  const int lane = threadIdx.x % 32;
  const f32 none = -__int_as_float(0x7f800000);
  float2 ends[kOwnLines][kMostSplits / 32];
#pragma unroll
  for (int o = 0; o < kOwnLines; ++o)
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) {
      const int split = n * 32 + lane, line = min(first + o * step, x.lines - 1);
      ends[o][n] = split < x.splits ? __ldcg(end_of(problem.splits, x.slot, split, line)) : make_float2(none, 0.f);
    }
  f32 maxima[kOwnLines], totals[kOwnLines];
#pragma unroll
  for (int o = 0; o < kOwnLines; ++o) {
    f32 maximum = none, total = 0.f;
    bool seen = false;  // keys of which none has a weight
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) maximum = fmaxf(maximum, ends[o][n].x), seen |= ends[o][n].y < 0.f;
#pragma unroll
    for (int i = 16; i; i /= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, i));
    const f32 base = maximum == none ? 0.f : maximum;
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) {
      const f32 weight = exp2_of(ends[o][n].x - base);
      weights.of[o][n * 32 + lane] = weight;
      total += weight * ends[o][n].y;
    }
    total = warp_sum(total);
    maxima[o] = maximum;
    totals[o] = maximum == none && __any_sync(0xffffffffu, seen) ? __int_as_float(0x7fffffff) : total;
  }
  __syncwarp();
#pragma unroll 1
  for (int d = lane * 4; d < a.value_dim; d += 128) {
    f32 sums[kOwnLines][4] = {};
#pragma unroll 1
    for (int split = 0; split < x.splits; split += kTogether) {
      float4 y[kOwnLines][kTogether];
#pragma unroll
      for (int o = 0; o < kOwnLines; ++o)
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const bool there = split + i < x.splits && first + o * step < x.lines;
          const f32* from = sums_of(problem.splits, x.slot, there ? split + i : 0, there ? first + o * step : 0) + d;
          y[o][i] = there ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
      for (int o = 0; o < kOwnLines; ++o)
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const f32 weight = weights.of[o][split + i];
          sums[o][0] = fmaf(weight, y[o][i].x, sums[o][0]), sums[o][1] = fmaf(weight, y[o][i].y, sums[o][1]);
          sums[o][2] = fmaf(weight, y[o][i].z, sums[o][2]), sums[o][3] = fmaf(weight, y[o][i].w, sums[o][3]);
        }
    }
#pragma unroll
    for (int o = 0; o < kOwnLines; ++o) {
      const int line = first + o * step;
      if (line >= x.lines) continue;
      const f32 factor = totals[o] == 0.f ? 0.f : __fdividef(value_scale_of(x), totals[o]);
      Out* out = a.o + x.batch * a.o_strides.batch + head_of(x, line) * a.o_strides.head;
      out += query_of(x, line) * a.o_strides.row;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (d + i < a.value_dim) out[(d + i) * a.o_strides.column] = Store<Out>::from(sums[o][i] * factor);
    }
  }
#pragma unroll
  for (int o = 0; o < kOwnLines; ++o) {
    const int line = first + o * step;
    if (a.lse && lane == 0 && line < x.lines)
      a.lse[(i64(x.batch) * a.heads + head_of(x, line)) * a.queries + query_of(x, line)] =
          totals[o] == 0.f ? none : (maxima[o] + log2_of(totals[o])) * 0.6931471805599453f;
  }
  __syncwarp();
}
// All warps of consumers add the sums of splits for the lines that were claimed.
__device__ __forceinline__ void join_tile(const AttentionSm90& problem, const SplitTile& x, Weights& weights) {
  constexpr int kWarps = kTileQ / 16;
  const int end = min(x.join + problem.splits.lines, x.lines);
#pragma unroll 1
  for (int line = x.join + int(threadIdx.x) / 32; line < end; line += kWarps * kOwnLines)
    join_lines(problem, x, line, kWarps, weights);
}
