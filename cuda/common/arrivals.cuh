// What CTAs leave behind, for the one of them that ends last.
#pragma once

#include "common/bsr.cuh"

// Whether this CTA is the last of the grid to come here: if so, it sees what the others wrote before. All threads call
// it. The counter is zero before and after.
__device__ __forceinline__ bool arrives_last(int* arrived) {
  __shared__ bool smem_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    smem_last = atomicAdd(arrived, 1) == int(gridDim.x) - 1;
    if (smem_last) *arrived = 0;
  }
  __syncthreads();
  const bool last = smem_last;
  if (last) __threadfence();
  return last;
}

// The values of all threads of a CTA joined in a fixed order; thread 0 gets the result.
template <int kThreads, class T, class Join> __device__ __forceinline__ T join_cta(T x, Join join) {
  __shared__ T smem_values[kThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = join(x, shuffle_down(x, lanes));
  __syncthreads();
  if (lane_id() == 0) smem_values[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < kThreads / 32; ++w) x = join(x, smem_values[w]);
  return x;
}
