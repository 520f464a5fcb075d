// Every element of each stored block, and back: kCsr by rows, in the order of the blocks; kCoo in the order of `data`;
// kFind: whether a matrix in CSR has full blocks alone, and which;  kFill: data of blocks from the values of a CSR matrix;
// kPut: to their places in a dense matrix;  kTake: data of blocks from the places that they have in a dense matrix
// Element (r, c) of the t-th of the n blocks of block row i is number (indptr[i] R + r n) C + t C + c in CSR, and row
// pointers follow from indptr alone: one launch, and nothing to count. A CTA takes `tile` neighbouring elements, of
// which a warp finds the block rows of the first and of the last 32 at a time. A thread finds the place of one in kPer
// elements, walks on to the others, and leaves them in shared memory, from where the warp copies neighbours together.
// Rows, blocks and columns are clamped, so that the result can be used whatever the index arrays say.
#include "common/arrivals.cuh"
#include "common/quotient.cuh"
#include "common/runs.cuh"

using T = ELEMENT_A;  // a type of the size of an element: elements are only moved
using Index = INDEX;
using To = TO;

enum Format { kCsr, kCoo, kFind, kFill, kPut, kTake };
constexpr Format kFormat = FORMAT;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPer = 8, kPart = 32 * kPer;  // elements of a thread, and of a warp, at a time
constexpr int kPitch = 34;  // words between the items that neighbouring lanes leave: no bank is asked for twice
constexpr int kCtas = sizeof(T) > 8 ? 3 : 4;  // CTAs per SM: leaves 80 or 64 registers per thread

struct BlockElements {
  T* data;          // (blocks, R, C), which kFill and kTake write
  Index* indices;   // (blocks,), which kFind writes
  Index* indptr;    // (block_rows + 1,), which kFind writes
  T* values;        // (elements,) in the order of the format; kCoo may have none;  kPut, kTake: the dense matrix
  To* rows;         // kCsr, kFind: row pointers (block_rows * R + 1,);  kCoo: (elements,)
  To* columns;      // (elements,)
  const i64* runs;  // kFill: the elements of each row of a block (blocks * R,); none if all blocks are full
  i64* found;       // kFind: elements that are not where those of full blocks are
  u32* wrong;       // the same, and CTAs that are done; zero before and after
  u32* arrived;
  i64 block_rows, block_cols, blocks, elements, tile;
  i64 row_stride, col_stride;  // kPut, kTake: in elements
  int R, C;
};
#ifdef BLOCK_ELEMENTS_BYTES
CHECK_LAYOUT(BlockElements, BLOCK_ELEMENTS, (data)(indices)(indptr)(values)(rows)(columns)(runs)(found)(wrong)(arrived)
             (block_rows)(block_cols)(blocks)(elements)(tile)(row_stride)(col_stride)(R)(C))
#endif

__device__ __forceinline__ i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// The number of the first element of a block row, by rows.
__device__ __forceinline__ i64 begin_of(const BlockElements& a, i64 i) {
  if constexpr (kFormat == kFind) return clamp(a.rows[i * a.R], 0, a.elements);
  return clamp(a.indptr[i], 0, a.blocks) * (i64(a.R) * a.C);
}

// The last block row from `low` on, and before `high`, that begins at or before an element.
__device__ __forceinline__ i64 row_with(const BlockElements& a, i64 element, i64 low, i64 high) {
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (begin_of(a, middle) <= element) low = middle;
    else high = middle;
  }
  return low;
}

// The same by all lanes of a warp together, in a fifth of the steps.
__device__ __forceinline__ i64 row_by_warp(const BlockElements& a, i64 element) {
  i64 low = 0, high = a.block_rows;
  while (high - low > 1) {
    const i64 step = (high - low + 31) / 32, probe = low + (lane_id() + 1) * step;
    const int before = __popc(__ballot_sync(0xffffffffu, probe < high && begin_of(a, probe) <= element));
    low += before * step;
    if (low + step < high) high = low + step;
  }
  return low;
}

// A block row that a thread has found, by rows.
struct Lines {
  i64 begin, length, block, r, rest;  // first element; elements of a line; first block; line, and place in it
};

__device__ __forceinline__ Lines lines_at(const BlockElements& a, i64 e, i64 low, i64 high) {
  const i64 i = row_with(a, e, low, high), begin = begin_of(a, i), end = begin_of(a, i + 1);
  Lines found = {begin, end > begin ? quotient(end - begin, a.R) : 0, 0, 0, -1};
  if (e < begin || u64(e - begin) >= u64(found.length) * u64(a.R)) return found;  // only if the arrays are not valid
  found.r = quotient(e - begin, found.length), found.rest = e - begin - found.r * found.length;
  if constexpr (kFormat == kFind) found.block = quotient(begin, i64(a.R) * a.C);
  else found.block = clamp(a.indptr[i], 0, a.blocks);
  return found;
}

