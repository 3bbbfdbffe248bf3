// out[t] = weight[ids[t]] * scale, converted to out's type; an id outside the table gives a row of zeros.
//
// For T tokens of D elements: bytes T D (s_weight + s_out), flops T D: bound by memory.
//
// Tiling: blockIdx.x * blockDim.y + threadIdx.y is the token, blockIdx.y * blockDim.x + threadIdx.x the pack of kWidth
// elements: 16 bytes of the narrower type, or one element where a pointer, stride or D does not allow packs.
//
// Shared memory: none.
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/device.h"

namespace tw::layers {

struct EmbeddingParams {
  const void* ids;  // int64, or int32 where narrow_ids
  const void* weight;
  void* out;
  int64_t vocabulary;
  int64_t weight_stride;
  int64_t out_stride;
  uint32_t tokens;
  int32_t width;  // D
  int32_t narrow_ids;
  float scale;
};

template <class W, class T, int kWidth>
__global__ void __launch_bounds__(256) embedding(const __grid_constant__ EmbeddingParams p) {
  const uint32_t token = blockIdx.x * blockDim.y + threadIdx.y;
  const int at = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (token >= p.tokens || at >= p.width) return;
  const int64_t id = p.narrow_ids ? static_cast<const int32_t*>(p.ids)[token] : static_cast<const int64_t*>(p.ids)[token];
  Vector<T, kWidth> result;
  if (id >= 0 && id < p.vocabulary) {
    const Vector<W, kWidth> weights = load<W, kWidth>(static_cast<const W*>(p.weight) + id * p.weight_stride + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.at[i] = from_float<T>(to_float(weights.at[i]) * p.scale);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.at[i] = from_float<T>(0.0f);
  }
  store<T, kWidth>(static_cast<T*>(p.out) + static_cast<int64_t>(token) * p.out_stride + at, result);
}

}  // namespace tw::layers
