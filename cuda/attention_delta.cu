// statistics[i] = {lse[i] * log2(e), dO[i] . O[i] - dlse[i]}     infinite instead of lse[i] if query i sees nothing
// What attention_backward_sm80 and attention_backward_simt need of each query. A group of 8 lanes has a query of a
// head; any strides and dtypes; sums in float32, or in float64 for float64. A given `delta` takes the place of dO . O,
// and O is not read. Memory is the limit.
#include "common/layout.cuh"
#include "ptx/convert.cuh"

using Sum = SUM;
using Gradient = ELEMENT_DO;
using Out = ELEMENT_O;

constexpr int kThreads = 256;

struct alignas(2 * sizeof(Sum)) Statistic { Sum lse, delta; };
struct AttentionDelta {
  const Gradient* dout;
  const Out* out;
  const Sum *lse, *dlse, *delta;  // (batches, heads, queries); dlse may be null; delta replaces dO . O if it is not null
  Statistic* to;
  i64 dout_batch, dout_head, dout_row, dout_column, out_batch, out_head, out_row, out_column;  // strides in elements
  i64 rows;                       // batches * heads * queries
  int heads, queries, columns;
};
#ifdef ATTENTION_DELTA_BYTES
CHECK_LAYOUT(AttentionDelta, ATTENTION_DELTA, (dout)(out)(lse)(dlse)(delta)(to)(dout_batch)(dout_head)(dout_row)
             (dout_column)(out_batch)(out_head)(out_row)(out_column)(rows)(heads)(queries)(columns))
#endif

// A group of 8 lanes has a row.
extern "C" __global__ void __launch_bounds__(kThreads) attention_delta(const __grid_constant__ AttentionDelta p) {
  const int lane = threadIdx.x % 8;
  for (i64 first = i64(blockIdx.x) * (kThreads / 8); first < p.rows; first += i64(gridDim.x) * (kThreads / 8)) {
    const i64 row = first + threadIdx.x / 8;
    Sum sum = 0;
    if (row < p.rows && !p.delta) {
      const i64 i = row % p.queries, head = row / p.queries % p.heads, batch = row / p.queries / p.heads;
      const Gradient* dout = p.dout + batch * p.dout_batch + head * p.dout_head + i * p.dout_row;
      const Out* out = p.out + batch * p.out_batch + head * p.out_head + i * p.out_row;
#pragma unroll 4
      for (int d = lane; d < p.columns; d += 8)
        sum += load<Sum>(dout[d * p.dout_column]) * load<Sum>(out[d * p.out_column]);
    }
#pragma unroll
    for (int i = 4; i; i /= 2) sum += shuffle_xor(sum, i);
    if (row < p.rows && lane == 0) {
      const Sum lse = p.lse[row], infinity = Sum(__int_as_float(0x7f800000));
      if (p.delta) sum = p.delta[row];
      if (p.dlse) sum -= p.dlse[row];
      p.to[row] = {lse == -infinity ? infinity : lse * Sum(1.4426950408889634074), sum};
    }
  }
}
