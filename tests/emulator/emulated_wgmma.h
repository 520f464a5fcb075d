// What cuda/wgmma.cuh wraps, on the CPU: each thread works out its own sums, at once, from shared memory or from the
// registers of its warp (emulated_products.h). MMA_TYPE names the elements, MMA_K says how many of them a product is deep.
#pragma once

static_assert(emulator::Types::MMA_TYPE::kDeep == MMA_K, "32 bytes");
inline unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride, int row_bytes = 128) {
  return emulator::descriptor(address, leading, stride, row_bytes);
}
inline void wgmma_fence() { emulator::fence_products(); }
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending> void wgmma_wait() { emulator::wait_products(kPending); }

template <bool kTransA, bool kTransB, int kSums>
void wgmma(float (&d)[kSums], bool add, unsigned long long a, unsigned long long b) {
  emulator::multiply(emulator::Types::MMA_TYPE{}, d, kSums, add, a, kTransA, b, kTransB);
}
template <bool kTransB, int kSums>
void wgmma(float (&d)[kSums], bool add, const unsigned (&a)[4], unsigned long long b) {
  emulator::multiply(emulator::Types::MMA_TYPE{}, d, kSums, add, a, b, kTransB);
}
