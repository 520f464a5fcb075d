// y[i*R + r] = alpha * sum_p sum_k A[p, r, k] * x[col[p]*K + k] + beta * y[i*R + r],  p in block row i
// Blocks of up to 16 x 16, limited by memory bandwidth. kLanes lanes share a block row; kRowLanes * kColumnLanes of
// them share a block, and the others have further blocks of the row. A lane has kR / kRowLanes rows and kK /
// kColumnLanes neighbouring columns of a block.
// Columns are asked for a turn ahead of the values of x that they lead to, bounds of rows a turn ahead of the columns.
// With kEager all loads of a lane go out at once, from fixed distances, and what is not there is left out by
// predicates: for the smallest blocks the number of instructions is the limit. Rows of more than 256 blocks are cut
// into pieces of 512, which warps take at the end; the warp that comes last adds them in one fixed tree. Products with
// the transpose read `places`, and CTAs take turns with neighbouring rows, so that the L2 has the lines of memory that
// their blocks share. See docs/kernels/small-blocks.md.
#include "common/elements.cuh"
#include "common/registers.cuh"
#include "common/stream.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

// Rows of more than kLong blocks come at the end. They are cut into pieces for many warps; the last warp to finish adds
// the pieces of a row.

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kLanes = LANES, kRowLanes = ROW_LANES, kColumnLanes = COLUMN_LANES;
constexpr int kTogether = TOGETHER;         // blocks of a lane, in each row, that are loaded before the first is used
constexpr int kAtOnce = ROWS_TOGETHER;      // block rows that the same lanes compute at the same time
constexpr bool kInChunks = IN_CHUNKS;       // a CTA has neighbouring block rows, so that x stays in its L1
constexpr bool kEager = EAGER;  // a lane issues all loads at once, and loads columns a turn ahead; CTAs have many rows
constexpr bool kTransposed = A_TRANSPOSED;  // stored blocks are K x R
constexpr bool kAdjacent = X_ADJACENT;      // x is contiguous and starts at a multiple of 16 bytes
// A lane knows the places of its blocks, in a product with the transpose, as early as their columns.
constexpr bool kPlacesAhead = kTransposed && kEager;
constexpr int kLong = 256;                  // most blocks of a row that is not cut into pieces
constexpr u32 kPieceCtas = 1024;            // CTAs that compute pieces; the others end without a search for any
constexpr int kThreads = THREADS, kGroups = kThreads / kLanes, kWarps = kThreads / 32;
constexpr int kRows = kR / kRowLanes, kColumns = kK / kColumnLanes;  // rows and columns of a lane
constexpr int kBlockLanes = kRowLanes * kColumnLanes, kBlocks = kLanes / kBlockLanes;
// The part of a row of a block that a lane has is contiguous, unless stored blocks are transposed.
constexpr int kRowAlign = alignment_of(kK * sizeof(A)), kPartAlign = alignment_of(kColumns * sizeof(A));
constexpr int kAlign = kTransposed || kColumns == 1 ? 1 : kRowAlign < kPartAlign ? kRowAlign : kPartAlign;
constexpr int kRowAlignX = alignment_of(kK * sizeof(B)), kPartAlignX = alignment_of(kColumns * sizeof(B));
constexpr int kAlignX = !kAdjacent ? 1 : kRowAlignX < kPartAlignX ? kRowAlignX : kPartAlignX;
constexpr int kCtas = CTAS;                 // CTAs that share a multiprocessor; fewer leave a thread more registers
static_assert(32 % kLanes == 0 && kR % kRowLanes == 0 && kK % kColumnLanes == 0 && kBlocks >= 1, "lanes of a block");

// Rows of more than kLong blocks, and the shares of CTAs, which Python computes.
struct LongRows {
  const int4* pieces;   // {block row, first block, end, number within the row}
  const int2* parents;  // piece -> {first piece of its row, number of pieces of the row}
  const int* count;     // number of pieces
  const i64* bounds;    // bounds of the shares of CTAs that have neighbouring rows
  Acc* partial;         // (pieces, R)
  int* arrived;         // indexed by the first piece of a row; zero before and after
};
#ifdef LONG_ROWS_BYTES
CHECK_LAYOUT(LongRows, LONG_ROWS, (pieces)(parents)(count)(bounds)(partial)(arrived))
#endif

struct Lane {
  int block, row, column;  // which of the blocks side by side; first row, in steps of kRowLanes; first column
  bool works;
  __device__ __forceinline__ explicit Lane(int lane)
      : block(lane / kBlockLanes), row(lane % kBlockLanes / kColumnLanes),
        column(lane % kColumnLanes * kColumns), works(block < kBlocks) {}
  __device__ __forceinline__ bool leads() const { return works && block == 0 && column == 0; }
};

template <int kBytes> struct Unsigned { using Type = u32; };
template <> struct Unsigned<8> { using Type = u64; };
using Number = typename Unsigned<sizeof(Index)>::Type;

// Stored blocks of a row, or of a part of one. There are fewer than 2^31 in all.
struct Row { Index first; int count; };

