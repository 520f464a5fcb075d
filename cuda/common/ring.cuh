// A place in a ring of stages, with the parity of the barriers there.
#pragma once

#include "common/types.cuh"

template <int kSize> struct Ring {
  int at = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == kSize) at = 0, phase ^= 1;
  }
};
