// pairs of block row i: (p, q), p in row i of A, q in row col[p] of B;   its blocks: the columns of all q, sorted
// The pattern of C[i, j] = sum_k A[i, k] @ B[k, j], and for each of its blocks the pairs whose products are summed, in
// the order in which A and B store them. A warp has a block row: it counts the pairs of each column in a table in
// shared memory and writes the pairs. Each lane has a block of A, and lanes find the owner of their pair by shuffles,
// so that short rows of B leave no lane without work.
// `list_at_once`, for few columns and pairs, has a table of all columns and finds the places of a row by a decoupled
// look-back. The others have hash tables and sort the columns, which are stored at the index of the row's first pair
// until the number of columns of all rows is known: `count_pairs`, `list_pairs`, `pack_columns`. At least a fifth of
// the slots stays free. Who gets which slot depends on who comes first, the lists do not.
// Where the product is a dense one, nobody needs the pairs: `set_bits` sets a bit for each block of B, and `join_rows`
// joins rows of bits, 1024 columns for each read of 128 bytes.
#include "common/bsr.cuh"

using Index = INDEX;

constexpr int kThreads = 128;
constexpr u32 kNone = 0xffffffffu;  // no column: a free slot, or after the last one

struct BlockPattern {
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (rows + 1,)
  i64 rows, blocks;
};
#ifdef BLOCK_PATTERN_BYTES
CHECK_LAYOUT(BlockPattern, BLOCK_PATTERN, (indices)(indptr)(rows)(blocks))
#endif

// The argument of the kernels: the patterns, sizes and outputs.
struct SpgemmPattern {
  BlockPattern a, b;
  i64 columns;       // block columns of B
  i64* before;       // (rows + 1,): pairs before each row; until they are summed, pairs of row i at i + 1
  i64* most;         // largest number of pairs of a row; set_bits: whether B has a block twice, zero before
  int *left, *right; // pair -> block of A, of B
  int *column, *start;  // column, and first pair, of each column of a row, from before[row] on
  Index* count;      // (rows + 1,): columns of row i at i + 1; then columns before each row
  Index* indices;    // (columns of all rows,)
  int* starts;       // first pair of each of these columns
  int* counters;     // {rows claimed, CTAs that are done}, zero before and after
  u64* sums;         // a `Sum` of each row, zero before and after
  i64* totals;       // list_at_once: {pairs, columns of all rows}; join_rows: {whether B has a block twice, columns}
  i64 most_pairs, most_columns;  // what the lists have memory for
  u32* bits;         // (rows of B, slots): a bit for each block column of B, zero before
  int* places;       // join_rows: block row * columns + block column of each block of the result
  int slots;         // slots of a table, a power of two and more than a row has columns; words of bits of a row
  int listed;        // most columns that are sorted, a power of two
};
#ifdef SPGEMM_PATTERN_BYTES
CHECK_LAYOUT(SpgemmPattern, SPGEMM_PATTERN, (a)(b)(columns)(before)(most)(left)(right)(column)(start)(count)(indices)
             (starts)(counters)(sums)(totals)(most_pairs)(most_columns)(bits)(places)(slots)(listed))
#endif


__device__ __forceinline__ int scanned(int x) {  // inclusive prefix sum over the lanes
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, step);
    if (lane_id() >= step) x += other;
  }
  return x;
}

// The blocks of B in the block row that is the block column of block p of A.
__device__ __forceinline__ Range met(const SpgemmPattern& m, i64 p) {
  const Index row = m.a.indices[p];
  return in_range(row, m.b.rows) ? blocks_of_row(m.b.indptr, i64(row), m.b.blocks) : Range{0, 0};
}

extern "C" __global__ void __launch_bounds__(kThreads)
count_pairs(const __grid_constant__ SpgemmPattern m) {
  const i64 step = i64(gridDim.x) * (kThreads / 32);
  for (i64 i = blockIdx.x * i64(kThreads / 32) + threadIdx.x / 32; i < m.a.rows; i += step) {
    const Range row = blocks_of_row(m.a.indptr, i, m.a.blocks);
    i64 pairs = 0;
    for (i64 p = row.first + lane_id(); p < row.last; p += 32) {
      const Range other = met(m, p);
      if (other.last > other.first) pairs += other.last - other.first;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) pairs += __shfl_xor_sync(0xffffffffu, pairs, lanes);
    if (lane_id() == 0) {
      m.before[i + 1] = pairs;
      if (u64(pairs) > *reinterpret_cast<volatile u64*>(m.most))
        atomicMax(reinterpret_cast<unsigned long long*>(m.most), u64(pairs));
    }
  }
}

