// C[m, n] += sum_k A[m, k] * B[k, n] for a CTA's tile by mma.sync: operands in stages of shared memory, fragments of
// warps, sums in registers. The kernel that includes this file copies the stages. Definitions give the sizes: ROW_TILES
// row tiles of ROW_TILE_HEIGHT rows by TILE_N columns, STAGES of 128 bytes along k, THREADS, and WARPS_M warps along m.
#pragma once

#include "common/registers.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

using A = ELEMENT_A;
using C = ELEMENT_C;
using Acc = ACCUMULATOR;

constexpr __device__ int smaller(int a, int b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------- the kinds of product
// A slice is 8 rows of A or 8 columns of B by one step of k. A lane holds kWords words of it: for row lane / 4 of the
// slice, word lane % 4 (f64: element) of every 16 bytes (f64: 32 bytes). So the fragments of all kinds have the same
// form. kInterleave: the rows of that many neighbouring slices alternate, because one load of a lane is that wide.
enum Kind { MMA_F16, MMA_BF16, MMA_TF32, MMA_3XTF32, MMA_F64, MMA_S8 };
template <Kind> struct Mma;

template <> struct Mma<MMA_F16> {
  using Sum = f32;
  static constexpr int kStepBytes = 32, kInterleave = 1;
  static __device__ __forceinline__ void prepare(u32 (&)[2]) {}
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2],
                                                  const u32 (&b)[2]) {
    mma_f16(d, upper, lower, b);
  }
};
template <> struct Mma<MMA_BF16> : Mma<MMA_F16> {
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2],
                                                  const u32 (&b)[2]) {
    mma_bf16(d, upper, lower, b);
  }
};
template <> struct Mma<MMA_TF32> {
  using Sum = f32;
  static constexpr int kStepBytes = 32, kInterleave = 4;
  static __device__ __forceinline__ void prepare(u32 (&words)[2]) {
    words[0] = rounded_tf32(words[0]);
    words[1] = rounded_tf32(words[1]);
  }
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2],
                                                  const u32 (&b)[2]) {
    mma_tf32(d, upper, lower, b);
  }
};
template <> struct Mma<MMA_3XTF32> : Mma<MMA_TF32> {
  // kScale * x = high + low: `high` is rounded to nearest with 11 bits, `low` is the remainder, of whose 12 bits the
  // tensor cores truncate the last. It takes three instructions at the full rate. The scale makes it exact for small
  // and subnormal numbers too, of which tf32 would not hold the remainder; infinity and numbers from 5e30 on give NaN.
  static constexpr f32 kScale = 8192.f;
  static __device__ __forceinline__ void split(const u32 (&x)[2], u32 (&high)[2], u32 (&low)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const f32 value = __uint_as_float(x[i]), scaled = value * (kScale * 8193.f);
      high[i] = __float_as_uint(fmaf(value, kScale * -8192.f, scaled));
      low[i] = __float_as_uint(fmaf(value, kScale * 8193.f, -scaled));
    }
  }
  // The same for large numbers, infinity and NaN. They are scaled down, since the largest would be rounded up to
  // infinity, and products of two numbers that are rounded up can be too large although the result is not.
  static constexpr f32 kScaleAny = .5f;
  static __device__ __forceinline__ void split_any(const u32 (&x)[2], u32 (&high)[2], u32 (&low)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const f32 value = __uint_as_float(x[i]) * kScaleAny;
      const bool finite = fabsf(value) < __uint_as_float(0x7f800000u);
      high[i] = (__float_as_uint(value) + (finite ? 0x1000u : 0u)) & 0xffffe000u;
      low[i] = __float_as_uint(value - __uint_as_float(high[i]));
    }
  }
};
template <> struct Mma<MMA_F64> {
  using Sum = f64;
  static constexpr int kStepBytes = 64, kInterleave = 1;
  static __device__ __forceinline__ void prepare(u32 (&)[4]) {}
  static __device__ __forceinline__ f64 join(const u32 (&words)[4], int i) {
    return __hiloint2double(words[2 * i + 1], words[2 * i]);
  }
  static __device__ __forceinline__ void multiply(f64 (&d)[4], const u32 (&upper)[4], const u32 (&lower)[4],
                                                  const u32 (&b)[4]) {
#if __CUDA_ARCH__ >= 900
    mma_f64(d, {join(upper, 0), join(upper, 1)}, {join(lower, 0), join(lower, 1)}, {join(b, 0), join(b, 1)});
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma_f64(d[0], d[1], join(upper, i), join(b, i));
      mma_f64(d[2], d[3], join(lower, i), join(b, i));
    }
#endif
  }
};
template <> struct Mma<MMA_S8> {
  using Sum = i32;
  static constexpr int kStepBytes = 32, kInterleave = 2;
  static __device__ __forceinline__ void prepare(u32 (&)[2]) {}
  static __device__ __forceinline__ void multiply(i32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2],
                                                  const u32 (&b)[2]) {
    mma_s8(d, upper, lower, b);
  }
};

