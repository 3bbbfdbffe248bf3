// CUDA C++ for the host compiler: the toolkit's own headers for vector types and number formats, and this emulator for
// what those leave to the device. Included through csrc/cuda/device.h only.
#pragma once

// The toolkit's headers would spell these as attributes that the host compiler does not know.
#define __host__
#define __device__
#define __global__
#define __constant__ const
#define __grid_constant__
#define __shared__ use_TW_SHARED_or_TW_DYNAMIC_SHARED_instead_of___shared__
#define __cluster_dims__(...)
#define __block_size__(...)
#define __managed__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "emulator/machine.h"

#define TW_SITE , ::tw::emu::Site site = ::tw::emu::Site::current()
#define TW_SITE_ARG , site

// Code of the emulator itself, which the checked build must not trace as if a kernel had written it.
#ifdef TW_EMULATOR_CHECKED
#define TW_UNTRACED inline __attribute__((no_sanitize("thread", "alignment", "bounds"), noinline))
#else
#define TW_UNTRACED inline
#endif

#define TW_SHARED(type, name, dims)                                                                                  \
  using name##_shared_type = type dims;                                                                              \
  static const char name##_shared_key[] = #name;                                                                     \
  name##_shared_type& name = *static_cast<name##_shared_type*>(                                                      \
      ::tw::emu::shared_array(name##_shared_key, sizeof(name##_shared_type),                                        \
                              alignof(name##_shared_type) > 16 ? alignof(name##_shared_type) : 16,                   \
                              ::tw::emu::Site::current()))
#define TW_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::tw::emu::dynamic_shared())

#include "emulator/language/execution.h"
#include "emulator/language/warp.h"
#include "emulator/language/memory.h"
#include "emulator/language/atomics.h"
#include "emulator/language/integer.h"
#include "emulator/language/math.h"
#include "emulator/language/half.h"
