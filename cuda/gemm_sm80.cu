// C[m, n] = alpha * sum_p sum_k A[p, m % R, k] * B[col[p]*K + k, n] + beta * C[m, n],  p in the block row of m
// Ampere and newer: mma.sync with operands copied by cp.async. Lines of stored blocks and of B are multiples of 16 bytes;
// R, K, N and the strides of C are arbitrary; the order of sums is fixed. RAGGED: row tiles at the end of a block row are
// cut, or stored lines are longer than the block. What is missing of a tile is zero in shared memory: rows of A, whose
// sums are not stored, and both operands beyond K, so that an infinity in B meets no zero of a block that has K columns.
// A CTA owns kRowTiles row tiles of the work list by kTileN columns and walks over the union of the row tiles' block
// columns. All warps copy, and all multiply. A stage has 128 bytes of k and two barriers, full (all threads, when their
// copies are there) and empty (each warp once), so that a warp waits for others only where it needs what they do: one
// barrier for all at each stage was 10 to 20 % slower. A warp whose row tile lacks the block goes ahead. Indices of
// entries come by cp.async too, into a ring of 16. CTAs stay and take items in turn, without claims. Groups that are
// longer than a CTA's fair share are cut into splits, which the last CTA adds in order.
// 16-bit types have several row tiles; tf32 and float64 one, because no warp then waits for the row tiles of another.
// Bound by latency: the tensor cores are busy half of the time.
#include "common/arrivals.cuh"
#include "common/bsr.cuh"
#include "common/mma_tiles.cuh"
#include "common/pipeline.cuh"
#include "common/ring.cuh"
#include "ptx/test_wait.cuh"

using B = ELEMENT_B;
static_assert(Same<A, B>::value, "one element type");

// A warp owns part of one row tile, or several whole ones, and skips blocks that they lack: an absent block contributes
// nothing, whatever B holds. The warps that share a scheduler (warp % 4) should own all row tiles between them: then
// every scheduler has the same amount of work.

// Waits for a phase of a barrier; the wait that lets other warps run meanwhile came with Hopper.
__device__ __forceinline__ void await(u64& barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  wait(barrier, parity);
#else
  while (!barrier_test_wait(shared_address(&barrier), parity)) {}
#endif
}

constexpr int kRing = 16;  // entries whose indices are kept, kAhead of them ahead of the products
static_assert(2 * kAhead <= kRing, "the first stages are copied without a barrier between: indices must not meet");

struct alignas(1024) Shared {  // aligned to the longest line
  u8 a[kStages][kTileM * kStageBytes];
  u8 b[kStages][kTileN * kStageBytes];
  u64 full[kStages], empty[kStages];  // all threads have copied their part of a stage; all warps have multiplied it
  int4 item;
  int places[kRowTiles];              // row of C / kRowTileHeight of each row tile, or -1
  int starts[kRowTiles];              // first row in a block of each row tile
  int entries[kRing][kRowTiles + 1];  // by entry % kRing: the blocks of the row tiles, the block column
};

// ---------------------------------------------------------------------------------- the copies
using Problem = Product<A, B, C, Acc, int>;
CHECK_PRODUCT(Problem)

struct GemmSm80 {  // one argument, since it costs the caller less time than two
  Problem product;
  Schedule schedule;
  int line;  // elements from one line of a stored block to the next
  int high;  // rows of the row tiles of a block row: R, or the next multiple of their height
};
#ifdef GEMM_SM80_BYTES
CHECK_LAYOUT(GemmSm80, GEMM_SM80, (product)(schedule)(line)(high))
#endif

constexpr bool kRagged = RAGGED;
__device__ __forceinline__ u32 line_of(const GemmSm80& argument) {
  return kRagged ? argument.line : kATransposed ? argument.product.R : argument.product.K;
}

// The first row tile of a warp.
__device__ __forceinline__ u32 warp_row_tile(u32 thread) { return thread / 32 / kWarpsN * kWarpM / kRowTileHeight; }