constexpr Kind kKind = MMA;
using Unit = Mma<kKind>;
using Sum = Unit::Sum;

// ---------------------------------------------------------------------------------- sizes
constexpr int kRowTileHeight = ROW_TILE_HEIGHT;
constexpr int kRowTiles = ROW_TILES;
constexpr int kTileM = kRowTiles * kRowTileHeight;
constexpr int kTileN = TILE_N;
constexpr bool kATransposed = A_TRANSPOSED;  // blocks are stored K x R: m is the fastest index
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: k is the fastest index
constexpr int kStages = STAGES;
constexpr int kThreads = THREADS;

constexpr int kSize = sizeof(A);
constexpr int kPiece = 16 / kSize;           // elements of one copy
constexpr int kStageBytes = 128;             // bytes along k: one line of all banks
constexpr int kStageK = kStageBytes / kSize;
constexpr int kWords = Unit::kStepBytes / 16;
constexpr int kStepK = Unit::kStepBytes / kSize;
constexpr int kSteps = kStageK / kStepK;

constexpr int kWarpsM = WARPS_M;
constexpr int kWarpsN = kThreads / 32 / kWarpsM;
constexpr int kWarpM = kTileM / kWarpsM;
constexpr int kWarpN = kTileN / kWarpsN;
constexpr int kWarpTileHeight = smaller(kWarpM, kRowTileHeight);  // rows of a row tile that a warp owns
constexpr int kWarpRowTiles = kWarpM / kWarpTileHeight;
constexpr int kMmasM = kWarpM / 16;
constexpr int kSlicesN = kWarpN / 8;
constexpr int kGroup = 4;                    // slices of B whose sums over a stage are kept apart (3xTF32)
constexpr int kAhead = kStages - 1;          // stages that are copied ahead of the products
constexpr int kSumWords = kWarpM * kWarpN / 32 * sizeof(Sum) / 4;
// Two CTAs run on an SM if their registers (3xTF32 keeps sums over a stage apart) and their shared memory fit.
constexpr int kArch = __CUDA_ARCH__;
constexpr int kSmBytes = (kArch >= 900 && kArch < 1200 ? 228 : kArch == 800 || kArch == 870 ? 164 : 100) * 1024;
constexpr int kCtaBytes = kStages * (kTileM + kTileN) * kStageBytes + 2048;  // with indices and what the system takes
constexpr bool kFewRegisters = kThreads == 256 && kSumWords <= 64 && kKind != MMA_3XTF32 && 2 * kCtaBytes <= kSmBytes;
constexpr int kCtas = kFewRegisters || (kThreads < 256 && 2 * kCtaBytes <= kSmBytes) ? 2 : 1;
constexpr bool kPrefetch = !(kKind == MMA_F64 && kFewRegisters);  // f64 has large fragments and long products
constexpr bool kShort = !kPrefetch || (kKind == MMA_S8 && kFewRegisters);  // transposing bytes takes registers
// Products of 16 rows whose fragments are loaded together.
constexpr int kMmas = smaller(kWarpTileHeight / 16, kShort ? 1 : 2);
constexpr int kChunks = kWarpTileHeight / 16 / kMmas;                        // parts of the rows of a row tile
static_assert(kWarpM % kWarpTileHeight == 0 && kRowTileHeight % kWarpTileHeight == 0 && kWarpTileHeight >= 16,
              "a warp owns whole row_tiles or a part of one, 16 rows or more");