__device__ __forceinline__ i64 column_of(const BlockElements& a, i64 block) {
  const i64 column = a.indices[block];
  return (in_range(column, a.block_cols) ? column : 0) * a.C;
}

// The first column of a block of which a line has element `at`, as the first line of its block row says. The first
// element of a block also writes down the block, and counts what is wrong with it.
__device__ __forceinline__ i64 look(const BlockElements& a, const Lines& x, i64 t, bool first, u32& wrong) {
  const i64 at = x.begin + t * a.C, column = a.columns[at];
  if (first) {
    const i64 block = quotient(column < 0 ? 0 : column, a.C);
    wrong += block * a.C != column || block >= a.block_cols || (t > 0 && i64(a.columns[at - a.C]) >= column);
    if (x.block + t < a.blocks) a.indices[x.block + t] = Index(block);
  }
  return column;
}

// kCsr, kFind: the places in `data`, and the columns, of the elements from e on.
__device__ __forceinline__ void leave_by_rows(const BlockElements& a, i64 e, int n, i64 low, i64 high, i64* sources,
                                              To* columns, u32& wrong) {
  Lines x = {0, 0, 0, 0, -1};
  i64 source = -1, column = 0, c = 0;
#pragma unroll 1
  for (int k = 0; k < n; ++k, ++e) {
    ++source, ++column, ++c;
    if (k == 0 || x.rest < 0 || c == a.C) {
      if (k == 0 || x.rest < 0 || x.rest + a.C >= x.length) {
        x = lines_at(a, e, low, high);
        c = x.rest < 0 ? 0 : x.rest - quotient(x.rest, a.C) * a.C;
        x.rest -= c;
      } else {
        x.rest += a.C, c = 0;
      }
      if (x.rest >= 0) {
        const i64 t = quotient(x.rest, a.C), block = x.block + t;
        source = (block * a.R + x.r) * a.C + c;
        column = (kFormat == kFind ? look(a, x, t, x.r == 0 && c == 0, wrong) : column_of(a, block)) + c;
      }
    }
    if constexpr (kFormat == kCsr) sources[k * kPitch] = x.rest < 0 ? -1 : source;
    columns[k * kPitch] = To(x.rest < 0 ? (kFormat == kFind ? -1 : 0) : column);
  }
}

// The rows of the elements of `data` from e on, or their places in `values`, and their columns.
__device__ __forceinline__ void leave_by_blocks(const BlockElements& a, i64 e, int n, i64 low, i64 high, i64* sources,
                                                To* columns) {
  const i64 size = i64(a.R) * a.C;
  i64 block = quotient(e, size), r = quotient(e - block * size, a.C), c = e - block * size - r * a.C;
  i64 i = low, from = 0, column = 0;
#pragma unroll 1
  for (int k = 0; k < n; ++k, ++c) {
    if (c == a.C) {
      c = 0;
      if (++r == a.R) r = 0, ++block;
    }
    if (k == 0 || c == 0) {
      if (k == 0 || r == 0) {
        if (kFormat != kFill || !a.runs) i = row_with(a, block * size, k == 0 ? low : i, high);
        column = column_of(a, block);
      }
      if constexpr (kFormat != kFill) {
        from = i * a.R + r;
      } else if (a.runs) {
        from = a.runs[block * a.R + r];
      } else {
        const i64 begin = begin_of(a, i), line = quotient(begin_of(a, i + 1) - begin, a.R);
        from = begin + r * line + (block - quotient(begin, size)) * a.C;
      }
    }
    if constexpr (kFormat == kFill) sources[k * kPitch] = a.runs ? from : from + c;
    else sources[k * kPitch] = kFormat == kCoo ? from : from * a.row_stride + (column + c) * a.col_stride;
    columns[k * kPitch] = To(column + c);
  }
}

// kFill: the value of element e of `data`, which lies at `source`, or in that run of elements if it is stored.
__device__ __forceinline__ T value_at(const BlockElements& a, i64 e, i64 source, To column) {
  if (!a.runs) return in_range(source, a.elements) ? a.values[source] : T{};
  const i64 c = e - quotient(e, a.C) * a.C, length = length_of_run(source);
  i64 low = first_of_run(source), high = low + (c < length ? c + 1 : length);  // columns are different, and in order
  if (low < 0 || high > a.elements) return T{};
  if (low < high && a.columns[high - 1] == column) return a.values[high - 1];  // mostly none is missing before it
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (a.columns[middle] == column) return a.values[middle];
    if (a.columns[middle] < column) low = middle + 1;
    else high = middle;
  }
  return T{};
}

