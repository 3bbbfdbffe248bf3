// out = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row; with kAdd, x + residual takes the place of x and is
// stored as well.
//
// For R rows of D elements of s bytes: bytes 2 R D s + D w, with kAdd 4 R D s + D w (w: of a weight); flops 4 R D (5 R D).
// At less than 3 flops a byte it is bound by memory on every device.
//
// Tiling: blockDim.x threads share a row, blockDim.y rows share a block. A thread owns every blockDim.x-th pack of kPack
// elements, 16 bytes, and keeps its first kHeld packs in registers as floats between the sum and the store; the launch
// policy picks blockDim.x so that rarely more remain, which are read a second time, from L1 or L2. A pack is one access,
// or kPack of them where a pointer, stride or D does not allow that. Nothing is written before the whole row has been
// read, so out may be x.
//
// Batch: the order of the sum depends on D and kPack alone: a thread's packs in order, then lanes, then warps.
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

// A pack in accesses of kAccess elements, of those before `end`; the others are 0.
template <int kAccess, class T, int kPack>
__device__ __forceinline__ Vector<T, kPack> read_pack(const T* row, int at, int end) {
  if constexpr (kAccess == kPack) {
    return load<T, kPack>(row + at);
  } else {
    Vector<T, kPack> v;
#pragma unroll
    for (int i = 0; i < kPack; ++i) v.at[i] = at + i < end ? row[at + i] : from_float<T>(0.0f);
    return v;
  }
}

template <int kAccess, class T, int kPack>
__device__ __forceinline__ void write_pack(T* row, int at, int end, const Vector<T, kPack>& v) {
  if constexpr (kAccess == kPack) {
    store<T, kPack>(row + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (at + i < end) row[at + i] = v.at[i];
    }
  }
}

// The row that is normalised: x, or x + residual, a pack of it as floats.
template <class T, int kPack, int kAccess, bool kAdd>
struct Row {
  const T* x;
  const T* residual;

  __device__ __forceinline__ void read(int at, int end, float (&values)[kPack]) const {
    const Vector<T, kPack> v = read_pack<kAccess, T, kPack>(x, at, end);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values[i] = to_float(v.at[i]);
    if constexpr (kAdd) {
      const Vector<T, kPack> r = read_pack<kAccess, T, kPack>(residual, at, end);
#pragma unroll
      for (int i = 0; i < kPack; ++i) values[i] += to_float(r.at[i]);
    }
  }
};

template <int kPack>
__device__ __forceinline__ float add_squares(float total, const float (&values)[kPack]) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) total = fmaf(values[i], values[i], total);
  return total;
}

}  // namespace rms

template <class T, class W, int kPack, int kAccess, bool kAdd>
__global__ void __launch_bounds__(1024) rms_norm(const __grid_constant__ RmsNormParams p) {
  using namespace rms;
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool active = row < p.rows;  // an idle row's threads still take part in the barrier
  const int step = blockDim.x * kPack;
  const int first = threadIdx.x * kPack;
  const int end = active ? p.width : 0;

  Row<T, kPack, kAccess, kAdd> source{};
  if (active) {
    source.x = static_cast<const T*>(p.x) + row_offset(p.x_strides, row, p.inner_rows);
    if constexpr (kAdd) source.residual = static_cast<const T*>(p.residual) + row_offset(p.residual_strides, row, p.inner_rows);
  }
  float held[kHeld][kPack];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < end) {
      source.read(first + i * step, end, held[i]);
      squares = add_squares(squares, held[i]);
    }
  }
  for (int at = first + kHeld * step; at < end; at += step) {
    float values[kPack];
    source.read(at, end, values);
    squares = add_squares(squares, values);
  }
  const float scale = rsqrtf(row_sum(squares) / static_cast<float>(p.width) + p.eps);
  if (!active) return;

  T* const out = static_cast<T*>(p.out) + row_offset(p.out_strides, row, p.inner_rows);
  T* const sum = kAdd ? static_cast<T*>(p.sum) + row_offset(p.sum_strides, row, p.inner_rows) : nullptr;
  const auto write = [&](int at, const float(&values)[kPack]) {
    const Vector<W, kPack> weight = read_pack<kAccess, W, kPack>(static_cast<const W*>(p.weight), at, end);
    Vector<T, kPack> normed, total;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      normed.at[i] = from_float<T>(values[i] * scale * (to_float(weight.at[i]) + p.weight_offset));
      if constexpr (kAdd) total.at[i] = from_float<T>(values[i]);
    }
    write_pack<kAccess, T, kPack>(out, at, end, normed);
    if constexpr (kAdd) write_pack<kAccess, T, kPack>(sum, at, end, total);
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < end) write(first + i * step, held[i]);
  }
  for (int at = first + kHeld * step; at < end; at += step) {
    float values[kPack];
    source.read(at, end, values);
    write(at, values);
  }
}

}  // namespace tw::layers
