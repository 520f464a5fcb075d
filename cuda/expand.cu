// out[e] = i where indptr[i] <= e < indptr[i+1]: the row of every entry of a compressed index
// A thread searches indptr once, by halving, and then proceeds through kEntries = 8 neighbours: no scan, no atomics,
// and no wait, since the host knows the number of entries. The search stays within the rows, whatever indptr says.
#include "common/bsr.cuh"

using Index = INDEX;

constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy
constexpr int kEntries = 8;

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
expand(const Index* __restrict__ indptr, Index* __restrict__ out, i64 rows, i64 entries) {
  const i64 stride = i64(gridDim.x) * kThreads * kEntries;
  for (i64 e0 = (blockIdx.x * i64(kThreads) + threadIdx.x) * kEntries; e0 < entries; e0 += stride) {
    i64 low = 0, high = rows;  // searches the last row that starts at or before e0
    while (high - low > 1) {
      const i64 middle = (low + high) / 2;
      if (i64(indptr[middle]) <= e0) low = middle;
      else high = middle;
    }
    i64 row = low;
    for (i64 e = e0; e < e0 + kEntries && e < entries; ++e) {
      while (row + 1 < rows && i64(indptr[row + 1]) <= e) ++row;
      out[e] = Index(row);
    }
  }
}
