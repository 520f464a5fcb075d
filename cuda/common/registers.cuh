// Values in registers, and what the compiler may assume about them.
#pragma once

#include "common/types.cuh"

// Returns x, while the compiler does not know how it was computed: it neither computes it again elsewhere nor derives
// anything from it. So values that depend on it are computed where they are needed, and not kept in registers.
template <class T> __device__ __forceinline__ T opaque(T x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register or a pair");
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
  else asm volatile("" : "+r"(x));
  return x;
}
// Tells the compiler that the sums which the tensor cores write have other values after a wait than before it.
template <int kCount> __device__ __forceinline__ void settle(f32 (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount> __device__ __forceinline__ void clear(f32 (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = 0.f;
}

// The number of the thread, hidden from the compiler: what depends on it is computed where it is used.
__device__ __forceinline__ int unknown_thread() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return int(thread);
}

// Returns x, which the compiler then knows to be the same in the whole warp. It stays in a uniform register, as
// descriptors require, and branches on it keep the warp converged.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
