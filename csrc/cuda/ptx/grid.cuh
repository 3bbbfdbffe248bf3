// The barrier of all blocks of a cooperative launch. Apart from the others, because NVRTC needs the toolkit's include/cccl
// for it beside include/.
#pragma once

#include "cuda/device.h"

#if defined(__CUDACC__)
#include <cooperative_groups.h>
#endif

namespace tw::ptx {

#if !defined(TW_EMULATOR)
__device__ __forceinline__ void grid_sync() { cooperative_groups::this_grid().sync(); }
#else
inline void grid_sync(emu::Site site = emu::Site::current()) { emu::grid_sync(site); }
#endif

}  // namespace tw::ptx
