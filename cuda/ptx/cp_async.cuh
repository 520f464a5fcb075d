// Asynchronous copies to shared memory by single threads (sm_80 and newer): one wrapper = one PTX instruction.
#pragma once

#include "ptx/shared.cuh"

// Copies kBytes to shared memory if `wanted`. Copies of 16 bytes bypass the L1, smaller ones do not.
template <int kBytes> __device__ __forceinline__ void copy_if(bool wanted, u32 to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global [%1], [%2], 16;\n}"
                 ::"r"(int(wanted)), "r"(to), "l"(from) : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.ca.shared.global [%1], [%2], %3;\n}"
                 ::"r"(int(wanted)), "r"(to), "l"(from), "n"(kBytes) : "memory");
}
// Copies 16 bytes if `wanted`. Only the first `bytes` are read; the others become zeros.
__device__ __forceinline__ void copy_some_if(bool wanted, u32 to, const void* from, u32 bytes) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p cp.async.cg.shared.global [%1], [%2], 16, %3;\n}"
               ::"r"(int(wanted)), "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last kPending groups of copies of this thread are pending.
template <int kPending> __device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
