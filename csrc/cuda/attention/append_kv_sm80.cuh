// Writes the keys and values of new tokens into the slots of the pages, converted to the pages' type.
//
// Pages of fp8 and int8 take x / scale, rounded to nearest even: what is too large becomes the largest number of its sign, a
// scale of 0 gives 0, NaN stays NaN in fp8 and becomes 0 in int8. The scale is given (one, or one a head), or one a slot and
// head is computed, max |x| over the row's finite x by the largest number, and written.
//
// For T tokens of H heads, D + Dv elements: bytes T H (D + Dv) (s_token + s_page), flops at most 5 an element: bound by memory.
//
// Tiling: a warp for each row, a head's key or value: the rows of token blockIdx.x are blockIdx.y * blockDim.y + threadIdx.y,
// first the heads of k, then those of v. A lane takes every 32nd pack of kWidth elements: 16 bytes of the tokens, or one
// element where a pointer, stride or dimension does not allow packs. A row whose scale is computed is read twice, the second
// time from L1.
//
// Shared memory: none.
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/device.h"

namespace tw::attention {

struct AppendRows {  // keys, or values
  const void* from;
  void* pages;
  float* scales;  // of each head, or of each slot and head; null: `scale` is everyone's
  int64_t token_stride;
  int64_t head_stride;
  int64_t page_stride;
  int64_t slot_stride;
  int64_t page_head_stride;
  int64_t scale_page_stride;
  int64_t scale_slot_stride;
  int64_t scale_head_stride;
  int32_t dim;
  float scale;
  int32_t computes_scale;  // of each slot and head, and writes it
};

struct AppendParams {
  AppendRows k;
  AppendRows v;
  const void* slots;  // int64, or int32 where narrow_slots
  int64_t num_slots;
  int32_t page_size;
  int32_t heads;
  int32_t rows;  // of a token: heads, or twice that with values
  int32_t narrow_slots;
};

namespace append {

template <class P>
constexpr float kLargest = 0.0f;  // not quantised
template <>
inline constexpr float kLargest<__nv_fp8_e4m3> = 448.0f;
template <>
inline constexpr float kLargest<__nv_fp8_e5m2> = 57344.0f;
template <>
inline constexpr float kLargest<int8_t> = 127.0f;

// max |x| over the row's finite x, by the largest number; NaN for an int8 row that has one. The same in every lane.
template <class T, class P, int kWidth>
__device__ inline float row_scale(const T* from, int dim) {
  float peak = 0.0f;
  bool has_nan = false;
  for (int at = static_cast<int>(threadIdx.x) * kWidth; at < dim; at += 32 * kWidth) {
    const Vector<T, kWidth> v = load<T, kWidth>(from + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float x = fabsf(to_float(v.at[i]));
      has_nan |= isnan(x);
      if (x <= 3.402823466e38f) peak = fmaxf(peak, x);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, distance));
  if (kLargest<P> == 127.0f && __any_sync(0xffffffffu, has_nan)) return __int_as_float(0x7fffffff);
  const float scale = peak / kLargest<P>;
  return scale < 1.175494351e-38f ? 0.0f : scale;  // subnormal
}

template <class P>
__device__ __forceinline__ P quantize(float x, float scale) {
  float ratio = scale == 0.0f ? 0.0f : x / scale;
  if (isnan(x)) ratio = x;
  if constexpr (kLargest<P> == 127.0f) {
    return isnan(ratio) ? int8_t{0} : static_cast<int8_t>(__float2int_rn(fminf(fmaxf(ratio, -127.0f), 127.0f)));
  } else {
    return from_float<P>(ratio);  // saturates, and keeps NaN
  }
}

}  // namespace append

template <class T, class P, int kWidth>
__global__ void __launch_bounds__(256) append_kv(const __grid_constant__ AppendParams p) {
  constexpr bool kQuantizes = append::kLargest<P> > 0.0f;
  const int64_t token = blockIdx.x;
  const int64_t slot = p.narrow_slots ? static_cast<const int32_t*>(p.slots)[token] : static_cast<const int64_t*>(p.slots)[token];
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (slot < 0 || slot >= p.num_slots || row >= p.rows) return;  // a warp is one row: all its lanes leave together
  const int64_t page = slot / p.page_size;
  const int64_t offset = slot - page * p.page_size;
  const AppendRows& side = row < p.heads ? p.k : p.v;
  const int64_t head = row < p.heads ? row : row - p.heads;

  const T* const from = static_cast<const T*>(side.from) + token * side.token_stride + head * side.head_stride;
  P* const to = static_cast<P*>(side.pages) + page * side.page_stride + offset * side.slot_stride + head * side.page_head_stride;
  float scale = side.scale;
  if constexpr (kQuantizes) {
    if (side.scales != nullptr) {
      float* const own = side.scales + page * side.scale_page_stride + offset * side.scale_slot_stride + head * side.scale_head_stride;
      if (side.computes_scale) {
        scale = append::row_scale<T, P, kWidth>(from, side.dim);
        if (threadIdx.x == 0) *own = scale;
      } else {
        scale = *own;
      }
    }
  }
#pragma unroll 1  // a row is a few packs a lane at most, and unrolling it costs a spill
  for (int at = static_cast<int>(threadIdx.x) * kWidth; at < side.dim; at += 32 * kWidth) {
    const Vector<T, kWidth> v = load<T, kWidth>(from + at);
    Vector<P, kWidth> converted;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (kQuantizes) {
        converted.at[i] = append::quantize<P>(to_float(v.at[i]), scale);
      } else {
        converted.at[i] = from_float<P>(to_float(v.at[i]));
      }
    }
    store<P, kWidth>(to + at, converted);
  }
}

}  // namespace tw::attention