// Copies the elements of a warp, whose places are left in shared memory; neighbouring lanes have neighbouring elements.
__device__ __forceinline__ void copy_part(const BlockElements& a, i64 first, i64 stop, const i64* sources,
                                          const To* columns, u32& wrong) {
  constexpr int kTogether = sizeof(T) > 8 ? 4 : kPer;  // loads that a thread has under way
#pragma unroll 1
  for (int from = 0; from < kPart && first + from < stop; from += 32 * kTogether) {
    T values[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int ahead = from + k * 32 + lane_id(), at = ahead % kPer * kPitch + ahead / kPer;
      const i64 e = first + ahead;
      if (e >= stop) continue;
      if constexpr (kFormat == kCsr) values[k] = sources[at] < 0 ? T{} : a.data[sources[at]];
      if constexpr (kFormat == kCoo) values[k] = a.values ? a.data[e] : T{};
      if constexpr (kFormat == kFill) values[k] = value_at(a, e, sources[at], columns[at]);
      if constexpr (kFormat == kFind) wrong += a.columns[e] != columns[at];
      if constexpr (kFormat == kPut) values[k] = a.data[e];
      if constexpr (kFormat == kTake) values[k] = a.values[sources[at]];
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int ahead = from + k * 32 + lane_id(), at = ahead % kPer * kPitch + ahead / kPer;
      const i64 e = first + ahead;
      if (kFormat == kFind || e >= stop) continue;
      if constexpr (kFormat == kFill || kFormat == kTake) {
        a.data[e] = values[k];
      } else if constexpr (kFormat == kPut) {
        a.values[sources[at]] = values[k];
      } else {
        if (kFormat == kCsr || a.values) a.values[e] = values[k];
        if constexpr (kFormat == kCoo) a.rows[e] = To(sources[at]);
        a.columns[e] = columns[at];
      }
    }
  }
}

// kCsr: writes the row pointers;  kFind: counts those that full blocks do not have, and writes indptr.
__device__ __forceinline__ void pointers(const BlockElements& a, u32& wrong) {
  const i64 lines = a.block_rows * a.R, stride = i64(gridDim.x) * kThreads;
  for (i64 x = blockIdx.x * i64(kThreads) + threadIdx.x; x <= lines; x += stride) {
    const i64 i = quotient(x, a.R), begin = x < lines ? begin_of(a, i) : a.elements;
    const i64 next = x < lines ? begin_of(a, i + 1) : begin, line = next > begin ? quotient(next - begin, a.R) : 0;
    const i64 pointer = begin + (x - i * a.R) * line;
    if constexpr (kFormat == kCsr) {
      a.rows[x] = To(pointer);
    } else {
      wrong += i64(a.rows[x]) != pointer || next < begin || quotient(line, a.C) * a.C != line || (x == 0 && pointer != 0);
      if (x == i * a.R) a.indptr[i] = Index(quotient(begin, i64(a.R) * a.C));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
block_elements(const __grid_constant__ BlockElements a) {
  __shared__ i64 smem_rows[2];
  __shared__ i64 smem_sources[kWarps][kPer * kPitch];
  __shared__ To smem_columns[kWarps][kPer * kPitch];
  const int warp = threadIdx.x / 32, lane = lane_id();
  const i64 total = a.blocks * (i64(a.R) * a.C);
  u32 wrong = 0;
  if constexpr (kFormat == kCsr || kFormat == kFind) pointers(a, wrong);
  for (i64 first = blockIdx.x * a.tile; first < total; first += gridDim.x * a.tile) {
    const i64 stop = first + a.tile < total ? first + a.tile : total;
    __syncthreads();
    if (warp < 2 && !(kFormat == kFill && a.runs)) smem_rows[warp] = row_by_warp(a, warp ? stop - 1 : first);
    __syncthreads();
    const i64 low = smem_rows[0], high = smem_rows[1] + 1;
    for (i64 part = first + warp * kPart; part < stop; part += kWarps * kPart) {
      const i64 own = part + lane * kPer;
      const int n = own >= stop ? 0 : stop - own < kPer ? int(stop - own) : kPer;
      i64* sources = smem_sources[warp] + lane;
      To* columns = smem_columns[warp] + lane;
      if constexpr (kFormat == kCsr || kFormat == kFind) leave_by_rows(a, own, n, low, high, sources, columns, wrong);
      else leave_by_blocks(a, own, n, low, high, sources, columns);
      __syncwarp();
      copy_part(a, part, stop, smem_sources[warp], smem_columns[warp], wrong);
      __syncwarp();
    }
  }
  if constexpr (kFormat == kFind) {
    if (wrong) atomicAdd(a.wrong, 1u);
    if (arrives_last(a.arrived) && threadIdx.x == 0) *a.found = i64(atomicAdd(a.wrong, 0u)), *a.wrong = 0;
  }
}
