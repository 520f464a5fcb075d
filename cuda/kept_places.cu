// places = the numbers e with kept[e] != 0, in order
// Two passes over tiles of kTile numbers: COUNT leaves how many of each tile are kept, and the CTA that ends last adds
// them up; FILL writes the numbers to their places. A thread has kItems neighbours.
#include "common/arrivals.cuh"

using Index = INDEX;

constexpr bool kFill = FILL;
constexpr int kThreads = 256, kItems = 8, kTile = kThreads * kItems;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread

struct KeptPlaces {
  const u8* kept;  // (n,)
  Index* places;   // FILL
  i64* counts;     // (tiles,), how many are kept in each tile; after COUNT, in all tiles before it
  i64* total;      // a single number
  int* arrived;    // CTAs that have arrived; zero before and after
  i64 n;
};
#ifdef KEPT_PLACES_BYTES
CHECK_LAYOUT(KeptPlaces, KEPT_PLACES, (kept)(places)(counts)(total)(arrived)(n))
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) kept_places(const __grid_constant__ KeptPlaces a) {
  const i64 tiles = (a.n + kTile - 1) / kTile;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 first = tile * kTile + threadIdx.x * kItems;
    u32 kept = 0;
    i64 own = 0, of_tile;
#pragma unroll
    for (int s = 0; s < kItems; ++s)
      if (first + s < a.n && a.kept[first + s]) kept |= 1u << s, ++own;
    i64 place = sum_before<kThreads>(own, of_tile);
    if constexpr (kFill) {
      place += a.counts[tile];
#pragma unroll
      for (int s = 0; s < kItems; ++s)
        if (kept >> s & 1) a.places[place++] = Index(first + s);
    } else if (threadIdx.x == 0) {
      a.counts[tile] = of_tile;
    }
  }
  if constexpr (!kFill) {
    if (!arrives_last(a.arrived)) return;
    const i64 sum = add_up<kThreads>(a.counts, tiles);
    if (threadIdx.x == 0) *a.total = sum;
  }
}
