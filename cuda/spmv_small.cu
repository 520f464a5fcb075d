// y[i*R + r] = alpha * sum_p sum_k A[p, r, k] * x[col[p]*K + k] + beta * y[i*R + r],  p in block row i
// Blocks of up to 16 x 16, at the speed of memory. kLanes lanes share a block row. Of these kRowLanes * kColumnLanes share
// a block, and as many blocks as there is room for lie side by side; a lane has kR / kRowLanes rows and kK / kColumnLanes
// neighbouring columns. Rows of more than kLong blocks are left to further CTAs, which take them piece by piece; who comes
// last adds the pieces of a row in their order.
#include "bsr.cuh"
#include "stream.cuh"

using A = ELEMENT_A;
using B = ELEMENT_B;
using C = ELEMENT_C;
using Acc = ACCUMULATOR;
using Index = INDEX;

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kLanes = LANES, kRowLanes = ROW_LANES, kColumnLanes = COLUMN_LANES;
constexpr int kTogether = TOGETHER;         // blocks of a lane asked for before the first is used
constexpr bool kInChunks = IN_CHUNKS;       // a CTA has neighbouring block rows, so that x stays in its L1
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr int kLong = 1024;                 // blocks of a row, or of a piece of a longer one
constexpr int kThreads = THREADS, kGroups = kThreads / kLanes;
constexpr int kRows = kR / kRowLanes, kColumns = kK / kColumnLanes;  // of a lane
constexpr int kBlockLanes = kRowLanes * kColumnLanes, kBlocks = kLanes / kBlockLanes;
// What a lane has of a row of a block lies together, except where stored blocks are transposed.
constexpr int kRowAlign = alignment_of(kK * sizeof(A)), kPartAlign = alignment_of(kColumns * sizeof(A));
constexpr int kAlign = kTransposed || kColumns == 1 ? 1 : kRowAlign < kPartAlign ? kRowAlign : kPartAlign;
constexpr int kCtas = CTAS;                 // that share a multiprocessor; fewer leave a thread more registers
static_assert(32 % kLanes == 0 && kR % kRowLanes == 0 && kK % kColumnLanes == 0 && kBlocks >= 1, "lanes of a block");

// Rows of more than kLong blocks, and the shares of CTAs, made by schedule.py and launch.py.
struct LongRows {
  const int4* pieces;   // {block row, first block, behind the last one, number within the row}
  const int2* parents;  // piece -> {first piece of its row, pieces of it}
  const int* count;     // pieces
  const i64* bounds;    // of the shares of CTAs that have neighbouring rows
  Acc* partial;         // (pieces, R)
  int* arrived;         // by the first piece of a row, zero before and after
  int ctas;             // those before have the other rows
};

struct Lane {
  int block, row, column;  // which of the blocks side by side; first row, in steps of kRowLanes; first column
  bool works;
  __device__ __forceinline__ explicit Lane(int lane)
      : block(lane / kBlockLanes), row(lane % kBlockLanes / kColumnLanes),
        column(lane % kColumnLanes * kColumns), works(block < kBlocks) {}
};

