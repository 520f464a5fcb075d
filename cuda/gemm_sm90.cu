// C[row, n] = alpha * sum_p sum_k A[p, row % R, k] * B[col[p]*K + k, n] + beta * C[row, n],  p in the block row of `row`
// Hopper's tensor cores. A CTA stays and claims tiles of 128 x kTileN: one group of slots (see Schedule) by kTileN
// columns, walked over the union of the slots' block columns. The last warpgroup feeds a ring of stages, the first two
// multiply 64 rows each with wgmma.
// Slots of 64 and 128 rows fill a warpgroup: A is copied by the copy engine and multiplied from shared memory, and a
// warpgroup whose slot lacks a block sits the stage out. Smaller slots share a warpgroup: A goes through registers,
// which are zero where a slot lacks the block. 0 * Inf is NaN: sums that are not finite are computed again, exactly.
#include "bsr.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef LEADER
#define LEADER 0
#endif
#ifndef STAGGER
#define STAGGER 0
#endif

using Element = ELEMENT_A;
using C = ELEMENT_C;

enum { kDirect, kRows, kColumns };           // how C is written: element by element, as tiles of rows, of columns
constexpr bool kATransposed = A_TRANSPOSED;  // a stored block is K x R: the product is with the transpose
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: K runs fastest
constexpr bool kWide = WIDE;                 // N is a multiple of 64: the copy engine takes all slabs of a panel at once
constexpr int kStore = STORE;
constexpr bool kSplit = SPLIT;               // groups may come in pieces
constexpr int kSlotRows = SLOT_ROWS;
constexpr int kTileM = 128, kTileN = TILE_N;
constexpr int kSlots = kTileM / kSlotRows;
constexpr int kStages = STAGES;
constexpr int kStageK = 128 / sizeof(Element);   // one swizzled row
// Columns of A per step of the ring. From shared memory: kDepth at a time, the last kTail of a block with them.
// From registers: kChunk at a time, several chunks of the walk to a stage.
constexpr int kDepth = DEPTH, kTail = TAIL;
constexpr bool kFromRegisters = kSlotRows < 64;
constexpr int kChunk = kDepth, kChunks = kFromRegisters ? kStageK / kChunk : 1;
constexpr bool kFlat = FLAT;  // what a chunk takes of a block for a slot is one piece of memory

constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kSums = kTileN / 2;                // float32 sums per thread
constexpr int kSlabs = kTileN / 64;
constexpr int kStored = kSlotRows < 64 ? kSlotRows : 64;  // rows of a tile on its way out
constexpr int kStores = 64 / kStored;            // such tiles per warpgroup and slab
constexpr u32 kBytesA = kTileM * 128, kBytesB = kTileN * 128;
constexpr u32 kPieceA = kSlotRows * kChunk * 2;  // of one block for one slot and chunk, where A goes through registers
constexpr u32 kBytesOut = 64 * 64 * 2;           // one slab of C on its way out
// What one step copies of B, in one box or in one box per slab.
constexpr int kBoxes = kBTransposed || kWide ? 1 : kSlabs;
constexpr u32 kStepB = kBTransposed ? kTileN * (kFromRegisters ? kChunk * 2 : 128) : kDepth * kTileN * sizeof(Element);
static_assert(!kFromRegisters || sizeof(Element) == 2, "fragments of 16-bit floats");
static_assert(kStore == kDirect || sizeof(C) == 2, "tiles of 16-bit results");

struct Tile { int group, first, last, piece, column, batch, number; };  // group < 0: no more tiles

struct alignas(1024) Shared {
  u8 a[kStages][kBytesA];
  u8 b[kStages][kBytesB];
  u8 out[kStore == kDirect ? 1 : kConsumers * 2][kBytesOut];  // two slabs a warpgroup
  u64 full[kStages], empty[kStages], tile_full[2], tile_empty[2];
  u32 present[kStages];  // bit chunk * kSlots + slot: that slot has a block there
  Tile tiles[2];
  int last[kConsumers];
};

struct alignas(64) Problem {
  TensorMap a, b, c;
  Product<Element, Element, C, f32, int> product;
  Schedule schedule;
  int group;  // column tiles walked together, since their panels of B fit the L2
};

