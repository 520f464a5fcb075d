// Barriers in shared memory before Hopper (sm_80 and newer): one wrapper = one PTX instruction.
#pragma once

#include "common/types.cuh"

// Whether a barrier has completed the phase of this parity.
__device__ __forceinline__ bool barrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
