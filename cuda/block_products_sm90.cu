// Blocks of a product, in 16-bit floats, on Hopper's tensor cores. CTAs are persistent and claim tiles.
//   BSR @ BSR: out[s] = sum over pairs k of result block s, in order, of a[left[k]] @ b[right[k]]
//   sampled:   out[p] = X[block row of p] @ Y[:, block column of p]
// One warp claims tiles and looks them up, one is the producer, and two warpgroups are consumers: they share a tile of
// 128 x 256, 64 rows each, and take smaller tiles in turn, so that one multiplies while the other stores. A barrier
// tells only two phases apart; therefore a warpgroup waits for a stage only after the previous use of that stage was
// waited for. The next tile is claimed when the copies of this one are nearly all asked for: a tile can take 100 us,
// and who claims early takes work from others. Pairs of a B larger than the L2 are claimed in strips, so that CTAs read
// few columns of it at a time. Small blocks of a sampled product share tiles by the list of sampled_tiles. Blocks are
// matrices of their own in the tensor maps, so that TMA fills a tile up with zeros. A tile of 128 x 256 does 85 flops
// for each byte from the L2; one of 128 x 128 does 64. X and Y of a sampled product are read in either order: with rows
// or columns as the fastest index a slab of up to 64 of them is 64 lines of k, as many as TMA writes along K.
#include "common/block_products.cuh"
#include "common/bsr.cuh"
#include "common/pipeline.cuh"
#include "common/registers.cuh"
#include "ptx/convert.cuh"
#include "ptx/wgmma.cuh"

using Element = ELEMENT_A;
using C = ELEMENT_C;
using Index = INDEX;

// A tile has kTileM rows by kParts parts of kPartN columns and is computed in steps of 64 along K: one copy of A, one
// of each part of B. In BSR @ BSR a tile is one block or a part of it; in a sampled product its parts are neighbours in
// one block row, which share their rows of X. A tile of a list (sampled_tiles.cu) has kRowParts block rows and kParts
// block columns that need not be neighbours; where they meet there may be no block.

constexpr bool kSampled = SAMPLED;
constexpr bool kATransposed = A_TRANSPOSED;  // rows are the fastest index of A, in a sampled product
constexpr bool kBTransposed = B_TRANSPOSED;  // K is the fastest index of B
constexpr int kRowParts = ROW_PARTS;         // block rows of a tile of a list; 0: there is no list
constexpr bool kListed = kRowParts > 0;
constexpr int kTileM = TILE_M, kPartN = PART_N, kParts = PARTS, kTileN = kParts * kPartN;
constexpr int kStages = STAGES, kTiles = 4;
constexpr int kDepth = 64;  // columns of A per step: one swizzled row
constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
constexpr bool kShared = kTileM * kTileN > 128 * 128;  // both warpgroups share a tile
constexpr int kHeights = kShared ? 1 : kTileM / 64;    // groups of 64 rows that a warpgroup has of a tile
constexpr int kAccum = kTileN / 2, kSlabs = kTileN / 64;
constexpr int kNarrow = 128;  // columns that a shared tile can have instead
constexpr int kLeast = kListed && kPartN <= 64 ? 64 : kNarrow;  // and of a list
constexpr u32 kStrip = 16;    // rows of the result of BSR @ BSR that are computed together
// The next tile is claimed this many steps before the end of a tile: 3 us.
constexpr int kEarly = 4 * (128 * 256) / (kTileM * kTileN);
constexpr u32 kBytesA = kTileM * 128, kBytesB = kTileN * 128;
// Columns of B side by side in a swizzled row, if they are the fastest index.
constexpr int kSlab = kPartN < 64 ? kPartN : 64;
constexpr u32 kRowB = kSlab * 2, kSlabB = kDepth * kRowB;
static_assert(kTileN % 64 == 0 && kPartN % kSlab == 0, "whole slabs");
static_assert(kSampled || !kATransposed, "blocks of A are row-major");
static_assert(sizeof(Element) == 2, "16-bit floats");
static_assert(!kListed || (kSampled && kShared && sizeof(Index) == 4), "a list of int32 for tiles of 128 x 256");
constexpr int kPartM = kTileM / (kListed ? kRowParts : 1);
// Rows of A side by side in a swizzled row, if they are the fastest index. Eight rows of k lie one behind the other.
constexpr int kSlabM = kPartM < 64 ? kPartM : 64;
constexpr u32 kRowA = kATransposed ? kSlabM * 2 : 128, kSlabA = kDepth * kRowA;
static_assert(!kListed || kPartM == kSlabM, "a slab is a block row");
constexpr int kRecord = kRowParts + kParts + kRowParts * kParts;  // {rows, columns, blocks} of a tile of a list
constexpr int kWindow = 64, kWindowColumns = 32 * kParts;  // kRows and kColumns of sampled_tiles.cu

