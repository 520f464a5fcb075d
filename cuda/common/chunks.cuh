// Blocks of A and their columns are copied through shared memory (sm_80 and newer): a warp walks over block rows, and
// the copies of the next kChunk blocks run one or more chunks ahead of the computation.
#pragma once

#include "common/bsr.cuh"
#include "ptx/cp_async.cuh"

// ------------------------------------------------------------------------------- chunks
// A chunk begins at the last multiple of 16 bytes at or before its first block. `kRead` blocks may be read; the content
// after the last copied block is undefined.
template <class Index, int kBlockBytes, int kChunk, int kRead> struct Chunk {
  static constexpr int kBytes = (kRead * kBlockBytes + 15) / 16 * 16 + 16;
  alignas(16) u8 values[kBytes];
  Index columns[kRead];
  static_assert(kChunk <= 32 && kChunk <= kRead, "a column for each lane");

  template <class A> __device__ __forceinline__ const A* blocks(int first) const {
    return reinterpret_cast<const A*>(values + (u32(first) * u32(kBlockBytes) & 15));
  }
};

// Compares block columns with their number, in 32 bits if the index has 32 bits.
template <class Index> struct Within {
  i64 count;
  __device__ __forceinline__ explicit Within(i64 columns) : count(columns) {}
  __device__ __forceinline__ bool has(Index column) const { return in_range(column, count); }
};
template <> struct Within<int> {
  u32 count;
  __device__ __forceinline__ explicit Within(i64 columns) : count(columns < 0x7fffffff ? u32(columns) : 0x7fffffffu) {}
  __device__ __forceinline__ bool has(int column) const { return u32(column) < count; }
};

// Reads global memory that nobody writes to in this launch.
template <class T> __device__ __forceinline__ T read_global(const u8* from) {
  union { T value; u8 u1; u16 u2; u32 u4; u64 u8_; uint4 u16_; } box = {};
  if constexpr (sizeof(T) == 1) box.u1 = __ldg(from);
  else if constexpr (sizeof(T) == 2) box.u2 = __ldg(reinterpret_cast<const u16*>(from));
  else if constexpr (sizeof(T) == 4) box.u4 = __ldg(reinterpret_cast<const u32*>(from));
  else if constexpr (sizeof(T) == 8) box.u8_ = __ldg(reinterpret_cast<const u64*>(from));
  else box.u16_ = __ldg(reinterpret_cast<const uint4*>(from));
  return box.value;
}

// A block row, and its blocks that remain.
struct Rest { int row, first, last; };

template <class Problem> __device__ __forceinline__ Rest rest_of(const Problem& problem, int row) {
  if (row >= int(problem.block_rows)) return {row, 0, 0};
  // A row that ends before it begins, or begins after the last block, as indices that were overwritten may say, is empty.
  const Range range = blocks_of_row(problem.indptr, row, problem.blocks);
  const i64 first = range.first < problem.blocks ? range.first : problem.blocks;
  return {row, int(first), int(range.last > first ? range.last : first)};
}
// The part after a chunk: the rest of its row, or the row `step` rows later.
template <int kChunk, class Problem> __device__ __forceinline__ Rest rest_after(const Problem& problem, const Rest& x, int step) {
  return x.last - x.first > kChunk ? Rest{x.row, x.first + kChunk, x.last} : rest_of(problem, x.row + step);
}

// The warp starts the copies of the first chunk of `rest`.
template <int kChunk, class Problem, class Index, int kBlockBytes, int kRead>
__device__ __forceinline__ void fetch(const Problem& problem, Chunk<Index, kBlockBytes, kChunk, kRead>& chunk, const Rest& rest) {
  const int lane = threadIdx.x % 32, left = rest.last - rest.first, count = left < kChunk ? left : kChunk;
  const i64 begin = i64(rest.first) * kBlockBytes;
  const int skip = int(begin) & 15, bytes = (count > 0 ? skip + count * kBlockBytes : 0) - lane * 16;
  const u8* from = reinterpret_cast<const u8*>(problem.data) + begin - skip + lane * 16;
  const u32 to = shared_address(chunk.values) + lane * 16;
  constexpr int kMost = (15 + kChunk * kBlockBytes + 15) / 16 * 16;
  if (rest.first + count < problem.blocks) {
#pragma unroll
    for (int at = 0; at < kMost; at += 512) copy_if<16>(at < bytes, to + at, from + at);
  } else {  // no byte after the last block is read
#pragma unroll 1
    for (int at = 0; at < kMost; at += 512) copy_some_if(at < bytes, to + at, from + at, bytes - at < 16 ? bytes - at : 16);
  }
  copy_if<sizeof(Index)>(lane < count, shared_address(chunk.columns + lane), problem.indices + rest.first + lane);
  copy_commit();
}
