// O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j of a band that query i sees
// Short sequences on Hopper's tensor cores: heads of 64 or 128 columns, 16-bit floats, scale above 0, no masks of
// blocks.
// A CTA computes one tile of queries and ends: it claims no tile, reads no list, and finds its tile by its place in a
// grid of three dimensions. Its warps share the start of the copies of the queries and of the first tiles of keys and
// values, since one takes a thread about 200 cycles; there is no producer warp, which would leave a thread 96 registers
// instead of 128. A warpgroup has 64 of the queries and every kShares-th tile of keys; the shares are added at the end,
// in order. The first tile runs through the same code as all others: 32 to 44 KB of code, where attention_sm90 has 82
// to 144 to fetch. Latency is the limit.
#include "common/attention_sm90.cuh"
#include "common/registers.cuh"
#include "ptx/wgmma.cuh"

constexpr int kRowGroups = kTileQ / 64, kShares = SHARES, kSlots = SLOTS;
constexpr int kConsumers = kRowGroups * kShares, kThreads = 128 * kConsumers;
constexpr int kSteps = kHeadDim / 16, kAccum = kHeadDim / 2, kSlabs = kHeadDim / 64;  // a slab has 64 columns
constexpr int kScoreAccum = kTileK / 2, kWeightSteps = kTileK / 16;
constexpr u32 kSlabQ = kTileQ * 128, kSlabK = kTileK * 128;
static_assert(kHeadDim == kValueDim && kHeadDim % 64 == 0 && kTileK % 64 == 0, "whole slabs and products");
static_assert(kScores == kPlain && sizeof(Element) == 2 && sizeof(Out) == 2, "scores need the scale alone");
static_assert(kSlots % kShares == 0, "a slot belongs to one share");
// Whether the scores of a tile are computed beside the weighted values of the one before, which takes two slots, and
// more than 128 registers for 128 columns.
constexpr bool kBeside = kSlots >= 2 * kShares && (kHeadDim <= 64 || kThreads * CTAS < 512);
constexpr f32 kMostSum = 16384.f;  // largest sum of a thread's weights of a row before the maximum is raised

// What a warpgroup of a later share hands to the first one, in the memory of keys and values.
struct Share {
  static constexpr int kLanes = kShares > 1 ? 128 : 1;  // nothing is handed by one share
  f32 accum[kAccum][kLanes], row_max_x[kLanes], row_max_y[kLanes], row_sum_x[kLanes], row_sum_y[kLanes];
};
struct alignas(1024) Shared {
  u8 q[kSlabs * kSlabQ];  // the queries, then the result before it is stored
  union {
    struct { u8 k[kSlots][kSlabs * kSlabK], v[kSlots][kSlabs * kSlabK]; };
    Share shares[kShares > 1 ? kConsumers - kRowGroups : 1];
  };
  u64 q_full, k_full[kSlots], k_empty[kSlots], v_full[kSlots], v_empty[kSlots];
};

struct OwnTile : Tile {
  int kv_head;
};
// The tile of this CTA. Tiles of a head follow each other, so that its keys stay in the L2; those with most keys come
// first if their numbers differ. Grid: tiles, heads, batches; or heads, batches, tiles, the last tiles first.
__device__ __forceinline__ OwnTile own_tile(const Attention& a) {
  OwnTile x = {};
  x.head = a.backwards ? blockIdx.x : blockIdx.y;
  x.batch = a.backwards ? blockIdx.y : blockIdx.z;
  x.kv_head = a.group == 1 ? x.head : x.head / a.group;
  x.row = int(a.backwards ? gridDim.z - 1 - blockIdx.z : blockIdx.x) * kTileQ;
  x.rows = a.queries;
  x.keys = a.keys;
  const int shift = a.bottom_right ? a.keys - a.queries : 0;
  x.low = shift - a.left;
  x.high = shift + a.right;
  const int from = max(0, x.row + x.low), to = min(x.keys, min(x.rows, x.row + kTileQ) + x.high);
  if (from < to) x.first = from / kTileK, x.last = (to + kTileK - 1) / kTileK;
  return x;
}
// The first key of tile t of the walk, which begins with the last keys.
__device__ __forceinline__ int key_of(const Tile& x, int t) { return (x.last - 1 - t) * kTileK; }

