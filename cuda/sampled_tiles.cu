// Which blocks of a sampled product are computed together: tiles of kGroup = 128 / R block rows by kWide = 256 / C
// block columns that need not be neighbours. A tile is a record {rows, columns, the block of each row and column}, -1
// where there is none. Each stored block is in exactly one tile.
// A CTA has a window of kRows = 64 block rows and kColumns block columns, 8192 columns of the matrix, a bit for each
// block that no tile has yet. Rows are put into groups in up to kWays ways, by xors of a row with one to three numbers,
// and a warp takes the kWide columns that most rows of its group have, if these columns have enough blocks. First tiles
// must be full, then fewer blocks are enough, as many as were found in the best tile so far. Columns that i rows or
// more have are counted by one `and`, one `or` for each row: no sort. In one way no row is in two groups, so that the
// tiles are the same in every run. The host never learns their number.
// Products take tiles window by window, and in a window by their lowest row: those that run together then find common
// rows and columns in the L2. At density .25 and K = 8192, 132 tiles of blocks of 64 copy 792 MB of X and Y, of which
// 190 MB are distinct; 370 if a window had all of 28672 columns, where .91 of a tile is filled instead of .83.
#include "common/bsr.cuh"

using Index = INDEX;

constexpr int kGroup = GROUP, kWide = WIDE;
constexpr int kBits = 6, kRows = 1 << kBits, kColumns = 32 * kWide, kWords = kColumns / 32;
constexpr int kGroups = kRows / kGroup, kThreads = 32 * kGroups;
constexpr int kDirections = kGroup == 2 ? 1 : kGroup == 4 ? 2 : 3;
constexpr int kWays = 63, kLevels = 12;
constexpr int kFull = kGroup * kWide, kRecord = kGroup + kWide + kFull;
// The most tiles of a window: each has kWide blocks or more, except for one of each group.
constexpr int kMost = kRows * kColumns / kWide + kGroups;
static_assert(1 << kDirections == kGroup, "2, 4 or 8 rows");

struct SampledTiles {
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (rows + 1,)
  int* tiles;            // (capacity, kRecord)
  int* order;            // (capacity,): the records of each window, by their lowest row
  int* counts;           // {tiles}, and for each window, row by row, {tiles, their first record}; zero before
  i64 rows, columns, blocks, capacity;
};
#ifdef SAMPLED_TILES_BYTES
CHECK_LAYOUT(SampledTiles, SAMPLED_TILES, (indices)(indptr)(tiles)(order)(counts)(rows)(columns)(blocks)(capacity))
#endif

struct Window {
  int blocks[kRows][kColumns];
  u32 left[kRows][kWords];  // blocks that no tile has yet
  int best;                 // the most blocks of a tile that were found and not taken
  int before;               // blocks of these rows in the windows before
  int tiles;                // those that were found
  int lowest[kRows];        // tiles whose lowest row this is, and then the place of the next one
  u8 row_of[kMost];         // the lowest row of each tile
};

// The rows of group `group` in way `way`: all sums (xor) of some of kDirections numbers and of a row that has no bit of
// `pivots`. Each of these numbers has one of the pivots. In way 0 a group has neighbours.
__device__ __forceinline__ void rows_of(int way, int group, int (&rows)[kGroup]) {
  u32 pivots, directions[kDirections];
  if constexpr (kGroup == 2) {
    directions[0] = way + 1;
    pivots = 1u << (31 - __clz(way + 1));
  } else {
    // All ways to choose 2 or 3 of 6 bits, the neighbours first.
    constexpr u8 kTwo[15] = {3, 5, 9, 17, 33, 6, 10, 18, 34, 12, 20, 36, 24, 40, 48};
    constexpr u8 kThree[20] = {7, 11, 19, 35, 13, 21, 37, 25, 41, 49, 14, 22, 38, 26, 42, 50, 28, 44, 52, 56};
    pivots = kGroup == 4 ? kTwo[way % 15] : kThree[way % 20];
    u32 random = u32(way) * 0x9e3779b1u, rest = pivots;
#pragma unroll
    for (int i = 0; i < kDirections; ++i) {
      directions[i] = (rest & (0u - rest)) | (random >> (8 + kBits * i) & (kRows - 1) & ~pivots);
      rest &= rest - 1;
    }
  }
  u32 row = 0, left = group;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    if (pivots >> bit & 1) continue;
    row |= (left & 1) << bit;
    left >>= 1;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    u32 x = row;
#pragma unroll
    for (int d = 0; d < kDirections; ++d) x ^= i >> d & 1 ? directions[d] : 0u;
    rows[i] = int(x);
  }
}