constexpr u32 kMostPieces = kListed ? kTileN / kLeast : 1;  // of a tile of a list

struct Tile {
  int first, last;  // BSR @ BSR: the pairs; sampled: {0, 1}; no tile: first > last
  // The first part of the result: block * parts of a block + index in the block, or, in a list, tile * kParts + column.
  // No more tiles: -1.
  int part;
  int end;          // end of the parts of the result that may be written
  int row, top;     // the first row within a block, and, if sampled, of X
};

struct alignas(1024) Shared {
  u8 a[kStages][kBytesA];
  u8 b[kStages][kBytesB];
  u8 out[kConsumers * 4][2048];  // 16 rows by 64 columns per warp
  u64 full[kStages], empty[kStages], tile_full[kTiles], tile_empty[kTiles];
  u64 wanted[kTiles];    // the copies of a tile are nearly all asked for
  u64 turn[kConsumers];  // the other warpgroup has consumed all stages of the tile before
  Tile tiles[kTiles];
};

struct alignas(64) BlockProductsSm90 {
  // (K, rows, blocks) or (rows, K, 1), and (columns, K, blocks) or (K, columns, blocks), fastest index first
  TensorMap a, b;
  C* out;             // (blocks, R, N)
  const Index* left;    // BSR @ BSR: pair -> block of a; tiles of a list: kRecord numbers each
  const Index* right;   // pair -> block of b; sampled: block -> block column; of a list: place -> tile
  // Block of the result -> its first pair; sampled: block row -> its first block; of a list: the number of
  // tiles, and for each window of kWindow block rows by kWindowColumns block columns the number of its tiles and the
  // place of the first one.
  const Index* starts;
  int* counters;      // {tiles claimed, CTAs that are done}, zero before and after
  i64 blocks, pairs;       // of a list: tiles for which there is memory, in place of pairs
  i64 a_blocks, b_blocks;  // numbers of blocks; sampled: of block rows and block columns
  int R, N, K;
  // Sampled: from this part on tiles are narrow, since too few wide ones remain for all CTAs; a multiple of kParts.
  int narrow;
  int row_blocks;  // BSR @ BSR: average number of blocks of a row of the result; 0 if its blocks are in no such order
};
#ifdef BLOCK_PRODUCTS_SM90_BYTES
CHECK_LAYOUT(BlockProductsSm90, BLOCK_PRODUCTS_SM90, (a)(b)(out)(left)(right)(starts)(counters)(blocks)(pairs)(a_blocks)
             (b_blocks)(R)(N)(K)(narrow)(row_blocks))
#endif

__device__ __forceinline__ int parts_of(const BlockProductsSm90& problem) { return (problem.N + kPartN - 1) / kPartN; }

// The block of the result that is computed n-th. Blocks of kStrip rows are computed one below the other, so that what
// CTAs read of B at the same time lies in few columns and is found in the L2. If rows have different lengths the
// columns differ, but each block still comes exactly once.
__device__ __forceinline__ u32 in_strips(const BlockProductsSm90& problem, u32 n) {
  const u32 width = problem.row_blocks, strip = kStrip * width;
  if (strip == 0) return n;
  const u32 first = n / strip * strip, place = n - first;
  return first + i64(strip) <= problem.blocks ? first + place % kStrip * width + place / kStrip : n;
}

