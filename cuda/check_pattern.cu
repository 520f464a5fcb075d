// found = {indptr[0], indptr[rows], falls of indptr, least and largest index, falls of indices inside rows, the same and
// pairs of equal neighbours, entries of the longest row}: what tells whether index arrays are valid, in order, without
// duplicates, and how uneven rows are
// One flat pass over both arrays: no row is searched. Falls are counted between all neighbours, and those at the first
// entries of rows that are not empty are taken off again. Each CTA leaves its part, and the one that ends last joins
// them, so that the host waits once for eight numbers. Nothing is read outside the arrays, whatever they say.
#include "common/arrivals.cuh"

using Index = INDEX;

constexpr int kThreads = 256;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread

struct Facts { i64 pointer_falls, least, largest, falls, equal_or_falls, longest; };

struct CheckPattern {
  const Index* indices;  // (entries,)
  const Index* indptr;   // (rows + 1,)
  i64* found;            // (8,)
  Facts* partial;        // (CTAs,)
  int* arrived;          // CTAs that have arrived; zero before and after
  i64 entries, rows;
};
#ifdef CHECK_PATTERN_BYTES
CHECK_LAYOUT(CheckPattern, CHECK_PATTERN, (indices)(indptr)(found)(partial)(arrived)(entries)(rows))
#endif

__device__ __forceinline__ Facts join(Facts a, const Facts& b) {
  a.pointer_falls += b.pointer_falls, a.falls += b.falls, a.equal_or_falls += b.equal_or_falls;
  if (b.least < a.least) a.least = b.least;
  if (b.largest > a.largest) a.largest = b.largest;
  if (b.longest > a.longest) a.longest = b.longest;
  return a;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
check_pattern(const __grid_constant__ CheckPattern a) {
  const i64 stride = i64(gridDim.x) * kThreads, begin = blockIdx.x * i64(kThreads) + threadIdx.x;
  const i64 end = a.indptr[a.rows], stop = end < a.entries ? end : a.entries;
  Facts own = {0, i64(~u64(0) >> 1), -i64(~u64(0) >> 1) - 1, 0, 0, 0};
  for (i64 e = begin; e < a.entries; e += stride) {
    const i64 x = a.indices[e];
    if (x < own.least) own.least = x;
    if (x > own.largest) own.largest = x;
    if (e + 1 < stop) {
      const i64 next = a.indices[e + 1];
      own.falls += next < x, own.equal_or_falls += next <= x;
    }
  }
  for (i64 i = begin; i < a.rows; i += stride) {
    const i64 first = a.indptr[i], last = a.indptr[i + 1];
    own.pointer_falls += last < first;
    if (last - first > own.longest) own.longest = last - first;
    if (0 < first && first < last && first < stop) {
      const i64 before = a.indices[first - 1], x = a.indices[first];
      own.falls -= x < before, own.equal_or_falls -= x <= before;
    }
  }
  const auto joined = [](const Facts& x, const Facts& y) { return join(x, y); };
  own = join_cta<kThreads>(own, joined);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = own;
  if (!arrives_last(a.arrived)) return;
  Facts all = {0, i64(~u64(0) >> 1), -i64(~u64(0) >> 1) - 1, 0, 0, 0};
  for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) all = join(all, a.partial[i]);
  all = join_cta<kThreads>(all, joined);
  if (threadIdx.x == 0) {
    a.found[0] = a.indptr[0], a.found[1] = end, a.found[2] = all.pointer_falls;
    a.found[3] = all.least, a.found[4] = all.largest, a.found[5] = all.falls, a.found[6] = all.equal_or_falls;
    a.found[7] = all.longest;
  }
}