__device__ __forceinline__ int sum_of_warp(int x) { return int(__reduce_add_sync(0xffffffffu, u32(x))); }
// The sum over the lanes before this one.
__device__ __forceinline__ int sum_before(int x) {
  int sum = x;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, i);
    if (int(threadIdx.x % 32) >= i) sum += other;
  }
  return sum - x;
}
// The lowest `count` bits of x that are set.
__device__ __forceinline__ u32 lowest(u32 x, int count) {
  u32 rest = x;
  for (int i = 0; i < count && rest; ++i) rest &= rest - 1;
  return x & ~rest;
}

// A lane has 32 columns of a group.
struct Columns {
  u32 at_least[kGroup + 2];  // columns that so many rows have
  int count[kGroup + 2];     // their number, over all lanes

  __device__ __forceinline__ Columns(const Window& window, const int (&rows)[kGroup]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 1; i < kGroup + 2; ++i) at_least[i] = 0;
#pragma unroll
    for (int r = 0; r < kGroup; ++r) {
      const u32 has = lane < kWords ? window.left[rows[r]][lane % kWords] : 0;
#pragma unroll
      for (int i = kGroup; i > 1; --i) at_least[i] |= at_least[i - 1] & has;
      at_least[1] |= has;
    }
#pragma unroll
    for (int i = 1; i < kGroup + 2; ++i) count[i] = i <= kGroup ? sum_of_warp(__popc(at_least[i])) : 0;
  }
  // The number of blocks in the kWide columns that most rows have.
  __device__ __forceinline__ int blocks() const {
    int sum = 0;
#pragma unroll
    for (int i = 1; i <= kGroup; ++i) sum += min(count[i], kWide);
    return sum;
  }
  // These columns; among those that as many rows have, the first.
  __device__ __forceinline__ u32 taken() const {
    u32 sure = at_least[1], equal = 0;
    int number = count[1];
#pragma unroll
    for (int i = 1; i <= kGroup; ++i)
      if (count[i] >= kWide) sure = at_least[i + 1], equal = at_least[i] & ~sure, number = count[i + 1];
    return sure | lowest(equal, max(0, kWide - number - sum_before(__popc(equal))));
  }
};

__device__ __forceinline__ i64 first_block(const SampledTiles& problem, i64 row) {
  return min(max(i64(problem.indptr[row]), i64(0)), problem.blocks);
}
// The place of the first tile of the window, behind those of all rows above and of the windows before: kMost says how
// many they can have.
__device__ __forceinline__ i64 first_record(const SampledTiles& problem, const Window& window) {
  const i64 windows = i64(blockIdx.x) * gridDim.y + blockIdx.y;
  return (first_block(problem, i64(blockIdx.x) * kRows) + window.before) / kWide + windows * kGroups;
}

// Writes a tile, and takes its blocks out of the window.
__device__ __forceinline__ void write(const SampledTiles& problem, Window& window, const int (&rows)[kGroup], u32 taken) {
  const int lane = threadIdx.x % 32, first = sum_before(__popc(taken)), number = sum_of_warp(__popc(taken));
  const i64 top = i64(blockIdx.x) * kRows, left = i64(blockIdx.y) * kColumns;
  int found = 0;
  if (lane == 0) {
    int lowest = rows[0];
#pragma unroll
    for (int r = 1; r < kGroup; ++r) lowest = min(lowest, rows[r]);
    found = atomicAdd(&window.tiles, 1);
    atomicAdd(&window.lowest[lowest], 1);
    window.row_of[found] = u8(lowest);
  }
  const i64 place = first_record(problem, window) + __shfl_sync(0xffffffffu, found, 0);
  if (place < problem.capacity) {
    int* record = problem.tiles + place * kRecord;
#pragma unroll
    for (int r = 0; r < kGroup; ++r)
      if (lane == r) record[r] = top + rows[r] < problem.rows ? int(top + rows[r]) : -1;
    int* columns = record + kGroup;
    int* blocks = columns + kWide;
    int n = first;
    for (u32 rest = taken; rest; rest &= rest - 1, ++n) {
      const int column = lane * 32 + __ffs(rest) - 1;
      columns[n] = int(left + column);
#pragma unroll
      for (int r = 0; r < kGroup; ++r) {
        const bool has = window.left[rows[r]][lane] >> (column % 32) & 1;
        blocks[r * kWide + n] = has ? window.blocks[rows[r]][column] : -1;
      }
    }
    for (n = number + lane; n < kWide; n += 32) {
      columns[n] = -1;
#pragma unroll
      for (int r = 0; r < kGroup; ++r) blocks[r * kWide + n] = -1;
    }
  }
  if (lane < kWords) {
#pragma unroll
    for (int r = 0; r < kGroup; ++r) window.left[rows[r]][lane] &= ~taken;
  }
  __syncwarp();
}

