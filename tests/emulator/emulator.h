// As much of CUDA as our kernels need, on the CPU: every thread of a CTA is a thread, CTAs run one after the other. Loads,
// stores, shuffles, barriers, atomics, one piece of shared memory; assembly is exchanged for calls (emulator.py).
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __shared__ static  // CTAs run one after the other
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 800  // Hopper's instructions come in headers of their own

struct dim3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct double2 { double x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };

namespace emulator {
struct Warp {
  std::barrier<> together{32};
  unsigned words[32], several[32][6];
};
inline thread_local Warp* warp;
inline thread_local dim3 thread, block;
inline dim3 grid, size_of_block;
inline unsigned char* shared;                     // of the CTA that runs
inline unsigned char anchor, *origin;             // where addresses of shared memory are counted from
inline std::unique_ptr<std::barrier<>> named[16];  // 0: all of its threads; others: a warpgroup
// Each lane shows a word, and sees that of another.
inline unsigned exchange(unsigned word, int lane) {
  warp->words[thread.x % 32] = word;
  warp->together.arrive_and_wait();
  const unsigned found = warp->words[lane & 31];
  warp->together.arrive_and_wait();
  return found;
}
// Each lane shows some words, and looks at those of all.
template <int kWords, class Look> void show(const unsigned (&own)[kWords], const Look& look) {
  std::memcpy(warp->several[thread.x % 32], own, sizeof(own));
  warp->together.arrive_and_wait();
  look(warp->several);
  warp->together.arrive_and_wait();
}
template <class... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}
template <class... Parameters>
void launch(void (*kernel)(Parameters...), void** arguments, dim3 size, unsigned threads, unsigned bytes) {
  grid = size, size_of_block = {threads, 1, 1};
  std::vector<unsigned char> memory(bytes + 1024);
  shared = memory.data() + (-reinterpret_cast<std::size_t>(memory.data()) & 1023);
  origin = bytes ? shared : &anchor;
  for (unsigned z = 0; z < size.z; ++z)
  for (unsigned y = 0; y < size.y; ++y)
  for (unsigned x = 0; x < size.x; ++x) {
    std::vector<std::unique_ptr<Warp>> warps(threads / 32);
    for (auto& each : warps) each = std::make_unique<Warp>();
    std::memset(shared, 0xff, bytes);
    for (int i = 0; i < 16; ++i) named[i] = std::make_unique<std::barrier<>>(i ? 128 : threads);
    std::vector<std::thread> all;
    for (unsigned t = 0; t < threads; ++t)
      all.emplace_back([&, t] {
        thread = {t, 0, 0}, block = {x, y, z}, warp = warps[t / 32].get();
        call(kernel, arguments, std::index_sequence_for<Parameters...>{});
        warp->together.arrive_and_drop();
      });
    std::atomic<bool> done = false;
    std::thread watch([&] {  // a pipeline that stands still ends the process
      for (int i = 0; i < 3000 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(i < 10 ? 2 : 100));
      if (!done) std::fprintf(stderr, "emulator: CTA %u has not ended in five minutes\n", x), std::abort();
    });
    for (auto& each : all) each.join();
    done = true;
    watch.join();
  }
}
}  // namespace emulator
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid
#define blockDim emulator::size_of_block

