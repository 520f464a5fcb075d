// to[page of (b, length[b] + i), h, place in the page] = x[b, h, i] for keys and values, then length[b] += takes[b]
// A sequence takes all of its tokens, or none if they exceed its capacity or a page of them is missing; then they are
// added to `refused`. 16-bit floats, any sizes and strides. Grid: CTAs of a sequence, sequences.
// A warp copies a row, 16 bytes a lane where rows are aligned. The length is read here, so that the same launch is
// right whenever it is replayed; the CTA of a sequence that arrives last changes it, since no other CTA may see the new
// one. Its time is that of a launch, whose start an overlapping launch hides: until the kernels in front have ended, it
// reads only its argument.
#include "common/layout.cuh"
#include "ptx/dependents.cuh"

using Element = ELEMENT;  // f16 or bf16

constexpr int kThreads = 256;
constexpr int kCtas = 4;  // on a multiprocessor: leaves 64 registers for a thread
constexpr int kWarps = kThreads / 32;
constexpr int kWide = 8;  // elements of 16 bytes
static_assert(sizeof(Element) == 2, "eight elements are 16 bytes");

// The argument. decode_kernel.py packs it field by field. Strides are in elements.
struct KvAppend {
  const Element* k;   // (batch, heads, tokens, key_dim)
  const Element* v;   // (batch, heads, tokens, value_dim)
  Element* to_k;      // (pages, heads, page, key_dim)
  Element* to_v;      // (pages, heads, page, value_dim)
  int* lengths;       // (batch,): tokens that a sequence has
  int* refused;       // (batch,): tokens for which there was no room
  const int* table;   // (batch, table_width): pages of a sequence; null: page b holds all of sequence b
  const int* takes;   // (batch,): how many of the tokens a sequence takes; null: all
  int* arrived;       // (batch,): CTAs that are done with a sequence; zero before and after
  i64 k_batch, k_head, k_row, k_col;
  i64 v_batch, v_head, v_row, v_col;
  int batch, heads, tokens, key_dim, value_dim;
  int capacity, pages, page, table_width;
  int wide;           // whether rows of k and v can be copied in pieces of 16 bytes
};
#ifdef KV_APPEND_BYTES
CHECK_LAYOUT(KvAppend, KV_APPEND, (k)(v)(to_k)(to_v)(lengths)(refused)(table)(takes)(arrived)(k_batch)(k_head)(k_row)
             (k_col)(v_batch)(v_head)(v_row)(v_col)(batch)(heads)(tokens)(key_dim)(value_dim)(capacity)(pages)(page)
             (table_width)(wide))
#endif

// Whether sequence b has room for tokens `first` to `last` - 1; all threads of the CTA get the same answer. A user can
// write to the lengths and to the table.
__device__ __forceinline__ bool has_room(const KvAppend& p, int b, int first, int last) {
  bool is_there = first >= 0 && last <= p.capacity;
  if (p.table && is_there)
    for (int j = first / p.page + int(threadIdx.x); j * i64(p.page) < last; j += kThreads)
      is_there &= u32(p.table[i64(b) * p.table_width + j]) < u32(p.pages);
  return !__syncthreads_or(!is_there);
}

// A lane's pieces of one row.
template <int kEach>
__device__ __forceinline__ void copy_row(const Element* from, i64 step, Element* to, int columns) {
  for (int c = int(threadIdx.x % 32) * kEach; c < columns; c += 32 * kEach) {
    if constexpr (kEach == kWide)
      *reinterpret_cast<uint4*>(to + c) = *reinterpret_cast<const uint4*>(from + c);
    else
      to[c] = from[c * step];
  }
}

__device__ __forceinline__ void copy_tokens(const KvAppend& p, int b, int first, int takes) {
  const u32 rows = u32(p.heads) * u32(takes), stride = gridDim.x * kWarps;
  for (u32 row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += stride) {
    const int head = int(row / u32(takes)), token = int(row % u32(takes)), place = first + token;
    const int page = p.table ? p.table[i64(b) * p.table_width + place / p.page] : b;
    const i64 to = (i64(page) * p.heads + head) * p.page + place % p.page;
    const Element* k = p.k + b * p.k_batch + head * p.k_head + token * p.k_row;
    const Element* v = p.v + b * p.v_batch + head * p.v_head + token * p.v_row;
    if (p.wide) {
      copy_row<kWide>(k, 1, p.to_k + to * p.key_dim, p.key_dim);
      copy_row<kWide>(v, 1, p.to_v + to * p.value_dim, p.value_dim);
    } else {
      copy_row<1>(k, p.k_col, p.to_k + to * p.key_dim, p.key_dim);
      copy_row<1>(v, p.v_col, p.to_v + to * p.value_dim, p.value_dim);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) kv_append(const __grid_constant__ KvAppend p) {
  launch_dependents();
  wait_for_prerequisites();
  for (int b = blockIdx.y; b < p.batch; b += gridDim.y) {
    const int first = p.lengths[b];
    const int takes = p.takes ? min(max(p.takes[b], 0), p.tokens) : p.tokens;
    const bool fits = has_room(p, b, first, int(min(i64(first) + takes, i64(p.capacity) + 1)));
    if (fits) copy_tokens(p, b, first, takes);
    __syncthreads();  // all threads have read the length
    if (threadIdx.x > 0) continue;
    if (gridDim.x > 1) {
      __threadfence();
      if (atomicAdd(p.arrived + b, 1) < int(gridDim.x) - 1) continue;
      p.arrived[b] = 0;
    }
    if (fits) p.lengths[b] = first + takes;
    else p.refused[b] += takes;
  }
}
