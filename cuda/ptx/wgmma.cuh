// wgmma, the asynchronous matrix product of a warpgroup on sm_90a: d[64, N] += a[64, MMA_K] * b[MMA_K, N] in float32,
// for N from 64 to 256. MMA_TYPE is f16 or bf16 (MMA_K = 16), tf32 (8) or e4m3 (32): 32 bytes of K at a time. Only the
// 16-bit types can be read from shared memory with K not contiguous ("transposed").
#pragma once

#include "common/types.cuh"

#define MMA_QUOTE_TEXT(x) #x
#define MMA_QUOTE(x) MMA_QUOTE_TEXT(x)
#define MMA_NAME MMA_QUOTE(MMA_TYPE)
#define MMA_ADD(operand) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #operand ", 0;\n"
#define MMA_INSTRUCTION(n) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k" MMA_QUOTE(MMA_K) ".f32." MMA_NAME "." MMA_NAME " {"
#if MMA_K == 16
#define MMA_ACROSS(operands) operands
#else
#define MMA_ACROSS(operands) ""
#endif

// The descriptor of an operand tile: its address, the distances in bytes between 64-wide slabs (leading) and between
// groups of 8 rows (stride), and the swizzle, given by rows of 128, 64 or 32 bytes.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading, u32 stride, int row_bytes = 128) {
  const u64 swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | swizzle << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The registers of the sums, in the text of the instruction and as its operands.
#define MMA_ACCUM_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MMA_ACCUM_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MMA_ACCUM_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MMA_ACCUM_40 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define MMA_ACCUM_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MMA_ACCUM_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MMA_D8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MMA_D32(d, i) MMA_D8(d, i), MMA_D8(d, i + 8), MMA_D8(d, i + 16), MMA_D8(d, i + 24)
#define MMA_D40(d, i) MMA_D32(d, i), MMA_D8(d, i + 32)
#define MMA_D48(d, i) MMA_D40(d, i), MMA_D8(d, i + 40)
#define MMA_D64(d, i) MMA_D32(d, i), MMA_D32(d, i + 32)
#define MMA_D96(d, i) MMA_D64(d, i), MMA_D32(d, i + 64)
#define MMA_D128(d, i) MMA_D64(d, i), MMA_D64(d, i + 64)

// d[64, 256] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 256], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[128], bool add, u64 a, u64 b) {
  static_assert(MMA_K == 16 || (!kTransA && !kTransB), "K runs fastest");
  asm volatile(MMA_ADD(130) MMA_INSTRUCTION(256) MMA_ACCUM_128 "}, %128, %129, p, 1, 1" MMA_ACROSS(", %131, %132") ";\n}"
               : MMA_D128(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 128] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 128], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[64], bool add, u64 a, u64 b) {
  static_assert(MMA_K == 16 || (!kTransA && !kTransB), "K runs fastest");
  asm volatile(MMA_ADD(66) MMA_INSTRUCTION(128) MMA_ACCUM_64 "}, %64, %65, p, 1, 1" MMA_ACROSS(", %67, %68") ";\n}"
               : MMA_D64(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 64] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 64], both in shared memory
template <bool kTransA, bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[32], bool add, u64 a, u64 b) {
  static_assert(MMA_K == 16 || (!kTransA && !kTransB), "K runs fastest");
  asm volatile(MMA_ADD(34) MMA_INSTRUCTION(64) MMA_ACCUM_32 "}, %32, %33, p, 1, 1" MMA_ACROSS(", %35, %36") ";\n}"
               : MMA_D32(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));
}

// d[64, 256] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 256], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[128], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(133) MMA_INSTRUCTION(256) MMA_ACCUM_128
               "}, {%128, %129, %130, %131}, %132, p, 1, 1" MMA_ACROSS(", %134") ";\n}"
               : MMA_D128(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
// d[64, 128] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 128], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[64], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(69) MMA_INSTRUCTION(128) MMA_ACCUM_64
               "}, {%64, %65, %66, %67}, %68, p, 1, 1" MMA_ACROSS(", %70") ";\n}"
               : MMA_D64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
// d[64, 64] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 64], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[32], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(37) MMA_INSTRUCTION(64) MMA_ACCUM_32
               "}, {%32, %33, %34, %35}, %36, p, 1, 1" MMA_ACROSS(", %38") ";\n}"
               : MMA_D32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
// d[64, 192] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 192], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[96], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(101) MMA_INSTRUCTION(192) MMA_ACCUM_96
               "}, {%96, %97, %98, %99}, %100, p, 1, 1" MMA_ACROSS(", %102") ";\n}"
               : MMA_D96(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
// d[64, 96] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 96], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[48], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(53) MMA_INSTRUCTION(96) MMA_ACCUM_48
               "}, {%48, %49, %50, %51}, %52, p, 1, 1" MMA_ACROSS(", %54") ";\n}"
               : MMA_D48(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
// d[64, 80] = (add ? d : 0) + a[64, MMA_K] * b[MMA_K, 80], a in registers
template <bool kTransB> __device__ __forceinline__ void wgmma(float (&d)[40], bool add, const u32 (&a)[4],
                                                            u64 b) {
  static_assert(MMA_K == 16 || !kTransB, "K runs fastest");
  asm volatile(MMA_ADD(45) MMA_INSTRUCTION(80) MMA_ACCUM_40
               "}, {%40, %41, %42, %43}, %44, p, 1, 1" MMA_ACROSS(", %46") ";\n}"
               : MMA_D40(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransB)));
}
