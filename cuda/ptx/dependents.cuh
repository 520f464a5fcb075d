// Kernels that follow each other on a stream (sm_90 and newer): one wrapper = one PTX instruction. Both do nothing in a
// launch that may not overlap with others.
#pragma once

#include "common/types.cuh"

// Lets the next kernel start as soon as there is room for it, if its launch allows that.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all kernels in front have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
