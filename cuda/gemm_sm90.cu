// C[i, n] = alpha * sum_p sum_k A[p, i % R, k] * B[col[p]*K + k, n] + beta * C[i, n],  p in the block row of row i
// Hopper's tensor cores: 16-bit floats, fp8, tf32, and float32 by three products of tf32 (docs/kernels/three-tf32.md).
// CTAs are persistent and claim tiles of kTileM x kTileN: one group of row tiles of the work list by kTileN columns,
// computed over the union of the row tiles' block columns. The last warpgroup is the producer: TMA copies operands into
// a ring of 4 to 8 stages of 128 bytes of K. The first two are consumers: 64 rows each with wgmma, or the same 64 rows
// by half of the columns each where tiles are few. Row tiles of 64 and 128 rows come from shared memory, and a
// warpgroup whose row tile lacks the block sits the stage out. Row tiles of 16 and 32 rows come through registers, with
// zeros where a row tile lacks the block: accumulators that are not finite are computed again. Groups longer than a
// CTA's fair share are cut into splits, which the last CTA adds in order. A delayed epilogue: half of C leaves at once,
// the other half, as 16-bit words in registers, during the next tile. Blocks of 128 are limited by the tensor cores and
// the power limit, blocks of 64 by the L2.
#include "common/gemm_sm90.cuh"
#include "ptx/convert.cuh"
#include "ptx/reduce.cuh"
#include "ptx/wgmma.cuh"

// Float32 is multiplied as tf32 in two parts (PARTS = 2): B is a copy in two parts, one behind the other, and A is split
// in registers. The tensor cores truncate what they add, so their accumulators extend over one stage only, and rounded
// additions make the long sum.

enum { kDirect, kRows, kColumns };  // how C is written: element by element, as tiles of rows, or as tiles of columns
constexpr bool kATransposed = A_TRANSPOSED;  // a stored block is K x R: the product is with the transpose
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: K is the fastest index
constexpr bool kWide = WIDE;                 // N is a multiple of 64: one copy has all slabs of a panel
constexpr int kStore = STORE;
#ifndef TILE_M
#define TILE_M 128
#endif
#ifndef PARTS
#define PARTS 1
#endif
constexpr int kParts = PARTS;
constexpr int kTileM = TILE_M;
// A tile of 64 rows: both warpgroups multiply all of them, by half of the columns each, or if there are but 64 columns by
// every other stage each (kTurns).
constexpr bool kTurns = kTileM == 64 && kTileN == 64, kLow = kTileM == 64 && !kTurns;
constexpr int kOwn = kLow ? kTileN / 2 : kTileN;  // columns of a warpgroup
constexpr int kRowTiles = kTileM / kRowTileHeight;
constexpr int kStageK = 128 / sizeof(Element);   // one swizzled row
constexpr int kUnit = 16 / sizeof(Element);      // elements of 16 bytes
// From shared memory, a step of the ring has kDepth columns of A. From registers, it has several chunks of kChunk columns.
constexpr bool kFromRegisters = kRowTileHeight < 64;
static_assert(kParts == 1 || (kFromRegisters && sizeof(Element) == 4), "A is split in registers");
constexpr int kChunk = kDepth, kChunks = kFromRegisters ? kStageK / kChunk : 1;
constexpr bool kFlat = FLAT;  // the part of a block for a row tile and a chunk is contiguous in memory
constexpr bool kLines = kParts > 1 && !kFlat && kChunk == kStageK;  // or it has rows of 128 bytes
constexpr bool kByTma = kFlat || kLines;  // whether TMA copies such parts

constexpr int kAccum = kOwn / 2;                 // float32 accumulators of a thread
constexpr int kSlabs = kOwn / 64;                // slabs of 64 columns of C of a warpgroup
// Whether fragments of A are loaded a stage ahead: 4 % faster here, slower in other cases.
constexpr bool kAhead = kRowTileHeight == 32 && kDepth == 32 && kParts == 1;
constexpr int kWaiting = kAhead ? 1 : (kSlabs + 1) / 2;  // slabs of C that are stored late, as registers allow
constexpr u32 kBytesA = kTileM * 128, kBytesB = kParts * kTileN * 128;
constexpr u32 kBytesOut = 16 * 64 * 2;           // a warp's rows of one slab of C before they are stored
// Bytes of one block for one row tile and chunk, if A goes through registers.
constexpr u32 kBlockBytes = kRowTileHeight * kChunk * sizeof(Element);
// The bytes of B that one step copies, in one box or in one box per slab.
constexpr int kBoxes = kBTransposed || kWide ? 1 : kTileN / 64;
constexpr u32 kBytesK = (kFromRegisters ? kChunk : kStageK) * sizeof(Element);  // of a column of B, if K is the fastest index
constexpr u32 kPartB = kBTransposed ? kTileN * kBytesK : kDepth * kTileN * sizeof(Element), kStepB = kParts * kPartB;
static_assert(!kFromRegisters || sizeof(Element) == 2 || (sizeof(Element) == 4 && !kATransposed && kBTransposed),
              "fragments of 16-bit floats, or of tf32 along K");
