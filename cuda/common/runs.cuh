// The elements of one row of a block in CSR, as `csr_blocks` writes them down and `block_elements` reads them.
#pragma once

#include "common/bsr.cuh"

// The first of them and how many there are, in one word: fewer than 2^40 elements, and than 2^23 in a row of a block.
constexpr int kRunBits = 40;

__device__ __forceinline__ i64 run_of(i64 first, i64 length) { return length << kRunBits | first; }
__device__ __forceinline__ i64 first_of_run(i64 run) { return run & ((i64(1) << kRunBits) - 1); }
__device__ __forceinline__ i64 length_of_run(i64 run) { return run >> kRunBits; }
