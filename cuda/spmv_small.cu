// y[i*R + r] = alpha * sum_p sum_k A[p, r, k] * x[col[p]*K + k] + beta * y[i*R + r],  p in block row i
// Blocks of up to 16 x 16, at the speed of memory. kLanes lanes share a block row. Of these kRowLanes * kColumnLanes share
// a block, and as many blocks as there is room for lie side by side; a lane has kR / kRowLanes rows and kK / kColumnLanes
// neighbouring columns. Rows of more than kLong blocks come at the end, cut into pieces that are dealt to many warps; who
// comes last adds the pieces of a row.
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
constexpr bool kEager = EAGER;              // all loads of a lane at once; columns a row ahead, if a CTA has many
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr bool kAdjacent = X_ADJACENT;      // x lies together, at a multiple of 16 bytes
constexpr int kLong = 256;                  // blocks of a row, or of a piece of a longer one
constexpr u32 kPieceCtas = 1024;            // that have pieces; short-lived ones need not look for any
constexpr int kThreads = THREADS, kGroups = kThreads / kLanes, kWarps = kThreads / 32;
constexpr int kRows = kR / kRowLanes, kColumns = kK / kColumnLanes;  // of a lane
constexpr int kBlockLanes = kRowLanes * kColumnLanes, kBlocks = kLanes / kBlockLanes;
// What a lane has of a row of a block lies together, except where stored blocks are transposed.
constexpr int kRowAlign = alignment_of(kK * sizeof(A)), kPartAlign = alignment_of(kColumns * sizeof(A));
constexpr int kAlign = kTransposed || kColumns == 1 ? 1 : kRowAlign < kPartAlign ? kRowAlign : kPartAlign;
constexpr int kRowAlignX = alignment_of(kK * sizeof(B)), kPartAlignX = alignment_of(kColumns * sizeof(B));
constexpr int kAlignX = !kAdjacent ? 1 : kRowAlignX < kPartAlignX ? kRowAlignX : kPartAlignX;
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
};

struct Lane {
  int block, row, column;  // which of the blocks side by side; first row, in steps of kRowLanes; first column
  bool works;
  __device__ __forceinline__ explicit Lane(int lane)
      : block(lane / kBlockLanes), row(lane % kBlockLanes / kColumnLanes),
        column(lane % kColumnLanes * kColumns), works(block < kBlocks) {}
  __device__ __forceinline__ bool leads() const { return works && block == 0 && column == 0; }
};

