// wgmma (see wgmma.cuh) with 32 columns.
#pragma once

#include "ptx/wgmma.cuh"

// d[64, 32] = (add ? d : 0) + a[64, 16] * b[16, 32], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[16], bool add, u64 a, u64 b) {
  asm volatile(MMA_ADD(18) MMA_INSTRUCTION(32)
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, %20;\n}"
               : MMA_D8(d, 0), MMA_D8(d, 8) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}
