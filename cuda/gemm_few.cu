// C[m, n] = alpha * sum_p sum_k A[p, m % R, k] * B[col[p]*K + k, n] + beta * C[m, n],  p in the block row of m
// Skinny products: up to 8 columns of 16-bit floats by mma.sync, where reading A takes all the time. K is a multiple of
// 32, R of 16, A is aligned to 16 bytes; B and C have any strides.
// A CTA has 16 rows of a block row; its 4 or 8 warps share the columns of the row's blocks in chunks of 32. A product
// may take k in any order that A and B share: it is chosen so that a lane loads 16 neighbouring bytes of A. A row-major
// B goes through a panel of the warp in shared memory. A lane asks for A and B one turn ahead of their products and for
// block columns two ahead; if the number of blocks is a multiple of that of block rows, the first loads guess equal
// rows and do not wait for indptr. 16 warps have up to 64 KB of A under way on a multiprocessor. The accumulators of
// the warps are added in one fixed tree. A launch that overlaps with the kernels in front reads nothing but the matrix
// before they have ended. More columns are faster on gemm_sm90.
#include "common/elements.cuh"
#include "ptx/dependents.cuh"
#include "ptx/mma.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kRows = 16, kChunk = 32;
constexpr int kWarps = WARPS, kThreads = 32 * kWarps;
constexpr int kCtas = 16 / kWarps;         // on a multiprocessor
constexpr int kTogether = 2;               // neighbouring chunks that a warp has at a turn
constexpr bool kByColumns = B_BY_COLUMNS;  // columns of B lie side by side, aligned to 16 bytes
constexpr bool kReadAhead = READ_AHEAD;    // A is read before the kernels in front on the stream have ended
static_assert(Same<A, B>::value && sizeof(A) == 2 && Same<Acc, f32>::value, "16-bit floats");

struct Shared {
  uint4 panels[kByColumns ? 1 : kWarps][kTogether][32];  // B on its way from rows to columns
  f32 accum[kWarps / 2][4][32];
};

// A product takes the columns of A, and the rows of B, in any order, as long as it is the same one. Of a chunk, lane l
// has the columns 8 (l % 4) to 8 (l % 4) + 7 of A, which lie side by side, as four pairs; and of B the same rows of
// column l / 4.
//
// Where columns of B do not lie side by side, lane k reads row k of the chunk, and ldmatrix transposes. Its matrix t has
// the rows 8 q + 2 t and 8 q + 2 t + 1 for q = 0 to 3: they are stored side by side, in this order.
__device__ __forceinline__ int place_of_row(int k) { return k % 8 / 2 * 8 + k / 8 * 2 + k % 2; }

// A chunk of the walk over a block row: the number of its block in the row, and its first column there.
struct Place { int block, k; };

// What a lane has of the chunks of a turn. `there` has a bit for each chunk whose block column lies inside B.
struct Turn {
  uint4 upper[kTogether], lower[kTogether];  // rows 0 to 7 and 8 to 15 of A
  uint4 right[kTogether];                    // of B: eight rows of a column, or a row
  u32 there;
};

// A row of B; elements beyond the last column are zeros. A load takes `width` elements. Loads of B are plain ones: those
// by __ldg need not see what kernels wrote that this one has waited for.
__device__ __forceinline__ uint4 read_row(const Problem& problem, const B* row, int width) {
  union { uint4 all; u64 twos[2]; u32 ones[4]; u16 halves[8]; } box = {};
  const int count = int(problem.N);
  if (width == 8) {
    box.all = *reinterpret_cast<const uint4*>(row);
  } else if (width == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (4 * i < count) box.twos[i] = reinterpret_cast<const u64*>(row)[i];
  } else if (width == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * i < count) box.ones[i] = reinterpret_cast<const u32*>(row)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) box.halves[i] = *reinterpret_cast<const u16*>(row + i * problem.b_col);
  }
  return box.all;
}
// The most elements that one load can take from every row of B.
__device__ __forceinline__ int width_of(const Problem& problem) {
  if (problem.b_col != 1) return 1;
  const u64 steps = reinterpret_cast<u64>(problem.b) / 2 | u64(problem.b_row) | u64(problem.b_batch) | u64(problem.N);
  return steps % 2 ? 1 : steps % 4 ? 2 : steps % 8 ? 4 : 8;
}

