// pieces = the blocks of each long row, cut up;   bounds = ranges of neighbouring rows with about the same work
// What spmv_small has to know of the rows of a matrix. A row of more than `longest` blocks is cut into pieces of at
// most `piece` blocks. The work of a row is kRowCost and its number of blocks, of which those of long rows do not
// count; range j begins in the row that reaches j equal shares of all work.
// Up to 1024 CTAs have a tile of rows each: they count pieces and work, then number them from the counts before their
// own. Two launches, where array operations took 30. Blocks outside the matrix are in no piece, and bounds are in
// order, whatever indptr holds. See docs/kernels/work-list.md.
#include "common/bsr.cuh"
#include "common/sums.cuh"

using Index = INDEX;

constexpr int kThreads = 256;
constexpr int kRowCost = 16;  // lanes wait even for a short row

struct RowShares {
  const Index* indptr;   // (rows + 1,)
  i64 *counted, *worked; // pieces and work of each tile
  int4* pieces;          // (most_pieces,): {row, first block, end, number within the row}
  int2* parents;         // (most_pieces,): {first piece of the row, number of pieces of the row}
  int* count;            // number of pieces
  i64* bounds;           // (shares + 1,)
  i64 rows, blocks, tile, longest, piece, most_pieces;
  i64 shares;            // 0 if nobody asks for bounds
  i64 lists;             // 0: count; 1: list what was counted
};
#ifdef ROW_SHARES_BYTES
CHECK_LAYOUT(RowShares, ROW_SHARES, (indptr)(counted)(worked)(pieces)(parents)(count)(bounds)(rows)(blocks)(tile)
             (longest)(piece)(most_pieces)(shares)(lists))
#endif

struct Row {
  Range blocks;
  u64 pieces, work;
};

__device__ __forceinline__ i64 clamped(i64 x, i64 most) { return x < 0 ? 0 : x < most ? x : most; }

__device__ __forceinline__ Row row_of(const RowShares& m, i64 i) {
  const i64 begin = m.indptr[i], end = m.indptr[i + 1];
  Row row{{clamped(begin, m.blocks), clamped(end, m.blocks)}, 0, kRowCost};
  const i64 length = row.blocks.last - row.blocks.first;
  if (length > m.longest) row.pieces = u64((length + m.piece - 1) / m.piece);
  if (end > begin && end - begin <= m.longest) row.work += u64(end - begin);
  return row;
}

__device__ __forceinline__ void count_pieces(const RowShares& m, const Range& tile) {
  u64 pieces = 0, work = 0;
#pragma unroll 1
  for (i64 i = tile.first + threadIdx.x; i < tile.last; i += kThreads) {
    const Row row = row_of(m, i);
    pieces += row.pieces;
    work += row.work;
  }
  pieces = sum_of_all(pieces);
  work = sum_of_all(work);
  if (threadIdx.x == 0) m.counted[blockIdx.x] = i64(pieces), m.worked[blockIdx.x] = i64(work);
}

__device__ __forceinline__ void list_pieces(const RowShares& m, const Range& tile) {
  const u64 most = u64(m.most_pieces), shares = u64(m.shares), all_work = sum_of<kThreads>(m.worked, gridDim.x);
  u64 pieces = sum_of<kThreads>(m.counted, blockIdx.x), work = sum_of<kThreads>(m.worked, blockIdx.x);
#pragma unroll 1
  for (i64 i0 = tile.first; i0 < tile.last; i0 += kThreads) {
    const i64 i = i0 + threadIdx.x;
    const Row row = i < tile.last ? row_of(m, i) : Row{{0, 0}, 0, 0};
    const u64 first = sum_in_front<kThreads>(row.pieces, pieces), before = sum_in_front<kThreads>(row.work, work);
    const u64 last = first + row.pieces < most ? first + row.pieces : most;  // invalid rows can overlap
#pragma unroll 1
    for (u64 n = first; n < last; ++n) {
      const i64 within = i64(n - first), begin = row.blocks.first + within * m.piece;
      const i64 end = begin + m.piece < row.blocks.last ? begin + m.piece : row.blocks.last;
      m.pieces[n] = int4{int(i), int(begin), int(end), int(within)};
      m.parents[n] = int2{int(first), int(last - first)};
    }
    if (!shares || i >= tile.last) continue;
    // The shares j with before < j * all_work / shares <= before + row.work, rounded down; row 0 also has those at 0.
    const u64 begin = i ? ((before + 1) * shares + all_work - 1) / all_work : 0;
    const u64 end = ((before + row.work + 1) * shares + all_work - 1) / all_work;
#pragma unroll 1
    for (u64 j = begin; j < end && j < shares; ++j) m.bounds[j] = i;
  }
  if (tile.last < m.rows || threadIdx.x != 0) return;
  *m.count = int(pieces < most ? pieces : most);
  if (shares) m.bounds[shares] = m.rows;
}

extern "C" __global__ void __launch_bounds__(kThreads)
row_shares(const __grid_constant__ RowShares m) {
  const Range tile = inside(blockIdx.x * m.tile, (blockIdx.x + 1) * m.tile, m.rows);
  if (m.lists) list_pieces(m, tile);
  else count_pieces(m, tile);
}
