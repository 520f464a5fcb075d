// Which of two numbers a reduction keeps, in the order that NumPy has.
#pragma once

#include "common/bsr.cuh"

enum Operation { kAdd, kMaximum, kMinimum, kFmax, kFmin, kCount };

template <class N> __device__ __forceinline__ bool is_nan(N x) { return x != x; }
template <class Real> __device__ __forceinline__ bool is_nan(Complex<Real> x) { return x.re != x.re || x.im != x.im; }
__device__ __forceinline__ bool is_nan(boolean) { return false; }

template <class N> __device__ __forceinline__ bool less(N a, N b) { return a < b; }
template <class Real> __device__ __forceinline__ bool less(Complex<Real> a, Complex<Real> b) {
  return a.re < b.re || (a.re == b.re && a.im < b.im);
}
__device__ __forceinline__ bool less(boolean a, boolean b) { return a.value < b.value; }

// Two numbers joined; NaN wins, but over no number in kFmax and kFmin.
template <Operation kOperation, class N> __device__ __forceinline__ N joined(N a, N b) {
  if constexpr (kOperation == kAdd || kOperation == kCount) {
    return add(a, b);
  } else {
    constexpr bool kIgnoreNan = kOperation == kFmax || kOperation == kFmin;
    if (is_nan(a)) return kIgnoreNan ? b : a;
    if (is_nan(b)) return kIgnoreNan ? a : b;
    constexpr bool kLargest = kOperation == kMaximum || kOperation == kFmax;
    return (kLargest ? less(a, b) : less(b, a)) ? b : a;
  }
}
