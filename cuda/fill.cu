// to[k / wide, m, k % wide] = A[m, k], zero where A stores nothing: A filled up, in blocks as high as the matrix
// For products of small or odd blocks, which a dense product on the tensor cores computes sooner. A CTA has some rows
// of a block row and a window of its block columns: it writes zeros in whole lines, waits, and writes the blocks, which
// are still in the L2. A block that is stored twice cannot be copied: where a bit of the window is set twice, the CTA
// says so in `twice`, and the kernel `mend` computes the block row. WORD is the size of what is copied, one element or
// some neighbours; all lengths and strides are in words. Bound by bytes.
#include "common/bsr.cuh"
#include "common/words.cuh"

using Word = WordOf<WORD>::Type;
using Index = INDEX;

constexpr int kThreads = 256;
constexpr int kMostWindow = 4096;  // block columns of a window

struct Fill {
  const Word* data;      // (blocks, R, K), or (blocks, K, R) for a transpose
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (block_rows + 1,)
  const int* places;     // for a transpose: entry of the index -> block of `data`; otherwise null
  Word* to;              // (columns / wide, block_rows * R, line)
  u8* twice;             // (block_rows, parts, windows): whether a block of this part is stored twice
  i64 block_rows, block_cols, blocks, wide, line;
  int R, K;
  int high, parts;      // rows of a part of a block row, and how many parts it has
  int window, windows;  // block columns of a window, and how many windows there are
  int lanes;            // threads for a block, a power of two
};
#ifdef FILL_BYTES
CHECK_LAYOUT(Fill, FILL, (data)(indices)(indptr)(places)(to)(twice)(block_rows)(block_cols)(blocks)(wide)(line)(R)(K)
             (high)(parts)(window)(windows)(lanes))
#endif

constexpr int kUnit = 16 / int(sizeof(Word));  // elements of a store of zeros; no column of 16 bytes is in two blocks
constexpr int kAhead = 4;  // blocks of a group of lanes that are under way together

// Grid: block rows, parts of a block row times windows. CTAs go on where the grid ends.
extern "C" __global__ void __launch_bounds__(kThreads) fill(const __grid_constant__ Fill p) {
  __shared__ u32 seen[kMostWindow / 32];
  __shared__ int again;
  const int columns = int(p.block_cols) * p.K, wide = int(p.wide);
  for (i64 i = blockIdx.x; i < p.block_rows; i += gridDim.x)
  for (int at = blockIdx.y; at < p.parts * p.windows; at += gridDim.y) {
    const int top = at / p.windows * p.high, rows = min(p.high, p.R - top);
    const int left = at % p.windows * p.window, right = int(min(p.block_cols, i64(left) + p.window));  // block columns
    // The line of a row begins here, without the lines of all rows in the blocks of columns before.
    const i64 all = p.block_rows * p.R * p.line, line = (i * p.R + top) * p.line;
    for (int word = threadIdx.x; word < kMostWindow / 32; word += kThreads) seen[word] = 0;
    if (threadIdx.x == 0) again = 0;
    // What a line has beyond the matrix belongs to the last window.
    const int begin = left * p.K, end = right * p.K == columns ? columns + int(p.line - wide) : right * p.K;
    for (int r = threadIdx.x / 32; r < rows; r += kThreads / 32)
      for (int k = begin / kUnit * kUnit + threadIdx.x % 32 * kUnit; k < end; k += 32 * kUnit) {
        const int of = min(k, columns - 1) / wide;
        Word* to = p.to + of * all + line + r * p.line + (k - of * wide);
        if (k >= begin && k + kUnit <= end) *reinterpret_cast<int4*>(to) = int4{};
        else
          for (int e = max(0, begin - k); e < min(kUnit, end - k); ++e) to[e] = Word{};
      }
    __syncthreads();

    // A group of lanes has kAhead entries, and its lanes have elements of these blocks.
    const Range stored = blocks_of_row(p.indptr, i, p.blocks);
    const int lane = threadIdx.x % p.lanes, size = rows * p.K, groups = kThreads / p.lanes;
    for (i64 first = stored.first + threadIdx.x / p.lanes; first < stored.last; first += kAhead * groups) {
      const Word* from[kAhead];
      int column[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const i64 entry = first + j * groups, found = entry < stored.last ? p.indices[entry] : -1;
        const i64 block = found < 0 || p.places == nullptr ? entry : p.places[entry];
        const bool here = found >= left && found < right && u64(block) < u64(p.blocks);
        column[j] = here ? int(found) : -1;
        from[j] = p.data + block * p.R * p.K + (p.places == nullptr ? top * p.K : top);
      }
      for (int at = lane; at < size; at += p.lanes) {
        const int r = at / p.K, k = at - r * p.K, offset = p.places == nullptr ? at : k * p.R + r;
        Word words[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          if (column[j] >= 0) words[j] = from[j][offset];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int x = column[j] * p.K + k, of = x / wide;
          if (column[j] >= 0) p.to[of * all + line + r * p.line + (x - of * wide)] = words[j];
        }
      }
      if (lane > 0) continue;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int bit = column[j] - left;
        if (column[j] >= 0 && atomicOr(&seen[bit / 32], 1u << bit % 32) >> bit % 32 & 1) again = 1;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.twice[i * (p.parts * p.windows) + at] = u8(again);
    __syncthreads();
  }
}