// The same pointer, worked out here and not again in front of each load.
template <class T> __device__ __forceinline__ const T* settled(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

template <int kBytes> struct Unsigned { using Type = u32; };
template <> struct Unsigned<8> { using Type = u64; };
using Number = typename Unsigned<sizeof(Index)>::Type;

constexpr int kStep = kBlocks * kTogether;

// Blocks of which a lane has every kBlocks-th, and the columns of the first ones, asked for early: which values of x they
// meet is known only when these are there.
struct Blocks {
  Index first;  // of this lane
  int left;     // from there on, those of other lanes counted
  Index column[kTogether];

  // Those of a row, or of a part of one; of more than kLong there are none here.
  template <class Problem>
  __device__ __forceinline__ Blocks(const Problem& problem, const Lane& lane, const Range& row)
      : first(Index(row.first) + lane.block), left(0) {
    const i64 count = row.last - row.first;
    if (lane.works && count > 0 && count <= kLong) left = int(count) - lane.block;
    ask(problem);
  }
  template <class Problem> __device__ __forceinline__ void ask(const Problem& problem) {
    const Index* index = settled(problem.indices + first);
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (asked(u)) column[u] = streamed(index + place(u));
  }
  __device__ __forceinline__ bool has(int u) const { return u * kBlocks < left; }
  // What is not there is not asked for, by predicates and from fixed distances: for the smallest blocks the limit is how
  // many instructions there are. That takes registers for all loads at once; without them the first block is read again.
  __device__ __forceinline__ bool asked(int u) const { return kEager ? has(u) : left > 0; }
  __device__ __forceinline__ int place(int u) const { return kEager || has(u) ? u * kBlocks : 0; }
};

// The sums of this lane over its blocks.
template <class Problem>
__device__ __forceinline__ void sum_blocks(const Problem& problem, const Lane& lane, Blocks& blocks, Acc (&acc)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r] = zero<Acc>();
  const B* vector = settled(problem.b + (kAdjacent ? lane.column : lane.column * problem.b_row));
  const Number columns = Number(min(u64(problem.block_cols), u64(Number(-1) / 2 + 1)));
  while (blocks.left > 0) {
    A values[kTogether][kRows][kColumns];
    B x[kTogether][kColumns];
    bool there[kTogether];
    const int corner = kTransposed ? lane.column * kR + lane.row : lane.row * kK + lane.column;
    const A* data = settled(problem.data + (kTransposed ? 0 : i64(blocks.first) * (kR * kK)) + corner);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      there[u] = blocks.has(u);
      if (!blocks.asked(u)) continue;
      const int place = blocks.place(u);
      const A* block = data + (kTransposed ? i64(problem.places[blocks.first + place]) : place) * (kR * kK);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kTransposed) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) values[u][r][k] = streamed(block + k * kR + r * kRowLanes);
        } else {
          stream<kAlign>(values[u][r], block + r * kRowLanes * kK);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const bool inside = Number(blocks.column[u]) < columns;
      there[u] = there[u] && inside;
      if (kEager && !there[u]) continue;
      const Number column = kEager || inside ? Number(blocks.column[u]) : 0;
      if constexpr (kAdjacent) {
        const u8* from = reinterpret_cast<const u8*>(vector) + u64(column) * (kK * sizeof(B));
        read_together<kAlignX>(x[u], reinterpret_cast<const B*>(from));
      } else {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) x[u][k] = vector[(i64(column) * kK + k) * problem.b_row];
      }
    }
    blocks.first += kStep, blocks.left -= kStep;
    if (kEager && blocks.left > 0) blocks.ask(problem);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (!there[u]) continue;
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          acc[r] = multiply_add(load<Acc>(values[u][r][k]), load<Acc>(x[u][k]), acc[r]);
    }
    if (!kEager && blocks.left > 0) blocks.ask(problem);
  }
}
// Sums over the lanes that share rows; those of block 0 and column 0 have them then.
__device__ __forceinline__ void gather(const Lane& lane, Acc (&acc)[kRows]) {
  sum_over_places<kBlocks, kBlockLanes>(acc, lane.block);
  sum_over_places<kColumnLanes, 1>(acc, lane.column / kColumns);
}
template <class Problem> __device__ __forceinline__ void store(const Problem& problem, i64 row, Acc sum) {
  C* target = problem.c + row * problem.c_row;
  const Acc old = problem.read_c ? multiply_add(problem.beta, load<Acc>(*target), zero<Acc>()) : zero<Acc>();
  *target = Store<C>::from(multiply_add(problem.alpha, sum, old));
}

