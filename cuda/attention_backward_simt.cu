// dV[j] = sum_i p[i, j] dO[i]     dK[j] = scale * sum_i ds[i, j] Q[i]     dQ[i] = scale * sum_j ds[i, j] K[j]
// Gradients of attention on the CUDA cores: any head size, dtype and strides. One launch computes dQ, another one dK
// and dV. A CTA walks over tiles of 64 queries or keys; a warp computes the gradients of one of them at a time, its
// lanes share the columns, and sums are always made in the same order. What is not seen is not read. It is there to be
// right: each pair of query and key costs two sums over the warp.
#include "common/attention_backward.cuh"

constexpr int kWarps = 8;
// Long rows take more than half of the registers of a multiprocessor.
constexpr int kCtas = kHeadDim + kValueDim > 256 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(32 * kWarps, kCtas)
attention_backward_simt(const __grid_constant__ Backward b) {
  const Attention& a = b.attention;
  const int warp = threadIdx.x / 32;
  for (int t = blockIdx.x;; t += gridDim.x) {
    if constexpr (kByKeys) {
      const KeyTile y = key_tile_at(a, t);
      if (y.tile.head < 0) break;
      for (int key = y.key + warp; key < min(y.tile.keys, y.key + kTileK); key += kWarps) write_key(b, y, key);
    } else {
      const Tile x = tile_at(a, t);
      if (x.head < 0) break;
      for (int row = x.row + warp; row < min(x.rows, x.row + kTileQ); row += kWarps) write_query(b, x, row);
    }
  }
}
