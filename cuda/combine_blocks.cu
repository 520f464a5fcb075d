// data[t] = OPERATION(a[left[t]], b[right[t]]), where a block that one of them lacks (-1) is zero;  kFirst: data[t] =
// a[left[t]], transposed if `turned`. Without lists, t is block t of both. Index arrays follow: indices[t] from those of
// a (kFirst, or the same pattern), and indptr[i] = the first t whose blocks lie in row i or behind it, if `listed`; both
// may be moved by a number, so that some rows of a matrix, or several matrices, become another matrix.
// A CTA takes `tile` blocks, and its threads their elements one by one, wherever blocks begin. It marks the blocks in
// which an element is not zero, and counts them. 16-bit floats are computed in float32 and rounded once, which is what
// an operation in 16 bits gives. What lists say is clamped. Bytes are the limit.
#include "common/arrivals.cuh"
#include "common/zeros.cuh"

using T = ELEMENT_A;
using Out = ELEMENT_C;
using Acc = ACCUMULATOR;
using Index = INDEX;

enum Operation { kFirst, kAdd, kSubtract, kMultiply, kMaximum, kMinimum, kNotEqual, kLess, kGreater };
constexpr Operation kOperation = OPERATION;
constexpr int kThreads = 256;
constexpr int kCtas = 4;  // CTAs per SM: leaves 64 registers per thread
constexpr int kMostTile = 2048;

struct CombineBlocks {
  const T *a, *b;               // (a_blocks, size) and (b_blocks, size)
  const Index *left, *right;    // blocks of either, or -1; null for the same pattern, `right` for kFirst too
  const Index *a_ptr, *b_ptr;   // (rows + 1,); b_ptr null if `right` is
  const Index* a_indices;       // (a_blocks,); null if the columns are known already
  Out* data;                    // (blocks, size)
  Index *indices, *indptr;      // (blocks,) and (rows + 1,)
  u8* nonzero;                  // (blocks,), whether an element of a block is not zero; not for kFirst
  i64* found;                   // {blocks, those with an element that is not zero}; not for kFirst, nor the next two
  u64* nonzeros;                // how many of the latter there are; zero before and after
  int* arrived;                 // CTAs that have arrived; zero before and after
  const i64* count;             // how many blocks there are, at most `blocks`; null for all of them
  i64 blocks, a_blocks, b_blocks, rows;
  i64 column_shift, block_shift;  // added to what comes from a_indices and from a_ptr
  int size, tile;               // elements of a block; blocks of a tile, at most kMostTile
  int listed;                   // whether indptr is to be found in the lists; otherwise it is a_ptr
  int turned;                   // rows of a block of a that is to be transposed, or 0
};
#ifdef COMBINE_BLOCKS_BYTES
CHECK_LAYOUT(CombineBlocks, COMBINE_BLOCKS, (a)(b)(left)(right)(a_ptr)(b_ptr)(a_indices)(data)(indices)(indptr)(nonzero)
             (found)(nonzeros)(arrived)(count)(blocks)(a_blocks)(b_blocks)(rows)
             (column_shift)(block_shift)(size)(tile)(listed)(turned))
#endif


