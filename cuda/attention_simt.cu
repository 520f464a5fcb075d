// O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j that query i sees
// The plain cores: any head size, dtype and strides. A CTA walks over tiles of queries; a warp computes one query at a
// time.
#include "common/attention.cuh"

constexpr int kWarps = 8;

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) attention_simt(const __grid_constant__ Attention a) {
  const int warp = threadIdx.x / 32;
  for (int t = blockIdx.x;; t += gridDim.x) {
    const Tile x = tile_at(a, t);
    if (x.head < 0) break;
    for (int row = x.row + warp; row < min(x.rows, x.row + kTileQ); row += kWarps) {
      Out* out = a.o + x.batch * a.o_strides.batch + x.head * a.o_strides.head + row * a.o_strides.row;
      const Sum lse = attend_row(a, x, row, [&](int d, Sum y) { out[d * a.o_strides.column] = Store<Out>::from(y); });
      if (a.lse && threadIdx.x % 32 == 0) a.lse[(i64(x.batch) * a.heads + x.head) * a.queries + row] = lse;
    }
  }
}
