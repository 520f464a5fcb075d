// to[b, h, d, place(j)] = v[b, h, j, d]
// Values in fp8, transposed for attention_sm90 so that keys are contiguous: Hopper's tensor cores read bytes along K
// only. Within 16 keys, place 4 t + i has key 2 t + i or, for i > 1, 2 t + i + 6: a thread with the scores of keys 2 t,
// 2 t + 1, 2 t + 8 and 2 t + 9 then has four neighbouring weights. Zeros follow the last key. Sequence s of several,
// from key b on, begins at place 16 (ceil(b / 16) + s).
// A CTA has 128 keys by 64 columns; 16 bytes at a time on both sides, and rows of 65 bytes in shared memory, so that
// the same column of keys 16 apart lies in different banks.
#include "common/layout.cuh"

constexpr int kKeys = 128, kColumns = 64, kThreads = 256, kGroups = kKeys / 16;
constexpr int kPitch = kColumns + 1;  // the same column of keys 16 apart lies in different banks

struct AttentionValues {
  const u8* v;
  u8* to;
  const int* bounds;     // bounds of sequences of different lengths, or null
  i64 batch, head, row;  // strides of v in bytes; its columns are contiguous
  int heads, keys, columns, room, sequences;
};
#ifdef ATTENTION_VALUES_BYTES
CHECK_LAYOUT(AttentionValues, ATTENTION_VALUES, (v)(to)(bounds)(batch)(head)(row)(heads)(keys)(columns)(room)(sequences))
#endif

// The keys of 16 places: the first key, and the end. A user can write to the bounds, so they are clamped.
struct Group { int first, last; };

__device__ __forceinline__ Group group_at(const AttentionValues& p, int number) {
  if (!p.bounds) return {16 * number, p.keys};
  const auto bound = [&](int s) { return min(max(p.bounds[s], 0), p.keys); };
  const auto place = [&](int s) { return (bound(s) + 15) / 16 + s; };
  int low = 0, high = p.sequences;  // searches the last sequence that begins at or before `number`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (place(middle) <= number ? low : high) = middle;
  }
  return {bound(low) + 16 * (number - place(low)), bound(low + 1)};
}

// Grid: tiles of places of all batches and heads, since only its first side has room for those of long sequences; tiles
// of columns.
extern "C" __global__ void __launch_bounds__(kThreads) attention_values(const __grid_constant__ AttentionValues p) {
  __shared__ u8 tile[kKeys * kPitch];
  __shared__ Group groups[kGroups];
  const int tiles = (p.room + kKeys - 1) / kKeys, head = blockIdx.x / tiles;
  const int place = (blockIdx.x - head * tiles) * kKeys, column = blockIdx.y * kColumns;
  if (threadIdx.x < kGroups) groups[threadIdx.x] = group_at(p, place / 16 + threadIdx.x);
  __syncthreads();
  const u8* from = p.v + head / p.heads * p.batch + head % p.heads * p.head + column;
  const int columns = min(p.columns - column, kColumns);
  for (int i = threadIdx.x; i < kKeys * kColumns / 16; i += kThreads) {
    const int row = i / (kColumns / 16), first = i % (kColumns / 16) * 16;
    const int key = groups[row / 16].first + row % 16;
    const bool there = key >= 0 && key < groups[row / 16].last;
    alignas(16) u8 bytes[16] = {};
    if (there && first + 16 <= columns) {
      *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(from + key * p.row + first);
    } else if (there) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (first + j < columns) bytes[j] = from[key * p.row + first + j];
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) tile[row * kPitch + first + j] = bytes[j];
  }
  __syncthreads();
  u8* to = p.to + (i64(head) * p.columns + column) * p.room + place;
  for (int i = threadIdx.x; i < kKeys * kColumns / 16; i += kThreads) {
    const int row = i / kGroups, first = i % kGroups * 16;
    if (row >= columns || place + first >= p.room) continue;
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u8* x = tile + (first + 2 * t) * kPitch + row;
      words[t] = x[0] | x[kPitch] << 8 | x[8 * kPitch] << 16 | u32(x[9 * kPitch]) << 24;
    }
    *reinterpret_cast<uint4*>(to + i64(row) * p.room + first) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
