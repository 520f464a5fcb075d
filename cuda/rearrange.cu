// to[b, n, k] = from[places[b], n, k], zero beyond the rows and columns of `from`, in another form
// Copies an operand for a kernel that cannot read it as it lies: turned, with longer lines, with blocks in another
// order. WORD is the size of what is read, one element or several neighbours. FORM: kAsItIs copies; kTf32 rounds float32
// to tf32, and kTwoTf32 splits it into two parts of tf32 that add up to exactly that number, also for infinity and NaN,
// for gemm_sm90; kTimesI writes a complex number and i times it; kF16 and kBf16 widen fp8 (e4m3), exactly. Where both sides have the same fastest index, lanes run along it. Otherwise tiles go through shared
// memory, in rows of one word more than a tile, so that both sides are free of bank conflicts; all loads of a thread
// are under way together. Many small matrices are copied word by word, in the order of `to`: what the L1 keeps of a
// matrix serves its next words. Bound by bytes: 8192 x 8192 in float32 is turned at 3.6 TB/s.
#include "common/layout.cuh"
#include "common/words.cuh"
#include "ptx/convert.cuh"

enum Form { kAsItIs, kTf32, kTwoTf32, kTimesI, kF16, kBf16 };
constexpr Form kForm = Form(FORM);
constexpr bool kWidens = kForm == kF16 || kForm == kBf16;

using Word = WordOf<WORD>::Type;
using Wide = WordOf<kWidens ? 2 * WORD : WORD>::Type;  // what is written

static_assert((kForm != kTf32 && kForm != kTwoTf32) || sizeof(Word) == 4, "parts of float32");
static_assert(kForm != kTimesI || sizeof(Word) == 8 || sizeof(Word) == 16, "a complex number");
constexpr int kThreads = 256;
constexpr int kSide = sizeof(Word) > 8 ? 32 : 64, kStep = kThreads / kSide;
constexpr int kPitch = kSide + 1;  // the same column of neighbouring rows lies in different banks

struct Rearrange {
  const Word* from;
  Wide* to;
  const int* places;  // batch of `to` -> batch of `from`; or null, if they are the same
  i64 from_batch, from_row, from_column, to_batch, to_row, to_column;  // strides in words of their side
  i64 batches, rows, columns;          // of `from`
  i64 to_batches, to_rows, to_columns;  // of `to`, which is zero beyond
  i64 part;                            // from what is written of a number first to the second
  int way, lanes;                      // see Way; the lanes along the fastest index, a power of two
};
// Whether both sides have different fastest indices, the same one, or are many small matrices side by side in `to`.
enum Way { kTurned, kStraight, kSmall };
constexpr int kWords = 8;  // words of a thread, of small matrices
constexpr int kLines = 4;  // and of lines
#ifdef REARRANGE_BYTES
CHECK_LAYOUT(Rearrange, REARRANGE, (from)(to)(places)(from_batch)(from_row)(from_column)(to_batch)(to_row)(to_column)
             (batches)(rows)(columns)(to_batches)(to_rows)(to_columns)(part)(way)(lanes))
#endif

// Rounded as for the tensor cores, and cut as they do it: gemm_sm90 reads some numbers without them.
__device__ __forceinline__ f32 exact_tf32(f32 x) {
  return __uint_as_float(rounded_tf32(__float_as_uint(x)) & 0xffffe000u);
}

// The two parts of a number, the sum of which is exactly that number; the first has 11 bits. Infinity has no remainder.
__device__ __forceinline__ float2 two_parts(f32 x) {
  const u32 bits = __float_as_uint(x), rounded = bits + 0x1000u;
  const bool fits = (rounded & 0x7fffffffu) < 0x7f800000u;
  const f32 high = __uint_as_float((fits ? rounded : bits) & 0xffffe000u);
  return make_float2(high, x == high ? 0 : x - high);
}

// The elements of a word of fp8, each in 16 bits: all numbers of e4m3 are numbers of both formats.
template <class To, class From> __device__ __forceinline__ To widened(From word) {
  union { From word; u8 x[sizeof(From)]; } in;
  union { To word; u16 x[sizeof(From)]; } out;
  in.word = word;
#pragma unroll
  for (int i = 0; i < int(sizeof(From)); ++i) {
    const f32 x = number(e4m3{in.x[i]});
    out.x[i] = kForm == kF16 ? Store<f16>::from(x).bits : Store<bf16>::from(x).bits;
  }
  return out.word;
}

// i * z, of a complex number in 8 or 16 bytes: (-im, re).
__device__ __forceinline__ int2 times_i(int2 z) { return {z.y ^ int(0x80000000u), z.x}; }
__device__ __forceinline__ int4 times_i(int4 z) { return {z.z, z.w ^ int(0x80000000u), z.x, z.y}; }

template <class To, class From> __device__ __forceinline__ void write(const Rearrange& p, To* to, From word) {
  if constexpr (kForm == kAsItIs) {
    *to = word;
  } else if constexpr (kForm == kTf32) {
    *to = __float_as_uint(exact_tf32(__uint_as_float(word)));
  } else if constexpr (kForm == kTwoTf32) {
    const float2 both = two_parts(__uint_as_float(word));
    to[0] = __float_as_uint(both.x);
    to[p.part] = __float_as_uint(both.y);
  } else if constexpr (kForm == kTimesI) {
    to[0] = word;
    to[p.part] = times_i(word);
  } else {
    *to = widened<To>(word);
  }
}