// What a thread copies of a stage: where its first pieces go, and where they come from: from the first element of the
// stage in the blocks of A, and in B. All pieces of A that a thread copies lie in the same row of their row tiles.
struct Pieces {
  u32 to_a, to_b, from_a;
  i64 from_b;

  __device__ __forceinline__ Pieces(const GemmSm80& argument, u32 thread)
      : to_a(OperandA::copy_place(thread)), to_b(OperandB::copy_place(thread)) {
    const u32 row = u32(OperandA::copy_mn(thread, 0)) % kRowTileHeight, k = OperandA::copy_k(thread, 0);
    const Problem& problem = argument.product;
    from_a = kATransposed ? k * line_of(argument) + row : row * line_of(argument) + k;
    const i64 n = OperandB::copy_mn(thread, 0), k_of_b = OperandB::copy_k(thread, 0);
    from_b = kBTransposed ? n * problem.b_col + k_of_b : k_of_b * problem.b_row + n;
  }
  // The same, which the compiler keeps in registers.
  __device__ __forceinline__ Pieces kept() const {
    Pieces x = *this;
    x.to_a = opaque(to_a), x.to_b = opaque(to_b), x.from_a = opaque(from_a), x.from_b = opaque(from_b);
    return x;
  }
};
// Where two CTAs share a multiprocessor, and for three products of tf32, there are no registers for that.
constexpr bool kKeepsPieces = kCtas == 1 && kKind != MMA_3XTF32;

// Copies the stages of one tile to shared memory, one after the other.
struct Copier {
  const GemmSm80& argument;
  const Problem& problem;
  const Schedule& schedule;
  Shared& shared;
  Pieces pieces;
  const B* panel;  // B at the tile's first column
  int columns;     // columns of the tile that lie inside B
  int entry, last, k;
  Ring<kStages> to;        // the stage that is filled next
  u32 plan;        // for the stage whose number is this lane's: a bit for each row tile that has the block

  __device__ __forceinline__ Copier(const GemmSm80& argument, Shared& shared)
      : argument(argument), problem(argument.product), schedule(argument.schedule), shared(shared),
        pieces(Pieces(argument, threadIdx.x).kept()) {}

  // Copies the indices of an entry, one word per thread.
  __device__ __forceinline__ void copy_indices(int e) const {
    const u32 i = opaque(threadIdx.x);
    if (i > kRowTiles || e >= last) return;
    const int* from = i < kRowTiles ? schedule.blocks + i64(e) * kRowTiles + i : schedule.columns + e;
    copy_4(true, shared_address(&shared.entries[u32(e) % kRing][i]), from);
  }

