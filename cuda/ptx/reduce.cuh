// What the gradients of attention need of TMA and of shared memory beside tma.cuh (sm_90 and newer): one wrapper = one
// PTX instruction.
#pragma once

#include "ptx/tma.cuh"

// Copies contiguous bytes, a multiple of 16, to shared memory; they count for the barrier.
__device__ __forceinline__ void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Stores contiguous bytes of shared memory to global memory.
__device__ __forceinline__ void store_line(f32* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Adds contiguous numbers in shared memory to those in global memory.
__device__ __forceinline__ void add_line(f32* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Orders accesses of this thread and those of TMA to global memory.
__device__ __forceinline__ void proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_words(u32 to, f32 x, f32 y, f32 z, f32 w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ float4 load_floats(u32 from) {
  float4 x;
  asm("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
  return x;
}
// All threads of two warpgroups wait for each other.
__device__ __forceinline__ void two_warpgroups_sync(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
// The same for warpgroups that come to it from two places of the program.
__device__ __forceinline__ void two_places_sync(int id) { asm volatile("barrier.sync %0, 256;" ::"r"(id) : "memory"); }
