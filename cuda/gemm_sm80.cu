// C[m, n] = alpha * sum_p sum_k A[p, m % R, k] * B[col[p]*K + k, n] + beta * C[m, n],  p in the block row of m
// Ampere and newer: mma.sync fed by cp.async. A CTA owns the rows of kSlots slots of the schedule by kTileN columns and
// walks the union of the slots' block columns. A warp owns part of one slot, or several whole ones, and skips what they
// lack: an absent block contributes nothing, whatever B holds. All warps meet after each stage, so those that share a
// scheduler (warp % 4) should own all slots between them: then every scheduler has the same to do. Rows of stored
// blocks and lines of B are multiples of 16 bytes; any N, any strides of C, one fixed order of sums.
#include "bsr.cuh"
#include "mma.cuh"

using A = ELEMENT_A;
using B = ELEMENT_B;
using C = ELEMENT_C;
using Acc = ACCUMULATOR;
static_assert(Same<A, B>::value, "one element type");

constexpr __device__ int smaller(int a, int b) { return a < b ? a : b; }

// ---------------------------------------------------------------------------------- the kinds of product
// A slice is 8 rows of A or 8 columns of B by one step of k; a lane holds kWords words of it: for row lane / 4 of the
// slice, the (lane % 4)-th word (f64: element) of every 16 bytes (f64: 32). So the fragments of all kinds look alike.
// kInterleave: the rows of that many neighbouring slices alternate, since what a lane can read at once is as wide.
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
  // The tensor cores cut, so half a unit of the last place of tf32 is added: by a factor, 0.72 to 1.44 of it. The error
  // is below 0.73 units and without bias; what is a tf32 stays, NaN and infinity too. Rounding to nearest takes two or
  // three instructions at half the rate, which is more time than the products take.
  static __device__ __forceinline__ u32 round(u32 x) {
    return __float_as_uint(__uint_as_float(x) * (1 + 0.72134752f / 2048));
  }
  static __device__ __forceinline__ void prepare(u32 (&words)[2]) {
    words[0] = round(words[0]);
    words[1] = round(words[1]);
  }
  static __device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2],
                                                  const u32 (&b)[2]) {
    mma_tf32(d, upper, lower, b);
  }
};
template <> struct Mma<MMA_3XTF32> : Mma<MMA_TF32> {
  // x = high + low: 11 bits to nearest, and what is left, of which the tensor cores cut off the last of 12 bits. Three
  // instructions at the full rate; exact, but NaN for infinity and from 4e34 on.
  static __device__ __forceinline__ void split(const u32 (&x)[2], u32 (&high)[2], u32 (&low)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const f32 value = __uint_as_float(x[i]), scaled = value * 8193.f;
      high[i] = __float_as_uint(fmaf(value, -8192.f, scaled));
      low[i] = __float_as_uint(fmaf(value, 8193.f, -scaled));
    }
  }
  // The same for all numbers.
  static __device__ __forceinline__ void split_any(const u32 (&x)[2], u32 (&high)[2], u32 (&low)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool finite = fabsf(__uint_as_float(x[i])) < __uint_as_float(0x7f800000u);
      high[i] = (finite ? x[i] + 0x1000u : x[i]) & 0xffffe000u;
      low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i]));
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
constexpr int kSlotRows = SLOT_ROWS;
constexpr int kSlots = SLOTS;
static_assert(SLOTS * SLOT_ROWS >= 32, "tiles of 16 rows are not served");
constexpr int kTileM = kSlots * kSlotRows;
constexpr int kTileN = TILE_N;
constexpr bool kATransposed = A_TRANSPOSED;  // blocks are stored K x R: m runs fastest
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: k runs fastest
constexpr int kStages = STAGES;
constexpr int kThreads = THREADS;

constexpr int kSize = sizeof(A);
constexpr int kPiece = 16 / kSize;           // elements of one copy
constexpr int kStageBytes = 128;             // of k, one line of all banks
constexpr int kStageK = kStageBytes / kSize;
constexpr int kWords = Unit::kStepBytes / 16;
constexpr int kStepK = Unit::kStepBytes / kSize;
constexpr int kSteps = kStageK / kStepK;