// A hash table from the columns of a row to numbers.
struct Table {
  u32* keys;
  int* values;
  u32 mask;
  __device__ __forceinline__ u32 first(u32 key) const { return (key * 2654435761u >> 7) & mask; }
  __device__ __forceinline__ void clear() const {
    for (u32 s = lane_id(); s <= mask; s += 32) keys[s] = kNone, values[s] = 0;
  }
  // The slot of a column, which is inserted if it is not there yet.
  __device__ __forceinline__ u32 claim(u32 key) const {
    u32 slot = first(key);
    for (u32 tries = 0; tries <= mask; ++tries, slot = (slot + 1) & mask) {
      const u32 held = atomicCAS(keys + slot, kNone, key);
      if (held == kNone || held == key) break;
    }
    return slot;
  }
  __device__ __forceinline__ u32 find(u32 key) const {
    u32 slot = first(key);
    for (u32 tries = 0; tries < mask && keys[slot] != key; ++tries) slot = (slot + 1) & mask;
    return slot;
  }
};

// visit(p, q, column) for the pairs of a row in order, 32 at a time, by all lanes; lanes without a pair have column
// kNone.
template <class Visit> __device__ __forceinline__ void for_pairs(const SpgemmPattern& m, const Range& row, Visit visit) {
  for (i64 p0 = row.first; p0 < row.last; p0 += 32) {
    const Range other = p0 + lane_id() < row.last ? met(m, p0 + lane_id()) : Range{0, 0};
    const int length = other.last > other.first ? int(other.last - other.first) : 0;
    const int end = scanned(length);
    const int shift = int(other.first) - (end - length);  // from the number of a pair to its block of B
    const int all = __shfl_sync(0xffffffffu, end, 31);
    for (int e0 = 0; e0 < all; e0 += 32) {
      const int e = e0 + lane_id();
      int owner = 0;  // number of blocks of A whose pairs end at or before e
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(0xffffffffu, end, owner + step - 1) <= e) owner += step;
      const int q = e + __shfl_sync(0xffffffffu, shift, owner % 32);
      u32 column = kNone;
      if (e < all) {
        const Index found = m.b.indices[q];
        if (in_range(found, m.columns)) column = u32(found);
      }
      visit(int(p0) + owner, q, column);
    }
  }
}

// Sorts a list of columns whose length is a power of two (bitonic).
__device__ __forceinline__ void sort(u32* list, int size) {
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      for (int k = lane_id(); k < size / 2; k += 32) {
        const int i = 2 * k - k % step, j = i + step;
        const u32 a = list[i], b = list[j];
        if ((a > b) == ((i & run) == 0)) list[i] = b, list[j] = a;
      }
      __syncwarp();
    }
}

