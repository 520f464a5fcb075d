// Words of 1 to 16 bytes, for kernels that copy elements and do not look at them.
#pragma once

#include "common/types.cuh"

template <int kBytes> struct WordOf;
template <> struct WordOf<1> { using Type = u8; };
template <> struct WordOf<2> { using Type = u16; };
template <> struct WordOf<4> { using Type = u32; };
template <> struct WordOf<8> { using Type = int2; };
template <> struct WordOf<16> { using Type = int4; };
