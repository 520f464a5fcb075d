// entries of a group of row tiles: {column, block of each row tile or -1}, in order;   items: groups, longest first
// The union of the block columns of each group of row tiles. A stored block has a key for each row tile of its row,
// from high bits to low: group, column, row tile of the group, block. Keys are sorted between kRowTileKeys and
// kCountEntries, so that the keys of an entry are neighbours; blocks outside the matrix come last, and belong to no
// item.
// Up to 1024 CTAs have a tile of keys each: they count the entries that begin in it, then number them from the counts
// before their own. Groups of one row tile have the blocks of a row as they are stored. Items are counted and numbered
// in the same way; where there are few, one CTA does all of that and sorts them in shared memory.
// One kernel has all steps, so that it is compiled and loaded once: 2 launches for groups of one row tile, 10 to 16 for
// groups of several row tiles, where array operations took 30 and 85. See docs/kernels/work-list.md.
#include "common/coordinates.cuh"
#include "common/sums.cuh"

using Index = INDEX;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread, so that ptxas does not spill for occupancy

enum Step {
  kPlaceRowTiles, kRowTileKeys, kCountEntries, kFillEntries,  // entries of groups of several row tiles
  kRowEntries,                                                // or of block rows
  kColumnKeys, kColumnEntries,                                // or of block columns, for a transpose
  kSumLengths, kCountItems, kItemKeys, kSortKeys, kListItems  // items
};
constexpr i64 kNoItem = 0x7fffffffffffffff;  // the key of an item that there is not

struct WorkList {
  StoredPattern<Index> stored;
  const int* order;   // place -> row tile, a permutation; null: the identity
  int* place;         // row tile -> place; a group has per_group neighbouring places. For a transpose, block -> column
  int* row_tiles;     // place -> row tile, or -1 after the last one
  i64* keys;          // (count,)
  int* begun;         // number of entries that begin in each tile
  int* columns;       // (count,): entry -> column; block_cols where there is none
  int* blocks;        // (count * per_group,)
  int* bounds;        // (groups / alike + 1,): first entry of each group; `alike` neighbouring groups have the same
  i64* lengths;       // number of entries in each tile of groups
  u64* begun_items;   // number of items in each tile of groups, and in the upper half of those that are pieces
  int4* unsorted;     // (count,): items in the order of their groups
  int4* items;        // (count,): {group, first entry, end, piece or -1}, longest first
  int4* splits;       // (most_pieces,): piece -> {first piece of its group, number of pieces, first entry, end}
  int* item_count;
  i64 count, tile;    // number of keys, and of the keys of a CTA; for items, of groups of a CTA
  f64 fair;           // the share of all entries that no piece exceeds, if that is at least least_entries
  int per_row, per_group, all_row_tiles, groups, block_cols, alike;
  u32 least_entries;
  int most_pieces;    // no group is cut if most_pieces is 0
  int block_bits, member_bits, column_bits;
  i64 step, last_step;  // of this launch: several only if it has one CTA

  // Group, column, row tile.
  __device__ __forceinline__ u64 row_tile_of(i64 i) const { return u64(keys[i]) >> block_bits; }
  __device__ __forceinline__ int group_of(i64 i) const { return int(row_tile_of(i) >> (member_bits + column_bits)); }
  // Whether an entry begins with key i. A row tile that has a column twice has it in two entries.
  __device__ __forceinline__ bool begins(i64 i) const {
    if (i == 0) return true;
    const u64 own = row_tile_of(i), before = row_tile_of(i - 1);
    return own == before || own >> member_bits != before >> member_bits;
  }
};
#ifdef WORK_LIST_BYTES
CHECK_LAYOUT(WorkList, WORK_LIST, (stored)(order)(place)(row_tiles)(keys)(begun)(columns)(blocks)(bounds)(lengths)
             (begun_items)(unsorted)(items)(splits)(item_count)(count)(tile)(fair)(per_row)(per_group)(all_row_tiles)
             (groups)(block_cols)(alike)(least_entries)(most_pieces)(block_bits)(member_bits)(column_bits)(step)
             (last_step))