// 64 registers: by default ptxas takes 40 on sm_120 and spills.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
list_pairs(const __grid_constant__ SpgemmPattern m) {
  extern __shared__ __align__(1024) u8 memory[];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  u32* base = reinterpret_cast<u32*>(memory) + warp * (2 * m.slots + m.listed);
  const Table table{base, reinterpret_cast<int*>(base) + m.slots, u32(m.slots) - 1};
  u32* list = base + 2 * m.slots;
  for (i64 i = blockIdx.x * i64(warps) + warp; i < m.a.rows; i += i64(gridDim.x) * warps) {
    const Range row = blocks_of_row(m.a.indptr, i, m.a.blocks);
    const i64 first = m.before[i], row_end = m.before[i + 1];
    table.clear();
    __syncwarp();
    for_pairs(m, row, [&](int, int, u32 column) {
      if (column != kNone) atomicAdd(table.values + table.claim(column), 1);
    });
    __syncwarp();
    int columns = 0;
    for (int s = lane_id(); s < m.slots; s += 32) {
      const u32 key = table.keys[s];
      const u32 there = __ballot_sync(0xffffffffu, key != kNone);
      const int place = columns + __popc(there & ((1u << lane_id()) - 1));
      if (key != kNone && place < m.listed) list[place] = key;
      columns += __popc(there);
    }
    columns = min(columns, m.listed);
    int size = 1;
    while (size < columns) size *= 2;
    for (int k = columns + lane_id(); k < size; k += 32) list[k] = kNone;
    __syncwarp();
    sort(list, size);
    int pairs = 0;  // pairs of the columns before
    for (int k0 = 0; k0 < columns; k0 += 32) {
      const int k = k0 + lane_id();
      const u32 slot = k < columns ? table.find(list[k]) : 0;
      const int own = k < columns ? table.values[slot] : 0;
      const int end = pairs + scanned(own);
      if (k < columns && first + k < row_end) {
        table.values[slot] = end - own;
        m.column[first + k] = int(list[k]);
        m.start[first + k] = int(first) + end - own;
      }
      pairs = __shfl_sync(0xffffffffu, end, 31);
    }
    if (lane_id() == 0) m.count[i + 1] = Index(columns);
    __syncwarp();
    for_pairs(m, row, [&](int p, int q, u32 column) {
      const u32 slot = column == kNone ? kNone : table.find(column);
      const u32 same = __match_any_sync(0xffffffffu, slot);
      const u32 earlier = same & ((1u << lane_id()) - 1);
      const int next = slot == kNone ? 0 : table.values[slot];
      __syncwarp();
      if (slot != kNone && earlier == 0) table.values[slot] = next + __popc(same);
      __syncwarp();
      const i64 place = first + next + __popc(earlier);
      if (slot != kNone && place < row_end) m.left[place] = p, m.right[place] = q;
    });
    for (i64 k = first + pairs + lane_id(); k < row_end; k += 32) m.left[k] = m.right[k] = -1;  // columns out of range
    __syncwarp();
  }
}

// Writes the columns of all rows one after the other.
extern "C" __global__ void __launch_bounds__(kThreads)
pack_columns(const __grid_constant__ SpgemmPattern m) {
  const i64 step = i64(gridDim.x) * (kThreads / 32);
  for (i64 i = blockIdx.x * i64(kThreads / 32) + threadIdx.x / 32; i < m.a.rows; i += step) {
    const i64 from = m.before[i], to = m.count[i];
    const int columns = int(m.count[i + 1] - m.count[i]);
    for (int k = lane_id(); k < columns; k += 32) {
      m.indices[to + k] = Index(m.column[from + k]);
      m.starts[to + k] = m.start[from + k];
    }
  }
}

// What a row, or all rows up to it, have: pairs and columns, which stay at 2^31 - 1 if there are more, and whether they
// are there already. One word holds all, so that who sees one of them sees the others.
struct Sum {
  static constexpr u64 kOfRow = u64(1) << 62, kOfAll = u64(1) << 63, kMost = 0x7fffffff;
  u64 word;
  __device__ __forceinline__ static Sum of(u64 state, u64 pairs, u64 columns) {
    return {state | (pairs < kMost ? pairs : kMost) << 31 | (columns < kMost ? columns : kMost)};
  }
  __device__ __forceinline__ u64 pairs() const { return word >> 31 & kMost; }
  __device__ __forceinline__ u64 columns() const { return word & kMost; }
  __device__ __forceinline__ Sum with(u64 state, Sum other) const {
    return of(state, pairs() + other.pairs(), columns() + other.columns());
  }
};

