// Addresses in shared memory as PTX instructions take them (sm_75 and newer).
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