// A warp has a piece, each group of its lanes a part of that.
template <class Problem>
__device__ __forceinline__ void add_piece(const Problem& problem, const LongRows& rows, const Lane& lane, int piece) {
  const int4 x = rows.pieces[piece];
  const int2 parent = rows.parents[piece];
  if (!in_range(x.x, problem.block_rows)) return;
  const i64 first = x.y < 0 ? 0 : x.y, last = x.z > problem.blocks ? problem.blocks : x.z;
  const i64 each = (last - first + 32 / kLanes - 1) / (32 / kLanes), from = first + threadIdx.x % 32 / kLanes * each;
  Acc acc[kRows];
  Blocks blocks(problem, lane, Range{from, min(from + each, last)});
  sum_blocks(problem, lane, blocks, acc);
  gather(lane, acc);
#pragma unroll
  for (int step = 16; step >= kLanes; step /= 2)
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[r] = add(acc[r], shuffle_xor(acc[r], step));
  if (lane.leads() && threadIdx.x % 32 < kLanes)
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows.partial[i64(piece) * kR + lane.row + r * kRowLanes] = acc[r];
  __threadfence();
  __syncwarp();
  int before = 0;
  if (threadIdx.x % 32 == 0) before = atomicAdd(rows.arrived + parent.x, 1);
  if (__shfl_sync(0xffffffffu, before, 0) != parent.y - 1) return;
  if (threadIdx.x % 32 == 0) rows.arrived[parent.x] = 0;
  __threadfence();
  const Acc* partial = rows.partial + i64(parent.x) * kR;
#pragma unroll 1
  for (int r = 0; r < kR; ++r) {
    Acc sum = zero<Acc>();
#pragma unroll 4
    for (int k = threadIdx.x % 32; k < parent.y; k += 32) sum = add(sum, past_l1(partial + i64(k) * kR + r));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum = add(sum, shuffle_xor(sum, step));
    if (threadIdx.x % 32 == 0) store(problem, i64(x.x) * kR + r, sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmv_small(const __grid_constant__ Product<A, B, C, Acc, Index> problem, const __grid_constant__ LongRows rows) {
  const Lane lane(threadIdx.x % kLanes);
  const int group = threadIdx.x / kLanes;
  const i64 from = kInChunks ? rows.bounds[blockIdx.x] : blockIdx.x * i64(kGroups);
  const i64 step = kInChunks ? kGroups : i64(gridDim.x) * kGroups;
  const i64 behind = kInChunks ? rows.bounds[blockIdx.x + 1] : problem.block_rows;
  struct Bounds { Index first, last; };
  const auto bounds_of = [&](i64 i) {  // as they are stored: nothing waits for them here
    return i < behind ? Bounds{problem.indptr[i], problem.indptr[i + 1]} : Bounds{0, 0};
  };
  const auto row_of = [&](const Bounds& bounds) { return inside(bounds.first, bounds.last, problem.blocks); };
  const auto is_long = [](const Range& row) { return row.last - row.first > kLong; };
  const auto finish = [&](i64 i, bool later, Blocks& blocks) {
    Acc acc[kRows];
    sum_blocks(problem, lane, blocks, acc);
    gather(lane, acc);
    if (!lane.leads() || i >= behind || later) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) store(problem, i * kR + lane.row + r * kRowLanes, acc[r]);
  };
  // All groups together, since they share shuffles.
  if constexpr (kEager && kInChunks) {  // columns are asked for a row ahead of their values, bounds a row ahead of these
    const Range first = row_of(bounds_of(from + group));
    Bounds next = bounds_of(from + group + step);
    Blocks blocks(problem, lane, first);
    bool later = is_long(first);
    for (i64 i0 = from; i0 < behind; i0 += step) {
      const Range row = row_of(next);
      Blocks following(problem, lane, row);
      next = bounds_of(i0 + group + 2 * step);
      finish(i0 + group, later, blocks);
      blocks = following, later = is_long(row);
    }
  } else {
    for (i64 i0 = from; i0 < behind; i0 += step) {
      const Range row = row_of(bounds_of(i0 + group));
      Blocks blocks(problem, lane, row);
      finish(i0 + group, is_long(row), blocks);
    }
  }
  const int ctas = gridDim.x < kPieceCtas ? gridDim.x : kPieceCtas;
  if (int(blockIdx.x) >= ctas) return;
  const int pieces = *rows.count;
  for (int piece = blockIdx.x * kWarps + threadIdx.x / 32; piece < pieces; piece += ctas * kWarps) {
    __syncwarp();
    add_piece(problem, rows, lane, piece);
  }
}
