// out[s, r, n] = full[i * R + r, j * N + n] for block s at (i, j), of a dense product A @ B for which B was filled up
// An infinity or NaN of A has met zeros that B does not store, so that an element that is not finite is computed again
// from the blocks that both store: those of A's row, where B has the bit. Each warp reads kWide elements of a thread at
// once, and as a rule none is computed again: bound by bytes.
#include "common/elements.cuh"

constexpr int kThreads = 128, kWide = 8;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy

struct TakeBlocks {
  const A* data;         // (a_blocks, R, K)
  const Index* indices;  // (a_blocks,)
  const Index* indptr;   // (a_rows + 1,)
  const B* b;            // (b_rows * K, columns * N), B filled up
  const C* full;         // (a_rows * R, columns * N)
  C* out;                // (blocks, R, N)
  const int* places;     // block -> i * columns + j
  const u32* bits;       // (b_rows, words): which blocks B stores
  i64 blocks, a_blocks, a_rows, b_rows, columns;
  i64 b_row, full_row;  // elements from a row to the next
  int R, K, N, words;
};
#ifdef TAKE_BLOCKS_BYTES
CHECK_LAYOUT(TakeBlocks, TAKE_BLOCKS, (data)(indices)(indptr)(b)(full)(out)(places)(bits)(blocks)(a_blocks)(a_rows)
             (b_rows)(columns)(b_row)(full_row)(R)(K)(N)(words))
#endif

// Infinity minus infinity is NaN.
template <class Real> __device__ __forceinline__ bool is_finite(Real x) { return x - x == 0; }

// Element (r, n) of block (i, j), anew.
__device__ __forceinline__ Acc element(const TakeBlocks& p, i64 i, i64 j, int r, int n) {
  Acc sum = zero<Acc>();
  const Range row = blocks_of_row(p.indptr, i, p.a_blocks);
#pragma unroll 1
  for (i64 entry = row.first; entry < row.last; ++entry) {
    const Index inner = p.indices[entry];
    if (!in_range(inner, p.b_rows) || !(p.bits[i64(inner) * p.words + j / 32] >> (j % 32) & 1)) continue;
    const A* left = p.data + (entry * p.R + r) * p.K;
    const B* right = p.b + i64(inner) * p.K * p.b_row + j * p.N + n;
#pragma unroll 1
    for (int k = 0; k < p.K; ++k) sum = multiply_add(load<Acc>(left[k]), load<Acc>(right[k * p.b_row]), sum);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) take_blocks(const __grid_constant__ TakeBlocks p) {
  const u32 size = u32(p.R) * u32(p.N), columns = u32(p.N);  // fewer than 2^31, which what is added may pass
  const u32 across = u32(p.columns), most = u32(p.a_rows) * across;  // fewer than 2^31
  const i64 total = p.blocks * size;
  constexpr i64 kEach = kThreads * kWide;
  for (i64 first = blockIdx.x * kEach; first < total; first += gridDim.x * kEach) {
    const i64 s = first / size;
    const u32 begin = u32(first - s * size) + threadIdx.x;
    C found[kWide];
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      const u32 at = begin + w * kThreads, more = at / size, within = at - more * size;
      const u32 place = s + more < p.blocks ? u32(p.places[s + more]) : most, i = place / across, r = within / columns;
      found[w] = C{};
      if (place < most)
        found[w] = p.full[(i64(i) * p.R + r) * p.full_row + i64(place - i * across) * p.N + (within - r * columns)];
    }
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      const i64 at = first + w * kThreads + threadIdx.x;
      if (at >= total) continue;
      if (!is_finite(load<Acc>(found[w]))) {
        const i64 block = at / size, i = p.places[block] / p.columns, j = p.places[block] % p.columns;
        const int within = int(at - block * size);
        found[w] = Store<C>::from(element(p, i, j, within / p.N, within % p.N));
      }
      p.out[at] = found[w];
    }
  }
}
