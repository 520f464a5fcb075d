// What gemm_sm90 and gemm_turned_sm90 have in common: the argument, the order in which CTAs take tiles, the two
// producer warps that fill a ring of stages by TMA, and the addition of splits. A tile is one group of row tiles (see
// Schedule) by kTileN columns. `Shared` is a kernel's shared memory.
#pragma once

#include "common/bsr.cuh"
#include "common/pipeline.cuh"
#include "common/registers.cuh"
#include "common/ring.cuh"
#include "ptx/prefetch.cuh"

using Element = ELEMENT_A;
using C = ELEMENT_C;

constexpr int kRowTileHeight = ROW_TILE_HEIGHT;
constexpr int kTileN = TILE_N;
constexpr int kStages = STAGES;
constexpr int kDepth = DEPTH, kTail = TAIL;  // columns of A per step of the ring; if kTail > 0, per last step of a block
constexpr int kTiles = 4;          // tiles known ahead
constexpr int kClaimedRounds = 2;  // rounds of tiles at the end that are claimed, if items are of similar length
constexpr int kConsumers = 2;      // warpgroups; the last one is the producer
constexpr int kThreads = 128 * (kConsumers + 1);

struct Tile { int group, first, last, split, column, batch, number; };  // group < 0: no more tiles

using Operands = Product<Element, Element, C, f32, int>;
CHECK_PRODUCT(Operands)

struct alignas(64) GemmSm90 {
  TensorMap a, b, c;
  Operands product;
  Schedule schedule;
  int group;  // column tiles that are computed together, since their panels of B fit the L2
  int count;  // number of items, or -1: only the device knows it
  int keep_a;  // whether A is small enough to stay in the L2 beside these panels
  int groups, entries;  // how long the lists of groups and of their entries are
};
#ifdef GEMM_SM90_BYTES
CHECK_LAYOUT(GemmSm90, GEMM_SM90, (a)(b)(c)(product)(schedule)(group)(count)(keep_a)(groups)(entries))
#endif

// A warp of each CTA asks the L2 for lines of the lists. Four loads that depend on each other come before the first
// copies: the number of items, an item, its columns and its blocks. Small products feel each trip to the memory; this
// makes one of four.
template <int kRowTiles> __device__ __forceinline__ void prefetch_lists(const GemmSm90& problem) {
  const i64 at = i64(threadIdx.x % 32 * gridDim.x + blockIdx.x) * 128;
  const auto request = [&](const void* list, i64 bytes) {
    if (at < bytes) prefetch_line(static_cast<const u8*>(list) + at);
  };
  const Schedule& schedule = problem.schedule;
  request(schedule.items, i64(problem.groups) * sizeof(int4));
  request(schedule.columns, i64(problem.entries) * sizeof(int));
  request(schedule.blocks, i64(problem.entries) * kRowTiles * sizeof(int));
  request(schedule.row_tiles, i64(problem.groups) * kRowTiles * sizeof(int));
}

// The order of tiles. Sections of `group` column tiles are computed one after the other: the last one with the longest
// item first, the one before it in reverse order, and so on. So A is read again while the L2 still holds it, and short
// items come at the end.
struct TileScheduler {
  const int4* __restrict__ items;
  int* claims;
  int count, tiles_n, column_tiles, group;
  int dealt;  // number of tiles that are assigned in turn, not claimed

  __device__ __forceinline__ explicit TileScheduler(const GemmSm90& problem)
      : items(problem.schedule.items), claims(problem.schedule.counters),
        count(problem.count < 0 ? *problem.schedule.count : problem.count),
        tiles_n(int((problem.product.N + kTileN - 1) / kTileN)),
        column_tiles(tiles_n * int(problem.product.batches)), group(problem.group) {
    const int rounds = tiles() / int(gridDim.x);
    // Small products read no item but their own: a load that the first copy waits for is a twentieth of their time.
    dealt = (rounds > kClaimedRounds + 1 && is_even(rounds) ? rounds - kClaimedRounds : 1) * int(gridDim.x);
  }
  __device__ __forceinline__ int tiles() const { return count * column_tiles; }
  // Whether items are so equally long that CTAs that take turns end at about the same time.
  __device__ __forceinline__ bool is_even(int rounds) const {
    const auto length = [&](int i) { return items[i].z - items[i].y; };
    return i64(length(0) - length(count - 1)) * 8 <= i64(length(count / 2)) * rounds;
  }
  // The tile after t. CTAs take turns, so that those with the same item stay in step and find what they read of A and B
  // in the L2: 5 % faster with blocks of 64. The last rounds are claimed by whichever CTA is ready, and all rounds are
  // if items differ much.
  __device__ __forceinline__ int after(int t) const {
    return t + int(gridDim.x) < dealt ? t + int(gridDim.x) : dealt + atomicAdd(claims, 1);
  }
  __device__ __forceinline__ Tile at(int t) const {
    if (t >= tiles()) return {-1};
    const int section = t / (group * count), sections = (column_tiles + group - 1) / group;
    const int width = min(group, column_tiles - section * group);
    const int within = t - section * group * count;
    const int place = (sections - section) & 1 ? within / width : count - 1 - within / width;
    const int number = section * group + within % width;
    const int4 item = items[place];
    return {item.x, item.y, item.z, item.w, number % tiles_n * kTileN, number / tiles_n, number};
  }
};

