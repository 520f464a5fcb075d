// kElements: out[i] = A[i + below, i + above];  kBlocks: out[i] = block (i, i) of A, transposed if `turned`
// kFind: missing += 1 for every such element whose block is not stored;  kSet: A[i + below, i + above] = out[i]
// A thread has an element. It searches its block row by halving if the matrix is in canonical format; otherwise it reads
// the whole row and adds up what is stored several times, in the order in which it is stored. Nothing is sorted, and the
// host need not know what is stored: there is no wait. Rows and blocks are clamped, whatever the index arrays say.
#include "common/quotient.cuh"

using T = ELEMENT_A;
using Acc = ACCUMULATOR;
using Index = INDEX;

enum Operation { kElements, kBlocks, kFind, kSet };
constexpr Operation kOperation = OPERATION;
constexpr int kThreads = 128;
constexpr int kCtas = 4;  // CTAs per SM: leaves 128 registers per thread, so that ptxas does not spill for occupancy

struct Diagonal {
  T* data;               // (blocks, R, C)
  const Index* indices;  // (blocks,)
  const Index* indptr;   // (rows + 1,)
  T* out;                // (count,); (1,) for kSet if `single`
  u8* stored;            // kBlocks: (count / (R * C),), whether the block is stored
  u64* missing;          // kFind: a single number, zero before
  i64 rows, blocks, count, below, above;
  int R, C, canonical, turned, single;
};
#ifdef DIAGONAL_BYTES
CHECK_LAYOUT(Diagonal, DIAGONAL, (data)(indices)(indptr)(out)(stored)(missing)(rows)(blocks)(count)(below)(above)
             (R)(C)(canonical)(turned)(single))
#endif

// An element: its block row and block column, and its place in the block.
struct Place { i64 row, column, within; };

__device__ __forceinline__ Place place_of(const Diagonal& a, i64 i) {
  if constexpr (kOperation == kBlocks) {
    const i64 size = i64(a.R) * a.C, block = quotient(i, size), within = i - block * size, c = quotient(within, a.R);
    return {block, block, a.turned ? (within - c * a.R) * a.C + c : within};
  }
  const i64 row = i + a.below, column = i + a.above, down = quotient(row, a.R), across = quotient(column, a.C);
  return {down, across, (row - down * a.R) * a.C + column - across * a.C};
}

__device__ __forceinline__ Range row_of(const Diagonal& a, i64 row) {
  return row < a.rows ? blocks_of_row(a.indptr, row, a.blocks) : Range{0, 0};
}

// The block in a column of a row in order; -1 if it is not stored.
__device__ __forceinline__ i64 find(const Diagonal& a, Range row, i64 column) {
  i64 low = row.first, high = row.last;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (i64(a.indices[middle]) < column) low = middle + 1;
    else high = middle;
  }
  return low < row.last && i64(a.indices[low]) == column ? low : -1;
}

// The sum of an element over the blocks in a column of a row; a value that is stored once is not converted.
__device__ __forceinline__ T sum(const Diagonal& a, Range row, const Place& place, bool& stored) {
  const i64 size = i64(a.R) * a.C;
  T first = {};
  Acc acc = zero<Acc>();
  int several = 0;
  for (i64 p = row.first; p < row.last; ++p) {
    if (i64(a.indices[p]) != place.column) continue;
    const T value = a.data[p * size + place.within];
    if (several == 0) first = value;
    acc = several ? add(acc, load<Acc>(value)) : load<Acc>(value);
    several = several ? 2 : 1;
  }
  stored = several;
  return several == 2 ? Store<T>::from(acc) : first;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) diagonal(const __grid_constant__ Diagonal a) {
  const i64 stride = i64(gridDim.x) * kThreads, size = i64(a.R) * a.C;
  u64 missing = 0;
  for (i64 i = blockIdx.x * i64(kThreads) + threadIdx.x; i < a.count; i += stride) {
    const Place place = place_of(a, i);
    const Range row = row_of(a, place.row);
    if constexpr (kOperation == kElements || kOperation == kBlocks) {
      T value = {};
      bool stored = false;
      if (a.canonical) {
        const i64 p = find(a, row, place.column);
        stored = p >= 0;
        if (stored) value = a.data[p * size + place.within];
      } else {
        value = sum(a, row, place, stored);
      }
      a.out[i] = value;
      if (kOperation == kBlocks && i % size == 0) a.stored[i / size] = stored;
    } else {
      const i64 p = find(a, row, place.column);
      if constexpr (kOperation == kFind) missing += p < 0;
      else if (p >= 0) a.data[p * size + place.within] = a.out[a.single ? 0 : i];
    }
  }
  if (kOperation == kFind && missing) atomicAdd(a.missing, missing);
}
