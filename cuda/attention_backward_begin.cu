// statistics[i] = {lse[i] * log2(e), dO[i] . O[i] - dlse[i]};   sums of dQ = 0, unless they are made in order
// Prepares the gradients of attention in one pass: the statistics of each query, in pieces of 64 queries. The logarithm
// of a query that sees nothing becomes infinite, so that its weights are 0.
// A CTA has a piece; 16 lanes share the columns of a query, 16 bytes each where dO and O are aligned. The statistics of
// queries 8 j + 2 c and 8 j + 2 c + 1, which a thread of the main kernel needs together, lie together, and threads of
// different c read different banks. A tile never has queries of two sequences: tile m of sequence s, which begins at
// query b, has number ceil(b / kTileQ) + s + m. Memory is the limit; with sums in order nobody has to write zeros,
// since the first contribution is stored.
#include "common/attention_backward_sm90.cuh"

using Result = ELEMENT_R;  // of the forward pass
constexpr int kThreads = 256;

template <class T> __device__ __forceinline__ f32 dot(const Out* x, const T* y, const Strides& of_x, const Strides& of_y,
                                                      int columns) {
  f32 sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < columns) sum += load<f32>(x[i * of_x.column]) * load<f32>(y[i * of_y.column]);
  return sum;
}
// The same for 8 elements of 16 bits each that are contiguous and aligned.
__device__ __forceinline__ f32 dot_16(const void* x, const void* y) {
  const uint4 a = *reinterpret_cast<const uint4*>(x), b = *reinterpret_cast<const uint4*>(y);
  const auto pair = [](u32 p, u32 q) {
    return low_of<Element>(p) * low_of<Element>(q) + high_of<Element>(p) * high_of<Element>(q);
  };
  return pair(a.x, b.x) + pair(a.y, b.y) + pair(a.z, b.z) + pair(a.w, b.w);
}

// Grid: pieces of a head, heads of all batches. 16 lanes have a row.
extern "C" __global__ void __launch_bounds__(kThreads) attention_backward_begin(const __grid_constant__ BackwardRows p) {
  const Backward& b = p.backward;
  const Attention& a = b.attention;
  const int piece = blockIdx.x, batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads, thread = threadIdx.x;
  const i64 number = i64(blockIdx.y) * p.padded + piece;
  if constexpr (!ORDERED) {
    float4* sums = reinterpret_cast<float4*>(p.sums + number * kSumsOfPiece);
#pragma unroll
    for (int i = 0; i < kSumsOfPiece / 4; i += kThreads) sums[i + thread] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (thread == 0) p.turns[number] = 0;
  int first = piece * 64, rows = a.queries;
  if (a.q_bounds) {
    const auto tile_of = [](int begin) { return (begin + kTileQ - 1) / kTileQ; };
    const int tile = piece / kPieces;
    int low = 0, high = a.sequence_count;  // the last sequence whose tiles begin at or before this one
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tile_of(clamp(a.q_bounds[middle], 0, a.queries)) + middle <= tile ? low : high) = middle;
    }
    const int begin = clamp(a.q_bounds[low], 0, a.queries);
    rows = clamp(a.q_bounds[low + 1], begin, a.queries);
    first = begin + (tile - tile_of(begin) - low) * kTileQ + piece % kPieces * 64;
    if (first < begin) rows = 0;
  }
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int i = pass * 16 + thread / 16, row = first + i;
    f32 sum = 0.f;
#pragma unroll
    for (int from = 0; from < kDim; from += 128) {
      const int column = from + thread % 16 * 8;
      if (row < rows && !p.delta && column < a.value_dim) {
        const Out* dout = at(b.dout, b.dout_strides, batch, head, row) + column * b.dout_strides.column;
        const Result* out = at(reinterpret_cast<const Result*>(p.out), p.out_strides, batch, head, row) +
                            column * p.out_strides.column;
        const bool aligned = Same<Result, Element>::value && b.dout_strides.column == 1 && p.out_strides.column == 1 &&
                             column + 8 <= a.value_dim &&
                             ((reinterpret_cast<u64>(dout) | reinterpret_cast<u64>(out)) & 15) == 0;
        const f32 part = aligned ? dot_16(dout, out) : dot(dout, out, b.dout_strides, p.out_strides, a.value_dim - column);
        sum = from ? sum + part : part;
      }
    }
#pragma unroll
    for (int m = 8; m; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (thread % 16 == 0) {
      const f32 infinity = __int_as_float(0x7f800000);
      f32 lse = infinity, delta = 0.f;
      if (row < rows) {
        const i64 of = i64(blockIdx.y) * a.queries + row;
        lse = p.lse[of] == -infinity ? infinity : p.lse[of] * 1.4426950408889634f;
        delta = (p.delta ? p.delta[of] : sum) - (p.dlse ? p.dlse[of] : 0.f);
      }
      p.logarithms[number * 64 + place_of(i)] = lse;
      p.deltas[number * 64 + place_of(i)] = delta;
    }
  }
}