// The sums of this lane over every kBlocks-th of the blocks from `first` to `last` - 1. Values are asked for before it is
// known which columns they meet: both take as long.
template <class Problem>
__device__ __forceinline__ void sum_blocks(const Problem& problem, const Lane& lane, i64 first, i64 last, Acc (&acc)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r] = zero<Acc>();
  if (!lane.works) return;
  for (i64 p0 = first + lane.block; p0 < last; p0 += kBlocks * kTogether) {
    A values[kTogether][kRows][kColumns];
    B x[kTogether][kColumns];
    Index column[kTogether];
    const auto place = [&](int u) {  // behind the last block: the last one, for nothing
      const i64 p = p0 + u * kBlocks;
      return u == 0 || p < last ? p : last - 1;
    };
#pragma unroll
    for (int u = 0; u < kTogether; ++u) column[u] = streamed(problem.indices + place(u));
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const A* block = problem.data + (kTransposed ? i64(problem.places[place(u)]) : place(u)) * (kR * kK);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = lane.row + r * kRowLanes;
        if constexpr (kTransposed) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) values[u][r][k] = streamed(block + (lane.column + k) * kR + row);
        } else {
          stream<kAlign>(values[u][r], block + row * kK + lane.column);
        }
      }
    }
    bool there[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      there[u] = in_range(column[u], problem.block_cols);
      const B* from = problem.b + (i64(there[u] ? column[u] : Index(0)) * kK + lane.column) * problem.b_row;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) x[u][k] = from[k * problem.b_row];
      there[u] = there[u] && p0 + u * kBlocks < last;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (!there[u]) continue;
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          acc[r] = multiply_add(load<Acc>(values[u][r][k]), load<Acc>(x[u][k]), acc[r]);
    }
  }
}
// Sums over the lanes that share rows; those of block 0 and column 0 have them then.
__device__ __forceinline__ void gather(const Lane& lane, Acc (&acc)[kRows]) {
  sum_over_places<kBlocks, kBlockLanes>(acc, lane.block);
  sum_over_places<kColumnLanes, 1>(acc, lane.column / kColumns);
}
template <class Problem>
__device__ __forceinline__ void store(const Problem& problem, const Lane& lane, i64 block_row, const Acc (&acc)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    C* target = problem.c + (block_row * kR + lane.row + r * kRowLanes) * problem.c_row;
    const Acc old = problem.read_c ? multiply_add(problem.beta, load<Acc>(*target), zero<Acc>()) : zero<Acc>();
    *target = Store<C>::from(multiply_add(problem.alpha, acc[r], old));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmv_small(const __grid_constant__ Product<A, B, C, Acc, Index> problem, const __grid_constant__ LongRows rows) {
  const Lane lane(threadIdx.x % kLanes);
  const int group = threadIdx.x / kLanes;
  const bool leads = lane.works && lane.block == 0 && lane.column == 0;
  Acc acc[kRows];
  if (int(blockIdx.x) < rows.ctas) {
    const i64 from = kInChunks ? rows.bounds[blockIdx.x] : blockIdx.x * i64(kGroups);
    const i64 step = kInChunks ? kGroups : i64(rows.ctas) * kGroups;
    const i64 behind = kInChunks ? rows.bounds[blockIdx.x + 1] : problem.block_rows;
    for (i64 i0 = from; i0 < behind; i0 += step) {  // all groups together, since they share shuffles
      const i64 i = i0 + group;
      Range row = {0, 0};
      if (i < behind) row = blocks_of_row(problem.indptr, i, problem.blocks);
      const bool is_long = row.last - row.first > kLong;
      sum_blocks(problem, lane, row.first, is_long ? row.first : row.last, acc);
      gather(lane, acc);
      if (leads && i < behind && !is_long) store(problem, lane, i, acc);
    }
    return;
  }
  const int count = *rows.count;
  for (int piece0 = (blockIdx.x - rows.ctas) * kGroups; piece0 < count; piece0 += (gridDim.x - rows.ctas) * kGroups) {
    const int piece = piece0 + group;
    int4 x = {0, 0, 0, 0};
    if (piece < count) x = rows.pieces[piece];
    const i64 first = x.y < 0 ? 0 : x.y, last = x.z > problem.blocks ? problem.blocks : x.z;
    sum_blocks(problem, lane, first, last, acc);
    gather(lane, acc);
    if (!leads || piece >= count || u64(i64(x.x)) >= u64(problem.block_rows)) continue;
    // Each leading lane has rows of its own, and a counter of its own for them.
    const int2 parent = rows.parents[piece];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows.partial[i64(piece) * kR + lane.row + r * kRowLanes] = acc[r];
    __threadfence();
    int* arrived = rows.arrived + i64(parent.x) * kRowLanes + lane.row;
    if (atomicAdd(arrived, 1) != parent.y - 1) continue;
    *arrived = 0;
    __threadfence();
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[r] = zero<Acc>();
#pragma unroll 4
    for (int k = 0; k < parent.y; ++k)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        acc[r] = add(acc[r], rows.partial[i64(parent.x + k) * kR + lane.row + r * kRowLanes]);
    store(problem, lane, x.x, acc);
  }
}
