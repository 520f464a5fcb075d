// O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j that query i sees
// Products by mma.sync, on sm_80 and newer. Operands are 16-bit floats with contiguous columns.
// A CTA has one tile of 128 queries, a warp 32 of them, or 16 where the accumulators of 32 take too many registers.
// Tiles of 64 keys and of values alternate in one ring in shared memory and are copied one or two turns ahead.
// Exponentials of 16 keys are computed among the products of the 16 before. The maximum is raised only where scores lie
// more than 8 powers of two above it, so that accumulators are seldom rescaled. At heads of 128 a warp has, for 64
// keys, 3,072 clocks of shared memory and 3,300 of the tensor cores.
#include "common/attention_sm80.cuh"

// A warp holds the scores of its queries with a tile of keys in registers and turns them into weights, 16 keys at a
// time, while the values of the 16 keys before are multiplied. The number that is subtracted from scores may be up to 8
// (in powers of two) below the true maximum, so that sums are seldom rescaled; at the end they are divided by the sum
// of the weights.
// 0 x Inf is NaN, so a value that is not finite also reaches queries that do not see it. Queries with a non-finite
// result are recomputed exactly by attend_row.

constexpr int kStages = STAGES;                   // stages of the ring
constexpr int kRows = kTileQ / kWarps;            // queries of a warp
constexpr int kSlabs = kRows / 16;                // slabs of queries, the height of one mma each
// Whether queries stay in registers; if not, they are loaded for each tile of keys.
constexpr bool kFromRegisters = Q_IN_REGISTERS;
constexpr int kMostDim = kHeadDim > kValueDim ? kHeadDim : kValueDim;
constexpr u32 kTurnBytes = kTileK * kMostDim * 2;
constexpr f32 kHidden = -1.7014118346046923e38f;  // the score of a hidden key: -2^127, which any scale keeps exact
constexpr f32 kLag = 8.f;                         // how far the maximum may lag, in powers of two
static_assert(kRows % 16 == 0 && kRows <= 32 && kTileK % 32 == 0, "whole fragments and words");
static_assert(kStages == 2 || kStages == 3, "a turn or two ahead");

struct alignas(128) Shared {
  u8 q[kTileQ * kMostDim * 2];       // the queries, then the result before it is stored
  u8 ring[kStages][kTurnBytes];      // keys, values, keys...
  u8 seeing[kTileQ];                 // whether the query has seen any key
  int columns[2][32], parts[2][32];  // for 32 entries, and for the next 32
  Tile tile;
  const Element *k, *v;              // keys and values of the tile's head
};

using Keys = Lines<kHeadDim>;
using Values = Lines<kValueDim>;

// ---------------------------------------------------------------------------------- a warp's queries
struct QueryTile {
  const Attention& a;
  Shared& shared;
  f32 scores[kSlabs][kTileK / 8][4], accum[kSlabs][kValueDim / 8][4];
  u32 queries[kFromRegisters ? kSlabs : 1][kFromRegisters ? kHeadDim / 16 : 1][4];
  // For rows lane / 4 and 8 + lane / 4 of a slab: the number that is subtracted from scores, times log2(e), and the sum
  // of the weights of this thread's columns.
  f32 row_max[kSlabs][2], row_sum[kSlabs][2];
  u32 words[kWords];  // unless all see all: which keys row lane % kRows sees

  __device__ __forceinline__ QueryTile(const Attention& a, Shared& shared) : a(a), shared(shared) {
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
      row_max[m][0] = row_max[m][1] = nothing();
      row_sum[m][0] = row_sum[m][1] = 0.f;
#pragma unroll
      for (int j = 0; j < kValueDim / 8; ++j) accum[m][j][0] = accum[m][j][1] = accum[m][j][2] = accum[m][j][3] = 0.f;
    }
  }

  // These are computed each time, to save registers.
  static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ u32 first_row() { return threadIdx.x / 32 * kRows; }
  __device__ __forceinline__ f32 scale() const { return kScores == kPlain ? a.scale : 1.f; }
  __device__ __forceinline__ f32 nothing() const { return kHidden * scale(); }

  __device__ __forceinline__ void load_query(u32 (&x)[4], int slab, int step) const {
    const u32 row = first_row() + lane() % 16;
    load_matrices<false>(x, shared_address(shared.q) + row * Keys::kBytes + slab * 16 * Keys::kBytes +
                                Keys::place(step, lane() / 16, row));
  }
  __device__ __forceinline__ void load_queries() {
    if constexpr (kFromRegisters) {
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) load_query(queries[m][step], m, step);
    }
  }

  // Whether any keys of an entry are seen. Unless all queries see all keys, it also looks up which.
  __device__ __forceinline__ bool look(const Entry& entry) {
    const Tile& x = shared.tile;
    if (x.row + int(first_row()) >= x.rows) return false;
    const int own = int(first_row() + lane() % kRows), row = x.row + own;
    u32 any = entry.whole;
    if (!entry.whole) {
      words_of(a, x, entry, row, words);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (row >= x.rows) words[i] = 0;
        any |= words[i];
      }
    }
    if (any) shared.seeing[own] = 1;
    return __any_sync(kAll, any != 0);
  }

  // scores = queries * keys
  __device__ __forceinline__ void multiply_keys(u32 tile) {
    const u32 row = lane() % 8 + lane() / 16 * 8, at = tile + row * Keys::kBytes;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int j = 0; j < kTileK / 8; ++j) scores[m][j][0] = scores[m][j][1] = scores[m][j][2] = scores[m][j][3] = 0.f;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      u32 x[kSlabs][4];