// With -DSTRESS every wait is preceded by a pause of 0 to 8 us that differs from warp to warp and from wait to wait.
__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
#ifdef STRESS
  const u32 noise = (clock() / 64 + threadIdx.x / 32 * 2654435761u) * 2246822519u;
  __nanosleep((noise >> 19) & 0x1fff);
#endif
  barrier_wait(shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive(u64& barrier) { barrier_arrive(shared_address(&barrier)); }

// A place in a ring of kSize and the parity of its barriers.
template <int kSize> struct Ring {
  int at = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == kSize) at = 0, phase ^= 1;
  }
};

// Tile number t. Sections of `group` column tiles are walked one after the other, the last one longest item first, the
// one before it backwards and so on: A is met again while the L2 still holds it, and the end is made of short items.
struct Walk {
  const int4* __restrict__ items;
  int count, tiles_n, column_tiles, group;

  __device__ __forceinline__ explicit Walk(const Problem& problem)
      : items(problem.schedule.items), count(*problem.schedule.count),
        tiles_n(int((problem.product.N + kTileN - 1) / kTileN)),
        column_tiles(tiles_n * int(problem.product.batches)), group(problem.group) {}
  __device__ __forceinline__ int tiles() const { return count * column_tiles; }
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

// Every role but the claiming thread learns from here what to do next. Called by whole warps.
__device__ __forceinline__ Tile next_tile(Shared& shared, Ring<2>& tiles) {
  wait(shared.tile_full[tiles.at], tiles.phase);
  const Tile tile = shared.tiles[tiles.at];
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared.tile_empty[tiles.at]);
  tiles.next();
  return tile;
}
__device__ __forceinline__ void publish(Shared& shared, Ring<2>& tiles, const Tile& tile) {
  wait(shared.tile_empty[tiles.at], tiles.phase ^ 1);
  shared.tiles[tiles.at] = tile;
  arrive(shared.tile_full[tiles.at]);
  tiles.next();
}

// kDepth rows of B from `row` on, by the tile's columns; `box` is the slab where they come one by one.
__device__ __forceinline__ void copy_panel(const Problem& problem, u32 to, int box, int row, const Tile& tile, u32 full,
                                           u64 policy) {
  if constexpr (kBTransposed) copy_tile(to, &problem.b, row, tile.column, 0, tile.batch, full, policy);
  else if constexpr (kWide) copy_tile(to, &problem.b, 0, row, tile.column / 64, tile.batch, full, policy);
  else copy_tile(to + box * kDepth * 128, &problem.b, tile.column + box * 64, row, 0, tile.batch, full, policy);
}

// --------------------------------------------------------------------------------------------- slots of 64 and 128
// One thread: claims tiles and copies panels of B.
__device__ __forceinline__ void feed_b(const Problem& problem, Shared& shared) {
  const Walk walk(problem);
  const int K = problem.product.K;
  const u64 again = evict_last();
  Ring<kStages> ring;
  Ring<2> tiles;
  Tile tile = walk.at(blockIdx.x);
  while (true) {
    publish(shared, tiles, tile);
    if (tile.group < 0) break;
    const int claimed = gridDim.x + atomicAdd(problem.schedule.counters, 1);
    int column = tile.first < tile.last ? problem.schedule.columns[tile.first] : 0;
    for (int e = tile.first; e < tile.last; ++e) {
      const int row = column * K;
      if (e + 1 < tile.last) column = problem.schedule.columns[e + 1];
      for (int k = 0; k < K; k += kDepth) {
        wait(shared.empty[ring.at], ring.phase ^ 1);
        const u32 full = shared_address(&shared.full[ring.at]), b = shared_address(shared.b[ring.at]);
        barrier_expect(full, kStepB);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) copy_panel(problem, b, box, row + k, tile, full, again);
        ring.next();
      }
    }
    tile = walk.at(claimed);
  }
}

