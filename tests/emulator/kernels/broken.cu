// Kernels with one mistake each, and their corrected twins (fixed = true). tests/emulator/test_checker.py says which report
// each must lead to.
#include "cuda/launch.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/selftest/params.cuh"

using namespace tw;
using selftest::Params;

namespace {

template <bool fixed>
__global__ void missing_barrier(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  tile[threadIdx.x] = static_cast<const int*>(p.a)[threadIdx.x];
  if (fixed) __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// A second round overwrites the tile while others may still read the first one.
template <bool fixed>
__global__ void missing_second_barrier(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [64]);
  for (int round = 0; round < 3; ++round) {
    tile[threadIdx.x] = static_cast<const int*>(p.a)[threadIdx.x] + round;
    __syncthreads();
    static_cast<int*>(p.out)[threadIdx.x] = tile[63 - threadIdx.x];
    if (fixed) __syncthreads();
  }
}

// Lanes exchange through shared memory; the shuffle keeps them together but orders no memory.
template <bool fixed>
__global__ void missing_syncwarp(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [32]);
  tile[threadIdx.x] = static_cast<const int*>(p.a)[threadIdx.x];
  const int any = __shfl_sync(0xffffffffu, 0, 0);
  if (fixed) __syncwarp();
  static_cast<int*>(p.out)[threadIdx.x] = tile[threadIdx.x ^ 1] + any;
}

// __syncwarp orders one warp only.
template <bool fixed>
__global__ void syncwarp_between_warps(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [64]);
  tile[threadIdx.x] = static_cast<const int*>(p.a)[threadIdx.x];
  if (fixed) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  static_cast<int*>(p.out)[threadIdx.x] = tile[threadIdx.x ^ 32];
}

template <bool fixed>
__global__ void missing_async_wait(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  ptx::cp_async<4>(&tile[threadIdx.x], static_cast<const int*>(p.a) + threadIdx.x);
  ptx::cp_async_commit();
  if (fixed) ptx::cp_async_wait<0>();
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// Waits for all groups but one, and reads the one.
template <bool fixed>
__global__ void async_wait_one_short(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [2][64]);
  for (int stage = 0; stage < 2; ++stage) {
    ptx::cp_async<4>(&tile[stage][threadIdx.x], static_cast<const int*>(p.a) + threadIdx.x);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<fixed ? 0 : 1>();
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[1][63 - threadIdx.x];
}

// Each thread has waited for its own copies only.
template <bool fixed>
__global__ void async_wait_without_barrier(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [64]);
  ptx::cp_async<4>(&tile[threadIdx.x], static_cast<const int*>(p.a) + threadIdx.x);
  ptx::cp_async_wait_all();
  if (fixed) __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[63 - threadIdx.x];
}

// A ring of two stages that is refilled before everyone has read it.
template <bool fixed>
__global__ void async_refill_too_early(const __grid_constant__ Params p) {
  TW_SHARED(int, ring, [2][64]);
  const int* a = static_cast<const int*>(p.a);
  int sum = 0;
  ptx::cp_async<4>(&ring[0][threadIdx.x], a + threadIdx.x);
  ptx::cp_async_commit();
  for (int i = 0; i < 4; ++i) {
    if (fixed) __syncthreads();
    ptx::cp_async<4>(&ring[(i + 1) % 2][threadIdx.x], a + threadIdx.x);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    sum += ring[i % 2][63 - threadIdx.x];
  }
  static_cast<int*>(p.out)[threadIdx.x] = sum;
}

template <bool fixed>
__global__ void shared_off_by_one(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  tile[threadIdx.x + (fixed ? 0 : 1)] = static_cast<const int*>(p.a)[threadIdx.x];
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x];
}

// Past the end of one static array, where a device has the next one.
template <bool fixed>
__global__ void static_off_by_one(const __grid_constant__ Params p) {
  TW_SHARED(int, first, [64]);
  TW_SHARED(int, second, [64]);
  int* cursor = first;
  second[threadIdx.x] = 0;
  cursor[threadIdx.x + (fixed ? 0 : 1)] = static_cast<const int*>(p.a)[threadIdx.x];
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = first[threadIdx.x == 0 ? 1 : threadIdx.x] + second[threadIdx.x];
}