// ------------------------------------------------------------------------------------------------------- the copies
// Sets the barriers up. Others may wait for a barrier after the CTA's first __syncthreads.
__device__ __forceinline__ void set_up(const AttentionSm90& problem, Shared& shared) {
  prefetch_map(&problem.q);
  prefetch_map(&problem.k);
  prefetch_map(&problem.v);
  const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
  init(shared.q_full, 1);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    init(shared.k_full[i], 1), init(shared.k_empty[i], 4 * kRowGroups);
    init(shared.v_full[i], 1), init(shared.v_empty[i], 4 * kRowGroups);
  }
  barrier_init_fence();
}
// Copy tile t of keys, or of values; its slot is free.
__device__ __forceinline__ void copy_keys(const AttentionSm90& problem, Shared& shared, const OwnTile& x, int t) {
  copy_slabs<kSlabs>(shared.k[t % kSlots], kSlabK, problem.k, key_of(x, t), x.kv_head, x.batch,
                     shared.k_full[t % kSlots]);
}
__device__ __forceinline__ void copy_values(const AttentionSm90& problem, Shared& shared, const OwnTile& x, int t) {
  copy_slabs<kSlabs>(shared.v[t % kSlots], kSlabK, problem.v, key_of(x, t), x.kv_head, x.batch,
                     shared.v_full[t % kSlots]);
}
// The queries, and as many tiles as there are slots: the values of a round follow its keys, in the order of their use.
// A copy takes one thread some 200 cycles to start, so that warps take turns.
__device__ __forceinline__ void copy_first(const AttentionSm90& problem, Shared& shared, const OwnTile& x, int warp) {
  constexpr int kWarps = kThreads / 32;
  if (!is_elected()) return;
  if (warp == 0) copy_slabs<kSlabs>(shared.q, kSlabQ, problem.q, x.row, x.head, x.batch, shared.q_full);
  const int end = min(x.last - x.first, kSlots);
#pragma unroll
  for (int n = 0; n < 2 * kSlots; ++n) {
    const int t = n / (2 * kShares) * kShares + n % kShares;
    if ((n + 1) % kWarps != warp || t >= end) continue;
    if (n / kShares % 2 == 0) copy_keys(problem, shared, x, t);
    else copy_values(problem, shared, x, t);
  }
}

// ---------------------------------------------------------------------------------------------------- the consumers
// Scores of a tile of keys are issued together with the weighted values of the tile before, and weighed meanwhile
// (kBeside); without the slots or the registers for it other CTAs compute meanwhile. The maximum is that of a row's
// first tile, unless weights become large: the result is as exact as with the true maximum.
// 0 x Inf is NaN, so a value that is not finite also reaches queries that do not see it. Queries with a result that is
// not finite are recomputed exactly by attend_row.
struct Consumer {
  const AttentionSm90& problem;
  Shared& shared;
  const OwnTile& x;
  const int rows, share;  // which 64 queries, and which tiles of keys
  f32 scores[kScoreAccum], accum[kAccum];
  u32 weights[kWeightSteps][4];
  Two row_max, row_sum;  // a maximum times log2(e); sum of the weights of this thread's columns
  bool open = true, rounded = false;  // of the warp: a row has no maximum yet; a maximum is above kLarge

  __device__ __forceinline__ Consumer(const AttentionSm90& problem, Shared& shared, const OwnTile& x, int group)
      : problem(problem), shared(shared), x(x), rows(group % kRowGroups), share(group / kRowGroups) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp_row() const { return rows * 64 + threadIdx.x % 128 / 32 * 16; }
  __device__ __forceinline__ const Attention& a() const { return problem.attention; }
  __device__ __forceinline__ f32 scale() const { return a().scale; }

  // Starts scores = queries * keys.
  __device__ __forceinline__ void issue_scores(int t) {
    wait(shared.k_full[t % kSlots], parity<kSlots>(t));
    const u64 b = wgmma_descriptor(shared_address(shared.k[t % kSlots]), 16, 1024);
    const u64 a = wgmma_descriptor(shared_address(shared.q) + rows * 8192, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const u64 from = b + (i / 4 * kSlabK + i % 4 * 32) / 16;
      wgmma<false, false>(scores, i > 0, a + (i / 4 * kSlabQ + i % 4 * 32) / 16, from);
    }
    wgmma_commit();
  }
  // Starts sums += weights * values.
  __device__ __forceinline__ void issue_accum(int t) {
    wait(shared.v_full[t % kSlots], parity<kSlots>(t));
    const u64 b = wgmma_descriptor(shared_address(shared.v[t % kSlots]), kSlabK, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWeightSteps; ++i) wgmma<true>(accum, true, weights[i], b + i * 2048 / 16);
    wgmma_commit();
  }

