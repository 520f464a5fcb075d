// C[m, n] = alpha * sum_p sum_k A[p, m % R, k] * B[col[p]*K + k, n] + beta * C[m, n],  p in the block row of m
// Ampere and newer: mma.sync fed by cp.async. A CTA owns 128 rows, gathered from 128 / kSlotRows slots of the schedule,
// by kTileN columns, and walks the union of the slots' block columns. A warp's rows lie in one slot, and it skips what
// its slot lacks: an absent block contributes nothing, whatever B holds. Rows of stored blocks and lines of B are
// multiples of 16 bytes; any N, any strides of C, one fixed order of sums.
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
  // To nearest, ties away: cvt.rna.tf32 would take four instructions, since it also clears the bits nobody looks at.
  static __device__ __forceinline__ u32 round(u32 x) {
    return fabsf(__uint_as_float(x)) < __uint_as_float(0x7f800000u) ? x + 0x1000u : x;
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
  // x = high + low, 11 bits each
  static __device__ __forceinline__ void split(const u32 (&x)[2], u32 (&high)[2], u32 (&low)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = round(x[i]) & 0xffffe000u;
      low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i])) + 0x1000u;
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
constexpr int kTileM = 128;
constexpr int kTileN = TILE_N;
constexpr int kSlotRows = SLOT_ROWS;
constexpr int kSlots = kTileM / kSlotRows;
constexpr bool kATransposed = A_TRANSPOSED;  // blocks are stored K x R: m runs fastest
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: k runs fastest
constexpr int kStages = STAGES;
constexpr int kThreads = 256;

constexpr int kSize = sizeof(A);
constexpr int kPiece = 16 / kSize;           // elements of one copy
constexpr int kStageBytes = 128;             // of k, one line of all banks
constexpr int kStageK = kStageBytes / kSize;
constexpr int kWords = Unit::kStepBytes / 16;
constexpr int kStepK = Unit::kStepBytes / kSize;
constexpr int kSteps = kStageK / kStepK;