// One warp, of which one lane copies blocks of A.
__device__ __forceinline__ void feed_a(const Problem& problem, Shared& shared) {
  const int R = problem.product.R, K = problem.product.K;
  const Schedule& schedule = problem.schedule;
  const bool copies = threadIdx.x % 32 == 0;
  const u64 once = evict_first();
  Ring<kStages> ring;
  Ring<2> tiles;
  while (true) {
    const Tile tile = next_tile(shared, tiles);
    if (tile.group < 0) break;
    if (!copies) continue;
    int sub[kSlots], block[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      sub[s] = max(schedule.slots[tile.group * kSlots + s], 0) * kSlotRows % R;
      block[s] = tile.first < tile.last ? schedule.blocks[tile.first * kSlots + s] : -1;
    }
    for (int e = tile.first; e < tile.last; ++e) {
      int now[kSlots];
      u32 present = 0;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        now[s] = block[s];
        present |= u32(now[s] >= 0) << s;
        if (e + 1 < tile.last) block[s] = schedule.blocks[(e + 1) * kSlots + s];
      }
      for (int k = 0; k < K; k += kDepth) {
        wait(shared.empty[ring.at], ring.phase ^ 1);
        const u32 full = shared_address(&shared.full[ring.at]), a = shared_address(shared.a[ring.at]);
        shared.present[ring.at] = present;
        constexpr u32 kBytes = kSlotRows * (kATransposed ? kDepth * sizeof(Element) : 128);
        barrier_expect(full, __popc(present) * kBytes);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (now[s] < 0) continue;
          if constexpr (kATransposed) {
#pragma unroll
            for (int slab = 0; slab < kSlotRows / 64; ++slab)
              copy_tile(a + (s + slab) * kDepth * 128, &problem.a, sub[s] + slab * 64, now[s] * K + k, full, once);
          } else {
            copy_tile(a + s * kSlotRows * 128, &problem.a, k, now[s] * R + sub[s], full, once);
          }
        }
        ring.next();
      }
    }
  }
}

// Start the products of one stage: kSteps times 32 bytes of K. The fence belongs to the branch it is called in.
template <int kSteps> __device__ __forceinline__ void multiply(float (&sums)[kSums], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<kATransposed, !kBTransposed>(
        sums,
        kATransposed ? wgmma_descriptor(a + step * 2048, kDepth * 128, 1024)
                     : wgmma_descriptor(a + step * 32, 16, 1024),
        kBTransposed ? wgmma_descriptor(b + step * 32, 16, 1024)
                     : wgmma_descriptor(b + step * 2048, kDepth * 128, 1024));
  wgmma_commit();
}

__device__ __forceinline__ void multiply_tile(const Problem& problem, Shared& shared, const Tile& tile, int warpgroup,
                                              Ring<kStages>& ring, float (&sums)[kSums]) {
  const int K = problem.product.K;
  const bool signals = threadIdx.x % (LEADER ? 128 : 32) == 0;
  const u32 a_rows = warpgroup * (kATransposed ? kDepth * 128 : 64 * 128);
  int previous = -1;  // stage whose products may still be running
  for (int e = tile.first; e < tile.last; ++e) {
    for (int k = 0; k < K; k += kDepth) {
      wait(shared.full[ring.at], ring.phase);
      const u32 a = shared_address(shared.a[ring.at]) + a_rows, b = shared_address(shared.b[ring.at]);
      bool mine = true;
      if constexpr (kSlots > 1) mine = __shfl_sync(0xffffffffu, shared.present[ring.at] >> warpgroup & 1, 0);
      if (mine) {
        if (kTail > 0 && k + kDepth > K) multiply<kTail / MMA_K>(sums, a, b);
        else multiply<kDepth / MMA_K>(sums, a, b);
        if (previous >= 0) {
          wgmma_wait<1>();
          if (signals) arrive(shared.empty[previous]);
        }
        previous = ring.at;
      } else {
        if (previous >= 0) {
          wgmma_wait<0>();
          if (signals) arrive(shared.empty[previous]);
        }
        if (signals) arrive(shared.empty[ring.at]);
        previous = -1;
      }
      ring.next();
    }
  }
  wgmma_wait<0>();
  if (previous >= 0 && signals) arrive(shared.empty[previous]);
}

