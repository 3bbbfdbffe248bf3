// out[M, N] = a[M, K] * b[N, K]^T, bfloat16 in, float32 out: the instructions of ptx/ together, as a real kernel uses them.
//
// A block of four warps makes a 64 x 64 tile, each warp 32 x 32; K goes by in slices of 32 through a ring of three stages
// filled by cp.async. M, N and K are multiples of 64, 64 and 32.
//
// Shared memory, 30 KiB: stage s holds A's slice [64][40], then B's [64][40]; rows are padded from 32 to 40 elements, so that
// the eight rows of an ldmatrix start in different banks.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/device.h"

namespace tw::selftest {

struct GemmParams {
  const __nv_bfloat16* a;
  const __nv_bfloat16* b;
  float* out;
  int32_t m;
  int32_t n;
  int32_t k;
};

namespace gemm {
constexpr int kTile = 64;
constexpr int kSlice = 32;
constexpr int kStages = 3;
constexpr int kRow = kSlice + 8;              // elements of a padded row
constexpr int kOperand = kTile * kRow;        // elements of one operand's slice
constexpr int kSharedBytes = kStages * 2 * kOperand * 2;

// 64 rows of 64 bytes: two 16-byte chunks a thread.
__device__ inline void load_slice(__nv_bfloat16* to, const __nv_bfloat16* from, int stride) {
  for (int i = 0; i < 2; ++i) {
    const int chunk = static_cast<int>(threadIdx.x) + 128 * i;
    ptx::cp_async<16>(to + chunk / 4 * kRow + chunk % 4 * 8, from + static_cast<int64_t>(chunk / 4) * stride + chunk % 4 * 8);
  }
}

__device__ inline void multiply_slice(float (&sum)[2][4][4], const __nv_bfloat16* a, const __nv_bfloat16* b) {
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < kSlice; k += 16) {
    uint32_t left[2][4];
    for (int i = 0; i < 2; ++i) ptx::ldmatrix_x4(left[i], a + (16 * i + lane % 16) * kRow + k + lane / 16 * 8);
    for (int j = 0; j < 4; ++j) {
      uint32_t right[2];
      ptx::ldmatrix_x2(right, b + (8 * j + lane % 8) * kRow + k + lane / 8 % 2 * 8);
      for (int i = 0; i < 2; ++i) ptx::mma_m16n8k16<__nv_bfloat16>(sum[i][j], left[i], right);
    }
  }
}
}  // namespace gemm

__global__ void __launch_bounds__(128) gemm_bf16(const __grid_constant__ GemmParams p) {
  using namespace gemm;
  TW_DYNAMIC_SHARED(__nv_bfloat16, ring);
  const int row = blockIdx.y * kTile;
  const int column = blockIdx.x * kTile;
  const int warp_row = threadIdx.x / 64 * 32;
  const int warp_column = threadIdx.x / 32 % 2 * 32;
  const int slices = p.k / kSlice;

  const auto issue = [&](int slice) {
    if (slice < slices) {
      __nv_bfloat16* stage = ring + slice % kStages * 2 * kOperand;
      load_slice(stage, p.a + static_cast<int64_t>(row) * p.k + slice * kSlice, p.k);
      load_slice(stage + kOperand, p.b + static_cast<int64_t>(column) * p.k + slice * kSlice, p.k);
    }
    ptx::cp_async_commit();
  };

  float sum[2][4][4] = {};
  for (int slice = 0; slice < kStages - 1; ++slice) issue(slice);
  for (int slice = 0; slice < slices; ++slice) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // this slice has landed for everyone, and everyone has left the stage that is filled next
    issue(slice + kStages - 1);
    const __nv_bfloat16* stage = ring + slice % kStages * 2 * kOperand;
    multiply_slice(sum, stage + warp_row * kRow, stage + kOperand + warp_column * kRow);
  }

  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 4; ++j) {
      for (int half = 0; half < 2; ++half) {
        const int64_t at = static_cast<int64_t>(row + warp_row + 16 * i + lane / 4 + 8 * half) * p.n + column + warp_column + 8 * j +
                           lane % 4 * 2;
        *reinterpret_cast<float2*>(p.out + at) = make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
      }
    }
  }
}

}  // namespace tw::selftest
