// Rings of stages between warps that copy and warps that multiply (sm_90): waiting for a barrier, arriving at one, and
// the parity of a stage.
#pragma once

#include "ptx/tma.cuh"

// With -DSTRESS a pause of 0 to 8 us, which differs from warp to warp and from wait to wait, precedes every wait.
__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
#ifdef STRESS
  const u32 noise = (clock() / 64 + threadIdx.x / 32 * 2654435761u) * 2246822519u;
  __nanosleep((noise >> 19) & 0x1fff);
#endif
  barrier_wait(shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive(u64& barrier) { barrier_arrive(shared_address(&barrier)); }
__device__ __forceinline__ void arrive_if(bool wanted, u64& barrier) { barrier_arrive_if(wanted, shared_address(&barrier)); }

// Stage number n has index n % kSize in a ring; this is the parity of its barriers.
template <int kSize> __device__ __forceinline__ u32 parity(u32 n) {
  static_assert((kSize & (kSize - 1)) == 0, "numbers may pass 2^32");
  return n / kSize % 2;
}

// Called by one thread of each CTA: the last CTA resets the counters {tiles claimed, CTAs that are done} to zero.
__device__ __forceinline__ void leave_counters(int* counters) {
  __threadfence();
  if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;
}
