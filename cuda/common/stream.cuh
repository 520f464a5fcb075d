// Loads of data that is read once, and sums over numbers of lanes that are not powers of two.
#pragma once

#include "common/types.cuh"

template <bool kFirst, class T, class U> struct Choose { using Type = T; };
template <class T, class U> struct Choose<false, T, U> { using Type = U; };

// Reads kCount neighbouring elements, `kAlign` bytes at a time, and marks them to be evicted first from the caches.
template <int kAlign, int kCount, class T> __device__ __forceinline__ void stream(T (&to)[kCount], const T* __restrict__ from) {
  if constexpr (kAlign > sizeof(T) && kCount * sizeof(T) % kAlign == 0) {
    constexpr int kEach = kAlign / sizeof(T);
#pragma unroll
    for (int i = 0; i < kCount; i += kEach) {
      union { T values[kEach]; u16 u2; u32 u4; u64 u8_; uint4 u16_; } box = {};
      if constexpr (kAlign == 2) box.u2 = __ldcs(reinterpret_cast<const u16*>(from + i));
      else if constexpr (kAlign == 4) box.u4 = __ldcs(reinterpret_cast<const u32*>(from + i));
      else if constexpr (kAlign == 8) box.u8_ = __ldcs(reinterpret_cast<const u64*>(from + i));
      else box.u16_ = __ldcs(reinterpret_cast<const uint4*>(from + i));
#pragma unroll
      for (int j = 0; j < kEach; ++j) to[i + j] = box.values[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      union { T value; u8 u1; u16 u2; u32 u4; u64 u8_; uint4 u16_; } box = {};
      if constexpr (sizeof(T) == 1) box.u1 = __ldcs(reinterpret_cast<const u8*>(from + i));
      else if constexpr (sizeof(T) == 2) box.u2 = __ldcs(reinterpret_cast<const u16*>(from + i));
      else if constexpr (sizeof(T) == 4) box.u4 = __ldcs(reinterpret_cast<const u32*>(from + i));
      else if constexpr (sizeof(T) == 8) box.u8_ = __ldcs(reinterpret_cast<const u64*>(from + i));
      else box.u16_ = __ldcs(reinterpret_cast<const uint4*>(from + i));
      to[i] = box.value;
    }
  }
}
template <class T> __device__ __forceinline__ T streamed(const T* __restrict__ from) {
  T one[1];
  stream<1>(one, from);
  return one[0];
}

// Reads kCount neighbouring elements, `kAlign` bytes at a time.
template <int kAlign, int kCount, class T> __device__ __forceinline__ void read_together(T (&to)[kCount], const T* from) {
  constexpr int kEach = kAlign > sizeof(T) && kCount * sizeof(T) % kAlign == 0 ? kAlign / sizeof(T) : 1;
  struct alignas(kEach * sizeof(T)) Box { T values[kEach]; };
#pragma unroll
  for (int i = 0; i < kCount; i += kEach) {
    const Box box = *reinterpret_cast<const Box*>(from + i);
#pragma unroll
    for (int j = 0; j < kEach; ++j) to[i + j] = box.values[j];
  }
}
// kCount neighbouring elements, read `kAlign` bytes at a time. Elements of 8 and 16 bits stay packed until they are
// used; unpacked, each would take a register.
template <class T, int kCount, int kAlign> struct Elements {
  static constexpr bool kPacked = sizeof(T) < 4 && kAlign >= 4 && kCount * sizeof(T) % kAlign == 0;
  static constexpr int kEach = kPacked ? 4 / sizeof(T) : 1;
  using Word = typename Choose<kPacked, u32, T>::Type;
  Word words[kCount / kEach];

  __device__ __forceinline__ void stream_from(const T* from) { stream<kAlign>(words, reinterpret_cast<const Word*>(from)); }
  __device__ __forceinline__ void read_from(const T* from) {
    read_together<kAlign>(words, reinterpret_cast<const Word*>(from));
  }
  __device__ __forceinline__ void put(int k, T value) {  // used where elements are read one by one
    if constexpr (!kPacked) words[k] = value;
  }
  __device__ __forceinline__ T operator[](int k) const {
    if constexpr (kPacked) {
      union { u32 word; T value; } box = {words[k / kEach] >> k % kEach * (8 * sizeof(T))};
      return box.value;
    } else {
      return words[k];
    }
  }
};
// Reads an element that another multiprocessor may have written during this launch.
template <class T> __device__ __forceinline__ T past_l1(const T* from) {
  constexpr int kWords = sizeof(T) / 4;
  union { T value; u8 byte; u32 words[kWords > 0 ? kWords : 1]; } box = {};
  if constexpr (sizeof(T) == 1) box.byte = __ldcg(reinterpret_cast<const u8*>(from));
#pragma unroll
  for (int i = 0; i < kWords; ++i) box.words[i] = __ldcg(reinterpret_cast<const u32*>(from) + i);
  return box.value;
}

// The largest power of two, up to 16, that divides `bytes`.
__device__ constexpr int alignment_of(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
}

// In the lanes with place 0, x becomes the sum over kCount lanes that are kStep lanes apart, added in one fixed tree.
template <int kCount, int kStep, int kValues, class T>
__device__ __forceinline__ void sum_over_places(T (&x)[kValues], int place) {
#pragma unroll
  for (int count = kCount; count > 1; count = (count + 1) / 2) {
    const int half = (count + 1) / 2;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const T other = shuffle_down(x[i], half * kStep);
      if (place < count - half) x[i] = add(x[i], other);
    }
  }
}
