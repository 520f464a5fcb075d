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
RUNTIME void begin() {}
template <class M> void come(M&, unsigned) {}
RUNTIME void go(unsigned, unsigned) {}
template <class M> void show(M&) {}
RUNTIME void look(unsigned) {}
RUNTIME void end_thread() {}
RUNTIME void fence() {}
RUNTIME void count(const void*) {}
RUNTIME void arrive(unsigned) {}
RUNTIME void complete(unsigned) {}
RUNTIME void acquire(unsigned) {}
RUNTIME void bytes_came(unsigned) {}
RUNTIME void access(const void*, unsigned long, bool, const void*) {}
RUNTIME void begin_copy(const void*, unsigned long, bool, unsigned) {}
RUNTIME void end_copy(const void*, unsigned long, bool, unsigned) {}
RUNTIME unsigned engine_actor() { return 0; }
RUNTIME void commit_products() {}
RUNTIME void wait_products(unsigned) {}
struct Products { Products() {} };
struct Atomic { Atomic() {} };
}  // namespace races
}  // namespace emulator
#endif
