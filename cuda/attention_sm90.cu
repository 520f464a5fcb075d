// O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j that query i sees
// Hopper's tensor cores. Operands are 16-bit floats or fp8 that TMA can read; values in fp8 come transposed from
// attention_values.
// CTAs are persistent and claim tiles of 64 to 192 queries. One warp looks up the next tile and starts the copies of
// its queries, one is the producer of keys and values, two make mask bits unless all keys are seen, and one to three
// warpgroups of 64 queries are consumers. The scores of an entry are issued with the weighted values of the entry
// before, so that exponentials run beside products, also across tiles. The maximum is lazy: later entries are weighted
// with that of the first one, and raised only if row_sum says that it was too low (see docs/kernels/exactness.md). A
// tile of 128 x 128 with heads of 128 takes 2,048 cycles of the tensor cores and 1,024 of the unit for exponentials.
// Two warpgroups for heads of up to 128 columns; three for plain attention of 64, where products and exponentials take
// as long; one, with two CTAs, for small blocks, whose keys may be gathered, and few queries. fp8 keeps 13 bits of sums in
// the tensor cores: every 1024 keys they are added up in float32.
#include "common/attention_sm90_gather.cuh"
#include "common/registers.cuh"
#include "ptx/wgmma.cuh"

// ---------------------------------------------------------------------------------------------------- the consumers
// A warpgroup issues the scores of one tile of keys together with the weighted values of the tile before, and computes
// the exponentials of the scores while the values are multiplied. The row maximum is exact for the first tile of keys
// only. Later tiles are weighted with the maximum so far. If their sums show that it was too low, it is raised, and
// weights are scaled. If they are too large for that, the warp computes its scores once more, from the keys in global
// memory or in their slot. The result is as exact as with the true maximum.
// fp8: the tensor cores read bytes along K only, so values are transposed (attention_values.cu). Weights are rounded to
// fp8 too; if one is the largest fp8 number, the maximum is too low. The tensor cores keep 13 bits of sums, which are
// therefore added up in float32 every 1024 keys if shared memory has room for them.
// 0 x Inf is NaN, so a value that is not finite also reaches queries that do not see it. Queries with a non-finite
// result are recomputed exactly by attend_row.
struct Consumer {
  const AttentionSm90& problem;
  Shared& shared;
  const int group;          // warpgroup; the compiler knows it to be the same in all lanes
  u32 tile = 0, entry = 0;  // numbers of the tile, and of the entry whose keys are next or in use
  f32 scores[kScoreAccum], accum[kAccum];
  u32 weights[kWeightSteps][4], next[kFp8 ? kWeightSteps : 1][4], queries[kFromRegisters ? kSteps : 1][4];
  Two row_max, row_sum;   // maximum so far times log2(e), less kHeadroom; sum of the weights of this thread's columns
  int exact_max_tiles = 0;  // number of tiles in which the maximum is computed first
  int mask;         // of the entry, see Shared::masks
  u32 groups;       // where keys are gathered: a bit for each 16 keys that are seen by any query of this warp
  f32 fp8_scale;    // of the tile whose scores are being processed
  bool has_kept = false;
  Two kept_rescale = {1.f, 1.f};  // factor of the kept sums

  __device__ __forceinline__ Consumer(const AttentionSm90& problem, Shared& shared, int group)
      : problem(problem), shared(shared), group(group) {}

  // These are computed each time, to save registers.
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int warpgroup() { return threadIdx.x / 128; }
  __device__ __forceinline__ const Attention& a() const { return problem.attention; }
  __device__ __forceinline__ f32 tile_scale() const { return kFp8 ? fp8_scale : a().scale; }
  __device__ __forceinline__ f32 scale() const { return kScores == kPlain ? tile_scale() : 1.f; }
  // A maximum of scores in the form of `row_max`.
  static __device__ __forceinline__ f32 level(f32 score, f32 scale) {
    return kFp8 ? fmaf(score, scale, -f32(kHeadroom)) : score * scale;
  }

