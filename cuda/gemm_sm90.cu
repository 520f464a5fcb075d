// C[i*R + r, n] = alpha * sum_p sum_c A[p, r, c] * B[col[p]*K + c, n] + beta * C[i*R + r, n],  p in block row i
// Hopper: one warp feeds a ring of TMA loads, two warpgroups multiply with wgmma, CTAs stay. 16-bit floats, R a multiple
// of 64, K of 16. A tile is kTileM rows of one block row by 256 columns: with kTileM = 128 each warpgroup takes 64 rows,
// with 64 each takes 128 columns. Indices out of range read zeros: the copy engine knows the bounds.
#include "bsr.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = ELEMENT_A;
using C = ELEMENT_C;
using Index = INDEX;

constexpr int kTileM = TILE_M;
constexpr bool kBTransposed = B_TRANSPOSED;  // B is column-major: K runs fastest
constexpr bool kTmaStore = TMA_STORE;        // C is row-major, 16 bit, and not read
constexpr int kTileN = 256;
constexpr int kTileK = 64;                   // 128 bytes: one swizzled row
constexpr int kTail = TAIL;                  // K % kTileK, known to the compiler: a wgmma must not be conditional
constexpr int kStages = STAGES;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kWarpgroupN = kTileM == 128 ? kTileN : kTileN / 2;
constexpr int kSums = kWarpgroupN / 2;       // float32 sums per thread
constexpr u32 kBytesA = kTileM * kTileK * 2;
constexpr u32 kBytesB = kTileK * kTileN * 2;
constexpr u32 kBytesOut = 64 * 64 * 2;       // one slab of C on its way out
static_assert(kTileM == 128 || kTileM == 64, "a warpgroup multiplies 64 rows");
static_assert(sizeof(Element) == 2, "16-bit floats");

struct alignas(1024) Shared {
  u8 a[kStages][kBytesA];
  u8 b[kStages][kBytesB];
  u8 out[kTmaStore ? kConsumers * 2 : 1][kBytesOut];  // two slabs a warpgroup
  u64 full[kStages], empty[kStages];
};

// What a CTA works on: the blocks of one block row, from row `sub` within the block, from column `column`.
struct Tile {
  Range blocks;
  i64 block_row;
  int sub, column;
};

// Tile number t. Sections of `group` column tiles are walked together, since their panels of B fit the L2. Within a
// section block rows come longest first, in the next one shortest first, so that each CTA, taking every gridDim.x-th
// tile, gets its share of both.
struct Walk {
  const int* __restrict__ order;
  int row_tiles, column_tiles, tiles_per_block, group;

  __device__ __forceinline__ int tiles() const { return row_tiles * column_tiles; }
  template <class Problem> __device__ __forceinline__ Tile at(int t, const Problem& problem) const {
    if (t >= tiles()) return {};
    const int section = t / (group * row_tiles);
    const int width = min(group, column_tiles - section * group);
    const int within = t - section * group * row_tiles;
    const int place = section & 1 ? row_tiles - 1 - within / width : within / width;
    const i64 block_row = order[place / tiles_per_block];
    return {blocks_of_row(problem.indptr, block_row, problem.blocks), block_row, place % tiles_per_block * kTileM,
            (section * group + within % width) * kTileN};
  }
};

// With -DSTRESS every wait is preceded by a pause of 0 to 8 us that differs from warp to warp and from wait to wait.
__device__ __forceinline__ void stress(int salt) {
#ifdef STRESS
  u32 noise = (clock() / 64 + salt * 2654435761u) * 2246822519u;
  __nanosleep((noise >> 19) & 0x1fff);
#endif
}

// Start the products of one stage: kSteps of 16 columns of A. The fence belongs to the branch it is called in.
template <int kSteps> __device__ __forceinline__ void multiply(float (&sums)[kSums], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<!kBTransposed>(sums, wgmma_descriptor(a + step * 32, 16, 1024),
                         kBTransposed ? wgmma_descriptor(b + step * 32, 16, 1024)
                                      : wgmma_descriptor(b + step * 2048, kTileK * 128, 1024));
  wgmma_commit();
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." MMA_NAME "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
gemm_sm90(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
          const __grid_constant__ TensorMap map_c,
          const __grid_constant__ Product<Element, Element, C, f32, Index> problem, const int* __restrict__ order,
          int group) {
  extern __shared__ u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(memory) + 1023) & ~u64(1023));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int R = problem.R, K = problem.K;
  const int tiles_per_block = R / kTileM;
  const Walk walk{order, int(problem.block_rows) * tiles_per_block, int((problem.N + kTileN - 1) / kTileN),
                  tiles_per_block, group};
  const int whole_stages = K / kTileK;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.full[s]), 1);
      barrier_init(shared_address(&shared.empty[s]), kConsumers);
    }
    barrier_init_fence();
  }
#ifdef STRESS  // slots start as NaN, so that a product of what was never copied shows
  for (u32 i = threadIdx.x; i < kStages * (kBytesA + kBytesB) / 4; i += kThreads)
    reinterpret_cast<u32*>(shared.a)[i] = 0xffffffffu;
  proxy_fence();
