// Races between the threads of a CTA. Kernels that are compiled with EMULATED_RACES and -fsanitize=thread call functions of
// emulated_races_on.h before each access; there is no other runtime of that sanitizer. The first two accesses of a byte,
// one of them a write, that nothing orders end the process; a write of what is there already does not.
// Memory is ordered by what PTX says orders it: __syncthreads, __syncwarp, barriers of a warpgroup and mbarriers. Shuffles,
// votes, elections, ldmatrix and products bring lanes together and order nothing; only what is read after a __threadfence
// comes after what the others did before the last of them. Atomic additions to the same place are in order. CTAs are not
// compared with each other.
#pragma once

#ifdef EMULATED_RACES
#include "emulated_races_on.h"
#else
namespace emulator {
namespace races {  // nothing is watched
constexpr bool kOn = false;
inline void begin() {}
template <class M> void come(M&, unsigned) {}
inline void go(unsigned, unsigned) {}
template <class M> void show(M&) {}
inline void look(unsigned) {}
inline void end_thread() {}
inline void fence() {}
inline void count(const void*) {}
inline void arrive(unsigned) {}
inline void complete(unsigned) {}
inline void acquire(unsigned) {}
inline void bytes_came(unsigned) {}
inline void access(const void*, unsigned long, bool, const void*) {}
inline void begin_copy(const void*, unsigned long, bool, unsigned) {}
inline void end_copy(const void*, unsigned long, bool, unsigned) {}
inline unsigned engine_actor() { return 0; }
inline void commit_products() {}
inline void wait_products(unsigned) {}
struct Products { Products() {} };
struct Atomic { Atomic() {} };
}  // namespace races
}  // namespace emulator
#endif
