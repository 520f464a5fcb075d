// What cuda/ptx/wgmma.cuh wraps, on the CPU: each thread works out its own sums, at once, from shared memory or from the
// registers of its warp.
#pragma once

#include "common/types.cuh"

namespace emulator {
// MMA_TYPE names the elements.
struct Types { struct f16 { using type = ::f16; }; struct bf16 { using type = ::bf16; }; struct e4m3 { using type = ::e4m3; }; struct tf32 { using type = ::f32; }; };
using Operand = Types::MMA_TYPE::type;
inline f32 at(u32 address) {
  Operand x;
  std::memcpy(&x, shared + address, sizeof(x));
  return load<f32>(x);
}
// Element k of row or column i of an operand that a descriptor names.
inline f32 element(u64 descriptor, int i, int k, bool across) {
  const u32 address = u32(descriptor & 0x3fff) << 4, leading = u32(descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = u32(descriptor >> 32 & 0x3fff) << 4, mode = u32(descriptor >> 62);
  const u32 row = mode == 1 ? 128 : mode == 2 ? 64 : 32, size = sizeof(Operand);
  const u32 offset = across ? i * size / row * leading + k / 8 * stride + k % 8 * row + i * size % row
                            : i / 8 * stride + i % 8 * row + k * size;
  return at(swizzled(address + offset, row));
}
}  // namespace emulator

inline u64 wgmma_descriptor(u32 address, u32 leading, u32 stride, int row_bytes = 128) {
  const u64 swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | swizzle << 62;
}
// As all that is "aligned", these bring the lanes of a warp together.
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { __syncwarp(); }
template <int kPending> void wgmma_wait() { __syncwarp(); }

namespace emulator {
template <bool kTransB, int kSums> void multiply(float (&d)[kSums], bool add, const float (&rows)[2][MMA_K], u64 b) {
  const int lane = thread.x % 32;
  for (int i = 0; i < kSums; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.f;
    for (int k = 0; k < MMA_K; ++k) sum = std::fma(rows[i / 2 % 2][k], element(b, column, k, kTransB), sum);
    d[i] = sum;
  }
}
}  // namespace emulator
template <bool kTransA, bool kTransB, int kSums> void wgmma(float (&d)[kSums], bool add, u64 a, u64 b) {
  float rows[2][MMA_K];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < MMA_K; ++k)
      rows[i][k] = emulator::element(a, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i, k, kTransA);
  emulator::multiply<kTransB>(d, add, rows, b);
}
namespace emulator {
constexpr int kEach = 4 / sizeof(Operand);  // of a register
inline float part_of(u32 word, int i) {
  Operand x;
  std::memcpy(&x, reinterpret_cast<const u8*>(&word) + i * sizeof(x), sizeof(x));
  return load<f32>(x);
}
// A fragment: neighbours of row lane / 4, of that and 8, and of both half of K on.
inline void gather(float (&rows)[2][MMA_K], const u32 (&a)[4]) {
  for (int m = 0; m < 4; ++m)
    for (int j = 0; j < 4; ++j) {
      const u32 word = exchange(a[m], thread.x % 32 / 4 * 4 + j);
      for (int i = 0; i < kEach; ++i) rows[m % 2][m / 2 * (MMA_K / 2) + j * kEach + i] = part_of(word, i);
    }
}
// The product of a warp: 16 rows by 8 columns. Of b a lane has neighbours along K of column lane / 4.
inline void multiply_16x8(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float rows[2][MMA_K], columns[2][MMA_K];
  gather(rows, a);
  for (int c = 0; c < 2; ++c)
    for (int half = 0; half < 2; ++half)
      for (int j = 0; j < 4; ++j) {
        const u32 word = exchange(b[half], (thread.x % 4 * 2 + c) * 4 + j);
        for (int i = 0; i < kEach; ++i) columns[c][half * (MMA_K / 2) + j * kEach + i] = part_of(word, i);
      }
  float* d[2][2] = {{&d0, &d1}, {&d2, &d3}};
  for (int r = 0; r < 2; ++r)
    for (int c = 0; c < 2; ++c)
      for (int k = 0; k < MMA_K; ++k) *d[r][c] = std::fma(rows[r][k], columns[c][k], *d[r][c]);
}
#define mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32 multiply_16x8
#define mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32 multiply_16x8
#define mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32 multiply_16x8
}  // namespace emulator
template <bool kTransB, int kSums> void wgmma(float (&d)[kSums], bool add, const u32 (&a)[4], u64 b) {
  float rows[2][MMA_K];
  emulator::gather(rows, a);
  emulator::multiply<kTransB>(d, add, rows, b);
}
