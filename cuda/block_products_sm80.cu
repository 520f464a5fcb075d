// Blocks of a product on the tensor cores of Ampere and newer. Rows of A and lines of B are multiples of 16 bytes.
//   BSR @ BSR: out[s] = sum over pairs p of result block s, in order, of a[left[p]] @ b[right[p]]
//   sampled:   out[p] = X[block row of p] @ Y[:, block column of p]
// A CTA has one tile and ends with it: in BSR @ BSR one block or a piece of a large one; sampled, up to eight
// neighbours of 128 columns in all in a block row, which share what is read of X. Its warps copy, multiply and store as
// those of gemm_sm80 (mma_tiles.cuh). A stage has 128 bytes of k of A and B and never crosses from a pair to the next;
// one barrier a stage. The numbers of the next pair are read while this one is copied. A number of a block outside
// makes both operands of the pair zeros. A tile of 128 x 128 does 64 flops for each byte from the L2 in 16-bit floats,
// 32 in float32, 16 in float64.
#include "common/block_products.cuh"
#include "common/bsr.cuh"
#include "common/mma_tiles.cuh"

using Index = INDEX;

// A CTA has a tile of kTileM rows by kParts parts of kPartN columns. In BSR @ BSR a tile is one block or a part of it.
// In a sampled product its parts are neighbours in one block row, which share their rows of X: there is a CTA for each
// part, and CTAs whose part is not the first of a tile return at once.

constexpr bool kSampled = SAMPLED;
constexpr int kPartN = PART_N, kParts = kTileN / kPartN;
static_assert(kRowTiles == 1 && (kSampled || (!kATransposed && kParts == 1)), "tiles of blocks");

struct BlockProductsSm80 {
  const A* a;
  const A* b;
  C* out;               // (blocks, R, N)
  const Index* left;    // BSR @ BSR: pair -> block of a
  const Index* right;   // pair -> block of b; sampled: block -> block column
  const Index* starts;  // block of the result -> its first pair; sampled: block row -> its first block
  i64 blocks, pairs;
  i64 a_blocks, b_blocks;  // numbers of blocks; sampled: of block rows and block columns
  i64 a_line, b_line;      // elements from a line of A to the next, and from a line of B to the next
  i64 a_block, b_block;    // elements from a block to the next
  int R, N, K;
};
#ifdef BLOCK_PRODUCTS_SM80_BYTES
CHECK_LAYOUT(BlockProductsSm80, BLOCK_PRODUCTS_SM80, (a)(b)(out)(left)(right)(starts)(blocks)(pairs)(a_blocks)(b_blocks)
             (a_line)(b_line)(a_block)(b_block)(R)(N)(K))
#endif

struct alignas(1024) Shared {
  u8 a[kStages][kTileM * kStageBytes];
  u8 b[kStages][kTileN * kStageBytes];
  i64 parts[kParts];  // sampled: where the parts of the tile begin in B, or -1
};

struct Tile {
  i64 first, last;    // BSR @ BSR: the pairs; sampled: {block row, block row + 1}; no tile: first > last
  i64 part, end;  // first part and end of the parts; a part is numbered block * parts of a block + index in the block
  int row;            // the first row within a block
};

__device__ __forceinline__ i64 parts_of(const BlockProductsSm80& problem) { return (problem.N + kPartN - 1) / kPartN; }

// The tile of this CTA; every warp computes it.
__device__ __forceinline__ Tile own_tile(const BlockProductsSm80& problem) {
  const i64 heights = problem.R / kTileM, parts = parts_of(problem);
  const i64 part = blockIdx.x / heights, block = part / parts;
  const int row = int(blockIdx.x % heights) * kTileM;
  if constexpr (kSampled) {
    const i64 block_row = block_row_of(problem.starts, problem.a_blocks, block, 0);
    const i64 begin = i64(problem.starts[block_row]) * parts, row_end = i64(problem.starts[block_row + 1]) * parts;
    if ((part - begin) % kParts != 0) return {1, 0};
    const i64 last = min(min(row_end, problem.blocks * parts), part + kParts);
    return {block_row, block_row + 1, part, max(part + 1, last), row};
  } else {
    const auto start = [&](i64 s) {
      return s < problem.blocks ? min(max(i64(problem.starts[s]), i64(0)), problem.pairs) : problem.pairs;
    };
    const i64 first = start(block);
    return {first, max(first, start(block + 1)), part, part + 1, row};
  }
}

// ---------------------------------------------------------------------------------- the copies
// Copies the stages of a tile to shared memory, one after the other.
struct Copier {
  const BlockProductsSm80& problem;
  Shared& shared;
  const Tile& tile;
  i64 pair;
  int k, first_column;
  i64 a, b;                    // where the blocks of this pair begin, or -1
  Index next_left, next_right;  // the next pair, loaded early

  __device__ __forceinline__ Copier(const BlockProductsSm80& problem, Shared& shared, const Tile& tile)
      : problem(problem), shared(shared), tile(tile), pair(tile.first), k(0),
        first_column(int(tile.part % parts_of(problem)) * kPartN) {
    if constexpr (kSampled) {
      a = tile.first * problem.a_block, b = 0;
    } else {
      ask(pair);
      turn_to_next();
    }
  }