static_assert(kStore == kDirect || sizeof(C) == 2, "tiles of 16-bit results");
static_assert(kTileM == 128 || kRowTileHeight == 64, "both warpgroups multiply the same row tile");

struct alignas(1024) Shared {
  u8 a[kStages][kBytesA];
  u8 b[kStages][kBytesB];
  u8 out[kConsumers * 4 * 2][kBytesOut];  // two slabs per warp
  u64 full[kStages], empty[kStages], tile_full[kTiles], tile_empty[kTiles];
  u32 present[kStages];  // bit chunk * kRowTiles + row tile: that row tile has a block there
  Tile tiles[kTiles];
  int last[kConsumers];
};

// Row tiles of 16 and 32 rows gain nothing from uniform registers, and have no registers to spare.
__device__ __forceinline__ int uniform_if_large(int x) { return kFromRegisters ? x : uniform(x); }
__device__ __forceinline__ Tile uniform_if_large(const Tile& x) {
  const auto each = [](int field) { return uniform_if_large(field); };
  return {each(x.group), each(x.first), each(x.last), each(x.split), each(x.column), each(x.batch), each(x.number)};
}

// Copies kDepth rows of B from `row` on, by the tile's columns; `box` is the slab if slabs are copied one by one.
__device__ __forceinline__ void copy_panel(const GemmSm90& problem, u32 to, int box, int row, const Tile& tile, u32 full,
                                           u64 policy) {
  if constexpr (kBTransposed) copy_tile(to, &problem.b, row, tile.column, 0, tile.batch, full, policy);
  else if constexpr (kWide) copy_tile(to, &problem.b, 0, row, tile.column / 64, tile.batch, full, policy);
  else copy_tile(to + box * kDepth * 128, &problem.b, tile.column + box * 64, row, 0, tile.batch, full, policy);
}

// ------------------------------------------------------------------------------------------------- storing tiles of C
// A warp's 16 rows of a tile on their way to C. The last kWaiting slabs wait in registers, rounded, and are stored one
// by one while the next tile is multiplied; the others are stored at once, through shared memory that is free at that
// moment.
struct DelayedEpilogue {
  u32 words[kWaiting * 16];
  int slabs = 0;  // slabs that wait
  int row, column, batch;

  __device__ __forceinline__ void take(const GemmSm90& problem, Shared& shared, const float (&accum)[kAccum],
                                       int at_row, const Tile& tile) {
    row = at_row, column = tile.column, batch = tile.batch;
    // A thread holds rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) + 8 j and the next.
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      u32 now[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) now[i] = pack<C>(accum[slab * 32 + 2 * i], accum[slab * 32 + 2 * i + 1]);
      if (slab < kSlabs - kWaiting) {
        store(problem, shared, slab, now);
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) words[(slab - (kSlabs - kWaiting)) * 16 + i] = now[i];
      }
    }
    slabs = kWaiting;
  }
  __device__ __forceinline__ void store(const GemmSm90& problem, Shared& shared, int slab, const u32* now) const {
    const int lane = threadIdx.x % 32;
    const u32 out = shared_address(shared.out[threadIdx.x / 32 * 2 + slab % 2]);
    // Waits until the store that used this memory before has read it.
    if (lane == 0) store_wait_read<kSlabs == 1 ? 0 : 1>();
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {  // 16 columns: two 8 x 8 matrices above two others
      const u32* w = now + chunk * 4;
      // The 16 bytes whose address this lane gives: of a row of C (kRows), or of a column (kColumns), which is 32 bytes
      // long.
      constexpr int kPitch = kStore == kRows ? 128 : 32;
      const u32 at = kStore == kRows ? lane % 16 * 128 + (chunk * 2 + lane / 16) * 16
                                     : (chunk * 16 + lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
      store_matrix_x4<kStore == kColumns>(out + (at ^ (at >> 3 & (kPitch - 16))), w[0], w[1], w[2], w[3]);
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) {
      const int x = column + slab * 64;
      store_tile(&problem.c, kStore == kRows ? x : row, kStore == kRows ? row : x, 0, batch, out, evict_first());
      store_commit();
    }
  }
  // Stores one slab, if any waits.
  __device__ __forceinline__ void step(const GemmSm90& problem, Shared& shared) {
    if constexpr (kStore != kDirect) {
      if (slabs == 0) return;
#pragma unroll
      for (int i = 0; i < kWaiting; ++i)
        if (slabs == kWaiting - i) store(problem, shared, kSlabs - kWaiting + i, words + i * 16);
      --slabs;
    }
  }
  __device__ __forceinline__ void finish(const GemmSm90& problem, Shared& shared) {
#pragma unroll
    for (int slab = 0; slab < kWaiting; ++slab) step(problem, shared);
  }
};