// The walk of a warp over the chunks of 16 rows of a block row.
struct Walk {
  const Problem& problem;
  int K, width;
  u32 block_bytes;
  int step_blocks, step_k;  // from a turn to the next one of this warp
  const B* b;               // of the batch
  const u8* a;              // this lane's part of the row's first chunk
  const Index* indices;     // of the row
  int blocks;               // of the row

  __device__ __forceinline__ explicit Walk(const Problem& problem)
      : problem(problem), K(problem.K), width(kByColumns ? 0 : width_of(problem)),
        block_bytes(u32(problem.R) * u32(problem.K) * 2), step_blocks(kWarps * kTogether * kChunk / problem.K),
        step_k(kWarps * kTogether * kChunk % problem.K) {}

  __device__ __forceinline__ void begin(const Range& row, int first_row) {
    const int lane = threadIdx.x % 32;
    blocks = int(row.last > row.first ? row.last - row.first : 0);
    a = reinterpret_cast<const u8*>(problem.data + (row.first * problem.R + first_row + lane / 4) * K + lane % 4 * 8);
    indices = problem.indices + row.first;
  }
  __device__ __forceinline__ Place next(Place at) const {
    at.k += kChunk;
    if (at.k == K) at.k = 0, ++at.block;
    return at;
  }
  __device__ __forceinline__ Place next_turn(Place at) const {
    at.k += step_k, at.block += step_blocks;
    if (at.k >= K) at.k -= K, ++at.block;
    return at;
  }
  __device__ __forceinline__ void ask_a(Turn& turn, Place at) const {
#pragma unroll
    for (int u = 0; u < kTogether; ++u, at = next(at)) {
      if (at.block >= blocks) continue;
      const u8* from = a + u64(u32(at.block)) * block_bytes + at.k * 2;
      turn.upper[u] = __ldcs(reinterpret_cast<const uint4*>(from));
      turn.lower[u] = __ldcs(reinterpret_cast<const uint4*>(from + 16 * K));
    }
  }
  // The block columns of a turn; -1 where there is no chunk.
  __device__ __forceinline__ void ask_columns(Index (&columns)[kTogether], Place at) const {
#pragma unroll
    for (int u = 0; u < kTogether; ++u, at = next(at)) columns[u] = at.block < blocks ? indices[at.block] : Index(-1);
  }
  __device__ __forceinline__ void ask_b(Turn& turn, const Index (&columns)[kTogether], Place at) const {
    const int lane = threadIdx.x % 32;
    turn.there = 0;
#pragma unroll
    for (int u = 0; u < kTogether; ++u, at = next(at)) {
      const bool inside = in_range(columns[u], problem.block_cols);
      turn.there |= u32(inside) << u;
      turn.right[u] = make_uint4(0, 0, 0, 0);
      if (!inside) continue;
      const i64 first = i64(columns[u]) * K + at.k;
      if constexpr (kByColumns) {
        const B* from = b + lane / 4 * problem.b_col + first + lane % 4 * 8;
        if (lane / 4 < problem.N) turn.right[u] = *reinterpret_cast<const uint4*>(from);
      } else {
        turn.right[u] = read_row(problem, b + (first + lane) * problem.b_row, width);
      }
    }
  }
};