// The tile of claim t in BSR @ BSR.
__device__ __forceinline__ Tile pairs_at(const BlockProductsSm90& problem, u32 t) {
  const u32 heights = (problem.R + kTileM - 1) / kTileM, parts = parts_of(problem), number = t / heights;
  if (number / parts >= problem.blocks) return {0, 0, -1};
  const u32 block = in_strips(problem, number / parts), part = block * parts + number % parts;
  const auto start = [&](i64 s) { return s < problem.blocks ? min(max(i64(problem.starts[s]), i64(0)), problem.pairs) : problem.pairs; };
  const i64 first = start(block);
  return {int(first), int(max(first, start(block + 1))), int(part), int(part) + 1, int(t % heights) * kTileM, 0};
}

// The tile of claim t in a sampled product, computed by a whole warp; `block_row` is kept from one claim to the next.
// The first claims are windows of as many parts as a tile has, the others are block rows. At most one whole tile begins
// in a window, in the row of the window's last part. The parts that a row has left after its whole tiles are a tile of
// their own, which comes at the end.
__device__ __forceinline__ Tile parts_at(const BlockProductsSm90& problem, u32 t, i64& block_row) {
  constexpr Tile kNone{1, 0}, kEnd{0, 0, -1};
  constexpr int kFew = kShared ? kNarrow / kPartN : kParts;
  const u32 heights = (problem.R + kTileM - 1) / kTileM, parts = parts_of(problem), number = t / heights;
  const i64 all = problem.blocks * parts, narrow = kShared ? i64(problem.narrow) : all;
  const i64 wide_windows = (narrow + kParts - 1) / kParts, windows = wide_windows + (all - narrow + kFew - 1) / kFew;
  // Parts of a block row, those before `narrow` or those from it on.
  struct Stretch { i64 begin, end; };
  const auto stretch = [&](i64 r, bool wide) {
    const auto bound = [&](i64 i) { return min(max(i64(problem.starts[i]), i64(0)), problem.blocks) * parts; };
    return wide ? Stretch{bound(r), min(bound(r + 1), narrow)} : Stretch{max(bound(r), narrow), bound(r + 1)};
  };
  const auto tile = [&](i64 r, i64 part, i64 end) {
    return Tile{0, 1, int(part), int(end), int(t % heights) * kTileM, int(r * problem.R)};
  };
  if (number < windows) {
    const bool wide = number < wide_windows;
    const int width = wide ? kParts : kFew;
    const i64 first = wide ? i64(number) * kParts : narrow + (number - wide_windows) * kFew;
    const i64 last = min(first + width, wide ? narrow : all) - 1;
    block_row = block_row_of(problem.starts, problem.a_blocks, last / parts, block_row);
    const Stretch x = stretch(block_row, wide);
    const i64 part = x.begin >= first ? x.begin : x.begin + (first - x.begin + width - 1) / width * width;
    return part <= last && part + width <= x.end ? tile(block_row, part, part + width) : kNone;
  }
  const i64 left = number - windows;
  if (left > problem.a_blocks) return kEnd;
  const bool is_cut = left == problem.a_blocks;  // the row that continues after `narrow`: the rest of its parts before
  if (is_cut && narrow == all) return kNone;
  const i64 r = is_cut ? block_row_of(problem.starts, problem.a_blocks, narrow / parts, 0) : left;
  const bool wide = is_cut || stretch(r, false).end <= narrow;
  const Stretch x = stretch(r, wide);
  const i64 rest = max(i64(0), x.end - x.begin) % (wide ? kParts : kFew);
  return rest ? tile(r, x.end - rest, x.end) : kNone;
}

// Goes through a list: tile n - before of window `window`.
struct Cursor {
  i64 window = 0;
  u32 before = 0;

