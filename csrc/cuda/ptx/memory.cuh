// Single memory instructions: prefetches, acquire and release, loads that leave L1 alone.
//
// An acquire load that sees what a release store wrote also sees everything before that store, across the whole device.
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

#if !defined(TW_EMULATOR)

__device__ __forceinline__ void prefetch_l1(const void* address) { asm volatile("prefetch.global.L1 [%0];" :: "l"(address)); }
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// 16 bytes of data that this launch reads once and nobody writes.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

#else

inline void prefetch_l1(const void*) {}
inline void prefetch_l2(const void*) {}

TW_UNTRACED uint32_t load_acquire(const uint32_t* address TW_SITE) {
  emu::require_aligned(address, 4, "ld.acquire" TW_SITE_ARG);
  emu::poll("ld.acquire" TW_SITE_ARG);
  emu::note_atomic(address, 4, false TW_SITE_ARG);
  const uint32_t value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  emu::note_fence();
  return value;
}
TW_UNTRACED void store_release(uint32_t* address, uint32_t value TW_SITE) {
  emu::require_aligned(address, 4, "st.release" TW_SITE_ARG);
  emu::note_fence();
  emu::note_atomic(address, 4, true TW_SITE_ARG);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
TW_UNTRACED void add_release(uint32_t* address, uint32_t value TW_SITE) {
  emu::require_aligned(address, 4, "red.release" TW_SITE_ARG);
  emu::note_fence();
  emu::note_atomic(address, 4, true TW_SITE_ARG);
  __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
}
inline void fence_acq_rel() { __threadfence(); }
__attribute__((always_inline)) inline uint4 load_streaming(const void* address) { return *static_cast<const uint4*>(address); }

#endif

}  // namespace tw::ptx
