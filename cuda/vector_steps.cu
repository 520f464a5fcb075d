// What Krylov methods do with vectors of n elements, in one launch each; ratio = a / b, and 0 where b is 0.
// kInnerProduct: sum = sum_i conj(u[i]) * v[i].    kDirection: u[i] = ratio * u[i] + v[i].
// kAdvance: x[i] += ratio * p[i], u[i] -= ratio * v[i]; numbers = {sqrt(sum_i |u[i]|^2), Re b, Re a}, sum = a.
// Factors are read from device memory and sums stay there, so that an iteration of conjugate gradients is four launches
// beside its products. The order of a sum depends on n and on the types alone, not on the card: each CTA leaves its
// part in `partial`, and the CTA that arrives last adds the parts in the order of their CTAs. At most 512 CTAs; a
// thread has kUnroll packs of 16 bytes under way, 4 of them, or 2 where four vectors are read.
#include "common/layout.cuh"

using A = ELEMENT_A;
using B = ELEMENT_B;  // of v; not wider than A

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 4;                 // CTAs per SM: leaves 64 registers per thread
constexpr int kPack = 16 / sizeof(A);    // neighbouring elements of a thread: one load of 16 bytes
constexpr int kUnroll = UNROLL;          // packs of a thread whose loads are under way together, with a sum each
constexpr int kChunk = kThreads * kPack * kUnroll;  // elements that a CTA takes at a time
static_assert(sizeof(B) <= sizeof(A) && IsComplex<A>::value == IsComplex<B>::value, "v is as wide as u, or narrower");

enum Operation { kInnerProduct, kDirection, kAdvance };
constexpr Operation kOperation = OPERATION;

template <class T> struct RealOf { using type = T; };
template <class R> struct RealOf<Complex<R>> { using type = R; };
using Real = typename RealOf<A>::type;
template <bool kFirst, class T, class U> struct Either { using type = T; };
template <class T, class U> struct Either<false, T, U> { using type = U; };
using Sum = typename Either<kOperation == kAdvance, Real, A>::type;

struct VectorSteps {
  A *x, *u;            // (n,); x and p only for kAdvance
  const B* v;          // (n,); may be u
  const A *p, *a, *b;  // p is (n,), a and b are single numbers; a and b not for kInnerProduct
  A* sum;              // a single number; not for kDirection
  Real* numbers;       // (3,)
  Sum* partial;        // (CTAs,)
  int* arrived;        // CTAs that have arrived; zero before and after
  i64 n;
  int aligned;         // whether all vectors begin at a multiple of the size of a pack
};
#ifdef VECTOR_STEPS_BYTES
CHECK_LAYOUT(VectorSteps, VECTOR_STEPS, (x)(u)(v)(p)(a)(b)(sum)(numbers)(partial)(arrived)(n)(aligned))
#endif

// ------------------------------------------------------------------------------ numbers
template <class R> __device__ __forceinline__ R real_part(R x) { return x; }
template <class R> __device__ __forceinline__ R real_part(Complex<R> x) { return x.re; }
template <class R> __device__ __forceinline__ R conjugate(R x) { return x; }
template <class R> __device__ __forceinline__ Complex<R> conjugate(Complex<R> x) { return {x.re, -x.im}; }
template <class R> __device__ __forceinline__ R negative(R x) { return -x; }
template <class R> __device__ __forceinline__ Complex<R> negative(Complex<R> x) { return {-x.re, -x.im}; }
template <class R> __device__ __forceinline__ R magnitude(R x) { return x < 0 ? -x : x; }
__device__ __forceinline__ f32 root(f32 x) { return sqrtf(x); }
__device__ __forceinline__ f64 root(f64 x) { return sqrt(x); }

// |x|^2 + sum
template <class R> __device__ __forceinline__ R add_square(R x, R sum) { return multiply_add(x, x, sum); }
template <class R> __device__ __forceinline__ R add_square(Complex<R> x, R sum) {
  return multiply_add(x.re, x.re, multiply_add(x.im, x.im, sum));
}

template <class R> __device__ __forceinline__ R safe_ratio(R a, R b) { return b == R(0) ? R(0) : a / b; }
// Both are divided by the size of b first, whose square may be out of range.
template <class R> __device__ __forceinline__ Complex<R> safe_ratio(Complex<R> a, Complex<R> b) {
  if (b.re == R(0) && b.im == R(0)) return {};
  const R inverse = R(1) / (magnitude(b.re) + magnitude(b.im));
  const Complex<R> c = {a.re * inverse, a.im * inverse}, d = {b.re * inverse, b.im * inverse};
  const R scale = R(1) / multiply_add(d.re, d.re, d.im * d.im);
  return {multiply_add(c.re, d.re, c.im * d.im) * scale, multiply_add(c.im, d.re, -(c.re * d.im)) * scale};
}

// -------------------------------------------------------------------------------- packs
template <class T> struct alignas(sizeof(T) * kPack) Pack { T values[kPack]; };