// --------------------------------------------------------------------------------------------- row tiles of 64 and 128
// One warp copies panels of B, another one blocks of A.
__device__ __forceinline__ void produce_large(const GemmSm90& problem, Shared& shared, int warp) {
  const int R = problem.product.R, K = problem.product.K;
  if (warp == 0) {
    const u64 again = evict_last();
    produce_b(problem, shared, [&](int stage, int row, int, const Tile& tile) {
      const u32 full = shared_address(&shared.full[stage]), b = shared_address(shared.b[stage]);
      barrier_expect(full, kStepB);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) copy_panel(problem, b, box, row, tile, full, again);
    });
  }
  if (warp == 1) {
    constexpr u32 kBytes = kRowTileHeight * (kATransposed ? kDepth * sizeof(Element) : 128);
    const u64 once = problem.keep_a ? evict_last() : evict_first();
    produce_a<kRowTiles>(problem, shared, kBytes, [&](int stage, int row_tile, int block, int row, int k) {
      const u32 full = shared_address(&shared.full[stage]), a = shared_address(shared.a[stage]);
      if constexpr (kATransposed) {
#pragma unroll
        for (int slab = 0; slab < kRowTileHeight / 64; ++slab)
          copy_tile(a + (row_tile + slab) * kDepth * 128, &problem.a, row + slab * 64, block * K + k, full, once);
      } else {
        copy_tile(a + row_tile * kRowTileHeight * 128, &problem.a, k, block * R + row, full, once);
      }
    }, R);
  }
}

// NVRTC before 12.9 runs the products one after the other (C7515) if the first one is the first to write to the
// accumulators.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1209
constexpr bool kClearsFirst = true;
#else
constexpr bool kClearsFirst = false;
#endif

// Starts the products of one stage: kSteps times 32 bytes of K. The fence belongs to the branch in which this is
// called.
template <int kSteps> __device__ __forceinline__ void multiply(float (&accum)[kAccum], u32 a, u32 b, bool& any) {
  const u64 from_a = kATransposed ? wgmma_descriptor(a, kDepth * 128, 1024) : wgmma_descriptor(a, 16, 1024);
  const u64 from_b = kBTransposed ? wgmma_descriptor(b, 16, 1024) : wgmma_descriptor(b, kDepth * 128, 1024);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma<kATransposed, !kBTransposed>(accum, any, from_a + step * (kATransposed ? 2048 : 32) / 16,
                                       from_b + step * (kBTransposed ? 32 : 2048) / 16);
    any = true;
  }
  wgmma_commit();
}

