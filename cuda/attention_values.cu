// Values of fp8, (batches, heads, keys, columns), as attention_sm90 wants them: (batches, heads, columns, room), keys side
// by side, zeros behind the last one. Of each 16 keys, place 4 t + i has key 2 t + i or, for i > 1, 2 t + i + 6: a
// thread that has the scores of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 has four weights side by side.
#include "types.cuh"

constexpr int kKeys = 128, kColumns = 64, kThreads = 256;
constexpr int kPitch = kColumns + 1;  // the same column of keys 16 apart lies in different banks

struct Values {
  const u8* v;
  u8* to;
  i64 batch, head, row;  // strides of v; its columns lie together
  int heads, keys, columns, room;
};

// Grid: batches by heads, tiles of keys, tiles of columns.
extern "C" __global__ void __launch_bounds__(kThreads) attention_values(const __grid_constant__ Values p) {
  __shared__ u8 tile[kKeys * kPitch];
  const int key = blockIdx.y * kKeys, column = blockIdx.z * kColumns;
  const u8* from = p.v + blockIdx.x / p.heads * p.batch + blockIdx.x % p.heads * p.head + column;
  const int keys = min(p.keys - key, kKeys), columns = min(p.columns - column, kColumns);
  for (int i = threadIdx.x; i < kKeys * kColumns / 16; i += kThreads) {
    const int row = i / (kColumns / 16), first = i % (kColumns / 16) * 16;
    alignas(16) u8 bytes[16] = {};
    if (row < keys && first + 16 <= columns) {
      *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(from + (key + row) * p.row + first);
    } else if (row < keys) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (first + j < columns) bytes[j] = from[(key + row) * p.row + first + j];
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) tile[row * kPitch + first + j] = bytes[j];
  }
  __syncthreads();
  u8* to = p.to + (i64(blockIdx.x) * p.columns + column) * p.room + key;
  for (int i = threadIdx.x; i < kKeys * kColumns / 16; i += kThreads) {
    const int row = i / (kKeys / 16), first = i % (kKeys / 16) * 16;
    if (row >= columns || key + first >= p.room) continue;
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u8* x = tile + (first + 2 * t) * kPitch + row;
      words[t] = x[0] | x[kPitch] << 8 | x[8 * kPitch] << 16 | u32(x[9 * kPitch]) << 24;
    }
    *reinterpret_cast<uint4*>(to + i64(row) * p.room + first) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
