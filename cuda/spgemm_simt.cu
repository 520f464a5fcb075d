// out[s, r, c] = sum over the pairs k of segment s, in order, of sum_j a[ia[k], r, j] * b[ib[k], j, c]
// The numeric half of BSR @ BSR and of sampled products on the CUDA cores, for what block_products does not take.
// kLanes threads share a block of the result, each with one element at a time. Blocks of up to 10 x 10 have their sizes
// compiled in; otherwise the constants are zero. Which blocks to read is known a pair ahead. Neighbouring threads read
// neighbouring columns of b and the same row of a, which the L1 serves: it is the limit.
#include "common/elements.cuh"

constexpr int kR = BLOCK_R, kK = BLOCK_K, kN = BLOCK_N;
constexpr int kLanes = LANES;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy
constexpr int kGroups = kThreads / kLanes;
static_assert(kR == 0 || kR * kN == kLanes, "a thread has an element of a small block");

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spgemm_simt(const A* __restrict__ a, const Index* __restrict__ ia, const B* __restrict__ b, const Index* __restrict__ ib,
      const Index* __restrict__ starts, C* __restrict__ out, i64 segments, i64 pair_count, i64 a_blocks, i64 b_blocks,
      int rows, int inner, int columns) {
  const int R = kR ? kR : rows, K = kR ? kK : inner, N = kR ? kN : columns;
  const int group = threadIdx.x / kLanes;
  if (group >= kGroups) return;
  for (i64 s = blockIdx.x * i64(kGroups) + group; s < segments; s += i64(gridDim.x) * kGroups) {
    const Range mine = inside(starts[s], s + 1 < segments ? i64(starts[s + 1]) : pair_count, pair_count);
    const int size = R * N;  // fewer than 2^31, which e + kLanes may pass
    for (int e = threadIdx.x % kLanes; e < size; e = kR || e < size - kLanes ? e + kLanes : size) {
      const int r = e / N, n = e % N;
      Acc acc = zero<Acc>();
      Index next_p = 0, next_q = 0;
      if (mine.first < mine.last) next_p = ia[mine.first], next_q = ib[mine.first];
      for (i64 k = mine.first; k < mine.last; ++k) {
        const i64 p = next_p, q = next_q;
        if (k + 1 < mine.last) next_p = ia[k + 1], next_q = ib[k + 1];
        if (!in_range(p, a_blocks) || !in_range(q, b_blocks)) continue;
        const A* __restrict__ left = a + (p * R + r) * K;
        const B* __restrict__ right = b + q * K * N + n;
#pragma unroll
        for (int j = 0; j < K; ++j) acc = multiply_add(load<Acc>(left[j]), load<Acc>(right[i64(j) * N]), acc);
      }
      out[s * R * N + e] = Store<C>::from(acc);
    }
  }
}
