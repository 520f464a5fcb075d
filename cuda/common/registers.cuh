// What the compiler is told, or not told, about a value in a register. No instruction is made of any of these.
#pragma once

#include "common/types.cuh"

// The same value, and the compiler does not know how it was made: it is neither computed again somewhere else, nor is
// anything known to follow from it. So what depends on it is computed where it is needed, and not kept in registers.
template <class T> __device__ __forceinline__ T opaque(T x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register or a pair");
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
  else asm volatile("" : "+r"(x));
  return x;
}
// The registers of sums that the tensor cores write to are different values after a wait than before it.
template <int kCount> __device__ __forceinline__ void settle(f32 (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// x, known by the compiler to be the same in the whole warp: it stays in a uniform register, where descriptors are wanted,
// and branches on it keep the warp together.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
