// Asynchronous copies to shared memory by single threads (sm_80 and newer): one wrapper = one PTX instruction.
#pragma once

#include "ptx/shared.cuh"

// kBytes to shared memory; nothing unless `wanted`. 16 bytes go past the L1, fewer through it.
template <int kBytes> __device__ __forceinline__ void copy_if(bool wanted, u32 to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global [%1], [%2], 16;\n}"
                 ::"r"(int(wanted)), "r"(to), "l"(from) : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.ca.shared.global [%1], [%2], %3;\n}"
                 ::"r"(int(wanted)), "r"(to), "l"(from), "n"(kBytes) : "memory");
}
// 16 bytes, of which only `bytes` are read; the others are zeros.
__device__ __forceinline__ void copy_some_if(bool wanted, u32 to, const void* from, u32 bytes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global [%1], [%2], 16, %3;\n}"
               ::"r"(int(wanted)), "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last kPending groups of this thread's copies are there.
template <int kPending> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
