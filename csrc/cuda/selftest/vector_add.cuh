// c[i] = a[i] + b[i]: the smallest kernel, and the shape that every other one has.
//
// Bytes 12n, flops n: bound by memory. One 16-byte access a thread; the last few elements one at a time.
#pragma once

#include "cuda/device.h"

namespace tw::selftest {

struct VectorAddParams {
  const float* a;
  const float* b;
  float* c;
  int64_t n;
};

__global__ void __launch_bounds__(256) vector_add(const __grid_constant__ VectorAddParams p) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (first + 4 <= p.n) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(p.a + first));
    const float4 b = __ldg(reinterpret_cast<const float4*>(p.b + first));
    *reinterpret_cast<float4*>(p.c + first) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  } else {
    for (int64_t i = first; i < p.n; ++i) p.c[i] = p.a[i] + p.b[i];
  }
}

}  // namespace tw::selftest
