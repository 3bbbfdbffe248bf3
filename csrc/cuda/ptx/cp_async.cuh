// cp.async: asynchronous copies of 4, 8 or 16 bytes from global to shared memory.
//
//   cp_async<16>(to, from);                     L2 only for 16 bytes, through L1 for 4 and 8; <16, true> forces L1
//   cp_async_zfill<16>(to, from, valid_bytes);  the bytes behind valid_bytes become zero; 0 reads nothing
//   cp_async_commit();                          closes the group of copies issued so far
//   cp_async_wait<n>();                         all groups but the newest n have landed, for the calling thread only:
//                                               a barrier must follow before another thread reads them
// A third template argument of 64, 128 or 256 asks L2 to fetch that many bytes around the source.
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

template <int bytes, bool through_l1 = (bytes < 16), int l2_bytes = 0>
struct CpAsyncRules {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  static_assert(through_l1 || bytes == 16, "only copies of 16 bytes can bypass L1");
  static_assert(l2_bytes == 0 || l2_bytes == 64 || l2_bytes == 128 || l2_bytes == 256, "L2 prefetches 64, 128 or 256 bytes");
};

#if !defined(TW_EMULATOR)

#define TW_CP_ASYNC(level, hint)                                                                        \
  asm volatile("cp.async." level ".shared.global" hint " [%0], [%1], %2, %3;"                           \
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "n"(bytes), "r"(valid_bytes) : "memory")

template <int bytes, bool through_l1 = (bytes < 16), int l2_bytes = 0>
__device__ __forceinline__ void cp_async_zfill(void* to, const void* from, int valid_bytes) {
  (void)CpAsyncRules<bytes, through_l1, l2_bytes>{};
  if constexpr (through_l1) {
    if constexpr (l2_bytes == 0) TW_CP_ASYNC("ca", "");
    if constexpr (l2_bytes == 64) TW_CP_ASYNC("ca", ".L2::64B");
    if constexpr (l2_bytes == 128) TW_CP_ASYNC("ca", ".L2::128B");
    if constexpr (l2_bytes == 256) TW_CP_ASYNC("ca", ".L2::256B");
  } else {
    if constexpr (l2_bytes == 0) TW_CP_ASYNC("cg", "");
    if constexpr (l2_bytes == 64) TW_CP_ASYNC("cg", ".L2::64B");
    if constexpr (l2_bytes == 128) TW_CP_ASYNC("cg", ".L2::128B");
    if constexpr (l2_bytes == 256) TW_CP_ASYNC("cg", ".L2::256B");
  }
}
#undef TW_CP_ASYNC

#define TW_CP_ASYNC(level, hint)                                                                        \
  asm volatile("cp.async." level ".shared.global" hint " [%0], [%1], %2;"                               \
               :: "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from), "n"(bytes) : "memory")

template <int bytes, bool through_l1 = (bytes < 16), int l2_bytes = 0>
__device__ __forceinline__ void cp_async(void* to, const void* from) {
  (void)CpAsyncRules<bytes, through_l1, l2_bytes>{};
  if constexpr (through_l1) {
    if constexpr (l2_bytes == 0) TW_CP_ASYNC("ca", "");
    if constexpr (l2_bytes == 64) TW_CP_ASYNC("ca", ".L2::64B");
    if constexpr (l2_bytes == 128) TW_CP_ASYNC("ca", ".L2::128B");
    if constexpr (l2_bytes == 256) TW_CP_ASYNC("ca", ".L2::256B");
  } else {
    if constexpr (l2_bytes == 0) TW_CP_ASYNC("cg", "");
    if constexpr (l2_bytes == 64) TW_CP_ASYNC("cg", ".L2::64B");
    if constexpr (l2_bytes == 128) TW_CP_ASYNC("cg", ".L2::128B");
    if constexpr (l2_bytes == 256) TW_CP_ASYNC("cg", ".L2::256B");
  }
}
#undef TW_CP_ASYNC

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory"); }
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else

// The model is in csrc/emulator/: the checked build lets the bytes land at the wait that covers them, and not before.
template <int bytes, bool through_l1 = (bytes < 16), int l2_bytes = 0>
inline void cp_async_zfill(void* to, const void* from, int valid_bytes TW_SITE) {
  (void)CpAsyncRules<bytes, through_l1, l2_bytes>{};
  if (valid_bytes < 0 || valid_bytes > bytes) {
    emu::fail("misaligned", "cp.async of " + std::to_string(bytes) + " bytes with " + std::to_string(valid_bytes) + " valid ones",
              emu::resolve_site(site));
  }
  emu::async_copy(to, from, bytes, static_cast<unsigned>(valid_bytes) TW_SITE_ARG);
}
template <int bytes, bool through_l1 = (bytes < 16), int l2_bytes = 0>
inline void cp_async(void* to, const void* from TW_SITE) {
  (void)CpAsyncRules<bytes, through_l1, l2_bytes>{};
  emu::async_copy(to, from, bytes, bytes TW_SITE_ARG);
}
inline void cp_async_commit() { emu::async_commit(); }
template <int pending>
inline void cp_async_wait() { emu::async_wait(pending); }
inline void cp_async_wait_all() { emu::async_wait_all(); }

#endif

}  // namespace tw::ptx
