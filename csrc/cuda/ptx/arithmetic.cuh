// Single arithmetic instructions: approximations of the special-function unit, and three-input logic.
//
// The models compute the functions precisely; ex2.approx and its like are off by up to about 2^-22 on a device.
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

#if !defined(TW_EMULATOR)

// 2^x; results below the normal range become 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Bit by bit, the function of (a, b, c) whose truth table is `table`: (0xF0 & 0xCC) | 0xAA stands for (a & b) | c.
template <int table>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(table));
  return d;
}

#else

namespace detail {
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }  // .ftz; NaN stays
}
inline float exp2_approx(float x) { return detail::flush(static_cast<float>(std::exp2(static_cast<double>(detail::flush(x))))); }
inline float log2_approx(float x) { return detail::flush(static_cast<float>(std::log2(static_cast<double>(detail::flush(x))))); }
inline float rcp_approx(float x) { return detail::flush(static_cast<float>(1.0 / static_cast<double>(detail::flush(x)))); }
inline float tanh_approx(float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); }
template <int table>
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int minterm = 0; minterm < 8; ++minterm) {
    if ((table >> minterm & 1) == 0) continue;
    d |= (minterm & 4 ? a : ~a) & (minterm & 2 ? b : ~b) & (minterm & 1 ? c : ~c);
  }
  return d;
}

#endif

}  // namespace tw::ptx
