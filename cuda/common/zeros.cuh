// Whether a number is zero, of any element type.
#pragma once

#include "common/bsr.cuh"

template <class N> __device__ __forceinline__ bool is_zero(N x) { return number(x) == 0; }
template <class Real> __device__ __forceinline__ bool is_zero(Complex<Real> x) { return x.re == 0 && x.im == 0; }