  // The record of tile n, which is not before the one of the last call; -1 after the last one. A whole warp calls it.
  __device__ __forceinline__ int record_of(const BlockProductsSm90& problem, u32 n) {
    const i64 across = (problem.b_blocks + kWindowColumns - 1) / kWindowColumns;
    const i64 windows = (problem.a_blocks + kWindow - 1) / kWindow * across;
    const u32 lane = threadIdx.x % 32;
    for (; window < windows; window += 32) {
      const u32 count = window + lane < windows ? u32(problem.starts[1 + 2 * (window + lane)]) : 0;
      u32 end = count;
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, end, i);
        if (lane >= i) end += other;
      }
      const u32 later = __ballot_sync(0xffffffffu, before + end > n);
      before += __shfl_sync(0xffffffffu, later ? end - count : end, later ? __ffs(later) - 1 : 31);
      if (later) {
        window += __ffs(later) - 1;
        const i64 place = i64(problem.starts[2 + 2 * window]) + (n - before);
        return in_range(place, problem.pairs) ? int(problem.right[place]) : -1;
      }
    }
    return -1;
  }
};

// The tile of claim t of a list. The last ones are cut into 2 or 4 if all CTAs together then have only one piece each:
// on an H200, a whole tile takes 1.6 times as long as a half and 2.3 times as long as a quarter.
__device__ __forceinline__ Tile listed_at(const BlockProductsSm90& problem, u32 t, Cursor& cursor) {
  const u32 count = u32(problem.starts[0]), whole = count / gridDim.x * gridDim.x, rest = count - whole;
  u32 pieces = 1;
  while (pieces < kMostPieces && rest * pieces * 2 <= gridDim.x) pieces *= 2;
  const bool is_whole = t < whole;
  const int record = cursor.record_of(problem, is_whole ? t : whole + (t - whole) / pieces);
  if (!in_range(record, problem.pairs)) return {0, 0, -1};
  if (is_whole) pieces = 1;
  const int width = kParts / int(pieces), part = record * kParts + int((t - whole) % pieces) * width;
  return {0, 1, part, part + width};
}

__device__ __forceinline__ bool is_narrow(const Tile& x) { return kShared && (x.end - x.part) * kPartN <= kNarrow; }
__device__ __forceinline__ bool is_least(const Tile& x) { return kLeast < kNarrow && (x.end - x.part) * kPartN <= kLeast; }

// One warp claims a tile when it is needed soon. An earlier claim would take work from other CTAs, since a tile can be
// long.
__device__ __forceinline__ void schedule(const BlockProductsSm90& problem, Shared& shared) {
  const bool leads = threadIdx.x % 32 == 0;
  const i64 pairs_of_tile = kSampled ? 1 : max(i64(1), problem.pairs / max(i64(1), problem.blocks));
  const i64 steps = pairs_of_tile * ((problem.K + kDepth - 1) / kDepth);
  const u32 ahead = u32(min(i64(kTiles), (kEarly + steps - 1) / steps));  // tiles claimed ahead of the one copied
  i64 block_row = 0;
  Cursor cursor;
  for (u32 n = 0;; ++n) {
    if (n >= ahead) wait(shared.wanted[(n - ahead) % kTiles], parity<kTiles>(n - ahead));
    Tile x;
    do {
      int claimed = 0;
      if (leads) claimed = atomicAdd(problem.counters, 1);
      const u32 t = u32(__shfl_sync(0xffffffffu, claimed, 0));
      if constexpr (kListed) x = listed_at(problem, t, cursor);
      else if constexpr (kSampled) x = parts_at(problem, t, block_row);
      else x = pairs_at(problem, t);
    } while (x.first > x.last);
    if (leads) {
      wait(shared.tile_empty[n % kTiles], parity<kTiles>(n) ^ 1);
      shared.tiles[n % kTiles] = x;
      arrive(shared.tile_full[n % kTiles]);
    }
    __syncwarp();
    if (x.part < 0) break;
  }
}