// Publishes the sum of row i and returns that of all rows before it. A warp looks at 32 rows at a time, back to the
// nearest one that knows all before. Rows are claimed in order, so that whoever is waited for is running.
__device__ __forceinline__ Sum sum_before(u64* sums, i64 i, Sum own) {
  const auto publish = [&](u64 state, Sum x) {
    if (lane_id() == 0) *const_cast<volatile u64*>(sums + i) = Sum::of(state, x.pairs(), x.columns()).word;
  };
  if (i > 0) publish(Sum::kOfRow, own);
  Sum before{0};
  for (i64 end = i; end > 0;) {
    const i64 row = end - 1 - lane_id();
    const Sum found{row < 0 ? Sum::kOfAll : *const_cast<volatile u64*>(sums + row)};
    const u32 all = __ballot_sync(0xffffffffu, found.word >= Sum::kOfAll);
    const int last = all ? __ffs(all) - 1 : 31;  // lanes from the last row back to the one that knows all
    if (__any_sync(0xffffffffu, lane_id() <= last && found.word == 0)) {
      __nanosleep(20);
      continue;
    }
    u64 pairs = lane_id() <= last ? found.pairs() : 0, columns = lane_id() <= last ? found.columns() : 0;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      pairs += __shfl_xor_sync(0xffffffffu, pairs, lanes);
      columns += __shfl_xor_sync(0xffffffffu, columns, lanes);
    }
    before = before.with(0, Sum::of(0, pairs, columns));
    if (all) break;
    end -= 32;
  }
  publish(Sum::kOfAll, before.with(0, own));
  return before;
}

// The pairs of a row and its columns, at their places in the lists; `values` has a number for each column.
__device__ __forceinline__ void list_row(const SpgemmPattern& m, i64 i, int* values) {
  const Range row = blocks_of_row(m.a.indptr, i, m.a.blocks);
  for (int c = lane_id(); c < m.slots; c += 32) values[c] = 0;
  __syncwarp();
  for_pairs(m, row, [&](int, int, u32 column) {
    if (column != kNone) atomicAdd(values + column, 1);
  });
  __syncwarp();
  u64 pairs = 0;
  int columns = 0;
  for (int c = lane_id(); c < m.slots; c += 32) {
    pairs += u32(values[c]);
    columns += values[c] > 0;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    pairs += __shfl_xor_sync(0xffffffffu, pairs, lanes);
    columns += __shfl_xor_sync(0xffffffffu, columns, lanes);
  }
  const Sum own = Sum::of(0, pairs, u64(columns)), before = sum_before(m.sums, i, own), all = before.with(0, own);
  if (lane_id() == 0) {
    if (i == 0) m.count[0] = 0;
    m.count[i + 1] = Index(all.columns());
    if (i == m.a.rows - 1) m.totals[0] = i64(all.pairs()), m.totals[1] = i64(all.columns());
  }
  if (i64(all.pairs()) > m.most_pairs || i64(all.columns()) > m.most_columns) return;  // the host will see it
  int next_pair = int(before.pairs()), next_column = int(before.columns());
  for (int c0 = 0; c0 < m.slots; c0 += 32) {
    const int own_pairs = values[c0 + lane_id()], end = next_pair + scanned(own_pairs);
    const u32 there = __ballot_sync(0xffffffffu, own_pairs > 0);
    const int place = next_column + __popc(there & ((1u << lane_id()) - 1));
    if (own_pairs > 0) {
      m.indices[place] = Index(c0 + lane_id());
      m.starts[place] = values[c0 + lane_id()] = end - own_pairs;
    }
    next_pair = __shfl_sync(0xffffffffu, end, 31);
    next_column += __popc(there);
  }
  __syncwarp();
  for_pairs(m, row, [&](int p, int q, u32 column) {
    const u32 same = __match_any_sync(0xffffffffu, column), earlier = same & ((1u << lane_id()) - 1);
    const int next = column == kNone ? 0 : values[column];
    __syncwarp();
    if (column != kNone && earlier == 0) values[column] = next + __popc(same);
    __syncwarp();
    const int place = next + __popc(earlier);
    if (column != kNone && in_range(place, m.most_pairs)) m.left[place] = p, m.right[place] = q;
  });
  __syncwarp();
}

// Called by a warp of each CTA at its end; the last one makes zeros again.
__device__ __forceinline__ void leave(const SpgemmPattern& m) {
  int done = 0;
  __syncwarp();
  if (lane_id() == 0) {
    __threadfence();
    done = atomicAdd(m.counters + 1, 1);
  }
  if (__shfl_sync(0xffffffffu, done, 0) != int(gridDim.x) - 1) return;
  __syncwarp();
  for (i64 i = lane_id(); i < m.a.rows; i += 32) m.sums[i] = 0;
  if (lane_id() == 0) m.counters[0] = m.counters[1] = 0;
}

