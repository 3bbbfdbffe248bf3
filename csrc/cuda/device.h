// What every kernel source includes: the CUDA language and its number formats, for nvcc, for NVRTC and for the emulator.
//
//   TW_SHARED(float, tile, [32][33]);     a static shared array (or a scalar: TW_SHARED(int, total, );)
//   TW_DYNAMIC_SHARED(char, smem);        smem points to the launch's dynamic shared memory, 128-byte aligned
//
// take the place of __shared__, which the host compiler has no meaning for. The rest is plain CUDA C++. TW_SITE and
// TW_SITE_ARG let a wrapper pass its caller's line on to the emulator's reports; they are empty on a device.
#pragma once

#if defined(__CUDACC__)

#if defined(__CUDACC_RTC__)  // the same types as libcu++ gives them there
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
typedef unsigned long size_t;
#else
#include <cstddef>
#include <cstdint>
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define TW_SHARED(type, name, dims) __shared__ __align__(16) type name dims
#define TW_DYNAMIC_SHARED(type, name)                                       \
  extern __shared__ __align__(128) unsigned char tw_dynamic_shared_bytes[]; \
  type* name = reinterpret_cast<type*>(tw_dynamic_shared_bytes)
#define TW_SITE
#define TW_SITE_ARG

#else

#define TW_EMULATOR 1
#include "emulator/language.h"

#endif
