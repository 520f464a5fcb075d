// Instructions of PTX that our kernels name in assembly, one function each: named as the instruction with "_" for "." and
// "::", operands in its order (emulator.py).
#pragma once

namespace emulator {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

// ------------------------------------------------------------------------------- numbers
RUNTIME float from_f16(u32 x) {
  const u32 sign = (x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
  if (exponent == 0) {
    const float size = float(mantissa) * 0x1p-24f;
    return sign ? -size : size;
  }
  return __builtin_bit_cast(float, sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
RUNTIME float from_bf16(u32 x) { return __builtin_bit_cast(float, x << 16); }
RUNTIME float from_tf32(u32 x) { return __builtin_bit_cast(float, x & 0xffffe000u); }  // low bits are not looked at
RUNTIME float from_e4m3(u32 x) {
  const u32 exponent = x >> 3 & 15, mantissa = x & 7;
  const float size = (x & 0x7f) == 0x7f ? __builtin_nanf("")
                   : exponent ? __builtin_bit_cast(float, (exponent + 120) << 23 | mantissa << 20)
                              : float(mantissa) * 0x1p-9f;
  return x & 0x80 ? -size : size;
}
// The nearest number, ties to even.
RUNTIME u16 to_f16(double x) {
  const unsigned long all = __builtin_bit_cast(unsigned long, x), bits = all & ~(1ul << 63);
  const u16 sign = u16(all >> 63 << 15);
  const double size = __builtin_bit_cast(double, bits);
  if (x != x) return 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 0x1p-14) return sign | u16(__builtin_bit_cast(unsigned long, size + 0x1p28) - 0x41b0000000000000ul);
  return sign | u16(((bits + 0x1fffffffffful + (bits >> 42 & 1)) >> 42) - (1008ul << 10));
}
RUNTIME u32 to_bf16(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// 448 for all that is larger.
RUNTIME u32 to_e4m3(float x) {
  const u32 sign = __builtin_bit_cast(u32, x) >> 31 << 7;
  if (x != x) return 0x7f | sign;
  const float size = __builtin_fabsf(x);
  if (size >= 464.f) return 0x7e | sign;
  if (size < 0x1p-6f) return sign | (__builtin_bit_cast(u32, size + 0x1p14f) - 0x46800000u);
  const u32 bits = __builtin_bit_cast(u32, size);
  return sign | min(0x7eu, ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3));
}
RUNTIME void cvt_f32_f16(float& y, u16 x) { y = from_f16(x); }
RUNTIME void cvt_rn_f16_f32(u16& y, float x) { y = to_f16(x); }
RUNTIME void cvt_rn_f16_f64(u16& y, double x) { y = to_f16(x); }
RUNTIME void cvt_rn_f16x2_f32(u32& y, float high, float low) { y = to_f16(low) | u32(to_f16(high)) << 16; }
RUNTIME void cvt_rn_bf16x2_f32(u32& y, float high, float low) { y = to_bf16(low) | to_bf16(high) << 16; }
RUNTIME void cvt_rn_satfinite_e4m3x2_f32(u16& y, float high, float low) { y = to_e4m3(low) | to_e4m3(high) << 8; }
RUNTIME void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
RUNTIME void rcp_approx_ftz_f32(float& y, float x) { y = 1 / x; }
RUNTIME void shl_b32(float& y, u32 x, int by) { y = __builtin_bit_cast(float, x << by); }
RUNTIME void and_b32(float& y, u32 x, u32 mask) { y = __builtin_bit_cast(float, x & mask); }
RUNTIME void mov_b32(u32& y, u32 x) { y = x; }
RUNTIME void mov_b32(u32& y, u16 low, u16 high) { y = low | u32(high) << 16; }
RUNTIME void mov_b32(u16& low, u16& high, u32 x) { low = u16(x), high = u16(x >> 16); }
RUNTIME void mov_u32(u32& y, u32 x) { y = x; }
RUNTIME void mov_f64(double& y, double x) { y = x; }
RUNTIME void setp_ne_b32(bool& p, u32 x, u32 y) { p = x != y; }
RUNTIME void selp_u32(u32& y, u32 yes, u32 no, bool p) { y = p ? yes : no; }
RUNTIME void fma_rn_f16x2(u32& y, u32 a, u32 b, u32 c) {
  const auto part = [&](int shift) {
    return to_f16(double(from_f16(a >> shift & 0xffff)) * from_f16(b >> shift & 0xffff) + from_f16(c >> shift & 0xffff));
  };
  y = part(0) | u32(part(16)) << 16;
}
RUNTIME void fma_rn_bf16x2(u32& y, u32 a, u32 b, u32 c) {
  const auto part = [&](int shift) {
    return to_bf16(fmaf(from_bf16(a >> shift & 0xffff), from_bf16(b >> shift & 0xffff), from_bf16(c >> shift & 0xffff)));
  };
  y = part(0) | part(16) << 16;
}

// ------------------------------------------------------------------------------- shared memory
template <class T> T* at(u32 address, u32 multiple = sizeof(T)) {
  if (address % multiple) fail("an address of shared memory that is not aligned");
  return reinterpret_cast<T*>(origin + int(address));
}
RUNTIME void ld_shared_u16(u16& y, u32 from) { y = *at<u16>(from); }
RUNTIME void st_shared_u16(u32 to, u16 x) { *at<u16>(to) = x; }
RUNTIME void st_shared_v4_f32(u32 to, float x, float y, float z, float w) {
  float* place = at<float>(to, 16);
  place[0] = x, place[1] = y, place[2] = z, place[3] = w;
}
RUNTIME void ld_shared_v4_f32(float& x, float& y, float& z, float& w, u32 from) {
  const float* place = at<float>(from, 16);
  x = place[0], y = place[1], z = place[2], w = place[3];
}
RUNTIME void ld_shared_v2_b32(u32& x, u32& y, u32 from) { x = *at<u32>(from, 8), y = at<u32>(from)[1]; }
RUNTIME void ld_shared_v4_b32(u32& x, u32& y, u32& z, u32& w, u32 from) {
  const u32* words = at<u32>(from, 16);
  x = words[0], y = words[1], z = words[2], w = words[3];
}
RUNTIME void ld_global_nc_v2_f64(double& x, double& y, const void* from) {
  x = static_cast<const double*>(from)[0], y = static_cast<const double*>(from)[1];
}

// ------------------------------------------------------------------------------- copies of a thread
struct Copy { void* to; const void* from; u32 bytes, all; bool done; };
inline Queue<Copy> copies[kMostThreads];
UNWATCHED RUNTIME void do_copy(const Copy& x) {
  if (!x.done) memset(x.to, 0, x.all), memcpy(x.to, x.from, x.bytes);
  races::end_copy(x.to, x.all, true, now);
}
// At once, while others may still read what was there, or not before it is waited for.
RUNTIME void copy_some(u32 to, const void* from, u32 all, u32 bytes) {
  if (reinterpret_cast<unsigned long>(from) % all) fail("a copy from an address that is not aligned");
  if (bytes > all) fail("a copy of more bytes than it has");
  Copy copy = {at<u8>(to, all), from, bytes, all};
  races::begin_copy(copy.to, all, true, now);
  const bool at_once = random() % 2;
  if (at_once) memset(copy.to, 0, all), memcpy(copy.to, from, bytes), copy.done = true;
  if (!at_once || races::kOn) copies[now].add(copy);
}
RUNTIME void cp_async_cg_shared_global(u32 to, const void* from, u32 all) { copy_some(to, from, all, all); }
RUNTIME void cp_async_cg_shared_global(u32 to, const void* from, u32 all, u32 bytes) { copy_some(to, from, all, bytes); }
RUNTIME void cp_async_cg_shared_global(u32 to, const void* from, u32 all, bool blank) { copy_some(to, from, all, blank ? 0 : all); }
RUNTIME void cp_async_ca_shared_global(u32 to, const void* from, u32 all) { copy_some(to, from, all, all); }
RUNTIME void cp_async_commit_group() { ++copies[now].group; }
RUNTIME void cp_async_wait_group(u32 pending) { copies[now].wait(pending, do_copy); }

// ------------------------------------------------------------------------------- mbarrier
struct Barrier {
  short pending, arrivals;
  u32 phase_and_bytes;  // the lowest bit is the phase
};
static_assert(sizeof(Barrier) == 8, "as the card's");
// Some arrivals, and bytes that are still to come (or have come, if less than 0).
UNWATCHED RUNTIME void change(u32 barrier, int arrivals, int bytes) {
  Barrier& x = *at<Barrier>(barrier, 8);
  x.pending -= arrivals;
  if (x.pending < 0) fail("more arrivals than a barrier expects");
  x.phase_and_bytes += 2 * bytes;
  if (x.pending > 0 || x.phase_and_bytes >> 1) return;
  x.pending = x.arrivals;
  x.phase_and_bytes ^= 1;
  races::complete(barrier);
}
UNWATCHED RUNTIME void mbarrier_init_shared_cta_b64(u32 barrier, int arrivals) {
  races::access(at<Barrier>(barrier, 8), 8, true, __builtin_return_address(0));
  *at<Barrier>(barrier, 8) = {short(arrivals), short(arrivals), 0};
}
RUNTIME void fence_mbarrier_init_release_cluster() {}
// Those who wait may go on before the other lanes of this warp do.
RUNTIME void mbarrier_arrive_shared_cta_b64(u32 barrier) {
  races::access(at<Barrier>(barrier, 8), 8, false, __builtin_return_address(0));  // it was made before
  races::arrive(barrier);
  change(barrier, 1, 0);
  leave();
}
RUNTIME void mbarrier_arrive_expect_tx_shared_cta_b64(u32 barrier, u32 bytes) {
  races::access(at<Barrier>(barrier, 8), 8, false, __builtin_return_address(0));  // it was made before
  races::arrive(barrier);
  change(barrier, 1, int(bytes));
}
// How often lanes and warps have passed each barrier. Lanes that wait together get the same answer: one that comes late
// passes as the others did, whatever has become of the barrier since.
constexpr u32 kBarriers = 256;
inline u16 passed_by[kMostThreads][kBarriers], passed_by_any[kMostThreads / 32][kBarriers];
UNWATCHED RUNTIME void wait_for_phase(u32 barrier, u32 parity) {
  const u32& word = at<Barrier>(barrier, 8)->phase_and_bytes;
  const u16 turn = ++passed_by[now][barrier / 8 % kBarriers];
  u16& of_warp = passed_by_any[now / 32][barrier / 8 % kBarriers];
  if (turn <= of_warp) return;
  wait_while(word, 1, parity & 1, "an mbarrier");
  if (turn <= of_warp) return;
  of_warp = turn;
  for (u32 i = now / 32 * 32; i < now / 32 * 32 + 32; ++i)
    if (fibers[i].watched == &word) fibers[i].watched = nullptr;
}
RUNTIME void mbarrier_try_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) {
  races::access(at<Barrier>(barrier, 8), 8, false, __builtin_return_address(0));
  wait_for_phase(barrier, parity);
  races::acquire(barrier);
  done = true;
}
RUNTIME void mbarrier_test_wait_parity_shared_cta_b64(bool& done, u32 barrier, u32 parity) {
  mbarrier_try_wait_parity_shared_cta_b64(done, barrier, parity);
}
RUNTIME void cp_async_mbarrier_arrive_noinc_shared_cta_b64(u32 barrier) {
  ++copies[now].group;
  copies[now].wait(0, do_copy);
  races::access(at<Barrier>(barrier, 8), 8, false, __builtin_return_address(0));  // it was made before
  races::arrive(barrier);
  change(barrier, 1, 0);
}

// ------------------------------------------------------------------------------- the copy engine
// A tensor map is what emulator.py makes of its arguments.
struct alignas(64) Map {
  u64 pointer;
  u32 item, swizzle;  // bytes of an element and of a row of the swizzle, 0: none
  u32 dims[4], box[4];
  u64 strides[3];
  u32 unused[10];
};
static_assert(sizeof(Map) == 128, "as the card's");
// The 16 bytes at an address lie in another place of its 128, 64 or 32 bytes.
RUNTIME u32 swizzled(u32 address, u32 row) {
  return row == 128 ? address ^ (address >> 7 & 7) << 4 : row == 64 ? address ^ (address >> 7 & 3) << 4
       : row == 32 ? address ^ (address >> 7 & 1) << 4 : address;
}
// A box of a tensor, up to 16 bytes at a time: where they are, where they lie in shared memory, how many are inside.
struct Box { const Map* map; int at[4]; u32 place, barrier; };
template <class Move> u32 walk(const Box& x, const Move& move) {
  const Map& map = *x.map;
  const u32 row = map.box[0] * map.item;
  u32 place = x.place;
  int i[4] = {};
  for (i[3] = 0; i[3] < int(map.box[3]); ++i[3])
  for (i[2] = 0; i[2] < int(map.box[2]); ++i[2])
  for (i[1] = 0; i[1] < int(map.box[1]); ++i[1]) {
    bool inside = true;
    long from = long(map.pointer) + x.at[0] * long(map.item);
    for (int d = 1; d < 4; ++d) {
      const long n = long(x.at[d]) + i[d];
      inside = inside && n >= 0 && n < long(map.dims[d]);
      from += n * long(map.strides[d - 1]);
    }
    const long left = (long(map.dims[0]) - x.at[0]) * long(map.item), before = -x.at[0] * long(map.item);
    for (u32 b = 0; b < row;) {
      const u32 bytes = min(row - b, 16 - place % 16);
      const long first = max(long(b), before) - b, last = min(long(b) + bytes, left) - b;
      const bool any = inside && first < last;
      move(reinterpret_cast<u8*>(from + b), origin + swizzled(place, map.swizzle), bytes, any ? first : 0, any ? last : 0);
      b += bytes, place += bytes;
    }
  }
  return place - x.place;
}
RUNTIME Box box_of(const void* map, int x, int y, int z, int w, u32 place, u32 barrier = 0) {
  const Box box = {static_cast<const Map*>(map), {x, y, z, w}, place, barrier};
  if (reinterpret_cast<unsigned long>(map) % 64) fail("a tensor map that does not lie at a multiple of 64 bytes");
  if (place % 128) fail("a tile that does not lie at a multiple of 128 bytes");
  if (long(x) * box.map->item % 16) fail("a tile that does not start at a multiple of 16 bytes");
  return box;
}
constexpr u32 kMostBoxes = 4096;
inline Box boxes[kMostBoxes];
inline u32 first_box;
RUNTIME void bring(const Box& x) {
  const u32 bytes = walk(x, [](const u8* from, u8* to, u32 bytes, long first, long last) UNWATCHED {
    memset(to, 0, bytes);
    memcpy(to + first, from + first, last - first);
    races::end_copy(to, bytes, true, races::engine_actor());
  });
  races::bytes_came(x.barrier);
  change(x.barrier, 0, -int(bytes));
}
RUNTIME void bring_first() {
  const Box x = boxes[first_box++ % kMostBoxes];
  --engine.pending;
  bring(x);
}
// At once, or some time later.
RUNTIME void ask_for(const Box& x) {
  engine.step = bring_first;
  if constexpr (races::kOn)
    walk(x, [](const u8*, u8* to, u32 bytes, long, long) { races::begin_copy(to, bytes, true, races::engine_actor()); });
  if (engine.pending == kMostBoxes) bring_first();
  if (engine.pending == 0 && random() % 2) return bring(x);
  boxes[(first_box + engine.pending++) % kMostBoxes] = x;
}
RUNTIME void cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(
    u32 to, const void* map, int x, int y, u32 barrier, u64 = 0) {
  ask_for(box_of(map, x, y, 0, 0, to, barrier));
}
RUNTIME void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(
    u32 to, const void* map, int x, int y, int z, int w, u32 barrier, u64 = 0) {
  ask_for(box_of(map, x, y, z, w, to, barrier));
}
// A store reads shared memory when it is waited for, or when its thread ends.
inline Queue<Box> stores[kMostThreads];
RUNTIME void send(const Box& x) {
  walk(x, [](u8* to, const u8* from, u32, long first, long last) UNWATCHED {
    memcpy(to + first, from + first, last - first);
    races::end_copy(from + first, last - first, false, now);
  });
}
RUNTIME void cp_async_bulk_tensor_4d_global_shared_cta_tile_bulk_group(
    const void* map, int x, int y, int z, int w, u32 from, u64 = 0) {
  const Box box = box_of(map, x, y, z, w, from);
  if constexpr (races::kOn)
    walk(box, [](const u8*, const u8* from, u32, long first, long last) {
      races::begin_copy(from + first, last - first, false, now);
    });
  stores[now].add(box);
}
RUNTIME void cp_async_bulk_commit_group() { ++stores[now].group; }
RUNTIME void cp_async_bulk_wait_group_read(u32 pending) { stores[now].wait(pending, send); }
RUNTIME void cp_async_bulk_wait_group(u32 pending) { stores[now].wait(pending, send); }
// Lines of bytes, copied or added at once.
RUNTIME void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || bytes % 16 || reinterpret_cast<unsigned long>(from) % 16) fail("a line that is not aligned to 16 bytes");
  memcpy(at<u8>(to, 16), from, bytes);
  races::bytes_came(barrier);
  change(barrier, 0, -int(bytes));
}
RUNTIME void cp_async_bulk_global_shared_cta_bulk_group(float* to, u32 from, u32 bytes) {
  if (from % 16 || bytes % 16 || reinterpret_cast<unsigned long>(to) % 16) fail("a line that is not aligned to 16 bytes");
  memcpy(to, at<u8>(from, 16), bytes);
}
RUNTIME void cp_reduce_async_bulk_global_shared_cta_bulk_group_add_f32(float* to, u32 from, u32 bytes) {
  if (from % 16 || bytes % 16 || reinterpret_cast<unsigned long>(to) % 16) fail("a line that is not aligned to 16 bytes");
  for (u32 i = 0; i < bytes / 4; ++i) to[i] += at<float>(from, 16)[i];
}
RUNTIME void fence_proxy_async_global() {}
// A thread that asks again and again lets others run.
RUNTIME void ld_acquire_gpu_global_s32(int& x, const int* from) {
  leave();
  races::count(from);
  const races::Atomic atomic;
  x = *from;
}
RUNTIME void red_release_gpu_global_add_s32(int* to, int x) {
  races::count(to);
  const races::Atomic atomic;
  *to += x;
}
RUNTIME void prefetch_tensormap(const void*) {}
RUNTIME void fence_proxy_async_shared_cta() {}
RUNTIME void createpolicy_fractional_L2_evict_first_b64(u64&, double) {}
RUNTIME void createpolicy_fractional_L2_evict_last_b64(u64&, double) {}
RUNTIME void begin_thread(u32 number) {
  copies[number].begin(), stores[number].begin();
  memset(passed_by[number], 0, sizeof(passed_by[number]));
  if (number % 32 == 0) memset(passed_by_any[number / 32], 0, sizeof(passed_by_any[number / 32]));
}
RUNTIME void end_thread() {
  races::end_thread();
  ++stores[now].group;
  stores[now].wait(0, send);
}