// --------------------------------------------------------------------------------------------- slots of 16 and 32
// Four warps: the first also claims tiles and copies panels of B. A lane knows the block of one (chunk, slot); each
// warp copies every fourth of them, 16 bytes a lane. In shared memory the 16-byte pieces of a block's rows lie column
// by column, so that the 8 rows which ldmatrix reads at a time are neighbours.
__device__ __forceinline__ void feed_small(const Problem& problem, Shared& shared) {
  const Walk walk(problem);
  const Schedule& schedule = problem.schedule;
  const int R = problem.product.R, K = problem.product.K;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  constexpr int kPairs = kChunks * kSlots;
  static_assert(kPairs <= 32 && kChunks * kBoxes <= 32, "one lane each");
  const int per_block = K / kChunk;
  const u64 once = evict_first(), again = evict_last();
  Ring<kStages> ring;
  Ring<2> claims, tiles;
  if (threadIdx.x % 128 == 0) publish(shared, claims, walk.at(blockIdx.x));
  while (true) {
    const Tile tile = next_tile(shared, tiles);
    if (tile.group < 0) break;
    int claimed = 0;
    if (threadIdx.x % 128 == 0) claimed = gridDim.x + atomicAdd(schedule.counters, 1);
    const int chunks = (tile.last - tile.first) * per_block;
    const int slot = lane % kSlots;
    const int sub = max(schedule.slots[tile.group * kSlots + slot], 0) * kSlotRows % R;
    // What lane `lane` is to copy for the stage that starts with chunk c: a block of A, and a panel of B.
    const auto block_at = [&](int c) {
      c += lane / kSlots;
      return lane < kPairs && c < chunks ? schedule.blocks[(tile.first + c / per_block) * kSlots + slot] : -1;
    };
    const auto column_at = [&](int c) {
      c += lane / kBoxes;
      return warp == 0 && lane < kChunks * kBoxes && c < chunks ? schedule.columns[tile.first + c / per_block] : -1;
    };
    int block = block_at(0), column = column_at(0);
    for (int c = 0; c < chunks; c += kChunks) {
      const int my_block = block, my_column = column;
      const u32 present = __ballot_sync(0xffffffffu, my_block >= 0);
      block = block_at(c + kChunks);
      column = column_at(c + kChunks);
      wait(shared.empty[ring.at], ring.phase ^ 1);
      const u32 full = shared_address(&shared.full[ring.at]), a = shared_address(shared.a[ring.at]);
      if (warp == 0) {
        if (lane == 0) {
          shared.present[ring.at] = present;
          barrier_expect(full, min(kChunks, chunks - c) * kStepB + (kFlat ? __popc(present) * kPieceA : 0));
        }
        __syncwarp();
        if (my_column >= 0) {
          const int q = lane / kBoxes;
          const int row = my_column * K + (c + q) % per_block * kChunk;
          const u32 b = shared_address(shared.b[ring.at]) + q * kStepB;
          copy_panel(problem, b, lane % kBoxes, row, tile, full, again);
        }
      }
      if constexpr (kFlat) {
        if (lane % 4 == warp && my_block >= 0) {
          const int k0 = (c + lane / kSlots) % per_block * kChunk;
          const i64 from = i64(my_block) * R * K + (kATransposed ? k0 * R : sub * K);
          copy_tile(a + lane * kPieceA, &problem.a, 0, int(from / 64), full, once);
        }
      } else {
#pragma unroll 1
        for (u32 left = present & (0x11111111u << warp); left; left &= left - 1) {
          const int pair = __ffs(left) - 1;
          const i64 p = __shfl_sync(0xffffffffu, my_block, pair);
          const int first = __shfl_sync(0xffffffffu, sub, pair % kSlots);
          const int k0 = (c + pair / kSlots) % per_block * kChunk;
          // The stored piece has kHigh rows of kPieces * 16 bytes. A lane takes every kStride-th row of one column.
          constexpr int kHigh = kATransposed ? kChunk : kSlotRows, kPieces = (kATransposed ? kSlotRows : kChunk) / 8;
          constexpr int kStride = 32 / kPieces;
          const int pitch = kATransposed ? R : K;
          const int x = (kATransposed ? first : k0) + lane % kPieces * 8, y = (kATransposed ? k0 : first) + lane / kPieces;
          const Element* from = problem.product.data + (p * R * K + y * pitch + x);
          u32 to = a + pair * kPieceA + (lane % kPieces * kHigh + lane / kPieces) * 16;
#pragma unroll
          for (int i = 0; i < kHigh / kStride; ++i, from += kStride * pitch, to += kStride * 16) copy_16(to, from);
        }
        copies_arrive(full);
      }
      ring.next();
    }
    if (threadIdx.x % 128 == 0) publish(shared, claims, walk.at(claimed));
  }
}

