// The producer warps of attention_sm90, and the shared memory of the kernel: one warp looks up tiles of queries and
// starts their copies, one starts the copies of keys and values into rings, two compute mask bits: which keys are seen.
// Where keys are gathered, attention_sm90_gather.cuh has the warps that do what the last three do here.
#pragma once

#include "common/attention_sm90.cuh"

// A warpgroup has 64 queries. With one warpgroup, two CTAs fit a multiprocessor.
constexpr int kConsumers = kTileQ / 64, kThreads = 128 * (kConsumers + 1), kCtas = kConsumers == 1 ? 2 : 1;
// Registers of a consumer's and of a producer's thread: 65,536 in all.
constexpr int kConsumerRegisters = kConsumers == 1 ? 208 : kConsumers == 2 ? 232 : 160;
constexpr int kProducerRegisters = kConsumers == 1 ? 48 : kConsumers == 2 ? 40 : 32;
constexpr int kStages = STAGES, kQueries = QUERIES, kTiles = 2;
static_assert(kQueries <= kTiles, "a tile is known as long as its queries or its result are there");
constexpr bool kAcross = kQueries > 1;  // the scores of the next tile are issued before this one ends
constexpr int kBytes = sizeof(Element);
// Wide values leave few registers.
constexpr bool kWide = kValueDim > 192;
// Queries stay in registers.
constexpr bool kFromRegisters = !kFp8 && kConsumers < 3 && kHeadDim <= (kScores == kPlain ? 128 : 80) && !kWide;
// Where there are two slots for keys, one is free before its scores are weighed: 1 to 3 % faster. It takes registers to
// compute scores once more then.
constexpr bool kReleasesEarly = kStages == 2 && !kWide;
constexpr bool kStoreTiles = STORE_TILES;                    // TMA writes the result
// A step of a product is 32 bytes deep.
constexpr int kSteps = kHeadDim * kBytes / 32, kWeightSteps = kTileK * kBytes / 32;
constexpr int kScoreAccum = kTileK / 2, kAccum = kValueDim / 2;
constexpr int kQuerySlabs = (kHeadDim + kSlabColumns - 1) / kSlabColumns, kOutSlabs = (kValueDim + 63) / 64;
constexpr int kSlabs = kQuerySlabs > kOutSlabs ? kQuerySlabs : kOutSlabs;
constexpr u32 kSlabQ = kTileQ * 128, kSlabK = kTileK * 128;
constexpr u32 kValueBytes = kFp8 ? kValueDim * kTileK : kOutSlabs * kSlabK;
// The highest weight when a maximum is set, in powers of two, and by how much a score may rise before it is raised.
constexpr int kHeadroom = kFp8 ? 5 : 0;
constexpr f32 kRise = kFp8 ? 2.8f : 8.f;
// Largest sum of a thread's weights of a row before the maximum is raised. Weights of fp8 are full (448) from 432 on, and
// none is if all of them together are less.
constexpr f32 kMostSum = kFp8 ? 431.f : 16384.f;
constexpr f32 kLargestSum = 1e30f;  // weights beyond cannot be scaled, and may be infinite
constexpr bool kKeep = kFp8 && kValueDim <= 128;
constexpr int kKeepTiles = 1024 / kTileK, kKept = kKeep ? kConsumers * kAccum * 128 : 1;
constexpr int kEarly = 6;  // entries before the end of a tile at which the next one is claimed
constexpr int kExactMaxTiles = 4;  // tiles in which the maximum is computed first after it was raised

// An entry of which not all is seen. If there are no more of them, tile < 0.
struct MaskedEntry { int tile, key, part; };

struct alignas(1024) Shared {
  u8 q[kQueries][kSlabs * kSlabQ];  // the queries, then the result before it is stored
  u8 k[kStages][kQuerySlabs * kSlabK];
  u8 v[kStages][kValueBytes];
  u64 q_full[kQueries], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  u64 tile_full[kTiles], tile_empty[kTiles], wanted;
  u64 mask_wanted[kStages], mask_full[kStages];
  u32 seen[kStages][kTileQ][kWords];  // for entries that are not whole; bit i of word w: the query sees key 32 w + i
  // entry -> number among those that are not whole, or -1. Where keys are gathered: see `Seen`.
  int masks[kStages];
  MaskedEntry masked[kStages];
  Tile tiles[kTiles];
  f32 kept[kKept];  // sums so far
};

// Entries of keys of a tile.
__device__ __forceinline__ int count_of(const Tile& x) { return (x.last - x.first + kPiecesOfTile - 1) / kPiecesOfTile; }