// A tile whose sides have different fastest indices; `down`: that of `from` is the row.
__device__ __forceinline__ void turn(const Rearrange& p, const Word* from, Wide* to, i64 row, i64 column, bool down,
                                     Word (&tile)[kSide * kPitch]) {
  // Of `from`, x runs along its fastest index, and of `to` likewise; y and the steps run along the other one.
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  {
    const i64 along = (down ? p.rows - row : p.columns - column) - x;
    const i64 across = (down ? p.columns - column : p.rows - row) - y;
    const i64 step = down ? p.from_column : p.from_row;
    const int wide = from == nullptr || along <= 0 ? 0 : int(across < kSide ? across : kSide);
    const Word* source = from + row * p.from_row + column * p.from_column + y * step;
    source += x * (down ? p.from_row : p.from_column);
    Word* place = tile + (down ? x * kPitch + y : y * kPitch + x);
    const int pitch = down ? 1 : kPitch;
#pragma unroll
    for (int i = 0; i < kSide; i += kStep, source += kStep * step) {
      Word word = {};
      if (i < wide) word = *source;
      place[i * pitch] = word;
    }
  }
  __syncthreads();
  {
    const i64 along = (down ? p.to_columns - column : p.to_rows - row) - x;
    const i64 across = (down ? p.to_rows - row : p.to_columns - column) - y;
    const i64 step = down ? p.to_row : p.to_column;
    const int wide = along <= 0 ? 0 : int(across < kSide ? across : kSide);
    Wide* target = to + row * p.to_row + column * p.to_column + y * step + x * (down ? p.to_column : p.to_row);
    const Word* place = tile + (down ? y * kPitch + x : x * kPitch + y);
    const int pitch = down ? kPitch : 1;
#pragma unroll
    for (int i = 0; i < kSide; i += kStep, target += kStep * step)
      if (i < wide) write(p, target, place[i * pitch]);
  }
  __syncthreads();
}

// Both sides have the same fastest index, with `lanes` threads along it. A CTA has kLines lines for each of its groups
// of lanes; `first` is the first line, `down` says that lines are columns.
__device__ __forceinline__ void copy(const Rearrange& p, const Word* from, Wide* to, i64 first, bool down) {
  const int step = kThreads / p.lanes;
  const i64 line = first + threadIdx.x / p.lanes, here = (down ? p.to_columns : p.to_rows) - line;
  const i64 there = from == nullptr ? 0 : (down ? p.columns : p.rows) - line;  // lines from this one on, of both sides
  const i64 from_line = down ? p.from_column : p.from_row, to_line = down ? p.to_column : p.to_row;
  const i64 from_next = down ? p.from_row : p.from_column, to_next = down ? p.to_row : p.to_column;
  const i64 length = down ? p.to_rows : p.to_columns, known = down ? p.rows : p.columns;
#pragma unroll 1
  for (i64 x = i64(blockIdx.x) * p.lanes + threadIdx.x % p.lanes; x < length; x += i64(gridDim.x) * p.lanes) {
    const Word* source = from + line * from_line + x * from_next;
    Wide* target = to + line * to_line + x * to_next;
    Word words[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      words[i] = {};
      if (x < known && i * step < there) words[i] = source[i * step * from_line];
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i)
      if (i * step < here) write(p, target + i * step * to_line, words[i]);
  }
}

// Small matrices, word by word.
__device__ __forceinline__ void copy_small(const Rearrange& p) {
  const u32 size = u32(p.to_rows * p.to_columns), columns = u32(p.to_columns);
  const i64 total = p.to_batches * size;
  constexpr i64 kEach = kThreads * kWords;
  for (i64 first = blockIdx.x * kEach; first < total; first += gridDim.x * kEach) {
    const i64 b = first / size;
    const u32 begin = u32(first - b * size);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const u32 word = begin + i * kThreads + threadIdx.x, more = word / size, within = word - more * size;
      if (b + more >= p.to_batches) continue;
      const i64 place = p.places == nullptr ? b + more : p.places[b + more];
      const i64 row = within / columns, column = within % columns;
      Word found = {};
      if (u64(place) < u64(p.batches) && row < p.rows && column < p.columns)
        found = p.from[place * p.from_batch + row * p.from_row + column * p.from_column];
      write(p, p.to + (b + more) * p.to_batch + row * p.to_row + column * p.to_column, found);
    }
  }
}

// Grid: tiles of columns, tiles of rows, batches. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads, 3) rearrange(const __grid_constant__ Rearrange p) {
  __shared__ Word tile[kSide * kPitch];
  if (p.way == kSmall) return copy_small(p);
  const bool down = p.way == kStraight ? p.to_row < p.to_column : p.to_row > p.to_column;
  for (i64 b = blockIdx.z; b < p.to_batches; b += gridDim.z) {
    const i64 place = p.places == nullptr ? b : p.places[b];
    const Word* from = u64(place) < u64(p.batches) ? p.from + place * p.from_batch : nullptr;
    Wide* to = p.to + b * p.to_batch;
    if (p.way == kStraight) {
      const i64 lines = kLines * (kThreads / p.lanes), count = down ? p.to_columns : p.to_rows;
      for (i64 first = blockIdx.y * lines; first < count; first += gridDim.y * lines) copy(p, from, to, first, down);
      continue;
    }
    for (i64 row = i64(blockIdx.y) * kSide; row < p.to_rows; row += i64(gridDim.y) * kSide) {
      for (i64 column = i64(blockIdx.x) * kSide; column < p.to_columns; column += i64(gridDim.x) * kSide) {
        turn(p, from, to, row, column, down, tile);
      }
    }
  }
}