__device__ __forceinline__ void multiply_small(const Problem& problem, Shared& shared, const Tile& tile, int warpgroup,
                                               Ring<kStages>& ring, float (&sums)[kSums]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row = warpgroup * 64 + warp * 16, slot = row / kSlotRows, m = row % kSlotRows;
  constexpr int kSteps = kChunk / 16;
  constexpr u32 kMine = (1u << kSlots / 2) - 1;  // the slots of one warpgroup
  // Where the 16 bytes lie that this lane names to ldmatrix: 8 elements of row y of the stored piece, from x on.
  u32 fragment[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int y = kATransposed ? step * 16 + lane / 16 * 8 + lane % 8 : m + lane % 16;
    const int x = kATransposed ? m + lane / 8 % 2 * 8 : step * 16 + lane / 16 * 8;
    constexpr int kHigh = kATransposed ? kChunk : kSlotRows, kWidth = kATransposed ? kSlotRows : kChunk;
    const u32 line = slot * kPieceA + (y * kWidth + x) * 2;
    fragment[step] = kFlat ? line ^ (line >> 3 & 0x70) : slot * kPieceA + (x / 8 * kHigh + y) * 16;
  }
  const int chunks = (tile.last - tile.first) * (problem.product.K / kChunk);
  for (int c = 0; c < chunks; c += kChunks) {
    wait(shared.full[ring.at], ring.phase);
    const u32 present = __shfl_sync(0xffffffffu, shared.present[ring.at], 0);
    const u32 a = shared_address(shared.a[ring.at]), b = shared_address(shared.b[ring.at]);
    u32 x[kChunks][kSteps][4];
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      if (present >> (q * kSlots + slot) & 1) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          load_matrix_x4<kATransposed>(x[q][step], a + q * (kSlots * kPieceA) + fragment[step]);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i) x[q][step][i] = 0;
      }
    }
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      if (!(present >> (q * kSlots + warpgroup * kSlots / 2) & kMine)) continue;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const u32 at = b + q * kStepB;
        wgmma<!kBTransposed>(sums, x[q][step],
                             kBTransposed ? wgmma_descriptor(at + step * 32, 16, kChunk * 16, kChunk * 2)
                                          : wgmma_descriptor(at + step * 2048, kChunk * 128, 1024));
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) arrive(shared.empty[ring.at]);
    ring.next();
  }
}

// ------------------------------------------------------------------------------------------------------ the result
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if constexpr (Same<C, bf16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The sums of a group that came in pieces. Each warpgroup leaves its own in global memory; the one that comes last
// adds all of them, in their order. False: another one will.
__device__ __forceinline__ bool gather(const Problem& problem, Shared& shared, const Tile& tile, int column_tiles,
                                       int warpgroup, float (&sums)[kSums]) {
  const Schedule& schedule = problem.schedule;
  const int thread = threadIdx.x % 128;
  const auto place = [&](int piece) {
    return schedule.partial + ((i64(piece) * column_tiles + tile.number) * kConsumers + warpgroup) * (kSums * 128) +
           thread * 4;
  };
  const int4 split = schedule.splits[tile.piece];
  float* mine = place(tile.piece);
#pragma unroll
  for (int e = 0; e < kSums; e += 4)
    *reinterpret_cast<float4*>(mine + e * 128) = make_float4(sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
  __threadfence();
  warpgroup_sync(1 + warpgroup);
  if (thread == 0) {
    int* arrived = schedule.arrived + (split.x * column_tiles + tile.number) * kConsumers + warpgroup;
    shared.last[warpgroup] = atomicAdd(arrived, 1) == split.y - 1;
    if (shared.last[warpgroup]) *arrived = 0;
  }
  warpgroup_sync(1 + warpgroup);
  if (!shared.last[warpgroup]) return false;
  __threadfence();
#pragma unroll
  for (int e = 0; e < kSums; ++e) sums[e] = 0;
  for (int piece = split.x; piece < split.x + split.y; ++piece) {
    const float* theirs = place(piece);
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(theirs + e * 128));
      sums[e] += x.x, sums[e + 1] += x.y, sums[e + 2] += x.z, sums[e + 3] += x.w;
    }
  }
  return true;
}