// ------------------------------------------------------------------------------------------------------- the producers
// kMaskWarps warps compute mask bits, which say which query sees which key, unless all see all.
constexpr int kMaskWarps = 2;
// Warps that start copies of keys and values: the third one makes pieces of 16 keys faster, and those of 32 slower.
constexpr int kFeeders = !kGathers ? 1 : kPiece == 16 ? 3 : 2;
// Where keys are gathered, the warps that start their copies compute the bits.
constexpr int kWordThreads = 32 * (kGathers ? kFeeders : kMaskWarps);

// Called by one thread before all others begin.
__device__ __forceinline__ void set_up(const AttentionSm90& problem, Shared& shared) {
  prefetch_map(&problem.q);
  prefetch_map(&problem.k);
  prefetch_map(&problem.v);
  const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
  for (int i = 0; i < kQueries; ++i) init(shared.q_full[i], 1);
  for (int i = 0; i < kStages; ++i) {
    init(shared.mask_wanted[i], 1), init(shared.mask_full[i], kWordThreads);
    init(shared.k_full[i], kFeeders), init(shared.k_empty[i], 4 * kConsumers);
    init(shared.v_full[i], kFeeders), init(shared.v_empty[i], 4 * kConsumers);
  }
  for (int i = 0; i < kTiles; ++i) init(shared.tile_full[i], 1), init(shared.tile_empty[i], 4 * kConsumers + kFeeders);
  init(shared.wanted, 1);
  barrier_init_fence();
}

__device__ __forceinline__ void copy_value_tile(const u8* to, const TensorMap& map, int key, int head, int batch,
                                                u64& full) {
  if constexpr (kFp8) {
    barrier_expect(shared_address(&full), kValueBytes);
    copy_tile(shared_address(to), &map, key, 0, head, batch, shared_address(&full));
  } else {
    copy_slabs<kOutSlabs>(to, kSlabK, map, key, head, batch, full);
  }
}

// Whether TMA writes what a warpgroup computes. It cannot if a sequence ends within its queries, since
// another sequence follows.
__device__ __forceinline__ bool is_sent(const Attention& a, const Tile& x, int warpgroup) {
  return kStoreTiles && (!a.q_bounds || x.row + warpgroup * 64 + 64 <= x.rows);
}

// Stores the result of tile n from the memory of its queries, once all warps have released the tile.
__device__ __forceinline__ void send(const AttentionSm90& problem, Shared& shared, u32 n) {
  if constexpr (!kStoreTiles) return;
  const Tile& x = shared.tiles[n % kTiles];
  if (threadIdx.x % 32 == 0 && x.first < x.last) {
    const u32 from = shared_address(shared.q[n % kQueries]);
    for (int i = 0; i < kConsumers; ++i) {
      const int row = x.row + i * 64;
      if (row >= x.rows || !is_sent(problem.attention, x, i)) continue;
#pragma unroll
      for (int slab = 0; slab < kOutSlabs; ++slab)
        store_tile(&problem.o, 64 * slab, row, x.head, x.batch, from + i * 8192 + slab * kSlabQ);
    }
    store_commit();
    store_wait_read<0>();
  }
  __syncwarp();
}

// One warp claims the next tile when it is needed soon, looks it up, stores the result that occupies the memory of its
// queries, and starts the copies of the queries.
__device__ __forceinline__ void schedule(const AttentionSm90& problem, Shared& shared) {
  const Attention& a = problem.attention;
  const int lane = threadIdx.x % 32;
  int t = blockIdx.x;
  u32 n = 0;
  for (;; ++n) {
    const Tile x = tile_at(a, t);
    wait(shared.tile_empty[n % kTiles], parity<kTiles>(n) ^ 1);
    if (kQueries == kTiles && n >= kTiles) send(problem, shared, n - kTiles);
    if (lane == 0) {
      shared.tiles[n % kTiles] = x;
      arrive(shared.tile_full[n % kTiles]);
    }
    if (x.head < 0) break;
    if (kQueries < kTiles && n > 0) {
      wait(shared.tile_empty[(n - 1) % kTiles], parity<kTiles>(n - 1));
      send(problem, shared, n - 1);
    }
    if (lane == 0) {
      u64& full = shared.q_full[n % kQueries];
      if (x.first == x.last) arrive(full);
      else copy_slabs<kQuerySlabs>(shared.q[n % kQueries], kSlabQ, problem.q, x.row, x.head, x.batch, full);
    }
    __syncwarp();
    wait(shared.wanted, n % 2);
    if (lane == 0) t = gridDim.x + atomicAdd(a.counters, 1);
    t = __shfl_sync(0xffffffffu, t, 0);
  }
  if (n > 0) {
    wait(shared.tile_empty[(n - 1) % kTiles], parity<kTiles>(n - 1));
    send(problem, shared, n - 1);
  }
  if (lane == 0) {  // the last CTA resets the counters
    leave_counters(a.counters);
    store_wait();
  }
}

