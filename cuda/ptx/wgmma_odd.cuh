// wgmma (see wgmma.cuh) of 16-bit floats with 48, 80, 96 and 160 columns.
#pragma once

#include "ptx/wgmma.cuh"

#define MMA_ACCUM_24 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define MMA_ACCUM_80 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MMA_D24(d, i) MMA_D8(d, i), MMA_D8(d, i + 8), MMA_D8(d, i + 16)
#define MMA_D80(d, i) MMA_D40(d, i), MMA_D40(d, i + 40)

// d[64, 160] = (add ? d : 0) + a[64, 16] * b[16, 160], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[80], bool add, u64 a, u64 b) {
  asm volatile(MMA_ADD(82) MMA_INSTRUCTION(160) MMA_ACCUM_80 "}, %80, %81, p, 1, 1, %83, %84;\n}"
               : MMA_D80(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 96] = (add ? d : 0) + a[64, 16] * b[16, 96], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[48], bool add, u64 a, u64 b) {
  asm volatile(MMA_ADD(50) MMA_INSTRUCTION(96) MMA_ACCUM_48 "}, %48, %49, p, 1, 1, %51, %52;\n}"
               : MMA_D48(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 80] = (add ? d : 0) + a[64, 16] * b[16, 80], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[40], bool add, u64 a, u64 b) {
  asm volatile(MMA_ADD(42) MMA_INSTRUCTION(80) MMA_ACCUM_40 "}, %40, %41, p, 1, 1, %43, %44;\n}"
               : MMA_D40(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 48] = (add ? d : 0) + a[64, 16] * b[16, 48], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[24], bool add, u64 a, u64 b) {
  asm volatile(MMA_ADD(26) MMA_INSTRUCTION(48) MMA_ACCUM_24 "}, %24, %25, p, 1, 1, %27, %28;\n}"
               : MMA_D24(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}