static_assert(kWarpsM * kWarpsN * 32 == kThreads && kRowTiles <= 32, "a bit for each row_tile");
static_assert(kSlicesN % kGroup == 0, "a warp multiplies 32 n columns");
static_assert(kStages >= 2 && kStages <= 8, "a lane for each stage");

// ---------------------------------------------------------------------------------- an operand in shared memory
// One stage of an operand, kExtent rows of A or columns of B: a line of 128 bytes for each of them (k is the fastest
// index), or a line for each k (kMnMajor). Pieces of 16 bytes are swizzled within their line so that no load of a
// fragment has bank conflicts. A warp reads kWarpExtent rows or columns, from `first` on.
template <bool kIsA, bool kMnMajor, int kExtent, int kWarpExtent> struct Operand {
  static constexpr int kInterleave = smaller(Unit::kInterleave, kWarpExtent / 8);
  static constexpr int kLine = kMnMajor ? kExtent * kSize : kStageBytes;
  static constexpr int kLinePieces = kLine / 16;
  static constexpr int kCopies = kExtent * kStageBytes / 16 / kThreads;  // copies of a thread
  static constexpr int kLineStep = kThreads / kLinePieces;               // lines from one copy to the next
  static_assert(kCopies >= 1, "with more threads than pieces none would be copied: 16 rows take 128 threads at most");
  static_assert(kLinePieces >= 8, "the swizzle permutes 8 pieces");
  static_assert(kThreads % kLinePieces == 0 && (kLineStep & (kLineStep - 1)) == 0, "copies differ by constants");

  static constexpr __device__ __forceinline__ u32 swizzle(u32 line) {
    if constexpr (!kMnMajor) {
      if constexpr (kKind == MMA_F64) return line / kInterleave % 4 * 2;  // 4 lines by 32 bytes at once
      else return line / kInterleave % 8;                                 // 8 lines by 16 bytes
    } else {
      if constexpr (kSize >= 4) return line % 4 * 2;                      // 4 lines by 32 bytes
      else if constexpr (kSize == 2) return line % 8;                     // 8 lines by 16 bytes
      else return line % 2 + line / 4 % 4 * 2;                            // lines 0, 1, 4, 5, 8, 9, 12, 13
    }
  }
  static __device__ __forceinline__ u32 place(u32 line, u32 byte) {
    return line * kLine + (((byte / 16) ^ swizzle(line)) * 16) + byte % 16;
  }

  // The copies of a thread: the address of the first piece, then that of the i-th, its first row or column, its first
  // k.
  static __device__ __forceinline__ u32 copy_place(u32 thread) {
    return place(thread / kLinePieces, thread % kLinePieces * 16);
  }
  static __device__ __forceinline__ u32 copy_place(u32 first, int i) {
    // The bits of this line number are 0 in the first line.
    return (first ^ swizzle(i * kLineStep) * 16) + i * kLineStep * kLine;
  }
  static __device__ __forceinline__ int copy_mn(u32 thread, int i) {
    return kMnMajor ? thread % kLinePieces * kPiece : thread / kLinePieces + i * kLineStep;
  }
  static __device__ __forceinline__ int copy_k(u32 thread, int i) {
    return kMnMajor ? thread / kLinePieces + i * kLineStep : thread % kLinePieces * kPiece;
  }

  // The row or column of a warp's part that is `row` of slice `slice`.
  static constexpr __device__ __forceinline__ u32 spread(u32 slice, u32 row) {
    return slice / kInterleave * 8 * kInterleave + row * kInterleave + slice % kInterleave;
  }

  // The address that this lane reads for the first slices at the first step; `load` adds constants to it.
  static __device__ __forceinline__ u32 lane_place(u32 first) {
    const u32 lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    // Four matrices are two slices by two words, in the order in which a product takes its registers: a product takes
    // two slices of A and one of B.
    const u32 slice = kIsA ? matrix % 2 : matrix / 2, word = kIsA ? matrix / 2 : matrix % 2;
    if constexpr (!kMnMajor) {
      if constexpr (kKind == MMA_F64) return place(first + spread(0, lane / 4), lane % 4 * 8);
      else return place(first + spread(slice, row), word * 16);
    } else {
      if constexpr (kSize >= 4) return place(lane % 4, (first + spread(0, lane / 4)) * kSize);
      else if constexpr (kSize == 2) return place(word * 8 + row, (first + slice * 8) * 2);
      // Lane l of a transposed matrix of bytes gets rows 2 (l % 4) and 2 (l % 4) + 1 of columns 2 (l / 4) and 2 (l / 4)
      // + 1. These rows are k = 4 (l % 4) and the next; the rows of the other matrix are the two k after them.
      else return place(matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2, first);
    }
  }

  // From an address in the first slice to the same element of another slice on the same line; swizzled pieces stay
  // within their 128 bytes.
  static __device__ __forceinline__ u32 along(u32 from, u32 slice) {
    const u32 bytes = slice * 8 * kSize;
    return (from ^ bytes % 128) + bytes / 128 * 128;
  }
  // The same, from one of a warp's row tiles to another.
  static __device__ __forceinline__ u32 at_row_tile(u32 from, u32 row_tile) {
    if constexpr (kMnMajor) return along(from, row_tile * (kRowTileHeight / 8));
    else return from + row_tile * (kRowTileHeight * kLine);
  }

  // Loads kSlices slices from `slice` on, at one step of k.
  template <int kSlices>
  static __device__ __forceinline__ void load(u32 (&words)[kSlices][kWords], u32 from, int slice, int step) {
    if constexpr (kSize >= 4 && kMnMajor) {  // no transposition: a lane reads kInterleave columns and keeps them
#pragma unroll
      for (int s = 0; s < kSlices; s += kInterleave)
#pragma unroll
        for (int k = 0; k < kStepK; k += 4) {
          constexpr int kElement = (kSize + 3) / 4;  // words of an element
          u32 wide[kInterleave * kElement];
          load_words(wide, along(from, slice + s) + (step * kStepK + k) * kLine);
#pragma unroll
          for (int i = 0; i < kInterleave * kElement; ++i)
            words[s + i / kElement][k / 4 * kElement + i % kElement] = wide[i];
        }
    } else if constexpr (kKind == MMA_F64) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 wide[2];
          load_words(wide, (from ^ (step * 2 + k) * 32) + spread(slice + s, 0) * kLine);
          words[s][2 * k] = wide[0];
          words[s][2 * k + 1] = wide[1];
        }
    } else {
#pragma unroll
      for (int s = 0; s < kSlices; s += 2) {
        u32 four[4];
        if constexpr (!kMnMajor)
          load_matrices<false>(four, (from ^ step * 32) + spread(slice + s, 0) * kLine);
        else
          load_matrices<true>(four, along(from, slice + s) + step * kStepK * kLine);
        if constexpr (kSize == 1 && kMnMajor) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            words[s][half] = __byte_perm(four[2 * half], four[2 * half + 1], 0x6420);
            words[s + 1][half] = __byte_perm(four[2 * half], four[2 * half + 1], 0x7531);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) words[s + (kIsA ? i % 2 : i / 2)][kIsA ? i / 2 : i % 2] = four[i];
        }
      }
    }
  }
};
using OperandA = Operand<true, kATransposed, kTileM, kWarpTileHeight>;
using OperandB = Operand<false, !kBTransposed, kTileN, kWarpN>;