// Returns whether the accumulators are set; the first product writes to them without reading them unless they were
// cleared.
__device__ __forceinline__ bool multiply_tile(const GemmSm90& problem, Shared& shared, const Tile& tile, int warpgroup,
                                              Ring<kStages>& ring, float (&accum)[kAccum], DelayedEpilogue& epilogue) {
  if constexpr (kClearsFirst) clear(accum);
  bool any = kClearsFirst;
  const int K = problem.product.K;
  const bool signals = threadIdx.x % 32 == 0;
  const u32 a_rows = kLow || kTurns ? 0 : warpgroup * (kATransposed ? kDepth * 128 : 64 * 128);
  const u32 b_columns = kLow ? warpgroup * (kBTransposed ? kOwn : kSlabs * kDepth) * 128 : 0;
  int previous = -1;  // stage whose products may still be running
  int turn = 0;       // the warpgroup that multiplies the stage, if they take turns
  for (int e = tile.first; e < tile.last; ++e) {
    for (int k = 0; k < K; k += kDepth) {
      wait(shared.full[ring.at], ring.phase);
      const u32 a = shared_address(shared.a[ring.at]) + a_rows;
      const u32 b = shared_address(shared.b[ring.at]) + b_columns;
      bool mine = true;
      if constexpr (kTurns) mine = turn == warpgroup, turn ^= 1;
      if constexpr (kRowTiles > 1) mine = __any_sync(0xffffffffu, shared.present[ring.at] >> warpgroup & 1);
      if (mine) {
        if (kTail > 0 && k + kDepth > K) multiply<kTail / MMA_K>(accum, a, b, any);
        else multiply<kDepth / MMA_K>(accum, a, b, any);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      // No branches here: the compiler then knows that the warp has converged, and has numbers in uniform registers.
      arrive_if(signals && previous >= 0, shared.empty[max(previous, 0)]);
      arrive_if(signals && !mine, shared.empty[ring.at]);
      previous = mine ? ring.at : -1;
      epilogue.step(problem, shared);
      ring.next();
    }
  }
  wgmma_wait<0>();
  if (previous >= 0 && signals) arrive(shared.empty[previous]);
  return any;
}

// Adds the accumulators of the second warpgroup to those of the first, through the memory where the second one's slabs
// of C would wait for their stores. Returns whether this is the warpgroup that has the sums now.
__device__ __forceinline__ bool join_turns(Shared& shared, int warpgroup, float (&accum)[kAccum]) {
  static_assert(!kTurns || kAccum * 128 * sizeof(float) == 8 * kBytesOut, "the room of four warps");
  float* room = reinterpret_cast<float*>(shared.out[8]) + threadIdx.x % 128;
  if (warpgroup == 1) {
#pragma unroll
    for (int e = 0; e < kAccum; ++e) room[e * 128] = accum[e];
  }
  two_warpgroups_sync(3);
  if (warpgroup == 0) {
#pragma unroll
    for (int e = 0; e < kAccum; ++e) accum[e] += room[e * 128];
  }
  two_warpgroups_sync(3);
  return warpgroup == 0;
}

// --------------------------------------------------------------------------------------------- row tiles of 16 and 32
// Each of four warps fills every fourth stage; the first also claims tiles. A lane knows the block of one (chunk, row
// tile) and copies it, if it is contiguous, in lines of 128 bytes that TMA swizzles. Otherwise the warp copies block
// after block, 16 bytes per lane: the units of a block's rows are then stored column by column. In both cases the 8
// rows that ldmatrix reads at a time are neighbours.
__device__ __forceinline__ void produce_small(const GemmSm90& problem, Shared& shared) {
  const TileScheduler scheduler(problem);
  const Schedule& schedule = problem.schedule;
  const int R = problem.product.R, K = problem.product.K;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  constexpr int kPairs = kChunks * kRowTiles;
  static_assert(kPairs <= 32 && kChunks * kBoxes <= 32, "one lane each");
  const int per_block = kFlat && !kATransposed ? 1 : K / kChunk;
  const u64 once = problem.keep_a ? evict_last() : evict_first(), again = evict_last();
  const int row_tile = lane % kRowTiles;
  Ring<kTiles> claims, tiles;
  u32 stages = 0;  // stages of the tiles before
  int claimed = blockIdx.x;
  if (threadIdx.x % 128 == 0) publish(shared, claims, scheduler.at(claimed));
  while (true) {
    const Tile tile = next_tile(shared, tiles);
    release_tile(shared, tiles);
    if (tile.group < 0) break;
    if (threadIdx.x % 128 == 0) claimed = scheduler.after(claimed);
    const int chunks = (tile.last - tile.first) * per_block;
    const int sub = max(schedule.row_tiles[tile.group * kRowTiles + row_tile], 0) * kRowTileHeight % R;
    // What this lane copies for the stage that starts with chunk c: a block of A, and a panel of B.
    const auto block_at = [&](int c) {
      c += lane / kRowTiles;
      return lane < kPairs && c < chunks ? schedule.blocks[(tile.first + c / per_block) * kRowTiles + row_tile] : -1;
    };
    const auto row_at = [&](int c) {
      c += lane / kBoxes;
      if (lane >= kChunks * kBoxes || c >= chunks) return -1;
      return schedule.columns[tile.first + c / per_block] * K + c % per_block * kChunk;
    };
    int c = (warp - stages) % 4 * kChunks;
    int block = block_at(c), row = row_at(c);
    for (; c < chunks; c += 4 * kChunks) {
      const int my_block = block, my_row = row;
      const u32 present = __ballot_sync(0xffffffffu, my_block >= 0);
      block = block_at(c + 4 * kChunks);
      row = row_at(c + 4 * kChunks);
      const u32 number = stages + c / kChunks, at = number % kStages;
      const u32 full = shared_address(&shared.full[at]), a = shared_address(shared.a[at]);
      const u32 b = shared_address(shared.b[at]) + lane / kBoxes * kStepB;
      const int k0 = (c + lane / kRowTiles) % per_block * kChunk;
      const int line = int((i64(my_block) * R * K + (kATransposed ? k0 * R : sub * K)) / kStageK);
      wait(shared.empty[at], number / kStages % 2 ^ 1);
      if (lane == 0) {
        shared.present[at] = present;
        barrier_expect(full, min(kChunks, chunks - c) * kStepB + (kByTma ? __popc(present) * kBlockBytes : 0));
      }
      __syncwarp();
      if (my_row >= 0) copy_panel(problem, b, lane % kBoxes, my_row, tile, full, again);
      if constexpr (kFlat) {
        if (my_block >= 0) copy_tile(a + lane * kBlockBytes, &problem.a, 0, line, full, once);
      } else if constexpr (kLines) {
        if (my_block >= 0) copy_tile(a + lane * kBlockBytes, &problem.a, k0, my_block * R + sub, full, once);
      } else {
#pragma unroll 1
        for (u32 left = present; left; left &= left - 1) {
          const int pair = __ffs(left) - 1;
          const i64 p = __shfl_sync(0xffffffffu, my_block, pair);
          const int first = __shfl_sync(0xffffffffu, sub, pair), k = __shfl_sync(0xffffffffu, k0, pair);
          // The stored part has kHigh rows of kUnits * 16 bytes. A lane takes every kStride-th row of one column.
          constexpr int kHigh = kATransposed ? kChunk : kRowTileHeight;
          constexpr int kUnits = (kATransposed ? kRowTileHeight : kChunk) / kUnit, kStride = 32 / kUnits;
          const int pitch = kATransposed ? R : K;
          const int x = (kATransposed ? first : k) + lane % kUnits * kUnit;
          const int y = (kATransposed ? k : first) + lane / kUnits;
          const Element* from = problem.product.data + (p * R * K + y * pitch + x);
          u32 to = a + pair * kBlockBytes + (lane % kUnits * kHigh + lane / kUnits) * 16;
#pragma unroll
          for (int i = 0; i < kHigh / kStride; ++i, from += kStride * pitch, to += kStride * 16) copy_16(to, from);
        }
        copies_arrive(full);
      }
    }
    stages += (chunks + kChunks - 1) / kChunks;
    if (threadIdx.x % 128 == 0) publish(shared, claims, scheduler.at(claimed));
  }
}

// The offset of the 16 bytes whose address a lane gives to ldmatrix for the 16 rows of a row tile from m on: of row
// y of the stored part, from x on.
__device__ __forceinline__ u32 fragment_offset(int row_tile, int m, int step, int lane) {
  const int y = kATransposed ? step * 16 + lane / 16 * 8 + lane % 8 : m + lane % 16;
  const int x = kATransposed ? m + lane / 8 % 2 * 8 : (step * 2 + lane / 16) * kUnit;
  constexpr int kHigh = kATransposed ? kChunk : kRowTileHeight, kWidth = kATransposed ? kRowTileHeight : kChunk;
  const u32 line = row_tile * kBlockBytes + (y * kWidth + x) * sizeof(Element);
  return kByTma ? line ^ (line >> 3 & 0x70) : row_tile * kBlockBytes + (x / kUnit * kHigh + y) * 16;
}

// x = high + low: `high`, which replaces x, is x rounded to nearest with 11 bits, `low` is the remainder, of whose 12
// bits the tensor cores truncate the last. Numbers that round to infinity, and infinity itself, give infinity and NaN.
__device__ __forceinline__ void split_tf32(u32& x, u32& low) {
  const f32 whole = __uint_as_float(x);
  x = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(whole - __uint_as_float(x));
}

// A stage's part of A in registers, for the 16 rows of a warp: as it is, rounded to tf32, or in two parts of tf32.
struct Fragments {
  static constexpr int kSteps = kChunk / MMA_K;
  u32 present;  // of all row tiles and chunks
  u32 x[kChunks][kSteps][kParts][4];

  // `offsets` are those of the 16 bytes that a lane reads for each step.
  __device__ __forceinline__ void load(Shared& shared, Ring<kStages>& at, int row_tile, const u32 (&offsets)[kSteps]) {
    wait(shared.full[at.at], at.phase);
    present = __shfl_sync(0xffffffffu, shared.present[at.at], 0);
    const u32 a = shared_address(shared.a[at.at]);
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      if (present >> (q * kRowTiles + row_tile) & 1) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          load_step(x[q][step], a + q * (kRowTiles * kBlockBytes) + offsets[step]);
      } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int i = 0; i < 4 * kParts; ++i) x[q][step][i / 4][i % 4] = 0;
      }
    }
    at.next();
  }
  static __device__ __forceinline__ void load_step(u32 (&y)[kParts][4], u32 from) {
    load_matrix_x4<kATransposed>(y[0], from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kParts == 2) split_tf32(y[0][i], y[kParts - 1][i]);
      else if constexpr (sizeof(Element) == 4) y[0][i] = rounded_tf32(y[0][i]);
    }
  }
  // Starts the products with a stage's part of B, which is at b. Accumulators that are not set are not read; returns
  // whether they are set.
  __device__ __forceinline__ bool multiply(float (&accum)[kAccum], u32 b, int warpgroup, bool any) const {
    constexpr u32 kMine = (1u << kRowTiles / 2) - 1;  // the row tiles of one warpgroup
    constexpr u32 kStep = kBTransposed ? 32 : 2048;
    const u64 start = kBTransposed ? wgmma_descriptor(b, 16, kBytesK * 8, kBytesK)
                                   : wgmma_descriptor(b, kChunk * 128, 1024);
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      if (!(present >> (q * kRowTiles + warpgroup * kRowTiles / 2) & kMine)) continue;
      const u64 from = start + q * kStepB / 16;
      wgmma_fence();
      // The two small products come first: low times high, and high times low.
#pragma unroll
      for (int small = 0; small < 2 * (kParts - 1); ++small)
#pragma unroll
        for (int step = 0; step < kSteps; ++step, any = true)
          wgmma<!kBTransposed>(accum, any, x[q][step][1 - small], from + (small * kPartB + step * kStep) / 16);
#pragma unroll
      for (int step = 0; step < kSteps; ++step, any = true)
        wgmma<!kBTransposed>(accum, any, x[q][step][0], from + step * kStep / 16);
      wgmma_commit();
    }
    return any;
  }
};