namespace emulator {  // what is written in assembly
#ifdef __aarch64__
using half = __fp16;  // older compilers know no other one here
#else
using half = _Float16;
#endif
inline void cvt_f32_f16(float& y, unsigned short x) { y = float(__builtin_bit_cast(half, x)); }
inline void cvt_rn_f16_f32(unsigned short& y, float x) { y = __builtin_bit_cast(unsigned short, half(x)); }
inline void cvt_rn_f16_f64(unsigned short& y, double x) { y = __builtin_bit_cast(unsigned short, half(x)); }
inline void cvt_rn_f16x2_f32(unsigned& y, float high, float low) {
  unsigned short x[2];
  cvt_rn_f16_f32(x[0], low), cvt_rn_f16_f32(x[1], high);
  y = x[0] | unsigned(x[1]) << 16;
}
inline unsigned bf16_of(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void cvt_rn_bf16x2_f32(unsigned& y, float high, float low) { y = bf16_of(low) | bf16_of(high) << 16; }
inline void ex2_approx_ftz_f32(float& y, float x) { y = std::exp2(x); }
inline void low_half(float& y, unsigned x) { cvt_f32_f16(y, x & 0xffff); }
inline void high_half(float& y, unsigned x) { cvt_f32_f16(y, x >> 16); }
inline void shl_b32(float& y, unsigned x) { y = __builtin_bit_cast(float, x << 16); }
inline void and_b32(float& y, unsigned x) { y = __builtin_bit_cast(float, x & 0xffff0000u); }
inline void mov_b32(unsigned& y, unsigned x) { y = x; }
inline void thread_number(unsigned& y) { y = thread.x; }
inline void fma_rn_f16x2(unsigned& sum, unsigned x, unsigned by) {
  float a[2], b[2], c[2];
  low_half(a[0], x), high_half(a[1], x), low_half(b[0], by), high_half(b[1], by), low_half(c[0], sum), high_half(c[1], sum);
  cvt_rn_f16x2_f32(sum, std::fma(a[1], b[1], c[1]), std::fma(a[0], b[0], c[0]));
}
inline void fma_rn_bf16x2(unsigned& sum, unsigned x, unsigned by) {
  float a[2], b[2], c[2];
  shl_b32(a[0], x), and_b32(a[1], x), shl_b32(b[0], by), and_b32(b[1], by), shl_b32(c[0], sum), and_b32(c[1], sum);
  cvt_rn_bf16x2_f32(sum, std::fma(a[1], b[1], c[1]), std::fma(a[0], b[0], c[0]));
}
inline void ld_shared_u16(unsigned short& y, unsigned at) { std::memcpy(&y, shared + at, 2); }
inline void st_shared_u16(unsigned at, unsigned short x) { std::memcpy(shared + at, &x, 2); }
// The nearest number of e4m3, ties to even, 448 for all that is larger.
inline unsigned e4m3_of(float x) {
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return 0x7f | sign;
  const float size = std::fabs(x);
  if (size >= 464.f) return 0x7e | sign;
  int exponent;
  std::frexp(size, &exponent);
  const int power = std::max(exponent - 1, -6);  // of the leading bit
  int steps = int(std::nearbyint(std::ldexp(size, 3 - power)));
  return std::min(0x7eu, unsigned(((power + 6) << 3) + steps)) | sign;
}
inline void pack_fp8(unsigned& y, float a, float b, float c, float d) {
  y = e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
}
}  // namespace emulator

inline void __syncthreads() { emulator::named[0]->arrive_and_wait(); }
inline long clock() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void __nanosleep(unsigned ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }
namespace emulator {
template <class T> T exchange_number(T x, int lane) {
  if constexpr (sizeof(T) < 4) return T(exchange(unsigned(x), lane));
  else if constexpr (sizeof(T) == 8) {
    const auto bits = __builtin_bit_cast(std::size_t, x);
    const std::size_t low = exchange(unsigned(bits), lane), high = exchange(unsigned(bits >> 32), lane);
    return __builtin_bit_cast(T, low | high << 32);
  }
  else return __builtin_bit_cast(T, exchange(__builtin_bit_cast(unsigned, x), lane));
}
inline void read_two(double& x, double& y, const void* from, int wanted) {
  double two[2] = {0, 0};
  if (wanted) std::memcpy(two, from, 16);
  x = two[0], y = two[1];
}

// Copies of a thread to shared memory: nothing is there before it has been waited for.
struct Copy { void* to; const void* from; unsigned bytes, all; };
inline thread_local std::vector<std::vector<Copy>> copies = {{}};
inline void copy_some_if(int wanted, unsigned to, const void* from, unsigned bytes, unsigned all = 16) {
  if (wanted) copies.back().push_back({origin + int(to), from, bytes, all});
}
inline void copy_if(int wanted, unsigned to, const void* from, unsigned bytes = 16) { copy_some_if(wanted, to, from, bytes, bytes); }
inline void commit_copies() { copies.emplace_back(); }
inline void wait_for_copies(std::size_t pending) {
  while (copies.size() > pending + 1) {
    for (const Copy& x : copies.front()) std::memset(x.to, 0, x.all), std::memcpy(x.to, x.from, x.bytes);
    copies.erase(copies.begin());
  }
}
}  // namespace emulator
inline std::size_t __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - emulator::origin; }
template <class T> T __shfl_sync(unsigned, T x, int lane) { return emulator::exchange_number(x, lane); }
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulator::exchange_number(x, int(threadIdx.x % 32) ^ mask);
}
template <class T> T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = int(threadIdx.x % 32);
  return emulator::exchange_number(x, lane >= by ? lane - by : lane);
}
template <class T> T __shfl_down_sync(unsigned, T x, int by) {
  const int lane = int(threadIdx.x % 32);
  return emulator::exchange_number(x, lane + by < 32 ? lane + by : lane);
}
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
inline int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
inline int atomicSub(int* to, int x) { return __atomic_fetch_sub(to, x, __ATOMIC_SEQ_CST); }
inline unsigned atomicOr(unsigned* to, unsigned x) { return __atomic_fetch_or(to, x, __ATOMIC_SEQ_CST); }
template <class T> T atomicMax(T* to, T x) {
  T now = __atomic_load_n(to, __ATOMIC_SEQ_CST);
  while (now < x && !__atomic_compare_exchange_n(to, &now, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return now;
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= emulator::exchange(x, lane) << lane;
  return bits;
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(emulator::exchange(x, lane) == x) << lane;
  return bits;
}
inline unsigned atomicCAS(unsigned* at, unsigned wanted, unsigned x) {
  __atomic_compare_exchange_n(at, &wanted, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return wanted;
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x) != 0; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const std::size_t all = x | std::size_t(y) << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void __syncwarp() { emulator::warp->together.arrive_and_wait(); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline double __hiloint2double(int high, int low) { return __builtin_bit_cast(double, std::size_t(unsigned(high)) << 32 | unsigned(low)); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __double2float_rz(double x) {
  const float y = float(x);
  return std::fabs(double(y)) > std::fabs(x) ? std::nextafter(y, 0.f) : y;
}
using std::fma;
using std::max;
using std::min;
