// out = f(gate) * up, element by element, where x holds a row's F gate values and then its F up values; f is silu or gelu.
//
// For R rows and elements of s bytes: bytes 3 R F s, flops about 10 R F: bound by memory.
//
// Tiling: blockIdx.x * blockDim.y + threadIdx.y is the row, blockIdx.y * blockDim.x + threadIdx.x the pack of kWidth
// elements (16 bytes, or one element where a pointer, stride or F does not allow packs). One pack a thread.
//
// Shared memory: none.
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/device.h"
#include "cuda/layers/rows.cuh"

namespace tw::layers {

struct GatedParams {
  const void* x;
  void* out;
  RowStrides x_strides;
  RowStrides out_strides;
  uint32_t rows;
  uint32_t inner_rows;
  int32_t width;  // F
};

enum class Gate { silu, gelu_tanh, gelu_none };

// exp of a negative number alone, which cannot overflow: both tails keep their relative accuracy.
__device__ __forceinline__ float sigmoid(float x) {
  const float small = expf(-fabsf(x));
  return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

template <Gate kGate>
__device__ __forceinline__ float gate(float x) {
  if constexpr (kGate == Gate::silu) {
    return x * sigmoid(x);
  } else if constexpr (kGate == Gate::gelu_tanh) {
    // (1 + tanh(u)) / 2 is the sigmoid of 2u; 2 sqrt(2 / pi) is in front.
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  } else {
    return 0.5f * x * erfcf(x * -0.7071067811865475f);
  }
}

template <class T, Gate kGate, int kWidth>
__global__ void __launch_bounds__(256) gated(const __grid_constant__ GatedParams p) {
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const int at = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (row >= p.rows || at >= p.width) return;
  const T* const x = static_cast<const T*>(p.x) + row_offset(p.x_strides, row, p.inner_rows) + at;
  const Vector<T, kWidth> gates = load<T, kWidth>(x);
  const Vector<T, kWidth> ups = load<T, kWidth>(x + p.width);
  Vector<T, kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.at[i] = from_float<T>(gate<kGate>(to_float(gates.at[i])) * to_float(ups.at[i]));
  store<T, kWidth>(static_cast<T*>(p.out) + row_offset(p.out_strides, row, p.inner_rows) + at, result);
}

}  // namespace tw::layers
