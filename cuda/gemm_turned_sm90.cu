// C[i, n] = alpha * sum_p sum_k A[p, i % R, k] * B[col[p]*K + k, n],  p in the block row of row i
// Swap-AB on Hopper's tensor cores, for row tiles of 8 n rows. The product is computed as its transpose, the columns of B
// times the rows of A: wgmma has 64 rows, which are columns of C here, and as many columns as a row tile has rows, so
// that next to nothing is multiplied in vain. 16-bit floats; B and C are row-major and C is only written.
// CUT: R is no multiple of the height of a row tile, or K none of 16. TMA fills up with zeros what the blocks of A and
// the block rows of B lack along K, so that an infinity in B meets no zero of a block that has K columns, and leaves out
// the rows of C that a block row lacks. The rows that it finds behind a block of A change none that is stored.
// Work list, producer, barriers and splits are those of gemm_sm90. A tile has one to eight row tiles by 256 to 512
// columns, in slabs of 64; each of the two consumer warpgroups has half of the slabs. Tiles are as wide as registers
// allow, since the L2 delivers a panel of B once for each of them; stages are short, so that many fit. stmatrix
// transposes the accumulators on their way out, and TMA stores the slabs. See docs/kernels/swap-ab.md.
#include "common/gemm_sm90.cuh"
#include "ptx/convert.cuh"
#include "ptx/wgmma_odd.cuh"

// CTAs are persistent and claim tiles of kRowTiles * kRowTileHeight x kTileN: one group of row tiles (see Schedule) by
// kTileN columns, computed over the union of the row tiles' block columns. The last warpgroup is the producer, which
// fills a ring of stages. The first two are consumers: half of the columns each, without row tiles that lack a block.

constexpr bool kCut = CUT;
constexpr bool kWide = WIDE;                  // N is a multiple of 64: one copy has all slabs of a panel
constexpr int kRowTiles = ROW_TILES;
constexpr int kSlabs = kTileN / 64;           // slabs of 64 columns of a tile
constexpr int kOwn = kSlabs / kConsumers;     // slabs of a warpgroup
constexpr int kRooms = ROOMS;                 // slabs of C that a warpgroup has in shared memory while they are stored
constexpr int kSlabAccum = kRowTileHeight / 2;  // float32 accumulators of a thread for one slab and row tile
constexpr int kOutRows = (kRowTileHeight + 15) / 16 * 16;  // stmatrix writes 16 rows at a time
constexpr int kAccum = kRowTiles * kOwn * kSlabAccum;
constexpr int kBoxes = kWide ? 1 : kSlabs;
// A row of A in a stage: kDepth columns, rounded up to what a swizzled line can have.
constexpr int kLine = kDepth <= 16 ? 32 : kDepth <= 32 ? 64 : 128;
constexpr u32 kBytesA = kRowTileHeight * kLine;
constexpr u32 kBytesSlab = 16 * 128;           // 16 rows of B by 64 columns
constexpr u32 kBytesStep = kSlabs * kBytesSlab;  // 16 rows of B
static_assert(sizeof(Element) == 2 && sizeof(C) == 2 && kDepth <= 64, "rows of 128 bytes");

struct alignas(1024) Shared {
  u8 b[kStages][kDepth / 16][kBytesStep];  // these three at multiples of 1024, 1024 and 8 * kLine bytes
  u8 out[kConsumers][kRooms][kOutRows * 128];
  u8 a[kStages][kRowTiles][kBytesA];
  u64 full[kStages], empty[kStages], tile_full[kTiles], tile_empty[kTiles];
  u32 present[kStages];  // bit row tile: it has a block there
  Tile tiles[kTiles];
  int last[kConsumers];
};

using Accum = float[kRowTiles][kOwn][kSlabAccum];

// The rows of all row tiles of a block row.
__device__ __forceinline__ int rows_of(int R) {
  return kCut ? (R + kRowTileHeight - 1) / kRowTileHeight * kRowTileHeight : R;
}