constexpr int kWarpsM = WARPS_M;
constexpr int kWarpsN = kThreads / 32 / kWarpsM;
constexpr int kWarpM = kTileM / kWarpsM;
constexpr int kWarpN = kTileN / kWarpsN;
constexpr int kWarpSlotRows = smaller(kWarpM, kSlotRows);  // of a slot, that a warp owns
constexpr int kWarpSlots = kWarpM / kWarpSlotRows;
constexpr int kMmasM = kWarpM / 16;
constexpr int kSlicesN = kWarpN / 8;
constexpr int kGroup = 4;                    // slices of B whose sums of a stage are kept apart (3xTF32)
constexpr int kAhead = kStages - 1;          // stages, and entries whose indices are known, in front of the products
constexpr int kRing = 16;                    // entries whose indices are kept
constexpr int kSumWords = kWarpM * kWarpN / 32 * sizeof(Sum) / 4;
// Two CTAs where their registers (3xTF32 keeps sums of a stage apart) and their shared memory fit an SM.
constexpr int kArch = __CUDA_ARCH__;
constexpr int kSmBytes = (kArch >= 900 && kArch < 1200 ? 228 : kArch == 800 || kArch == 870 ? 164 : 100) * 1024;
constexpr int kCtaBytes = kStages * (kTileM + kTileN) * kStageBytes + 2048;  // with indices and what the system takes
constexpr bool kFewRegisters = kThreads == 256 && kSumWords <= 64 && kKind != MMA_3XTF32 && 2 * kCtaBytes <= kSmBytes;
constexpr int kCtas = kFewRegisters || (kThreads < 256 && 2 * kCtaBytes <= kSmBytes) ? 2 : 1;
constexpr bool kPrefetch = !(kKind == MMA_F64 && kFewRegisters);  // its fragments are large, and its products long
constexpr bool kShort = !kPrefetch || (kKind == MMA_S8 && kFewRegisters);  // transposing bytes takes registers
constexpr int kMmas = smaller(kWarpSlotRows / 16, kShort ? 1 : 2);         // of 16 rows, whose fragments come together
constexpr int kChunks = kWarpSlotRows / 16 / kMmas;                        // of the rows of a slot
static_assert(kWarpM % kWarpSlotRows == 0 && kSlotRows % kWarpSlotRows == 0 && kWarpSlotRows >= 16,
              "a warp owns whole slots or a part of one, 16 rows or more");
static_assert(kWarpsM * kWarpsN * 32 == kThreads && kSlots <= 32, "a bit for each slot");
static_assert(kSlicesN % kGroup == 0, "a warp multiplies 32 n columns");
static_assert(kStages >= 2 && kStages <= 8, "a lane for each stage");
static_assert(2 * kAhead <= kRing, "the first stages are copied without a barrier between: indices must not meet");