__device__ __forceinline__ void multiply_small(const GemmSm90& problem, Shared& shared, const Tile& tile, int warpgroup,
                                               Ring<kStages>& ring, float (&accum)[kAccum], DelayedEpilogue& epilogue) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int row = warpgroup * 64 + warp * 16, row_tile = row / kRowTileHeight, m = row % kRowTileHeight;
  u32 offsets[Fragments::kSteps];
#pragma unroll
  for (int step = 0; step < Fragments::kSteps; ++step) offsets[step] = fragment_offset(row_tile, m, step, lane);
  const auto multiply = [&](const Fragments& f) {
    f.multiply(accum, shared_address(shared.b[ring.at]), warpgroup, true);
  };
  const auto release = [&] {
    wgmma_wait<0>();
    __syncwarp();
    if (lane == 0) arrive(shared.empty[ring.at]);
    ring.next();
  };
  const int stages = ((tile.last - tile.first) * (problem.product.K / kChunk) + kChunks - 1) / kChunks;
  Ring<kStages> ahead = ring;
  if constexpr (kParts == 2) {
    for (int s = 0; s < stages; ++s) {
      Fragments f;
      f.load(shared, ahead, row_tile, offsets);
      float part[kAccum];
      if constexpr (kClearsFirst) clear(part);
      const bool any = f.multiply(part, shared_address(shared.b[ring.at]), warpgroup, kClearsFirst);
      release();
      if (!any) continue;
#pragma unroll
      for (int e = 0; e < kAccum; ++e) accum[e] += part[e];
    }
    return;
  }
  if constexpr (!kAhead) {
    for (int s = 0; s < stages; ++s) {
      Fragments f;
      f.load(shared, ahead, row_tile, offsets);
      multiply(f);
      epilogue.step(problem, shared);
      release();
    }
    return;
  }
  // While one stage is multiplied, the fragments of the next are loaded.
  Fragments even, odd;
  if (stages > 0) even.load(shared, ahead, row_tile, offsets);
  for (int s = 0; s < stages; s += 2) {
    multiply(even);
    if (s + 1 < stages) odd.load(shared, ahead, row_tile, offsets);
    epilogue.step(problem, shared);
    release();
    if (s + 1 == stages) break;
    multiply(odd);
    if (s + 2 < stages) even.load(shared, ahead, row_tile, offsets);
    release();
  }
}