// The addresses of a lane's part of a stage.
struct Fragments {
  u32 a, b;

  // Where the rows of one of the warp's row tiles begin; they are loaded in chunks.
  __device__ __forceinline__ u32 row_tile_place(u32 row_tile) const { return kWarpRowTiles > 1 ? OperandA::at_row_tile(a, row_tile) : a; }
  static __device__ __forceinline__ void load_a(u32 (&words)[2 * kMmas][kWords], u32 place, int chunk, int step) {
    OperandA::load(words, place, chunk * 2 * kMmas, step);
  }
  template <int kSlices>
  __device__ __forceinline__ void load_b(u32 (&words)[kSlices][kWords], int slice, int step) const {
    OperandB::load(words, b, slice, step);
  }
};

// ---------------------------------------------------------------------------------- the products of one stage
using Accum = Sum[kMmasM][kSlicesN][4];

template <int kSlices>
__device__ __forceinline__ void prepare(u32 (&to)[kSlices][kWords], const u32 (&from)[kSlices][kWords]) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[s][i] = from[s][i];
    Unit::prepare(to[s]);
  }
}

// Multiplies kCount steps from `first` on. At each step the fragments of B serve all row tiles of the warp; `present`
// has a bit for each row tile that has the block. Meanwhile the next fragments are loaded, those of A from the next
// present row tile.
template <int kCount>
__device__ __forceinline__ void multiply(Accum& accum, const Fragments& from, u32 present, int first) {
  u32 a_next[2 * kMmas][kWords], b_next[kSlicesN][kWords];
  u32 following[kWarpRowTiles];  // where the next present row tile lies; the first follows the last
  following[kWarpRowTiles - 1] = from.row_tile_place(kWarpRowTiles > 1 ? __ffs(present) - 1 : 0);
  if constexpr (kPrefetch) {
    from.load_a(a_next, following[kWarpRowTiles - 1], 0, first);
    from.load_b(b_next, 0, first);
#pragma unroll
    for (int row_tile = kWarpRowTiles - 2; row_tile >= 0; --row_tile)  // computed now, not before each load
      following[row_tile] = opaque(present >> row_tile & 2 ? from.row_tile_place(row_tile + 1) : following[row_tile + 1]);
  }
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    u32 b[kSlicesN][kWords];
    if constexpr (!kPrefetch) from.load_b(b_next, 0, first + step);
    prepare(b, b_next);
    if (kPrefetch && step + 1 < kCount) from.load_b(b_next, 0, first + step + 1);
#pragma unroll
    for (int row_tile = 0; row_tile < kWarpRowTiles; ++row_tile) {
      if (kWarpRowTiles > 1 && !(present >> row_tile & 1)) continue;
      const u32 above = kWarpRowTiles > 1 ? present >> row_tile >> 1 : 0;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        u32 a[2 * kMmas][kWords];
        if constexpr (!kPrefetch) from.load_a(a_next, from.row_tile_place(row_tile), chunk, first + step);
        prepare(a, a_next);
        if constexpr (kPrefetch) {
          if (chunk + 1 < kChunks) from.load_a(a_next, from.row_tile_place(row_tile), chunk + 1, first + step);
          else if (step + 1 < kCount || above) from.load_a(a_next, following[row_tile], 0, first + step + !above);
        }
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
#pragma unroll
          for (int s = 0; s < kSlicesN; ++s)
            Unit::multiply(accum[(row_tile * kChunks + chunk) * kMmas + m][s], a[2 * m], a[2 * m + 1], b[s]);
      }
    }
  }
}