// ---------------------------------------------------------------------------------- an operand in shared memory
// One stage of an operand, kExtent rows of A or columns of B: a line of 128 bytes for each of them (k runs fastest), or
// a line for each k (kMnMajor). Pieces of 16 bytes are swizzled within their line such that no load of a fragment meets
// a bank twice. A warp reads kWarpExtent rows or columns, from `first`.
template <bool kIsA, bool kMnMajor, int kExtent, int kWarpExtent> struct Operand {
  static constexpr int kInterleave = smaller(Unit::kInterleave, kWarpExtent / 8);
  static constexpr int kLine = kMnMajor ? kExtent * kSize : kStageBytes;
  static constexpr int kLinePieces = kLine / 16;
  static constexpr int kCopies = kExtent * kStageBytes / 16 / kThreads;  // of a thread
  static constexpr int kLineStep = kThreads / kLinePieces;               // lines from one copy to the next
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

  // Copies of a thread: the place of the first piece, then of the i-th, its first row or column, its first k.
  static __device__ __forceinline__ u32 copy_place(u32 thread) {
    return place(thread / kLinePieces, thread % kLinePieces * 16);
  }
  static __device__ __forceinline__ u32 copy_place(u32 first, int i) {
    return (first ^ swizzle(i * kLineStep) * 16) + i * kLineStep * kLine;  // bits of the line that are 0 in the first
  }
  static __device__ __forceinline__ int copy_mn(u32 thread, int i) {
    return kMnMajor ? thread % kLinePieces * kPiece : thread / kLinePieces + i * kLineStep;
  }
  static __device__ __forceinline__ int copy_k(u32 thread, int i) {
    return kMnMajor ? thread / kLinePieces + i * kLineStep : thread % kLinePieces * kPiece;
  }

  // Row or column of a warp's part: `row` of slice `slice`.
  static constexpr __device__ __forceinline__ u32 spread(u32 slice, u32 row) {
    return slice / kInterleave * 8 * kInterleave + row * kInterleave + slice % kInterleave;
  }

  // What this lane reads of the first slices at the first step; `load` goes on from there by constants.
  static __device__ __forceinline__ u32 lane_place(u32 first) {
    const u32 lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    // Four matrices are two slices by two words, in the order in which a product wants its registers: a product takes
    // two slices of A and one of B.
    const u32 slice = kIsA ? matrix % 2 : matrix / 2, word = kIsA ? matrix / 2 : matrix % 2;
    if constexpr (!kMnMajor) {
      if constexpr (kKind == MMA_F64) return place(first + spread(0, lane / 4), lane % 4 * 8);
      else return place(first + spread(slice, row), word * 16);
    } else {
      if constexpr (kSize >= 4) return place(lane % 4, (first + spread(0, lane / 4)) * kSize);
      else if constexpr (kSize == 2) return place(word * 8 + row, (first + slice * 8) * 2);
      // Lane l of a transposed matrix of bytes gets rows 2 (l % 4) and the next, columns 2 (l / 4) and the next; these
      // rows are k = 4 (l % 4) and the next, and those of the other matrix the two k behind.
      else return place(matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2, first);
    }
  }

  // From a place in the first slice to the same in another on the same line; swizzled pieces stay in their 128 bytes.
  static __device__ __forceinline__ u32 along(u32 from, u32 slice) {
    const u32 bytes = slice * 8 * kSize;
    return (from ^ bytes % 128) + bytes / 128 * 128;
  }
  // The same, from one of a warp's slots to another.
  static __device__ __forceinline__ u32 at_slot(u32 from, u32 slot) {
    if constexpr (kMnMajor) return along(from, slot * (kSlotRows / 8));
    else return from + slot * (kSlotRows * kLine);
  }

  // kSlices slices from `slice` on, at one step of k.
  template <int kSlices>
  static __device__ __forceinline__ void load(u32 (&words)[kSlices][kWords], u32 from, int slice, int step) {
    if constexpr (kSize >= 4 && kMnMajor) {  // no transposition: a lane reads kInterleave columns and keeps them
#pragma unroll
      for (int s = 0; s < kSlices; s += kInterleave)
#pragma unroll
        for (int k = 0; k < kStepK; k += 4) {
          constexpr int kElement = (kSize + 3) / 4;  // words
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
using OperandA = Operand<true, kATransposed, kTileM, kWarpSlotRows>;
using OperandB = Operand<false, !kBTransposed, kTileN, kWarpN>;

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

struct alignas(1024) Shared {  // the longest line
  u8 a[kStages][kTileM * kStageBytes];
  u8 b[kStages][kTileN * kStageBytes];
  int4 item;
  int places[kSlots];              // of the slots: row of C / kSlotRows, or -1
  int starts[kSlots];              // of the slots: first row in a block
  int entries[kRing][kSlots + 1];  // by entry % kRing: the blocks of the slots, the block column
};

// x, known by the compiler to be the same in the whole warp: it stays in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// x, and the compiler does not know it: what follows from it is computed where it is needed, not kept in registers.
__device__ __forceinline__ u32 again(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where a lane finds its part of a stage.
struct Fragments {
  u32 a, b;

  // Where the rows of one of the warp's slots begin; they are loaded by chunks.
  __device__ __forceinline__ u32 slot_place(u32 slot) const { return kWarpSlots > 1 ? OperandA::at_slot(a, slot) : a; }
  static __device__ __forceinline__ void load_a(u32 (&words)[2 * kMmas][kWords], u32 place, int chunk, int step) {
    OperandA::load(words, place, chunk * 2 * kMmas, step);
  }
  template <int kSlices>
  __device__ __forceinline__ void load_b(u32 (&words)[kSlices][kWords], int slice, int step) const {
    OperandB::load(words, b, slice, step);
  }
};

// ---------------------------------------------------------------------------------- the products of one stage
using Sums = Sum[kMmasM][kSlicesN][4];

template <int kSlices>
__device__ __forceinline__ void prepare(u32 (&to)[kSlices][kWords], const u32 (&from)[kSlices][kWords]) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[s][i] = from[s][i];
    Unit::prepare(to[s]);
  }
}

// kCount steps from `first` on. At each step the fragments of B serve all slots of the warp; `present` has a bit for
// each that has the block. The next fragments are on their way meanwhile, those of A from the next such slot.
template <int kCount>
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& from, u32 present, int first) {
  u32 a_next[2 * kMmas][kWords], b_next[kSlicesN][kWords];
  u32 following[kWarpSlots];  // where the next slot that is present lies, behind the last one the first
  following[kWarpSlots - 1] = from.slot_place(kWarpSlots > 1 ? __ffs(present) - 1 : 0);
  if constexpr (kPrefetch) {
    from.load_a(a_next, following[kWarpSlots - 1], 0, first);
    from.load_b(b_next, 0, first);
#pragma unroll
    for (int slot = kWarpSlots - 2; slot >= 0; --slot)  // now, and not in front of each load
      following[slot] = again(present >> slot & 2 ? from.slot_place(slot + 1) : following[slot + 1]);
  }
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    u32 b[kSlicesN][kWords];
    if constexpr (!kPrefetch) from.load_b(b_next, 0, first + step);
    prepare(b, b_next);
    if (kPrefetch && step + 1 < kCount) from.load_b(b_next, 0, first + step + 1);
#pragma unroll
    for (int slot = 0; slot < kWarpSlots; ++slot) {
      if (kWarpSlots > 1 && !(present >> slot & 1)) continue;
      const u32 above = kWarpSlots > 1 ? present >> slot >> 1 : 0;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        u32 a[2 * kMmas][kWords];
        if constexpr (!kPrefetch) from.load_a(a_next, from.slot_place(slot), chunk, first + step);
        prepare(a, a_next);
        if constexpr (kPrefetch) {
          if (chunk + 1 < kChunks) from.load_a(a_next, from.slot_place(slot), chunk + 1, first + step);
          else if (step + 1 < kCount || above) from.load_a(a_next, following[slot], 0, first + step + !above);
        }
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
#pragma unroll
          for (int s = 0; s < kSlicesN; ++s)
            Unit::multiply(sums[(slot * kChunks + chunk) * kMmas + m][s], a[2 * m], a[2 * m + 1], b[s]);
      }
    }
  }
}