// The elements from i on; zeros after the end. kWhole: all are there, at a multiple of the size of a pack.
template <bool kWhole, class T> __device__ __forceinline__ Pack<T> load_pack(const T* from, i64 i, i64 n) {
  if constexpr (kWhole) return *reinterpret_cast<const Pack<T>*>(from + i);
  Pack<T> found = {};
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (i + k < n) found.values[k] = from[i + k];
  return found;
}
template <bool kWhole, class T> __device__ __forceinline__ void store_pack(T* to, i64 i, i64 n, const Pack<T>& pack) {
  if constexpr (kWhole) {
    *reinterpret_cast<Pack<T>*>(to + i) = pack;
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (i + k < n) to[i + k] = pack.values[k];
  }
}

// One chunk: all its loads come before its first store. Whether it is whole changes no bit of the result.
template <bool kWhole, class Total>
__device__ __forceinline__ void visit(const VectorSteps& s, i64 first, A ratio, Total (&sums)[kUnroll]) {
  Pack<A> u[kUnroll], x[kUnroll], p[kUnroll];
  Pack<B> v[kUnroll];
  const i64 own = first + threadIdx.x * kPack;
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const i64 i = own + j * (kThreads * kPack);
    u[j] = load_pack<kWhole>(s.u, i, s.n);
    v[j] = load_pack<kWhole>(s.v, i, s.n);
    if constexpr (kOperation == kAdvance) {
      x[j] = load_pack<kWhole>(s.x, i, s.n);
      p[j] = load_pack<kWhole>(s.p, i, s.n);
    }
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const i64 i = own + j * (kThreads * kPack);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      A& mine = u[j].values[k];
      const A other = load<A>(v[j].values[k]);
      if constexpr (kOperation == kInnerProduct) {
        sums[j] = multiply_add(conjugate(mine), other, sums[j]);
      } else if constexpr (kOperation == kDirection) {
        mine = multiply_add(ratio, mine, other);
      } else {
        x[j].values[k] = multiply_add(ratio, p[j].values[k], x[j].values[k]);
        mine = multiply_add(negative(ratio), other, mine);
        if (kWhole || i + k < s.n) sums[j] = add_square(mine, sums[j]);  // 0 times a ratio may be NaN
      }
    }
    if constexpr (kOperation != kInnerProduct) store_pack<kWhole>(s.u, i, s.n, u[j]);
    if constexpr (kOperation == kAdvance) store_pack<kWhole>(s.x, i, s.n, x[j]);
  }
}

// --------------------------------------------------------------------------------- sums
// The sum over all threads of a CTA, returned to all of them. A barrier has to stand between two sums (arrives_last).
__device__ __forceinline__ Sum sum_of_cta(Sum x) {
  __shared__ Sum smem_sums[kWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = add(x, shuffle_xor(x, lanes));
  if (lane_id() == 0) smem_sums[threadIdx.x / 32] = x;
  __syncthreads();
  Sum total = smem_sums[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total = add(total, smem_sums[w]);
  return total;
}

// Leaves the sum of this CTA in `partial`. Whether it is the last one to arrive: if so, it sees what the others left.
__device__ __forceinline__ bool arrives_last(const VectorSteps& s, Sum sum) {
  __shared__ bool smem_last;
  if (threadIdx.x == 0) {
    s.partial[blockIdx.x] = sum;
    __threadfence();
    smem_last = atomicAdd(s.arrived, 1) == int(gridDim.x) - 1;
    if (smem_last) *s.arrived = 0;
  }
  __syncthreads();
  const bool last = smem_last;
  if (last) __threadfence();
  return last;
}

template <class Total> __device__ __forceinline__ void finish(const VectorSteps& s, Total total) {
  if constexpr (kOperation == kInnerProduct) {
    *s.sum = total;
  } else {
    const A a = *s.a;
    s.numbers[0] = root(total), s.numbers[1] = real_part(*s.b), s.numbers[2] = real_part(a);
    *s.sum = a;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
vector_steps(const __grid_constant__ VectorSteps s) {
  A ratio = zero<A>();
  if constexpr (kOperation != kInnerProduct) ratio = safe_ratio(*s.a, *s.b);
  Sum sums[kUnroll] = {};
  for (i64 first = blockIdx.x * i64(kChunk); first < s.n; first += i64(gridDim.x) * kChunk) {
    if (s.aligned && first + kChunk <= s.n) visit<true>(s, first, ratio, sums);
    else visit<false>(s, first, ratio, sums);
  }
  if constexpr (kOperation != kDirection) {
    Sum own = sums[0];
#pragma unroll
    for (int j = 1; j < kUnroll; ++j) own = add(own, sums[j]);
    if (!arrives_last(s, sum_of_cta(own))) return;
    Sum total = zero<Sum>();
    for (int i = threadIdx.x; i < int(gridDim.x); i += kThreads) total = add(total, s.partial[i]);
    total = sum_of_cta(total);
    if (threadIdx.x == 0) finish(s, total);
  }
}