constexpr int kWarpM = smaller(kSlotRows, kKind == MMA_F64 ? 32 : 64);
constexpr int kWarpsM = kTileM / kWarpM;
constexpr int kWarpsN = kThreads / 32 / kWarpsM;
constexpr int kWarpN = kTileN / kWarpsN;
constexpr int kMmasM = kWarpM / 16;
constexpr int kSlicesN = kWarpN / 8;
constexpr int kGroup = 4;                    // slices of B loaded together
constexpr int kGroups = kSlicesN / kGroup;
constexpr int kMmas = smaller(kMmasM, kKind == MMA_F64 ? 1 : 2);  // products of 16 rows that share fragments of B
constexpr int kAhead = kStages - 1;          // stages, and entries whose indices are known, in front of the products
constexpr int kRing = 16;                    // entries whose indices are kept
constexpr int kSumWords = kWarpM * kWarpN / 32 * sizeof(Sum) / 4;
// Two CTAs where their registers (3xTF32 keeps sums of a stage apart) and their shared memory fit an SM.
constexpr int kArch = __CUDA_ARCH__;
constexpr int kSmBytes = (kArch >= 900 && kArch < 1200 ? 228 : kArch == 800 || kArch == 870 ? 164 : 100) * 1024;
constexpr int kCtaBytes = kStages * (kTileM + kTileN) * kStageBytes + 2048;  // with indices and what the system takes
constexpr int kCtas = kSumWords <= 64 && kKind != MMA_3XTF32 && 2 * kCtaBytes <= kSmBytes ? 2 : 1;
static_assert(kTileM % kSlotRows == 0 && kSlotRows >= 16, "a warp multiplies 16 rows of one slot or more");
static_assert(kSlicesN % kGroup == 0, "a warp multiplies 32 n columns");
static_assert(kStages >= 2 && kStages <= 8, "a stage has 4 bits in a plan");
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
  static constexpr int kPeriod = kMnMajor ? 16 / kSize : 8 * kInterleave;  // lines after which the swizzle repeats
  static_assert(kLinePieces >= 8, "the swizzle permutes 8 pieces");
  static_assert(kThreads % kLinePieces == 0 && kLineStep % kPeriod == 0, "a thread's copies differ by constants");

  static __device__ __forceinline__ u32 swizzle(u32 line) {
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

  // The i-th copy of a thread: the piece's place, its first row or column, its first k.
  static __device__ __forceinline__ u32 copy_place(u32 thread, int i) {
    return place(thread / kLinePieces, thread % kLinePieces * 16) + i * kLineStep * kLine;
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
  static __device__ __forceinline__ u32 along(u32 from, int slice) {
    const int bytes = slice * 8 * kSize;
    return (from ^ bytes % 128) + bytes / 128 * 128;
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
using OperandA = Operand<true, kATransposed, kTileM, kWarpM>;
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

// Where a lane finds its part of a stage.
struct Fragments {
  u32 a, b;

  template <int kSlices>
  __device__ __forceinline__ void load_a(u32 (&words)[kSlices][kWords], int slice, int step) const {
    OperandA::load(words, a, slice, step);
  }
  __device__ __forceinline__ void load_b(u32 (&words)[kGroup][kWords], int group, int step) const {
    OperandB::load(words, b, group * kGroup, step);
  }
};

// ---------------------------------------------------------------------------------- the products of one stage
using Sums = Sum[kMmasM][kSlicesN][4];

// kCount steps from `first` on, 32 rows (or 16) by 32 columns at a time, the next fragments on their way. `between` is
// called beside the first products.
template <int kCount, class Between>
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& from, int first, Between between) {
  constexpr int kHalves = kMmasM / kMmas;
  constexpr int kBuffers = kKind == MMA_F64 ? 1 : 2;  // its fragments are large, and its products long
  u32 a[kBuffers][2 * kMmas][kWords], b[kBuffers][kGroup][kWords];
#pragma unroll
  for (int i = 1 - kBuffers; i < kCount * kGroups * kHalves; ++i) {
    if (i == 0) between();
    const int ahead = i + kBuffers - 1;  // what to load now
    const int a_ahead = ahead / kGroups, b_ahead = kGroups > 1 ? ahead : ahead / kHalves;
    if (ahead < kCount * kGroups * kHalves) {
      if (ahead % kGroups == 0) {
        from.load_a(a[a_ahead % kBuffers], a_ahead % kHalves * 2 * kMmas, first + a_ahead / kHalves);
      }
      if (kGroups > 1 || ahead % kHalves == 0) {
        from.load_b(b[b_ahead % kBuffers], b_ahead % kGroups, first + ahead / (kGroups * kHalves));
      }
    }
    if (i < 0) continue;
    auto& a_now = a[i / kGroups % kBuffers];
    auto& b_now = b[(kGroups > 1 ? i : i / kHalves) % kBuffers];
    if (i % kGroups == 0) {
#pragma unroll
      for (int s = 0; s < 2 * kMmas; ++s) Unit::prepare(a_now[s]);
    }
    if (kGroups > 1 || i % kHalves == 0) {
#pragma unroll
      for (int s = 0; s < kGroup; ++s) Unit::prepare(b_now[s]);
    }
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
      for (int s = 0; s < kGroup; ++s)
        Unit::multiply(sums[i / kGroups % kHalves * kMmas + m][i % kGroups * kGroup + s], a_now[2 * m],
                       a_now[2 * m + 1], b_now[s]);
  }
}

// (ah + al)(bh + bl) without al bl. The tensor cores cut what they add, so a sum of theirs is one stage long, and the
// long sum is made of rounded additions. The two small products are summed apart: next to an infinite element they are
// NaN or infinite of either sign, which must not reach the sum; there any finite number will do.
template <class Split, class Between>
__device__ __forceinline__ void multiply_split(Sums& sums, const Fragments& from, int steps, Between between) {
  constexpr f32 kLargest = 3.402823466e38f;
#pragma unroll
  for (int m0 = 0; m0 < kMmasM; m0 += kMmas)
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      f32 big[kMmas][kGroup][4] = {}, small[kMmas][kGroup][4] = {};
      u32 a_next[2 * kMmas][kWords], b_next[kGroup][kWords];
      from.load_a(a_next, 2 * m0, 0);
      from.load_b(b_next, group, 0);
      if (m0 == 0 && group == 0) between();
#pragma unroll 1  // unrolled, it takes more registers than there are
      for (int step = 0; step < steps; ++step) {
        u32 a[2 * kMmas][kWords], a_low[2 * kMmas][kWords], b[kGroup][kWords], b_low[kGroup][kWords];
#pragma unroll
        for (int s = 0; s < 2 * kMmas; ++s) Split::split(a_next[s], a[s], a_low[s]);
#pragma unroll
        for (int s = 0; s < kGroup; ++s) Split::split(b_next[s], b[s], b_low[s]);
        const int next = min(step + 1, steps - 1);
        from.load_a(a_next, 2 * m0, next);
        from.load_b(b_next, group, next);
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
#pragma unroll
          for (int s = 0; s < kGroup; ++s) {
            Split::multiply(small[m][s], a_low[2 * m], a_low[2 * m + 1], b[s]);
            Split::multiply(big[m][s], a[2 * m], a[2 * m + 1], b[s]);
            Split::multiply(small[m][s], a[2 * m], a[2 * m + 1], b_low[s]);
          }
      }
#pragma unroll
      for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int i = 0; i < kGroup * 4; ++i) {
          const f32 rest = fminf(fmaxf(small[m][i / 4][i % 4], -kLargest), kLargest);
          sums[m0 + m][group * kGroup + i / 4][i % 4] += big[m][i / 4][i % 4] + rest;
        }
    }
}

