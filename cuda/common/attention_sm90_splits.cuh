// Keys that are split among CTAs, for few tiles of queries: the heads of a group that share keys are folded into one
// tile, so that keys are read once for all of them, and several CTAs walk over the keys of a tile, of which each leaves
// its sums in float32. The numbers of the walk are splits of tiles, and behind them the lines of tiles whose sums are to
// be added: who claims some waits until the splits, which running CTAs have claimed before, have arrived. Splits are
// added in their order, so that results repeat bit by bit.
#pragma once

#include "common/attention_sm90.cuh"

constexpr int kMostSplits = 128;  // of a tile
constexpr int kJoinLines = 8;     // lines of a tile whose sums one CTA adds

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
  x.slot = slot, x.split = place, x.join = joins ? place * kJoinLines : -1;
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
// Splits of each tile that have arrived, counted by warps.
__device__ __forceinline__ int* arrived_of(const Attention& a, int slot) { return a.counters + 2 + slot; }
// Called by each warp once it has left its sums.
__device__ __forceinline__ void leave_sums(const Attention& a, int slot) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) atomicAdd(arrived_of(a, slot), 1);
}
// Called by each warp: waits until as many warps have left their sums.
__device__ __forceinline__ void wait_sums(const Attention& a, int slot, int warps) {
  const volatile int* arrived = arrived_of(a, slot);
  while (*arrived < warps) __nanosleep(64);
  __syncwarp();
  __threadfence();
}

// A warp adds the sums of all splits of a line, each with its weight, and stores the result.
__device__ __forceinline__ void join_line(const AttentionSm90& problem, const SplitTile& x, int line) {
  const Attention& a = problem.attention;
  const int lane = threadIdx.x % 32, head = head_of(x, line), row = query_of(x, line);
  const f32 none = -__int_as_float(0x7f800000);
  float2 ends[kMostSplits / 32];
  f32 maximum = none, total = 0.f;
  bool seen = false;  // keys of which none has a weight
#pragma unroll
  for (int n = 0; n < kMostSplits / 32; ++n) {
    const int split = n * 32 + lane;
    ends[n] = split < x.splits ? __ldcg(end_of(problem.splits, x.slot, split, line)) : make_float2(none, 0.f);
    maximum = fmaxf(maximum, ends[n].x);
    seen |= ends[n].y < 0.f;
  }
#pragma unroll
  for (int i = 16; i; i /= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, i));
  const f32 base = maximum == none ? 0.f : maximum;
#pragma unroll
  for (int n = 0; n < kMostSplits / 32; ++n) {
    ends[n].x = exp2_of(ends[n].x - base);
    total += ends[n].x * ends[n].y;
  }
  total = warp_sum(total);
  if (maximum == none && __any_sync(0xffffffffu, seen)) total = __int_as_float(0x7fffffff);
  const f32 factor = total == 0.f ? 0.f : __fdividef(value_scale_of(x), total);
  Out* out = a.o + x.batch * a.o_strides.batch + head * a.o_strides.head + row * a.o_strides.row;
#pragma unroll 1
  for (int first = 0; first < a.value_dim; first += 128) {
    const int d = first + lane * 4;
    f32 sums[4] = {};
#pragma unroll
    for (int n = 0; n < kMostSplits / 32; ++n) {
#pragma unroll 8
      for (int i = 0; i < min(x.splits - n * 32, 32); ++i) {
        const f32 weight = __shfl_sync(0xffffffffu, ends[n].x, i);
        const f32* from = sums_of(problem.splits, x.slot, n * 32 + i, line) + d;
        const float4 y = d < kValueDim ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0.f, 0.f, 0.f, 0.f);
        sums[0] = fmaf(weight, y.x, sums[0]), sums[1] = fmaf(weight, y.y, sums[1]);
        sums[2] = fmaf(weight, y.z, sums[2]), sums[3] = fmaf(weight, y.w, sums[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (d + i < a.value_dim) out[(d + i) * a.o_strides.column] = Store<Out>::from(sums[i] * factor);
  }
  if (a.lse && lane == 0)
    a.lse[(i64(x.batch) * a.heads + head) * a.queries + row] =
        total == 0.f ? none : (maximum + log2_of(total)) * 0.6931471805599453f;
}
