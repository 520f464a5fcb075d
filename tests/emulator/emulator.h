// As much of CUDA as our kernels need, on the CPU. The threads of a CTA are fibers of one thread of the machine: one runs
// until it has to wait for others, then another one that need not wait. CTAs run one after the other, but for some that
// run while another one has come to an atomic operation. Which lane and which warp comes next, and what shared memory holds at first, follow from a seed. If all wait, the process ends and says so.
// Assembly becomes calls of the functions in emulated_ptx.h (emulator.py). Few headers: they are read each time.
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

// What kernels call is compiled once, with optimization (emulated_runtime.cpp), and linked to each of them. Kernels, and the
// templates that are made for them, are compiled as they are: the least time in all.
#ifdef EMULATED_RUNTIME
#define RUNTIME inline __attribute__((used))
#else
#define RUNTIME inline __attribute__((gnu_inline))  // not compiled here, and not inlined without optimization
#endif
#define __device__
#define __shared__ static __attribute__((section("cta_memory")))
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#ifdef EMULATED_RACES
#define UNWATCHED __attribute__((no_sanitize_thread))  // its accesses are not those of a kernel
#else
#define UNWATCHED
#endif
#define __CUDA_ARCH__ 890  // Hopper's product of 16 x 8 x 8 float64 is not emulated

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
RUNTIME uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
RUNTIME float2 make_float2(float x, float y) { return {x, y}; }
RUNTIME float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern "C" {  // of the machine's library
float fmaf(float, float, float) noexcept;
float exp2f(float) noexcept;
float log2f(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float nextafterf(float, float) noexcept;
double fma(double, double, double) noexcept;
double exp2(double) noexcept;
double log2(double) noexcept;
double tanh(double) noexcept;
float tanhf(float) noexcept;
double sqrt(double) noexcept;
float sqrtf(float) noexcept;
extern unsigned char __start_cta_memory[] __attribute__((weak)), __stop_cta_memory[] __attribute__((weak));
}
template <class T> inline T max(T x, T y) { return x < y ? y : x; }
template <class T> inline T min(T x, T y) { return y < x ? y : x; }

namespace emulator {
constexpr unsigned kMostThreads = 1024, kNobody = ~0u;

// ------------------------------------------------------------------------------- fibers
struct Fiber {
  jmp_buf place;            // where it goes on
  bool started, done;
  const unsigned* watched;  // it waits as long as these bits of a word have that value; null: it does not wait
  unsigned mask, value;
  const char* what;         // it waits for
};
inline Fiber fibers[kMostThreads];
inline unsigned threads_of_cta, now;  // fibers, and the one that runs
inline jmp_buf home;
inline dim3 thread, block, grid, size_of_block;
inline unsigned long seed, noise;
inline void (*body)();
inline unsigned char* stacks;
inline unsigned long stack_bytes;

RUNTIME unsigned random() {
  noise ^= noise << 13, noise ^= noise >> 7, noise ^= noise << 17;
  return unsigned(noise >> 32);
}
[[noreturn]] RUNTIME void fail(const char* what) {
  fprintf(stderr, "emulator: %s (CTA %u, %u, %u, thread %u; seed %lu)\n", what, block.x, block.y, block.z, now, seed);
  abort();
}
UNWATCHED RUNTIME bool is_ready(const Fiber& x) { return !x.done && (!x.watched || (*x.watched & x.mask) != x.value); }

// Copies of the copy engine that are still under way; they are done in order, some time.
struct Engine { void (*step)(); unsigned pending; };
inline Engine engine;

[[noreturn]] RUNTIME void stand_still() {
  fprintf(stderr, "emulator: all threads of CTA %u, %u, %u wait (seed %lu):\n", block.x, block.y, block.z, seed);
  for (unsigned first = 0; first < threads_of_cta;) {
    const auto same = [&](unsigned i) {
      const Fiber &x = fibers[first], &y = fibers[i];
      return x.done == y.done && (x.done || (x.watched == y.watched && x.what == y.what));
    };
    unsigned last = first;
    while (last + 1 < threads_of_cta && same(last + 1)) ++last;
    fprintf(stderr, "  threads %u to %u: %s\n", first, last, fibers[first].done ? "have ended" : fibers[first].what);
    first = last + 1;
  }
  abort();
}
// The next fiber: mostly of the same warp as long as one of it is ready, lane by lane in an order that changes. Now and
// then others overtake the lanes that are left. In many CTAs one lane of every warp, or of one of them, goes on only when
// no other can, so that what it must not read late, or must write in time, is found.
inline unsigned cursor, twist, slow_lane, slow_warp;
RUNTIME unsigned next_fiber() {
  const unsigned warps = threads_of_cta / 32, chance = random();
  if (engine.pending && chance % 4 == 0) engine.step();
  while (true) {
    for (unsigned slow = slow_lane;; slow = 32) {  // 32: no lane
      unsigned warp = chance / 4 % 8 == 0 ? chance / 32 % warps : now / 32;
      for (unsigned w = 0; w <= warps; ++w) {
        for (unsigned i = 0; i < 32; ++i) {
          const unsigned lane = (cursor++ ^ twist) & 31;
          if (lane == slow && (warp == slow_warp || slow_warp >= warps)) continue;
          if (is_ready(fibers[warp * 32 + lane])) return warp * 32 + lane;
        }
        if (w == 0) warp = random() % warps, twist = random();
        else warp = warp + 1 == warps ? 0 : warp + 1;
      }
      if (slow == 32) break;
    }
    bool all_done = true;
    for (unsigned i = 0; i < threads_of_cta; ++i) all_done = all_done && fibers[i].done;
    if (!engine.pending) {
      if (all_done) return kNobody;
      stand_still();
    }
    engine.step();
  }
}
RUNTIME void enter();
[[noreturn]] RUNTIME void run(unsigned next) {
  if (next == kNobody) _longjmp(home, 1);
  now = next, thread.x = next;
  if (fibers[next].started) _longjmp(fibers[next].place, 1);
  fibers[next].started = true;
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks + next * stack_bytes + 4096;  // above a page that nobody may touch
  fresh.uc_stack.ss_size = stack_bytes - 4096;
  fresh.uc_link = nullptr;
  makecontext(&fresh, enter, 0);
  setcontext(&fresh);
  abort();
}
// Others run until this fiber is ready; a jump of setjmp makes no call of the system, swapcontext makes one.
__attribute__((noinline)) RUNTIME void leave() {
  const unsigned next = next_fiber();
  if (next == now) return;
  if (!_setjmp(fibers[now].place)) run(next);
}
UNWATCHED RUNTIME void wait_while(const unsigned& at, unsigned mask, unsigned value, const char* what) {
  if ((at & mask) != value) return;
  Fiber& mine = fibers[now];
  mine.watched = &at, mine.mask = mask, mine.value = value, mine.what = what;
  leave();
  fibers[now].watched = nullptr;
}
// Where some threads meet. The last one to come does something for all.
struct Meeting {
  unsigned expected, arrived, generation;
  template <class Act> void meet(const char* what, const Act& act) {
    const unsigned before = generation;
    if (++arrived == expected) act(), arrived = 0, ++generation;
    else wait_while(generation, ~0u, before, what);
  }
  void meet(const char* what) {
    meet(what, [] {});
  }
  void drop() {
    if (--expected && arrived == expected) arrived = 0, ++generation;
  }
};

// ------------------------------------------------------------------------------- what threads share
constexpr int kShown = 24;
struct Warp {
  Meeting together;
  unsigned shown[2][32][kShown];
  float columns[256 * 32];  // the second operand of a product of a warpgroup
};
inline Warp warps[kMostThreads / 32];
RUNTIME Warp& own_warp() { return warps[now / 32]; }
inline Meeting named[16];                // 0: all threads; others: a warpgroup
inline unsigned any_of_all[2];           // of __syncthreads_or
inline unsigned char* shared;            // of the CTA that runs
inline unsigned shared_bytes;
inline unsigned char anchor, *origin;    // where addresses of shared memory are counted from

}  // namespace emulator
#include "emulated_races.h"
namespace emulator {

// Each lane shows some words, and looks at those of all. Nobody can show for the second time after this before all have
// looked, so that two places in turn are enough.
template <int kWords, class Look> void show(const unsigned (&own)[kWords], const Look& look) {
  static_assert(kWords <= kShown, "room");
  Warp& warp = own_warp();
  const unsigned generation = warp.together.generation;
  auto& all = warp.shown[generation & 1];
  races::show(warp.together);
  memcpy(all[thread.x % 32], own, sizeof(own));
  warp.together.meet("a warp");
  races::look(generation);
  look(all);
}
RUNTIME unsigned exchange(unsigned word, int lane) {
  unsigned found;
  show({word}, [&](const auto& all) { found = all[lane & 31][0]; });
  return found;
}

// What a thread has asked for, in groups: it is done when it is waited for.
template <class T> struct Queue {
  struct Entry { T what; unsigned group; };
  Entry* list;
  unsigned first, last, room, group;
  void begin() { first = last = group = 0; }
  UNWATCHED void add(const T& what) {
    if (last == room) list = static_cast<Entry*>(realloc(list, (room = room * 2 + 16) * sizeof(Entry)));
    list[last++] = {what, group};
  }
  // All but the last `pending` groups.
  template <class Do> UNWATCHED void wait(unsigned pending, const Do& act) {
    while (first < last && list[first].group + pending < group) act(list[first++].what);
    if (first == last) first = last = 0;
  }
};
RUNTIME void begin_thread(unsigned number);
RUNTIME void end_thread();
RUNTIME void others_run();  // perhaps, when a thread has counted something in global memory

// ------------------------------------------------------------------------------- a launch
RUNTIME void enter() {
  body();
  end_thread();
  own_warp().together.drop();
  fibers[now].done = true;
  run(next_fiber());
}
template <int... I> struct Indices {};
template <int n, int... I> struct Count : Count<n - 1, n - 1, I...> {};
template <int... I> struct Count<0, I...> { using Type = Indices<I...>; };
template <class T> struct Pointee { using Type = T; };
template <class T> struct Pointee<T&> { using Type = T; };
template <class... Parameters, int... I>
void call(void (*kernel)(Parameters...), void** arguments, Indices<I...>) {
  kernel(*static_cast<typename Pointee<Parameters>::Type*>(arguments[I])...);
}
UNWATCHED RUNTIME void fill(unsigned char* first, unsigned char* last) {
  for (; first + 4 <= last; first += 4) {
    const unsigned word = random();
    memcpy(first, &word, 4);
  }
  while (first < last) *first++ = random();
}
RUNTIME void run_cta(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].started = fibers[i].done = false, fibers[i].watched = nullptr;
    begin_thread(i);
  }
  for (unsigned i = 0; i < threads / 32; ++i) warps[i].together = {32, 0, 0};
  for (int i = 0; i < 16; ++i) named[i] = {i ? 128 : threads, 0, 0};
  threads_of_cta = threads, now = cursor = 0, twist = random(), any_of_all[0] = any_of_all[1] = 0;
  races::begin();
  const unsigned chance = random() % 48;
  slow_lane = chance < 32 ? chance : chance < 40 ? 0 : 32, slow_warp = random() % (threads / 32 + threads / 128 + 1);
  if (!_setjmp(home)) run(next_fiber());
}
inline unsigned long started, ctas;  // of a launch
RUNTIME void run_next() {
  const unsigned long number = started++;
  block = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  noise = (seed + 1) * 0x9e3779b97f4a7c15ul ^ (block.x + 1) * 0xbf58476d1ce4e5b9ul ^ (block.y + 77 * block.z) * 0x94d049bb133111ebul;
  noise += !noise;
  // Shared memory, then up to 1024 bytes that stay as they are, then a page that nobody may touch.
  constexpr unsigned kPage = 65536;
  const unsigned used = (shared_bytes + 1023) / 1024 * 1024, mapped = (used + kPage - 1) / kPage * kPage;
  auto* room = static_cast<unsigned char*>(
      mmap(nullptr, mapped + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (room == MAP_FAILED || mprotect(room + mapped, kPage, PROT_NONE)) fail("no memory");
  shared = room + mapped - used;
  origin = shared_bytes ? shared : &anchor;
  fill(shared, room + mapped);
  fill(__start_cta_memory, __stop_cta_memory);
  unsigned char after[1024];
  memcpy(after, shared + shared_bytes, used - shared_bytes);
  run_cta(size_of_block.x);
  if (memcmp(after, shared + shared_bytes, used - shared_bytes)) fail("a write beyond the end of shared memory");
  munmap(room, mapped + kPage);
}
template <class... Parameters>
void launch(void (*kernel)(Parameters...), void** arguments, dim3 size, unsigned threads, unsigned bytes,
            unsigned char* of_stacks, unsigned long bytes_of_stack, unsigned long of_seed) {
  static void (*the_kernel)(Parameters...);
  static void** the_arguments;
  the_kernel = kernel, the_arguments = arguments;
  body = [] { call(the_kernel, the_arguments, typename Count<sizeof...(Parameters)>::Type{}); };
  grid = size, size_of_block = {threads, 1, 1}, thread = {};
  stacks = of_stacks, stack_bytes = bytes_of_stack, seed = of_seed;
  if (threads % 32 || threads > kMostThreads) fail("a number of threads that is not emulated");
  started = 0, ctas = (unsigned long)(size.x) * size.y * size.z, shared_bytes = bytes;
  while (started < ctas) run_next();
}
}  // namespace emulator
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid
#define blockDim emulator::size_of_block

// ------------------------------------------------------------------------------- functions of CUDA
RUNTIME int __syncthreads_or(int x) {
  emulator::Meeting& all = emulator::named[0];
  unsigned& any = emulator::any_of_all[all.generation & 1];  // the other one was read by all before the last one is here
  any |= x != 0;
  const unsigned generation = all.generation;
  emulator::races::come(all, emulator::kMostThreads / 32);
  all.meet("__syncthreads", [&] { emulator::any_of_all[~all.generation & 1] = 0; });
  emulator::races::go(emulator::kMostThreads / 32, generation);
  return any != 0;
}
RUNTIME void __syncthreads() { __syncthreads_or(0); }
RUNTIME void __syncwarp() {
  emulator::Meeting& warp = emulator::own_warp().together;
  const unsigned generation = warp.generation;
  emulator::races::come(warp, emulator::now / 32);
  warp.meet("a warp");
  emulator::races::go(emulator::now / 32, generation);
}
RUNTIME long clock() { return emulator::random(); }
RUNTIME void __nanosleep(unsigned) { emulator::leave(); }
namespace emulator {
RUNTIME void want_all(unsigned lanes) {
  if (lanes != ~0u) fail("a shuffle or a vote without some lanes of a warp");
}
template <int kWords> void exchange_words(unsigned* words, int lane) {
  unsigned own[kWords];
  memcpy(own, words, sizeof(own));
  show(own, [&](const auto& all) { memcpy(words, all[lane & 31], sizeof(own)); });
}
RUNTIME void exchange(unsigned* words, int count, int lane) {
  if (count == 1) exchange_words<1>(words, lane);
  else if (count == 2) exchange_words<2>(words, lane);
  else if (count == 4) exchange_words<4>(words, lane);
  else fail("a shuffle of a number that has neither 4, 8 nor 16 bytes");
}
template <class T> T exchange_number(T x, int lane) {
  if constexpr (sizeof(T) < 4) return T(exchange(unsigned(x), lane));
  else {
    unsigned words[sizeof(T) / 4];
    memcpy(words, &x, sizeof(T));
    exchange(words, sizeof(T) / 4, lane);
    memcpy(&x, words, sizeof(T));
    return x;
  }
}
}  // namespace emulator
template <class T> T __shfl_sync(unsigned lanes, T x, int lane) {
  emulator::want_all(lanes);
  return emulator::exchange_number(x, lane);
}
template <class T> T __shfl_xor_sync(unsigned lanes, T x, int mask) {
  emulator::want_all(lanes);
  return emulator::exchange_number(x, int(threadIdx.x % 32) ^ mask);
}
RUNTIME unsigned __reduce_add_sync(unsigned lanes, unsigned x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(lanes, x, i);
  return x;
}
template <class T> T __shfl_up_sync(unsigned lanes, T x, int by) {
  emulator::want_all(lanes);
  const int lane = int(threadIdx.x % 32);
  return emulator::exchange_number(x, lane >= by ? lane - by : lane);
}
template <class T> T __shfl_down_sync(unsigned lanes, T x, int by) {
  emulator::want_all(lanes);
  const int lane = int(threadIdx.x % 32);
  return emulator::exchange_number(x, lane + by < 32 ? lane + by : lane);
}
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> T atomicAdd(T* to, T x) {
  T old;
  emulator::races::count(to);
  {
    const emulator::races::Atomic atomic;
    old = *to;
    *to = old + x;
  }
  const auto* at = reinterpret_cast<unsigned char*>(to);
  const auto within = [&](const unsigned char* first, const unsigned char* last) { return at >= first && at < last; };
  if (!within(__start_cta_memory, __stop_cta_memory) && !within(emulator::shared, emulator::shared + emulator::shared_bytes))
    emulator::others_run();
  return old;
}
RUNTIME int atomicSub(int* to, int x) { return atomicAdd(to, -x); }
RUNTIME unsigned atomicOr(unsigned* to, unsigned x) {
  const emulator::races::Atomic atomic;
  const unsigned old = *to;
  return *to = old | x, old;
}
template <class T> T atomicMax(T* to, T x) {
  const emulator::races::Atomic atomic;
  const T old = *to;
  return *to = max(old, x), old;
}
RUNTIME unsigned atomicCAS(unsigned* at, unsigned wanted, unsigned x) {
  const emulator::races::Atomic atomic;
  const unsigned old = *at;
  if (old == wanted) *at = x;
  return old;
}
RUNTIME void __threadfence() { emulator::races::fence(); }
RUNTIME unsigned __ballot_sync(unsigned lanes, bool x) {
  emulator::want_all(lanes);
  unsigned bits = 0;
  emulator::show({unsigned(x)}, [&](const auto& all) {
    for (int lane = 0; lane < 32; ++lane) bits |= all[lane][0] << lane;
  });
  return bits;
}
RUNTIME unsigned __match_any_sync(unsigned lanes, unsigned x) {
  emulator::want_all(lanes);
  unsigned bits = 0;
  emulator::show({x}, [&](const auto& all) {
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane][0] == x) << lane;
  });
  return bits;
}
RUNTIME bool __any_sync(unsigned lanes, bool x) { return __ballot_sync(lanes, x) != 0; }
RUNTIME unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const unsigned long all = x | (unsigned long)(y) << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
RUNTIME int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
RUNTIME int __popc(unsigned x) { return __builtin_popcount(x); }
RUNTIME int __ffs(int x) { return __builtin_ffs(x); }
RUNTIME float __log2f(float x) { return log2f(x); }
RUNTIME float __fdividef(float x, float y) { return x / y; }
RUNTIME float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
RUNTIME unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
RUNTIME float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
RUNTIME double __hiloint2double(int high, int low) {
  return __builtin_bit_cast(double, (unsigned long)(unsigned(high)) << 32 | unsigned(low));
}
RUNTIME float __double2float_rz(double x) {
  const float y = float(x);
  return __builtin_fabs(double(y)) > __builtin_fabs(x) ? nextafterf(y, 0.f) : y;
}
RUNTIME float __fmul_rz(float x, float y) { return __double2float_rz(double(x) * y); }
RUNTIME float log2(float x) { return log2f(x); }
RUNTIME float exp2(float x) { return exp2f(x); }
RUNTIME unsigned long __cvta_generic_to_shared(const void* p) { return static_cast<const unsigned char*>(p) - emulator::origin; }

#include "emulated_ptx.h"
#include "emulated_products.h"
