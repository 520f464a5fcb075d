// overlap[i, j] = number of block columns that row tiles i and j share; row tiles with a large overlap form a group
// A group reads the panels of B at the union of its block columns, so a large overlap saves reads. Windows of 512 row
// tiles are matched separately, level by level: the best pairs, then the best pairs of pairs, and so on. Patterns are
// rows of bits.
// row_bits: a thread for 8 stored blocks, an atomicOr for each row tile. overlaps: a CTA counts 64 x 64 pairs by popc.
// match_rows: a CTA for each window and a thread for each node; in rounds, nodes that are each other's best become
// partners. Ties are broken by a number made of i + j and i * j, which both see alike: many pairs form in each round,
// and the permutation is the same in every run.
#include "common/coordinates.cuh"

using Index = INDEX;

constexpr int kWindow = 512;
constexpr int kSide = 64;    // side of the square of pairs that one CTA counts
constexpr int kWords = 32;   // words of bits that are held at a time
constexpr int kThreads = 256;

// Sets the bits of the columns of row `row` in bits[row * per + sub]. Entries outside the pattern are left out.
extern "C" __global__ void __launch_bounds__(kThreads)
row_bits(const __grid_constant__ StoredPattern<Index> stored, u32* __restrict__ bits, int per, int words) {
  for_blocks(stored, [&](i64, int row, int column) {
    if (row < 0) return;
    for (int sub = 0; sub < per; ++sub)
      atomicOr(bits + (i64(row) * per + sub) * words + column / 32, 1u << (column % 32));
  });
}

// overlap[window, i, j] = number of columns that nodes i and j of a window share, at most 65535
extern "C" __global__ void __launch_bounds__(kThreads, 2)
overlaps(const u32* __restrict__ bits, u16* __restrict__ overlap, int nodes, int all_nodes, int words) {
  __shared__ u32 left[kSide][kWords + 1], right[kSide][kWords + 1];
  const i64 window = i64(blockIdx.z) * nodes;
  const int i0 = blockIdx.y * kSide, j0 = blockIdx.x * kSide;
  if (j0 < i0) return;  // the other half is filled in by symmetry
  int shared_columns[4][4] = {};
  const int ti = threadIdx.x / 16, tj = threadIdx.x % 16;
  for (int w0 = 0; w0 < words; w0 += kWords) {
    __syncthreads();
    for (int x = threadIdx.x; x < kSide * kWords; x += kThreads) {
      const int node = x / kWords, w = w0 + x % kWords;
      const auto word = [&](int n) {
        return n < nodes && window + n < all_nodes && w < words ? bits[(window + n) * words + w] : 0u;
      };
      left[node][x % kWords] = word(i0 + node);
      right[node][x % kWords] = word(j0 + node);
    }
    __syncthreads();
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int a = 0; a < 4; ++a)
#pragma unroll
        for (int b = 0; b < 4; ++b) shared_columns[a][b] += __popc(left[ti + 16 * a][w] & right[tj + 16 * b][w]);
  }
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int i = i0 + ti + 16 * a, j = j0 + tj + 16 * b;
      if (i >= nodes || j >= nodes) continue;
      const u16 count = min(shared_columns[a][b], 65535);
      overlap[(window + i) * nodes + j] = count;
      overlap[(window + j) * nodes + i] = count;
    }
}

// One CTA per window: joins two nodes if each is the other's best, until none is left; then writes the members of each
// pair, one after the other, and the union of their bits. `nodes` is even; a node has `members` row tiles, those listed
// in `order`, or consecutive ones if it is null.
extern "C" __global__ void __launch_bounds__(kWindow, 1)
match_rows(const u16* __restrict__ overlap, const u32* __restrict__ bits, u32* __restrict__ merged,
           const int* __restrict__ order, int* __restrict__ new_order, int nodes, int all_nodes, int members,
           int words) {
  __shared__ short best[kWindow], partner[kWindow];
  __shared__ int left;
  const i64 window = i64(blockIdx.x) * nodes;
  const int present = int(min(i64(nodes), all_nodes - window));  // the last window may be smaller
  const int i = threadIdx.x;
  partner[i] = -1;
  best[i] = -1;
  if (i == 0) left = present;
  __syncthreads();
  while (left > 0) {
    if (i < present && partner[i] < 0 && (best[i] < 0 || partner[best[i]] >= 0)) {
      u32 most = 0;
      int with = -1;
#pragma unroll 8
      for (int j = 0; j < present; ++j) {
        if (j == i || partner[j] >= 0) continue;
        // Ties are broken by a number that is the same for both nodes, so that many pairs form in each round.
        const u32 tie = (u32(i + j) * 2654435761u ^ u32(i * j) * 2246822519u) >> 16;
        const u32 score = u32(overlap[(window + j) * nodes + i]) << 16 | tie;
        if (with < 0 || score > most) most = score, with = j;
      }
      best[i] = short(with);
    }
    __syncthreads();
    bool formed = false;
    if (i < present && partner[i] < 0 && best[best[i]] == i) formed = true;
    __syncthreads();
    if (formed) {
      partner[i] = best[i];
      atomicSub(&left, 1);
    }
    __syncthreads();
  }
  if (i < present && partner[i] > i) {
    int pair = 0;
    for (int j = 0; j < i; ++j) pair += partner[j] > j;
    best[pair] = short(i);  // only read below: no node searches for partners any more
  }
  __syncthreads();
  for (int x = threadIdx.x; x < present * members; x += kWindow) {
    const int pair = x / (2 * members), within = x % (2 * members);
    const int node = within < members ? best[pair] : partner[best[pair]];
    const i64 place = (window + node) * members + within % members;
    new_order[window * members + x] = order ? order[place] : int(place);
  }
  for (int x = threadIdx.x; x < present / 2 * words; x += kWindow) {
    const int a = best[x / words], w = x % words;
    merged[(window / 2 + x / words) * words + w] =
        bits[(window + a) * words + w] | bits[(window + partner[a]) * words + w];
  }
}