// ------------------------------------------------------------------------------------------------------ the result
// Which accumulators are not finite, perhaps because 0 for an absent block was multiplied with Inf.
struct NonFinite {
  u32 bits[kAccum / 32] = {};
  bool any = false;

  __device__ __forceinline__ void look_at(const float (&accum)[kAccum]) {
    float probe = 0;
#pragma unroll
    for (int e = 0; e < kAccum; ++e) probe = fmaf(accum[e], 0.f, probe);
    any = probe != 0;
    if (!any) return;
#pragma unroll
    for (int e = 0; e < kAccum; ++e) bits[e / 32] |= u32(accum[e] * 0.f != 0) << (e % 32);
  }
};

__device__ __forceinline__ void store_element(const Operands& product, C* target, f32 sum) {
  const f32 old = product.read_c ? product.beta * load<f32>(*target) : 0;
  *target = Store<C>::from(fmaf(product.alpha, sum, old));
}

// Stores a warp's 16 rows, scaled and added to the old C, for any strides of C. They go through shared memory, so that
// lanes run along the rows or the columns of C, whichever are closer together. Those that are not finite are skipped,
// since they are recomputed.
__device__ __forceinline__ void store_elements(const GemmSm90& problem, Shared& shared, const Tile& tile, i64 row0,
                                               const float (&accum)[kAccum]) {
  const auto& product = problem.product;
  const int lane = threadIdx.x % 32;
  float* room = reinterpret_cast<float*>(shared.out[threadIdx.x / 32 * 2]);  // 16 x 64, swizzled by 8 columns
  const bool down = product.c_row < product.c_col;
  C* corner = product.c + tile.batch * product.c_batch + row0 * product.c_row;
#pragma unroll
  for (int slab = 0; slab < kSlabs; ++slab) {
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 32; e += 2) {  // held: rows lane / 4 and + 8, columns 2 * (lane % 4) + 8 j and the next
      const int row = lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(room + row * 64 + (column ^ row % 8 * 8)) =
          make_float2(accum[slab * 32 + e], accum[slab * 32 + e + 1]);
    }
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      const int row = down ? lane % 16 : i / 2, column = down ? i * 2 + lane / 16 : i % 2 * 32 + lane;
      const float sum = room[row * 64 + (column ^ row % 8 * 8)];
      const i64 n = tile.column + slab * 64 + column;
      if (n >= product.N || (kFromRegisters && sum * 0.f != 0)) continue;
      C* target = corner + row * product.c_row + n * product.c_col;
      store_element(product, target, sum);
    }
  }
}

