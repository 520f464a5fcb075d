// Products of tensor cores: instructions of a warp, named as in emulated_ptx.h, and of a warpgroup, for emulated_wgmma.h.
#pragma once

namespace emulator {
// ------------------------------------------------------------------------------- products of a warp
// d[16, 8] = a * b + c, both 32 bytes deep, an element widened by kDecode. Lane l has of rows l / 4 and 8 + l / 4 of a, and of
// column l / 4 of b, word l % 4 of both halves; of d and c columns 2 (l % 4) and the next of its rows.
template <int kBits, class Number, Number (*kDecode)(u32)> struct Product {
  static constexpr int kEach = 32 / kBits;
  static void multiply(Number& d0, Number& d1, Number& d2, Number& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                       Number c0, Number c1, Number c2, Number c3) {
    const u32 words[] = {a0, a2, a1, a3, b0, b1};  // both halves of the upper rows, of the lower ones, of the columns
    u32 own[6 * kEach];
    for (int i = 0; i < 6 * kEach; ++i)
      own[i] = __builtin_bit_cast(u32, kDecode(words[i / kEach] >> i % kEach * (kBits % 32) & (~0u >> (32 - kBits))));
    const int lane = thread.x % 32;
    Number sums[] = {c0, c1, c2, c3};
    show(own, [&](const auto& all) {
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 4; ++k) {
          const u32* rows = all[lane / 4 * 4 + k] + half * kEach;
          const u32* column = all[lane % 4 * 8 + k] + (4 + half) * kEach;
          const u32* next = all[lane % 4 * 8 + 4 + k] + (4 + half) * kEach;
          const auto number = [](u32 x) { return __builtin_bit_cast(Number, x); };
          for (int e = 0; e < kEach; ++e) {
            sums[0] += number(rows[e]) * number(column[e]), sums[1] += number(rows[e]) * number(next[e]);
            sums[2] += number(rows[2 * kEach + e]) * number(column[e]), sums[3] += number(rows[2 * kEach + e]) * number(next[e]);
          }
        }
    });
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }
};
RUNTIME int from_s8(u32 x) { return static_cast<signed char>(x); }
#define EMULATED_PRODUCT(name, bits, Number, decode) \
  RUNTIME void name(Number& d0, Number& d1, Number& d2, Number& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, \
                    Number c0, Number c1, Number c2, Number c3) { \
    Product<bits, Number, decode>::multiply(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3); \
  }
EMULATED_PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 16, float, from_f16)
EMULATED_PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 16, float, from_bf16)
EMULATED_PRODUCT(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, 32, float, from_tf32)
EMULATED_PRODUCT(mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32, 8, float, from_e4m3)
EMULATED_PRODUCT(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, 8, int, from_s8)

// d[8, 8] = a[8, 4] * b[4, 8] + c: a lane has an element of row, or column, lane / 4.
RUNTIME void mma_sync_aligned_m8n8k4_row_col_f64_f64_f64_f64(double& d0, double& d1, double a, double b, double c0, double c1) {
  const int lane = thread.x % 32;
  u32 own[4];
  memcpy(own, &a, 8), memcpy(own + 2, &b, 8);
  show(own, [&](const auto& all) {
    const auto number = [&](int from, int first) {
      double x;
      memcpy(&x, &all[from][first], 8);
      return x;
    };
    for (int k = 0; k < 4; ++k) {
      const double row = number(lane / 4 * 4 + k, 0);
      c0 = fma(row, number(lane % 4 * 8 + k, 2), c0);
      c1 = fma(row, number(lane % 4 * 8 + 4 + k, 2), c1);
    }
  });
  d0 = c0, d1 = c1;
}