template <bool fixed>
__global__ void local_off_by_one(const __grid_constant__ Params p) {
  int values[4];
  for (int i = 0; i < 4; ++i) values[i] = static_cast<const int*>(p.a)[i];
  static_cast<int*>(p.out)[threadIdx.x] = values[p.n + (fixed ? -1 : 0)];
}

template <bool fixed>
__global__ void global_off_by_one(const __grid_constant__ Params p) {
  const int i = static_cast<int>(threadIdx.x);
  if (fixed ? i < p.n : i <= p.n) static_cast<int*>(p.out)[i] = static_cast<const int*>(p.a)[i];
}

template <bool fixed>
__global__ void writes_its_input(const __grid_constant__ Params p) {
  if (!fixed) static_cast<int*>(const_cast<void*>(p.a))[threadIdx.x] = 0;
  static_cast<int*>(p.out)[threadIdx.x] = 0;
}

template <bool fixed>
__global__ void misaligned_global(const __grid_constant__ Params p) {
  const int* from = static_cast<const int*>(p.a) + (fixed ? 4 : 1);
  const int4 v = __ldg(reinterpret_cast<const int4*>(from));
  static_cast<int*>(p.out)[threadIdx.x] = v.x + v.w;
}

template <bool fixed>
__global__ void misaligned_shared(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  for (int i = 0; i < 8; ++i) tile[threadIdx.x * 8 + i] = i;
  __syncthreads();
  const int2 v = *reinterpret_cast<const int2*>(tile + threadIdx.x * 8 + (fixed ? 2 : 3));
  static_cast<int*>(p.out)[threadIdx.x] = v.x + v.y;
}

template <bool fixed>
__global__ void misaligned_ldmatrix(const __grid_constant__ Params p) {
  TW_SHARED(int4, tile, [64]);
  tile[threadIdx.x] = make_int4(0, 0, 0, 0);
  tile[threadIdx.x + 32] = make_int4(0, 0, 0, 0);
  __syncthreads();
  uint32_t r[4];
  ptx::ldmatrix_x4(r, reinterpret_cast<const char*>(&tile[threadIdx.x]) + (fixed ? 16 : 8));
  static_cast<int*>(p.out)[threadIdx.x] = static_cast<int>(r[0]);
}

// ldmatrix reads rows that other lanes have just written.
template <bool fixed>
__global__ void ldmatrix_without_syncwarp(const __grid_constant__ Params p) {
  TW_SHARED(int4, tile, [32]);
  tile[threadIdx.x] = make_int4(1, 2, 3, 4);
  if (fixed) __syncwarp();
  uint32_t r[4];
  ptx::ldmatrix_x4(r, &tile[threadIdx.x]);
  static_cast<int*>(p.out)[threadIdx.x] = static_cast<int>(r[0]);
}

template <bool fixed>
__global__ void barrier_in_a_branch(const __grid_constant__ Params p) {
  if (threadIdx.x < 32) {
    static_cast<int*>(p.out)[threadIdx.x] = 1;
    if (!fixed) __syncthreads();
  } else {
    static_cast<int*>(p.out)[threadIdx.x] = 2;
    if (!fixed) __syncthreads();
  }
  __syncthreads();
}

template <bool fixed>
__global__ void return_before_barrier(const __grid_constant__ Params p) {
  if (!fixed && static_cast<int>(threadIdx.x) >= p.n) return;
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = 1;
}

template <bool fixed>
__global__ void shuffle_in_a_branch(const __grid_constant__ Params p) {
  int value = static_cast<const int*>(p.a)[threadIdx.x];
  if (fixed || threadIdx.x % 32 < 16) value += __shfl_xor_sync(0xffffffffu, value, 1);
  static_cast<int*>(p.out)[threadIdx.x] = value;
}