constexpr int kStep = kBlocks * kTogether;
// `left` of a row of more than kLong blocks, which is computed elsewhere, or a little less.
constexpr int kElsewhere = -(1 << 30);

// The blocks of a lane, every kBlocks-th, and the columns of the next ones. The columns are loaded early, because the
// address of x is known only once they have arrived.
struct Blocks {
  Index first;  // first block of this lane
  int left;     // blocks from there on, including those of other lanes
  Index column[kTogether];
  int stored[kPlacesAhead ? kTogether : 1];  // blocks of `data`

  // Begins with the blocks of a row; here there are none if the row has more than `most`.
  __device__ __forceinline__ void start(const Problem& problem, const Lane& lane, const Row& row, int most) {
    first = row.first + lane.block;
    left = row.count > most ? kElsewhere : lane.works ? row.count - lane.block : 0;
    ask(problem);
  }
  __device__ __forceinline__ void ask(const Problem& problem) {
    const Index* index = opaque(problem.indices + first);
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (asked(u)) column[u] = streamed(index + place(u));
    if constexpr (kPlacesAhead) {
      const int* places = opaque(problem.places + first);
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (asked(u)) stored[u] = streamed(places + place(u));
    }
  }
  __device__ __forceinline__ bool is_long() const { return left < kElsewhere / 2; }
  __device__ __forceinline__ bool has(int u) const { return u * kBlocks < left; }
  // Absent blocks are not loaded, by predicates and at fixed distances: for the smallest blocks the number of
  // instructions is the limit. This takes registers for all loads at once; without kEager the first block is loaded
  // again instead.
  __device__ __forceinline__ bool asked(int u) const { return kEager ? has(u) : left > 0; }
  __device__ __forceinline__ int place(int u) const { return kEager || has(u) ? u * kBlocks : 0; }
};

// The next blocks of a lane, and the values of x that they are multiplied with.
struct Parts {
  Elements<A, kColumns, kAlign> values[kTogether][kRows];
  Elements<B, kColumns, kAlignX> x[kTogether];
  bool there[kTogether];

  __device__ __forceinline__ void ask_values(const Problem& problem, const Lane& lane, const Blocks& blocks) {
    const int corner = kTransposed ? lane.column * kR + lane.row : lane.row * kK + lane.column;
    const A* data = opaque(problem.data + (kTransposed ? 0 : i64(blocks.first) * (kR * kK)) + corner);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      there[u] = blocks.has(u);
      if (!blocks.asked(u)) continue;
      i64 place = blocks.place(u);
      if constexpr (kPlacesAhead) place = blocks.stored[u];
      else if constexpr (kTransposed) place = problem.places[blocks.first + place];
      const A* block = data + place * (kR * kK);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kTransposed) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            const A* from = block + k * kR + r * kRowLanes;
            // The smallest blocks share lines with those of other rows, which come soon where CTAs take turns.
            values[u][r].put(k, kPlacesAhead ? *from : streamed(from));
          }
        } else {
          values[u][r].stream_from(block + r * kRowLanes * kK);
        }
      }
    }
  }
  __device__ __forceinline__ void ask_x(const Problem& problem, const B* vector, Number columns, const Blocks& blocks) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const bool inside = Number(blocks.column[u]) < columns;
      there[u] = there[u] && inside;
      if (kEager ? !there[u] : kAtOnce > 1 && !blocks.asked(u)) continue;
      const Number column = kEager || inside ? Number(blocks.column[u]) : 0;
      if constexpr (kAdjacent) {
        const u8* from = reinterpret_cast<const u8*>(vector) + u64(column) * (kK * sizeof(B));
        x[u].read_from(reinterpret_cast<const B*>(from));
      } else {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) x[u].put(k, vector[(i64(column) * kK + k) * problem.b_row]);
      }
    }
  }
  __device__ __forceinline__ void add_to(Acc (&acc)[kRows]) const {
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
};

// The sums of this lane over its blocks of some rows. The next blocks of all these rows are loaded before any is used.
template <int kCount>
__device__ __forceinline__ void sum_blocks(
    const Problem& problem, const Lane& lane, Blocks (&rows)[kCount], Acc (&acc)[kCount][kRows]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[n][r] = zero<Acc>();
  const B* vector = opaque(problem.b + (kAdjacent ? lane.column : lane.column * problem.b_row));
  const Number columns = Number(min(u64(problem.block_cols), u64(Number(-1) / 2 + 1)));
  const auto most_left = [&] {
    int most = rows[0].left;
#pragma unroll
    for (int n = 1; n < kCount; ++n) most = max(most, rows[n].left);
    return most;
  };
#pragma unroll 1
  while (most_left() > 0) {
    Parts parts[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) parts[n].ask_values(problem, lane, rows[n]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) parts[n].ask_x(problem, vector, columns, rows[n]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      rows[n].first += kStep;
      // Opaque, or the compiler counts turns ahead and unrolls them, which takes registers.
      rows[n].left = opaque(rows[n].left - kStep);
      if (kEager && rows[n].left > 0) rows[n].ask(problem);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) parts[n].add_to(acc[n]);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (!kEager && rows[n].left > 0) rows[n].ask(problem);
  }
}
// Adds the sums of the lanes that share rows; the lanes of block 0 and column 0 receive the totals.
__device__ __forceinline__ void gather(const Lane& lane, Acc (&acc)[kRows]) {
  sum_over_places<kBlocks, kBlockLanes>(acc, lane.block);
  sum_over_places<kColumnLanes, 1>(acc, lane.column / kColumns);
}
__device__ __forceinline__ void store(const Problem& problem, i64 row, Acc sum) {
  C* target = problem.c + row * problem.c_row;
  store_sum(problem, target, sum);
}