  // Hides keys that are not seen.
  __device__ __forceinline__ void hide(int key) {
    const int last_row = min(x.rows, x.row + kTileQ) - 1;
    if (key + kTileK <= x.keys && key >= last_row + x.low && key + kTileK - 1 <= x.row + x.high) return;
    const int row = x.row + warp_row() + lane() / 4, column = key + lane() % 4 * 2;
    const int from = row + x.low - column, end = x.keys - 1 - column, to = row + x.high - column;
#pragma unroll
    for (int i = 0; i < kScoreAccum; ++i) {
      const int at = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
      scores[i] = at >= from + down && at <= min(to + down, end) ? scores[i] : kHidden;
    }
  }
  // The largest of a row's scores, or weights.
  __device__ __forceinline__ Two highest() const {
    Two even = {scores[0], scores[2]}, odd = {scores[1], scores[3]};
#pragma unroll
    for (int j = 1; j < kTileK / 8; ++j) {
      even.x = fmaxf(even.x, scores[4 * j]), odd.x = fmaxf(odd.x, scores[4 * j + 1]);
      even.y = fmaxf(even.y, scores[4 * j + 2]), odd.y = fmaxf(odd.y, scores[4 * j + 3]);
    }
    return over_quad_max({fmaxf(even.x, odd.x), fmaxf(even.y, odd.y)});
  }
  // Scores become weights; returns their sums over this thread's columns.
  template <bool kRounded> __device__ __forceinline__ Two compute_weights_with() {
    const f32 by = scale();
    Two even = {0.f, 0.f}, odd = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kTileK / 8; ++j) {
      f32* s = scores + 4 * j;
      s[0] = exp2_of(fmaf(s[0], by, -row_max.x)), s[1] = exp2_of(fmaf(s[1], by, -row_max.x));
      s[2] = exp2_of(fmaf(s[2], by, -row_max.y)), s[3] = exp2_of(fmaf(s[3], by, -row_max.y));
      if constexpr (kRounded) {
        const u32 upper = pack<Element>(s[0], s[1]), lower = pack<Element>(s[2], s[3]);
        s[0] = low_of<Element>(upper), s[1] = high_of<Element>(upper);
        s[2] = low_of<Element>(lower), s[3] = high_of<Element>(lower);
      }
      even.x += s[0], odd.x += s[1], even.y += s[2], odd.y += s[3];
    }
    return {even.x + odd.x, even.y + odd.y};
  }
  // The maximum of a row that has seen no key.
  __device__ __forceinline__ f32 nothing() const { return kHidden * scale(); }
  // Rows that have no maximum yet get that of this tile; returns the factor of their sums so far, which are those of
  // hidden keys and are dropped. A large maximum is itself rounded, and the weight of its key is not 1. Then weights
  // are summed as they will be multiplied, in 16 bits: the error of a weight that dominates all others cancels out.
  __device__ __forceinline__ Two open_rows() {
    const Two now = highest(), rescale = {row_max.x == nothing() ? 0.f : 1.f, row_max.y == nothing() ? 0.f : 1.f};
    row_max = {rescale.x == 0.f ? now.x * scale() : row_max.x, rescale.y == 0.f ? now.y * scale() : row_max.y};
    const bool none_x = row_max.x == nothing(), none_y = row_max.y == nothing();
    open = __any_sync(0xffffffffu, none_x | none_y);
    rounded = __any_sync(0xffffffffu, (fabsf(row_max.x) > kLarge && !none_x) | (fabsf(row_max.y) > kLarge && !none_y));
    return rescale;
  }
  // The maximum was too low: the weights are scaled by powers of two, which is exact, to at most 1; returns the
  // factor. Weights that are infinite make the sum so, and the query is recomputed.
  __device__ __forceinline__ Two lower(Two& added) {
    const Two most = highest();
    const auto power = [](f32 x) { return x > 1.f ? min(int(__float_as_uint(x) >> 23) - 126, 126) : 0; };
    const int x = power(most.x), y = power(most.y);
    const Two rescale = {__uint_as_float(u32(127 - x) << 23), __uint_as_float(u32(127 - y) << 23)};
    row_max = {row_max.x + f32(x), row_max.y + f32(y)};
    rounded |= __any_sync(0xffffffffu, (x > 0 && fabsf(row_max.x) > kLarge) | (y > 0 && fabsf(row_max.y) > kLarge)) != 0;
    added = {added.x * rescale.x, added.y * rescale.y};
#pragma unroll
    for (int i = 0; i < kScoreAccum; ++i) scores[i] *= i % 4 < 2 ? rescale.x : rescale.y;
    return rescale;
  }
  __device__ __forceinline__ void rescale_accum(Two by) {
#pragma unroll
    for (int i = 0; i < kAccum; ++i) accum[i] *= i % 4 < 2 ? by.x : by.y;
  }
  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int i = 0; i < 4 * kWeightSteps; ++i) weights[i / 4][i % 4] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
  }

  // One thread of a share copies into the slots whose keys and values were used one step ago.
  __device__ __forceinline__ void refill(int t) {
    constexpr int kLater = kBeside ? kShares : 0;  // values are used that much later than keys
    const int keys = t - kShares + kSlots, values = keys - kLater, count = x.last - x.first;
    if (rows == 0 && threadIdx.x % 128 < 32) {
      if (is_elected()) {
        if (t >= share + kShares && keys < count) {
          wait(shared.k_empty[keys % kSlots], parity<kSlots>(keys) ^ 1);
          copy_keys(problem, shared, x, keys);
        }
        if (t >= share + kShares + kLater && values < count) {
          wait(shared.v_empty[values % kSlots], parity<kSlots>(values) ^ 1);
          copy_values(problem, shared, x, values);
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void attend() {
    const int count = x.last - x.first;
    row_max = {nothing(), nothing()};
    row_sum = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kAccum; ++i) accum[i] = 0.f;
    wait(shared.q_full, 0);
    int t = share;
#pragma unroll 1
    for (; t < count; t += kShares) {
      if constexpr (kSlots < 2 * kShares) refill(t);  // the slot of these keys
      issue_scores(t);
      if (kBeside && t > share) issue_accum(t - kShares);
      else if (kBeside) wgmma_fence(), wgmma_commit();  // an empty group, so that the scores are the last but one
      if constexpr (kSlots >= 2 * kShares) refill(t);
      wgmma_wait<kBeside ? 1 : 0>();
      settle(scores);
      release(shared.k_empty[t % kSlots]);
      hide(key_of(x, t));
      Two rescale = {1.f, 1.f};
      bool rescales = open;
      if (open) rescale = open_rows();
      Two added = rounded ? compute_weights_with<true>() : compute_weights_with<false>();
      if (__any_sync(0xffffffffu, !(fmaxf(added.x, added.y) <= kMostSum))) {
        const Two by = lower(added);
        rescale = {rescale.x * by.x, rescale.y * by.y}, rescales = true;
      }
      row_sum = {fmaf(row_sum.x, rescale.x, added.x), fmaf(row_sum.y, rescale.y, added.y)};
      if constexpr (kBeside) {
        wgmma_wait<0>();
        settle(accum);
        if (t > share) release(shared.v_empty[(t - kShares) % kSlots]);
      }
      take_weights();
      if (rescales) rescale_accum(rescale);
      if constexpr (!kBeside) {
        issue_accum(t);
        wgmma_wait<0>();
        settle(accum);
        release(shared.v_empty[t % kSlots]);
      }
    }
    if (kBeside && t > share) issue_accum(t - kShares);
    wgmma_wait<0>();
    settle(accum);
  }

  // The first share adds the others to its own.
  __device__ __forceinline__ void add_shares() {
    if constexpr (kShares == 1) return;
    const int thread = threadIdx.x % 128;
    __syncthreads();  // nobody reads keys or values any more
    if (share > 0) {
      Share& to = shared.shares[(share - 1) * kRowGroups + rows];
#pragma unroll
      for (int i = 0; i < kAccum; ++i) to.accum[i][thread] = accum[i];
      to.row_max_x[thread] = row_max.x, to.row_max_y[thread] = row_max.y, to.row_sum_x[thread] = row_sum.x, to.row_sum_y[thread] = row_sum.y;
    }
    __syncthreads();
    if (share > 0) return;
#pragma unroll 1
    for (int s = 1; s < kShares; ++s) {
      const Share& from = shared.shares[(s - 1) * kRowGroups + rows];
      const Two other = {from.row_max_x[thread], from.row_max_y[thread]};
      const Two now = {fmaxf(row_max.x, other.x), fmaxf(row_max.y, other.y)};
      const Two rescale = {exp2_of(row_max.x - now.x), exp2_of(row_max.y - now.y)};
      const Two by = {exp2_of(other.x - now.x), exp2_of(other.y - now.y)};
      row_max = now;
      row_sum = {row_sum.x * rescale.x + from.row_sum_x[thread] * by.x, row_sum.y * rescale.y + from.row_sum_y[thread] * by.y};
#pragma unroll
      for (int i = 0; i < kAccum; ++i)
        accum[i] = accum[i] * (i % 4 < 2 ? rescale.x : rescale.y) + from.accum[i][thread] * (i % 4 < 2 ? by.x : by.y);
    }
  }

  // All weights are known: stores the logarithms of their sums, and returns the factors of the result. A factor is NaN
  // where a query has to be recomputed: where no key was seen, or no score is above -inf.
  __device__ __forceinline__ Two close() {
    row_sum = over_quad_sum(row_sum);
    const int row = x.row + warp_row() + lane() / 4;
    if (a().lse && lane() % 4 == 0) {
      if (row < x.rows) a().lse[lse_place(row)] = (row_max.x + log2_of(row_sum.x)) * 0.6931471805599453f;
      if (row + 8 < x.rows) a().lse[lse_place(row + 8)] = (row_max.y + log2_of(row_sum.y)) * 0.6931471805599453f;
    }
    const auto factor = [&](f32 row_max, f32 row_sum) {
      const bool good = row_max != nothing() && row_sum >= kLeastRowSum && row_sum <= kMostRowSum;
      return good ? __fdividef(1.f, row_sum) : __int_as_float(0x7fffffff);
    };
    return {factor(row_max.x, row_sum.x), factor(row_max.y, row_sum.y)};
  }
  __device__ __forceinline__ i64 lse_place(int row) const {
    return (i64(x.batch) * a().heads + x.head) * a().queries + row;
  }
  // The offset of column d of a line of the result, within the 8 columns that are contiguous.
  static __device__ __forceinline__ u32 staged(int line, int d) {
    return d / 64 * kSlabQ + line * 128 + ((d % 64 / 8) ^ (line & 7)) * 16 + d % 8 * 2;
  }
  // A warp writes its rows of the result to the memory of its queries, and from there in pieces of 16 bytes.
  __device__ __forceinline__ void finish(Two by) {
    if constexpr (kShares == 1) warpgroup_sync(1 + rows);  // nobody reads these queries any more
    const u32 place = shared_address(shared.q);
    const int line = warp_row() + lane() % 16, row = x.row + warp_row() + lane() / 4;
    u32 bad_x = 0, bad_y = 0;  // not zero if any element of the row is not finite
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      const f32* d = accum + 8 * j;
      const u32 w[4] = {pack<Out>(d[0] * by.x, d[1] * by.x), pack<Out>(d[2] * by.y, d[3] * by.y),
                        pack<Out>(d[4] * by.x, d[5] * by.x), pack<Out>(d[6] * by.y, d[7] * by.y)};
      store_matrix_x4<false>(place + staged(line, j * 16 + lane() / 16 * 8), w[0], w[1], w[2], w[3]);
      bad_x = times_zero(w[0], times_zero(w[2], bad_x)), bad_y = times_zero(w[1], times_zero(w[3], bad_y));
    }
    const u32 upper = __ballot_sync(0xffffffffu, (bad_x & 0x7fff7fffu) && row < x.rows);
    const u32 lower = __ballot_sync(0xffffffffu, (bad_y & 0x7fff7fffu) && row + 8 < x.rows);
    if (upper | lower) repair(upper, lower);
    __syncwarp();
    Out* out = a().o + x.batch * a().o_strides.batch + x.head * a().o_strides.head;
#pragma unroll
    for (int i = lane(); i < 16 * kHeadDim / 8; i += 32) {
      const int at = warp_row() + i / (kHeadDim / 8), d = i % (kHeadDim / 8) * 8;
      const float4 piece = *reinterpret_cast<const float4*>(shared.q + staged(at, d));
      if (x.row + at < x.rows) *reinterpret_cast<float4*>(out + (x.row + at) * a().o_strides.row + d) = piece;
    }
  }
  // Recomputes rows of this warp; four bits stand for each of the upper and the lower eight rows.
  __device__ __forceinline__ void repair(u32 upper, u32 lower) {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (!((i < 8 ? upper : lower) >> (i % 8 * 4) & 15)) continue;
      const int line = warp_row() + i, row = x.row + line;
      const f32 lse = attend_row(a(), x, row, [&](int d, f32 y) {
        *reinterpret_cast<Out*>(shared.q + staged(line, d)) = Store<Out>::from(y);
      });
      if (a().lse && lane() == 0) a().lse[lse_place(row)] = lse;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, CTAS)
    attention_short_sm90(const __grid_constant__ AttentionSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) set_up(problem, shared);
  const OwnTile x = own_tile(problem.attention);
  __syncthreads();
  copy_first(problem, shared, x, warp);
  __syncwarp();
  Consumer consumer(problem, shared, x, warp / 4);
  consumer.attend();
  consumer.add_shares();
  if (consumer.share == 0) consumer.finish(consumer.close());
}
