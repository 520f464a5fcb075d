// C[i*R + r, n] = alpha * sum_p sum_k A[p, r, k] * B[col[p]*K + k, n] + beta * C[i*R + r, n],  p in block row i
// As spmm.cu: small blocks by few columns, on the plain cores, a warp to a block row. Blocks and their columns come through
// shared memory: read straight from memory, by one group of lanes after the other, they keep the L1 busier than B does.
// Warps of a CTA have neighbouring rows, which share some of B in the L1: the more warps, and the less shared memory, the more.
#include "common/chunks.cuh"
#include "common/elements.cuh"
#include "common/registers.cuh"
#include "common/stream.cuh"

using Problem = Product<A, B, C, Acc, Index>;
CHECK_PRODUCT(Problem)

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kLanes = LANES, kGroups = 32 / kLanes;  // lanes side by side; those above each other take blocks in turn
constexpr int kWidth = WIDTH;                         // columns of a lane, side by side in B and C, aligned
constexpr int kTogether = TOGETHER;                   // blocks of a lane under way
constexpr int kChunk = CHUNK, kStages = STAGES;
constexpr int kCtas = CTAS;                           // that share a multiprocessor
constexpr int kThreads = THREADS, kWarps = kThreads / 32;
// What is asked for of B before the first of it is used: so many columns of a block.
constexpr int kDeep = kK <= 4 ? kK : kK % 4 == 0 ? 4 : kK % 3 == 0 ? 3 : kK % 5 == 0 ? 5 : kK % 7 == 0 ? 7 : kK % 2 == 0 ? 2 : 1;
constexpr int kRowAlign = alignment_of(kK * sizeof(A)), kPartAlign = alignment_of(kDeep * sizeof(A));
constexpr int kAlign = kRowAlign < kPartAlign ? kRowAlign : kPartAlign;
static_assert(32 % kLanes == 0 && kK % kDeep == 0, "whole groups and steps");

using Stage = Chunk<Index, kR * kK * int(sizeof(A)), kChunk, kChunk>;
struct alignas(kWidth * sizeof(B)) Piece { B values[kWidth]; };
struct alignas(kWidth * sizeof(C)) Result { C values[kWidth]; };

__device__ __forceinline__ void store(const Problem& problem, C* corner, int group, const Acc (&acc)[kR][kWidth]) {
#pragma unroll
  for (int r0 = 0; r0 < kR; r0 += kGroups) {  // a group has one of so many rows
    Acc sums[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      sums[w] = acc[r0][w];
#pragma unroll
      for (int g = 1; g < kGroups; ++g)
        if (r0 + g < kR && group == g) sums[w] = acc[r0 + g][w];
    }
    if (r0 + group >= kR) continue;
    Result& target = *reinterpret_cast<Result*>(corner + (r0 + group) * problem.c_row);
    Result result;
    if (problem.read_c) result = target;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) result.values[w] = finish(problem, sums[w], result.values[w]);
    target = result;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmm_staged(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) u8 memory[];
  const auto stages = reinterpret_cast<Stage(*)[kStages]>(memory);  // of each warp
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes, warp = threadIdx.x / 32;
  const int rows = int(problem.block_rows), step = gridDim.x * kWarps;
  const i64 line = opaque(problem.b_row * i64(sizeof(B))), panel_bytes = opaque(line * kK);
  const Within<Index> columns(problem.block_cols);
  for (i64 batch = blockIdx.z; batch < problem.batches; batch += gridDim.z)
  for (int n0 = blockIdx.y * (kLanes * kWidth); n0 < problem.N; n0 += gridDim.y * (kLanes * kWidth)) {
    const int n = n0 + lane * kWidth;
    const bool mine = n < problem.N;  // all kWidth of them: they divide N
    const u8* b = opaque(reinterpret_cast<const u8*>(problem.b + batch * problem.b_batch + (mine ? n : 0)));
    C* c = opaque(problem.c + batch * problem.c_batch + n);
    Rest queue[kStages + 1];  // what is in the stages, and what comes then
    queue[0] = rest_of(problem, blockIdx.x * kWarps + warp);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      fetch(problem, stages[warp][s], queue[s]);
      queue[s + 1] = behind<kChunk>(problem, queue[s], step);
    }
    Acc acc[kR][kWidth];
    const auto clear = [&] {
#pragma unroll
      for (int r = 0; r < kR; ++r)
#pragma unroll
        for (int w = 0; w < kWidth; ++w) acc[r][w] = zero<Acc>();
    };
    clear();
    for (int at = 0; queue[0].row < rows; at = at + 1 == kStages ? 0 : at + 1) {
      const Rest here = queue[0];
      const int left = here.last - here.first, count = left < kChunk ? left : kChunk;
      Stage& stage = stages[warp][at];
      copy_wait<kStages - 1>();
      __syncwarp();
      const A* blocks = stage.template blocks<A>(here.first);
#pragma unroll 1
      for (int q0 = group; q0 < count; q0 += kGroups * kTogether) {
        bool there[kTogether];
        const u8* panel[kTogether];
        const A* block[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int q = u == 0 || q0 + u * kGroups < count ? q0 + u * kGroups : q0;
          const Index column = stage.columns[q];
          there[u] = columns.has(column);
          panel[u] = b + (there[u] ? column * panel_bytes : 0);
          block[u] = blocks + q * (kR * kK);
          if (q != q0 + u * kGroups) there[u] = false;
        }
#pragma unroll 1
        for (int k0 = 0; k0 < kK; k0 += kDeep) {
          Piece x[kTogether][kDeep];
#pragma unroll
          for (int u = 0; u < kTogether; ++u)
#pragma unroll
            for (int k = 0; k < kDeep; ++k, panel[u] += line) x[u][k] = read_global<Piece>(panel[u]);
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            if (!there[u]) continue;
#pragma unroll
            for (int r = 0; r < kR; ++r) {
              A values[kDeep];
              read_together<kAlign>(values, block[u] + r * kK + k0);
#pragma unroll
              for (int k = 0; k < kDeep; ++k)
#pragma unroll
                for (int w = 0; w < kWidth; ++w)
                  acc[r][w] = multiply_add(load<Acc>(values[k]), load<Acc>(x[u][k].values[w]), acc[r][w]);
            }
          }
        }
      }
      __syncwarp();
      fetch(problem, stage, queue[kStages]);
#pragma unroll
      for (int s = 0; s < kStages; ++s) queue[s] = queue[s + 1];
      queue[kStages] = behind<kChunk>(problem, queue[kStages], step);
      if (left > kChunk) continue;
#pragma unroll
      for (int apart = 16; apart >= kLanes; apart /= 2)
#pragma unroll
        for (int r = 0; r < kR; ++r)
#pragma unroll
          for (int w = 0; w < kWidth; ++w) acc[r][w] = add(acc[r][w], shuffle_xor(acc[r][w], apart));
      if (mine) store(problem, c + i64(here.row) * kR * problem.c_row, group, acc);
      clear();
    }
    copy_wait<0>();
    __syncwarp();
  }
}
