// Keys that are gathered: a tile of keys is made of pieces of 16, 32 or 64 keys that the tile of queries sees, wherever
// they are, so that blocks of a mask that are smaller than a tile of keys are multiplied without the hidden keys beside
// them. Up to three warps start the copies, since one takes a thread about 200 cycles. The last tile is filled up with
// pieces beyond the last key, which TMA writes as zeros: nobody sees them, but their values are multiplied by 0.
#pragma once

#include "common/attention_sm90_producers.cuh"

// What is seen of an entry, in one number: for each warp of consumers and each 16 keys a bit, since rows of blocks are
// multiples of 16; then whether that does not say all and words are to be waited for; then the number of the words.
namespace Seen {
constexpr int kGroups = 4;  // of 16 keys
constexpr u32 kAll = (1u << kGroups) - 1, kHasWords = 1u << 4 * kGroups;
static_assert(!kGathers || (kTileQ == 64 && kTileK == 16 * kGroups), "a number has the bits of 64 queries and 64 keys");
__device__ __forceinline__ u32 with_number(u32 seen, u32 number) {
  return seen | number % (2 * kStages) << (4 * kGroups + 1);
}
// The number of the words, as far as the ring tells numbers apart, or -1.
__device__ __forceinline__ int number_in(u32 seen) { return seen & kHasWords ? int(seen >> (4 * kGroups + 1)) : -1; }
__device__ __forceinline__ u32 of_warp(u32 seen, int warp) { return seen >> warp * kGroups & kAll; }
}  // namespace Seen

// A lane's piece of an entry: its first key, and what is seen of the whole entry.
struct Piece { int key; u32 seen; };

// Piece number n of a tile of queries. Neighbouring lanes have the pieces of an entry.
__device__ __forceinline__ Piece look_up(const Attention& a, const Tile& x, int n) {
  constexpr int kOwn = kPiece / 16;
  const Entry piece = piece_at(a, x, n);
  u32 rows = 0, seen = 0;  // rows: a bit for each warp of consumers
  if (n < x.last - x.first) {
    if (piece.part < 0) {
      rows = 15;
      if (!piece.whole) seen = Seen::kHasWords;
    } else {
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const int row = x.row + warp * 16, down = row / a.block_q - x.row / a.block_q;
        const int kind = kind_of(a, piece.part, down * a.parts_k);
        if (kind == -1 || u32(kind) < u32(a.masks) || row >= x.rows) rows |= 1 << warp;
        if (u32(kind) < u32(a.masks)) seen = Seen::kHasWords;
      }
      if (!entry_at(a, x, piece.key / kPiece, -1).whole) seen = Seen::kHasWords;
    }
  }
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    if (rows >> warp & 1) seen |= ((1u << kOwn) - 1) << (warp * Seen::kGroups + threadIdx.x % kPiecesOfTile * kOwn);
  }
#pragma unroll
  for (int i = 1; i < kPiecesOfTile; i *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, i);
  return {piece.key, seen};
}

// Starts this warp's share of the copies of an entry, of which lane i has the first key of piece i.
template <int kSlabCount>
__device__ __forceinline__ void copy_pieces(const u8* to, const TensorMap& map, int key, int head, int batch, u64& full,
                                            int feeder) {
  constexpr int kBoxes = kSlabCount * kPiecesOfTile;
  constexpr u32 kBytesOfBox = kPiece * 128;
  const bool first_lane = threadIdx.x % 32 == 0;
  const u32 barrier = shared_address(&full);
  if (first_lane) barrier_expect(barrier, u32(kBoxes - feeder + kFeeders - 1) / kFeeders * kBytesOfBox);
#pragma unroll 1
  for (int box = feeder; box < kBoxes; box += kFeeders) {
    const int piece = box / kSlabCount, slab = box % kSlabCount, own = __shfl_sync(0xffffffffu, key, piece);
    if (first_lane)
      copy_tile(shared_address(to) + slab * kSlabK + piece * kBytesOfBox, &map, kSlabColumns * slab, own, head, batch,
                barrier);
  }
  __syncwarp();
}

// kFeeders warps start the copies of keys and values, in the order of `produce`, and compute the words of those entries
// of which rows and columns of blocks do not say all.
__device__ __forceinline__ void feed(const AttentionSm90& problem, Shared& shared, int feeder) {
  constexpr int kEntries = 32 / kPiecesOfTile;  // entries that the lanes look up at once
  const Attention& a = problem.attention;
  const int lane = threadIdx.x % 32;
  int held = 0, head = -1, batch = 0;  // the last entry, whose values are still to be copied; head -1: there is none
  const auto copy_values = [&](u32 n) {
    if (head < 0) return;
    const u32 at = n % kStages;
    wait(shared.v_empty[at], parity<kStages>(n) ^ 1);
    copy_pieces<kOutSlabs>(shared.v[at], problem.v, held, head, batch, shared.v_full[at], feeder);
    head = -1;
  };
  u32 entry = 0, words = 0;
  for (u32 n = 0;; ++n) {
    wait(shared.tile_full[n % kTiles], parity<kTiles>(n));
    const Tile& x = shared.tiles[n % kTiles];
    if (x.head < 0) break;
    const int count = count_of(x);
    if (count == 0 || !kAcross) copy_values(entry - 1);
    if (count == 0 && feeder == 0 && lane == 0) arrive(shared.wanted);
    for (int first = 0; first < count; first += kEntries) {
      const Piece mine = look_up(a, x, first * kPiecesOfTile + lane);
      for (int i = 0; i < min(kEntries, count - first); ++i, ++entry) {
        const u32 at = entry % kStages, seen = __shfl_sync(0xffffffffu, mine.seen, i * kPiecesOfTile);
        const int key = __shfl_sync(0xffffffffu, mine.key, i * kPiecesOfTile + lane % kPiecesOfTile);
        if (feeder == 0 && lane == 0 && first + i == max(count - kEarly, 0)) arrive(shared.wanted);
        wait(shared.k_empty[at], parity<kStages>(entry) ^ 1);
        if (feeder == 0 && lane == 0) shared.masks[at] = Seen::with_number(seen, words);
        copy_pieces<kQuerySlabs>(shared.k[at], problem.k, key, x.head / a.group, x.batch, shared.k_full[at], feeder);
        if (seen & Seen::kHasWords) {
          // Their place is free, because the entry that had it has been consumed.
          const u32 place = words++ % kStages;
#pragma unroll 1
          for (int row = 32 * feeder + lane; row < kTileQ; row += kWordThreads) {
#pragma unroll 1
            for (int w = 0; w < kWords; ++w)
              shared.seen[place][row][w] = word_of_tile(a, x, (first + i) * kPiecesOfTile, x.row + row, w);
          }
          arrive(shared.mask_full[place]);
        }
        copy_values(entry - 1);
        held = key, head = x.head / a.group, batch = x.batch;
      }
    }
    release(shared.tile_empty[n % kTiles]);
  }
  copy_values(entry - 1);
}