// One warp copies tiles of A and B. Lanes hold the next 32 pairs, or the parts of a sampled tile.
__device__ __forceinline__ void produce(const BlockProductsSm90& problem, Shared& shared) {
  const int lane = threadIdx.x % 32, parts = parts_of(problem), steps_of_pair = (problem.K + kDepth - 1) / kDepth;
  u32 step = 0;
  for (u32 n = 0;; ++n) {
    wait(shared.tile_full[n % kTiles], parity<kTiles>(n));
    const Tile x = shared.tiles[n % kTiles];
    __syncwarp();
    if (lane == 0) arrive(shared.tile_empty[n % kTiles]);
    if (x.part < 0) break;
    const u32 end = step + u32(x.last - x.first) * steps_of_pair;
    if (lane == 0 && end - step <= kEarly) arrive(shared.wanted[n % kTiles]);
    for (int from = x.first; from < x.last; from += 32) {
      int block_a = 0, block_b = 0, column = x.part % parts * kPartN, row = 0;
      if constexpr (kListed) {
        const Index* record = problem.left + i64(x.part / kParts) * kRecord;
        const Index at_row = record[lane % (kListed ? kRowParts : 1)], at = record[kRowParts + (x.part + lane) % kParts];
        row = int(in_range(at_row, problem.a_blocks) ? i64(at_row) : problem.a_blocks) * kPartM;
        column = int(in_range(at, problem.b_blocks) ? i64(at) : problem.b_blocks) * kPartN;
      } else if constexpr (kSampled) {
        const int part = x.part + lane % kParts;
        // No block: TMA gives zeros after the last one.
        const Index at = part < x.end ? problem.right[part / parts] : Index(-1);
        column = int(in_range(at, problem.b_blocks) ? i64(at) : problem.b_blocks) * problem.N + part % parts * kPartN;
      } else if (from + lane < x.last) {
        const Index left = problem.left[from + lane], right = problem.right[from + lane];
        block_a = int(in_range(left, problem.a_blocks) ? i64(left) : problem.a_blocks);  // zeros after the last one
        block_b = int(in_range(right, problem.b_blocks) ? i64(right) : problem.b_blocks);
      }
      const bool narrow = is_narrow(x);
      const bool least = is_least(x);
      const int copies = least ? kLeast / kPartN : narrow ? kNarrow / kPartN : kParts;
      for (int i = 0; i < min(x.last - from, 32); ++i) {
        const int at_a = __shfl_sync(0xffffffffu, block_a, i), at_b = __shfl_sync(0xffffffffu, block_b, i);
        for (int k = 0; k < problem.K; k += kDepth, ++step) {
          const u32 at = step % kStages;
          wait(shared.empty[at], step / kStages % 2 ^ 1);
          const u32 full = shared_address(&shared.full[at]), b = shared_address(shared.b[at]);
          const u32 a = shared_address(shared.a[at]);
          if (lane == 0) {
            if (end - step == kEarly + 1) arrive(shared.wanted[n % kTiles]);
            barrier_expect(full, kBytesA + (least ? kLeast * 128 : narrow ? kNarrow * 128 : kBytesB));
            if (!kListed && !kATransposed) copy_tile(a, &problem.a, k, x.top + x.row, at_a, 0, full);
          }
          __syncwarp();
          if constexpr (kATransposed) {
            const int first = kListed ? row : x.top + x.row + lane * kSlabM;
            if (lane < kTileM / kSlabM) copy_tile(a + lane * kSlabA, &problem.a, first, k, 0, 0, full);
          } else if (kListed && lane < kRowParts) {
            copy_tile(a + lane * kPartM * 128, &problem.a, k, row, 0, 0, full);
          }
          if (lane < copies) {
            if constexpr (kBTransposed) {
              copy_tile(b + lane * kPartN * 128, &problem.b, k, column, at_b, 0, full);
            } else {
#pragma unroll
              for (int slab = 0; slab < kPartN / kSlab; ++slab)
                copy_tile(b + (lane * (kPartN / kSlab) + slab) * kSlabB, &problem.b, column + slab * kSlab, k, at_b, 0, full);
            }
          }
          __syncwarp();
        }
      }
    }
  }
}

