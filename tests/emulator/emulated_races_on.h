// Accesses and their order, as vector clocks (emulated_races.h).
#pragma once

#include <stdint.h>

namespace emulator {
namespace races {
constexpr bool kOn = true;
// Threads, then the products of each warp, which read by themselves until they are waited for, then the copy engine.
constexpr unsigned kMostActors = kMostThreads + kMostThreads / 32 + 1, kPending = ~0u;
using Clock = unsigned[kMostActors];
inline Clock clocks[kMostActors];  // what an actor knows of all: accesses up to that time come before what it does now
inline unsigned actors, cta;       // cta: a number that no other CTA of this process has
inline bool by_products, atomically;

UNWATCHED RUNTIME unsigned engine_actor() { return actors - 1; }
UNWATCHED RUNTIME unsigned products_actor() { return threads_of_cta + now / 32; }
UNWATCHED RUNTIME void look_at_writes();
UNWATCHED RUNTIME void join(unsigned* to, const unsigned* from) {
  for (unsigned i = 0; i < actors; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
}

// ------------------------------------------------------------------------------- what is known of a byte
struct Reader { unsigned actor, clock; bool atomic; const void* code; };
struct Cell {
  unsigned cta, writer, clock;  // the last write: by whom, when
  unsigned short count, room;
  bool atomic;
  Reader* readers;  // since then, but for those that come before a later one
  const void* code;
};
constexpr unsigned kPage = 4096, kPages = 1 << 16;
struct Page { uintptr_t number; Cell* cells; };
inline Page pages[kPages];
UNWATCHED RUNTIME Cell& cell_of(uintptr_t address) {
  static Page* last = pages;
  const uintptr_t number = address / kPage;
  if (last->number != number) {
    unsigned slot = unsigned(number * 0x9e3779b97f4a7c15ul >> 48);
    while (pages[slot].number && pages[slot].number != number) slot = (slot + 1) % kPages;
    last = pages + slot;
    if (!last->number) {
      last->number = number;
      last->cells = static_cast<Cell*>(
          mmap(nullptr, kPage * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      if (last->cells == MAP_FAILED) fail("no memory");
    }
  }
  Cell& cell = last->cells[address % kPage];
  if (cell.cta != cta) cell.cta = cta, cell.writer = kNobody, cell.clock = 0, cell.count = 0, cell.atomic = false;
  return cell;
}

extern "C" char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
UNWATCHED RUNTIME void name(unsigned actor) {
  if (actor < threads_of_cta) fprintf(stderr, "thread %u", actor);
  else if (actor == engine_actor()) fprintf(stderr, "the copy engine");
  else fprintf(stderr, "a product of warp %u", actor - threads_of_cta);
}
[[noreturn]] UNWATCHED RUNTIME void report(uintptr_t address, bool write, unsigned other, bool other_writes,
                                          const void* other_code) {
  const auto* place = reinterpret_cast<const unsigned char*>(address);
  const bool in_shared = place >= shared && place < shared + shared_bytes;
  fprintf(stderr, "emulator: a race: ");
  name(by_products ? products_actor() : now);
  fprintf(stderr, " %s byte %ld of %s, which ", write ? "writes" : "reads",
          in_shared ? long(place - shared) : long(place - __start_cta_memory),
          in_shared ? "shared memory" : place >= __start_cta_memory && place < __stop_cta_memory ? "static shared memory"
                                                                                                 : "global memory");
  name(other);
  fprintf(stderr, " %s\n  code (addr2line -fCie LIBRARY): other %#lx; own, from the inside", other_writes ? "writes" : "reads",
          long(static_cast<const char*>(other_code) - __ehdr_start));
  const auto* frame = static_cast<const uintptr_t*>(__builtin_frame_address(0));
  const auto* top = reinterpret_cast<const uintptr_t*>(stacks + (now + 1) * stack_bytes);
  for (int i = 0; i < 12 && frame && frame + 2 < top && frame + 2 > top - stack_bytes / 8; ++i) {
    fprintf(stderr, " %#lx", long(frame[1] - reinterpret_cast<uintptr_t>(__ehdr_start)));
    frame = reinterpret_cast<const uintptr_t*>(frame[0]);
  }
  fprintf(stderr, "\n");
  fail("a race");
}

// ------------------------------------------------------------------------------- accesses
UNWATCHED RUNTIME bool is_watched(uintptr_t address) {
  const auto* place = reinterpret_cast<const unsigned char*>(address);
  if (place >= __start_cta_memory && place < __stop_cta_memory) return true;
  const auto* library = reinterpret_cast<const unsigned char*>(__ehdr_start);
  return !(place >= library && place < reinterpret_cast<const unsigned char*>(_end)) &&
         !(place >= stacks && place < stacks + kMostThreads * stack_bytes);
}
// Writes after others that nothing orders; they are races if they change a byte.
struct Again { uintptr_t address; unsigned char value; unsigned other; const void* code; };
inline Again again[64];
inline unsigned agains, again_by;
UNWATCHED RUNTIME void look_at_writes() {
  const unsigned count = agains;
  agains = 0;
  for (unsigned i = 0; i < count; ++i)
    if (*reinterpret_cast<const unsigned char*>(again[i].address) != again[i].value)
      report(again[i].address, true, again[i].other, true, again[i].code);
}
// The thread that runs touches some bytes, itself or for another actor. time: of the access, or kPending.
UNWATCHED RUNTIME void touch(const void* from, unsigned long bytes, bool write, unsigned actor, unsigned time, const void* code) {
  const unsigned* known = clocks[now];
  if (write || now != again_by) look_at_writes();  // a statement says what it writes before it says what it reads
  for (uintptr_t address = reinterpret_cast<uintptr_t>(from), end = address + bytes; address < end; ++address) {
    Cell& cell = cell_of(address);
    if (cell.writer != kNobody && cell.clock > known[cell.writer] && !(cell.atomic && atomically)) {
      if (!write || time == kPending || cell.clock == kPending || agains == 64) report(address, write, cell.writer, true, cell.code);
      again[agains++] = {address, *reinterpret_cast<const unsigned char*>(address), cell.writer, cell.code};
      again_by = now;
    }
    if (write) {
      for (unsigned i = 0; i < cell.count; ++i)
        if (cell.readers[i].clock > known[cell.readers[i].actor] && !(cell.readers[i].atomic && atomically))
          report(address, write, cell.readers[i].actor, false, cell.readers[i].code);
      cell.writer = actor, cell.clock = time, cell.atomic = atomically, cell.code = code, cell.count = 0;
      continue;
    }
    unsigned kept = 0;
    for (unsigned i = 0; i < cell.count; ++i)
      if ((cell.readers[i].actor != actor || cell.readers[i].clock == kPending) &&
          cell.readers[i].clock > known[cell.readers[i].actor])
        cell.readers[kept++] = cell.readers[i];
    if (kept == cell.room)
      cell.readers = static_cast<Reader*>(realloc(cell.readers, (cell.room = cell.room * 2 + 2) * sizeof(Reader)));
    cell.readers[kept++] = {actor, time, atomically, code};
    cell.count = kept;
  }
}
UNWATCHED __attribute__((noinline)) RUNTIME void access(const void* from, unsigned long bytes, bool write, const void* code) {
  if (!body || !is_watched(reinterpret_cast<uintptr_t>(from))) return;
  const unsigned actor = by_products ? products_actor() : now;
  touch(from, bytes, write, actor, clocks[actor][actor], code);
}
// A copy that was asked for writes, or reads, from now until it has ended: then it was done at that time of an actor.
UNWATCHED __attribute__((noinline)) RUNTIME void begin_copy(const void* at, unsigned long bytes, bool write, unsigned actor) {
  touch(at, bytes, write, actor, kPending, __builtin_return_address(0));
}
UNWATCHED RUNTIME void end_copy(const void* at, unsigned long bytes, bool write, unsigned actor) {
  const auto first = reinterpret_cast<uintptr_t>(at);
  for (uintptr_t address = first; address < first + bytes; ++address) {
    Cell& cell = cell_of(address);
    if (write && cell.writer == actor && cell.clock == kPending) cell.clock = clocks[actor][actor];
    for (unsigned i = 0; !write && i < cell.count; ++i)
      if (cell.readers[i].actor == actor && cell.readers[i].clock == kPending) cell.readers[i].clock = clocks[actor][actor];
  }
}
// While it lives: what is read is read by the products of a warp; accesses are atomic.
struct Products {
  UNWATCHED Products() { by_products = true; }
  UNWATCHED ~Products() { by_products = false; }
};
struct Atomic {
  UNWATCHED Atomic() { atomically = true; }
  UNWATCHED ~Atomic() { atomically = false; }
};

// The compiler does not call anything before a structure that a function returns is written to memory. It does for this.
template <class T> UNWATCHED const T& plain(const T& x) { return x; }
// What a lane reads that nobody looks at, unless it is lane 0.
template <class T> UNWATCHED T of_lane_0(const T& x) {
  if (now % 32 == 0) access(&x, sizeof(T), false, __builtin_return_address(0));
  return x;
}

// ------------------------------------------------------------------------------- order
// Of meetings, of warps and then the named ones, in turn: nobody is still in the last but one.
inline Clock met[kMostThreads / 32 + 16][2];
// Of shuffles and the like, and what a lane has heard in the last of them.
inline Clock told[kMostThreads / 32][2], heard[kMostThreads];
inline Clock counted[64];  // of places of atomic additions, some together
// Of mbarriers: all that has arrived, and what had when the last phase ended.
inline Clock arrived[256], completed[256];

UNWATCHED RUNTIME void begin() {
  agains = 0;
  ++cta, actors = threads_of_cta + threads_of_cta / 32 + 1, by_products = atomically = false;
  for (unsigned i = 0; i < actors; ++i) {
    memset(clocks[i], 0, actors * sizeof(unsigned));
    clocks[i][i] = 1;
  }
  memset(heard, 0, threads_of_cta * sizeof(Clock)), memset(counted, 0, sizeof(counted));
  memset(arrived, 0, sizeof(arrived)), memset(completed, 0, sizeof(completed));
}
template <class M> UNWATCHED void come(M& meeting, unsigned which) {
  look_at_writes();
  unsigned* all = met[which][meeting.generation & 1];
  if (meeting.arrived == 0) memset(all, 0, actors * sizeof(unsigned));
  join(all, clocks[now]);
  ++clocks[now][now];
}
UNWATCHED RUNTIME void go(unsigned which, unsigned generation) { join(clocks[now], met[which][generation & 1]); }
template <class M> UNWATCHED void show(M& meeting) {
  look_at_writes();
  unsigned* all = told[now / 32][meeting.generation & 1];
  if (meeting.arrived == 0) memset(all, 0, actors * sizeof(unsigned));
  join(all, clocks[now]);
  ++clocks[now][now];
}
UNWATCHED RUNTIME void look(unsigned generation) {
  memcpy(heard[now], told[now / 32][generation & 1], actors * sizeof(unsigned));
}
UNWATCHED RUNTIME void end_thread() { look_at_writes(); }
UNWATCHED RUNTIME void fence() { join(clocks[now], heard[now]); }
UNWATCHED RUNTIME void count(const void* at) {
  unsigned* known = counted[reinterpret_cast<uintptr_t>(at) / 4 % 64];
  join(clocks[now], known);
  join(known, clocks[now]);
  ++clocks[now][now];
}
UNWATCHED RUNTIME void arrive(unsigned barrier) {
  look_at_writes();
  join(arrived[barrier / 8 % 256], clocks[now]);
  ++clocks[now][now];
}
UNWATCHED RUNTIME void complete(unsigned barrier) {
  memcpy(completed[barrier / 8 % 256], arrived[barrier / 8 % 256], actors * sizeof(unsigned));
}
UNWATCHED RUNTIME void acquire(unsigned barrier) { join(clocks[now], completed[barrier / 8 % 256]); }
// The copy engine's bytes have come.
UNWATCHED RUNTIME void bytes_came(unsigned barrier) {
  const unsigned engine = engine_actor();
  arrived[barrier / 8 % 256][engine] = clocks[engine][engine]++;
}
// The time of a warp's products is the number of groups, and 1.
UNWATCHED RUNTIME void commit_products() { ++clocks[products_actor()][products_actor()]; }
UNWATCHED RUNTIME void wait_products(unsigned pending) {
  const unsigned actor = products_actor(), done = clocks[actor][actor] - 1;
  if (done > pending && clocks[now][actor] < done - pending) clocks[now][actor] = done - pending;
}
}  // namespace races
}  // namespace emulator

extern "C" {
UNWATCHED RUNTIME void __tsan_init() {}
UNWATCHED RUNTIME void __tsan_func_entry(void*) {}
UNWATCHED RUNTIME void __tsan_func_exit() {}
UNWATCHED RUNTIME void __tsan_vptr_update(void*, void*) {}
#define EMULATED_ACCESS(name, bytes, write) \
  UNWATCHED RUNTIME void __tsan_##name(void* at) { \
    emulator::races::access(at, bytes, write, __builtin_return_address(0)); \
  } \
  UNWATCHED RUNTIME void __tsan_volatile_##name(void* at) { /* as relaxed atomics are */ \
    const emulator::races::Atomic atomic; \
    emulator::races::access(at, bytes, write, __builtin_return_address(0)); \
  }
#define EMULATED_ACCESSES(bytes) \
  EMULATED_ACCESS(read##bytes, bytes, false) EMULATED_ACCESS(write##bytes, bytes, true) \
  EMULATED_ACCESS(unaligned_read##bytes, bytes, false) EMULATED_ACCESS(unaligned_write##bytes, bytes, true)
EMULATED_ACCESSES(1) EMULATED_ACCESSES(2) EMULATED_ACCESSES(4) EMULATED_ACCESSES(8) EMULATED_ACCESSES(16)
UNWATCHED RUNTIME void __tsan_read_range(void* at, unsigned long bytes) {
  emulator::races::access(at, bytes, false, __builtin_return_address(0));
}
UNWATCHED RUNTIME void __tsan_write_range(void* at, unsigned long bytes) {
  emulator::races::access(at, bytes, true, __builtin_return_address(0));
}
}