// Every warp except the claiming one reads its next tile here, until it releases the tile.
template <class Shared>
__device__ __forceinline__ const Tile& next_tile(Shared& shared, const Ring<kTiles>& tiles) {
  wait(shared.tile_full[tiles.at], tiles.phase);
  return shared.tiles[tiles.at];
}
template <class Shared> __device__ __forceinline__ void release_tile(Shared& shared, Ring<kTiles>& tiles) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared.tile_empty[tiles.at]);
  tiles.next();
}
template <class Shared>
__device__ __forceinline__ void publish(Shared& shared, Ring<kTiles>& tiles, const Tile& tile) {
  wait(shared.tile_empty[tiles.at], tiles.phase ^ 1);
  shared.tiles[tiles.at] = tile;
  arrive(shared.tile_full[tiles.at]);
  tiles.next();
}

// One warp claims tiles and has panels of B copied: one lane calls copy(stage, row, k, tile) for the kDepth rows from
// `row` on, which belong to the columns of a block from k on. Lanes hold the next 32 block columns; those after them,
// in this tile or the next, are loaded meanwhile.
template <class Shared, class Copy>
__device__ __forceinline__ void produce_b(const GemmSm90& problem, Shared& shared, Copy copy) {
  const TileScheduler scheduler(problem);
  const int K = problem.product.K, lane = threadIdx.x % 32;
  Ring<kStages> ring;
  Ring<kTiles> tiles;
  const auto claim = [&](int t) {
    const Tile tile = scheduler.at(t);
    if (lane == 0) publish(shared, tiles, tile);
    else tiles.next();
    return tile;
  };
  const auto columns_from = [&](const Tile& tile, int e) {
    return tile.group >= 0 && e + lane < tile.last ? problem.schedule.columns[e + lane] : 0;
  };
  int claimed = blockIdx.x;
  Tile tile = claim(claimed);
  int ahead = columns_from(tile, tile.first);
  while (tile.group >= 0) {
    if (lane == 0) claimed = scheduler.after(claimed);
    Tile after{-1};
    if (tile.first >= tile.last) {
      after = claim(__shfl_sync(0xffffffffu, claimed, 0));
      ahead = columns_from(after, after.first);
    }
    for (int from = tile.first; from < tile.last; from += 32) {
      const int columns = ahead, count = min(32, tile.last - from);
      if (from + 32 < tile.last) ahead = columns_from(tile, from + 32);
      for (int i = 0; i < count; ++i) {
        const int row = __shfl_sync(0xffffffffu, columns, i) * K;
        for (int k = 0; k < K; k += kDepth) {
          wait(shared.empty[ring.at], ring.phase ^ 1);
          if (lane == 0) copy(ring.at, row + k, k, tile);
          __syncwarp();
          ring.next();
        }
        if (i == 0 && from + 32 >= tile.last) {
          after = claim(__shfl_sync(0xffffffffu, claimed, 0));
          ahead = columns_from(after, after.first);
        }
      }
    }
    tile = after;
  }
}

