// out = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row; with kAdd, x + residual takes the place of x and is
// stored as well.
//
// For R rows of D elements of s bytes: bytes 2 R D s + D w, with kAdd 4 R D s + D w (w: of a weight); flops 4 R D (5 R D).
// At less than 3 flops a byte it is bound by memory on every device.
//
// Tiling: blockDim.x threads share a row, blockDim.y rows share a block. A thread owns every blockDim.x-th pack of kWidth
// elements (16 bytes, or one element where a pointer, stride or D does not allow packs) and keeps its first kHeld packs in
// registers as floats between the sum and the store; the launch policy picks blockDim.x so that rarely more remain, which
// are read a second time, from L1 or L2. Nothing is written before the whole row has been read, so out may be x.
//
// Batch: the order of the sum depends on D and kWidth alone: a thread's packs in order, then lanes, then warps.
//
// Shared memory: one float a warp (128 bytes).
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/device.h"
#include "cuda/layers/rows.cuh"

namespace tw::layers {

struct RmsNormParams {
  const void* x;
  const void* residual;  // kAdd
  const void* weight;
  void* out;
  void* sum;  // kAdd
  RowStrides x_strides;
  RowStrides residual_strides;
  RowStrides out_strides;
  RowStrides sum_strides;
  uint32_t rows;
  uint32_t inner_rows;
  int32_t width;  // D
  float eps;
  float weight_offset;
};

namespace rms {

constexpr int kHeld = 2;

// The sum over the row's threads, the same bits in each of them.
__device__ inline float row_sum(float value) {
  TW_SHARED(float, partial, [32]);
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;  // blockDim is uniform: all threads leave here, or none
  const int first = threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) partial[first + threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < warps; ++warp) total += partial[first + warp];
  return total;
}

// The row that is normalised: x, or x + residual, a pack of it as floats.
template <class T, int kWidth, bool kAdd>
struct Row {
  const T* x;
  const T* residual;

  __device__ __forceinline__ void read(int at, float (&values)[kWidth]) const {
    const Vector<T, kWidth> v = load<T, kWidth>(x + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = to_float(v.at[i]);
    if constexpr (kAdd) {
      const Vector<T, kWidth> r = load<T, kWidth>(residual + at);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] += to_float(r.at[i]);
    }
  }
};

template <int kWidth>
__device__ __forceinline__ float add_squares(float total, const float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) total = fmaf(values[i], values[i], total);
  return total;
}

}  // namespace rms

template <class T, class W, int kWidth, bool kAdd>
__global__ void __launch_bounds__(1024) rms_norm(const __grid_constant__ RmsNormParams p) {
  using namespace rms;
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool active = row < p.rows;  // an idle row's threads still take part in the barrier
  const int step = blockDim.x * kWidth;
  const int first = threadIdx.x * kWidth;
  const int end = active ? p.width : 0;

  Row<T, kWidth, kAdd> source{};
  if (active) {
    source.x = static_cast<const T*>(p.x) + row_offset(p.x_strides, row, p.inner_rows);
    if constexpr (kAdd) source.residual = static_cast<const T*>(p.residual) + row_offset(p.residual_strides, row, p.inner_rows);
  }
  float held[kHeld][kWidth];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < end) {
      source.read(first + i * step, held[i]);
      squares = add_squares(squares, held[i]);
    }
  }
  for (int at = first + kHeld * step; at < end; at += step) {
    float values[kWidth];
    source.read(at, values);
    squares = add_squares(squares, values);
  }
  const float scale = rsqrtf(row_sum(squares) / static_cast<float>(p.width) + p.eps);
  if (!active) return;

  T* const out = static_cast<T*>(p.out) + row_offset(p.out_strides, row, p.inner_rows);
  T* const sum = kAdd ? static_cast<T*>(p.sum) + row_offset(p.sum_strides, row, p.inner_rows) : nullptr;
  const auto write = [&](int at, const float(&values)[kWidth]) {
    const Vector<W, kWidth> weight = load<W, kWidth>(static_cast<const W*>(p.weight) + at);
    Vector<T, kWidth> normed, total;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      normed.at[i] = from_float<T>(values[i] * scale * (to_float(weight.at[i]) + p.weight_offset));
      if constexpr (kAdd) total.at[i] = from_float<T>(values[i]);
    }
    store<T, kWidth>(out + at, normed);
    if constexpr (kAdd) store<T, kWidth>(sum + at, total);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < end) write(first + i * step, held[i]);
  }
  for (int at = first + kHeld * step; at < end; at += step) {
    float values[kWidth];
    source.read(at, values);
    write(at, values);
  }
}

}  // namespace tw::layers
