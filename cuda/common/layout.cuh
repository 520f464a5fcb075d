// Checks that a struct has the layout that Python packs: CHECK_LAYOUT(Type, NAME, (a)(b)(c)) compares the size of Type
// with -DNAME_BYTES, and the offsets of all its fields, in order, with -DNAME_OFFSETS=0,8,16.
#pragma once

#include "common/types.cuh"

template <int kFields, int kPacked>
__device__ constexpr bool same_layout(const u64 (&offsets)[kFields], const u64 (&packed)[kPacked]) {
  if (kFields != kPacked) return false;
  for (int i = 0; i < kFields; ++i)
    if (offsets[i] != packed[i]) return false;
  return true;
}

#ifdef __CUDACC_RTC__  // NVRTC has no offsetof; this is what its front end expands offsetof to
#define LAYOUT_OFFSET(field) u64(__INTADDR__(&((Checked*)0)->field))
#else
#define LAYOUT_OFFSET(field) __builtin_offsetof(Checked, field)
#endif
// Two macros that name each other in turn walk through a list (a)(b)(c). The one that remains at the end is pasted to
// `_END`, which expands to nothing.
#define LAYOUT_ODD(field) LAYOUT_OFFSET(field), LAYOUT_EVEN
#define LAYOUT_EVEN(field) LAYOUT_OFFSET(field), LAYOUT_ODD
#define LAYOUT_ODD_END
#define LAYOUT_EVEN_END
#define LAYOUT_PASTE(...) __VA_ARGS__##_END
#define LAYOUT_END(...) LAYOUT_PASTE(__VA_ARGS__)
#define CHECK_LAYOUT(Type, NAME, fields)                                                             \
  namespace NAME##_LAYOUT {                                                                          \
  using Checked = Type;                                                                              \
  static_assert(sizeof(Checked) == NAME##_BYTES, #NAME " has another size than Python packs");       \
  constexpr u64 kOffsets[] = {LAYOUT_END(LAYOUT_ODD fields)}, kPacked[] = {NAME##_OFFSETS};          \
  static_assert(same_layout(kOffsets, kPacked), #NAME " has other offsets than Python packs");       \
  }