// One warp has blocks of A copied: one lane calls copy(stage, row tile, block, row, k) for the rows of a row tile, the
// first of which is `row` of its block, by kDepth columns from k on. These are `bytes` in shared memory. Lanes hold the
// next 32 blocks, for all row tiles; those of a block row have `high` rows.
template <int kRowTiles, class Shared, class Copy>
__device__ __forceinline__ void produce_a(const GemmSm90& problem, Shared& shared, u32 bytes, Copy copy, int high) {
  constexpr int kEntries = 32 / kRowTiles;
  const int K = problem.product.K, lane = threadIdx.x % 32;
  const Schedule& schedule = problem.schedule;
  Ring<kStages> ring;
  Ring<kTiles> tiles;
  const auto blocks_from = [&](const Tile& tile, int e) {
    return tile.group >= 0 && e * kRowTiles + lane < tile.last * kRowTiles ? schedule.blocks[e * kRowTiles + lane] : -1;
  };
  const auto sub_of = [&](const Tile& tile) {  // the first row of the block of lane s's row tile
    const int row_tile = tile.group < 0 || lane >= kRowTiles ? 0 : schedule.row_tiles[tile.group * kRowTiles + lane];
    return max(row_tile, 0) * kRowTileHeight % high;
  };
  Tile tile = next_tile(shared, tiles);
  release_tile(shared, tiles);
  int ahead = blocks_from(tile, tile.first), sub_ahead = sub_of(tile);
  while (tile.group >= 0) {
    const int sub = sub_ahead;
    Tile after{-1};
    const auto look_ahead = [&] {
      after = next_tile(shared, tiles);
      release_tile(shared, tiles);
      ahead = blocks_from(after, after.first);
      sub_ahead = sub_of(after);
    };
    if (tile.first >= tile.last) look_ahead();
    for (int from = tile.first; from < tile.last; from += kEntries) {
      const int blocks = ahead, count = min(kEntries, tile.last - from);
      const u32 all_present = __ballot_sync(0xffffffffu, blocks >= 0);
      if (from + kEntries < tile.last) ahead = blocks_from(tile, from + kEntries);
      for (int i = 0; i < count; ++i) {
        const u32 present = all_present >> (i * kRowTiles) & ((1u << kRowTiles) - 1);
        int block[kRowTiles], first[kRowTiles];
#pragma unroll
        for (int s = 0; s < kRowTiles; ++s) {
          block[s] = __shfl_sync(0xffffffffu, blocks, i * kRowTiles + s);
          first[s] = __shfl_sync(0xffffffffu, sub, s);
        }
        for (int k = 0; k < K; k += kDepth) {
          wait(shared.empty[ring.at], ring.phase ^ 1);
          if (lane == 0) {
            shared.present[ring.at] = present;
            barrier_expect(shared_address(&shared.full[ring.at]), __popc(present) * bytes);
#pragma unroll
            for (int s = 0; s < kRowTiles; ++s)
              if (present >> s & 1) copy(ring.at, s, block[s], first[s], k);
          }
          __syncwarp();
          ring.next();
        }
        if (i == 0 && from + kEntries >= tile.last) look_ahead();
      }
    }
    tile = after;
  }
}

// Adds the splits of a group. Each warpgroup writes its accumulators to global memory; the one that arrives last adds
// all of them, in their order. Returns false if another one will.
template <int kAccum, class Shared>
__device__ __forceinline__ bool gather(const GemmSm90& problem, Shared& shared, const Tile& tile, int warpgroup,
                                       float (&accum)[kAccum]) {
  const Schedule& schedule = problem.schedule;
  const int column_tiles = TileScheduler(problem).column_tiles;
  const int thread = threadIdx.x % 128;
  const auto place = [&](int split) {
    return schedule.partial + ((i64(split) * column_tiles + tile.number) * kConsumers + warpgroup) * (kAccum * 128) +
           thread * 4;
  };
  const int4 of_group = schedule.splits[tile.split];
  float* mine = place(tile.split);
#pragma unroll
  for (int e = 0; e < kAccum; e += 4)
    *reinterpret_cast<float4*>(mine + e * 128) = make_float4(accum[e], accum[e + 1], accum[e + 2], accum[e + 3]);
  __threadfence();
  warpgroup_sync(1 + warpgroup);
  if (thread == 0) {
    int* arrived = schedule.arrived + (of_group.x * column_tiles + tile.number) * kConsumers + warpgroup;
    shared.last[warpgroup] = atomicAdd(arrived, 1) == of_group.y - 1;
    if (shared.last[warpgroup]) *arrived = 0;
  }
  warpgroup_sync(1 + warpgroup);
  if (!shared.last[warpgroup]) return false;
  __threadfence();
  clear(accum);
  for (int split = of_group.x; split < of_group.x + of_group.y; ++split) {
    const float* theirs = place(split);
#pragma unroll
    for (int e = 0; e < kAccum; e += 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(theirs + e * 128));
      accum[e] += x.x, accum[e + 1] += x.y, accum[e + 2] += x.z, accum[e + 3] += x.w;
    }
  }
  return true;
}