using Part = f32[kMmas][kGroup][4];

// (ah + al)(bh + bl) without al bl, the large products and the two small ones apart.
template <bool kAny, class Split>
__device__ __forceinline__ void multiply_split(Part& big, Part& small, const Fragments& from, u32 slot, int chunk,
                                               int group, int first, int steps) {
  u32 a_next[2 * kMmas][kWords], b_next[kGroup][kWords];
  from.load_a(a_next, from.slot_place(slot), chunk, first);
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
      from.load_a(a_next, from.slot_place(slot), chunk, step + 1);
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

// The tensor cores cut what they add, so a sum of theirs is one stage long, and the long sum is made of rounded
// additions. A sum of a stage that is not finite is done again with care: next to an infinite element the small
// products are NaN or infinite of either sign, which must not reach the sum; there any finite number will do.
template <class Split>
__device__ __forceinline__ void multiply_three(Sums& sums, const Fragments& from, u32 present, int steps) {
  constexpr f32 kLargest = 3.402823466e38f;
  constexpr int kGroups = kSlicesN / kGroup;
#pragma unroll
  for (int slot = 0; slot < kWarpSlots; ++slot) {
    if (kWarpSlots > 1 && !(present >> slot & 1)) continue;
#pragma unroll
    for (int i = 0; i < kChunks * kGroups; ++i) {
      const int chunk = i / kGroups, group = i % kGroups;
      Part big = {}, small = {};
      if (steps == kSteps) {
        multiply_split<false, Split>(big, small, from, slot, chunk, group, 0, kSteps);
      } else {
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
          multiply_split<false, Split>(big, small, from, slot, chunk, group, step, 1);
      }
      f32 nothing = 0;  // NaN unless all are finite
#pragma unroll
      for (int j = 0; j < kMmas * kGroup * 4; ++j) {
        f32& sum = big[j / 4 / kGroup][j / 4 % kGroup][j % 4];
        sum += small[j / 4 / kGroup][j / 4 % kGroup][j % 4];
        nothing = fmaf(sum, 0.f, nothing);
      }
      if (__any_sync(0xffffffffu, !(nothing == 0))) {
#pragma unroll
        for (int j = 0; j < kMmas * kGroup * 4; ++j)
          big[j / 4 / kGroup][j / 4 % kGroup][j % 4] = small[j / 4 / kGroup][j / 4 % kGroup][j % 4] = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step)
          multiply_split<true, Split>(big, small, from, slot, chunk, group, step, 1);
#pragma unroll
        for (int j = 0; j < kMmas * kGroup * 4; ++j)
          big[j / 4 / kGroup][j / 4 % kGroup][j % 4] +=
              fminf(fmaxf(small[j / 4 / kGroup][j / 4 % kGroup][j % 4], -kLargest), kLargest);
      }
#pragma unroll
      for (int j = 0; j < kMmas * kGroup * 4; ++j)
        sums[(slot * kChunks + chunk) * kMmas + j / 4 / kGroup][group * kGroup + j / 4 % kGroup][j % 4] +=
            big[j / 4 / kGroup][j / 4 % kGroup][j % 4];
    }
  }
}

