// places = the numbers e with kept[e] != 0, in order; kept has any element type, and NaN is not 0
// Two passes over tiles: COUNT leaves how many of each tile are kept, and the CTA that ends last adds them up; FILL
// writes the numbers to their places. A thread that fills has kItems neighbours, of which it knows the order; one that
// counts has every kThreads-th, so that a warp reads neighbours together.
#include "common/arrivals.cuh"
#include "common/zeros.cuh"

using T = ELEMENT_A;
using Acc = ACCUMULATOR;  // the type in which elements are compared
using Index = INDEX;

constexpr bool kFill = FILL;
constexpr int kThreads = 256, kItems = 8, kPart = kThreads * kItems;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread

struct KeptPlaces {
  const T* kept;  // (n,)
  Index* places;  // FILL
  i64* counts;    // (tiles,), how many are kept in each tile; after COUNT, in all tiles before it
  i64* total;     // a single number
  int* arrived;   // CTAs that have arrived; zero before and after
  i64 n, tile;    // a tile has some whole parts
};
#ifdef KEPT_PLACES_BYTES
CHECK_LAYOUT(KeptPlaces, KEPT_PLACES, (kept)(places)(counts)(total)(arrived)(n)(tile))
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) kept_places(const __grid_constant__ KeptPlaces a) {
  const i64 tiles = (a.n + a.tile - 1) / a.tile;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 stop = (tile + 1) * a.tile < a.n ? (tile + 1) * a.tile : a.n;
    i64 before = kFill ? a.counts[tile] : 0, counted = 0, of_all;
    for (i64 part = tile * a.tile; part < stop; part += kPart) {
      const i64 first = part + threadIdx.x * (kFill ? kItems : 1);
      u32 kept = 0;
#pragma unroll
      for (int s = 0; s < kItems; ++s) {
        const i64 e = first + s * (kFill ? 1 : kThreads);
        if (e < stop && !is_zero(load<Acc>(a.kept[e]))) kept |= 1u << s;
      }
      counted += __popc(kept);
      if constexpr (kFill) {
        i64 place = before + sum_before<kThreads>(i64(__popc(kept)), of_all);
#pragma unroll
        for (int s = 0; s < kItems; ++s)
          if (kept >> s & 1) a.places[place++] = Index(first + s);
        before += of_all;
      }
    }
    if constexpr (!kFill) {
      sum_before<kThreads>(counted, of_all);
      if (threadIdx.x == 0) a.counts[tile] = of_all;
    }
  }
  if constexpr (!kFill) {
    if (!arrives_last(a.arrived)) return;
    const i64 sum = add_up<kThreads>(a.counts, tiles);
    if (threadIdx.x == 0) *a.total = sum;
  }
}
