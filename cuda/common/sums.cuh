// Sums and prefix sums over all threads of a CTA, which all call these together.
#pragma once

#include "common/types.cuh"

// The sum, returned to all threads.
__device__ __forceinline__ u64 sum_of_all(u64 x) {
  __shared__ u64 smem_sum;
  if (threadIdx.x == 0) smem_sum = 0;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  __syncthreads();
  if (lane_id() == 0) atomicAdd(&smem_sum, x);
  __syncthreads();
  const u64 sum = smem_sum;
  __syncthreads();  // the next sum begins at 0
  return sum;
}
// The sum of the first numbers of an array, returned to all threads.
template <int kThreads, class T> __device__ __forceinline__ u64 sum_of(const T* numbers, int count) {
  u64 sum = 0;
#pragma unroll 1
  for (int t = threadIdx.x; t < count; t += kThreads) sum += u64(numbers[t]);
  return sum_of_all(sum);
}
// `before` and the numbers of all threads in front; then `before` grows by the numbers of all threads.
template <int kThreads> __device__ __forceinline__ u64 sum_in_front(u64 own, u64& before) {
  __shared__ u64 smem_sums[kThreads / 32];
  u64 end = own;  // with those in front of it in its warp
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const u64 other = __shfl_up_sync(0xffffffffu, end, lanes);
    if (lane_id() >= lanes) end += other;
  }
  if (lane_id() == 31) smem_sums[threadIdx.x / 32] = end;
  __syncthreads();
  u64 first = before + end - own;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < int(threadIdx.x / 32)) first += smem_sums[w];
    before += smem_sums[w];
  }
  __syncthreads();
  return first;
}
