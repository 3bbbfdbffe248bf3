// Matrix and copy instructions, raw: fragments go in and come out as registers, so that a test sees the layout itself.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/selftest/params.cuh"

namespace tw::selftest {

// a: 4 registers a lane [32][4]; b: 2 registers [32][2]; out: 4 accumulators [32][4], in place. op chooses the format.
template <class D>
__device__ void mma_by_op(int op, D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ inline void mma_by_op<float>(int op, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if (op == 0) ptx::mma_m16n8k16<__nv_bfloat16>(d, a, b);
  if (op == 1) ptx::mma_m16n8k16<__half>(d, a, b);
  if (op == 2) ptx::mma_m16n8k8<ptx::Tf32>(d, a, b);
#if defined(TW_EMULATOR) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  if (op == 3) ptx::mma_m16n8k32<__nv_fp8_e4m3, __nv_fp8_e4m3, float>(d, a, b);
  if (op == 4) ptx::mma_m16n8k32<__nv_fp8_e4m3, __nv_fp8_e5m2, float>(d, a, b);
  if (op == 5) ptx::mma_m16n8k32<__nv_fp8_e5m2, __nv_fp8_e4m3, float>(d, a, b);
  if (op == 6) ptx::mma_m16n8k32<__nv_fp8_e5m2, __nv_fp8_e5m2, float>(d, a, b);
#endif
}

template <>
__device__ inline void mma_by_op<int>(int op, int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if (op == 0) ptx::mma_m16n8k32<int8_t, int8_t, int>(d, a, b);
  if (op == 1) ptx::mma_m16n8k32<int8_t, uint8_t, int>(d, a, b);
  if (op == 2) ptx::mma_m16n8k32<uint8_t, int8_t, int>(d, a, b);
  if (op == 3) ptx::mma_m16n8k32<uint8_t, uint8_t, int>(d, a, b);
}

template <class D>
__global__ void mma(const __grid_constant__ Params p) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4], b[2];
  D d[4];
  for (int i = 0; i < 4; ++i) a[i] = static_cast<const uint32_t*>(p.a)[lane * 4 + i];
  for (int i = 0; i < 2; ++i) b[i] = static_cast<const uint32_t*>(p.b)[lane * 2 + i];
  for (int i = 0; i < 4; ++i) d[i] = static_cast<D*>(p.out)[lane * 4 + i];
  mma_by_op<D>(p.op, d, a, b);
  for (int i = 0; i < 4; ++i) static_cast<D*>(p.out)[lane * 4 + i] = d[i];
}

__global__ void mma_f16acc(const __grid_constant__ Params p) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4], b[2], d[2];
  for (int i = 0; i < 4; ++i) a[i] = static_cast<const uint32_t*>(p.a)[lane * 4 + i];
  for (int i = 0; i < 2; ++i) b[i] = static_cast<const uint32_t*>(p.b)[lane * 2 + i];
  for (int i = 0; i < 2; ++i) d[i] = static_cast<uint32_t*>(p.out)[lane * 2 + i];
  ptx::mma_m16n8k16_f16acc(d, a, b);
  for (int i = 0; i < 2; ++i) static_cast<uint32_t*>(p.out)[lane * 2 + i] = d[i];
}

// a: shared memory's 1024 bytes; b: the row's byte offset that each lane gives; out: the registers [32][count].
template <int count, bool transposed>
__global__ void ldmatrix(const __grid_constant__ Params p) {
  TW_SHARED(uint4, tile, [64]);
  const unsigned lane = threadIdx.x;
  tile[lane] = static_cast<const uint4*>(p.a)[lane];
  tile[lane + 32] = static_cast<const uint4*>(p.a)[lane + 32];
  __syncwarp();
  const char* row = reinterpret_cast<const char*>(&tile[0]) + static_cast<const int*>(p.b)[lane];
  uint32_t r[count];
  if constexpr (count == 1) {
    if constexpr (transposed) ptx::ldmatrix_x1_trans(r, row); else ptx::ldmatrix_x1(r, row);
  } else if constexpr (count == 2) {
    if constexpr (transposed) ptx::ldmatrix_x2_trans(r, row); else ptx::ldmatrix_x2(r, row);
  } else {
    if constexpr (transposed) ptx::ldmatrix_x4_trans(r, row); else ptx::ldmatrix_x4(r, row);
  }
  for (int i = 0; i < count; ++i) static_cast<uint32_t*>(p.out)[lane * count + i] = r[i];
}

// a: the registers [32][count]; b: the rows' offsets; out: shared memory's 1024 bytes afterwards.
template <int count, bool transposed>
__global__ void stmatrix(const __grid_constant__ Params p) {
#if defined(TW_EMULATOR) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  TW_SHARED(uint4, tile, [64]);
  const unsigned lane = threadIdx.x;
  tile[lane] = make_uint4(0, 0, 0, 0);
  tile[lane + 32] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  char* row = reinterpret_cast<char*>(&tile[0]) + static_cast<const int*>(p.b)[lane];
  uint32_t r[count];
  for (int i = 0; i < count; ++i) r[i] = static_cast<const uint32_t*>(p.a)[lane * count + i];
  if constexpr (count == 1) {
    if constexpr (transposed) ptx::stmatrix_x1_trans(row, r); else ptx::stmatrix_x1(row, r);
  } else if constexpr (count == 2) {
    if constexpr (transposed) ptx::stmatrix_x2_trans(row, r); else ptx::stmatrix_x2(row, r);
  } else {
    if constexpr (transposed) ptx::stmatrix_x4_trans(row, r); else ptx::stmatrix_x4(row, r);
  }
  __syncwarp();
  static_cast<uint4*>(p.out)[lane] = tile[lane];
  static_cast<uint4*>(p.out)[lane + 32] = tile[lane + 32];
#endif
}

// Copies n bytes in three stages of a ring, `bytes` a thread at a time, and zero-fills behind `arg` valid bytes.
template <int bytes>
__global__ void cp_async_ring(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(char, ring);
  constexpr int stages = 3;
  const int chunk = bytes * static_cast<int>(blockDim.x);
  const int chunks = p.n / chunk;
  const char* from = static_cast<const char*>(p.a);
  const auto issue = [&](int i) {
    if (i < chunks) {
      const int at = i * chunk + static_cast<int>(threadIdx.x) * bytes;
      const int valid = min(max(p.arg - at, 0), bytes);
      char* to = ring + i % stages * chunk + static_cast<int>(threadIdx.x) * bytes;
      if (valid == bytes) {
        ptx::cp_async<bytes>(to, from + at);
      } else {
        ptx::cp_async_zfill<bytes>(to, from + (valid > 0 ? at : 0), valid);
      }
    }
    ptx::cp_async_commit();  // an empty group keeps the count of groups in step
  };
  for (int i = 0; i < stages - 1; ++i) issue(i);
  for (int i = 0; i < chunks; ++i) {
    ptx::cp_async_wait<stages - 2>();
    __syncthreads();
    issue(i + stages - 1);
    // Each thread writes out what its mirror image copied.
    const int mirrored = static_cast<int>(blockDim.x - 1 - threadIdx.x) * bytes;
    for (int j = 0; j < bytes; ++j) {
      static_cast<char*>(p.out)[i * chunk + mirrored + j] = ring[i % stages * chunk + mirrored + j];
    }
  }
}

}  // namespace tw::selftest
