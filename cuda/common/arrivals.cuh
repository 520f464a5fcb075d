// What CTAs leave behind, for the one of them that ends last.
#pragma once

#include "common/bsr.cuh"

// Whether this CTA is the last of all, by default of the grid, to come here: if so, it sees what the others wrote
// before. All threads call it. The counter is zero before and after.
template <class Counter> __device__ __forceinline__ bool arrives_last(Counter* arrived, u32 all = gridDim.x) {
  __shared__ bool smem_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    smem_last = atomicAdd(arrived, Counter(1)) == Counter(all) - 1;
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

// The sum of the values of all threads before this one, and in `total` that of all. All threads of a CTA call it.
template <int kThreads, class N> __device__ __forceinline__ N sum_before(N x, N& total) {
  __shared__ N smem_sums[kThreads / 32];
  N sum = x;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const N other = __shfl_up_sync(0xffffffffu, sum, lanes);
    if (lane_id() >= lanes) sum += other;
  }
  __syncthreads();
  if (lane_id() == 31) smem_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  N before = sum - x;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < int(threadIdx.x / 32)) before += smem_sums[w];
    total += smem_sums[w];
  }
  return before;
}

// Replaces each count by the sum of those before it, and returns the sum of all. All threads of a CTA call it.
template <int kThreads> __device__ __forceinline__ i64 add_up(i64* counts, i64 n) {
  constexpr int kItems = 8;
  i64 before = 0;
  for (i64 first = 0; first < n; first += kThreads * kItems) {
    const i64 own = first + threadIdx.x * kItems;
    i64 values[kItems], sum = 0, total;
#pragma unroll
    for (int k = 0; k < kItems; ++k) sum += values[k] = own + k < n ? counts[own + k] : 0;
    i64 place = before + sum_before<kThreads>(sum, total);
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (own + k < n) counts[own + k] = place;
      place += values[k];
    }
    before += total;
  }
  return before;
}
