// C[i*R + r, n] = alpha * sum_p sum_k A[p, r, k] * B[col[p]*K + k, n] + beta * C[i*R + r, n],  p in block row i
// Small float64 blocks by few columns, on the tensor cores. A warp has a block row and 16 * kPairs columns. An instruction
// takes eight rows, of which those that a block has not are computed for nothing, and four of K, which runs over all blocks
// of the row without a gap. Columns of B are dealt to the instructions so that 16 bytes of B feed two of them and a lane
// ends with four neighbouring columns of C: nothing is added up across lanes. Eight lanes read a line of B, where those
// that read together are in four of them for an instruction, and hand it on. Blocks come through shared memory.
#include "chunks.cuh"
#include "mma.cuh"
#include "stream.cuh"

using Index = INDEX;

constexpr int kR = BLOCK_R, kK = BLOCK_C;
constexpr int kPairs = PAIRS;      // of instructions side by side
constexpr int kTogether = TOGETHER;  // periods under way
constexpr int kChunk = CHUNK, kStages = STAGES;
constexpr int kCtas = CTAS;        // that share a multiprocessor
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTiles = (kR + 7) / 8;
// After so many blocks K is a multiple of four again. Where that takes long, each block has instructions of its own.
constexpr int kCommon = kK % 4 == 0 ? 4 : kK % 2 == 0 ? 2 : 1;
constexpr bool kGaps = kK > 8 && kCommon == 1;
constexpr int kPeriod = kGaps ? 1 : 4 / kCommon;                // blocks
constexpr int kSteps = kGaps ? (kK + 3) / 4 : kK / kCommon;     // instructions
constexpr int kRound = kPeriod * kTogether;

// Of element 4 s + deep of K in a period.
__device__ __forceinline__ int block_at(int s, int deep) { return (4 * s + deep) / kK; }
__device__ __forceinline__ int within_at(int s, int deep) { return (4 * s + deep) % kK; }

using Stage = Chunk<Index, kR * kK * 8, kChunk, (kChunk + kRound - 1) / kRound * kRound>;

// Two elements past all caches but the L1, zeros unless `wanted`. Volatile, so that all of them are asked for before the
// first is used.
__device__ __forceinline__ void read_two(f64 (&x)[2], const u8* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f64 %0, 0d0000000000000000;\nmov.f64 %1, 0d0000000000000000;\n"
      "@p ld.global.nc.v2.f64 {%0, %1}, [%2];\n}"
      : "=&d"(x[0]), "=&d"(x[1]) : "l"(from), "r"(int(wanted)));
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
spmm_f64(const __grid_constant__ Product<f64, f64, f64, f64, Index> problem) {
  __shared__ Stage stages[kWarps][kStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int across = lane / 4, deep = lane % 4;  // of the instructions: two columns, and one of four of K
  const int near = lane % 8, line = lane / 8;    // the same of what a lane reads of B
  const int reader = deep * 8 + across;
  const int rows = int(problem.block_rows), step = gridDim.x * kWarps;
  const u64 panel_bytes = kept(u64(problem.b_row) * (kK * 8));
  const Within<Index> columns(problem.block_cols);
  int row_of[kTiles];  // where the row of this lane begins in a block
#pragma unroll
  for (int t = 0; t < kTiles; ++t) row_of[t] = (8 * t + across < kR ? 8 * t + across : kR - 1) * kK;
  for (i64 batch = blockIdx.z; batch < problem.batches; batch += gridDim.z)
  for (int n0 = blockIdx.y * (16 * kPairs); n0 < problem.N; n0 += gridDim.y * (16 * kPairs)) {
    const f64* b = problem.b + batch * problem.b_batch + n0 + 2 * near;
    const u8* panel[kSteps];  // what this lane reads of B for the first block column
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      panel[s] = kept(reinterpret_cast<const u8*>(b + within_at(s, line) * problem.b_row));
    bool mine[kPairs];
#pragma unroll
    for (int w = 0; w < kPairs; ++w) mine[w] = n0 + 16 * w + 2 * near < problem.N;  // both: N is even
    Rest queue[kStages + 1];  // what is in the stages, and what comes then
    queue[0] = rest_of(problem, blockIdx.x * kWarps + warp);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      fetch(problem, stages[warp][s], queue[s]);
      queue[s + 1] = behind<kChunk>(problem, queue[s], step);
    }
    f64 sums[kTiles][kPairs][4] = {};
    for (int at = 0; queue[0].row < rows; at = at + 1 == kStages ? 0 : at + 1) {
      const Rest here = queue[0];
      const int left = here.last - here.first, count = left < kChunk ? left : kChunk;
      Stage& stage = stages[warp][at];
      copies_wait<kStages - 1>();
      __syncwarp();
      const f64* blocks = stage.template blocks<f64>(here.first);
#pragma unroll 1
      for (int p0 = 0; p0 < count; p0 += kRound) {
        f64 x[kTogether][kSteps][kPairs][2], a[kTogether][kSteps][kTiles];
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            const int q = p0 + u * kPeriod + (kGaps ? 0 : block_at(s, line));
            const Index column = stage.columns[q];
            const bool read = q < count && columns.has(column) && !(kGaps && block_at(s, line));
            const u8* from = panel[s] + u64(u32(column)) * panel_bytes;
#pragma unroll
            for (int w = 0; w < kPairs; ++w) read_two(x[u][s][w], from + 128 * w, read && mine[w]);
            const int p = p0 + u * kPeriod + (kGaps ? 0 : block_at(s, deep));
            const bool there = p < count && columns.has(stage.columns[p]) && !(kGaps && block_at(s, deep));
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              const f64 value = blocks[p * (kR * kK) + row_of[t] + within_at(s, deep)];
              a[u][s][t] = there ? value : 0;
            }
          }
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
#pragma unroll
          for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int w = 0; w < kPairs; ++w) {
              const f64 even = __shfl_sync(0xffffffffu, x[u][s][w][0], reader);
              const f64 odd = __shfl_sync(0xffffffffu, x[u][s][w][1], reader);
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                mma_f64(sums[t][w][0], sums[t][w][2], a[u][s][t], even);
                mma_f64(sums[t][w][1], sums[t][w][3], a[u][s][t], odd);
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
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int w = 0; w < kPairs; ++w) {
          const int row = 8 * t + across, n = n0 + 16 * w + 4 * deep;
          f64* target = problem.c + batch * problem.c_batch + (i64(here.row) * kR + row) * problem.c_row + n;
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            if (row < kR && n + j < problem.N) {  // both
              double2 two = {0, 0};
              if (problem.read_c) two = *reinterpret_cast<const double2*>(target + j);
              two.x = fma(problem.alpha, sums[t][w][j], problem.beta * two.x);
              two.y = fma(problem.alpha, sums[t][w][j + 1], problem.beta * two.y);
              *reinterpret_cast<double2*>(target + j) = two;
            }
            sums[t][w][j] = sums[t][w][j + 1] = 0;
          }
        }
    }
    copies_wait<0>();
    __syncwarp();
  }
}