// The address of column c of row `top` of a tile, or null. Rows are N elements apart; `rows_from` is their number.
__device__ __forceinline__ C* target_of(const BlockProductsSm90& problem, const Tile& x, int top, int c) {
  if constexpr (kListed) {
    const int part = x.part + c / kPartN;
    if (part >= x.end) return nullptr;
    const Index* blocks = problem.left + i64(part / kParts) * kRecord + kRowParts + kParts;
    const Index block = blocks[top / kPartM * kParts + part % kParts];
    if (!in_range(block, problem.blocks)) return nullptr;
    return problem.out + (i64(block) * kPartM + top % kPartM) * kPartN + c % kPartN;
  }
  const int parts = parts_of(problem), part = x.part + c / kPartN, block = parts == 1 ? part : part / parts;
  const int column = (part - block * parts) * kPartN + c % kPartN;
  if (part >= x.end || column >= problem.N) return nullptr;
  return problem.out + (i64(block) * problem.R + x.row + top) * problem.N + column;
}
__device__ __forceinline__ int rows_from(const BlockProductsSm90& problem, const Tile& x, int top) {
  return kListed ? kPartM - top % kPartM : problem.R - x.row - top;
}

// A warp has 16 rows from `top` on: a thread has rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) + 8 j and the
// next. 16-bit results are stored 16 bytes at a time, through shared memory. Addresses are computed once for all rows:
// until a result is stored its warpgroup multiplies nothing, and a tile may be as short as three pairs.
__device__ __forceinline__ void store(const BlockProductsSm90& problem, Shared& shared, const Tile& x, int top,
                                      const f32 (&accum)[kAccum]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (sizeof(C) == 2) {
    u8* out = shared.out[warp];
    const int line = lane / 8, rows = rows_from(problem, x, top + line);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 columns: two 8 x 8 matrices above two others
        const f32* s = accum + slab * 32 + i * 8;
        const u32 at = lane % 16 * 128 + (i * 2 + lane / 16) * 16;
        store_matrix_x4<false>(shared_address(out) + (at ^ (at >> 3 & 112)), pack<C>(s[0], s[1]), pack<C>(s[2], s[3]),
                               pack<C>(s[4], s[5]), pack<C>(s[6], s[7]));
      }
      C* target = target_of(problem, x, top + line, slab * 64 + lane % 8 * 8);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const u32 at = (line + i) * 128 + lane % 8 * 16;
        const uint4 both = *reinterpret_cast<const uint4*>(out + (at ^ (at >> 3 & 112)));
        if (target && i < rows) *reinterpret_cast<uint4*>(target + i64(i) * problem.N) = both;
      }
    }
  } else {
    const int rows = rows_from(problem, x, top + lane / 4);
#pragma unroll
    for (int j = 0; j < kAccum; j += 4) {  // two rows of 8 columns
      C* target = target_of(problem, x, top + lane / 4, j / 4 * 8 + lane % 4 * 2);
      if (!target) continue;
      if (rows > 0) *reinterpret_cast<float2*>(target) = {accum[j], accum[j + 1]};
      if (rows > 8) *reinterpret_cast<float2*>(target + i64(8) * problem.N) = {accum[j + 2], accum[j + 3]};
    }
  }
}

// The products of stages `begin` to `end` - 1. A stage is released when the products of the next one have started.
template <int kColumns>
__device__ __forceinline__ void multiply_stages(Shared& shared, u32 begin, u32 end, int warpgroup,
                                                f32 (&accum)[kHeights][kAccum]) {
  for (u32 i = begin; i != end; ++i) {
    const u32 at = i % kStages;
    wait(shared.full[at], i / kStages % 2);
    const u32 from_a = shared_address(shared.a[at]) + (kShared ? warpgroup * 8192 : 0);
    const u64 a = kATransposed ? wgmma_descriptor(from_a, kSlabA, 8 * kRowA, kRowA) : wgmma_descriptor(from_a, 16, 1024);
    const u32 from_b = shared_address(shared.b[at]);
    const u64 b = kBTransposed ? wgmma_descriptor(from_b, 16, 1024) : wgmma_descriptor(from_b, kSlabB, 8 * kRowB, kRowB);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / MMA_K; ++k)
#pragma unroll
      for (int h = 0; h < kHeights; ++h)
        wgmma<kATransposed, !kBTransposed>(*reinterpret_cast<f32(*)[kColumns / 2]>(accum[h]), i != begin || k > 0,
                                           a + h * (8192 / 16) + k * (kATransposed ? MMA_K * kRowA : 32) / 16,
                                           b + k * (kBTransposed ? 32 : MMA_K * kRowB) / 16);
    wgmma_commit();
    if (i != begin) {
      wgmma_wait<1>();
      if (threadIdx.x % 32 == 0) arrive(shared.empty[(i - 1) % kStages]);
    }
  }
}