#endif

__device__ __forceinline__ u64 low(u64 x, int bits) { return x & ((1ull << bits) - 1); }

// visit(i) for i from 0 to number - 1, by all threads of a grid together.
template <class Visit>
__device__ __forceinline__ void for_each(i64 number, Visit visit) {
#pragma unroll 1
  for (i64 i = blockIdx.x * i64(kThreads) + threadIdx.x; i < number; i += i64(gridDim.x) * kThreads) visit(i);
}

__device__ __forceinline__ void place_row_tiles(const WorkList& m) {
  for_each(i64(m.groups) * m.per_group, [&](i64 i) {
    const int row_tile = m.order ? m.order[i] : int(i);
    m.place[row_tile] = int(i);
    m.row_tiles[i] = row_tile < m.all_row_tiles ? row_tile : -1;
  });
}

__device__ __forceinline__ void row_tile_keys(const WorkList& m) {
  for_blocks(m.stored, [&](i64 p, int row, int column) {
    for (int sub = 0; sub < m.per_row; ++sub) {
      const int place = row < 0 ? m.groups * m.per_group : m.place[row * m.per_row + sub];
      u64 key = u64(place / m.per_group) << m.column_bits | u64(row < 0 ? m.block_cols : column);
      key = key << m.member_bits | u64(place % m.per_group);
      m.keys[p * m.per_row + sub] = i64(key << m.block_bits | u64(p));
    }
  });
}

// Also clears the columns and blocks of all entries.
__device__ __forceinline__ void count_entries(const WorkList& m) {
  const Range tile = inside(blockIdx.x * m.tile, (blockIdx.x + 1) * m.tile, m.count);
  int begun = 0;
  for (i64 i = tile.first + threadIdx.x; i < tile.last; i += kThreads) {
    begun += m.begins(i);
    m.columns[i] = m.block_cols;
  }
  for (i64 x = tile.first * m.per_group + threadIdx.x; x < tile.last * m.per_group; x += kThreads) m.blocks[x] = -1;
  begun = int(sum_of_all(u64(begun)));
  if (threadIdx.x == 0) m.begun[blockIdx.x] = begun;
}

// The tiles cover one more index than there are keys; there all groups have begun.
__device__ __forceinline__ void fill_entries(const WorkList& m) {
  __shared__ int smem_begun[kWarps];
  const Range tile = inside(blockIdx.x * m.tile, (blockIdx.x + 1) * m.tile, m.count + 1);
  int before = int(sum_of<kThreads>(m.begun, blockIdx.x));  // entries that begin before the current keys
  for (i64 i0 = tile.first; i0 < tile.last; i0 += kThreads) {
    const i64 i = i0 + threadIdx.x;
    const bool begins = i < m.count && m.begins(i);
    const u32 warp = __ballot_sync(0xffffffffu, begins);
    if (lane_id() == 0) smem_begun[threadIdx.x / 32] = __popc(warp);
    __syncthreads();
    int entry = before + __popc(warp & ((1u << lane_id()) - 1));  // the next entry to begin
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < int(threadIdx.x / 32)) entry += smem_begun[w];
      before += smem_begun[w];
    }
    __syncthreads();
    if (i < m.count) {
      const i64 own = begins ? entry : entry - 1;
      const u64 row_tile = m.row_tile_of(i);
      if (begins) m.columns[own] = int(low(row_tile >> m.member_bits, m.column_bits));
      m.blocks[own * m.per_group + i64(low(row_tile, m.member_bits))] = int(low(u64(m.keys[i]), m.block_bits));
    }
    // Groups that begin here, and empty groups before them. If there are many, a warp writes them together.
    int last = -1, known = -1;
    if (i <= m.count) {
      last = i == m.count ? m.groups : m.group_of(i);
      known = i == 0 ? -1 : m.group_of(i - 1);
    }
    if (last == known + 1) m.bounds[last] = entry;
    for (u32 many = __ballot_sync(0xffffffffu, last > known + 1); many; many &= many - 1) {
      const int lane = __ffs(many) - 1, to = __shfl_sync(0xffffffffu, last, lane);
      const int from = __shfl_sync(0xffffffffu, known, lane) + 1, number = __shfl_sync(0xffffffffu, entry, lane);
      for (i64 g = i64(from) + lane_id(); g <= to; g += 32) m.bounds[g] = number;
    }
  }
}

