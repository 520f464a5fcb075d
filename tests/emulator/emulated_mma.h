// What cuda/ptx/mma.cuh wraps, on the CPU: copies that are there when they have been waited for, fragments from shared memory,
// and products of which a lane works out its own sums from the registers of its warp.
#pragma once

#include "ptx/cp_async.cuh"

inline void copy_16(bool wanted, u32 to, const void* from, bool blank) {
  emulator::copy_some_if(wanted, to, from, blank ? 0 : 16);
}
inline void copy_some_of_16(bool wanted, u32 to, const void* from, u32 bytes) {
  emulator::copy_some_if(wanted, to, from, bytes);
}
inline void copy_4(bool wanted, u32 to, const void* from) { emulator::copy_if(wanted, to, from, 4); }

// Lane l names row l % 8 of matrix l / 8. Of each matrix a lane has two neighbours of row l / 4, transposed of column l / 4.
template <bool kTransposed> void load_matrices(u32 (&d)[4], u32 from) {
  const int lane = threadIdx.x % 32;
  const u32 own[] = {from};
  emulator::show(own, [&](const auto& all) {
    for (int m = 0; m < 4; ++m) {
      u16 pair[2];
      for (int i = 0; i < 2; ++i) {
        const int row = kTransposed ? lane % 4 * 2 + i : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
        std::memcpy(pair + i, emulator::origin + all[m * 8 + row][0] + column * 2, 2);
      }
      d[m] = pair[0] | u32(pair[1]) << 16;
    }
  });
}
template <int kWords> void load_words(u32 (&d)[kWords], u32 from) {
  if (from % (kWords * 4)) std::abort();
  std::memcpy(d, emulator::origin + from, kWords * 4);
}

namespace emulator {
// Rows lane / 4 and 8 + lane / 4 of a, columns 2 (lane % 4) and the next of b: kSteps words of the lanes that hold them,
// each with kEach elements.
template <int kEach, class Sum, class Element>
void multiply_warp(Sum (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2], const Element& element) {
  const int lane = thread.x % 32;
  const u32 own[] = {upper[0], upper[1], lower[0], lower[1], b[0], b[1]};
  show(own, [&](const auto& all) {
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 4; ++k)
          for (int e = 0; e < kEach; ++e) {
            const u32 row = all[lane / 4 * 4 + k][i / 2 * 2 + half];
            const u32 column = all[(lane % 4 * 2 + i % 2) * 4 + k][4 + half];
            d[i] += element(row, e) * element(column, e);
          }
  });
}
}  // namespace emulator
inline void mma_f16(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  emulator::multiply_warp<2>(d, upper, lower, b, [](u32 word, int e) {
    f32 x;
    emulator::cvt_f32_f16(x, u16(word >> 16 * e));
    return x;
  });
}
inline void mma_bf16(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  emulator::multiply_warp<2>(d, upper, lower, b, [](u32 word, int e) { return __uint_as_float(word >> 16 * e << 16); });
}
inline void mma_tf32(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  emulator::multiply_warp<1>(d, upper, lower, b, [](u32 word, int) { return __uint_as_float(word & 0xffffe000u); });
}
inline void mma_s8(i32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  emulator::multiply_warp<4>(d, upper, lower, b, [](u32 word, int e) { return i32(i8(word >> 8 * e)); });
}
inline void mma_e4m3(f32 (&d)[4], const u32 (&upper)[2], const u32 (&lower)[2], const u32 (&b)[2]) {
  emulator::multiply_warp<4>(d, upper, lower, b, [](u32 word, int e) { return number(e4m3{u8(word >> 8 * e)}); });
}

// d[8, 8] += a[8, 4] * b[4, 8] of a warp: a lane has an element of row, or column, lane / 4.
inline void mma_f64(f64& d0, f64& d1, f64 a, f64 b) {
  const int lane = threadIdx.x % 32;
  u32 own[4];
  std::memcpy(own, &a, 8), std::memcpy(own + 2, &b, 8);
  emulator::show(own, [&](const auto& all) {
    const auto number = [&](int from, int first) {
      f64 x;
      std::memcpy(&x, &all[from][first], 8);
      return x;
    };
    for (int k = 0; k < 4; ++k) {
      const f64 row = number(lane / 4 * 4 + k, 0);
      d0 = std::fma(row, number(lane % 4 * 2 * 4 + k, 2), d0);
      d1 = std::fma(row, number((lane % 4 * 2 + 1) * 4 + k, 2), d1);
    }
  });
}