// Reads the stored blocks of the window. Those outside the matrix are left out.
__device__ __forceinline__ void read(const SampledTiles& problem, Window& window) {
  const i64 top = i64(blockIdx.x) * kRows, left = i64(blockIdx.y) * kColumns;
  for (int i = threadIdx.x; i < kRows * kWords; i += kThreads) window.left[i / kWords][i % kWords] = 0;
  for (int i = threadIdx.x; i < kRows; i += kThreads) window.lowest[i] = 0;
  if (threadIdx.x == 0) window.best = window.before = window.tiles = 0;
  __syncthreads();
  int before = 0;
  for (int row = threadIdx.x / 32; row < kRows && top + row < problem.rows; row += kGroups) {
    const i64 end = first_block(problem, top + row + 1);
    for (i64 p = first_block(problem, top + row) + threadIdx.x % 32; p < end; p += 32) {
      const Index column = problem.indices[p];
      if (!in_range(column, problem.columns)) continue;
      if (i64(column) < left) ++before;
      if (i64(column) / kColumns != blockIdx.y) continue;
      const int x = int(i64(column) - left);
      window.blocks[row][x] = int(p);
      atomicOr(&window.left[row][x / 32], 1u << (x % 32));
    }
  }
  before = sum_of_warp(before);
  if (threadIdx.x % 32 == 0) atomicAdd(&window.before, before);
  __syncthreads();
}

// Takes all blocks of the window into tiles.
__device__ __forceinline__ void fill(const SampledTiles& problem, Window& window) {
  int rows[kGroup];

  for (int least = kFull;;) {
    // In the end everything is taken. Until then a tile has kWide blocks or more, so that the number of tiles is bounded.
    const bool is_last = least < kWide;
    int best = 0;
#pragma unroll 1
    for (int way = 0; way < (is_last ? 1 : kWays); ++way) {
      rows_of(way, threadIdx.x / 32, rows);
#pragma unroll 1
      while (true) {
        const Columns columns(window, rows);
        const int blocks = columns.blocks();
        if (blocks < (is_last ? 1 : least)) {
          best = max(best, blocks);
          break;
        }
        write(problem, window, rows, columns.taken());
      }
      __syncthreads();
    }
    if (is_last) return;
    if (threadIdx.x % 32 == 0) atomicMax(&window.best, best);
    __syncthreads();
    best = window.best;
    __syncthreads();
    if (threadIdx.x == 0) window.best = 0;
    if (best == 0) return;
    least = min(least - max(1, (kFull - kWide) / kLevels), best);
  }
}

// Writes the numbers of the window's tiles by their lowest row, and how many there are.
__device__ __forceinline__ void sort(const SampledTiles& problem, Window& window) {
  const i64 first = first_record(problem, window), number = i64(blockIdx.x) * gridDim.y + blockIdx.y;
  if (threadIdx.x == 0) {
    atomicAdd(problem.counts, window.tiles);
    problem.counts[1 + 2 * number] = window.tiles;
    problem.counts[2 + 2 * number] = int(first);
    for (int row = 0, sum = 0; row < kRows; ++row) {
      const int count = window.lowest[row];
      window.lowest[row] = sum;
      sum += count;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < window.tiles; i += kThreads) {
    const i64 place = first + atomicAdd(&window.lowest[window.row_of[i]], 1);
    if (place < problem.capacity) problem.order[place] = int(first + i);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sampled_tiles(const __grid_constant__ SampledTiles problem) {
  extern __shared__ __align__(16) u8 memory[];
  Window& window = *reinterpret_cast<Window*>(memory);
  read(problem, window);
  fill(problem, window);
  __syncthreads();
  sort(problem, window);
}
