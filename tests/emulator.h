// As much of CUDA as the plain kernels need, on the CPU: every thread of a CTA is a thread, CTAs run one after the other.
// Loads, stores, shuffles, barriers and atomics; no shared memory, no assembly.
#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct dim3 { unsigned x, y, z; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };

namespace emulator {
struct Warp {
  std::barrier<> together{32};
  unsigned words[32];
};
inline thread_local Warp* warp;
inline thread_local dim3 thread, block;
inline dim3 grid;
// Each lane shows a word, and sees that of another.
inline unsigned exchange(unsigned word, int lane) {
  warp->words[thread.x % 32] = word;
  warp->together.arrive_and_wait();
  const unsigned found = warp->words[lane & 31];
  warp->together.arrive_and_wait();
  return found;
}
template <class... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}
template <class... Parameters> void launch(void (*kernel)(Parameters...), void** arguments, dim3 size, unsigned threads) {
  grid = size;
  for (unsigned z = 0; z < size.z; ++z)
  for (unsigned y = 0; y < size.y; ++y)
  for (unsigned x = 0; x < size.x; ++x) {
    std::vector<std::unique_ptr<Warp>> warps(threads / 32);
    for (auto& each : warps) each = std::make_unique<Warp>();
    std::vector<std::thread> all;
    for (unsigned t = 0; t < threads; ++t)
      all.emplace_back([&, t] {
        thread = {t, 0, 0}, block = {x, y, z}, warp = warps[t / 32].get();
        call(kernel, arguments, std::index_sequence_for<Parameters...>{});
        warp->together.arrive_and_drop();
      });
    for (auto& each : all) each.join();
  }
}
}  // namespace emulator
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid

inline unsigned __shfl_sync(unsigned, unsigned x, int lane) { return emulator::exchange(x, lane); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
  return emulator::exchange(x, int(threadIdx.x % 32) ^ mask);
}
inline unsigned __shfl_down_sync(unsigned, unsigned x, int by) {
  const int lane = int(threadIdx.x % 32);
  return emulator::exchange(x, lane + by < 32 ? lane + by : lane);
}
template <class T> T __ldcs(const T* from) { return *from; }
inline int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= emulator::exchange(x, lane) << lane;
  return bits;
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void __syncwarp() { emulator::warp->together.arrive_and_wait(); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __double2float_rz(double x) {
  const float y = float(x);
  return std::fabs(double(y)) > std::fabs(x) ? std::nextafter(y, 0.f) : y;
}
using std::fma;
using std::max;
using std::min;
