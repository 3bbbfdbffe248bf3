// Rotary embedding of q and k: each pair (a, b) of a head's first 2 * half dimensions becomes (a cos - b sin, b cos + a sin)
// with its token's cosines and sines; the other dimensions are copied. Pairs are (i, i + half), or (2i, 2i + 1) interleaved.
//
// For T tokens, H = Hq + Hkv heads of D elements of s bytes: bytes 2 T H D s + 8 T half (the table's rows), flops 6 T H half:
// bound by memory.
//
// Tiling: a block for a token (blockIdx.x) and a share of its heads (blockIdx.y). threadIdx.x picks an item of a head, which
// the thread keeps while it goes through the heads threadIdx.y + blockIdx.y * blockDim.y, ..., so that cosines and sines are
// read once. An item is kWidth pairs, two packs of kWidth elements; or, past the pairs, one pack to be copied. kWidth is 16
// bytes, or one element where a pointer, stride or dimension does not allow packs.
//
// A thread reads both packs before it writes, and nobody else touches them, so the outputs may be the inputs.
//
// Shared memory: none.
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/device.h"

namespace tw::layers {

struct HeadStrides {
  int64_t token;
  int64_t head;
};

struct RotaryParams {
  const void* q;
  const void* k;
  void* q_out;
  void* k_out;
  const void* positions;  // int64, or int32 where narrow_positions
  const float* cos_sin;   // [max_position, 2 * half]
  HeadStrides q_strides;
  HeadStrides k_strides;
  HeadStrides q_out_strides;
  HeadStrides k_out_strides;
  int64_t max_position;
  int32_t narrow_positions;
  int32_t q_heads;
  int32_t k_heads;
  int32_t head_dim;
  int32_t half;
};

namespace rope {

template <int kWidth>
struct Angles {
  float cosines[kWidth];
  float sines[kWidth];
};

// A position outside the table has no angle: its pairs become NaN, and nothing is read.
template <int kWidth>
__device__ __forceinline__ Angles<kWidth> angles(const RotaryParams& p, int64_t position, int pair) {
  Angles<kWidth> result;
  const bool known = position >= 0 && position < p.max_position;
  if (known) {
    const float* const row = p.cos_sin + position * (2 * p.half) + pair;
    const Vector<float, kWidth> cosines = load<float, kWidth>(row);
    const Vector<float, kWidth> sines = load<float, kWidth>(row + p.half);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      result.cosines[i] = cosines.at[i];
      result.sines[i] = sines.at[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.cosines[i] = result.sines[i] = __int_as_float(0x7fffffff);
  }
  return result;
}

// Turns the kWidth pairs held by two packs: element i of the first with i of the second, or neighbours when interleaved.
template <class T, int kWidth, bool kInterleaved>
__device__ __forceinline__ void turn(Vector<T, kWidth> (&packs)[2], const Angles<kWidth>& angle) {
  float flat[2 * kWidth];
#pragma unroll
  for (int i = 0; i < 2 * kWidth; ++i) flat[i] = to_float(packs[i / kWidth].at[i % kWidth]);
#pragma unroll
  for (int pair = 0; pair < kWidth; ++pair) {
    const int a = kInterleaved ? 2 * pair : pair;
    const int b = kInterleaved ? 2 * pair + 1 : pair + kWidth;
    const float turned = flat[a] * angle.cosines[pair] - flat[b] * angle.sines[pair];
    flat[b] = flat[b] * angle.cosines[pair] + flat[a] * angle.sines[pair];
    flat[a] = turned;
  }
#pragma unroll
  for (int i = 0; i < 2 * kWidth; ++i) packs[i / kWidth].at[i % kWidth] = from_float<T>(flat[i]);
}

}  // namespace rope

template <class T, int kWidth, bool kInterleaved>
__global__ void __launch_bounds__(256) rotary(const __grid_constant__ RotaryParams p) {
  const int64_t token = blockIdx.x;
  const int64_t position =
      p.narrow_positions ? static_cast<const int32_t*>(p.positions)[token] : static_cast<const int64_t*>(p.positions)[token];
  const int turning = p.half / kWidth;
  const int items = turning + (p.head_dim - 2 * p.half) / kWidth;
  const int heads = p.q_heads + p.k_heads;
  const int first_head = blockIdx.y * blockDim.y + threadIdx.y;
  const int head_step = gridDim.y * blockDim.y;

  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const bool turns = item < turning;
    rope::Angles<kWidth> angle{};
    if (turns) angle = rope::angles<kWidth>(p, position, item * kWidth);
    const int first = turns ? item * kWidth * (kInterleaved ? 2 : 1) : 2 * p.half + (item - turning) * kWidth;
    const int second = first + (kInterleaved ? kWidth : p.half);

    for (int head = first_head; head < heads; head += head_step) {
      const bool is_q = head < p.q_heads;
      const int64_t index = is_q ? head : head - p.q_heads;
      const HeadStrides& in = is_q ? p.q_strides : p.k_strides;
      const HeadStrides& out = is_q ? p.q_out_strides : p.k_out_strides;
      const T* const from = static_cast<const T*>(is_q ? p.q : p.k) + token * in.token + index * in.head;
      T* const to = static_cast<T*>(is_q ? p.q_out : p.k_out) + token * out.token + index * out.head;
      Vector<T, kWidth> packs[2];
      packs[0] = load<T, kWidth>(from + first);
      if (turns) {
        packs[1] = load<T, kWidth>(from + second);
        rope::turn<T, kWidth, kInterleaved>(packs, angle);
        store<T, kWidth>(to + second, packs[1]);
      }
      store<T, kWidth>(to + first, packs[0]);
    }
  }
}

}  // namespace tw::layers