template <bool fixed>
__global__ void shuffle_from_an_absent_lane(const __grid_constant__ Params p) {
  int value = static_cast<const int*>(p.a)[threadIdx.x];
  if (threadIdx.x < 16) value = __shfl_sync(0x0000ffffu, value, fixed ? 3 : 20);
  static_cast<int*>(p.out)[threadIdx.x] = value;
}

template <bool fixed>
__global__ void mask_without_caller(const __grid_constant__ Params p) {
  static_cast<int*>(p.out)[threadIdx.x] = 0;
  if (threadIdx.x < 16) __syncwarp(fixed ? 0x0000ffffu : 0x00007fffu);
}

template <bool fixed>
__global__ void uninitialized(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  if (fixed || threadIdx.x != 17) tile[threadIdx.x] = static_cast<const int*>(p.a)[threadIdx.x];
  __syncthreads();
  static_cast<int*>(p.out)[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

// A named barrier that expects a warp which never comes.
template <bool fixed>
__global__ void barrier_for_too_many(const __grid_constant__ Params p) {
  if (threadIdx.x < 32) {
    ptx::barrier_sync(1, fixed ? 64 : 96);
  } else if (threadIdx.x < 64) {
    ptx::barrier_arrive(1, fixed ? 64 : 96);
  }
  static_cast<int*>(p.out)[threadIdx.x] = 1;
}

// Two warps take two barriers in opposite order.
template <bool fixed>
__global__ void barriers_in_opposite_order(const __grid_constant__ Params p) {
  const int first = fixed || threadIdx.x < 32 ? 1 : 2;
  ptx::barrier_sync(first, 64);
  ptx::barrier_sync(3 - first, 64);
  static_cast<int*>(p.out)[threadIdx.x] = 1;
}

template <bool fixed>
__global__ void waits_for_nobody(const __grid_constant__ Params p) {
  unsigned* flag = static_cast<unsigned*>(p.out);
  if (fixed && threadIdx.x == 63) ptx::store_release(flag, 1);
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(flag) == 0) {
    }
  }
}

// A flag in shared memory, polled through a volatile pointer.
template <bool fixed>
__global__ void flag_without_fence(const __grid_constant__ Params p) {
  TW_SHARED(int, flag, );
  TW_SHARED(int, data, );
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  volatile int* shared_flag = &flag;
  if (threadIdx.x == 32) {
    data = 42;
    if (fixed) __threadfence_block();
    *shared_flag = 1;
  } else if (threadIdx.x == 0) {
    while (*shared_flag == 0) {
    }
    if (fixed) __threadfence_block();
    static_cast<int*>(p.out)[0] = data;
  }
}

template <bool fixed>
__global__ void counter_read_too_early(const __grid_constant__ Params p) {
  TW_SHARED(int, counter, );
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);
  if (fixed) __syncthreads();
  if (threadIdx.x == 0) static_cast<int*>(p.out)[0] = counter;
}

// The same by the thread that runs last in order: the atomics come before the plain read.
template <bool fixed>
__global__ void counter_read_by_last_thread(const __grid_constant__ Params p) {
  TW_SHARED(int, counter, );
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);
  if (fixed) __syncthreads();
  if (threadIdx.x == blockDim.x - 1) static_cast<int*>(p.out)[0] = counter;
}

template <bool fixed>
__global__ void misaligned_async_copy(const __grid_constant__ Params p) {
  TW_DYNAMIC_SHARED(int, tile);
  if (threadIdx.x < 8) ptx::cp_async<16>(tile + 4 * threadIdx.x, static_cast<const int*>(p.a) + (fixed ? 4 : 2) * threadIdx.x);
  ptx::cp_async_wait_all();
}

template <bool fixed>
__global__ void counts_without_atomics(const __grid_constant__ Params p) {
  TW_SHARED(int, counter, );
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  if (fixed) {
    atomicAdd(&counter, 1);
  } else {
    counter = counter + 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) static_cast<int*>(p.out)[0] = counter;
}