// A warp computes a piece; each group of its lanes takes a part of it.
__device__ __forceinline__ void add_piece(const Problem& problem, const LongRows& rows, int piece) {
  const Lane lane(opaque(threadIdx.x % kLanes));  // computed again, because keeping it takes registers
  const int4 x = rows.pieces[piece];
  if (!in_range(x.x, problem.block_rows)) return;
  const int first = max(x.y, 0), last = min(x.z, int(problem.blocks));
  const int each = (last - first + 32 / kLanes - 1) / (32 / kLanes), from = first + threadIdx.x % 32 / kLanes * each;
  Acc sums[1][kRows];
  Blocks blocks[1];
  blocks[0].start(problem, lane, Row{from, min(each, last - from)}, 1 << 30);
  sum_blocks(problem, lane, blocks, sums);
  Acc (&acc)[kRows] = sums[0];
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
  const int2 parent = rows.parents[piece];
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
    if (threadIdx.x % 32 == 0) store(problem, i64(rows.pieces[piece].x) * kR + r, sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmv_small(const __grid_constant__ Problem problem, const __grid_constant__ LongRows rows) {
  const Lane lane(threadIdx.x % kLanes);
  constexpr int kTurn = kGroups * kAtOnce;                   // block rows that a CTA computes at the same time
  using Count = typename Choose<kInChunks, int, i64>::Type;  // type of the number of block rows of a CTA
  const i64 from = kInChunks ? rows.bounds[blockIdx.x] : blockIdx.x * i64(kTurn);
  const Count step = kInChunks ? kTurn : Count(gridDim.x) * kTurn;
  // The first of kAtOnce rows, kGroups apart: the next lanes have the next row.
  i64 first = from + threadIdx.x / kLanes;
  Count left = Count((kInChunks ? rows.bounds[blockIdx.x + 1] : problem.block_rows) - first);
  const auto has = [&](Count ahead, int n) { return ahead + n * kGroups < left; };
  const auto go_on = [&] { return __any_sync(0xffffffffu, left > 0); };  // lanes of a warp share shuffles
  struct Bounds { Index first[kAtOnce], last[kAtOnce]; };
  const auto bounds_of = [&](Count ahead) {  // as they are stored, not clamped: nothing waits for the loads here
    Bounds bounds;
    const Index* indptr = problem.indptr + first + ahead;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      bounds.first[n] = has(ahead, n) ? indptr[n * kGroups] : 0;
      bounds.last[n] = has(ahead, n) ? indptr[n * kGroups + 1] : 0;
    }
    return bounds;
  };
  struct Turn { Blocks rows[kAtOnce]; };
  const auto start = [&](const Bounds& bounds) {
    Turn turn;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const Index end = max(min(bounds.last[n], Index(problem.blocks)), Index(0));
      const Index begin = min(max(bounds.first[n], Index(0)), end);
      turn.rows[n].start(problem, lane, Row{begin, int(end - begin)}, kLong);
    }
    return turn;
  };
  const auto finish = [&](Turn& turn) {
    Acc acc[kAtOnce][kRows];
    sum_blocks(problem, lane, turn.rows, acc);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      gather(lane, acc[n]);
      if (!lane.leads() || !has(0, n) || turn.rows[n].is_long()) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) store(problem, (first + n * kGroups) * kR + lane.row + r * kRowLanes, acc[n][r]);
    }
  };
  // Columns are loaded a turn ahead of their values, bounds a turn ahead of columns.
  if constexpr (kEager) {
    Turn turn = start(bounds_of(0));
    Bounds next = bounds_of(step);
    for (; go_on(); left -= step, first += step) {
      const Turn following = start(next);
      next = bounds_of(2 * step);
      finish(turn);
      turn = following;
    }
  } else {
    for (; go_on(); left -= step, first += step) {
      Turn turn = start(bounds_of(0));
      finish(turn);
    }
  }
  const int ctas = gridDim.x < kPieceCtas ? gridDim.x : kPieceCtas;
  if (int(blockIdx.x) >= ctas) return;
  for (int piece = blockIdx.x * kWarps + threadIdx.x / 32; piece < *rows.count; piece += ctas * kWarps) {
    __syncwarp();
    add_piece(problem, rows, piece);
  }
}
