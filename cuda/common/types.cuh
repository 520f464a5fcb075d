// Element types of the arrays and the types of their sums, without CUDA's headers. load<Acc>(x) widens an element,
// Store<T>::from(acc) rounds a sum; multiply_add and reductions work on Acc. Integers are summed modulo 2^32 or 2^64,
// whose low bits are the sum modulo the range of the narrower type.
#pragma once

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct e4m3 { u8 bits; };  // fp8: 4 bits of exponent, 3 of mantissa; it has NaN but no infinity
struct boolean { u8 value; };
template <class Real> struct alignas(2 * sizeof(Real)) Complex { Real re, im; };
using c64 = Complex<f32>;
using c128 = Complex<f64>;

template <class T> struct IsComplex { static constexpr bool value = false; };
template <class Real> struct IsComplex<Complex<Real>> { static constexpr bool value = true; };
template <class T, class U> struct Same { static constexpr bool value = false; };
template <class T> struct Same<T, T> { static constexpr bool value = true; };

// ------------------------------------------------------------------ element -> plain number
template <class T> __device__ __forceinline__ T number(T x) { return x; }
__device__ __forceinline__ f32 number(f16 x) {
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ f32 number(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ f32 number(e4m3 x) {
  // Shifted into the upper bits of a float16 the number is 2^-8 times its value, also if it is subnormal.
  const u32 magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(u16(u32(x.bits & 0x80u) << 8 | magnitude << 7)));
  return y * 256.f;
}
__device__ __forceinline__ u8 number(boolean x) { return x.value != 0; }

template <class Acc, class T> __device__ __forceinline__ Acc load(T x) {
  if constexpr (Same<Acc, boolean>::value) {
    return boolean{u8(number(x) != 0)};
  } else if constexpr (IsComplex<Acc>::value) {
    using Real = decltype(Acc::re);
    if constexpr (IsComplex<T>::value) return Acc{Real(x.re), Real(x.im)};
    else return Acc{Real(number(x)), Real(0)};
  } else {
    return Acc(number(x));
  }
}

// ------------------------------------------------------------------ accumulator -> element
template <class T> struct Store {
  template <class Acc> static __device__ __forceinline__ T from(Acc x) { return T(x); }
};
template <> struct Store<f16> {
  static __device__ __forceinline__ f16 from(f32 x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ f16 from(f64 x) {
    f16 y;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
    return y;
  }
};
template <> struct Store<bf16> {
  static __device__ __forceinline__ bf16 from(f32 x) {  // rounds to nearest even; NaN stays NaN
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{u16((bits >> 16) | 0x40u)};
    return bf16{u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
  // Rounding to odd at 24 bits first makes the second rounding correct.
  static __device__ __forceinline__ bf16 from(f64 x) {
    f32 y = __double2float_rz(x);
    u32 bits = __float_as_uint(y);
    if (f64(y) != x && (bits & 0x7f800000u) != 0x7f800000u) bits |= 1u;
    return from(__uint_as_float(bits));
  }
};
template <> struct Store<boolean> {
  static __device__ __forceinline__ boolean from(boolean x) { return x; }
};
template <class Real> struct Store<Complex<Real>> {
  template <class Other> static __device__ __forceinline__ Complex<Real> from(Complex<Other> x) {
    return Complex<Real>{Real(x.re), Real(x.im)};
  }
};

// ------------------------------------------------------------------------------ arithmetic
template <class Acc> __device__ __forceinline__ Acc zero() { return Acc{}; }

template <class Acc> __device__ __forceinline__ Acc add(Acc a, Acc b) { return a + b; }
template <class Real> __device__ __forceinline__ Complex<Real> add(Complex<Real> a, Complex<Real> b) {
  return {a.re + b.re, a.im + b.im};
}
__device__ __forceinline__ boolean add(boolean a, boolean b) { return {u8(a.value | b.value)}; }

__device__ __forceinline__ f32 multiply_add(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
__device__ __forceinline__ f64 multiply_add(f64 a, f64 b, f64 c) { return fma(a, b, c); }
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) { return a * b + c; }
__device__ __forceinline__ u64 multiply_add(u64 a, u64 b, u64 c) { return a * b + c; }
__device__ __forceinline__ boolean multiply_add(boolean a, boolean b, boolean c) {
  return {u8((a.value & b.value) | c.value)};
}
template <class Real>
__device__ __forceinline__ Complex<Real> multiply_add(Complex<Real> a, Complex<Real> b, Complex<Real> c) {
  return {multiply_add(a.re, b.re, multiply_add(-a.im, b.im, c.re)),
          multiply_add(a.re, b.im, multiply_add(a.im, b.re, c.im))};
}

// ----------------------------------------------------------------------------------- warps
__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// x with each of its words replaced by move(word).
template <class T, class Move> __device__ __forceinline__ T by_words(T x, Move move) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  union { u32 words[kWords]; T value; } box = {};
  box.value = x;
#pragma unroll
  for (int i = 0; i < kWords; ++i) box.words[i] = move(box.words[i]);
  return box.value;
}
template <class T> __device__ __forceinline__ T shuffle_xor(T x, int lane_mask) {
  return by_words(x, [=](u32 word) { return __shfl_xor_sync(0xffffffffu, word, lane_mask); });
}
template <class T> __device__ __forceinline__ T shuffle_down(T x, int lanes) {
  return by_words(x, [=](u32 word) { return __shfl_down_sync(0xffffffffu, word, lanes); });
}
