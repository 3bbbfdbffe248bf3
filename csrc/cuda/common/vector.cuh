// Aligned packs of elements, moved by one access each, and the conversions between element types and float.
//
//   const Vector<T, 8> v = load<T, 8>(p);      16 bytes at once for T of 2 bytes, two accesses of 16 for T of 4
//   to_float(v.at[i]), from_float<T>(x)        round to nearest even; fp8 and int8 saturate
#pragma once

#include "cuda/device.h"

namespace tw {

constexpr int smaller(int a, int b) { return a < b ? a : b; }

// N elements; aligned to its size, or to the 16 bytes that one access can move.
template <class T, int N>
struct alignas(smaller(16, N * static_cast<int>(sizeof(T)))) Vector {
  T at[N];
};

template <class T, int N>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}
template <class T, int N>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& v) {
  *reinterpret_cast<Vector<T, N>*>(to) = v;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
// Finite values beyond the largest become the largest; NaN stays NaN.
template <>
__device__ __forceinline__ __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
  __nv_fp8_e4m3 r;
  r.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return r;
}
template <>
__device__ __forceinline__ __nv_fp8_e5m2 from_float<__nv_fp8_e5m2>(float x) {
  __nv_fp8_e5m2 r;
  r.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  return r;
}

}  // namespace tw
