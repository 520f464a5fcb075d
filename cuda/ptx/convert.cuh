// Conversions and approximations: one instruction each, or one instruction for each pair of numbers.
#pragma once

#include "common/types.cuh"

// Two numbers rounded to nearest, as the two halves of a word. T is f16 or bf16.
template <class T> __device__ __forceinline__ u32 pack(f32 low, f32 high) {
  u32 pair;
  if constexpr (Same<T, bf16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The two numbers of a pair. They are written in assembly, because otherwise the compiler keeps the pair in a register
// too.
template <class T> __device__ __forceinline__ f32 low_of(u32 pair) {
  f32 number;
  if constexpr (Same<T, bf16>::value) asm("shl.b32 %0, %1, 16;" : "=f"(number) : "r"(pair));
  else asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(number) : "r"(pair));
  return number;
}
template <class T> __device__ __forceinline__ f32 high_of(u32 pair) {
  f32 number;
  if constexpr (Same<T, bf16>::value) asm("and.b32 %0, %1, 0xffff0000;" : "=f"(number) : "r"(pair));
  else asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(number) : "r"(pair));
  return number;
}
// Four numbers rounded to fp8, as the four bytes of a word. A number above 448, the largest fp8 number, becomes 448.
__device__ __forceinline__ u32 pack_fp8(f32 a, f32 b, f32 c, f32 d) {
  u32 four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
// The tensor cores truncate operands to tf32, so half a unit of the last place is added first: multiplication by a factor
// adds 0.72 to 1.44 of that. The error is below 0.73 units and without bias; exact tf32 numbers, NaN and infinity do not
// change. The product is rounded towards zero, so that the largest numbers do not become infinite. Rounding to nearest
// takes two or three instructions at half the rate, which is more time than products take.
__device__ __forceinline__ u32 rounded_tf32(u32 x) {
  return __float_as_uint(__fmul_rz(__uint_as_float(x), 1 + 0.72134752f / 2048));
}

__device__ __forceinline__ f32 exp2_of(f32 x) {
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x with an error of one unit in the last place; 0 for infinity.
__device__ __forceinline__ f32 reciprocal_of(f32 x) {
  f32 y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