  // The offset of this thread's 16 bytes for ldmatrix, within the slabs of a tile of queries.
  static __device__ __forceinline__ u32 query_place(int thread, int step) {
    const int row = thread / 32 * 16 + thread % 16;
    return step / 4 * kSlabQ + row * 128 + ((step % 4 * 2 + thread / 16 % 2) ^ (row & 7)) * 16;
  }
  __device__ __forceinline__ void load_queries() {
    if constexpr (kFromRegisters) {
      const int thread = unknown_thread();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        load_matrix_x4<false>(queries[step], shared_address(shared.q[tile % kQueries]) + query_place(thread, step));
    }
  }
  // Starts scores = queries * keys.
  __device__ __forceinline__ void issue_scores() {
    const u64 b = wgmma_descriptor(shared_address(shared.k[entry % kStages]), 16, 1024);
    u64 x = 0;
    if constexpr (!kFromRegisters)
      x = wgmma_descriptor(shared_address(shared.q[tile % kQueries]) + group * 8192, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const u64 from = b + (step / 4 * kSlabK + step % 4 * 32) / 16;
      if constexpr (kFromRegisters) wgmma<false>(scores, step > 0, queries[step], from);
      else wgmma<false, false>(scores, step > 0, x + (step / 4 * kSlabQ + step % 4 * 32) / 16, from);
    }
    wgmma_commit();
  }
  // Starts sums += weights * values.
  __device__ __forceinline__ void issue_accum(u32 n) {
    wait(shared.v_full[n % kStages], parity<kStages>(n));
    const u32 values = shared_address(shared.v[n % kStages]);
    const u64 b = kFp8 ? wgmma_descriptor(values, 16, 8 * kTileK, kTileK) : wgmma_descriptor(values, kSlabK, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step)
      wgmma<!kFp8>(accum, true, weights[step], b + step * (kFp8 ? 32 : 2048) / 16);
    wgmma_commit();
  }
  // Computes the scores of this warp once more; `left` entries of the tile follow. Where other keys may be in their place
  // in shared memory, keys come from global memory, in lines of whole words.
  __device__ __forceinline__ void repeat_scores(int left) {
    const int thread = unknown_thread(), lane = thread % 32;
    const Tile& x = shared.tiles[tile % kTiles];
    const int number = (count_of(x) - 1 - left) * kPiecesOfTile;
    const bool whole = !kGathers && piece_at(a(), x, number).whole;
    int keys[kPiecesOfTile];
#pragma unroll
    for (int i = 0; i < kPiecesOfTile; ++i) keys[i] = piece_at(a(), x, number + i).key;
    const Element* head = a().k + x.batch * a().k_strides.batch + x.head / a().group * a().k_strides.head;
    const u32 slot = shared_address(shared.k[entry % kStages]) + (lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int i = 0; i < kScoreAccum; ++i) scores[i] = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      u32 q[4];
      load_matrix_x4<false>(q, shared_address(shared.q[tile % kQueries]) + query_place(thread, step));
      const auto multiply = [&](int j, u32 x, u32 y) {
        multiply_16x8(*reinterpret_cast<f32(*)[4]>(scores + j / 2), q, x, y);
      };
      if constexpr (kReleasesEarly) {
        const int column = step * 32 + lane % 4 * 4, end = a().head_dim * kBytes;
#pragma unroll
        for (int j = 0; j < kTileK; j += 8) {
          const int key = min(opaque(keys[j / kPiece]) + j % kPiece + lane / 4, a().keys - 1);
          const u8* line = reinterpret_cast<const u8*>(head + key * a().k_strides.row) + column;
          const u32 first = column < end ? *reinterpret_cast<const u32*>(line) : 0u;
          multiply(j, first, column + 16 < end ? *reinterpret_cast<const u32*>(line + 16) : 0u);
        }
      } else {
        const u32 in_slot = slot + step / 4 * kSlabK + ((step % 4 * 2 + lane / 8 % 2) ^ (lane & 7)) * 16;
#pragma unroll
        for (int j = 0; j < kTileK; j += 16) {
          u32 keys[4];
          load_matrix_x4<false>(keys, in_slot + j * 128);
          multiply(j, keys[0], keys[1]);
          multiply(j + 8, keys[2], keys[3]);
        }
      }
    }
    load_queries();  // loaded again, so that they need no registers meanwhile
    if constexpr (!kReleasesEarly) return shape_scores();
    apply_softcap();
    if (whole) return;
    // The four lanes that share two queries look up a word each.
    const int row = x.row + thread / 32 * 16 + lane / 4;
    u32 words[2], seen[2][kWords];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const u32 word = lane % 4 < kWords ? word_of_tile(a(), x, number, row + half * 8, lane % 4) : 0;
      (half ? words[1] : words[0]) = word;
    }
