// Kernels that a budget has to catch: each does one thing that the kernels of the package must not.
#include "cuda/device.h"
#include "cuda/launch.h"

namespace tw::broken {

struct Params {
  const float* x;
  float* out;
  int32_t n;
};

// 64 running sums under a limit of 32 registers (2048 threads a multiprocessor): the rest goes to local memory.
__global__ void __launch_bounds__(1024, 2) spills(const __grid_constant__ Params p) {
  float sums[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = p.x[i * blockDim.x + threadIdx.x];
  for (int round = 0; round < p.n; ++round) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(sums[i], sums[(i + 7) % 64], p.x[round + i]);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) p.out[i * blockDim.x + threadIdx.x] = sums[i];
}

// The same with registers enough for all of them.
__global__ void __launch_bounds__(128) many_registers(const __grid_constant__ Params p) {
  float sums[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) sums[i] = p.x[i * blockDim.x + threadIdx.x];
  for (int round = 0; round < p.n; ++round) {
#pragma unroll
    for (int i = 0; i < 96; ++i) sums[i] = fmaf(sums[i], sums[(i + 7) % 96], p.x[round + i]);
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) p.out[i * blockDim.x + threadIdx.x] = sums[i];
}

// An array with an index that is known at run time only lives in local memory: LDL and STL.
__global__ void __launch_bounds__(128) indexed_array(const __grid_constant__ Params p) {
  float own[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) own[i] = p.x[i * blockDim.x + threadIdx.x];
  for (int i = 0; i < p.n; ++i) own[static_cast<int>(p.x[i]) & 31] += 1.0f;
  p.out[threadIdx.x] = own[p.n & 31];
}

// One element an access, where a budget requires 16 bytes.
__global__ void __launch_bounds__(128) narrow(const __grid_constant__ Params p) {
  if (static_cast<int>(threadIdx.x) < p.n) p.out[threadIdx.x] = p.x[threadIdx.x];
}

// 40 KiB of shared memory leave room for four blocks of 64 threads.
__global__ void __launch_bounds__(64) hoards(const __grid_constant__ Params p) {
  TW_SHARED(float, tile, [10240]);
  tile[threadIdx.x * 97 % 10240] = p.x[threadIdx.x];
  __syncthreads();
  p.out[threadIdx.x] = tile[threadIdx.x];
}

}  // namespace tw::broken

TW_KERNEL("spills", tw::broken::spills)
TW_KERNEL("many_registers", tw::broken::many_registers)
TW_KERNEL("indexed_array", tw::broken::indexed_array)
TW_KERNEL("narrow", tw::broken::narrow)
TW_KERNEL("hoards", tw::broken::hoards)