// The whole pattern in one launch, if a table can have a number for each column. A CTA is one warp.
extern "C" __global__ void __launch_bounds__(32, 16)
list_at_once(const __grid_constant__ SpgemmPattern m) {
  extern __shared__ __align__(1024) u8 memory[];
  int* values = reinterpret_cast<int*>(memory);
  for (;;) {
    int claimed = 0;
    if (lane_id() == 0) claimed = atomicAdd(m.counters, 1);
    const i64 i = __shfl_sync(0xffffffffu, claimed, 0);
    if (i >= m.a.rows) break;
    list_row(m, i, values);
  }
  leave(m);
}

// Sets a bit for each block of B, a row of B to a warp.
extern "C" __global__ void __launch_bounds__(kThreads)
set_bits(const __grid_constant__ SpgemmPattern m) {
  const i64 step = i64(gridDim.x) * (kThreads / 32);
  for (i64 i = blockIdx.x * i64(kThreads / 32) + threadIdx.x / 32; i < m.b.rows; i += step) {
    const Range row = blocks_of_row(m.b.indptr, i, m.b.blocks);
    for (i64 p = row.first + lane_id(); p < row.last; p += 32) {
      const Index column = m.b.indices[p];
      if (!in_range(column, m.columns)) continue;
      const u32 bit = 1u << (column % 32);
      if (atomicOr(m.bits + i * m.slots + column / 32, bit) & bit) *m.most = 1;
    }
  }
}

// The columns of the rows of the result, whose rows of bits are those of B joined. A CTA has a row at a time.
extern "C" __global__ void __launch_bounds__(kThreads, 8)
join_rows(const __grid_constant__ SpgemmPattern m) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ i64 own_row, first_column;
  u32* joined = reinterpret_cast<u32*>(memory);
  int* before = reinterpret_cast<int*>(joined + m.slots);  // columns of the row in the words before
  int span = 1;  // threads with neighbouring words of a row of B
  while (span < m.slots && span < 32) span *= 2;
  for (;;) {
    if (threadIdx.x == 0) own_row = atomicAdd(m.counters, 1);
    for (int w = threadIdx.x; w < m.slots; w += kThreads) joined[w] = 0;
    __syncthreads();
    const i64 i = own_row;
    if (i >= m.a.rows) break;
    const Range row = blocks_of_row(m.a.indptr, i, m.a.blocks);
    for (int w = threadIdx.x % span; w < m.slots; w += span) {
      u32 found = 0;
#pragma unroll 4
      for (i64 p = row.first + threadIdx.x / span; p < row.last; p += kThreads / span) {
        const Index other = m.a.indices[p];
        if (in_range(other, m.b.rows)) found |= m.bits[i64(other) * m.slots + w];
      }
      if (found != 0) atomicOr(joined + w, found);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int columns = 0;
      for (int w0 = 0; w0 < m.slots; w0 += 32) {
        const int w = w0 + lane_id(), own = w < m.slots ? __popc(joined[w]) : 0, end = columns + scanned(own);
        if (w < m.slots) before[w] = end - own;
        columns = __shfl_sync(0xffffffffu, end, 31);
      }
      const Sum own = Sum::of(0, 0, u64(columns)), earlier = sum_before(m.sums, i, own), all = earlier.with(0, own);
      if (lane_id() == 0) {
        if (i == 0) m.count[0] = 0;
        m.count[i + 1] = Index(all.columns());
        if (i == m.a.rows - 1) m.totals[0] = *m.most, m.totals[1] = i64(all.columns());
        first_column = i64(all.columns()) > m.most_columns ? -1 : i64(earlier.columns());
      }
    }
    __syncthreads();
    for (int w = threadIdx.x / 32; w < m.slots && first_column >= 0; w += kThreads / 32) {
      const u32 word = joined[w];
      if (!(word >> lane_id() & 1)) continue;
      const i64 place = first_column + before[w] + __popc(word & ((1u << lane_id()) - 1));
      m.indices[place] = Index(w * 32 + lane_id());
      m.places[place] = int(i * m.columns + w * 32 + lane_id());
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) leave(m);
}