__device__ __forceinline__ void multiply(f32 (&accum)[4], Shared& shared, const Turn& turn) {
  const int lane = threadIdx.x % 32;
  uint4 (&panel)[kTogether][32] = shared.panels[kByColumns ? 0 : threadIdx.x / 32];
  if constexpr (!kByColumns) {
    __syncwarp();  // the turn before has been read
#pragma unroll
    for (int u = 0; u < kTogether; ++u) panel[u][place_of_row(lane)] = turn.right[u];
    __syncwarp();
  }
#pragma unroll
  for (int u = 0; u < kTogether; ++u) {
    if (!(turn.there >> u & 1)) continue;  // NaN times 0 would count
    const u32 upper[2][2] = {{turn.upper[u].x, turn.upper[u].y}, {turn.upper[u].z, turn.upper[u].w}};
    const u32 lower[2][2] = {{turn.lower[u].x, turn.lower[u].y}, {turn.lower[u].z, turn.lower[u].w}};
    const uint4 all = turn.right[u];
    u32 right[4] = {all.x, all.y, all.z, all.w};
    if constexpr (!kByColumns) load_matrices<true>(right, shared_address(&panel[u][lane]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 pairs[2] = {right[2 * half], right[2 * half + 1]};
      if constexpr (Same<A, f16>::value) mma_f16(accum, upper[half], lower[half], pairs);
      else mma_bf16(accum, upper[half], lower[half], pairs);
    }
  }
}

// Adds up this warp's chunks of 16 rows, from `first` on, of block row i.
__device__ __forceinline__ void add_chunks(f32 (&accum)[4], Shared& shared, Walk& walk, i64 i, int first) {
  const Problem& problem = walk.problem;
  const int chunk = int(threadIdx.x) / 32 * kTogether * kChunk;
  const Place start = {chunk / walk.K, chunk % walk.K};
  Turn even, odd;
  Index columns[kTogether];
  const auto begin = [&](const Range& row) {
    walk.begin(row, first);
    walk.ask_a(even, start);
    walk.ask_columns(columns, start);
  };
  // If all block rows can have the same number of blocks, it is guessed that they have, and the first blocks are read
  // while the bounds of the row are.
  const Index from = problem.indptr[i], to = problem.indptr[i + 1];
  const i64 mean = problem.blocks < 1ll << 31 ? u32(problem.blocks) / u32(problem.block_rows) : 0;
  const bool guess = mean * problem.block_rows == problem.blocks;
  if (guess) begin({i * mean, (i + 1) * mean});
  const Range row = inside(from, to, problem.blocks);
  if (!guess || row.first != i * mean || row.last != (i + 1) * mean) begin(row);
  if constexpr (kReadAhead) wait_for_prerequisites();
  walk.ask_b(even, columns, start);
  Place at = start, following = walk.next_turn(at);
  walk.ask_columns(columns, following);
  const auto turn = [&](const Turn& now, Turn& next) {
    at = following;
    walk.ask_a(next, at);
    walk.ask_b(next, columns, at);
    following = walk.next_turn(at);
    walk.ask_columns(columns, following);
    multiply(accum, shared, now);
  };
#pragma unroll 1
  while (true) {
    turn(even, odd);
    if (at.block >= walk.blocks) break;
    turn(odd, even);
    if (at.block >= walk.blocks) break;
  }
}

// Grid: 16 rows each along x, batches along y. The kernel loops over what exceeds the largest grid.
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) gemm_few(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = problem.R / kRows;
  launch_dependents();
  if constexpr (!kReadAhead) wait_for_prerequisites();
  Walk walk(problem);
  for (i64 batch = blockIdx.y; batch < problem.batches; batch += gridDim.y)
    for (i64 unit = blockIdx.x; unit < problem.block_rows * parts; unit += gridDim.x) {
      const i64 i = unit / parts;
      f32 accum[4] = {};
      walk.b = problem.b + batch * problem.b_batch;
      add_chunks(accum, shared, walk, i, int(unit - i * parts) * kRows);
#pragma unroll
      for (int half = kWarps / 2; half > 0; half /= 2) {
        if (warp >= half && warp < 2 * half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) shared.accum[warp - half][e][lane] = accum[e];
        }
        __syncthreads();
        if (warp < half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) accum[e] += shared.accum[warp][e][lane];
        }
        __syncthreads();
      }
      if (warp > 0) continue;
      C* line = problem.c + batch * problem.c_batch + (unit * kRows + lane / 4) * problem.c_row;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = lane % 4 * 2 + e % 2;
        if (n < problem.N) store_sum(problem, line + e / 2 * 8 * problem.c_row + n * problem.c_col, accum[e]);
      }
    }
}
