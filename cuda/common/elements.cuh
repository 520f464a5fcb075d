// Element types of a product on the CUDA cores: operands A and B, result C, sums Acc, and index arrays.
#pragma once

#include "common/bsr.cuh"

using A = ELEMENT_A;
using B = ELEMENT_B;
using C = ELEMENT_C;
using Acc = ACCUMULATOR;
using Index = INDEX;