#pragma unroll
      for (int m = 0; m < kSlabs; ++m) {
        if constexpr (kFromRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[m][i] = queries[m][step][i];
        } else {
          load_query(x[m], m, step);
        }
      }
#pragma unroll
      for (int j = 0; j < kTileK / 16; ++j) {
        u32 y[4];  // keys 0 to 7, both halves of 16 elements; keys 8 to 15
        load_matrices<false>(y, at + j * 16 * Keys::kBytes + Keys::place(step, lane() / 8 % 2, row));
#pragma unroll
        for (int m = 0; m < kSlabs; ++m) {
          multiply(scores[m][2 * j], x[m], y[0], y[1]);
          multiply(scores[m][2 * j + 1], x[m], y[2], y[3]);
        }
      }
    }
  }

  // Applies the softcap, and hides keys that are not seen.
  __device__ __forceinline__ void shape_scores(bool whole) {
    if constexpr (kScores != kPlain) {
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int i = 0; i < kTileK / 2; ++i) scores[m][i / 4][i % 4] = score_of(a, a.scale, scores[m][i / 4][i % 4]);
    }
    if (whole) return;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 bits = __shfl_sync(kAll, words[w], m * 16 + half * 8 + lane() / 4) >> lane() % 4 * 2;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            f32(&s)[4] = scores[m][4 * w + j];
            s[2 * half] = bits >> 8 * j & 1 ? s[2 * half] : kHidden;
            s[2 * half + 1] = bits >> 8 * j & 2 ? s[2 * half + 1] : kHidden;
          }
        }
  }

  // Raises the number that is subtracted if scores lie far above it; earlier sums are scaled down.
  __device__ __forceinline__ void raise() {
    f32 rescale[kSlabs][2];
    bool any = false;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f32 even = scores[m][0][2 * half], odd = scores[m][0][2 * half + 1];
#pragma unroll
        for (int j = 1; j < kTileK / 8; ++j) {
          even = fmaxf(even, scores[m][j][2 * half]);
          odd = fmaxf(odd, scores[m][j][2 * half + 1]);
        }
        f32 most = fmaxf(even, odd);
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 2)) * scale();
        const bool higher = most > row_max[m][half] + kLag;
        const f32 to = higher ? most : row_max[m][half];
        rescale[m][half] = exp2_of(row_max[m][half] - to);
        row_max[m][half] = to;
        any |= higher;
      }
    if (!__any_sync(kAll, any)) return;
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
      row_sum[m][0] *= rescale[m][0], row_sum[m][1] *= rescale[m][1];
#pragma unroll
      for (int j = 0; j < kValueDim / 8; ++j) {
        accum[m][j][0] *= rescale[m][0], accum[m][j][1] *= rescale[m][0];
        accum[m][j][2] *= rescale[m][1], accum[m][j][3] *= rescale[m][1];
      }
    }
  }

  // Score number i of 16 keys and all slabs becomes a weight.
  __device__ __forceinline__ void weigh(int sixteen, int i) {
    const int m = i / 8, half = i / 2 % 2;
    f32& s = scores[m][2 * sixteen + i / 4 % 2][i % 4];
    s = exp2_of(fmaf(s, scale(), -row_max[m][half]));
    row_sum[m][half] += s;
  }
  // sums += weights * values
  __device__ __forceinline__ void multiply_values(u32 tile) {
    constexpr int kScores16 = 8 * kSlabs, kColumns16 = kValueDim / 16;
    const u32 row = lane() % 16, at = tile + row * Values::kBytes;
#pragma unroll
    for (int i = 0; i < kScores16; ++i) weigh(0, i);
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      u32 x[kSlabs][4];
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const f32(&s)[4] = scores[m][2 * step + i / 2];
          x[m][i] = pack<Element>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
        }
