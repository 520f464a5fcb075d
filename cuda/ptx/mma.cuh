// Copies, loads of fragments and matrix products of a warp (sm_80 and newer): one wrapper = one PTX instruction.
#pragma once

#include "ptx/cp_async.cuh"

// ------------------------------------------------------------------------------- copies
// Copies 16 bytes to shared memory past the L1 if `wanted`; writes zeros instead if `blank`. It uses predicates and no
// branch, so that the compiler can schedule products between copies.
__device__ __forceinline__ void copy_16(bool wanted, u32 to, const void* from, bool blank) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %0, 0;\nsetp.ne.b32 q, %3, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, q;\n}"
      ::"r"(int(wanted)), "r"(to), "l"(from), "r"(int(blank)) : "memory");
}
// The same, but only `bytes` are read and the others become zeros. This takes some more instructions.
__device__ __forceinline__ void copy_some_of_16(bool wanted, u32 to, const void* from, u32 bytes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;\n}"
      ::"r"(int(wanted)), "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_4(bool wanted, u32 to, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.ca.shared.global [%1], [%2], 4;\n}"
               ::"r"(int(wanted)), "r"(to), "l"(from) : "memory");
}

// ------------------------------------------------------------------------------- fragments
// Loads four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives
// elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or of column l / 4 if kTransposed.
template <bool kTransposed> __device__ __forceinline__ void load_matrices(u32 (&d)[4], u32 from) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from));
}
__device__ __forceinline__ void load_words(u32 (&d)[2], u32 from) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(from));
}
__device__ __forceinline__ void load_words(u32 (&d)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from));
}

// ------------------------------------------------------------------------------- products
// d[16, 8] += a[16, 32 bytes] * b[32 bytes, 8]. For row lane / 4 of 8 rows of a, or of 8 columns of b, a pair of words
// holds the four bytes from 4 (lane % 4) on of both halves of the 32 bytes. `upper` is rows 0 to 7 of a, `lower` is
// rows 8 to 15.
#define MMA_16X8(name, instruction, Sum, letter)                                                                     \
  __device__ __forceinline__ void name(Sum (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) { \
    asm("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"          \
        : "+" letter(d[0]), "+" letter(d[1]), "+" letter(d[2]), "+" letter(d[3])                                       \
        : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(b[0]), "r"(b[1]));                           \
  }
MMA_16X8(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32", f32, "f")
MMA_16X8(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", f32, "f")
MMA_16X8(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32", f32, "f")  // the low 13 bits of an operand are ignored
MMA_16X8(mma_s8, "m16n8k32.row.col.s32.s8.s8.s32", i32, "r")
#if __CUDA_ARCH__ >= 890
MMA_16X8(mma_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32", f32, "f")
#endif
#undef MMA_16X8

// d[8, 8] += a[8, 4] * b[4, 8]; a lane holds element lane % 4 of row lane / 4 of a and of column lane / 4 of b.
__device__ __forceinline__ void mma_f64(f64& d0, f64& d1, f64 a, f64 b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d0), "+d"(d1) : "d"(a), "d"(b));
}
#if __CUDA_ARCH__ >= 900
// d[16, 8] += a[16, 8] * b[8, 8]; a lane holds elements lane % 4 and 4 + lane % 4 of its two rows of a and its column
// of b.
__device__ __forceinline__ void mma_f64(f64 (&d)[4], const f64 (&upper)[2], const f64 (&lower)[2], const f64 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(upper[0]), "d"(lower[0]), "d"(upper[1]), "d"(lower[1]), "d"(b[0]), "d"(b[1]));
}
#endif