  __device__ __forceinline__ void ask(i64 p) {
    next_left = next_right = Index(-1);
    if (p < tile.last) next_left = problem.left[p], next_right = problem.right[p];
  }
  __device__ __forceinline__ void turn_to_next() {
    const bool there = in_range(next_left, problem.a_blocks) && in_range(next_right, problem.b_blocks);
    a = there ? i64(next_left) * problem.a_block : -1;
    b = there ? i64(next_right) * problem.b_block + first_column * (kBTransposed ? problem.b_line : 1) : -1;
    ask(pair + 1);
  }

  __device__ __forceinline__ void copy_a(u32 thread, int stage, int left) const {
    const u32 to = shared_address(shared.a[stage]) + OperandA::copy_place(thread);
    const int at = OperandA::copy_k(thread, 0), row = tile.row + OperandA::copy_mn(thread, 0);
    const i64 line = kATransposed ? k + at : row, inside = kATransposed ? row : k + at;
    const A* from = problem.a + (a < 0 ? 0 : a) + line * problem.a_line + inside;
#pragma unroll
    for (int i = 0; i < OperandA::kCopies; ++i)
      copy_16(true, OperandA::copy_place(to, i), from + i * OperandA::kLineStep * problem.a_line,
              a < 0 || OperandA::copy_k(thread, i) >= left);
  }

  __device__ __forceinline__ void copy_b(u32 thread, int stage, int left) const {
    const u32 to = shared_address(shared.b[stage]) + OperandB::copy_place(thread);
#pragma unroll
    for (int i = 0; i < OperandB::kCopies; ++i) {
      const int at = OperandB::copy_k(thread, i), n = OperandB::copy_mn(thread, i);
      i64 begin = b;
      if constexpr (kSampled) begin = shared.parts[n / kPartN];
      else if (first_column + n >= problem.N) begin = -1;
      const i64 line = kBTransposed ? n % kPartN : k + at, inside = kBTransposed ? k + at : n % kPartN;
      copy_16(true, OperandB::copy_place(to, i), problem.b + (begin < 0 ? 0 : begin + line * problem.b_line + inside),
              begin < 0 || at >= left);
    }
  }

  // Starts all copies of the next stage; it commits a group even if nothing is left to copy.
  __device__ __forceinline__ void copy(int stage) {
    if (kSampled ? k < problem.K : pair < tile.last) {
      const u32 thread = opaque(threadIdx.x);
      const int left = min(problem.K - k, kStageK);
      copy_a(thread, stage, left);
      copy_b(thread, stage, left);
      k += kStageK;
      if constexpr (!kSampled) {
        if (k >= problem.K) {
          k = 0, ++pair;
          turn_to_next();
        }
      }
    }
    copy_commit();
  }
};

// ---------------------------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) block_products_sm80(const __grid_constant__ BlockProductsSm80 problem) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Tile tile = own_tile(problem);
  if (tile.first > tile.last) return;
  const u32 warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const u32 warp_m = warp / kWarpsN * kWarpM, warp_n = warp % kWarpsN * kWarpN;
  const i64 parts = parts_of(problem);
  if constexpr (kSampled) {
    for (u32 i = threadIdx.x; i < kParts; i += kThreads) {
      const i64 part = tile.part + i;
      const Index column = part < tile.end ? problem.right[part / parts] : Index(-1);
      shared.parts[i] = in_range(column, problem.b_blocks)
          ? i64(column) * problem.b_block + part % parts * kPartN * (kBTransposed ? problem.b_line : 1) : -1;
    }
    __syncthreads();
  }

  Copier copier(problem, shared, tile);
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) copier.copy(i);
  Fragments fragments{shared_address(shared.a) + OperandA::lane_place(warp_m),
                      shared_address(shared.b) + OperandB::lane_place(warp_n)};
  Accum accum = {};
  int stage = 0, k = 0;
  for (i64 left = (tile.last - tile.first) * ((problem.K + kStageK - 1) / kStageK); left > 0; --left) {
    const int steps = min((problem.K - k + kStepK - 1) / kStepK, kSteps);
    k = k + kStageK < problem.K ? k + kStageK : 0;
    copy_wait<kAhead - 1>();
    __syncthreads();
    copier.copy(stage == 0 ? kStages - 1 : stage - 1);
    multiply_stage(accum, fragments, 1, steps);
    const int forward = stage + 1 == kStages ? 1 - kStages : 1;
    fragments.a += forward * (kTileM * kStageBytes);
    fragments.b += forward * (kTileN * kStageBytes);
    stage += forward;
  }

#pragma unroll
  for (int slice = 0; slice < 2 * kMmasM; ++slice) {
    const int row = tile.row + warp_m + OperandA::spread(slice, lane / 4);
#pragma unroll
    for (int s = 0; s < kSlicesN; s += OperandB::kInterleave) {
      const int n = warp_n + OperandB::spread(s, lane % 4 * 2);
      const i64 part = tile.part + n / kPartN, column = part % parts * kPartN + n % kPartN;
      if (part >= tile.end || column >= problem.N) continue;
      Vector* to = reinterpret_cast<Vector*>(problem.out + (part / parts * problem.R + row) * problem.N + column);
#pragma unroll
      for (int v = 0; v < kRun / kVector; ++v) {
        Vector x;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const int at = v * kVector + i;
          x.x[i] = Store<C>::from(
              Acc(accum[slice / 2][s + at % OperandB::kInterleave][slice % 2 * 2 + at / OperandB::kInterleave]));
        }
        to[v] = x;
      }
    }
  }
}
