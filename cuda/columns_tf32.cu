// to[b, 0, n, k] = from[b, k, n] rounded to tf32; with PARTS = 2, to[b, 1, n, k] is the remainder
// A column-major copy of B for gemm_sm90, which reads tf32 along K only; in two parts for products in float32. The
// parts of a number add up to exactly that number, also for infinity and NaN. A CTA has 64 rows by 64 columns; all
// loads of a thread are under way together, and rows of 65 words in shared memory keep both sides free of bank
// conflicts. A copy bound by bytes: 8192 x 8192 at 3.6 TB/s.
#include "common/layout.cuh"
#include "ptx/convert.cuh"

constexpr int kParts = PARTS;
constexpr int kSide = 64, kThreads = 256, kStep = kThreads / kSide;
constexpr int kPitch = kSide + 1;  // the same column of neighbouring rows lies in different banks

struct ColumnsTf32 {
  const f32* from;
  f32* to;
  i64 batch, row, column;  // strides of `from` in elements
  i64 rows, columns, batches;
};
#ifdef COLUMNS_TF32_BYTES
CHECK_LAYOUT(ColumnsTf32, COLUMNS_TF32, (from)(to)(batch)(row)(column)(rows)(columns)(batches))
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

// Grid: tiles of columns, tiles of rows, batches. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads) columns_tf32(const __grid_constant__ ColumnsTf32 p) {
  __shared__ f32 tile[kSide * kPitch];
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  const bool down = p.row < p.column;  // the elements of a column are closer together than those of a row
  for (i64 b = blockIdx.z; b < p.batches; b += gridDim.z) {
    for (i64 row = i64(blockIdx.y) * kSide; row < p.rows; row += i64(gridDim.y) * kSide) {
      for (i64 column = i64(blockIdx.x) * kSide; column < p.columns; column += i64(gridDim.x) * kSide) {
        const f32* from = p.from + b * p.batch + row * p.row + column * p.column;
#pragma unroll
        for (int i = 0; i < kSide; i += kStep) {
          const int k = down ? x : y + i, n = down ? y + i : x;
          if (row + k < p.rows && column + n < p.columns) tile[k * kPitch + n] = from[k * p.row + n * p.column];
        }
        __syncthreads();
        f32* to = p.to + (b * kParts * p.columns + column + y) * p.rows + row + x;
#pragma unroll
        for (int i = 0; i < kSide; i += kStep) {
          if (column + y + i >= p.columns || row + x >= p.rows) continue;
          const f32 element = tile[x * kPitch + y + i];
          if constexpr (kParts == 2) {
            const float2 both = two_parts(element);
            to[i * p.rows] = both.x;
            to[(p.columns + i) * p.rows] = both.y;
          } else {
            to[i * p.rows] = exact_tf32(element);
          }
        }
        __syncthreads();
      }
    }
  }
}
