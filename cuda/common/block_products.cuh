// From the number of a block of the result to its block row.
#pragma once

#include "common/types.cuh"

// The last row r below `rows` with starts[r] <= block, found by a whole warp. The search begins at `near`, the block
// row of an earlier block that should not be far away, or 0.
template <class Index>
__device__ __forceinline__ i64 block_row_of(const Index* starts, i64 rows, i64 block, i64 near) {
  const int lane = threadIdx.x % 32;
  const auto before = [&](i64 row) { return row < rows && i64(starts[row]) <= block; };
  const int more = __popc(__ballot_sync(0xffffffffu, before(near + 1 + lane)));
  if (more < 32) return near + more;
  i64 low = near + 32, high = rows;
  while (high - low > 1) {
    const i64 step = (high - low + 31) / 32, row = low + (lane + 1) * step;
    low += __popc(__ballot_sync(0xffffffffu, row < high && before(row))) * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}
