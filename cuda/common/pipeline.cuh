// Rings of stages between warps that copy and warps that multiply (sm_90): waiting for a barrier, arriving at one, and the
// place and the parity of a stage.
#pragma once

#include "ptx/tma.cuh"

// With -DSTRESS every wait is preceded by a pause of 0 to 8 us that differs from warp to warp and from wait to wait.
__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
#ifdef STRESS
  const u32 noise = (clock() / 64 + threadIdx.x / 32 * 2654435761u) * 2246822519u;
  __nanosleep((noise >> 19) & 0x1fff);
#endif
  barrier_wait(shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive(u64& barrier) { barrier_arrive(shared_address(&barrier)); }

// Number n has place n % kSize in a ring; the parity of its barriers.
template <int kSize> __device__ __forceinline__ u32 parity(u32 n) {
  static_assert((kSize & (kSize - 1)) == 0, "numbers may pass 2^32");
  return n / kSize % 2;
}

// The last CTA to end leaves the counters {tiles claimed, CTAs that are done} at zero, as it found them. For one thread.
__device__ __forceinline__ void leave_counters(int* counters) {
  __threadfence();
  if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;
}
