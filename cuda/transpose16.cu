// to[n, k] = from[k, n], for elements of 16 bits
// The copy of an operand whose contiguous pieces are too short for TMA (block_products.py). Lines of `from` begin at
// multiples of 16 bytes and lines of `to` follow each other; both sides are multiples of 8 elements. A CTA has 64 x 64
// elements: every load and store is 16 bytes, eight threads have a line of 128, and pieces of 16 bytes are permuted in
// shared memory so that neither side has bank conflicts. Bound by the bytes: each is read once and written once.
#include "common/layout.cuh"

constexpr int kSide = 64, kThreads = 256, kEach = 8;  // elements of 16 bytes
constexpr int kPieces = kSide / kEach, kStep = kThreads / kPieces;

struct Transpose16 {
  const u16* from;
  u16* to;
  i64 line;           // elements from a line of `from` to the next
  i64 rows, columns;  // of `from`
};
#ifdef TRANSPOSE16_BYTES
CHECK_LAYOUT(Transpose16, TRANSPOSE16, (from)(to)(line)(rows)(columns))
#endif

// Where piece `piece` of line k of the tile lies.
__device__ __forceinline__ int place(int k, int piece) { return k * kSide + (piece ^ k / kEach) * kEach; }

// Grid: tiles of columns, tiles of rows. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads) transpose16(const __grid_constant__ Transpose16 p) {
  __shared__ uint4 memory[kSide * kPieces];
  u16* tile = reinterpret_cast<u16*>(memory);
  const int piece = threadIdx.x % kPieces, y = threadIdx.x / kPieces;
  for (i64 row = i64(blockIdx.y) * kSide; row < p.rows; row += i64(gridDim.y) * kSide) {
    for (i64 column = i64(blockIdx.x) * kSide; column < p.columns; column += i64(gridDim.x) * kSide) {
#pragma unroll
      for (int k = y; k < kSide; k += kStep) {
        if (row + k >= p.rows || column + piece * kEach >= p.columns) continue;
        const u16* from = p.from + (row + k) * p.line + column + piece * kEach;
        *reinterpret_cast<uint4*>(tile + place(k, piece)) = *reinterpret_cast<const uint4*>(from);
      }
      __syncthreads();
#pragma unroll
      for (int n = y; n < kSide; n += kStep) {
        if (column + n >= p.columns || row + piece * kEach >= p.rows) continue;
        alignas(16) u16 down[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) down[i] = tile[place(piece * kEach + i, n / kEach) + n % kEach];
        u16* to = p.to + (column + n) * p.rows + row + piece * kEach;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(down);
      }
      __syncthreads();
    }
  }
}
