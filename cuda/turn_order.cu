// e[i] = max(e[i - 1] + kTurn, end[q[i]]);  end[q[i]] = e[i] + kAddition;  queries of a tile of keys by (end[q], q)
// In which order tiles of queries pass by each tile of keys, for gradients whose sums are made in one order
// (attention_backward_sm90): an addition to dQ waits until all tiles of keys that were claimed before have added
// theirs.
// A CTA has one pattern. It walks over the tiles of keys in the order in which they are claimed, from the last to the
// first, and keeps for each tile of queries the time at which its last addition so far would end. The tiles of queries
// that end first pass by first. All threads sort keys of 21 bits of time and 11 of place, then one warp computes times:
// e[i] - i * kTurn never falls, so that the chain is a running maximum over the lanes. A time is counted in quarters of
// a turn. The order of additions stays as it is. See docs/kernels/gradient-order.md.
#include "common/bsr.cuh"

constexpr int kThreads = 256, kMost = 2048, kWalkers = 512;
constexpr int kPlaceBits = 11;
constexpr int kTurn = 4, kAddition = 4, kBegin = 2;  // quarters of a turn; kBegin: before the first turn of a tile of keys
static_assert(1 << kPlaceBits == kMost, "");

struct TurnOrder {
  const int* first;            // (patterns * tiles + 1,)
  const int *columns, *parts;  // of each entry by tiles of keys: its tile of queries and its part; parts may be null
  int *to_columns, *to_parts;
  // Tiles of keys and of queries of a pattern, all entries, and how many tiles of keys of a pattern are under way.
  int tiles, rows, entries, walkers;
};
#ifdef TURN_ORDER_BYTES
CHECK_LAYOUT(TurnOrder, TURN_ORDER, (first)(columns)(parts)(to_columns)(to_parts)(tiles)(rows)(entries)(walkers))
#endif

struct Shared {
  int ends[kMost];          // when the last addition to a tile of queries ends
  int columns[kMost];       // of the entries of a tile of keys
  u32 keys[kMost];          // time and place of an entry, to be sorted
  int starts[kWalkers];     // when each CTA of the other kernel is through with its tile of keys
};

// Sorts the first `count` keys, a power of two. All threads call it.
__device__ __forceinline__ void sort_keys(u32* keys, int count) {
  for (int size = 2; size <= count; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < count / 2; i += kThreads) {
        const int low = i / step * step * 2 + i % step, high = low + step;
        const u32 x = keys[low], y = keys[high];
        if ((x > y) == ((low & size) == 0)) keys[low] = y, keys[high] = x;
      }
      __syncthreads();
    }
}

// The largest x of this lane and of those before it.
__device__ __forceinline__ int largest_so_far(int x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, i);
    if (int(threadIdx.x % 32) >= i) x = max(x, other);
  }
  return x;
}

// Writes the entries of a tile of keys in the order of the keys, and when each addition ends. One warp calls it.
// Turn i ends at e[i] = max(e[i - 1] + kTurn, the end of the addition before it to that tile of queries).
__device__ __forceinline__ void write_turns(const TurnOrder& p, Shared& shared, int first, int count, int walker) {
  const int lane = threadIdx.x % 32;
  int latest = shared.starts[walker] + kBegin + kTurn;  // the largest e[i] - i * kTurn so far
  for (int from = 0; from < count; from += 32) {
    const int i = from + lane;
    const u32 key = i < count ? shared.keys[i] : 0u;
    latest = largest_so_far(max(latest, i < count ? int(key >> kPlaceBits) - i * kTurn : 0));
    if (i < count) {
      const int place = int(key % kMost), column = shared.columns[place];
      shared.ends[in_range(column, p.rows) ? column : 0] = latest + i * kTurn + kAddition;
      p.to_columns[first + i] = column;
      if (p.parts) p.to_parts[first + i] = p.parts[first + place];
    }
    latest = __shfl_sync(0xffffffffu, latest, 31);
  }
  __syncwarp();  // all lanes have read the start of this walker
  if (lane == 0 && count) shared.starts[walker] = latest + (count - 1) * kTurn;
}

extern "C" __global__ void __launch_bounds__(kThreads) turn_order(const __grid_constant__ TurnOrder p) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, walkers = p.walkers;
  const int* bounds = p.first + i64(blockIdx.x) * p.tiles;
  for (int i = thread; i < p.rows; i += kThreads) shared.ends[i] = 0;
  // CTAs come to this pattern one after the other, when they are through with what they had before.
  const i64 all = max(0, bounds[p.tiles] - bounds[0]);
  for (int i = thread; i < walkers; i += kThreads) shared.starts[i] = int(all * kTurn * i / (i64(p.tiles) * walkers));
  for (int place = 0; place < p.tiles; ++place) {
    const int tile = p.tiles - 1 - place, walker = place % walkers;
    const Range range = blocks_of_row(bounds, tile, p.entries);
    const int first = int(range.first), last = int(range.last), count = min(max(last - first, 0), kMost);
    int size = 2;
    while (size < count) size *= 2;
    __syncthreads();
    for (int i = thread; i < size; i += kThreads) {
      u32 end = ~0u;
      if (i < count) {
        const int column = shared.columns[i] = p.columns[first + i];
        end = u32(shared.ends[in_range(column, p.rows) ? column : 0]);
      }
      shared.keys[i] = min(end, (1u << (32 - kPlaceBits)) - 1) << kPlaceBits | u32(i);
    }
    __syncthreads();
    sort_keys(shared.keys, size);
    if (thread < 32) write_turns(p, shared, first, count, walker);
    for (int i = first + kMost + thread; i < last; i += kThreads) {  // only where a user has written to the mask
      p.to_columns[i] = p.columns[i];
      if (p.parts) p.to_parts[i] = p.parts[i];
    }
  }
}