// The products of a stage, and beside them `copy`.
template <class Copy>
__device__ __forceinline__ void multiply_stage(Sums& sums, const Fragments& from, int steps, Copy copy) {
  if constexpr (kKind == MMA_3XTF32) {
    if (steps > 0) multiply_split<Unit>(sums, from, steps, copy);
    else copy();
  } else if (steps == kSteps) {
    multiply<kSteps>(sums, from, 0, copy);
  } else {
    copy();
#pragma unroll 1  // a stage cut short by the end of a block
    for (int step = 0; step < steps; ++step) multiply<1>(sums, from, step, [] {});
  }
}

// ---------------------------------------------------------------------------------- the copies
using Problem = Product<A, B, C, Acc, int>;

// x, known by the compiler to be the same in the whole warp: it stays in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// x, and the compiler does not know it: what follows from it is computed where it is needed, not kept in registers.
__device__ __forceinline__ u32 again(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ u32 warp_slot(u32 thread) { return thread / 32 / kWarpsN * kWarpM / kSlotRows; }

// Brings the stages of one tile to shared memory, one after the other.
struct Copier {
  const Problem& problem;
  const Schedule& schedule;
  Shared& shared;
  const B* panel;  // B at the tile's first column
  int columns;     // of the tile that lie inside B
  int entry, last, k;
  u32 plan;        // 4 bits for every stage: steps of k that this warp multiplies, 0 where its slot lacks the block

  // Indices of an entry, a word per thread.
  __device__ __forceinline__ void copy_indices(bool wanted, int e) const {
    const u32 i = again(threadIdx.x);
    const int* from = i < kSlots ? schedule.blocks + i64(e) * kSlots + i : schedule.columns + e;
    copy_4(wanted && i <= kSlots && e < last, shared_address(&shared.entries[u32(e) % kRing][i]), from);
  }

  // All copies of the next stage; a group of them is committed even when none is left.
  __device__ __forceinline__ void copy(int stage) {
    const u32 thread = again(threadIdx.x);
    const int R = problem.R, K = problem.K;
    const int* indices = shared.entries[u32(entry) % kRing];
    const int column = indices[kSlots];
    const bool inside = entry < last && in_range(column, problem.block_cols);
    // Behind K, up to a whole step, both operands are zero.
    const int left = K - k, steps = min((left + kStepK - 1) / kStepK, kSteps), needed = steps * kStepK;
    plan = (plan & ~(15u << 4 * stage)) | (inside && indices[warp_slot(thread)] >= 0 ? steps : 0) << 4 * stage;

    const u32 a = shared_address(shared.a[stage]) + OperandA::copy_place(thread, 0);
    // A thread's pieces of A belong to one slot or to several.
    constexpr int kSlotCopies = kATransposed ? OperandA::kCopies : (OperandA::kCopies + kSlots - 1) / kSlots;
#pragma unroll
    for (int i = 0; i < OperandA::kCopies; i += kSlotCopies) {
      const u32 slot = u32(OperandA::copy_mn(thread, i)) / kSlotRows;
      const int block = indices[slot], row = shared.starts[slot] + u32(OperandA::copy_mn(thread, i)) % kSlotRows;
#pragma unroll
      for (int j = i; j < i + kSlotCopies; ++j) {
        const int at = OperandA::copy_k(thread, j), lines = j * OperandA::kLineStep;
        const int element = kATransposed ? (k + at) * R + row : (row + (lines - i * OperandA::kLineStep)) * K + k + at;
        copy_16(inside && block >= 0 && at < needed, a + lines * OperandA::kLine,
                problem.data + i64(block) * (R * K) + element, at >= left);
      }
    }

    const u32 b = shared_address(shared.b[stage]) + OperandB::copy_place(thread, 0);
    const i64 stride = OperandB::kLineStep * (kBTransposed ? problem.b_col : problem.b_row);
    const i64 row = i64(column) * K + k + OperandB::copy_k(thread, 0), n0 = OperandB::copy_mn(thread, 0);
    const B* from = panel + (kBTransposed ? row + n0 * problem.b_col : row * problem.b_row + n0);
#pragma unroll
    for (int i = 0; i < OperandB::kCopies; ++i) {
      const int at = OperandB::copy_k(thread, i), n = OperandB::copy_mn(thread, i);
      const bool cut = !kBTransposed && n < columns && n + kPiece > columns;
      copy_16(inside && at < needed && !cut, b + i * OperandB::kLineStep * OperandB::kLine, from + i * stride,
              at >= left || n >= columns);
    }
    if (!kBTransposed && columns % kPiece != 0) {  // pieces that the last column cuts
      const int n = OperandB::copy_mn(thread, 0);
#pragma unroll
      for (int i = 0; i < OperandB::kCopies; ++i) {
        const int at = OperandB::copy_k(thread, i);
        copy_some_of_16(inside && at < needed && n < columns && n + kPiece > columns,
                        b + i * OperandB::kLineStep * OperandB::kLine, from + i * stride,
                        at < left ? (columns - n) * kSize : 0);
      }
    }

    copy_indices(k == 0, entry + kAhead);
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
  const u32 warp_m = warp / kWarpsN * kWarpM, warp_n = warp % kWarpsN * kWarpN;
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
    for (int i = 0; i < kAhead; ++i) copier.copy_indices(true, first + i);
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
    for (int left = (last - first) * ((K + kStageK - 1) / kStageK); left > 0; --left) {
      copy_wait<kAhead - 1>();
      __syncthreads();
      const int steps = uniform(copier.plan >> 4 * stage & 15);
      const auto copy = [&] { copier.copy(stage == 0 ? kStages - 1 : stage - 1); };
      multiply_stage(sums, fragments, steps, copy);
      const int forward = stage + 1 == kStages ? 1 - kStages : 1;
      fragments.a += forward * (kTileM * kStageBytes);
      fragments.b += forward * (kTileN * kStageBytes);
      stage += forward;
    }

    const int place = shared.places[warp_slot(again(threadIdx.x))];
    C* corner = problem.c + batch * problem.c_batch + column * problem.c_col;
    item += gridDim.x;
    settle();
    if (threadIdx.x == 0 && batch < batches) shared.item = schedule.items[item];
    if (place < 0) continue;
    const u32 lane = again(threadIdx.x) % 32;
    const bool whole =
        columns == kTileN && problem.c_col == 1 &&
        (reinterpret_cast<u64>(problem.c) | (problem.c_row | problem.c_batch) * sizeof(C)) % sizeof(Vector) == 0;
#pragma unroll
    for (int slice = 0; slice < 2 * kMmasM; ++slice) {
      const i64 row = i64(place) * kSlotRows + warp_m % kSlotRows + OperandA::spread(slice, lane / 4);
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