// Block rows as they are stored: entry p is block p.
__device__ __forceinline__ void row_entries(const WorkList& m) {
  for_each(m.count, [&](i64 p) {
    const Index column = m.stored.indices[p];
    m.columns[p] = in_range(column, m.block_cols) ? int(column) : m.block_cols;
    m.blocks[p] = int(p);
  });
  for_each(m.stored.rows + 1, [&](i64 i) {
    const i64 begin = m.stored.indptr[i];
    m.bounds[i] = int(begin < 0 ? 0 : begin < m.count ? begin : m.count);
  });
  for_each(m.groups, [&](i64 i) { m.row_tiles[i] = int(i); });
}

// A key is {block column + 1, block}, so that blocks outside the matrix come first, and belong to no item.
__device__ __forceinline__ void column_keys(const WorkList& m) {
  for_blocks(m.stored, [&](i64 p, int row, int column) {
    m.keys[p] = i64(row + 1) << 32 | p;
    m.place[p] = column;
  });
}

__device__ __forceinline__ void column_entries(const WorkList& m) {
  for_each(m.count, [&](i64 i) {
    const int block = int(m.keys[i]);
    m.columns[i] = m.place[block];
    m.blocks[i] = block;
  });
  for_each(m.stored.columns + 1, [&](i64 row) {
    i64 first = 0, end = m.count;  // searches the first block of this row, or behind it
    while (first < end) {
      const i64 middle = (first + end) / 2;
      if (m.keys[middle] >> 32 <= row) first = middle + 1;
      else end = middle;
    }
    m.bounds[row] = int(first);
  });
  for_each(m.groups, [&](i64 i) { m.row_tiles[i] = int(i); });
}

// The groups of this CTA.
__device__ __forceinline__ Range groups_of_tile(const WorkList& m) {
  return inside(blockIdx.x * m.tile, (blockIdx.x + 1) * m.tile, m.groups);
}
// The entries of a group. Where index arrays are invalid they may run backwards; only whole groups keep that.
__device__ __forceinline__ Range entries_of(const WorkList& m, i64 group) {
  const int* bounds = m.bounds + int(group) / m.alike;
  return {bounds[0], m.most_pieces && bounds[1] < bounds[0] ? bounds[0] : bounds[1]};
}
// The number of entries beyond which a group is cut.
__device__ __forceinline__ u32 most_entries(const WorkList& m) {
  const f64 fair = f64(sum_of<kThreads>(m.lengths, gridDim.x)) * m.fair;
  if (fair >= 0x7fffffff) return 0x7fffffff;
  const u32 most = u32(fair) + (f64(u32(fair)) < fair);
  return most < m.least_entries ? m.least_entries : most;
}
// The items of a group, and in the upper half those that are pieces.
__device__ __forceinline__ u64 items_of(const Range& entries, u32 most) {
  const u64 items = (u32(entries.last - entries.first) + most - 1) / most;
  return items > 1 ? items | items << 32 : 1;
}

__device__ __forceinline__ void sum_lengths(const WorkList& m) {
  const Range tile = groups_of_tile(m);
  u64 sum = 0;
#pragma unroll 1
  for (i64 g = tile.first + threadIdx.x; g < tile.last; g += kThreads) {
    const Range entries = entries_of(m, g);
    sum += u64(entries.last - entries.first);
  }
  sum = sum_of_all(sum);
  if (threadIdx.x == 0) m.lengths[blockIdx.x] = i64(sum);
}

__device__ __forceinline__ void count_items(const WorkList& m) {
  const Range tile = groups_of_tile(m);
  const u32 most = most_entries(m);
  u64 items = 0;
#pragma unroll 1
  for (i64 g = tile.first + threadIdx.x; g < tile.last; g += kThreads) items += items_of(entries_of(m, g), most);
  items = sum_of_all(items);
  if (threadIdx.x == 0) m.begun_items[blockIdx.x] = items;
}

