// Built-in variables, block barriers, fences, clocks, assertions.
#pragma once

#include <chrono>

#define threadIdx (::tw::emu::here->index)
#define blockIdx (::tw::emu::here->block->index)
#define blockDim (::tw::emu::block_dim())
#define gridDim (::tw::emu::grid_dim())
#define warpSize 32

namespace tw::emu {
uint3 block_dim();
uint3 grid_dim();
[[noreturn]] inline void assertion_failed(const char* text, Site site = Site::current()) {
  fail("assert", std::string("assertion failed: ") + text, resolve_site(site));
}
}  // namespace tw::emu

#undef assert
#define assert(condition) ((condition) ? static_cast<void>(0) : ::tw::emu::assertion_failed(#condition))
inline void __trap(tw::emu::Site site = tw::emu::Site::current()) { tw::emu::fail("trap", "__trap() was called", resolve_site(site)); }

inline void __syncthreads(tw::emu::Site site = tw::emu::Site::current()) {
  tw::emu::barrier_sync(0, 0, false, "__syncthreads()", site);
}
inline int __syncthreads_count(int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  return tw::emu::barrier_sync(0, 0, predicate != 0, "__syncthreads_count()", site);
}
inline int __syncthreads_or(int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  return tw::emu::barrier_sync(0, 0, predicate != 0, "__syncthreads_or()", site) != 0;
}
inline int __syncthreads_and(int predicate, tw::emu::Site site = tw::emu::Site::current()) {
  // No thread's predicate is false exactly if no negated predicate is true.
  return tw::emu::barrier_sync(0, 0, predicate == 0, "__syncthreads_and()", site) == 0;
}

inline void __threadfence_block() { tw::emu::note_fence(); }
inline void __threadfence() { tw::emu::note_fence(); }
inline void __threadfence_system() { tw::emu::note_fence(); }

// Time passes, but tells nothing about a device.
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
inline void __nanosleep(unsigned, tw::emu::Site site = tw::emu::Site::current()) { tw::emu::poll("__nanosleep()", site); }