__device__ __forceinline__ void consume(const BlockProductsSm90& problem, Shared& shared) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const bool signals = threadIdx.x % 32 == 0;
  const int steps_of_pair = (problem.K + kDepth - 1) / kDepth;
  f32 accum[kHeights][kAccum];
  u32 step = 0, own = 0;  // steps of all tiles; tiles of this warpgroup
  for (u32 n = 0;; ++n) {
    wait(shared.tile_full[n % kTiles], parity<kTiles>(n));
    const Tile& x = shared.tiles[n % kTiles];
    const auto release_tile = [&] {
      __syncwarp();
      if (signals) arrive(shared.tile_empty[n % kTiles]);
    };
    const bool is_done = __shfl_sync(0xffffffffu, x.part < 0, 0);
    if (is_done) break;
    const u32 begin = __shfl_sync(0xffffffffu, step, 0);
    const u32 end = __shfl_sync(0xffffffffu, step + u32(x.last - x.first) * steps_of_pair, 0);
    step = end;
    if (!kShared && n % kConsumers != warpgroup) {  // a tile of the other warpgroup
      release_tile();
      continue;
    }
    // A stage can be waited for only after the stage before it in the same place of the ring has been consumed.
    if (!kShared) {
      if (warpgroup == 1 || own > 0) wait(shared.turn[warpgroup], (own + warpgroup + 1) % 2);
      ++own;
    }
    if (kLeast < kNarrow && __shfl_sync(0xffffffffu, is_least(x), 0))
      multiply_stages<kLeast>(shared, begin, end, warpgroup, accum);
    else if (kShared && __shfl_sync(0xffffffffu, is_narrow(x), 0))
      multiply_stages<kShared ? kNarrow : kTileN>(shared, begin, end, warpgroup, accum);
    else
      multiply_stages<kTileN>(shared, begin, end, warpgroup, accum);
    if (!kShared) {
      __syncwarp();
      if (signals) arrive(shared.turn[1 - warpgroup]);
    }
    wgmma_wait<0>();
    if (signals && begin != end) arrive(shared.empty[(end - 1) % kStages]);
#pragma unroll
    for (int h = 0; h < kHeights; ++h) {
      settle(accum[h]);
#pragma unroll
      for (int i = 0; i < kAccum; ++i)
        if (begin == end) accum[h][i] = 0;
      store(problem, shared, x, (kShared ? warpgroup : h) * 64 + threadIdx.x / 32 % 4 * 16, accum[h]);
    }
    release_tile();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) block_products_sm90(const __grid_constant__ BlockProductsSm90 problem) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  // One thread sets up the barriers.
  if (threadIdx.x == 0) {
    prefetch_map(&problem.a);
    prefetch_map(&problem.b);
    const auto init = [](u64& barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
    for (int i = 0; i < kStages; ++i) init(shared.full[i], 1), init(shared.empty[i], kShared ? 8 : 4);
    for (int i = 0; i < kTiles; ++i) init(shared.tile_full[i], 1), init(shared.tile_empty[i], 4 * kConsumers + 1);
    for (int i = 0; i < kTiles; ++i) init(shared.wanted[i], 1);
    for (int i = 0; i < kConsumers; ++i) init(shared.turn[i], 4);
    barrier_init_fence();
  }
  __syncthreads();

  // Two consumer warpgroups; a warp that copies and one that claims tiles.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < 4 * kConsumers) {
    more_registers<232>();
    consume(problem, shared);
  } else {
    fewer_registers<40>();
    if (warp == 4 * kConsumers) produce(problem, shared);
    if (warp == 4 * kConsumers + 1) schedule(problem, shared);
  }

  // The last CTA sets the counters to zero for the next launch.
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0) leave_counters(problem.counters);
}