template <bool fixed>
__global__ void async_copy_to_global(const __grid_constant__ Params p) {
  TW_SHARED(int, tile, [64]);
  int* to = fixed ? &tile[threadIdx.x] : static_cast<int*>(p.out) + threadIdx.x;
  ptx::cp_async<4>(to, static_cast<const int*>(p.a) + threadIdx.x);
  ptx::cp_async_wait_all();
}

template <bool fixed>
__global__ void null_pointer(const __grid_constant__ Params p) {
  static_cast<int*>(p.out)[threadIdx.x] = static_cast<const int*>(fixed ? p.a : p.b)[threadIdx.x];
}

__device__ __attribute__((noinline)) int deep(int depth, const int* values) {
  volatile int local[64];
  for (int i = 0; i < 64; ++i) local[i] = values[i % 4] + depth;
  return depth == 0 ? local[3] : deep(depth - 1, values) + local[depth % 64];
}
template <bool fixed>
__global__ void recursion_too_deep(const __grid_constant__ Params p) {
  static_cast<int*>(p.out)[threadIdx.x] = deep(fixed ? 3 : 1 << 20, static_cast<const int*>(p.a));
}

template <bool fixed>
__global__ void divides_by_zero(const __grid_constant__ Params p) {
  static_cast<int*>(p.out)[threadIdx.x] = 100 / (p.arg + (fixed ? 1 : 0));
}

template <bool fixed>
__global__ void asserts(const __grid_constant__ Params p) {
  assert(fixed || threadIdx.x != 5);
  static_cast<int*>(p.out)[threadIdx.x] = 1;
}

// Never comes back to the scheduler: only the watchdog can end it.
template <bool fixed>
__global__ void computes_for_ever(const __grid_constant__ Params p) {
  unsigned state = threadIdx.x + 1;
  do {
    state = state * 1664525u + 1013904223u;
    asm volatile("" : "+r"(state));
  } while (!fixed);
  static_cast<unsigned*>(p.out)[threadIdx.x] = state;
}

}  // namespace

#define TW_PAIR(name)                     \
  TW_KERNEL("broken_" #name, name<false>) \
  static const cuda::Registrar name##_fixed("fixed_" #name, __FILE__, name<true>);

TW_PAIR(missing_barrier)
TW_PAIR(missing_second_barrier)
TW_PAIR(missing_syncwarp)
TW_PAIR(syncwarp_between_warps)
TW_PAIR(missing_async_wait)
TW_PAIR(async_wait_one_short)
TW_PAIR(async_wait_without_barrier)
TW_PAIR(async_refill_too_early)
TW_PAIR(shared_off_by_one)
TW_PAIR(static_off_by_one)
TW_PAIR(local_off_by_one)
TW_PAIR(global_off_by_one)
TW_PAIR(writes_its_input)
TW_PAIR(misaligned_global)
TW_PAIR(misaligned_shared)
TW_PAIR(misaligned_ldmatrix)
TW_PAIR(ldmatrix_without_syncwarp)
TW_PAIR(barrier_in_a_branch)
TW_PAIR(return_before_barrier)
TW_PAIR(shuffle_in_a_branch)
TW_PAIR(shuffle_from_an_absent_lane)
TW_PAIR(mask_without_caller)
TW_PAIR(uninitialized)
TW_PAIR(barrier_for_too_many)
TW_PAIR(barriers_in_opposite_order)
TW_PAIR(waits_for_nobody)
TW_PAIR(flag_without_fence)
TW_PAIR(counter_read_too_early)
TW_PAIR(counter_read_by_last_thread)
TW_PAIR(misaligned_async_copy)
TW_PAIR(counts_without_atomics)
TW_PAIR(async_copy_to_global)
TW_PAIR(null_pointer)
TW_PAIR(recursion_too_deep)
TW_PAIR(divides_by_zero)
TW_PAIR(asserts)
TW_PAIR(computes_for_ever)
