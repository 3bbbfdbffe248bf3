// Every warp-wide intrinsic, one warp a block.
#pragma once

#include "cuda/selftest/params.cuh"

namespace tw::selftest {

// op 0: idx, 1: up, 2: down, 3: xor
template <class T>
__device__ T shuffle_of(unsigned mask, T value, const Params& p) {
  switch (p.op) {
    case 0: return __shfl_sync(mask, value, p.arg, p.width);
    case 1: return __shfl_up_sync(mask, value, p.arg, p.width);
    case 2: return __shfl_down_sync(mask, value, p.arg, p.width);
    default: return __shfl_xor_sync(mask, value, p.arg, p.width);
  }
}

template <class T>
__global__ void shuffle(const __grid_constant__ Params p) {
  const T value = static_cast<const T*>(p.a)[threadIdx.x];
  static_cast<T*>(p.out)[threadIdx.x] = shuffle_of(0xffffffffu, value, p);
}

// The halves of the warp shuffle apart, each under its own mask, in two branches.
__global__ void shuffle_halves(const __grid_constant__ Params p) {
  const int value = static_cast<const int*>(p.a)[threadIdx.x];
  int result;
  if (threadIdx.x < 16) {
    result = __shfl_xor_sync(0x0000ffffu, value, 1);
    result += __shfl_xor_sync(0x0000ffffu, value, 2);
  } else {
    result = __shfl_down_sync(0xffff0000u, value, 1);
  }
  static_cast<int*>(p.out)[threadIdx.x] = result;
}

// Seven words a lane: ballot, any, all of (a & arg); match_any, match_all of a; its predicate; match_any of a 64-bit copy.
__global__ void votes(const __grid_constant__ Params p) {
  const unsigned value = static_cast<const unsigned*>(p.a)[threadIdx.x];
  const int predicate = (value & static_cast<unsigned>(p.arg)) != 0;
  unsigned* out = static_cast<unsigned*>(p.out) + threadIdx.x * 7;
  out[0] = __ballot_sync(0xffffffffu, predicate);
  out[1] = static_cast<unsigned>(__any_sync(0xffffffffu, predicate));
  out[2] = static_cast<unsigned>(__all_sync(0xffffffffu, predicate));
  out[3] = __match_any_sync(0xffffffffu, value);
  int all;
  out[4] = __match_all_sync(0xffffffffu, value, &all);
  out[5] = static_cast<unsigned>(all);
  out[6] = __match_any_sync(0xffffffffu, static_cast<unsigned long long>(value) << 32);
}

// Nine words a lane: add, min, max signed; add, min, max unsigned; and, or, xor.
__global__ void reductions(const __grid_constant__ Params p) {
  const unsigned u = static_cast<const unsigned*>(p.a)[threadIdx.x];
  const int s = static_cast<int>(u);
  unsigned* out = static_cast<unsigned*>(p.out) + threadIdx.x * 9;
  out[0] = static_cast<unsigned>(__reduce_add_sync(0xffffffffu, s));
  out[1] = static_cast<unsigned>(__reduce_min_sync(0xffffffffu, s));
  out[2] = static_cast<unsigned>(__reduce_max_sync(0xffffffffu, s));
  out[3] = __reduce_add_sync(0xffffffffu, u);
  out[4] = __reduce_min_sync(0xffffffffu, u);
  out[5] = __reduce_max_sync(0xffffffffu, u);
  out[6] = __reduce_and_sync(0xffffffffu, u);
  out[7] = __reduce_or_sync(0xffffffffu, u);
  out[8] = __reduce_xor_sync(0xffffffffu, u);
}

}  // namespace tw::selftest