#endif
  __syncthreads();

  int stage = 0;
  u32 phase = 0;
  if (warpgroup == kConsumers) {  // ------------------------------------------------- producer
    fewer_registers<40>();
    if (threadIdx.x == 128 * kConsumers) {
      const u64 once = evict_first(), again = evict_last();
      Tile next = walk.at(blockIdx.x, problem);
      for (int t = blockIdx.x; t < walk.tiles(); t += gridDim.x) {
        const Tile tile = next;
        next = walk.at(t + gridDim.x, problem);
        const int last = int(tile.blocks.last);
        int p = int(tile.blocks.first);
        Index ahead = p < last ? problem.indices[p] : 0;
        for (; p < last; ++p) {
          const int k_row = int(ahead) * K;
          ahead = p + 1 < last ? problem.indices[p + 1] : 0;
          for (int k = 0; k < whole_stages + (kTail > 0); ++k) {
            stress(stage + k);
            barrier_wait(shared_address(&shared.empty[stage]), phase ^ 1);
            const u32 full = shared_address(&shared.full[stage]);
            barrier_expect(full, kBytesA + kBytesB);
            const u32 b = shared_address(shared.b[stage]);
            copy_tile(shared_address(shared.a[stage]), &map_a, k * kTileK, p * R + tile.sub, full, once);
            if constexpr (kBTransposed) {
              copy_tile(b, &map_b, k_row + k * kTileK, tile.column, full, again);
            } else {
#pragma unroll
              for (int slab = 0; slab < kTileN / 64; ++slab)
                copy_tile(b + slab * kTileK * 128, &map_b, tile.column + slab * 64, k_row + k * kTileK, full, again);
            }
            if (++stage == kStages) stage = 0, phase ^= 1;
          }
        }
      }
    }
  } else {  // ------------------------------------------------------------------------ consumers
    more_registers<232>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const bool leader = threadIdx.x % 128 == 0;
    const u32 a_rows = kTileM == 128 ? warpgroup * 64 * 128 : 0;  // bytes to this warpgroup's rows of A
    // Columns of B: slabs of 64 when N runs fastest, rows of 128 bytes when K does.
    const u32 b_columns = kTileM == 128 ? 0 : warpgroup * kWarpgroupN * (kBTransposed ? 128 : kTileK * 2);
    int slab_out = 0;
    for (int t = blockIdx.x; t < walk.tiles(); t += gridDim.x) {
      const Tile tile = walk.at(t, problem);
      const Range row = tile.blocks;
      float sums[kSums];
#pragma unroll
      for (int e = 0; e < kSums; ++e) sums[e] = 0;
      int previous = -1;  // stage whose products may still be running
      for (i64 p = row.first; p < row.last; ++p) {
        for (int k = 0; k < whole_stages + (kTail > 0); ++k) {
          stress(7 * warpgroup + stage + k);
          barrier_wait(shared_address(&shared.full[stage]), phase);
          const u32 a = shared_address(shared.a[stage]) + a_rows;
          const u32 b = shared_address(shared.b[stage]) + b_columns;
          if (kTail > 0 && k == whole_stages) multiply<kTail / 16>(sums, a, b);
          else multiply<kTileK / 16>(sums, a, b);
          if (previous >= 0) {
            wgmma_wait<1>();
            if (leader) barrier_arrive(shared_address(&shared.empty[previous]));
          }
          previous = stage;
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
      wgmma_wait<0>();
      if (previous >= 0 && leader) barrier_arrive(shared_address(&shared.empty[previous]));

      // Thread holds rows lane / 4 and + 8 of its warp's 16, columns 2 * (lane % 4) + 8 j and the next.
      const i64 row0 = tile.block_row * R + tile.sub + (kTileM == 128 ? warpgroup * 64 : 0);
      const int column0 = tile.column + (kTileM == 128 ? 0 : warpgroup * kWarpgroupN);
      if constexpr (kTmaStore) {
#pragma unroll
        for (int slab = 0; slab < kWarpgroupN / 64; ++slab) {
          const u32 out = shared_address(shared.out[warpgroup * 2 + slab_out]);
          if (leader) store_wait_read<1>();  // the store that used this slab before has read it
          warpgroup_sync(1 + warpgroup);
          const int r = warp * 16 + lane % 16;
#pragma unroll
          for (int chunk = 0; chunk < 4; ++chunk) {  // 16 columns: two 8 x 8 matrices above two others
            const float* s = sums + slab * 32 + chunk * 8;
            const u32 at = out + r * 128 + (((chunk * 2 + lane / 16) ^ (r % 8)) * 16);
            store_matrix_x4(at, pack(problem.alpha * s[0], problem.alpha * s[1]),
                            pack(problem.alpha * s[2], problem.alpha * s[3]),
                            pack(problem.alpha * s[4], problem.alpha * s[5]),
                            pack(problem.alpha * s[6], problem.alpha * s[7]));
          }
          proxy_fence();
          warpgroup_sync(1 + warpgroup);
          if (leader) {
            store_tile(&map_c, column0 + slab * 64, int(row0), out);
            store_commit();
          }
          slab_out ^= 1;
        }
      } else {
        int n = column0 + lane % 4 * 2;
        C* corner = problem.c + (row0 + warp * 16 + lane / 4) * problem.c_row + n * problem.c_col;
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (n + e % 2 >= problem.N) continue;
            C* target = corner + e / 2 * 8 * problem.c_row + e % 2 * problem.c_col;
            const f32 old = problem.read_c ? problem.beta * load<f32>(*target) : 0;
            *target = Store<C>::from(fmaf(problem.alpha, sums[j * 4 + e], old));
          }
          n += 8;
          corner += 8 * problem.c_col;
        }
      }
    }
    if (kTmaStore && leader) store_wait_read<0>();
  }
}