  // Copies A for a stage that has an entry. kWhole: all of its k and its columns are inside. `present`: the row tiles
  // that have the block.
  template <bool kWhole>
  __device__ __forceinline__ void copy_a(const Pieces& own, u32 thread, int stage, const int* indices, u32 present,
                                         int left) const {
    const u32 R = problem.R, K = problem.K, line = line_of(argument);
    const int needed = (left + kStepK - 1) / kStepK * kStepK;
    const u32 to = shared_address(shared.a[stage]) + own.to_a;
    // A thread's pieces belong all to one row tile, or each to a different one.
    constexpr int kTileCopies = kATransposed ? OperandA::kCopies : (OperandA::kCopies + kRowTiles - 1) / kRowTiles;
    const auto copy_row_tile = [&](u32 row_tile, int i, u32 place, bool wanted) {
      const u32 block = indices[row_tile], row = shared.starts[row_tile];
      const u64 first = u64(block) * (line * (kATransposed ? K : R)) + (kATransposed ? k * line + row : row * line + k);
      const A* from = problem.data + first + own.from_a;
#pragma unroll
      for (int j = 0; j < kTileCopies; ++j) {
        const int at = OperandA::copy_k(thread, i + j);
        const bool cut = kRagged && row + u32(OperandA::copy_mn(thread, i + j)) % kRowTileHeight >= R;
        copy_16(wanted && (kWhole || at < needed), OperandA::copy_place(place, j),
                from + j * OperandA::kLineStep * line, cut || (!kWhole && at >= left));
      }
    };
    if constexpr (!kATransposed && kRowTileHeight % OperandA::kLineStep == 0) {  // the same row tile for all threads
#pragma unroll 1
      for (u32 rest = present; rest != 0; rest &= rest - 1) {
        const u32 row_tile = kRowTiles > 1 ? __ffs(rest) - 1 : 0;
        copy_row_tile(row_tile, 0, to + row_tile * (kRowTileHeight * OperandA::kLine), true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < OperandA::kCopies; i += kTileCopies) {
        const u32 row_tile = u32(OperandA::copy_mn(thread, i)) / kRowTileHeight;
        copy_row_tile(row_tile, i, OperandA::copy_place(to, i), present >> row_tile & 1);
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void copy_b(const Pieces& own, u32 thread, int stage, u32 block_column, int left) const {
    const int needed = (left + kStepK - 1) / kStepK * kStepK;
    const u32 to = shared_address(shared.b[stage]) + own.to_b;
    const i64 stride = OperandB::kLineStep * (kBTransposed ? problem.b_col : problem.b_row);
    const i64 row = u64(block_column) * u32(problem.K) + u32(k);
    const B* from = panel + own.from_b + (kBTransposed ? row : row * problem.b_row);
#pragma unroll
    for (int i = 0; i < OperandB::kCopies; ++i) {
      const int at = OperandB::copy_k(thread, i), n = OperandB::copy_mn(thread, i);
      const bool cut = !kBTransposed && n < columns && n + kPiece > columns;
      copy_16(kWhole || (at < needed && !cut), OperandB::copy_place(to, i), from + i * stride,
              !kWhole && (at >= left || n >= columns));
    }
    if (!kWhole && !kBTransposed && columns % kPiece != 0) {  // pieces that the last column cuts
      const int n = OperandB::copy_mn(thread, 0);
#pragma unroll
      for (int i = 0; i < OperandB::kCopies; ++i) {
        const int at = OperandB::copy_k(thread, i);
        copy_some_of_16(at < needed && n < columns && n + kPiece > columns, OperandB::copy_place(to, i),
                        from + i * stride, at < left ? (columns - n) * kSize : 0);
      }
    }
  }

  // Copies the first stages of a tile, which has entries `from` to `to` - 1 of a group.
  __device__ __forceinline__ void start(int group, int from, int end) {
    entry = from, last = end, k = 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy_indices(from + i);
    copy_commit();
    if (threadIdx.x < kRowTiles) {
      const int place = schedule.row_tiles[i64(group) * kRowTiles + threadIdx.x];
      shared.places[threadIdx.x] = place;
      shared.starts[threadIdx.x] = u32(max(place, 0)) * kRowTileHeight % u32(kRagged ? argument.high : problem.R);
    }
    copy_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) copy();
  }

  // Starts all copies of the next stage, if one is left, once all warps are through with what was there before.
  __device__ __forceinline__ void copy() {
    if (entry >= last) return;
    const int stage = to.at;
    const u32 thread = opaque(threadIdx.x), lane = thread % 32;
    const int K = problem.K;
    const int* indices = shared.entries[u32(entry) % kRing];
    const int column = indices[kRowTiles];
    const bool inside = in_range(column, problem.block_cols);
    const u32 present = __ballot_sync(0xffffffffu, inside && lane < kRowTiles && indices[lane < kRowTiles ? lane : 0] >= 0);
    if (lane == u32(stage)) plan = present;
    // Beyond K, up to a whole step, both operands are zero.
    const int left = min(K - k, kStageK);
    await(shared.empty[stage], to.phase ^ 1);
    if (present != 0) {
      const Pieces own = kKeepsPieces ? pieces : Pieces(argument, thread);
      if (left == kStageK && columns == kTileN) {
        copy_a<true>(own, thread, stage, indices, present, left);
        copy_b<true>(own, thread, stage, column, left);
      } else {
        copy_a<false>(own, thread, stage, indices, present, left);
        copy_b<false>(own, thread, stage, column, left);
      }
    }
    if (k == 0) copy_indices(entry + kAhead);
    copies_arrive(shared_address(&shared.full[stage]));
    to.next();
    k += kStageK;
    if (k >= K) k = 0, ++entry;
  }
};

// ---------------------------------------------------------------------------------- the result
// `line` is this lane's row of C at the tile's first column, `first` is the run's first column there. `whole`: all
// columns of the tile are inside C and contiguous, and vectors are aligned.
__device__ __forceinline__ void store_run(const Problem& problem, C* line, int first, int columns, bool whole,
                                          const Sum (&run)[kRun]) {
  if (whole) {
#pragma unroll
    for (int v = 0; v < kRun; v += kVector) {
      Vector* at = reinterpret_cast<Vector*>(line + first + v);
      Vector out = {};
      if (problem.read_c) out = *at;
#pragma unroll
      for (int i = 0; i < kVector; ++i) out.x[i] = finish(problem, Acc(run[v + i]), out.x[i]);
      *at = out;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i >= columns) continue;
      C* at = line + (first + i) * problem.c_col;
      *at = finish(problem, Acc(run[i]), problem.read_c ? *at : C{});
    }
  }
}

// ---------------------------------------------------------------------------------- splits
// Adds the splits of a group: each CTA writes its sums, and the one that arrives last adds all of them, in their order.
// Returns false if another one will. Only warps with columns of C have sums.
__device__ __forceinline__ bool gather(const GemmSm80& argument, int split, int column_tile, int batch, Accum& accum) {
  const Schedule& schedule = argument.schedule;
  const i64 column_tiles = (argument.product.N + kTileN - 1) / kTileN;
  const i64 tile = batch * column_tiles + column_tile, tiles = argument.product.batches * column_tiles;
  const u32 warp_n = threadIdx.x / 32 % kWarpsN * kWarpN;
  const bool has_sums = i64(column_tile) * kTileN + warp_n < argument.product.N;
  constexpr int kTogether = 16 / sizeof(Sum), kSums = sizeof(Accum) / sizeof(Sum);
  union Together { uint4 words; Sum x[kTogether]; };
  Sum (&sums)[kSums] = reinterpret_cast<Sum (&)[kSums]>(accum);
  const auto place = [&](int of) {
    return reinterpret_cast<Together*>(schedule.partial) + (of * tiles + tile) * (kSums / kTogether * kThreads) +
           threadIdx.x;
  };
  const int4 group = schedule.splits[split];
  Together* mine = place(split);
  if (has_sums) {
#pragma unroll
    for (int e = 0; e < kSums; e += kTogether) {
      Together out;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) out.x[i] = sums[e + i];
      mine[e / kTogether * kThreads].words = out.words;
    }
  }
  if (!arrives_last(schedule.arrived + group.x * tiles + tile, group.y)) return false;
  if (!has_sums) return true;
#pragma unroll
  for (int e = 0; e < kSums; ++e) sums[e] = 0;
#pragma unroll 1
  for (int of = group.x; of < group.x + group.y; ++of) {
    const Together* theirs = place(of);
#pragma unroll
    for (int e = 0; e < kSums; e += kTogether) {
      Together in;
      in.words = __ldcg(&theirs[e / kTogether * kThreads].words);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sums[e + i] += in.x[i];
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------- the kernel
// Whether the runs of a tile can be stored as vectors.
__device__ __forceinline__ bool is_whole(const Problem& problem, int columns) {
  return columns == kTileN && problem.c_col == 1 &&
         (reinterpret_cast<u64>(problem.c) | (problem.c_row | problem.c_batch) * sizeof(C)) % sizeof(Vector) == 0;
}

// The row of C for a row of the row tiles; -1 if the block rows have no such row.
__device__ __forceinline__ i64 row_of_c(const GemmSm80& argument, i64 row) {
  if constexpr (!kRagged) return row;
  const int within = int(row % argument.high);
  return within < argument.product.R ? row / argument.high * argument.product.R + within : -1;
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages; ++i) {
    barrier_init(shared_address(&shared.full[i]), kThreads);
    barrier_init(shared_address(&shared.empty[i]), kThreads / 32);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) gemm_sm80(const __grid_constant__ GemmSm80 argument) {
  const Problem& problem = argument.product;
  const Schedule& schedule = argument.schedule;
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const u32 thread = threadIdx.x, warp = uniform(thread / 32);
  const u32 warp_m = warp / kWarpsN * kWarpM, warp_n = warp % kWarpsN * kWarpN, first_row_tile = warp_m / kRowTileHeight;
  const int K = problem.K;
  const int column_tiles = int((problem.N + kTileN - 1) / kTileN), batches = int(problem.batches);
  if (*schedule.count == 0 || column_tiles == 0) return;
  Fragments fragments{shared_address(shared.a) + OperandA::lane_place(warp_m),
                      shared_address(shared.b) + OperandB::lane_place(warp_n)};
  Ring<kStages> from;
  if (thread == 0) init_barriers(shared);
  Copier copier(argument, shared);
  // Items are the fastest index: CTAs that run at the same time share columns of B.
  int item = blockIdx.x, column_tile = 0, batch = 0;
  const auto settle = [&] {
    const int count = *schedule.count;  // read again: saves a register
    for (; item >= count; item -= count)
      if (++column_tile == column_tiles) column_tile = 0, ++batch;
  };
  settle();
  if (threadIdx.x == 0 && batch < batches) shared.item = schedule.items[item];
  while (batch < batches) {
    __syncthreads();  // the item has been written, and no thread still reads the data of the last one
    const int group = uniform(shared.item.x), first = uniform(shared.item.y), last = uniform(shared.item.z);
    const int split = uniform(shared.item.w);
    const i64 column = i64(column_tile) * kTileN;
    const int columns = int(min(problem.N - column, i64(kTileN)));
    copier.panel = problem.b + batch * problem.b_batch + column * problem.b_col, copier.columns = columns;
    copier.start(group, first, last);

    // Multiply the stages of the tile, and copy one ahead for each.
    Accum accum = {};
    int k = 0;
    for (int left = (last - first) * ((K + kStageK - 1) / kStageK); left > 0; --left) {
      const u32 plan = __shfl_sync(0xffffffffu, copier.plan, from.at);
      const u32 present = uniform(plan >> first_row_tile & ((1u << kWarpRowTiles) - 1));
      const int steps = min((K - k + kStepK - 1) / kStepK, kSteps);
      k = k + kStageK < K ? k + kStageK : 0;
      await(shared.full[from.at], from.phase);
      multiply_stage(accum, fragments, present, steps);
      __syncwarp();
      arrive_if(thread % 32 == 0, shared.empty[from.at]);
      copier.copy();
      const int forward = from.at + 1 == kStages ? 1 - kStages : 1;
      fragments.a += forward * (kTileM * kStageBytes);
      fragments.b += forward * (kTileN * kStageBytes);
      from.next();
    }

    // Add the other splits of the group, fetch the next item, then store.
    const int* places = &shared.places[warp_row_tile(opaque(threadIdx.x))];
    C* corner = problem.c + batch * problem.c_batch + column * problem.c_col;
    const bool stores = split < 0 || gather(argument, split, column_tile, batch, accum);
    item += gridDim.x;
    settle();
    if (threadIdx.x == 0 && batch < batches) shared.item = schedule.items[item];
    const u32 lane = opaque(threadIdx.x) % 32;
    const bool whole = is_whole(problem, columns);
#pragma unroll
    for (int slice = 0; slice < 2 * kMmasM; ++slice) {
      const int place = places[slice * 8 / kRowTileHeight];
      if (place < 0 || !stores) continue;
      const u32 below = warp_m % kRowTileHeight + OperandA::spread(slice, lane / 4) % kWarpTileHeight;
      const i64 row = row_of_c(argument, i64(place) * kRowTileHeight + below);
      if (row < 0) continue;
#pragma unroll
      for (int s = 0; s < kSlicesN; s += OperandB::kInterleave) {
        Sum run[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          run[i] = accum[slice / 2][s + i % OperandB::kInterleave][slice % 2 * 2 + i / OperandB::kInterleave];
        store_run(problem, corner + row * problem.c_row, warp_n + OperandB::spread(s, lane % 4 * 2), columns, whole,
                  run);
      }
    }
  }
}
