// Barriers, atomics and memory operations.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/selftest/params.cuh"

namespace tw::selftest {

// Where each thread is: nine words of threadIdx, blockIdx and the sizes, in the order of the linear thread number.
__global__ void indices(const __grid_constant__ Params p) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned* out = static_cast<unsigned*>(p.out) + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 6;
  out[0] = threadIdx.x;
  out[1] = threadIdx.y;
  out[2] = threadIdx.z;
  out[3] = blockIdx.x;
  out[4] = blockIdx.y;
  out[5] = blockIdx.z;
}

// Four words a thread: the count, or and and of a predicate over the block, and the sum of all values by a tree in shared memory.
__global__ void block_reduce(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tree);
  const int value = static_cast<const int*>(p.a)[threadIdx.x];
  int* out = static_cast<int*>(p.out) + threadIdx.x * 4;
  out[0] = __syncthreads_count(value & p.arg);
  out[1] = __syncthreads_or(value & p.arg);
  out[2] = __syncthreads_and(value & p.arg);
  tree[threadIdx.x] = value;
  __syncthreads();
  for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) tree[threadIdx.x] += tree[threadIdx.x + step];
    __syncthreads();
  }
  out[3] = tree[0];
}

// One warp produces, one consumes, over two stages and two pairs of named barriers: out = 2 * a.
__global__ void producer_consumer(const __grid_constant__ Params p) {
  TW_SHARED(int, stage, [2][32]);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (int i = 0; i < p.n; ++i) {
      if (i >= 2) ptx::barrier_sync(3 + i % 2, 64);  // the consumer has emptied it
      stage[i % 2][lane] = 2 * static_cast<const int*>(p.a)[i * 32 + lane];
      ptx::barrier_arrive(1 + i % 2, 64);
    }
  } else {
    for (int i = 0; i < p.n; ++i) {
      ptx::barrier_sync(1 + i % 2, 64);
      static_cast<int*>(p.out)[i * 32 + lane] = stage[i % 2][lane];
      if (i + 2 < p.n) ptx::barrier_arrive(3 + i % 2, 64);
    }
  }
}

// op 0 to 9 on 32-bit words (int below 100, unsigned from 100 on): one atomic a thread, on out[thread % n].
__global__ void atomics(const __grid_constant__ Params p) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int s = static_cast<const int*>(p.a)[thread];
  const unsigned u = static_cast<unsigned>(s);
  int* si = static_cast<int*>(p.out) + thread % static_cast<unsigned>(p.n);
  unsigned* ui = reinterpret_cast<unsigned*>(si);
  switch (p.op) {
    case 0: atomicAdd(si, s); break;
    case 1: atomicMin(si, s); break;
    case 2: atomicMax(si, s); break;
    case 3: atomicAnd(si, s); break;
    case 4: atomicOr(si, s); break;
    case 5: atomicXor(si, s); break;
    case 6: atomicSub(si, s); break;
    case 100: atomicAdd(ui, u); break;
    case 101: atomicMin(ui, u); break;
    case 102: atomicMax(ui, u); break;
    case 103: atomicInc(ui, static_cast<unsigned>(p.arg)); break;
    case 104: atomicDec(ui, static_cast<unsigned>(p.arg)); break;
    default: break;
  }
}

// Floating-point sums; the order of the additions is fixed in the emulator, and free on a device.
template <class T>
__global__ void atomic_sum(const __grid_constant__ Params p) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(static_cast<T*>(p.out) + thread % static_cast<unsigned>(p.n), static_cast<const T*>(p.a)[thread]);
}

// A lock made of atomicCAS and atomicExch, taken by every thread in turn; out[0] counts, out[1] is the lock.
__global__ void locked_counter(const __grid_constant__ Params p) {
  int* out = static_cast<int*>(p.out);
  bool done = false;
  while (!done) {
    if (atomicCAS(&out[1], 0, 1) == 0) {
      volatile int* counter = out;
      *counter = *counter + 1;
      __threadfence();
      atomicExch(&out[1], 0);
      done = true;
    }
  }
}

// The last block to finish adds up what all have written: release, acquire and atomicInc over blocks.
__global__ void last_block_sums(const __grid_constant__ Params p) {
  TW_SHARED(int, is_last, );
  float* partial = static_cast<float*>(p.out) + 2;
  unsigned* ticket = static_cast<unsigned*>(p.out) + 1;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = static_cast<const float*>(p.a)[blockIdx.x];
    __threadfence();
    is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    __threadfence();
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += __ldcg(partial + i);
    *static_cast<float*>(p.out) = sum;
  }
}

// Block 0 waits for a flag that block 1 releases.
__global__ void acquire_release(const __grid_constant__ Params p) {
  uint32_t* flag = static_cast<uint32_t*>(p.out);
  uint32_t* data = flag + 1;
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 1) {
    *data = 42;
    ptx::store_release(flag, 1);
  } else {
    while (ptx::load_acquire(flag) == 0) {
    }
    data[1] = *data + 1;
  }
}

// Copies 16 bytes a thread through each kind of load and store.
__global__ void copies(const __grid_constant__ Params p) {
  const uint4* from = static_cast<const uint4*>(p.a) + threadIdx.x;
  uint4* to = static_cast<uint4*>(p.out) + threadIdx.x;
  ptx::prefetch_l2(from);
  ptx::prefetch_l1(from);
  switch (p.op) {
    case 0: *to = __ldg(from); break;
    case 1: __stcs(to, __ldcs(from)); break;
    case 2: __stcg(to, __ldcg(from)); break;
    case 3: __stwb(to, __ldca(from)); break;
    case 4: __stwt(to, __ldcv(from)); break;
    default: *to = ptx::load_streaming(from); break;
  }
}

}  // namespace tw::selftest