// One element, block by block: for sums that an absent block may have spoiled.
__device__ __noinline__ float exact_sum(const Problem& problem, int first, int last, int slot, int row, i64 column,
                                        int batch) {
  const auto& product = problem.product;
  const int R = product.R, K = product.K;
  const Element* b = product.b + batch * product.b_batch + column * product.b_col;
  float sum = 0;
  for (int e = first; e < last; ++e) {
    const i64 p = problem.schedule.blocks[e * kSlots + slot];
    const i64 k0 = i64(problem.schedule.columns[e]) * K;
    if (p < 0 || k0 >= product.block_cols * K) continue;
    const Element* a = product.data + p * R * K + (kATransposed ? row : row * K);
    for (int k = 0; k < K; ++k)
      sum = fmaf(load<f32>(a[k * (kATransposed ? R : 1)]), load<f32>(b[(k0 + k) * product.b_row]), sum);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_sm90(const __grid_constant__ Problem problem) {
  extern __shared__ u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(memory) + 1023) & ~u64(1023));
  const auto& product = problem.product;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.full[s]), !kFromRegisters ? 2 : kFlat ? 1 : 1 + 128);
      barrier_init(shared_address(&shared.empty[s]), kConsumers * (LEADER && !kFromRegisters ? 1 : 4));
    }
    for (int s = 0; s < 2; ++s) {
      barrier_init(shared_address(&shared.tile_full[s]), 1);
      barrier_init(shared_address(&shared.tile_empty[s]), kConsumers * 4 + (kFromRegisters ? 4 : 1));
    }
    barrier_init_fence();
  }
#ifdef STRESS  // slots start as NaN, so that a product of what was never copied shows
  for (u32 i = threadIdx.x; i < kStages * (kBytesA + kBytesB) / 4; i += kThreads)
    reinterpret_cast<u32*>(shared.a)[i] = 0xffffffffu;
  proxy_fence();