__device__ __forceinline__ void multiply_stage(Sums& sums, const Fragments& from, u32 present, int steps) {
  if (present == 0) return;
  if constexpr (kKind == MMA_3XTF32) {
    multiply_three<Unit>(sums, from, present, steps);
  } else if (steps == kSteps) {
    multiply<kSteps>(sums, from, present, 0);
  } else {
#pragma unroll 1  // a stage cut short by the end of a block
    for (int step = 0; step < steps; ++step) multiply<1>(sums, from, present, step);
  }
}

// ---------------------------------------------------------------------------------- the copies
using Problem = Product<A, B, C, Acc, int>;

// The first slot of a warp.
__device__ __forceinline__ u32 warp_slot(u32 thread) { return thread / 32 / kWarpsN * kWarpM / kSlotRows; }

// Brings the stages of one tile to shared memory, one after the other.
struct Copier {
  const Problem& problem;
  const Schedule& schedule;
  Shared& shared;
  const B* panel;  // B at the tile's first column
  int columns;     // of the tile that lie inside B
  int entry, last, k;
  u32 plan;        // of the stage that is this lane's number: a bit for each slot that has the block

  // Indices of an entry, a word per thread.
  __device__ __forceinline__ void copy_indices(int e) const {
    const u32 i = again(threadIdx.x);
    if (i > kSlots || e >= last) return;
    const int* from = i < kSlots ? schedule.blocks + i64(e) * kSlots + i : schedule.columns + e;
    copy_4(true, shared_address(&shared.entries[u32(e) % kRing][i]), from);
  }