// A key is {entries, negated; number of the item}.
__device__ __forceinline__ void item_keys(const WorkList& m) {
  const Range tile = groups_of_tile(m);
  const bool cut = m.most_pieces;
  const u32 most = cut ? most_entries(m) : 0;
  u64 before = cut ? sum_of<kThreads>(m.begun_items, blockIdx.x) : u64(tile.first);
#pragma unroll 1
  for (i64 g0 = tile.first; g0 < tile.last; g0 += kThreads) {
    const i64 g = g0 + threadIdx.x;
    const Range entries = g < tile.last ? entries_of(m, g) : Range{0, 0};
    const u64 own = g >= tile.last ? 0 : cut ? items_of(entries, most) : 1;
    const u64 first = sum_in_front<kThreads>(own, before);
    const int items = int(own), number = int(first), first_piece = int(first >> 32);
    const int length = int(entries.last - entries.first);
    const int share = items ? length / items : 0, rest = length - items * share;
    i64 stop = entries.first;
#pragma unroll 1
    for (int k = 0; k < items; ++k) {  // item k ends at k + 1 times the length by the number of items, rounded down
      const i64 begin = stop;
      stop = entries.first + (k + 1) * i64(share) + (k + 1) * rest / items;
      m.keys[number + k] = (begin - stop) * (1ll << 32) + number + k;
      m.unsorted[number + k] = int4{int(g), int(begin), int(stop), items > 1 ? first_piece + k : -1};
      if (items > 1) m.splits[first_piece + k] = int4{first_piece, items, int(entries.first), int(entries.last)};
    }
  }
  if (tile.last < m.groups) return;  // the last CTA has counted all items
#pragma unroll 1
  for (i64 i = int(before) + threadIdx.x; i < m.count; i += kThreads) m.keys[i] = kNoItem;
#pragma unroll 1
  for (i64 i = i64(before >> 32) + threadIdx.x; i < m.most_pieces; i += kThreads) m.splits[i] = int4{0, 0, 0, 0};
  if (threadIdx.x == 0) *m.item_count = int(before);
}

// Bitonic, in the shared memory of one CTA: `padded` is a power of two.
__device__ __forceinline__ void sort_keys(const WorkList& m) {
  extern __shared__ __align__(16) i64 smem_keys[];
  int padded = 2;
  while (padded < m.count) padded *= 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < padded; i += kThreads) smem_keys[i] = i < m.count ? m.keys[i] : kNoItem;
#pragma unroll 1
  for (int size = 2; size <= padded; size *= 2) {
#pragma unroll 1
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < padded / 2; i += kThreads) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const i64 x = smem_keys[a], y = smem_keys[b];
        if (x > y == !(a & size)) smem_keys[a] = y, smem_keys[b] = x;
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < m.count; i += kThreads) m.keys[i] = smem_keys[i];
}

__device__ __forceinline__ void list_items(const WorkList& m) {
  for_each(m.count, [&](i64 i) {
    m.items[i] = m.keys[i] == kNoItem ? int4{0, 0, 0, -1} : m.unsorted[int(m.keys[i])];
  });
}

__device__ __forceinline__ void do_step(const WorkList& m, i64 step) {
  switch (step) {
    case kPlaceRowTiles: return place_row_tiles(m);
    case kRowTileKeys: return row_tile_keys(m);
    case kCountEntries: return count_entries(m);
    case kFillEntries: return fill_entries(m);
    case kRowEntries: return row_entries(m);
    case kColumnKeys: return column_keys(m);
    case kColumnEntries: return column_entries(m);
    case kSumLengths: return sum_lengths(m);
    case kCountItems: return count_items(m);
    case kItemKeys: return item_keys(m);
    case kSortKeys: return sort_keys(m);
    case kListItems: return list_items(m);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
work_list(const __grid_constant__ WorkList m) {
  for (i64 step = m.step; step <= m.last_step; ++step) {
    do_step(m, step);
    __syncthreads();
  }
}
