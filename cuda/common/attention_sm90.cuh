// What the attention kernels on Hopper's tensor cores share: their argument, copies of tiles by slabs of 128 bytes, and
// the bounds within which weights of 16 bits or fp8 are exact (sm_90a).
#pragma once

#include "common/attention.cuh"
#include "common/pipeline.cuh"
#include "ptx/mma.cuh"

constexpr int kSlabColumns = 128 / sizeof(Element);  // a slab has 128 bytes of each row
// The score of a hidden key: -2^127, which scaling keeps exact; for fp8 -2^100, since its factors may be above 1.
constexpr f32 kHidden = kFp8 ? -1.2676506002282294e30f : -1.7014118346046923e38f;
constexpr f32 kLarge = 1024.f;  // from here on the last bit of a maximum affects weights of 16 bits
// Outside these bounds of a sum of weights, scores are so large that rounding them has changed the result.
constexpr f32 kLeastRowSum = kFp8 ? 16.f : .5f, kMostRowSum = 1e14f;

struct alignas(64) AttentionSm90 {
  TensorMap q, k, v, o;
  Attention attention;
};
#ifdef ATTENTION_SM90_BYTES
CHECK_LAYOUT(AttentionSm90, ATTENTION_SM90, (q)(k)(v)(o)(attention))
#endif

__device__ __forceinline__ void release(u64& barrier) {
  __syncwarp();
  if (is_elected()) arrive(barrier);
}

template <int kCount>
__device__ __forceinline__ void copy_slabs(const u8* to, u32 bytes, const TensorMap& map, int row, int head, int batch,
                                           u64& full) {
  const u32 barrier = shared_address(&full);
  barrier_expect(barrier, kCount * bytes);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    copy_tile(shared_address(to) + i * bytes, &map, kSlabColumns * i, row, head, batch, barrier);
  }
}

// A number for each of a thread's two queries, which are 8 rows apart.
struct Two {
  f32 x, y;
};
__device__ __forceinline__ Two over_quad_max(Two m) {
#pragma unroll
  for (int i = 1; i < 4; i *= 2) {
    m.x = fmaxf(m.x, __shfl_xor_sync(0xffffffffu, m.x, i));
    m.y = fmaxf(m.y, __shfl_xor_sync(0xffffffffu, m.y, i));
  }
  return m;
}
__device__ __forceinline__ Two over_quad_sum(Two m) {
#pragma unroll
  for (int i = 1; i < 4; i *= 2) {
    m.x += __shfl_xor_sync(0xffffffffu, m.x, i);
    m.y += __shfl_xor_sync(0xffffffffu, m.y, i);
  }
  return m;
}
// Adds pairs of numbers times zero: the result is not zero unless all are finite.
__device__ __forceinline__ u32 times_zero(u32 pair, u32 sum) {
  if constexpr (Same<Out, bf16>::value) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  else asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  return sum;
}

// Rounds four weights to the 16 bits in which they will be multiplied.
__device__ __forceinline__ void round_four(f32* s) {
  const u32 x = pack<Element>(s[0], s[1]), y = pack<Element>(s[2], s[3]);
  s[0] = low_of<Element>(x), s[1] = high_of<Element>(x), s[2] = low_of<Element>(y), s[3] = high_of<Element>(y);
}

// d[16, 8] += x[16, 32 bytes] * y[32 bytes, 8], by one warp
__device__ __forceinline__ void multiply_16x8(f32 (&d)[4], const u32 (&x)[4], u32 y0, u32 y1) {
  if constexpr (Same<Element, bf16>::value) mma_bf16(d, {x[0], x[2]}, {x[1], x[3]}, {y0, y1});
  else if constexpr (kFp8) mma_e4m3(d, {x[0], x[2]}, {x[1], x[3]}, {y0, y1});
  else mma_f16(d, {x[0], x[2]}, {x[1], x[3]}, {y0, y1});
}