  // Of a stage that has an entry; kWhole: all of its k and its columns are inside. `present`: the slots that have it.
  template <bool kWhole>
  __device__ __forceinline__ void copy_a(u32 thread, int stage, const int* indices, u32 present, int left) const {
    const int R = problem.R, K = problem.K, needed = (left + kStepK - 1) / kStepK * kStepK;
    const u32 to = shared_address(shared.a[stage]) + OperandA::copy_place(thread);
    // A thread's pieces belong to one slot, or each to another.
    constexpr int kSlotCopies = kATransposed ? OperandA::kCopies : (OperandA::kCopies + kSlots - 1) / kSlots;
    const auto copy_slot = [&](u32 slot, int i, u32 place, bool wanted) {
      const int block = indices[slot], row = shared.starts[slot] + u32(OperandA::copy_mn(thread, i)) % kSlotRows;
      const int first = k + OperandA::copy_k(thread, i);
      const A* from = problem.data + i64(block) * (R * K) + (kATransposed ? first * R + row : row * K + first);
#pragma unroll
      for (int j = 0; j < kSlotCopies; ++j) {
        const int at = OperandA::copy_k(thread, i + j);
        copy_16(wanted && (kWhole || at < needed), OperandA::copy_place(place, j),
                from + j * OperandA::kLineStep * (kATransposed ? R : K), !kWhole && at >= left);
      }
    };
    if constexpr (!kATransposed && kSlotRows % OperandA::kLineStep == 0) {  // the same slot for all threads
#pragma unroll 1
      for (u32 rest = present; rest != 0; rest &= rest - 1) {
        const u32 slot = kSlots > 1 ? __ffs(rest) - 1 : 0;
        copy_slot(slot, 0, to + slot * (kSlotRows * OperandA::kLine), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < OperandA::kCopies; i += kSlotCopies) {
        const u32 slot = u32(OperandA::copy_mn(thread, i)) / kSlotRows;
        copy_slot(slot, i, OperandA::copy_place(to, i), present >> slot & 1);
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void copy_b(u32 thread, int stage, int block_column, int left) const {
    const int K = problem.K, needed = (left + kStepK - 1) / kStepK * kStepK;
    const u32 to = shared_address(shared.b[stage]) + OperandB::copy_place(thread);
    const i64 stride = OperandB::kLineStep * (kBTransposed ? problem.b_col : problem.b_row);
    const i64 row = i64(block_column) * K + k + OperandB::copy_k(thread, 0), n0 = OperandB::copy_mn(thread, 0);
    const B* from = panel + (kBTransposed ? row + n0 * problem.b_col : row * problem.b_row + n0);
#pragma unroll
    for (int i = 0; i < OperandB::kCopies; ++i) {
      const int at = OperandB::copy_k(thread, i), n = OperandB::copy_mn(thread, i);
      const bool cut = !kBTransposed && n < columns && n + kPiece > columns;
      copy_16(kWhole || (at < needed && !cut), OperandB::copy_place(to, i), from + i * stride,
              !kWhole && (at >= left || n >= columns));
    }
    if (!kWhole && !kBTransposed && columns % kPiece != 0) {  // pieces that the last column cuts
      const int n = OperandB::copy_mn(thread, 0);
#pragma unroll
      for (int i = 0; i < OperandB::kCopies; ++i) {
        const int at = OperandB::copy_k(thread, i);
        copy_some_of_16(at < needed && n < columns && n + kPiece > columns, OperandB::copy_place(to, i),
                        from + i * stride, at < left ? (columns - n) * kSize : 0);
      }
    }
  }

  // All copies of the next stage; a group of them is committed even when none is left.
  __device__ __forceinline__ void copy(int stage) {
    const u32 thread = again(threadIdx.x), lane = thread % 32;
    const int K = problem.K;
    const int* indices = shared.entries[u32(entry) % kRing];
    const int column = indices[kSlots];
    const bool inside = entry < last && in_range(column, problem.block_cols);
    const u32 present = __ballot_sync(0xffffffffu, inside && lane < kSlots && indices[lane < kSlots ? lane : 0] >= 0);
    if (lane == u32(stage)) plan = present;
    // Behind K, up to a whole step, both operands are zero.
    const int left = min(K - k, kStageK);
    if (present != 0) {
      if (left == kStageK && columns == kTileN) {
        copy_a<true>(thread, stage, indices, present, left);
        copy_b<true>(thread, stage, column, left);
      } else {
        copy_a<false>(thread, stage, indices, present, left);
        copy_b<false>(thread, stage, column, left);
      }
    }
    if (k == 0) copy_indices(entry + kAhead);
    copy_commit();
    k += kStageK;
    if (k >= K) k = 0, ++entry;
  }
};

// ---------------------------------------------------------------------------------- the result
// The columns that a lane holds of kInterleave slices lie side by side: a run.
constexpr int kRun = 2 * OperandB::kInterleave;
constexpr int kVector = smaller(kRun, 16 / sizeof(C));  // elements of one store
struct alignas(kVector * sizeof(C)) Vector { C x[kVector]; };

__device__ __forceinline__ C finish(const Problem& problem, Sum sum, C old) {
  const Acc before = problem.read_c ? multiply_add(problem.beta, load<Acc>(old), zero<Acc>()) : zero<Acc>();
  return Store<C>::from(multiply_add(problem.alpha, Acc(sum), before));
}

// `line` is this lane's row of C at the tile's first column, `first` the run's first column there. `whole`: all columns
// of the tile are inside C, side by side, and vectors are aligned.
__device__ __forceinline__ void store_run(const Problem& problem, C* line, int first, int columns, bool whole,
                                          const Sum (&run)[kRun]) {
  if (whole) {
#pragma unroll
    for (int v = 0; v < kRun; v += kVector) {
      Vector* at = reinterpret_cast<Vector*>(line + first + v);
      Vector out = {};
      if (problem.read_c) out = *at;
#pragma unroll
      for (int i = 0; i < kVector; ++i) out.x[i] = finish(problem, run[v + i], out.x[i]);
      *at = out;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i >= columns) continue;
      C* at = line + (first + i) * problem.c_col;
      *at = finish(problem, run[i], problem.read_c ? *at : C{});
    }
  }
}

// ---------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
gemm_sm80(const __grid_constant__ Problem problem, const __grid_constant__ Schedule schedule) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const u32 thread = threadIdx.x, warp = uniform(thread / 32);
  const u32 warp_m = warp / kWarpsN * kWarpM, warp_n = warp % kWarpsN * kWarpN, first_slot = warp_m / kSlotRows;
  const int R = problem.R, K = problem.K;
  const int column_tiles = int((problem.N + kTileN - 1) / kTileN), batches = int(problem.batches);
  if (*schedule.count == 0 || column_tiles == 0) return;
  Fragments fragments{shared_address(shared.a) + OperandA::lane_place(warp_m),
                      shared_address(shared.b) + OperandB::lane_place(warp_n)};
  int stage = 0;
  Copier copier{problem, schedule, shared};

  // Items fastest: CTAs that run together share columns of B.
  int item = blockIdx.x, column_tile = 0, batch = 0;
  const auto settle = [&] {
    const int count = *schedule.count;  // read again: a register less
    for (; item >= count; item -= count)
      if (++column_tile == column_tiles) column_tile = 0, ++batch;
  };
  settle();
  if (threadIdx.x == 0 && batch < batches) shared.item = schedule.items[item];
  while (batch < batches) {
    __syncthreads();  // the item is there, and nobody reads what was of the last one
    const int group = uniform(shared.item.x), first = uniform(shared.item.y), last = uniform(shared.item.z);
    const i64 column = i64(column_tile) * kTileN;
    const int columns = int(min(problem.N - column, i64(kTileN)));
    copier.panel = problem.b + batch * problem.b_batch + column * problem.b_col;
    copier.columns = columns;
    copier.entry = first, copier.last = last, copier.k = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copier.copy_indices(first + i);
    copy_commit();
    if (threadIdx.x < kSlots) {
      const int place = schedule.slots[i64(group) * kSlots + threadIdx.x];
      shared.places[threadIdx.x] = place;
      shared.starts[threadIdx.x] = u32(max(place, 0)) * kSlotRows % R;
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copier.copy(stage + i < kStages ? stage + i : stage + i - kStages);

    Sums sums = {};
    int k = 0;
    for (int left = (last - first) * ((K + kStageK - 1) / kStageK); left > 0; --left) {
      const u32 plan = __shfl_sync(0xffffffffu, copier.plan, stage);
      const u32 present = uniform(plan >> first_slot & ((1u << kWarpSlots) - 1));
      const int steps = min((K - k + kStepK - 1) / kStepK, kSteps);
      k = k + kStageK < K ? k + kStageK : 0;
      copy_wait<kAhead - 1>();
      __syncthreads();
      // Of the warps of a scheduler one copies before its products and one behind, so that there are always products.
#pragma unroll 1
      for (u32 turn = 0; turn < 2; ++turn) {
        if (turn == warp / 4 % 2) copier.copy(stage == 0 ? kStages - 1 : stage - 1);
        if (turn == 0) multiply_stage(sums, fragments, present, steps);
      }
      const int forward = stage + 1 == kStages ? 1 - kStages : 1;
      fragments.a += forward * (kTileM * kStageBytes);
      fragments.b += forward * (kTileN * kStageBytes);
      stage += forward;
    }

    const int* places = &shared.places[warp_slot(again(threadIdx.x))];
    C* corner = problem.c + batch * problem.c_batch + column * problem.c_col;
    item += gridDim.x;
    settle();
    if (threadIdx.x == 0 && batch < batches) shared.item = schedule.items[item];
    const u32 lane = again(threadIdx.x) % 32;
    const bool whole =
        columns == kTileN && problem.c_col == 1 &&
        (reinterpret_cast<u64>(problem.c) | (problem.c_row | problem.c_batch) * sizeof(C)) % sizeof(Vector) == 0;
#pragma unroll
    for (int slice = 0; slice < 2 * kMmasM; ++slice) {
      const int place = places[slice * 8 / kSlotRows];
      if (place < 0) continue;
      const i64 row = i64(place) * kSlotRows + warp_m % kSlotRows + OperandA::spread(slice, lane / 4) % kWarpSlotRows;
#pragma unroll
      for (int s = 0; s < kSlicesN; s += OperandB::kInterleave) {
        Sum run[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          run[i] = sums[slice / 2][s + i % OperandB::kInterleave][slice % 2 * 2 + i / OperandB::kInterleave];
        store_run(problem, corner + row * problem.c_row, warp_n + OperandB::spread(s, lane % 4 * 2), columns, whole,
                  run);
      }
    }
  }
}