#pragma unroll
    for (int i = 0; i < 2 * kWords; ++i)
      seen[i / kWords][i % kWords] = __shfl_sync(0xffffffffu, words[i / kWords], lane / 4 * 4 + i % kWords);
    hide(thread, seen[0], seen[1]);
  }

  __device__ __forceinline__ void apply_softcap() {
    if constexpr (kScores != kPlain) {
#pragma unroll
      for (int i = 0; i < kScoreAccum; ++i) scores[i] = score_of(a(), tile_scale(), scores[i]);
    }
  }
  // Hides keys that are not seen by this thread's two queries, whose words of seen keys are given.
  __device__ __forceinline__ void hide(int thread, const u32 (&upper)[kWords], const u32 (&lower)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const u32 x = upper[w] >> thread % 4 * 2, y = lower[w] >> thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        f32* s = scores + 16 * w + 4 * j;
        s[0] = x >> 8 * j & 1 ? s[0] : kHidden;
        s[1] = x >> 8 * j & 2 ? s[1] : kHidden;
        s[2] = y >> 8 * j & 1 ? s[2] : kHidden;
        s[3] = y >> 8 * j & 2 ? s[3] : kHidden;
      }
    }
  }
  // Whether any query of this warp may see keys that are gathered, of a group of 16.
  __device__ __forceinline__ bool is_seen(int group) const { return !kGathers || groups >> group & 1; }
  // Applies the softcap, and hides keys that are not seen.
  __device__ __forceinline__ void shape_scores() {
    apply_softcap();
#pragma unroll
    for (int i = 0; i < kScoreAccum; ++i) scores[i] = is_seen(i / 8) ? scores[i] : kHidden;
    if (mask < 0) return;
    wait(shared.mask_full[mask % kStages], parity<kStages>(mask));
    const int thread = unknown_thread(), row = thread / 32 * 16 + thread % 32 / 4;
    hide(thread, shared.seen[mask % kStages][row], shared.seen[mask % kStages][row + 8]);
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
  // The maxima of the scores.
  __device__ __forceinline__ Two levels() const {
    const Two m = highest();
    return {level(m.x, scale()), level(m.y, scale())};
  }
  // Scores become weights; returns their sums over this thread's columns. Weights of groups that nobody sees are 0, by a
  // maximum of infinity: branches around their exponentials would keep those of other groups from running side by side.
  template <bool kRounded> __device__ __forceinline__ Two compute_weights_with() {
    const f32 by = scale(), infinity = __int_as_float(0x7f800000);
    Two even = {0.f, 0.f}, odd = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kTileK / 8; ++j) {
      f32* s = scores + 4 * j;
      const Two m = {is_seen(j / 2) ? row_max.x : infinity, is_seen(j / 2) ? row_max.y : infinity};
      s[0] = exp2_of(fmaf(s[0], by, -m.x)), s[1] = exp2_of(fmaf(s[1], by, -m.x));
      s[2] = exp2_of(fmaf(s[2], by, -m.y)), s[3] = exp2_of(fmaf(s[3], by, -m.y));
      if constexpr (kRounded) round_four(s);
      even.x += s[0], odd.x += s[1], even.y += s[2], odd.y += s[3];
    }
    return {even.x + odd.x, even.y + odd.y};
  }
  // Rounds the weights, and returns their sums.
  __device__ __forceinline__ Two sum_as_rounded() {
    Two sum = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kTileK / 8; ++j) {
      f32* s = scores + 4 * j;
      round_four(s);
      sum.x += s[0] + s[1], sum.y += s[2] + s[3];
    }
    return sum;
  }
  // A large maximum is itself rounded, and the weight of its key is not 1. Then weights are summed as they will be
  // multiplied, in 16 bits: the error of a weight that dominates all others cancels out.
  __device__ __forceinline__ bool is_large() const {
    if constexpr (kFp8) return false;
    const auto large = [&](f32 row_max) { return fabsf(row_max) > kLarge && row_max != nothing(); };
    return __any_sync(0xffffffffu, large(row_max.x) | large(row_max.y));
  }
  // The maximum of a row that has seen no key, and whether the warp has such a row: by a ballot, since after a vote here
  // the compiler assumes lanes that diverge.
  __device__ __forceinline__ f32 nothing() const { return level(kHidden, scale()); }
  __device__ __forceinline__ bool is_open() const {
    return __ballot_sync(0xffffffffu, fminf(row_max.x, row_max.y) <= nothing()) != 0;
  }
  __device__ __forceinline__ Two compute_weights() { return is_large() ? compute_weights_with<true>() : compute_weights_with<false>(); }
  // Weights in fp8 are packed while the earlier ones are still multiplied. A step has 32 keys: two neighbouring scores,
  // and the two that are 8 keys later.
  __device__ __forceinline__ void pack_next() {
    if constexpr (kFp8) {
#pragma unroll
      for (int i = 0; i < kWeightSteps * 4; ++i) {
        const f32* s = scores + i / 2 * 8 + i % 2 * 2;
        next[i / 4][i % 4] = pack_fp8(s[0], s[1], s[4], s[5]);
      }
    }
  }
  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int i = 0; i < kWeightSteps * 4; ++i) {
      if constexpr (kFp8) asm volatile("mov.b32 %0, %1;" : "=r"(weights[i / 4][i % 4]) : "r"(next[i / 4][i % 4]));
      else weights[i / 4][i % 4] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }
  // Whether a weight is the largest fp8 number, 0x7e.
  __device__ __forceinline__ bool is_saturated() const {
    u32 full = 0;
#pragma unroll
    for (int i = 0; i < kWeightSteps * 4; ++i) full |= next[kFp8 ? i / 4 : 0][i % 4] + 0x02020202u;
    return full & 0x80808080u;
  }
  // Whether the warp may have used a maximum that is too low, by the sums of weights; and whether it has.
  static __device__ __forceinline__ bool are_large(Two added) {
    return __any_sync(0xffffffffu, !(fmaxf(added.x, added.y) <= kMostSum));
  }
  __device__ __forceinline__ bool too_low(Two added) const {
    return are_large(added) && (!kFp8 || __any_sync(0xffffffffu, is_saturated()));
  }
  // With the exact maximum, weights are saturated only if rounding a huge maximum has cut them: then the queries are
  // recomputed. By the vote the compiler knows that the warp has converged, and has the loop in uniform registers.
  __device__ __forceinline__ void mark_nan_if_saturated() {
    if constexpr (!kFp8) return;
    const bool saturated = is_saturated();
    if (__any_sync(0xffffffffu, saturated) && saturated)
      row_sum = {__int_as_float(0x7fffffff), __int_as_float(0x7fffffff)};
  }
  // Raises the maximum; returns the factors by which earlier sums have to be scaled.
  __device__ __forceinline__ Two raise(Two to) {
    const Two rescale = {exp2_of(row_max.x - to.x), exp2_of(row_max.y - to.y)};
    row_max = to;
    row_sum.x *= rescale.x, row_sum.y *= rescale.y;
    return rescale;
  }
  // The maximum was too low: raises it to that of this tile, and returns the factors of earlier sums. Weights are scaled,
  // or computed again from the scores if they are too large for that; `left` entries of the tile follow.
  __device__ __forceinline__ Two lower_weights(Two& added, int left) {
    // Otherwise infinite weights make the query NaN, which is recomputed.
    const bool repeats = !kReleasesEarly || a().head_dim * kBytes % 4 == 0;
    if (repeats && __any_sync(0xffffffffu, fmaxf(added.x, added.y) > kLargestSum)) {
      repeat_scores(left);
      const Two now = levels(), rescale = raise({fmaxf(now.x, row_max.x), fmaxf(now.y, row_max.y)});
      exact_max_tiles = kExactMaxTiles;
      added = compute_weights();
      pack_next();
      mark_nan_if_saturated();
      return rescale;
    }
    const Two most = highest();
    const auto raised = [](f32 row_max, f32 most) {
      return most > f32(1 << kHeadroom) ? row_max + (log2_of(most) - f32(kHeadroom)) : row_max;
    };
    const Two rescale = raise({raised(row_max.x, most.x), raised(row_max.y, most.y)});
    added = {added.x * rescale.x, added.y * rescale.y};
#pragma unroll
    for (int i = 0; i < kScoreAccum; ++i) scores[i] *= i % 4 < 2 ? rescale.x : rescale.y;
    if (is_large()) added = sum_as_rounded();
    pack_next();
    return rescale;
  }
  __device__ __forceinline__ void wait_tile() { wait(shared.tile_full[tile % kTiles], parity<kTiles>(tile)); }
  __device__ __forceinline__ void wait_queries() { wait(shared.q_full[tile % kQueries], parity<kQueries>(tile)); }
  // Number of entries of the tile; -1: no more tiles.
  __device__ __forceinline__ int count() const {
    const Tile& x = shared.tiles[tile % kTiles];
    return uniform(x.head < 0 ? -1 : count_of(x));
  }
  __device__ __forceinline__ void wait_keys() {
    wait(shared.k_full[entry % kStages], parity<kStages>(entry));
    const int seen = shared.masks[entry % kStages];
    mask = uniform(kGathers ? Seen::number_in(seen) : seen);
    if constexpr (kGathers) groups = uniform(Seen::of_warp(seen, warp() % 4));
  }
  __device__ __forceinline__ void release_keys() {
    release(shared.k_empty[entry % kStages]);
    ++entry;
  }
  __device__ __forceinline__ void release_values(u32 n) { release(shared.v_empty[n % kStages]); }

  // Takes the next tile that sees any key, or returns false at the end; tiles that see no key are answered here.
  __device__ __forceinline__ bool take_tile() {
    while (true) {
      wait_tile();
      const Tile& x = shared.tiles[tile % kTiles];
      const int entries = count();
      if (entries < 0) return false;
      wait_queries();
      if (entries > 0) return true;
      for (int row = x.row + warp() / 4 * 64 + warp() % 4; row < min(x.rows, x.row + warpgroup() * 64 + 64); row += 4) {
        Out* out = a().o + x.batch * a().o_strides.batch + x.head * a().o_strides.head + row * a().o_strides.row;
        for (int d = lane(); d < a().value_dim; d += 32) out[d * a().o_strides.column] = Store<Out>::from(0.f);
        if (a().lse && lane() == 0) a().lse[lse_place(x, row)] = -__int_as_float(0x7f800000);
      }
      release(shared.tile_empty[tile % kTiles]);
      ++tile;
    }
  }
  __device__ __forceinline__ i64 lse_place(const Tile& x, int row) const {
    return (i64(x.batch) * a().heads + x.head) * a().queries + row;
  }
  __device__ __forceinline__ void take_scale() {
    if constexpr (kFp8) fp8_scale = shared.tiles[tile % kTiles].scale;
  }
  // Computes the first scores of a tile, while nothing else is in flight.
  __device__ __forceinline__ bool start() {
    if (!take_tile()) return false;
    clear(scores);
    wait_keys();
    load_queries();
    issue_scores();
    wgmma_wait<0>();
    settle(scores);
    return true;
  }
  // Computes the first weights of a tile, with the exact maximum.
  __device__ __forceinline__ void begin() {
    take_scale();
    shape_scores();
    release_keys();
    row_max = levels();
    row_sum = compute_weights();
    pack_next();
    mark_nan_if_saturated();
    take_weights();
    clear(accum);
    exact_max_tiles = is_open() ? kExactMaxTiles : 0;
  }

  // Issues the scores of the next entry with the weighted values of the entry before, and waits for the scores.
  __device__ __forceinline__ void issue_entry() {
    wait_keys();
    issue_scores();
    issue_accum(entry - 1);
    wgmma_wait<1>();
    settle(scores);
  }
  // Waits for the weighted values of the entry before, and takes over the weights of this one.
  __device__ __forceinline__ void take_entry(Two added) {
    if constexpr (!kReleasesEarly) release_keys();
    row_sum.x += added.x, row_sum.y += added.y;
    wgmma_wait<0>();
    settle(accum);
    release_values(entry - 2);
    take_weights();
  }
  // Computes the weights of an entry of which not all is seen, or whose maxima need the slow path; returns their sums,
  // and raises maxima of which it knows that they are too low.
  __device__ __forceinline__ Two softmax_slow_path(Two& rescale, int& rescales) {
    shape_scores();
    if constexpr (kReleasesEarly) release_keys();
    if (exact_max_tiles > 0) {  // rows of this warp had no maximum, or infinite weights
      --exact_max_tiles;
      Two now = levels();
      now = {now.x > row_max.x + kRise ? now.x : row_max.x, now.y > row_max.y + kRise ? now.y : row_max.y};
      if (__any_sync(0xffffffffu, (now.x != row_max.x) | (now.y != row_max.y))) rescale = raise(now), rescales = 1, exact_max_tiles = kExactMaxTiles;
    }
    const Two added = compute_weights();
    pack_next();
    return added;
  }
  // Whether maxima need the slow path: a row has none, or one is so large that it is rounded.
  __device__ __forceinline__ int needs_slow_path() const { return uniform(int(exact_max_tiles > 0 || is_large())); }
  // Walks over the entries of a tile, except that the weighted values of the last one are not issued. Most entries are
  // fast: all queries see them, and their maxima need no slow path. The code of others is jumped over at once.
  // Instructions that concern a whole warpgroup are written once, since its warps may not meet at different ones.
  __device__ __forceinline__ void walk(u32 last_entry) {
    int slow = needs_slow_path();
    while (entry != last_entry) {
      issue_entry();
      Two added, rescale = {1.f, 1.f};
      int rescales = 0;
      const bool fast = slow == 0 && mask < 0;
      bool rare = true;
      if (fast) {
        apply_softcap();
        if constexpr (kReleasesEarly) release_keys();
        added = compute_weights_with<false>();
        pack_next();
        rare = are_large(added);
      }
      if (rare) {
        if (!fast) added = softmax_slow_path(rescale, rescales);
        if (too_low(added)) {
          const int left = int(last_entry - entry) - !kReleasesEarly;  // entries after this one
          const Two again = lower_weights(added, left);
          rescale = {rescale.x * again.x, rescale.y * again.y}, rescales = 1;
        }
        slow = needs_slow_path();
      }
      take_entry(added);
      if (rescales) rescale_accum(rescale);
      if (kKeep && (last_entry - entry + 1) % kKeepTiles == 0) keep_accum();
    }
  }

  // The scores of the first entry of a tile are issued with the last values of the tile before. Code that runs once for a
  // tile is written once, and is short: it is not in the instruction cache, and 1500 instructions cost as much time as
  // an entry.
  __device__ __forceinline__ void run() {
    bool ahead = false;  // whether the first scores have been computed
    while (ahead || start()) {
      // The weights of the first entry with the exact maximum, then those of the others, with their values one behind.
      begin();
      tile = uniform(tile), entry = uniform(entry);
      walk(entry + count() - 1);
      ++tile;
      ahead = false;
      if constexpr (kAcross) {  // the first scores of the next tile, which are ignored if it has none
        wait_tile();
        ahead = count() > 0;
        if (ahead) {
          wait_queries();
          wait_keys();
          load_queries();
        }
        issue_scores();
      }
      // The last values, while the logarithms are stored; then the result.
      issue_accum(entry - 1);
      const Two by = close();
      wgmma_wait<0>();
      if constexpr (kAcross) settle(scores);
      settle(accum);
      release_values(entry - 1);
      finish(by);
    }
  }
  __device__ __forceinline__ f32& kept(int i) { return shared.kept[(warpgroup() * kAccum + i) * 128 + threadIdx.x % 128]; }
  __device__ __forceinline__ f32 kept_before(int i) { return kept(i) * (i % 4 < 2 ? kept_rescale.x : kept_rescale.y); }
  __device__ __forceinline__ void keep_accum() {
#pragma unroll
    for (int i = 0; i < kAccum; ++i) {
      kept(i) = has_kept ? kept_before(i) + accum[i] : accum[i];
      accum[i] = 0.f;
    }
    has_kept = true, kept_rescale = {1.f, 1.f};
  }
  __device__ __forceinline__ void take_kept() {
    if (!has_kept) return;
#pragma unroll
    for (int i = 0; i < kAccum; ++i) accum[i] += kept_before(i);
    has_kept = false, kept_rescale = {1.f, 1.f};
  }
  __device__ __forceinline__ void rescale_accum(Two by) {
    if constexpr (kKeep) kept_rescale.x *= by.x, kept_rescale.y *= by.y;
#pragma unroll
    for (int j = 0; j < kAccum / 4; ++j) {
      accum[4 * j] *= by.x, accum[4 * j + 1] *= by.x;
      accum[4 * j + 2] *= by.y, accum[4 * j + 3] *= by.y;
    }
  }

  // All weights of the tile before are known: stores the logarithms of their sums, and returns the factors of the
  // result. A factor is NaN where a query has to be recomputed: where no key was seen, or no score is above -inf.
  __device__ __forceinline__ Two close() {
    const Tile& x = shared.tiles[(tile - 1) % kTiles];
    row_sum = over_quad_sum(row_sum);
    if (a().lse && lane() % 4 == 0) {
      const int row = x.row + warp() * 16 + lane() / 4;
      if (row < x.rows) a().lse[lse_place(x, row)] = (row_max.x + log2_of(row_sum.x)) * 0.6931471805599453f;
      if (row + 8 < x.rows) a().lse[lse_place(x, row + 8)] = (row_max.y + log2_of(row_sum.y)) * 0.6931471805599453f;
    }
    const f32 one = value_scale_of(x);
    const auto factor = [&](f32 row_max, f32 row_sum) {
      const bool good = row_max != nothing() && row_sum >= kLeastRowSum && row_sum <= kMostRowSum;
      return good ? __fdividef(one, row_sum) : __int_as_float(0x7fffffff);
    };
    return {factor(row_max.x, row_sum.x), factor(row_max.y, row_sum.y)};
  }

  // The result of the tile before is written to the memory of its queries, from where it will be stored. A warp has its
  // own rows.
  __device__ __forceinline__ void finish(Two by) {
    const Tile& x = shared.tiles[(tile - 1) % kTiles];
    if constexpr (kKeep) take_kept();
    const int row = x.row + warp() * 16 + lane() / 4;
    u32 bad_x = 0, bad_y = 0;  // not zero if any element of the row is not finite
    if constexpr (kStaged) {
      const int line = warp() * 16 + lane() % 16;
#pragma unroll
      for (int j = 0; j < kValueDim / 16; ++j) {
        const f32* d = accum + 8 * j;
        const u32 w[4] = {pack<Out>(d[0] * by.x, d[1] * by.x), pack<Out>(d[2] * by.y, d[3] * by.y),
                          pack<Out>(d[4] * by.x, d[5] * by.x), pack<Out>(d[6] * by.y, d[7] * by.y)};
        store_matrix_x4<false>(staged(line, j * 16 + lane() / 16 * 8), w[0], w[1], w[2], w[3]);
        bad_x = times_zero(w[0], times_zero(w[2], bad_x)), bad_y = times_zero(w[1], times_zero(w[3], bad_y));
      }
      bad_x &= 0x7fff7fffu, bad_y &= 0x7fff7fffu;
    } else {
      Out* out = out_at(x, row);
#pragma unroll
      for (int j = 0; j < kAccum; ++j) {
        const int d = j / 4 * 8 + lane() % 4 * 2 + j % 2, down = j / 2 % 2 * 8;
        const f32 y = accum[j] * (down ? by.y : by.x);
        (down ? bad_y : bad_x) |= y * 0.f != 0.f;
        if (row + down < x.rows && d < a().value_dim)
          out[down * a().o_strides.row + d * a().o_strides.column] = Store<Out>::from(y);
      }
    }
    const u32 rows = __ballot_sync(0xffffffffu, bad_x && row < x.rows);
    const u32 lower = __ballot_sync(0xffffffffu, bad_y && row + 8 < x.rows);
    if (rows | lower) repair(x, rows, lower);
    if constexpr (kStaged) {
      if (is_sent(a(), x, warpgroup())) proxy_fence();
      else copy_out(x);
    }
    release(shared.tile_empty[(tile - 1) % kTiles]);
  }
  static constexpr bool kStaged = sizeof(Out) == 2;
  // The address of column d of a line of the result, within the 8 columns that are contiguous.
  __device__ __forceinline__ u32 staged(int line, int d) const {
    return shared_address(shared.q[(tile - 1) % kQueries]) + d / 64 * kSlabQ + line * 128 + ((d % 64 / 8) ^ (line & 7)) * 16 +
           d % 8 * 2;
  }
  __device__ __forceinline__ Out* out_at(const Tile& x, int row) const {
    return a().o + x.batch * a().o_strides.batch + x.head * a().o_strides.head + row * a().o_strides.row;
  }
  // Stores a warp's 16 rows element by element, where TMA cannot.
  __device__ __forceinline__ void copy_out(const Tile& x) {
    __syncwarp();
    const int first = warp() * 16;
#pragma unroll 1
    for (int line = first; line < min(first + 16, x.rows - x.row); ++line) {
      Out* out = out_at(x, x.row + line);
#pragma unroll 1
      for (int d = lane(); d < a().value_dim; d += 32) {
        u16 bits;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(staged(line, d)) : "memory");
        out[d * a().o_strides.column] = *reinterpret_cast<const Out*>(&bits);
      }
    }
  }
  // Recomputes rows of this warp; four bits stand for each of the upper and the lower eight rows.
  __device__ __forceinline__ void repair(const Tile& x, u32 rows, u32 lower) {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (!((i < 8 ? rows : lower) >> (i % 8 * 4) & 15)) continue;
      const int line = warp() * 16 + i, row = x.row + line;
      const f32 lse = attend_row(a(), x, row, [&](int d, f32 y) {
        const Out value = Store<Out>::from(y);
        if constexpr (kStaged)
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(staged(line, d)), "h"(*reinterpret_cast<const u16*>(&value)) : "memory");
        else
          out_at(x, row)[d * a().o_strides.column] = value;
      });
      if (a().lse && lane() == 0) a().lse[lse_place(x, row)] = lse;
    }
    __syncwarp();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) attention_sm90(const __grid_constant__ AttentionSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  if (threadIdx.x == 0) set_up(problem, shared);
  __syncthreads();

  // The first warps are consumers, of 64 queries each warpgroup; the last four share what these wait for.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4 * kConsumers) {
    more_registers<kConsumerRegisters>();
    Consumer(problem, shared, warp / 4).run();
  } else {
    fewer_registers<kProducerRegisters>();
    const int role = warp - 4 * kConsumers;
    if (role == 1) schedule(problem, shared);
    else if constexpr (kGathers) {
      const int feeder = max(role - 1, 0);
      if (feeder < kFeeders) feed(problem, shared, feeder);
    } else if (role == 0) produce(problem, shared);
    else compute_mask_bits(problem, shared, threadIdx.x % 64);
  }
}
