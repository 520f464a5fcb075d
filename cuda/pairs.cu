// out[s, r, c] = sum over pairs k of segment s, in order, of sum_j a[ia[k], r, j] * b[ib[k], j, c]
// The numeric half of BSR @ BSR: kLanes threads share a block of the result, one element each at a time.
#include "bsr.cuh"

using A = ELEMENT_A;
using B = ELEMENT_B;
using C = ELEMENT_C;
using Acc = ACCUMULATOR;

constexpr int kLanes = LANES;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // per SM: leaves 128 registers a thread, so that ptxas does not spill for occupancy
constexpr int kGroups = kThreads / kLanes;

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
pairs(const A* __restrict__ a, const i64* __restrict__ ia, const B* __restrict__ b, const i64* __restrict__ ib,
      const i64* __restrict__ starts, C* __restrict__ out, i64 segments, i64 pair_count, i64 a_blocks, i64 b_blocks,
      int R, int K, int N) {
  for (i64 s = blockIdx.x * i64(kGroups) + threadIdx.x / kLanes; s < segments; s += i64(gridDim.x) * kGroups) {
    const i64 first = starts[s], last = s + 1 < segments ? starts[s + 1] : pair_count;
    for (int e = threadIdx.x % kLanes; e < R * N; e += kLanes) {
      const int r = e / N, n = e % N;
      Acc acc = zero<Acc>();
      for (i64 k = first; k < last; ++k) {
        const i64 p = ia[k], q = ib[k];
        if (!in_range(p, a_blocks) || !in_range(q, b_blocks)) continue;
        const A* __restrict__ left = a + (p * R + r) * K;
        const B* __restrict__ right = b + q * K * N + n;
        for (int j = 0; j < K; ++j) acc = multiply_add(load<Acc>(left[j]), load<Acc>(right[j * N]), acc);
      }
      out[s * R * N + e] = Store<C>::from(acc);
    }
  }
}