// ------------------------------------------------------------------------------------------------- copying operands
// One warp copies panels of B, 16 rows at a time, another one blocks of A.
__device__ __forceinline__ void produce(const GemmSm90& problem, Shared& shared, int warp) {
  const int R = problem.product.R, K = problem.product.K;
  if (warp == 0) {
    const u64 again = evict_last();
    produce_b(problem, shared, [&](int stage, int row, int k, const Tile& tile) {
      const u32 full = shared_address(&shared.full[stage]), b = shared_address(shared.b[stage]);
      const int steps = (kTail > 0 && k + kDepth > K ? kTail : kDepth) / 16;
      barrier_expect(full, steps * kBytesStep);
#pragma unroll
      for (int step = 0; step < kDepth / 16; ++step) {
        if (step >= steps) break;
        const u32 to = b + step * kBytesStep;
        if constexpr (kCut && kWide) {
          copy_tile(to, &problem.b, 0, k + step * 16, tile.column / 64, row / K, full, again);
        } else if constexpr (kCut) {
          for (int box = 0; box < kBoxes; ++box)
            copy_tile(to + box * kBytesSlab, &problem.b, tile.column + box * 64, k + step * 16, 0, row / K, full,
                      again);
        } else if constexpr (kWide) {
          copy_tile(to, &problem.b, 0, row + step * 16, tile.column / 64, tile.batch, full, again);
        } else {
          for (int box = 0; box < kBoxes; ++box)
            copy_tile(to + box * kBytesSlab, &problem.b, tile.column + box * 64, row + step * 16, 0, tile.batch, full,
                      again);
        }
      }
    });
  }
  if (warp == 1) {
    const u64 once = problem.keep_a ? evict_last() : evict_first();
    produce_a<kRowTiles>(problem, shared, kBytesA, [&](int stage, int row_tile, int block, int row, int k) {
      copy_tile(shared_address(shared.a[stage][row_tile]), &problem.a, k, block * R + row,
                shared_address(&shared.full[stage]), once);
    }, rows_of(R));
  }
}

// ------------------------------------------------------------------------------------------------------ multiplying
// Starts the products of one stage for one row tile. The fence and the end of the group belong to the branch in which
// this is called.
template <int kSteps>
__device__ __forceinline__ void multiply(float (&accum)[kOwn][kSlabAccum], u32 a, u32 b, bool& any) {
  const u64 from_a = wgmma_descriptor(a, 16, 8 * kLine, kLine), from_b = wgmma_descriptor(b, kBytesSlab, 1024);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int slab = 0; slab < kOwn; ++slab)
      wgmma<true, false>(accum[slab], any, from_b + (step * kBytesStep + slab * kBytesSlab) / 16,
                         from_a + step * 32 / 16);
    any = true;
  }
  wgmma_commit();
}

// The stages of a tile, for one warpgroup.
struct Products {
  Shared& shared;
  Ring<kStages>& ring;
  Accum& accum;
  const u32 offset;         // of the warpgroup's columns in a panel of B
  bool any[kRowTiles] = {};  // whether a row tile's accumulators were written
  int previous = -1;        // stage whose products may still be running

  template <int kSteps> __device__ __forceinline__ void step() {
    wait(shared.full[ring.at], ring.phase);
    const u32 a = shared_address(shared.a[ring.at]), b = shared_address(shared.b[ring.at]) + offset;
    u32 present = 1;
    if constexpr (kRowTiles > 1) {  // read by the lane that says when the stage may be overwritten
      if (threadIdx.x % 32 == 0) present = shared.present[ring.at];
      present = uniform(present);
    }
#pragma unroll
    for (int s = 0; s < kRowTiles; ++s)
      if (kRowTiles == 1 || present >> s & 1) multiply<kSteps>(accum[s], a + s * kBytesA, b, any[s]);
    release<1>();
    previous = ring.at;
    ring.next();
  }
  // Waits for all but the last kPending groups of products. Each stage has at least one group.
  template <int kPending> __device__ __forceinline__ void release() {
    wgmma_wait<kPending>();
    if (previous >= 0 && threadIdx.x % 32 == 0) arrive(shared.empty[previous]);
  }
};

// Accumulators of row tiles without any product are zero.
__device__ __forceinline__ void multiply_tile(const GemmSm90& problem, Shared& shared, const Tile& tile, int warpgroup,
                                              Ring<kStages>& ring, Accum& accum) {
  const int K = kCut ? (problem.product.K + 15) / 16 * 16 : problem.product.K;
  Products products{shared, ring, accum, warpgroup * kOwn * kBytesSlab};
  for (int e = tile.first; e < tile.last; ++e) {
    for (int k = kDepth; k <= K; k += kDepth) products.step<kDepth / 16>();
    if constexpr (kTail > 0) products.step<kTail / 16>();
  }
  products.release<0>();
#pragma unroll
  for (int s = 0; s < kRowTiles; ++s) {
    if (products.any[s]) continue;
#pragma unroll
    for (int e = 0; e < kOwn * kSlabAccum; ++e) accum[s][e / kSlabAccum][e % kSlabAccum] = 0;
  }
}

