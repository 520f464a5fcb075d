// What cuda/wgmma.cuh wraps, on the CPU: each thread works out its own sums, at once, from shared memory or from the
// registers of its warp. MMA_TYPE names the elements, MMA_K says how many of them a product is deep.
#pragma once

#pragma GCC push_options
#pragma GCC optimize("O1")
namespace emulator {
struct Types {
  struct f16 { using Bits = u16; static float decode(u32 x) { return from_f16(x); } };
  struct bf16 { using Bits = u16; static float decode(u32 x) { return from_bf16(x); } };
  struct e4m3 { using Bits = u8; static float decode(u32 x) { return from_e4m3(x); } };
  struct tf32 { using Bits = u32; static float decode(u32 x) { return from_tf32(x); } };
};
using Operand = Types::MMA_TYPE;
constexpr u32 kOperandBytes = sizeof(Operand::Bits), kEach = 4 / kOperandBytes;  // of a register
// Element k of row or column i of an operand that a descriptor names.
inline float element(u64 descriptor, u32 i, u32 k, bool across) {
  const u32 address = u32(descriptor & 0x3fff) << 4, leading = u32(descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = u32(descriptor >> 32 & 0x3fff) << 4, mode = u32(descriptor >> 62);
  const u32 row = mode == 1 ? 128 : mode == 2 ? 64 : 32, size = kOperandBytes;
  const u32 offset = across ? i * size / row * leading + k / 8 * stride + k % 8 * row + i * size % row
                            : i / 8 * stride + i % 8 * row + k * size;
  return Operand::decode(*at<Operand::Bits>(swizzled(address + offset, row)));
}
typedef float Four __attribute__((vector_size(16)));
// The sums of two rows by two columns of every eight. The last lane to come widens the columns for its warp.
template <bool kTransB, int kSums> void multiply(float (&d)[kSums], bool add, const float (&rows)[2][MMA_K], u64 b) {
  constexpr int kColumns = 2 * kSums;
  Warp& warp = own_warp();
  warp.together.meet("a warp", [&] {
    const races::Products reading;
    for (int n = 0; n < kColumns; ++n)
      for (int k = 0; k < MMA_K; ++k) warp.columns[(n / 8 * MMA_K + k) * 8 + n % 8] = element(b, n, k, kTransB);
  });
  Four both[MMA_K];
  for (int k = 0; k < MMA_K; ++k) both[k] = Four{rows[0][k], rows[0][k], rows[1][k], rows[1][k]};
  const float* columns = warp.columns + thread.x % 4 * 2;
  for (int i = 0; i < kSums; i += 4) {
    Four sum = {};
    if (add) memcpy(&sum, d + i, 16);
    for (int k = 0; k < MMA_K; ++k, columns += 8) sum += both[k] * Four{columns[0], columns[1], columns[0], columns[1]};
    memcpy(d + i, &sum, 16);
  }
}
}  // namespace emulator

inline unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride, int row_bytes = 128) {
  if ((address | leading | stride) % 16) emulator::fail("a descriptor without its last four bits");
  const unsigned long long swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return (address & 0x3ffff) >> 4 | (leading >> 4) * (1ull << 16) | (stride >> 4) * (1ull << 32) | swizzle << 62;
}
// As all that is "aligned", these bring the lanes of a warp together. They do not order what lanes read and write.
inline void wgmma_fence() { emulator::own_warp().together.meet("a warp"); }
inline void wgmma_commit() { emulator::own_warp().together.meet("a warp", [] { emulator::races::commit_products(); }); }
template <int kPending> void wgmma_wait() {
  emulator::own_warp().together.meet("a warp");
  emulator::races::wait_products(kPending);
}

template <bool kTransA, bool kTransB, int kSums>
void wgmma(float (&d)[kSums], bool add, unsigned long long a, unsigned long long b) {
  float rows[2][MMA_K];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < MMA_K; ++k) {
      const emulator::races::Products reading;
      rows[i][k] = emulator::element(a, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i, k, kTransA);
    }
  emulator::multiply<kTransB>(d, add, rows, b);
}
// The first operand in registers: neighbours of row lane / 4, of that and 8, and of both half of K on.
template <bool kTransB, int kSums>
void wgmma(float (&d)[kSums], bool add, const unsigned (&a)[4], unsigned long long b) {
  using namespace emulator;
  float rows[2][MMA_K];
  show(a, [&](const auto& all) {
    for (int m = 0; m < 4; ++m)
      for (int j = 0; j < 4; ++j)
        for (u32 i = 0; i < kEach; ++i)
          rows[m % 2][m / 2 * (MMA_K / 2) + j * kEach + i] =
              Operand::decode(Operand::Bits(all[thread.x % 32 / 4 * 4 + j][m] >> i * 8 * kOperandBytes % 32));
  });
  emulator::multiply<kTransB>(d, add, rows, b);
}
#pragma GCC pop_options
