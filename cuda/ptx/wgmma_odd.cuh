// wgmma (see wgmma.cuh) of 16-bit floats whose columns are no power of two: those of blocks of 8 n rows.
#pragma once

#include "ptx/wgmma_narrow.cuh"

// The registers of the accumulators in the text of the instruction, each list four longer than the one before.
#define MMA_TEXT_4 "%0, %1, %2, %3"
#define MMA_TEXT_8 MMA_TEXT_4 ", %4, %5, %6, %7"
#define MMA_TEXT_12 MMA_TEXT_8 ", %8, %9, %10, %11"
#define MMA_TEXT_16 MMA_TEXT_12 ", %12, %13, %14, %15"
#define MMA_TEXT_20 MMA_TEXT_16 ", %16, %17, %18, %19"
#define MMA_TEXT_24 MMA_TEXT_20 ", %20, %21, %22, %23"
#define MMA_TEXT_28 MMA_TEXT_24 ", %24, %25, %26, %27"
#define MMA_TEXT_32 MMA_TEXT_28 ", %28, %29, %30, %31"
#define MMA_TEXT_36 MMA_TEXT_32 ", %32, %33, %34, %35"
#define MMA_TEXT_40 MMA_TEXT_36 ", %36, %37, %38, %39"
#define MMA_TEXT_44 MMA_TEXT_40 ", %40, %41, %42, %43"
#define MMA_TEXT_48 MMA_TEXT_44 ", %44, %45, %46, %47"
#define MMA_TEXT_52 MMA_TEXT_48 ", %48, %49, %50, %51"
#define MMA_TEXT_56 MMA_TEXT_52 ", %52, %53, %54, %55"
#define MMA_TEXT_60 MMA_TEXT_56 ", %56, %57, %58, %59"
#define MMA_TEXT_64 MMA_TEXT_60 ", %60, %61, %62, %63"
#define MMA_TEXT_68 MMA_TEXT_64 ", %64, %65, %66, %67"
#define MMA_TEXT_72 MMA_TEXT_68 ", %68, %69, %70, %71"
#define MMA_TEXT_76 MMA_TEXT_72 ", %72, %73, %74, %75"
#define MMA_TEXT_80 MMA_TEXT_76 ", %76, %77, %78, %79"
#define MMA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MMA_D12(d, i) MMA_D8(d, i), MMA_D4(d, i + 8)
#define MMA_D20(d, i) MMA_D8(d, i), MMA_D12(d, i + 8)
#define MMA_D24(d, i) MMA_D12(d, i), MMA_D12(d, i + 12)
#define MMA_D28(d, i) MMA_D8(d, i), MMA_D20(d, i + 8)
#define MMA_D36(d, i) MMA_D32(d, i), MMA_D4(d, i + 32)
#define MMA_D52(d, i) MMA_D48(d, i), MMA_D4(d, i + 48)
#define MMA_D60(d, i) MMA_D48(d, i), MMA_D12(d, i + 48)
#define MMA_D80(d, i) MMA_D40(d, i), MMA_D40(d, i + 40)

// d[64, n] = (add ? d : 0) + a[64, 16] * b[16, n], both in shared memory; the numbers are those of the operands.
#define MMA_OF_TWO(n, sums, a_at, b_at, add_at, ta_at, tb_at)                                                        \
  template <bool kTransA, bool kTransB>                                                                              \
  __device__ __forceinline__ void wgmma(float (&d)[sums], bool add, u64 a, u64 b) {                                   \
    asm volatile(MMA_ADD(add_at) MMA_INSTRUCTION(n) MMA_TEXT_##sums                                                   \
                 "}, %" #a_at ", %" #b_at ", p, 1, 1, %" #ta_at ", %" #tb_at ";\n}"                                   \
                 : MMA_D##sums(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransA)), "n"(int(kTransB)));          \
  }
MMA_OF_TWO(8, 4, 4, 5, 6, 7, 8)
MMA_OF_TWO(16, 8, 8, 9, 10, 11, 12)
MMA_OF_TWO(24, 12, 12, 13, 14, 15, 16)
MMA_OF_TWO(40, 20, 20, 21, 22, 23, 24)
MMA_OF_TWO(48, 24, 24, 25, 26, 27, 28)
MMA_OF_TWO(56, 28, 28, 29, 30, 31, 32)
MMA_OF_TWO(72, 36, 36, 37, 38, 39, 40)
MMA_OF_TWO(80, 40, 40, 41, 42, 43, 44)
MMA_OF_TWO(96, 48, 48, 49, 50, 51, 52)
MMA_OF_TWO(104, 52, 52, 53, 54, 55, 56)
MMA_OF_TWO(120, 60, 60, 61, 62, 63, 64)
MMA_OF_TWO(160, 80, 80, 81, 82, 83, 84)