using Part = f32[kMmas][kGroup][4];

// (ah + al)(bh + bl) without al bl; the large products and the two small ones have separate sums.
template <bool kAny, class Split>
__device__ __forceinline__ void multiply_split(Part& big, Part& small, const Fragments& from, u32 row_tile, int chunk,
                                               int group, int first, int steps) {
  u32 a_next[2 * kMmas][kWords], b_next[kGroup][kWords];
  from.load_a(a_next, from.row_tile_place(row_tile), chunk, first);
  from.load_b(b_next, group * kGroup, first);
#pragma unroll
  for (int step = first; step < first + steps; ++step) {
    u32 a[2 * kMmas][kWords], a_low[2 * kMmas][kWords], b[kGroup][kWords], b_low[kGroup][kWords];
#pragma unroll
    for (int s = 0; s < 2 * kMmas; ++s) {
      if constexpr (kAny) Split::split_any(a_next[s], a[s], a_low[s]);
      else Split::split(a_next[s], a[s], a_low[s]);
    }
#pragma unroll
    for (int s = 0; s < kGroup; ++s) {
      if constexpr (kAny) Split::split_any(b_next[s], b[s], b_low[s]);
      else Split::split(b_next[s], b[s], b_low[s]);
    }
    if (step + 1 < first + steps) {
      from.load_a(a_next, from.row_tile_place(row_tile), chunk, step + 1);
      from.load_b(b_next, group * kGroup, step + 1);
    }
#pragma unroll
    for (int product = 0; product < 3; ++product)
#pragma unroll
      for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int s = 0; s < kGroup; ++s) {
          if (product == 0) Split::multiply(small[m][s], a_low[2 * m], a_low[2 * m + 1], b[s]);
          else if (product == 1) Split::multiply(big[m][s], a[2 * m], a[2 * m + 1], b[s]);
          else Split::multiply(small[m][s], a[2 * m], a[2 * m + 1], b_low[s]);
        }
  }
}

