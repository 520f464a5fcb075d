// to[b, n, k] = from[b, k, n] rounded to tf32
// A column-major copy of B for gemm_sm90, which reads tf32 along K only.
#include "common/layout.cuh"
#include "ptx/convert.cuh"

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

// Grid: tiles of columns, tiles of rows, batches. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads) columns_tf32(const __grid_constant__ ColumnsTf32 p) {
  __shared__ f32 tile[kSide * kPitch];
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  for (i64 b = blockIdx.z; b < p.batches; b += gridDim.z) {
    for (i64 row = i64(blockIdx.y) * kSide; row < p.rows; row += i64(gridDim.y) * kSide) {
      for (i64 column = i64(blockIdx.x) * kSide; column < p.columns; column += i64(gridDim.x) * kSide) {
        const f32* from = p.from + b * p.batch + (row + y) * p.row + (column + x) * p.column;
#pragma unroll
        for (int i = 0; i < kSide; i += kStep) {
          if (row + y + i < p.rows && column + x < p.columns) tile[(y + i) * kPitch + x] = from[i * p.row];
        }
        __syncthreads();
        f32* to = p.to + (b * p.columns + column + y) * p.rows + row + x;
#pragma unroll
        for (int i = 0; i < kSide; i += kStep) {
          if (column + y + i < p.columns && row + x < p.rows)
            to[i * p.rows] = exact_tf32(tile[x * kPitch + y + i]);
        }
        __syncthreads();
      }
    }
  }
}