// ------------------------------------------------------------------------------- products of a warpgroup
// The elements of an operand: their bits, how they are widened, and how many of them a product is deep.
struct Types {
  struct f16 { using Bits = u16; static constexpr int kDeep = 16; static float decode(u32 x) { return from_f16(x); } };
  struct bf16 { using Bits = u16; static constexpr int kDeep = 16; static float decode(u32 x) { return from_bf16(x); } };
  struct e4m3 { using Bits = u8; static constexpr int kDeep = 32; static float decode(u32 x) { return from_e4m3(x); } };
  struct tf32 { using Bits = u32; static constexpr int kDeep = 8; static float decode(u32 x) { return from_tf32(x); } };
};
// An operand that a descriptor names, in shared memory. across: rows, or columns, are neighbours, not what is summed over.
template <class Type> struct Operand {
  u32 address, leading, stride, row;
  bool across;
  Operand(u64 descriptor, bool is_across) : across(is_across) {
    address = u32(descriptor & 0x3fff) << 4, leading = u32(descriptor >> 16 & 0x3fff) << 4;
    stride = u32(descriptor >> 32 & 0x3fff) << 4;
    row = descriptor >> 62 == 1 ? 128 : descriptor >> 62 == 2 ? 64 : 32;
  }
  // Element k of row or column i.
  float operator()(u32 i, u32 k) const {
    constexpr u32 size = sizeof(typename Type::Bits);
    const u32 offset = across ? i * size / row * leading + k / 8 * stride + k % 8 * row + i * size % row
                              : i / 8 * stride + i % 8 * row + k * size;
    return Type::decode(*at<typename Type::Bits>(swizzled(address + offset, row)));
  }
};
typedef float Four __attribute__((vector_size(16)));
// The sums of two rows by two columns of every eight. The last lane to come widens the columns for its warp.
template <class Type>
void multiply(float* d, int sums, bool add, const float (&rows)[2][Type::kDeep], const Operand<Type>& b) {
  constexpr int kDeep = Type::kDeep;
  Warp& warp = own_warp();
  warp.together.meet("a warp", [&] {
    const races::Products reading;
    for (int n = 0; n < 2 * sums; ++n)
      for (int k = 0; k < kDeep; ++k) warp.columns[(n / 8 * kDeep + k) * 8 + n % 8] = b(n, k);
  });
  Four both[kDeep];
  for (int k = 0; k < kDeep; ++k) both[k] = Four{rows[0][k], rows[0][k], rows[1][k], rows[1][k]};
  const float* columns = warp.columns + thread.x % 4 * 2;
  for (int i = 0; i < sums; i += 4) {
    Four sum = {};
    if (add) memcpy(&sum, d + i, 16);
    for (int k = 0; k < kDeep; ++k, columns += 8) sum += both[k] * Four{columns[0], columns[1], columns[0], columns[1]};
    memcpy(d + i, &sum, 16);
  }
}
template <class Type>
void multiply_shared(float* d, int sums, bool add, u64 a, bool across_a, u64 b, bool across_b) {
  const Operand<Type> first(a, across_a);
  float rows[2][Type::kDeep];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < Type::kDeep; ++k) {
      const races::Products reading;
      rows[i][k] = first(thread.x % 128 / 32 * 16 + thread.x % 32 / 4 + 8 * i, k);
    }
  multiply<Type>(d, sums, add, rows, Operand<Type>(b, across_b));
}
// The first operand in registers: neighbours of row lane / 4, of that and 8, and of both half of the depth on.
template <class Type>
void multiply_registers(float* d, int sums, bool add, const u32 (&a)[4], u64 b, bool across_b) {
  constexpr u32 kBytes = sizeof(typename Type::Bits), kEach = 4 / kBytes;  // of a register
  float rows[2][Type::kDeep];
  show(a, [&](const auto& all) {
    for (int m = 0; m < 4; ++m)
      for (int j = 0; j < 4; ++j)
        for (u32 i = 0; i < kEach; ++i)
          rows[m % 2][m / 2 * (Type::kDeep / 2) + j * kEach + i] =
              Type::decode(typename Type::Bits(all[thread.x % 32 / 4 * 4 + j][m] >> i * 8 * kBytes % 32));
  });
  multiply<Type>(d, sums, add, rows, Operand<Type>(b, across_b));
}
#define EMULATED_WARPGROUP(Type) \
  RUNTIME void multiply(Types::Type, float* d, int sums, bool add, u64 a, bool across_a, u64 b, bool across_b) { \
    multiply_shared<Types::Type>(d, sums, add, a, across_a, b, across_b); \
  } \
  RUNTIME void multiply(Types::Type, float* d, int sums, bool add, const u32 (&a)[4], u64 b, bool across_b) { \
    multiply_registers<Types::Type>(d, sums, add, a, b, across_b); \
  }
EMULATED_WARPGROUP(f16) EMULATED_WARPGROUP(bf16) EMULATED_WARPGROUP(e4m3) EMULATED_WARPGROUP(tf32)
// As all that is "aligned", these bring the lanes of a warp together. They do not order what lanes read and write.
RUNTIME void fence_products() { own_warp().together.meet("a warp"); }
RUNTIME void commit_products() { own_warp().together.meet("a warp", [] { races::commit_products(); }); }
RUNTIME void wait_products(u32 pending) {
  own_warp().together.meet("a warp");
  races::wait_products(pending);
}
RUNTIME u64 descriptor(u32 address, u32 leading, u32 stride, int row_bytes) {
  if ((address | leading | stride) % 16) fail("a descriptor without its last four bits");
  const u64 swizzle = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return (address & 0x3ffff) >> 4 | (leading >> 4) * (1ull << 16) | (stride >> 4) * (1ull << 32) | swizzle << 62;
}
}  // namespace emulator