// What a CTA consists of, byte by byte: act(place, bytes) for all of it but its shared memory and its stacks.
template <class Act> void for_state(const Act& act) {
  const u32 threads = threads_of_cta, all_warps = threads / 32;
  act(fibers, threads * sizeof(Fiber)), act(warps, all_warps * sizeof(Warp)), act(named, sizeof(named));
  act(copies, threads * sizeof(copies[0])), act(stores, threads * sizeof(stores[0]));
  act(passed_by, threads * sizeof(passed_by[0])), act(passed_by_any, all_warps * sizeof(passed_by_any[0]));
  act(&home, sizeof(home)), act(&now, sizeof(now)), act(&thread, sizeof(thread)), act(&block, sizeof(block));
  act(&noise, sizeof(noise)), act(&cursor, sizeof(cursor)), act(&twist, sizeof(twist));
  act(&slow_lane, sizeof(slow_lane)), act(&slow_warp, sizeof(slow_warp)), act(any_of_all, sizeof(any_of_all));
  act(&shared, sizeof(shared)), act(&origin, sizeof(origin)), act(__start_cta_memory, u32(__stop_cta_memory - __start_cta_memory));
}
inline bool is_overtaken;  // does a CTA wait that has begun?
RUNTIME void others_run() {
  if (races::kOn || is_overtaken || started == ctas || engine.pending || 2 * threads_of_cta > kMostThreads || random() % 4) return;
  unsigned long bytes = 0;
  for_state([&](void*, unsigned long size) { bytes += size; });
  auto* kept = static_cast<u8*>(malloc(bytes));
  u8* place = kept;
  for_state([&](void* x, unsigned long size) { memcpy(place, x, size), place += size; });
  for (u32 i = 0; i < threads_of_cta; ++i) copies[i] = {}, stores[i] = {};
  is_overtaken = true, stacks += threads_of_cta * stack_bytes;
  run_next();
  is_overtaken = false, stacks -= threads_of_cta * stack_bytes;
  for (u32 i = 0; i < threads_of_cta; ++i) free(copies[i].list), free(stores[i].list);
  place = kept;
  for_state([&](void* x, unsigned long size) { memcpy(x, place, size), place += size; });
  free(kept);
}