#pragma unroll
      for (int j = 0; j < kColumns16; ++j) {
        u32 y[4];  // columns 0 to 7, keys 0 to 7 and 8 to 15; columns 8 to 15
        load_matrices<true>(y, at + step * 16 * Values::kBytes + Values::place(j, lane() / 16, row));
#pragma unroll
        for (int m = 0; m < kSlabs; ++m) {
          multiply(accum[m][2 * j], x[m], y[0], y[1]);
          multiply(accum[m][2 * j + 1], x[m], y[2], y[3]);
        }
        if (step + 1 < kTileK / 16) {
#pragma unroll
          for (int i = j * kScores16 / kColumns16; i < (j + 1) * kScores16 / kColumns16; ++i) weigh(step + 1, i);
        }
      }
    }
  }

  // -------------------------------------------------------------------------------- the result
  __device__ __forceinline__ Out* out_row(int row) const {
    const Tile& x = shared.tile;
    return a.o + x.batch * a.o_strides.batch + x.head * a.o_strides.head + row * a.o_strides.row;
  }
  __device__ __forceinline__ i64 lse_place(int row) const {
    return (i64(shared.tile.batch) * a.heads + shared.tile.head) * a.queries + row;
  }
  __device__ __forceinline__ void finish() {
    const Tile& x = shared.tile;
    __syncwarp();
    u32 redo = 0;  // bit 4 r + i: row 8 i + r
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        f32 all = row_sum[m][half];
        all += __shfl_xor_sync(kAll, all, 1);
        all += __shfl_xor_sync(kAll, all, 2);
        const int own = int(first_row() + m * 16 + half * 8 + lane() / 4), row = x.row + own;
        const bool none = !shared.seeing[own];
        const f32 by = __fdividef(1.f, all);
        f32 bad = 0.f;  // NaN if any element of the row is not finite
#pragma unroll
        for (int j = 0; j < kValueDim / 8; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            accum[m][j][i] = none ? 0.f : accum[m][j][i] * by;
            bad = fmaf(accum[m][j][i], 0.f, bad);
          }
        if (a.lse && lane() % 4 == 0 && row < x.rows)
          a.lse[lse_place(row)] =
              none ? -__int_as_float(0x7f800000) : (row_max[m][half] + log2_of(all)) * 0.6931471805599453f;
        // If all scores are -inf, the number that is subtracted has never been raised.
        const bool good = none || (bad == 0.f && all > 0.f && row_max[m][half] != nothing());
        u32 wrong = __ballot_sync(kAll, row < x.rows && !good);
        wrong |= wrong >> 1;
        redo |= ((wrong | wrong >> 2) & 0x11111111u) << (2 * m + half);
      }
    write();
    __syncwarp();
    if (redo) repair(redo);
  }

  // Writes 16 bytes at a time if the result is aligned: 16-bit elements through shared memory, pairs of 32-bit elements
  // directly.
  __device__ __forceinline__ void write() {
    const Tile& x = shared.tile;
    const int row = x.row + int(first_row());
    Out* const out = out_row(row);
    const bool aligned = a.o_strides.column == 1 &&
                         ((reinterpret_cast<u64>(out) | u64(a.o_strides.row) * sizeof(Out)) & 15) == 0;
    // The result also overwrites other warps' queries.
    if constexpr (kValueDim > kHeadDim && sizeof(Out) == 2) __syncthreads();
    if (sizeof(Out) == 2 && aligned) {
      u8* const staged = shared.q + first_row() * Values::kBytes;
#pragma unroll
      for (int m = 0; m < kSlabs; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int j = 0; j < kValueDim / 8; ++j) {
            const u32 down = m * 16 + half * 8 + lane() / 4;
            *reinterpret_cast<u32*>(staged + down * Values::kBytes + Values::place(j / 2, j % 2, down) +
                                    lane() % 4 * 4) = pack<Out>(accum[m][j][2 * half], accum[m][j][2 * half + 1]);
          }
      __syncwarp();
#pragma unroll 4
      for (u32 item = lane(); item < kRows * Values::kPieces; item += 32) {
        const u32 down = item / Values::kPieces, piece = item % Values::kPieces;
        if (row + int(down) >= x.rows) break;
        const u8* from = staged + down * Values::kBytes + (piece ^ Values::swizzle(down)) * 16;
        Out* to = out + down * a.o_strides.row + piece * 8;
        const int columns = a.value_dim - int(piece) * 8;
        if (columns >= 8) *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from);
        else
          for (int d = 0; d < columns; ++d) to[d] = reinterpret_cast<const Out*>(from)[d];
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < kSlabs; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int down = int(m * 16 + half * 8 + lane() / 4);
        if (row + down >= x.rows) continue;
        Out* to = out + down * a.o_strides.row;
#pragma unroll
        for (int j = 0; j < kValueDim / 8; ++j) {
          const int d = j * 8 + int(lane() % 4) * 2;
          const f32 y0 = accum[m][j][2 * half], y1 = accum[m][j][2 * half + 1];
          if (sizeof(Out) == 4 && aligned && d + 1 < a.value_dim) {
            *reinterpret_cast<float2*>(to + d) = make_float2(y0, y1);
          } else {
            if (d < a.value_dim) to[d * a.o_strides.column] = Store<Out>::from(y0);
            if (d + 1 < a.value_dim) to[(d + 1) * a.o_strides.column] = Store<Out>::from(y1);
          }
        }
      }
  }
  __device__ __forceinline__ void repair(u32 redo) {
    const Tile x = shared.tile;
#pragma unroll 1
    for (; redo; redo &= redo - 1) {
      const int bit = __ffs(redo) - 1, row = x.row + int(first_row()) + bit % 4 * 8 + bit / 4;
      Out* out = out_row(row);
      const f32 lse = attend_row(a, x, row, [&](int d, f32 y) { out[d * a.o_strides.column] = Store<Out>::from(y); });
      if (a.lse && lane() == 0) a.lse[lse_place(row)] = lse;
    }
  }
};