// Stores a warp's 16 rows to C, at once or slab by slab while the next tile is multiplied.
__device__ __forceinline__ void store(const GemmSm90& problem, Shared& shared, const Tile& tile, i64 row0,
                                      float (&accum)[kAccum], DelayedEpilogue& epilogue) {
  if constexpr (kStore == kDirect) {
    store_elements(problem, shared, tile, row0, accum);
  } else {
    if (problem.product.alpha != 1) {
#pragma unroll
      for (int e = 0; e < kAccum; ++e) accum[e] *= problem.product.alpha;
    }
    epilogue.finish(problem, shared);
    epilogue.take(problem, shared, accum, int(row0), tile);
  }
}

// Computes one element block by block, for accumulators that an absent block may have made NaN.
__device__ __noinline__ float exact_sum(const GemmSm90& problem, int first, int last, int row_tile, int row, i64 column,
                                        int batch) {
  const auto& product = problem.product;
  const int R = product.R, K = product.K;
  const Element* b = product.b + batch * product.b_batch + column * product.b_col;
  float sum = 0;
  for (int e = first; e < last; ++e) {
    const i64 p = problem.schedule.blocks[e * kRowTiles + row_tile];
    const i64 k0 = i64(problem.schedule.columns[e]) * K;
    if (p < 0 || k0 >= product.block_cols * K) continue;
    const Element* a = product.data + p * R * K + (kATransposed ? row : row * K);
    for (int k = 0; k < K; ++k) {
      f32 factor = load<f32>(b[(k0 + k) * product.b_row]);
      if constexpr (kParts == 2) factor += load<f32>(b[(k0 + k) * product.b_row + product.N * product.b_col]);
      sum = fmaf(load<f32>(a[k * (kATransposed ? R : 1)]), factor, sum);
    }
  }
  return sum;
}

