// What the caches are asked for ahead of time (sm_80 and newer): one wrapper = one PTX instruction.
#pragma once

#include "common/types.cuh"

// Asks the L2 for the line of global memory that has this address.
__device__ __forceinline__ void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}