// ---------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, CTAS) attention_sm80(const __grid_constant__ Attention a) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Tile& x = shared.tile;
  {
    const Tile found = tile_at(a, blockIdx.x);
    if (found.head < 0) return;
    if (threadIdx.x < kTileQ) shared.seeing[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      shared.tile = found;
      shared.k = a.k + found.batch * a.k_strides.batch + found.head / a.group * a.k_strides.head;
      shared.v = a.v + found.batch * a.v_strides.batch + found.head / a.group * a.v_strides.head;
    }
    __syncthreads();
  }
  const auto count = [&] { return x.last - x.first; };
  // Entries are walked from the last to the first; one warp looks up 32 at a time.
  const auto look_up = [&](int n) {
    const int lane = threadIdx.x, e = x.last - 1 - n - lane;
    if (lane >= 32 || e < x.first) return;
    shared.columns[n / 32 % 2][lane] = column_of(a, e);
    shared.parts[n / 32 % 2][lane] = part_of(a, e);
  };
  const auto entry_number = [&](int n) {
    return entry_at(a, x, shared.columns[n / 32 % 2][n % 32], shared.parts[n / 32 % 2][n % 32]);
  };
  const auto key_number = [&](int n) { return entry_number(n).key; };
  const auto copy_keys = [&](u32 stage, int key) {
    Keys::copy<kTileK>(shared_address(shared.ring[stage]), shared.k + key * a.k_strides.row, a.k_strides.row,
                       x.keys - key, a.head_dim);
  };
  const auto copy_values = [&](u32 stage, int key) {
    Values::copy<kTileK>(shared_address(shared.ring[stage]), shared.v + key * a.v_strides.row, a.v_strides.row,
                         x.keys - key, a.value_dim);
  };
  QueryTile own(a, shared);
  if (count() > 0) {
    look_up(0);
    const Element* from = a.q + x.batch * a.q_strides.batch + x.head * a.q_strides.head + x.row * a.q_strides.row;
    Keys::copy<kTileQ>(shared_address(shared.q), from, a.q_strides.row, x.rows - x.row, a.head_dim);
    __syncthreads();
    copy_keys(0, key_number(0));
    copy_commit();
    if (kStages == 3) {
      copy_values(1, key_number(0));
      copy_commit();
    }
    copy_wait<kStages - 2>();
    __syncthreads();
    own.load_queries();
#pragma unroll 1
    for (int n = 0; n < count(); ++n) {
      // Turn 2 n: keys. The stage of the turn before is free, since all warps are done with it.
      const u32 turn = 2 * n;
      copy_wait<kStages - 2>();
      __syncthreads();
      if (kStages == 2) copy_values((turn + 1) % kStages, key_number(n));
      else if (n + 1 < count()) copy_keys((turn + 2) % kStages, key_number(n + 1));
      copy_commit();
      if (n % 32 == 30) look_up(n + 2);
      const Entry entry = entry_number(n);
      const bool seen = own.look(entry);
      if (seen) {
        own.multiply_keys(shared_address(shared.ring[turn % kStages]));
        own.shape_scores(entry.whole);
        own.raise();
      }
      // Turn 2 n + 1: values, among which scores become weights.
      copy_wait<kStages - 2>();
      __syncthreads();
      if (n + 1 < count()) {
        if (kStages == 2) copy_keys((turn + 2) % kStages, key_number(n + 1));
        else copy_values((turn + 3) % kStages, key_number(n + 1));
      }
      copy_commit();
      if (seen) own.multiply_values(shared_address(shared.ring[(turn + 1) % kStages]));
    }
  }
  own.finish();
}