#endif
  __syncthreads();

  if (warpgroup == kConsumers) {
    fewer_registers<56>();
    if constexpr (kFromRegisters) {
      feed_small(problem, shared);
    } else {
      if (warp == 0 && lane == 0) feed_b(problem, shared);
      if (warp == 1) feed_a(problem, shared);
    }
  } else {
    more_registers<224>();
    const int row = warpgroup * 64 + warp * 16 + lane / 4;  // of this thread's first sums; the others are 8 rows below
    const int slot = row / kSlotRows;
    const bool stores = threadIdx.x % 128 < kStores;
    const u64 once = evict_first();
    const int column_tiles = Walk(problem).column_tiles;
    Ring<kStages> ring;
    Ring<2> tiles;
    int slab_out = 0;
    if (STAGGER && warpgroup == 1) __nanosleep(STAGGER);
    while (true) {
      const Tile tile = next_tile(shared, tiles);
      if (tile.group < 0) break;
      const int slot_row = problem.schedule.slots[tile.group * kSlots + slot];
      const int stored_row =  // of the tile that this thread sends out
          stores ? problem.schedule.slots[tile.group * kSlots + (warpgroup * 64 + lane * kStored) / kSlotRows] : -1;
      float sums[kSums];
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums[e] = 0;
      if constexpr (kFromRegisters) multiply_small(problem, shared, tile, warpgroup, ring, sums);
      else multiply_tile(problem, shared, tile, warpgroup, ring, sums);
      int first = tile.first, last = tile.last;
      if constexpr (kSplit) {
        if (tile.piece >= 0) {
          if (!gather(problem, shared, tile, column_tiles, warpgroup, sums)) continue;
          const int4 split = problem.schedule.splits[tile.piece];
          first = split.z, last = split.w;
        }
      }
      bool again = false;
      if constexpr (kFromRegisters) {
        float probe = 0;
#pragma unroll
        for (int e = 0; e < kSums; ++e) probe = fmaf(sums[e], 0.f, probe);
        again = warpgroup_any(1 + warpgroup, probe != 0);
      }
      // Thread holds rows lane / 4 and + 8 of its warp's 16, columns 2 * (lane % 4) + 8 j and the next.
      if constexpr (kStore != kDirect) {
        constexpr int kPitch = kStore == kRows ? 128 : kStored * 2;  // bytes, also the width of the swizzle
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const u32 out = shared_address(shared.out[warpgroup * 2 + slab_out]);
          if (stores) store_wait_read<1>();  // the store that used this slab before has read it
          warpgroup_sync(1 + warpgroup);
#pragma unroll
          for (int chunk = 0; chunk < 4; ++chunk) {  // 16 columns: two 8 x 8 matrices above two others
            const float* s = sums + slab * 32 + chunk * 8;
            // The 16-byte row that this lane names: of C's row (kRows) or of its column (kColumns)
            const int m = warp * 16 + (kStore == kRows ? lane % 16 : lane / 8 % 2 * 8);
            const int n = chunk * 16 + (kStore == kRows ? lane / 16 * 8 : lane / 16 * 8 + lane % 8);
            const u32 at = kStore == kRows ? m * 128 + n * 2 : n * kPitch + m % kStored * 2;
            const u32 base = kStore == kRows ? 0 : m / kStored * (64 * kPitch);
            store_matrix_x4<kStore == kColumns>(
                out + base + (at ^ (at >> 3 & (kPitch - 16))),
                pack(product.alpha * s[0], product.alpha * s[1]), pack(product.alpha * s[2], product.alpha * s[3]),
                pack(product.alpha * s[4], product.alpha * s[5]), pack(product.alpha * s[6], product.alpha * s[7]));
          }
          proxy_fence();
          warpgroup_sync(1 + warpgroup);
          if (stores) {
            if (stored_row >= 0) {
              const int y = stored_row * kSlotRows + (warpgroup * 64 + lane * kStored) % kSlotRows;
              const int x = tile.column + slab * 64;
              store_tile(&problem.c, kStore == kRows ? x : y, kStore == kRows ? y : x, 0, tile.batch,
                         out + lane * (kStored * 128), once);
            }
            store_commit();
          }
          slab_out ^= 1;
        }
      } else if (slot_row >= 0) {
        i64 n = tile.column + lane % 4 * 2;
        C* corner = product.c + tile.batch * product.c_batch + n * product.c_col +
                    (i64(slot_row) * kSlotRows + row % kSlotRows) * product.c_row;
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float sum = sums[j * 4 + e];
            if (n + e % 2 >= product.N || (kFromRegisters && sum * 0.f != 0)) continue;
            C* target = corner + e / 2 * 8 * product.c_row + e % 2 * product.c_col;
            const f32 old = product.read_c ? product.beta * load<f32>(*target) : 0;
            *target = Store<C>::from(fmaf(product.alpha, sum, old));
          }
          n += 8;
          corner += 8 * product.c_col;
        }
      }
      if constexpr (kFromRegisters) {
        if (!again) continue;
        u32 spoiled[kSums / 32] = {};
#pragma unroll
        for (int e = 0; e < kSums; ++e) spoiled[e / 32] |= u32(sums[e] * 0.f != 0) << (e % 32);
        if (kStore != kDirect && stores) store_wait();
        warpgroup_sync(1 + warpgroup);
        if (slot_row < 0) continue;
#pragma unroll
        for (int word = 0; word < kSums / 32; ++word) {
          for (u32 left = spoiled[word]; left; left &= left - 1) {
            const int e = word * 32 + __ffs(left) - 1;
            const int in_slot = row % kSlotRows + e / 2 % 2 * 8;
            const i64 n = tile.column + e / 4 * 8 + lane % 4 * 2 + e % 2;
            if (n >= product.N) continue;
            const i64 global_row = i64(slot_row) * kSlotRows + in_slot;
            const float sum = exact_sum(problem, first, last, slot, int(global_row % product.R), n, tile.batch);
            C* target = product.c + tile.batch * product.c_batch + global_row * product.c_row + n * product.c_col;
            const f32 old = product.read_c ? product.beta * load<f32>(*target) : 0;
            *target = Store<C>::from(fmaf(product.alpha, sum, old));
          }
        }
      }
    }
    if (kStore != kDirect && stores) store_wait_read<0>();
  }
  // The last CTA to end leaves the counters as it found them.
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(problem.schedule.counters + 1, 1) == gridDim.x - 1) {
      problem.schedule.counters[0] = 0;
      problem.schedule.counters[1] = 0;
    }
  }
}
