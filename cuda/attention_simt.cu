// O[i] = sum_j softmax_j(scale * Q[i] . K[j]) V[j] over the keys j that query i sees
// The CUDA cores: any head size, dtype and strides. CTAs of 8 warps walk over tiles of 128 queries; a warp computes one
// query at a time, its lanes share the columns, and for each key that is seen it rescales if row_max rises, then adds.
// A key that is not seen is not read. It is there to be right: float32 and float64 have no other kernel, and the
// tensor-core kernels do rows again by the same function.
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
