// The grid barrier.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/selftest/params.cuh"

namespace tw::selftest {

// Each block writes a word, and reads its neighbour's after the grid barrier, n times.
__global__ void grid_ring(const __grid_constant__ Params p) {
  int* words = static_cast<int*>(p.out);
  for (int i = 0; i < p.n; ++i) {
    int next = 0;
    if (threadIdx.x == 0) next = words[(blockIdx.x + 1) % gridDim.x] + 1;
    ptx::grid_sync();
    if (threadIdx.x == 0) words[blockIdx.x] = next;
    ptx::grid_sync();
  }
}

}  // namespace tw::selftest
