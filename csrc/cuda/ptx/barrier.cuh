// Named barriers (bar.sync, bar.arrive) and the barrier of a cooperative grid.
//
// Barriers 1 to 15 are free; 0 is __syncthreads'. `threads` counts everyone who syncs or arrives, in whole warps. A warp
// that only arrives goes on at once, and what it wrote before is visible to those who sync: producer and consumer.
#pragma once

#include "cuda/device.h"

#if defined(__CUDACC__)
#include <cooperative_groups.h>
#endif

namespace tw::ptx {

#if !defined(TW_EMULATOR)

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// All blocks of a cooperative launch.
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }

#else

inline void barrier_sync(int id, int threads TW_SITE) {
  emu::barrier_sync(static_cast<unsigned>(id), static_cast<unsigned>(threads), false, "bar.sync" TW_SITE_ARG);
}
inline void barrier_arrive(int id, int threads TW_SITE) {
  emu::barrier_arrive(static_cast<unsigned>(id), static_cast<unsigned>(threads) TW_SITE_ARG);
}
inline void grid_sync(emu::Site site = emu::Site::current()) { emu::grid_sync(site); }

#endif

}  // namespace tw::ptx
