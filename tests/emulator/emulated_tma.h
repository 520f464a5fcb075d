// What cuda/ptx/tma.cuh wraps, on the CPU: barriers that count arrivals and bytes, copies that are done at once, and the moves
// of 8 x 8 matrices. A tensor map is what tests/emulator/emulator.py makes of its arguments.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "ptx/shared.cuh"

struct alignas(64) TensorMap {
  u64 pointer;
  u32 item, swizzle;  // bytes of an element and of a row of the swizzle, 0: none
  u32 dims[4], box[4];
  u64 strides[3];
  u32 unused[10];
};
static_assert(sizeof(TensorMap) == 128, "as the card's");

namespace emulator {
[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (CTA %u, thread %u)\n", what, block.x, thread.x);
  std::abort();
}
// The 16 bytes at an address lie in another place of its 128, 64 or 32 bytes.
inline u32 swizzled(u32 address, u32 row) {
  return row == 128 ? address ^ (address >> 7 & 7) << 4 : row == 64 ? address ^ (address >> 7 & 3) << 4
       : row == 32 ? address ^ (address >> 7 & 1) << 4 : address;
}
struct Barrier {
  short pending, arrivals;
  int phase_and_bytes;  // the lowest bit is the phase
  int bytes() const { return phase_and_bytes >> 1; }
};
static_assert(sizeof(Barrier) == 8, "as the card's");
inline std::mutex barriers;
// Some arrivals and bytes that are still to come (or have come, if less than 0).
inline void change(u32 at, int arrivals, int bytes) {
  std::lock_guard<std::mutex> alone(barriers);
  Barrier& x = *reinterpret_cast<Barrier*>(shared + at);
  std::atomic_ref<int> state(x.phase_and_bytes);
  x.pending -= arrivals;
  if (x.pending < 0) fail("more arrivals than a barrier expects");
  state.fetch_add(2 * bytes);
  if (x.pending > 0 || x.bytes() != 0) return;
  x.pending = x.arrivals;
  state.fetch_xor(1);
  state.notify_all();
}
// A box of a tensor, element by element: where it is (or null, outside) and where it lies in shared memory.
template <class Move> void walk(const TensorMap& map, const int (&at)[4], u32 to, const Move& move) {
  if (to % 128) fail("a tile that does not lie at a multiple of 128 bytes");
  if (i64(at[0]) * map.item % 16) fail("a tile that does not start at a multiple of 16 bytes");
  u32 place = to;
  int i[4];
  for (i[3] = 0; i[3] < int(map.box[3]); ++i[3])
  for (i[2] = 0; i[2] < int(map.box[2]); ++i[2])
  for (i[1] = 0; i[1] < int(map.box[1]); ++i[1])
  for (i[0] = 0; i[0] < int(map.box[0]); ++i[0], place += map.item) {
    bool inside = true;
    u64 from = map.pointer;
    for (int d = 0; d < 4; ++d) {
      const i64 x = i64(at[d]) + i[d];
      inside = inside && x >= 0 && x < i64(map.dims[d]);
      from += u64(x) * (d ? map.strides[d - 1] : map.item);
    }
    move(inside ? reinterpret_cast<u8*>(from) : nullptr, shared + swizzled(place, map.swizzle));
  }
}
inline void copy(u32 to, const TensorMap& map, int x, int y, int z, int w, u32 barrier) {
  int bytes = 0;
  walk(map, {x, y, z, w}, to, [&](const u8* from, u8* into) {
    if (from) std::memcpy(into, from, map.item);
    else std::memset(into, 0, map.item);
    bytes += map.item;
  });
  change(barrier, 0, -bytes);
}
}  // namespace emulator

inline void barrier_init(u32 barrier, int arrivals) {
  *reinterpret_cast<emulator::Barrier*>(emulator::shared + barrier) = {short(arrivals), short(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(u32 barrier) { emulator::change(barrier, 1, 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { emulator::change(barrier, 1, int(bytes)); }
inline void barrier_wait(u32 barrier, u32 parity) {
  std::atomic_ref<int> state(reinterpret_cast<emulator::Barrier*>(emulator::shared + barrier)->phase_and_bytes);
  for (int now = state.load(); (now & 1) == int(parity); now = state.load()) state.wait(now);
}
inline u64 evict_first() { return 0; }
inline u64 evict_last() { return 0; }
inline void copy_tile(u32 to, const TensorMap* map, int x, int y, u32 barrier, u64) {
  emulator::copy(to, *map, x, y, 0, 0, barrier);
}
inline void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 barrier, u64) {
  emulator::copy(to, *map, x, y, z, w, barrier);
}
inline void copy_tile(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 barrier) {
  emulator::copy(to, *map, x, y, z, w, barrier);
}
inline void store_tile(const TensorMap* map, int x, int y, int z, int w, u32 from) {
  emulator::walk(*map, {x, y, z, w}, from, [&](u8* to, const u8* out) {
    if (to) std::memcpy(to, out, map->item);
  });
}
inline void store_tile(const TensorMap* map, int x, int y, int z, int w, u32 from, u64) {
  store_tile(map, x, y, z, w, from);
}
inline void store_commit() {}
template <int kPending> void store_wait_read() {}
inline void store_wait() {}
inline void prefetch_map(const TensorMap*) {}
inline void copy_16(u32 to, const void* from) { std::memcpy(emulator::shared + to, from, 16); }
inline void copies_arrive(u32 barrier) { emulator::change(barrier, 1, 0); }
inline void proxy_fence() {}
inline bool is_elected() { return threadIdx.x % 32 == 0; }
template <int kRegisters> void fewer_registers() {}
template <int kRegisters> void more_registers() {}
inline void warpgroup_sync(int id) { emulator::named[id]->arrive_and_wait(); }

// Lane l names row l % 8 of matrix l / 8. Of each matrix a lane has two neighbours of row l / 4, transposed of column l / 4.
template <bool kTranspose> void load_matrix_x4(u32 (&x)[4], u32 from) {
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 4; ++m) {
    u16 pair[2];
    for (int i = 0; i < 2; ++i) {
      const int row = kTranspose ? lane % 4 * 2 + i : lane / 4, column = kTranspose ? lane / 4 : lane % 4 * 2 + i;
      const u32 at = emulator::exchange(from, m * 8 + row);
      std::memcpy(pair + i, emulator::shared + at + column * 2, 2);
    }
    x[m] = pair[0] | u32(pair[1]) << 16;
  }
}
template <bool kTranspose> void store_matrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32;
  const u32 words[4] = {a, b, c, d};
  for (int m = 0; m < 4; ++m)
    for (int i = 0; i < 2; ++i) {
      const int row = kTranspose ? lane % 4 * 2 + i : lane / 4, column = kTranspose ? lane / 4 : lane % 4 * 2 + i;
      const u32 at = emulator::exchange(to, m * 8 + row);
      const u16 half = u16(words[m] >> 16 * i);
      std::memcpy(emulator::shared + at + column * 2, &half, 2);
    }
}