template <class N> __device__ __forceinline__ N difference(N x, N y) { return x - y; }
template <class Real> __device__ __forceinline__ Complex<Real> difference(Complex<Real> x, Complex<Real> y) {
  return {x.re - y.re, x.im - y.im};
}
template <class N> __device__ __forceinline__ N product(N x, N y) { return x * y; }
template <class Real> __device__ __forceinline__ Complex<Real> product(Complex<Real> x, Complex<Real> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
__device__ __forceinline__ boolean product(boolean x, boolean y) { return {u8(x.value & y.value)}; }
template <class N> __device__ __forceinline__ bool differ(N x, N y) { return number(x) != number(y); }
template <class Real> __device__ __forceinline__ bool differ(Complex<Real> x, Complex<Real> y) {
  return x.re != y.re || x.im != y.im;
}
template <class N> __device__ __forceinline__ bool less(N x, N y) { return number(x) < number(y); }

template <class N> __device__ __forceinline__ N truth(bool x) { return N{u8(x)}; }
// Whether the first of two numbers is their extreme, as NumPy has it: NaN is, and the first of equal ones.
template <class N> __device__ __forceinline__ bool comes_first(N x, N y, bool beaten) {
  return differ(x, x) || !(differ(y, y) || beaten);
}

template <class N> __device__ __forceinline__ Out combine(N x, N y) {
  if constexpr (kOperation == kFirst) return Store<Out>::from(x);
  else if constexpr (kOperation == kAdd) return Store<Out>::from(add(x, y));
  else if constexpr (kOperation == kSubtract) return Store<Out>::from(difference(x, y));
  else if constexpr (kOperation == kMultiply) return Store<Out>::from(product(x, y));
  else if constexpr (kOperation == kMaximum) return Store<Out>::from(comes_first(x, y, less(x, y)) ? x : y);
  else if constexpr (kOperation == kMinimum) return Store<Out>::from(comes_first(x, y, less(y, x)) ? x : y);
  else if constexpr (kOperation == kNotEqual) return truth<Out>(differ(x, y));
  else if constexpr (kOperation == kLess) return truth<Out>(less(x, y));
  else return truth<Out>(less(y, x));
}

// A block of either matrix, or -1.
__device__ __forceinline__ i64 block_of(const Index* list, i64 t, i64 blocks) {
  const i64 block = list ? i64(list[t]) : t;
  return in_range(block, blocks) ? block : -1;
}

// Where an element of a block comes from.
__device__ __forceinline__ u32 source_of(const CombineBlocks& c, u32 within) {
  if (kOperation != kFirst || !c.turned) return within;
  return within % c.turned * (c.size / c.turned) + within / c.turned;
}

// The first block whose blocks of a and b lie in a row or behind it.
__device__ __forceinline__ i64 first_of_row(const CombineBlocks& c, i64 row, i64 count) {
  const i64 a_first = c.a_ptr[row], b_first = c.b_ptr ? i64(c.b_ptr[row]) : 0;
  i64 low = 0, high = count;
  while (low < high) {
    const i64 middle = (low + high) / 2, block = c.left[middle];
    if (block >= 0 ? block >= a_first : i64(c.right[middle]) >= b_first) high = middle;
    else low = middle + 1;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
combine_blocks(const __grid_constant__ CombineBlocks c) {
  __shared__ volatile u8 smem_nonzero[kMostTile];
  const T *__restrict__ a = c.a, *__restrict__ b = c.b;  // several loads are under way before a store
  Out* __restrict__ data = c.data;
  const i64 count = c.count && *c.count < c.blocks ? *c.count : c.blocks;
  for (i64 i = blockIdx.x * i64(kThreads) + threadIdx.x; i <= c.rows; i += i64(gridDim.x) * kThreads)
    c.indptr[i] = c.listed ? Index(first_of_row(c, i, count)) : Index(c.a_ptr[i] + c.block_shift);
  const u32 size = c.size, blocks_ahead = kThreads / size, elements_ahead = kThreads % size;
  for (i64 first = blockIdx.x * i64(c.tile); first < count; first += i64(gridDim.x) * c.tile) {
    const int own = count - first < c.tile ? int(count - first) : c.tile;
    for (int t = threadIdx.x; t < own; t += kThreads) {
      smem_nonzero[t] = 0;
      if (c.a_indices) {
        const i64 block = block_of(c.left, first + t, c.a_blocks);
        c.indices[first + t] = block < 0 ? Index(0) : Index(c.a_indices[block] + c.column_shift);
      }
    }
    __syncthreads();
    u32 within = threadIdx.x % size;
#pragma unroll 4
    for (int t = threadIdx.x / size; t < own;) {
      const i64 left = block_of(c.left, first + t, c.a_blocks);
      const T x = left < 0 ? T{} : a[left * size + source_of(c, within)];
      T y = {};
      if constexpr (kOperation != kFirst) {
        const i64 right = block_of(c.right, first + t, c.b_blocks);
        if (right >= 0) y = b[right * size + within];
      }
      const Out found = combine(load<Acc>(x), load<Acc>(y));
      if (kOperation != kFirst && !is_zero(found)) smem_nonzero[t] = 1;
      data[(first + t) * size + within] = found;
      t += blocks_ahead, within += elements_ahead;
      if (within >= size) within -= size, ++t;
    }
    __syncthreads();
    if constexpr (kOperation != kFirst) {
      u64 nonzeros = 0, of_tile;
      for (int t = threadIdx.x; t < own; t += kThreads) nonzeros += c.nonzero[first + t] = smem_nonzero[t];
      sum_before<kThreads>(nonzeros, of_tile);
      if (threadIdx.x == 0 && of_tile) atomicAdd(c.nonzeros, of_tile);
    }
  }
  if constexpr (kOperation != kFirst) {
    if (!arrives_last(c.arrived) || threadIdx.x) return;
    c.found[0] = count, c.found[1] = i64(atomicAdd(c.nonzeros, u64(0)));
    *c.nonzeros = 0;
  }
}
