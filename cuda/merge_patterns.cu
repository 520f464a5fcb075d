// The union of two patterns in canonical format: for each block of it the block of either matrix, or -1, and its column
// Position d of the merge path of all rows: row r begins at a_ptr[r] + b_ptr[r]. A CTA takes kTile positions, and finds
// its own by one search for the row and one inside it: the same work for every CTA, however long the rows are. It has two
// passes: COUNT leaves the number of blocks of each tile, and the CTA that ends last adds them up; FILL writes the blocks
// to their places. Rows are clamped to the arrays, so that both passes agree whatever the index arrays say.
#include "common/arrivals.cuh"

using Index = INDEX;

constexpr bool kFill = FILL;
constexpr int kThreads = 128, kItems = 8, kTile = kThreads * kItems;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread

struct MergePatterns {
  const Index *a, *a_ptr;  // (a_blocks,) and (rows + 1,)
  const Index *b, *b_ptr;
  Index *left, *right;     // FILL: for each block of the result that of either matrix, or -1
  Index* indices;          // FILL: its block column
  i64* counts;             // (tiles,), blocks of each tile; after COUNT, of all tiles before it
  i64* total;              // a single number
  int* arrived;            // CTAs that have arrived; zero before and after
  i64 rows, a_blocks, b_blocks;
};
#ifdef MERGE_PATTERNS_BYTES
CHECK_LAYOUT(MergePatterns, MERGE_PATTERNS, (a)(a_ptr)(b)(b_ptr)(left)(right)(indices)(counts)(total)(arrived)(rows)
             (a_blocks)(b_blocks))
#endif

__device__ __forceinline__ i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }
__device__ __forceinline__ i64 a_first(const MergePatterns& m, i64 row) { return clamp(m.a_ptr[row], 0, m.a_blocks); }
__device__ __forceinline__ i64 b_first(const MergePatterns& m, i64 row) { return clamp(m.b_ptr[row], 0, m.b_blocks); }
__device__ __forceinline__ i64 start(const MergePatterns& m, i64 row) { return a_first(m, row) + b_first(m, row); }

// Where a thread is on the path: its row, and the next block of either matrix with the end of that row.
struct Cursor { i64 row, i, j, a_end, b_end; };

__device__ __forceinline__ Cursor at_row(const MergePatterns& m, i64 row) {
  const i64 i = a_first(m, row), j = b_first(m, row);
  return {row, i, j, max(i, a_first(m, row + 1)), max(j, b_first(m, row + 1))};
}

// The last row from `low` on that begins at or before a position.
__device__ __forceinline__ i64 row_at(const MergePatterns& m, i64 position, i64 low) {
  i64 high = m.rows;
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (start(m, middle) <= position) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ Cursor at_position(const MergePatterns& m, i64 position) {
  Cursor c = at_row(m, row_at(m, position, 0));
  const i64 a_count = c.a_end - c.i, b_count = c.b_end - c.j, k = clamp(position - c.i - c.j, 0, a_count + b_count);
  i64 low = k > b_count ? k - b_count : 0, high = k < a_count ? k : a_count;
  while (low < high) {  // how many of the first k positions of the row are blocks of a, which come first in a column
    const i64 middle = (low + high) / 2;
    if (m.a[c.i + middle] <= m.b[c.j + k - 1 - middle]) low = middle + 1;
    else high = middle;
  }
  c.i += low, c.j += k - low;
  return c;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
merge_patterns(const __grid_constant__ MergePatterns m) {
  const i64 total = m.a_blocks + m.b_blocks, tiles = (total + kTile - 1) / kTile;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const i64 first = tile * kTile + threadIdx.x * kItems;
    Index left[kItems], right[kItems], columns[kItems];
    u32 kept = 0;
    if (first < total) {
      Cursor c = at_position(m, first);
#pragma unroll
      for (int s = 0; s < kItems; ++s) {
        if (first + s < total && c.i >= c.a_end && c.j >= c.b_end && c.row + 1 < m.rows)
          c = at_row(m, row_at(m, first + s, c.row + 1));
        const bool in_a = c.i < c.a_end, in_b = c.j < c.b_end;
        if (first + s >= total || (!in_a && !in_b)) continue;
        if (in_a && (!in_b || m.a[c.i] <= m.b[c.j])) {
          columns[s] = m.a[c.i], left[s] = Index(c.i), right[s] = in_b && m.b[c.j] == columns[s] ? Index(c.j) : Index(-1);
          kept |= 1u << s, ++c.i;
        } else {
          columns[s] = m.b[c.j], left[s] = Index(-1), right[s] = Index(c.j);
          // A block of a in this column came just before.
          if (c.i == a_first(m, c.row) || m.a[c.i - 1] != columns[s]) kept |= 1u << s;
          ++c.j;
        }
      }
    }
    i64 own = 0, of_tile;
#pragma unroll
    for (int s = 0; s < kItems; ++s) own += kept >> s & 1;
    i64 place = sum_before<kThreads>(own, of_tile);
    if constexpr (kFill) {
      place += m.counts[tile];
#pragma unroll
      for (int s = 0; s < kItems; ++s)
        if (kept >> s & 1) m.left[place] = left[s], m.right[place] = right[s], m.indices[place] = columns[s], ++place;
    } else if (threadIdx.x == 0) {
      m.counts[tile] = of_tile;
    }
  }
  if constexpr (!kFill) {
    if (!arrives_last(m.arrived)) return;
    const i64 sum = add_up<kThreads>(m.counts, tiles);
    if (threadIdx.x == 0) *m.total = sum;
  }
}
