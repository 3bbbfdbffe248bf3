// Scalar intrinsics: element i of the output is operation `op` of element i of the inputs.
#pragma once

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/selftest/params.cuh"

namespace tw::selftest {

__device__ inline float float_operation(int op, float x, float y) {
  switch (op) {
    case 0: return __expf(x);
    case 1: return exp2f(x);
    case 2: return rsqrtf(x);
    case 3: return __logf(x);
    case 4: return __fdividef(x, y);
    case 5: return __frcp_rn(x);
    case 6: return __fmaf_rn(x, y, 1.0f);
    case 7: return __fadd_rz(x, y);
    case 8: return __fmul_ru(x, y);
    case 9: return __fadd_rd(x, y);
    case 10: return __saturatef(x);
    case 11: return fminf(x, y);
    case 12: return max(x, y);
    case 13: return ptx::exp2_approx(x);
    case 14: return ptx::rcp_approx(x);
    case 15: return ptx::tanh_approx(x);
    case 16: return ptx::log2_approx(x);
    case 17: return __fsqrt_rn(x);
    case 18: return erff(x);
    case 19: return __int_as_float(__float_as_int(x) ^ static_cast<int>(0x80000000u));
    default: return 0.0f;
  }
}

__global__ void float_operations(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.n) return;
  static_cast<float*>(p.out)[i] = float_operation(p.op, static_cast<const float*>(p.a)[i], static_cast<const float*>(p.b)[i]);
}

__device__ inline unsigned integer_operation(int op, unsigned x, unsigned y) {
  const unsigned shift = y & 63u;
  switch (op) {
    case 0: return static_cast<unsigned>(__popc(x));
    case 1: return static_cast<unsigned>(__clz(static_cast<int>(x)));
    case 2: return static_cast<unsigned>(__ffs(static_cast<int>(x)));
    case 3: return __brev(x);
    case 4: return __byte_perm(x, y, y & 0x7777u);
    case 5: return __funnelshift_l(x, y, shift);
    case 6: return __funnelshift_r(x, y, shift);
    case 7: return __funnelshift_lc(x, y, shift);
    case 8: return __funnelshift_rc(x, y, shift);
    case 9: return __umulhi(x, y);
    case 10: return static_cast<unsigned>(__mulhi(static_cast<int>(x), static_cast<int>(y)));
    case 11: return static_cast<unsigned>(__dp4a(static_cast<int>(x), static_cast<int>(y), 7));
    case 12: return __dp4a(x, y, 7u);
    case 13: return ptx::lop3<(0xF0 & 0xCC) ^ 0xAA>(x, y, 0x0f0f1234u);
    case 14: return ptx::lop3<0x6A>(x, y, 0x0f0f1234u);
    case 15: return min(x, y);
    case 16: return static_cast<unsigned>(max(static_cast<int>(x), static_cast<int>(y)));
    case 17: return __sad(static_cast<int>(x), static_cast<int>(y), 5u);
    default: return 0;
  }
}

__global__ void integer_operations(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.n) return;
  static_cast<unsigned*>(p.out)[i] =
      integer_operation(p.op, static_cast<const unsigned*>(p.a)[i], static_cast<const unsigned*>(p.b)[i]);
}

// Eight words: float to int by rn, rz, ru, rd; to unsigned by rn, rz, ru, rd.
__global__ void float_to_integer(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.n) return;
  const float x = static_cast<const float*>(p.a)[i];
  int* out = static_cast<int*>(p.out) + 8 * i;
  out[0] = __float2int_rn(x);
  out[1] = __float2int_rz(x);
  out[2] = __float2int_ru(x);
  out[3] = __float2int_rd(x);
  out[4] = static_cast<int>(__float2uint_rn(x));
  out[5] = static_cast<int>(__float2uint_rz(x));
  out[6] = static_cast<int>(__float2uint_ru(x));
  out[7] = static_cast<int>(__float2uint_rd(x));
}

__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float as_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ inline float as_float(__nv_fp8_e5m2 x) { return static_cast<float>(x); }

template <class T>
__global__ void widen(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < p.n) static_cast<float*>(p.out)[i] = as_float(static_cast<const T*>(p.a)[i]);
}

template <class T>
__global__ void narrow(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < p.n) static_cast<T*>(p.out)[i] = T(static_cast<const float*>(p.a)[i]);
}

template <class T>
__device__ T half_operation(int op, T x, T y) {
  switch (op) {
    case 0: return __hadd(x, y);
    case 1: return __hmul(x, y);
    case 2: return __hfma(x, y, x);
    case 3: return hexp(x);
    case 4: return hsqrt(x);
    case 5: return hrcp(x);
    case 6: return __hmax(x, y);
    case 7: return htrunc(x);
    default: return x;
  }
}

template <class T>
__global__ void half_operations(const __grid_constant__ Params p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < p.n) static_cast<T*>(p.out)[i] = half_operation(p.op, static_cast<const T*>(p.a)[i], static_cast<const T*>(p.b)[i]);
}

}  // namespace tw::selftest
