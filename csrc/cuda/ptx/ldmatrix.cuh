// ldmatrix and stmatrix: a warp moves 8x8 matrices of 16-bit elements between shared memory and mma fragments.
//
// Lane l of lanes 8i to 8i+7 gives the address of row l%8 of matrix i; each row is 16 bytes, 16-byte aligned. In register
// i, lane l then holds elements (l/4, 2*(l%4)) and (l/4, 2*(l%4)+1) of matrix i, the first in the low half; with
// `_trans`, of the transposed matrix. (PTX ISA, "Warp-level matrix load instruction: ldmatrix".)
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

#if !defined(TW_EMULATOR)

namespace detail {
__device__ __forceinline__ uint32_t shared(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}
}  // namespace detail

#define TW_LDMATRIX(suffix, modifier)                                                                              \
  __device__ __forceinline__ void ldmatrix_x1##suffix(uint32_t (&r)[1], const void* row) {                         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 {%0}, [%1];"                                \
                 : "=r"(r[0]) : "r"(detail::shared(row)) : "memory");                                              \
  }                                                                                                                \
  __device__ __forceinline__ void ldmatrix_x2##suffix(uint32_t (&r)[2], const void* row) {                         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 {%0, %1}, [%2];"                            \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(detail::shared(row)) : "memory");                                  \
  }                                                                                                                \
  __device__ __forceinline__ void ldmatrix_x4##suffix(uint32_t (&r)[4], const void* row) {                         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 {%0, %1, %2, %3}, [%4];"                    \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(detail::shared(row)) : "memory");          \
  }
TW_LDMATRIX(, "")
TW_LDMATRIX(_trans, ".trans")
#undef TW_LDMATRIX

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_STMATRIX(suffix, modifier)                                                                              \
  __device__ __forceinline__ void stmatrix_x1##suffix(void* row, const uint32_t (&r)[1]) {                         \
    asm volatile("stmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 [%0], {%1};"                                \
                 :: "r"(detail::shared(row)), "r"(r[0]) : "memory");                                               \
  }                                                                                                                \
  __device__ __forceinline__ void stmatrix_x2##suffix(void* row, const uint32_t (&r)[2]) {                         \
    asm volatile("stmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 [%0], {%1, %2};"                            \
                 :: "r"(detail::shared(row)), "r"(r[0]), "r"(r[1]) : "memory");                                    \
  }                                                                                                                \
  __device__ __forceinline__ void stmatrix_x4##suffix(void* row, const uint32_t (&r)[4]) {                         \
    asm volatile("stmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 [%0], {%1, %2, %3, %4};"                    \
                 :: "r"(detail::shared(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");              \
  }
TW_STMATRIX(, "")
TW_STMATRIX(_trans, ".trans")
#undef TW_STMATRIX
#endif

#else

// The model, in ldmatrix_host.cpp. Each lane is held to have read (written) the very bytes that it receives (gives).
void ldmatrix_model(uint32_t* r, const void* row, int matrices, bool transposed, emu::Site site);
void stmatrix_model(void* row, const uint32_t* r, int matrices, bool transposed, emu::Site site);

#define TW_MATRIX(count)                                                                                           \
  inline void ldmatrix_x##count(uint32_t (&r)[count], const void* row TW_SITE) {                                   \
    ldmatrix_model(r, row, count, false TW_SITE_ARG);                                                              \
  }                                                                                                                \
  inline void ldmatrix_x##count##_trans(uint32_t (&r)[count], const void* row TW_SITE) {                           \
    ldmatrix_model(r, row, count, true TW_SITE_ARG);                                                               \
  }                                                                                                                \
  inline void stmatrix_x##count(void* row, const uint32_t (&r)[count] TW_SITE) {                                   \
    stmatrix_model(row, r, count, false TW_SITE_ARG);                                                              \
  }                                                                                                                \
  inline void stmatrix_x##count##_trans(void* row, const uint32_t (&r)[count] TW_SITE) {                           \
    stmatrix_model(row, r, count, true TW_SITE_ARG);                                                               \
  }
TW_MATRIX(1)
TW_MATRIX(2)
TW_MATRIX(4)
#undef TW_MATRIX

#endif

}  // namespace tw::ptx
