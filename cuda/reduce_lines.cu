// out[l] = OPERATION over the stored elements of line l: a row of a matrix, or a column by the list of its blocks
// kCount counts the elements other than zero. A line without an element is 0; elements that are not stored join an
// extreme as one 0, unless `only_stored`.
// kLanes lanes of a warp share a line. Neighbouring threads have neighbouring lines, whose elements lie together in
// each block, and a lane walks over every kLanes-th element of its line, kUnroll loads at a time. The order of a sum
// follows from the pattern and kLanes alone: each lane from left to right, then one fixed tree. Blocks and entries are
// clamped. Bytes are the limit.
#include "common/extremes.cuh"
#include "common/zeros.cuh"

using T = ELEMENT_A;
using Out = ELEMENT_C;
using Acc = ACCUMULATOR;
using Index = INDEX;

constexpr Operation kOperation = OPERATION;
constexpr int kLanes = LANES;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread
constexpr int kUnroll = 4;
constexpr int kWarpLines = 32 / kLanes, kLines = kThreads / kLanes;
static_assert(32 % kLanes == 0, "the lanes of a line must not straddle warps");

struct ReduceLines {
  const T* data;        // (blocks, R, C)
  const Index* places;  // entry of the list -> block; null: block rows as they are stored
  const Index* starts;  // (groups + 1,), where the entries of each block row or block column begin
  Out* out;             // (groups * side,)
  i64 groups, entries, blocks;
  i64 length;           // elements of a line, with those that are not stored
  int side, width;      // lines of a block, and elements of each
  int line_step, step;  // from one line of a block to the next, and from one element to the next
  int only_stored;
};
#ifdef REDUCE_LINES_BYTES
CHECK_LAYOUT(ReduceLines, REDUCE_LINES, (data)(places)(starts)(out)(groups)(entries)(blocks)(length)(side)(width)
             (line_step)(step)(only_stored))
#endif


template <class N> __device__ __forceinline__ Acc taken(N x) {
  if constexpr (kOperation == kCount) return Acc(!is_zero(x));
  else return load<Acc>(x);
}

struct Sum { Acc value; bool any; };  // of no elements yet, or of some
__device__ __forceinline__ Sum join(Sum a, Sum b) {
  if (!a.any || !b.any) return a.any ? a : b;
  return {joined<kOperation>(a.value, b.value), true};
}

// The elements of a line that a lane takes, from left to right.
__device__ __forceinline__ Sum walk(const ReduceLines& a, Range range, i64 within, int lane) {
  const i64 size = i64(a.side) * a.width, offset = within * a.line_step;
  const int blocks_ahead = kLanes / a.width, elements_ahead = kLanes % a.width;
  Sum sum = {zero<Acc>(), false};
  i64 k = range.first + lane / a.width;
  int w = lane % a.width;
  while (k < range.last) {
    Sum next[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      next[u] = {zero<Acc>(), false};
      if (k < range.last) {
        const i64 p = a.places ? i64(a.places[k]) : k;
        if (in_range(p, a.blocks)) next[u] = {taken(a.data[p * size + offset + i64(w) * a.step]), true};
      }
      k += blocks_ahead, w += elements_ahead;
      if (w >= a.width) w -= a.width, ++k;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum = join(sum, next[u]);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) reduce_lines(const __grid_constant__ ReduceLines a) {
  const int lane = lane_id() / kWarpLines;
  const i64 lines = a.groups * a.side, own = threadIdx.x / 32 * kWarpLines + lane_id() % kWarpLines;
  // All threads of a warp make the same rounds, since they exchange values.
  for (i64 first = blockIdx.x * i64(kLines); first < lines; first += i64(gridDim.x) * kLines) {
    const i64 line = first + own, group = line < lines ? line / a.side : 0;
    Range range = {0, 0};
    if (line < lines) range = blocks_of_row(a.starts, group, a.entries);
    Sum sum = walk(a, range, line - group * a.side, lane);
#pragma unroll
    for (int mask = kWarpLines; mask < 32; mask *= 2) {
      const Sum other = {shuffle_xor(sum.value, mask), bool(__shfl_xor_sync(0xffffffffu, int(sum.any), mask))};
      sum = (lane_id() & mask) ? join(other, sum) : join(sum, other);  // both partners join them in the same order
    }
    if (line >= lines || lane) continue;
    if (kOperation == kAdd) sum.value = add(sum.value, zero<Acc>());  // a sum of -0 is 0
    if (kOperation != kAdd && kOperation != kCount && !a.only_stored && sum.any)
      if ((range.last - range.first) * a.width < a.length) sum.value = joined<kOperation>(sum.value, zero<Acc>());
    a.out[line] = sum.any ? Store<Out>::from(sum.value) : Out{};
  }
}
