// dQ[i] = round(scale * sums[i])
// A CTA has a piece of 64 queries. Its sums lie as the threads of the main kernel held them: 8 columns after 8 columns,
// or with LINES each number of a fragment in a line of 32 lanes. Rounded numbers pass through shared memory and leave
// 16 bytes at a time where the result is aligned. A row that is not finite is computed again by a warp, key by key,
// from what the query sees: 0 x Inf is NaN, and a tile is multiplied whole. Memory is the limit.
#include "common/attention_backward_sm90.cuh"

constexpr int kThreads = 256, kPitch = kDim / 2 + 4;  // words of a row in shared memory

// A CTA has one piece of a tile of queries.
extern "C" __global__ void __launch_bounds__(kThreads, LINES ? 2 : 0)
attention_backward_end(const __grid_constant__ BackwardRows p) {
  __shared__ uint4 memory[16 * kPitch];
  __shared__ int bad[64];
  __shared__ Statistic own[64];
  u32* staged = reinterpret_cast<u32*>(memory);
  const Backward& b = p.backward;
  const Attention& a = b.attention;
  const Tile x = tile_at(a, blockIdx.x / kPieces);
  const int first = x.row + blockIdx.x % kPieces * 64;
  if (x.head < 0 || first >= x.rows) return;
  const int thread = threadIdx.x, half = thread / 128, t = thread % 128, lane = t % 32;
  const int begin = a.q_bounds ? clamp(a.q_bounds[sequence_of(a, x.row)], 0, x.row) : 0;
  const i64 piece = (i64(x.batch) * a.heads + x.head) * p.padded + piece_of(a, p.padded, begin, first);
  // The four numbers of a lane are neighbours, or each has its line of 32 lanes.
  const f32* lines = p.sums + piece * kSumsOfPiece + half * (kSumsOfPiece / 2) + (LINES ? t / 32 * 128 + lane : 4 * t);
  if (thread < 64) bad[thread] = 0;
  __syncthreads();
  const int row = t / 32 * 16 + lane / 4, word = half * (kDim / 4) + lane % 4;
  f32 upper = 0.f, lower = 0.f;
#pragma unroll
  for (int j = 0; j < kDim / 16; ++j) {
    // Nobody has added to a tile that sees no key.
    const bool seen = x.first < x.last;
    const f32* from = lines + j * 512;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    if (seen) y = LINES ? make_float4(from[0], from[32], from[64], from[96]) : *reinterpret_cast<const float4*>(from);
    y.x *= b.factor, y.y *= b.factor, y.z *= b.factor, y.w *= b.factor;
    upper = fmaf(y.x, 0.f, fmaf(y.y, 0.f, upper)), lower = fmaf(y.z, 0.f, fmaf(y.w, 0.f, lower));
    staged[row * kPitch + j * 4 + word] = pack<Element>(y.x, y.y);
    staged[(row + 8) * kPitch + j * 4 + word] = pack<Element>(y.z, y.w);
  }
  if (upper != 0.f) bad[row] = 1;
  if (lower != 0.f) bad[row + 8] = 1;
  if (thread < 64) own[thread] = {p.logarithms[piece * 64 + place_of(thread)], p.deltas[piece * 64 + place_of(thread)]};
  __syncthreads();
  Element* out = at(b.dq, b.dq_strides, x.batch, x.head, first);
  const bool aligned =
      b.dq_strides.column == 1 && ((reinterpret_cast<u64>(out) | u64(b.dq_strides.row) * sizeof(Element)) & 15) == 0;
  for (int i = thread; i < 64 * (kDim / 8); i += kThreads) {
    const int line = i / (kDim / 8), column = i % (kDim / 8) * 8, columns = a.head_dim - column;
    if (first + line >= x.rows || columns <= 0) continue;
    const u32* from = staged + line * kPitch + column / 2;
    Element* to = out + line * b.dq_strides.row + column * b.dq_strides.column;
    if (aligned && columns >= 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    else
      for (int d = 0; d < min(columns, 8); ++d)
        to[d * b.dq_strides.column] = reinterpret_cast<const Element*>(from)[d];
  }
  __syncthreads();
  for (int line = thread / 32; line < min(64, x.rows - first); line += kThreads / 32)
    if (bad[line]) write_query(b, x, first + line, own[line]);
}
