// Named barriers: bar.sync and bar.arrive.
//
// Barriers 1 to 15 are free; 0 is __syncthreads'. `threads` counts everyone who syncs or arrives, in whole warps. A warp
// that only arrives goes on at once, and what it wrote before is visible to those who sync: producer and consumer.
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

#if !defined(TW_EMULATOR)

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

#else

inline void barrier_sync(int id, int threads TW_SITE) {
  emu::barrier_sync(static_cast<unsigned>(id), static_cast<unsigned>(threads), false, "bar.sync" TW_SITE_ARG);
}
inline void barrier_arrive(int id, int threads TW_SITE) {
  emu::barrier_arrive(static_cast<unsigned>(id), static_cast<unsigned>(threads) TW_SITE_ARG);
}

#endif

}  // namespace tw::ptx
