// entries of a group of row tiles: {column, block of each row tile or -1}, in order;   items: groups, longest first
// The union of the block columns of each group of row tiles. A stored block has a key for each row tile of its row,
// from high bits to low: group, column, row tile of the group, block. Keys are sorted between kRowTileKeys and
// kCountEntries, so that the keys of an entry are neighbours; blocks outside the matrix come last, and belong to no
// item.
// Up to 1024 CTAs have a tile of keys each: they count the entries that begin in it, then number them from the counts
// before their own. One kernel has all steps, so that it is compiled and loaded once: 12 to 16 launches for a list, two
// of them sorts, where array operations took 85. Keys have 63 bits; a pattern that needs more is left to array
// operations. See docs/kernels/work-list.md.
#include "common/coordinates.cuh"

using Index = INDEX;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

enum Step { kPlaceRowTiles, kRowTileKeys, kCountEntries, kFillEntries, kLengthKeys, kListItems };

struct WorkList {
  StoredPattern<Index> stored;
  const int* order;   // place -> row tile, a permutation; null: the identity
  int* place;         // row tile -> place; a group has per_group neighbouring places
  int* row_tiles;     // place -> row tile, or -1 after the last one
  i64* keys;          // (count,); for kLengthKeys (groups,): {entries, negated; group}
  int* begun;         // number of entries that begin in each tile
  int* columns;       // (count,): entry -> column; block_cols where there is none
  int* blocks;        // (count * per_group,)
  int* bounds;        // (groups + 1,): first entry of each group
  const int *first, *last;  // for items: first entry and end of each group
  int4* items;        // {group, first entry, end, -1}
  int* item_count;
  i64 count, tile;    // number of keys, and of the keys of a CTA
  int per_row, per_group, all_row_tiles, groups, block_cols;
  int block_bits, member_bits, column_bits;
  i64 step;

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
CHECK_LAYOUT(WorkList, WORK_LIST, (stored)(order)(place)(row_tiles)(keys)(begun)(columns)(blocks)(bounds)(first)(last)(items)
             (item_count)(count)(tile)(per_row)(per_group)(all_row_tiles)(groups)(block_cols)(block_bits)(member_bits)
             (column_bits)(step))
#endif

__device__ __forceinline__ u64 low(u64 x, int bits) { return x & ((1ull << bits) - 1); }

// visit(i) for i from 0 to number - 1, by all threads of a grid together.
template <class Visit> __device__ __forceinline__ void for_each(i64 number, Visit visit) {
  for (i64 i = blockIdx.x * i64(kThreads) + threadIdx.x; i < number; i += i64(gridDim.x) * kThreads) visit(i);
}

// The sum over all threads of a CTA, returned to all of them.
__device__ __forceinline__ int sum_of_all(int x) {
  __shared__ int smem_sum;
  if (threadIdx.x == 0) smem_sum = 0;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  __syncthreads();
  if (lane_id() == 0) atomicAdd(&smem_sum, x);
  __syncthreads();
  return smem_sum;
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
  begun = sum_of_all(begun);
  if (threadIdx.x == 0) m.begun[blockIdx.x] = begun;
}

// The tiles cover one more index than there are keys; there all groups have begun.
__device__ __forceinline__ void fill_entries(const WorkList& m) {
  __shared__ int smem_begun[kWarps];
  const Range tile = inside(blockIdx.x * m.tile, (blockIdx.x + 1) * m.tile, m.count + 1);
  int before = 0;  // entries that begin before the current keys
  for (int t = threadIdx.x; t < int(blockIdx.x); t += kThreads) before += m.begun[t];
  before = sum_of_all(before);
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

__device__ __forceinline__ void length_keys(const WorkList& m) {
  for_each(m.groups, [&](i64 g) { m.keys[g] = (i64(m.first[g]) - m.last[g]) * (1ll << 32) + g; });
}

__device__ __forceinline__ void list_items(const WorkList& m) {
  for_each(m.groups, [&](i64 i) {
    const int group = int(m.keys[i] & 0x7fffffff);
    m.items[i] = int4{group, m.first[group], m.last[group], -1};
    if (i == 0) *m.item_count = m.groups;
  });
}

extern "C" __global__ void __launch_bounds__(kThreads)
work_list(const __grid_constant__ WorkList m) {
  switch (m.step) {
    case kPlaceRowTiles: return place_row_tiles(m);
    case kRowTileKeys: return row_tile_keys(m);
    case kCountEntries: return count_entries(m);
    case kFillEntries: return fill_entries(m);
    case kLengthKeys: return length_keys(m);
    case kListItems: return list_items(m);
  }
}
