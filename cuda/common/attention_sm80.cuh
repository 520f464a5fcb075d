// What attention and its gradients by mma.sync share, on sm_80 and newer: rows of 16-bit floats in shared memory, and the
// product of two fragments of them. A CTA has WARPS warps.
#pragma once

#include "common/attention.cuh"
#include "common/registers.cuh"
#include "ptx/mma.cuh"

constexpr int kWarps = WARPS, kThreads = 32 * kWarps;
constexpr u32 kAll = 0xffffffffu;

// d[16, 8] += a[16, 16] * b[16, 8], a and b as load_matrices gives them
__device__ __forceinline__ void multiply(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (Same<Element, bf16>::value) mma_bf16(d, {a[0], a[2]}, {a[1], a[3]}, {b0, b1});
  else mma_f16(d, {a[0], a[2]}, {a[1], a[3]}, {b0, b1});
}

// Rows in pieces of 16 bytes, swizzled within groups of kGroup pieces so that the same piece of 8 rows lies in
// different banks: row r begins at bank group r * kPieces, a multiple of kGroup modulo 8.
template <int kDim> struct Lines {
  static constexpr u32 kPieces = kDim / 8, kBytes = kDim * 2;
  static constexpr u32 kGroup = kPieces % 8 == 0 ? 8 : kPieces % 4 == 0 ? 4 : 2;

  static __device__ __forceinline__ u32 swizzle(u32 row) { return row * kGroup / 8 % kGroup; }
  // The offset in a row of the first or the second piece of 16 columns.
  static __device__ __forceinline__ u32 place(u32 sixteen, u32 second, u32 row) {
    return (sixteen * 32) ^ ((second ^ swizzle(row)) * 16);
  }

  // The CTA copies kCount rows, of which `rows` exist with `columns` columns, and writes zeros elsewhere.
  template <int kCount>
  static __device__ __forceinline__ void copy(u32 to, const Element* from, i64 stride, int rows, int columns) {
    const u32 thread = opaque(threadIdx.x);
    const auto bytes = [=](u32 piece) { return clamp(2 * columns - int(piece) * 16, 0, 16); };
    if constexpr (kThreads % kPieces == 0) {  // a thread has the same piece of each row
      constexpr u32 kStep = kThreads / kPieces;
      static_assert(kCount % kStep == 0, "each thread has as many pieces");
      const u32 first = thread / kPieces, piece = thread % kPieces;
      const Element* at = from + i64(first) * stride + piece * 8;
      const int each = bytes(piece);
#pragma unroll
      for (u32 row = 0; row < kCount; row += kStep, at += kStep * stride)
        copy_some_of_16(true, to + (first + row) * kBytes + (piece ^ swizzle(first + row)) * 16, at,
                        int(first + row) < rows ? each : 0);
    } else {
#pragma unroll
      for (u32 i = 0; i < kCount * kPieces; i += kThreads) {
        const u32 row = (thread + i) / kPieces, piece = (thread + i) % kPieces;
        copy_some_of_16(thread + i < kCount * kPieces, to + row * kBytes + (piece ^ swizzle(row)) * 16,
                        from + i64(row) * stride + piece * 8, int(row) < rows ? bytes(piece) : 0);
      }
    }
  }
};