// Computes and stores the elements of a warp's 16 rows, from row0 on, whose sums are not finite.
__device__ __forceinline__ void store_exact(const GemmSm90& problem, const Tile& tile, int first, int last, int row_tile,
                                            i64 row0, const NonFinite& non_finite) {
  const auto& product = problem.product;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int word = 0; word < kAccum / 32; ++word) {
    for (u32 left = non_finite.bits[word]; left; left &= left - 1) {
      const int e = word * 32 + __ffs(left) - 1;
      const i64 row = row0 + lane / 4 + e / 2 % 2 * 8, n = tile.column + e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (n >= product.N) continue;
      const float sum = exact_sum(problem, first, last, row_tile, int(row % product.R), n, tile.batch);
      store_element(product, product.c + tile.batch * product.c_batch + row * product.c_row + n * product.c_col, sum);
    }
  }
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int s = 0; s < kStages; ++s) {
    barrier_init(shared_address(&shared.full[s]), !kFromRegisters ? 2 : kByTma ? 1 : 1 + 32);
    barrier_init(shared_address(&shared.empty[s]), kConsumers * 4);
  }
  for (int s = 0; s < kTiles; ++s) {
    barrier_init(shared_address(&shared.tile_full[s]), 1);
    barrier_init(shared_address(&shared.tile_empty[s]), kConsumers * 4 + (kFromRegisters ? 4 : 1));
  }
  barrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_sm90(const __grid_constant__ GemmSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  // One thread sets up the barriers, while a warp asks for the lists that the first copies wait for.
  if (threadIdx.x == 0) {
    prefetch_map(&problem.a);
    prefetch_map(&problem.b);
    if constexpr (kStore != kDirect) prefetch_map(&problem.c);
    init_barriers(shared);
  }
  if (threadIdx.x / 32 == 1) prefetch_lists<kRowTiles>(problem);
#ifdef STRESS  // stages start as NaN, so that a product of data that was never copied is noticed
  for (u32 i = threadIdx.x; i < kStages * (kBytesA + kBytesB) / 4; i += kThreads)
    reinterpret_cast<u32*>(shared.a)[i] = 0xffffffffu;
  proxy_fence();
#endif
  __syncthreads();

  // The last warpgroup fills the ring; the others empty it, with the registers that it gives back.
  if (warpgroup == kConsumers) {
    fewer_registers<56>();
    if constexpr (kFromRegisters) { produce_small(problem, shared); } else { produce_large(problem, shared, warp); }
  } else {
    more_registers<224>();
    const int warp_row = (kLow || kTurns ? 0 : warpgroup * 64) + warp * 16, row_tile = warp_row / kRowTileHeight;
    Ring<kStages> ring;
    Ring<kTiles> tiles;
    DelayedEpilogue epilogue;
    while (true) {
      // Take the tile that the producer has claimed.
      Tile now = uniform_if_large(next_tile(shared, tiles));
      if (now.group < 0) break;
      if constexpr (kLow) now.column += warpgroup * kOwn;
      const int row_tile_number = uniform_if_large(problem.schedule.row_tiles[now.group * kRowTiles + row_tile]);

      // Multiply its stages, while what waits of the tile before is stored.
      float accum[kAccum];
      if constexpr (kFromRegisters) {
        clear(accum);
        multiply_small(problem, shared, now, warpgroup, ring, accum, epilogue);
      } else {
        if (!multiply_tile(problem, shared, now, warpgroup, ring, accum, epilogue)) clear(accum);
      }
      release_tile(shared, tiles);

      // Add the other warpgroup's accumulators, and the other splits of the group; one CTA stores the sums.
      if constexpr (kTurns) { if (!join_turns(shared, warpgroup, accum)) continue; }
      int first = now.first, last = now.last;
      if (now.split >= 0) {
        if (!gather(problem, shared, now, warpgroup, accum)) continue;
        const int4 of_group = problem.schedule.splits[now.split];
        first = of_group.z, last = of_group.w;
      }
      if (row_tile_number < 0) continue;
      // Store a part of the rows now, the others during the next tile.
      NonFinite non_finite;
      if constexpr (kFromRegisters) non_finite.look_at(accum);
      const i64 row0 = i64(row_tile_number) * kRowTileHeight + warp_row % kRowTileHeight;
      store(problem, shared, now, row0, accum, epilogue);
      // Compute exactly what the zeros of absent blocks may have made NaN.
      if constexpr (kFromRegisters) {
        if (!__any_sync(0xffffffffu, non_finite.any)) continue;
        epilogue.finish(problem, shared);
        if (kStore != kDirect && lane == 0) store_wait();
        __syncwarp();
        store_exact(problem, now, first, last, row_tile, row0, non_finite);
      }
    }
    epilogue.finish(problem, shared);
    if (kStore != kDirect && lane == 0) store_wait_read<0>();
  }

  // The last CTA sets the counters to zero for the next launch.
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0) leave_counters(problem.schedule.counters);
}
