// out[s, e] = OPERATION over k in [starts[s], starts[s+1]) of values[order[k], e], in a fixed order
// kColumns threads have the columns of a segment, and kLanes of them share its rows: one lane for segments of fewer
// than 32 rows on average, strictly from left to right; else 32 lanes, joined by shuffles in one fixed tree. Rows
// outside `values` are skipped; the callers leave empty segments out. Bytes are the limit.
#include "common/extremes.cuh"

using T = ELEMENT_A;
using Acc = ACCUMULATOR;

constexpr int kLanes = LANES;
constexpr int kColumns = COLUMNS;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy
constexpr int kGroups = kThreads / (kLanes * kColumns);  // segments per CTA
static_assert(32 % kLanes == 0, "a segment's lanes must not straddle warps");
constexpr Operation kOperation = OPERATION;

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
segment(const T* __restrict__ values, const i64* __restrict__ order, const i64* __restrict__ starts,
        T* __restrict__ out, i64 segments, i64 entries, i64 rows, i64 width) {
  const int lane = threadIdx.x % kLanes;
  const int first_column = threadIdx.x / kLanes % kColumns;
  const int group = threadIdx.x / (kLanes * kColumns);
  // All threads of a warp make the same rounds, since they exchange values.
  for (i64 s0 = blockIdx.x * i64(kGroups); s0 < segments; s0 += i64(gridDim.x) * kGroups)
  for (i64 c0 = 0; c0 < width; c0 += kColumns) {
    const i64 s = s0 + group, column = c0 + first_column;
    const bool active = s < segments && column < width;
    const i64 first = active ? starts[s] : 0;
    const i64 last = !active ? 0 : s + 1 < segments ? starts[s + 1] : entries;
    Acc acc = zero<Acc>();
    bool any = false;
    for (i64 k = first + lane; k < last; k += kLanes) {
      const i64 row = order ? order[k] : k;
      if (!in_range(row, rows)) continue;
      const Acc value = load<Acc>(values[row * width + column]);
      acc = any ? joined<kOperation>(acc, value) : value;
      any = true;
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      const Acc other = shuffle_xor(acc, mask);
      const bool other_any = __shfl_xor_sync(0xffffffffu, int(any), mask);
      const bool lower = (lane & mask) == 0;  // both partners combine in the same order
      if (any && other_any) acc = lower ? joined<kOperation>(acc, other) : joined<kOperation>(other, acc);
      else if (other_any) acc = other;
      any |= other_any;
    }
    if (active && lane == 0) out[s * width + column] = Store<T>::from(acc);
  }
}