// ------------------------------------------------------------------------------------------------------ the result
// Stores a row tile's rows by 64 columns of C from shared memory, while the next slab or tile is computed.
__device__ __forceinline__ void store_slab(const GemmSm90& problem, Shared& shared, const Tile& tile, int row, int slab,
                                           int room, const float (&accum)[kSlabAccum]) {
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const float alpha = problem.product.alpha;
  const u32 out = shared_address(shared.out[warpgroup][room]);
  // Waits until the store that used this memory before has read it.
  if (threadIdx.x % 128 == 0) store_wait_read<kRooms - 1>();
  warpgroup_sync(1 + warpgroup);
#pragma unroll
  for (int rows = 0; rows < kOutRows / 16; ++rows) {
    // A thread holds columns lane / 4 and lane / 4 + 8 of C, rows 2 * (lane % 4) + 8 j and the next. Each lane gives
    // the address of 8 columns of one row.
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = rows * 8 + 2 * i;
      const float* two = accum + min(e, kSlabAccum - 2);
      words[i] = e < kSlabAccum ? pack<C>(alpha * two[0], alpha * two[1]) : 0;
    }
    const u32 at = (rows * 16 + lane / 16 * 8 + lane % 8) * 128 + (warp * 2 + lane / 8 % 2) * 16;
    store_matrix_x4<true>(out + (at ^ (at >> 3 & 0x70)), words[0], words[1], words[2], words[3]);
  }
  proxy_fence();
  warpgroup_sync(1 + warpgroup);
  if (threadIdx.x % 128 == 0) {
    const int high = rows_of(problem.product.R), column = tile.column + slab * 64;
    if constexpr (kCut) store_tile(&problem.c, column, row % high, 0, row / high, out, evict_first());
    else store_tile(&problem.c, column, row, 0, tile.batch, out, evict_first());
    store_commit();
  }
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int s = 0; s < kStages; ++s) {
    barrier_init(shared_address(&shared.full[s]), 2);
    barrier_init(shared_address(&shared.empty[s]), kConsumers * 4);
  }
  for (int s = 0; s < kTiles; ++s) {
    barrier_init(shared_address(&shared.tile_full[s]), 1);
    barrier_init(shared_address(&shared.tile_empty[s]), kConsumers * 4 + 1);
  }
  barrier_init_fence();
}

// What a consumer warpgroup does.
__device__ __forceinline__ void consume(const GemmSm90& problem, Shared& shared, int warpgroup) {
  Ring<kStages> ring;
  Ring<kTiles> tiles;
  Ring<kRooms> rooms;
  while (true) {
    const Tile& found = next_tile(shared, tiles);
    const auto each = [](int field) { return uniform(field); };
    const Tile now = {each(found.group), each(found.first), each(found.last),  each(found.split),
                      each(found.column), each(found.batch), each(found.number)};
    if (now.group < 0) break;
    release_tile(shared, tiles);
    Accum accum;
    multiply_tile(problem, shared, now, warpgroup, ring, accum);
    auto& all = reinterpret_cast<float (&)[kAccum]>(accum);
    if (now.split >= 0 && !gather(problem, shared, now, warpgroup, all)) continue;
#pragma unroll
    for (int s = 0; s < kRowTiles; ++s) {
      const int row_tile = uniform(problem.schedule.row_tiles[now.group * kRowTiles + s]);
      if (row_tile < 0) continue;
#pragma unroll
      for (int slab = 0; slab < kOwn; ++slab, rooms.next())
        store_slab(problem, shared, now, row_tile * kRowTileHeight, warpgroup * kOwn + slab, rooms.at, accum[s][slab]);
    }
  }
  if (threadIdx.x % 128 == 0) store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
gemm_turned_sm90(const __grid_constant__ GemmSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];  // no static shared memory precedes it
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    prefetch_map(&problem.a);
    prefetch_map(&problem.b);
    init_barriers(shared);
  }
  if (threadIdx.x / 32 == 1) prefetch_lists<kRowTiles>(problem);
#ifdef STRESS  // stages start as NaN, so that a product of data that was never copied is noticed
  for (u32 i = threadIdx.x; i < (sizeof(shared.b) + sizeof(shared.out) + sizeof(shared.a)) / 4; i += kThreads)
    reinterpret_cast<u32*>(shared.b)[i] = 0xffffffffu;
  proxy_fence();
#endif
  __syncthreads();
  if (warpgroup == kConsumers) {
    fewer_registers<56>();
    produce(problem, shared, threadIdx.x % 128 / 32);
  } else {
    more_registers<224>();
    consume(problem, shared, warpgroup);
  }
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0) leave_counters(problem.schedule.counters);
}