// The tensor cores truncate what they add, so their sums extend over one stage only, and rounded additions make the
// long sum. Sums of a stage that are not finite are computed again with care: next to an infinite element the small
// products are NaN, or infinite of either sign, which must not reach the sum; any finite number would do there.
template <class Split>
__device__ __forceinline__ void multiply_three(Accum& accum, const Fragments& from, u32 present, int steps) {
  constexpr f32 kLargest = 3.402823466e38f;
  constexpr f32 kFactor = 1 / (Split::kScale * Split::kScale), kFactorAny = 1 / (Split::kScaleAny * Split::kScaleAny);
  constexpr int kGroups = kSlicesN / kGroup, kParts = kMmas * kGroup * 4;
  static_assert(kParts <= 32, "a bit for each sum");
#pragma unroll
  for (int row_tile = 0; row_tile < kWarpRowTiles; ++row_tile) {
    if (kWarpRowTiles > 1 && !(present >> row_tile & 1)) continue;
#pragma unroll
    for (int i = 0; i < kChunks * kGroups; ++i) {
      const int chunk = i / kGroups, group = i % kGroups;
      const auto sum_of = [&](int j) -> auto& {
        return accum[(row_tile * kChunks + chunk) * kMmas + j / 4 / kGroup][group * kGroup + j / 4 % kGroup][j % 4];
      };
      Part big = {}, small = {};
      const auto big_of = [&](int j) -> f32& { return big[j / 4 / kGroup][j / 4 % kGroup][j % 4]; };
      const auto small_of = [&](int j) -> f32& { return small[j / 4 / kGroup][j / 4 % kGroup][j % 4]; };
      if (steps == kSteps) {
        multiply_split<false, Split>(big, small, from, row_tile, chunk, group, 0, kSteps);
      } else {
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
          multiply_split<false, Split>(big, small, from, row_tile, chunk, group, step, 1);
      }
      f32 nothing = 0;  // NaN unless all are finite
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        big_of(j) += small_of(j);
        nothing = fmaf(big_of(j), 0.f, nothing);
      }
      if (__any_sync(0xffffffffu, !(nothing == 0))) {
        u32 again = 0;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          if (big_of(j) * 0.f == 0) sum_of(j) = fmaf(big_of(j), kFactor, sum_of(j));
          else again |= 1u << j;
          big_of(j) = small_of(j) = 0;
        }
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
          multiply_split<true, Split>(big, small, from, row_tile, chunk, group, step, 1);
#pragma unroll
        for (int j = 0; j < kParts; ++j)
          if (again >> j & 1)
            sum_of(j) = fmaf(big_of(j) + fminf(fmaxf(small_of(j), -kLargest), kLargest), kFactorAny, sum_of(j));
      } else {
#pragma unroll
        for (int j = 0; j < kParts; ++j) sum_of(j) = fmaf(big_of(j), kFactor, sum_of(j));
      }
    }
  }
}

__device__ __forceinline__ void multiply_stage(Accum& accum, const Fragments& from, u32 present, int steps) {
  if (present == 0) return;
  if constexpr (kKind == MMA_3XTF32) {
    multiply_three<Unit>(accum, from, present, steps);
  } else if (steps == kSteps) {
    multiply<kSteps>(accum, from, present, 0);
  } else {
#pragma unroll 1  // a stage that the end of a block cuts short
    for (int step = 0; step < steps; ++step) multiply<1>(accum, from, present, step);
  }
}

// ---------------------------------------------------------------------------------- the result
// The columns that a lane holds of kInterleave slices are contiguous: a run.
constexpr int kRun = 2 * OperandB::kInterleave;
constexpr int kVector = smaller(kRun, 16 / sizeof(C));  // elements of one store
struct alignas(kVector * sizeof(C)) Vector { C x[kVector]; };