// One warp starts the copies of keys and values. The values of an entry follow the keys of the next one, in the order
// of their use. Tiles and their queries have the same number, and so have the keys and values of an entry.
__device__ __forceinline__ void produce(const AttentionSm90& problem, Shared& shared) {
  const Attention& a = problem.attention;
  const int lane = threadIdx.x % 32;
  int row = -1, head = 0, batch = 0;  // the last entry, whose values are still to be copied
  const auto copy_values = [&](u32 n) {
    if (row < 0) return;
    const u32 at = n % kStages;
    wait(shared.v_empty[at], parity<kStages>(n) ^ 1);
    if (lane == 0) copy_value_tile(shared.v[at], problem.v, row, head, batch, shared.v_full[at]);
    __syncwarp();
    row = -1;
  };
  u32 entry = 0, mask = 0;
  for (u32 n = 0;; ++n) {
    wait(shared.tile_full[n % kTiles], parity<kTiles>(n));
    const Tile& x = shared.tiles[n % kTiles];
    if (x.head < 0) break;
    const int count = x.last - x.first;
    if (count == 0 || !kAcross) copy_values(entry - 1);
    if (count == 0 && lane == 0) arrive(shared.wanted);
    for (int e0 = 0; e0 < count; e0 += 32) {
      int column = 0, part = -1;
      if (e0 + lane < count) column = column_of(a, x.last - 1 - e0 - lane), part = part_of(a, x.last - 1 - e0 - lane);
      const Entry mine = entry_at(a, x, column, part);
      for (int i = 0; i < min(32, count - e0); ++i, ++entry) {
        const u32 at = entry % kStages;
        if (lane == 0 && e0 + i == max(count - kEarly, 0)) arrive(shared.wanted);
        const int key = __shfl_sync(0xffffffffu, mine.key, i), part = __shfl_sync(0xffffffffu, mine.part, i);
        const bool whole = __shfl_sync(0xffffffffu, mine.whole, i);
        wait(shared.k_empty[at], parity<kStages>(entry) ^ 1);
        if (lane == 0) {
          shared.masks[at] = whole ? -1 : int(mask);
          if (!whole) {
            shared.masked[mask % kStages] = {int(n % kTiles), key, part};
            arrive(shared.mask_wanted[mask % kStages]);
          }
          copy_slabs<kQuerySlabs>(shared.k[at], kSlabK, problem.k, key, x.head / a.group, x.batch, shared.k_full[at]);
        }
        __syncwarp();
        mask += !whole;
        copy_values(entry - 1);
        row = key + (kFp8 ? x.shift : 0), head = x.head / a.group, batch = x.batch;
      }
    }
    release(shared.tile_empty[n % kTiles]);
  }
  copy_values(entry - 1);
  if (entry >= kStages) wait(shared.k_empty[entry % kStages], parity<kStages>(entry) ^ 1);
  if (lane == 0) {  // its place is free, because the entry that had it has been consumed
    shared.masked[mask % kStages].tile = -1;
    arrive(shared.mask_wanted[mask % kStages]);
  }
}

// Computes mask bits, by kMaskWarps warps.
__device__ __forceinline__ void compute_mask_bits(const AttentionSm90& problem, Shared& shared, int thread) {
  for (u32 n = 0;; ++n) {
    const u32 at = n % kStages;
    wait(shared.mask_wanted[at], parity<kStages>(n));
    if (shared.masked[at].tile < 0) break;
    const Tile& x = shared.tiles[shared.masked[at].tile];
    const Entry entry = {shared.masked[at].key, shared.masked[at].part};
#pragma unroll 1
    for (int row = thread; row < kTileQ; row += 32 * kMaskWarps) {
      u32 words[kWords];
      words_of(problem.attention, x, entry, x.row + row, words);
#pragma unroll
      for (int w = 0; w < kWords; ++w) shared.seen[at][row][w] = words[w];
    }
    arrive(shared.mask_full[at]);
  }
}