// ------------------------------------------------------------------------------- warps
RUNTIME void elect_sync(bool& p, u32) {
  own_warp().together.meet("a warp");
  p = thread.x % 32 == 0;
}
// Nothing is read, but a place outside of all arrays is a mistake.
RUNTIME void prefetch_global_L2(const void* from) { (void)*static_cast<const volatile u8*>(from); }
// Kernels run one after the other.
RUNTIME void griddepcontrol_launch_dependents() {}
RUNTIME void griddepcontrol_wait() {}
RUNTIME void setmaxnreg_dec_sync_aligned_u32(int) {}
RUNTIME void setmaxnreg_inc_sync_aligned_u32(int) {}
RUNTIME void bar_sync(u32 id, u32 threads) {
  if (threads % 128 || (named[id].expected != threads && named[id].expected != 128)) fail("a barrier of part of a warpgroup");
  named[id].expected = threads;
  const u32 generation = named[id].generation;
  races::come(named[id], kMostThreads / 32 + id);
  named[id].meet("a warpgroup");
  races::go(kMostThreads / 32 + id, generation);
}
RUNTIME void barrier_sync(u32 id, u32 threads) { bar_sync(id, threads); }
// Lane l names row l % 8 of matrix l / 8. Of each matrix a lane has two neighbours of row l / 4, transposed of column l / 4.
// A lane reads its row when it comes: what others have not written by then is not there.
template <bool kTransposed> void load_matrices(u32& a, u32& b, u32& c, u32& d, u32 from) {
  u32 own[4];
  memcpy(own, at<u8>(from, 16), 16);
  races::access(at<u8>(from), 16, false, __builtin_return_address(0));
  const int lane = thread.x % 32;
  u32* words[] = {&a, &b, &c, &d};
  show(own, [&](const auto& all) {
    for (int m = 0; m < 4; ++m) {
      const auto* rows = all + m * 8;
      const auto element = [&](int row) { return rows[row][lane / 8] >> lane / 4 % 2 * 16 & 0xffff; };
      *words[m] = kTransposed ? element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16 : rows[lane / 4][lane % 4];
    }
  });
}
template <bool kTransposed> void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 own[] = {to}, words[] = {a, b, c, d};
  const int lane = thread.x % 32;
  at<u8>(to, 16);
  show(own, [&](const auto& all) {
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 2; ++i) {
        const int row = kTransposed ? lane % 4 * 2 + i : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
        *at<u16>(all[m * 8 + row][0] + column * 2) = u16(words[m] >> 16 * i);
      }
  });
}
RUNTIME void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 from) {
  load_matrices<false>(a, b, c, d, from);
}
RUNTIME void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u32 from) {
  load_matrices<true>(a, b, c, d, from);
}
RUNTIME void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<false>(to, a, b, c, d);
}
RUNTIME void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  store_matrices<true>(to, a, b, c, d);
}
}  // namespace emulator
