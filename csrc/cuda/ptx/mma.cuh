// mma.sync: a warp multiplies a 16xK tile by a Kx8 tile and adds the product to a 16x8 tile held in registers.
//
// With group = lane/4, t = lane%4 and E elements in a 32-bit register (1 for tf32, 2 for 16-bit, 4 for 8-bit types; the
// lowest bits hold the first element):
//   a[r], element j:  row group + 8*(r%2),  column t*E + j + 4*E*(r/2)
//   b[r], element j:  row t*E + j + 4*E*r,  column group
//   d[i]:             row group + 8*(i/2),  column 2*t + i%2          (half accumulators: d[i/2], low half first)
// (PTX ISA, "Matrix fragments for mma.m16n8k8 / k16 / k32".) All add in place: d += a * b.
#pragma once

#include "cuda/device.h"

namespace tw::ptx {

// The formats of operands that have no C++ type of their own.
struct Tf32 {};

#if !defined(TW_EMULATOR)

#define TW_MMA_F32(function, ab, instruction)                                                                        \
  template <> __device__ __forceinline__ void function<ab>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                \
  }

template <class T>
__device__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
TW_MMA_F32(mma_m16n8k16, __nv_bfloat16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
TW_MMA_F32(mma_m16n8k16, __half, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")

template <class T>
__device__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
TW_MMA_F32(mma_m16n8k8, Tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
#undef TW_MMA_F32

__device__ __forceinline__ void mma_m16n8k16_f16acc(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#define TW_MMA_K32(A, B, D, constraint, instruction)                                                                 \
  template <> __device__ __forceinline__ void mma_m16n8k32<A, B, D>(D (&d)[4], const uint32_t (&a)[4],               \
                                                                    const uint32_t (&b)[2]) {                        \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : constraint(d[0]), constraint(d[1]), constraint(d[2]), constraint(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                \
  }
template <class A, class B, class D>
__device__ void mma_m16n8k32(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
TW_MMA_K32(int8_t, int8_t, int, "+r", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
TW_MMA_K32(int8_t, uint8_t, int, "+r", "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32")
TW_MMA_K32(uint8_t, int8_t, int, "+r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32")
TW_MMA_K32(uint8_t, uint8_t, int, "+r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32")
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
TW_MMA_K32(__nv_fp8_e4m3, __nv_fp8_e4m3, float, "+f", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")
TW_MMA_K32(__nv_fp8_e4m3, __nv_fp8_e5m2, float, "+f", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32")
TW_MMA_K32(__nv_fp8_e5m2, __nv_fp8_e4m3, float, "+f", "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32")
TW_MMA_K32(__nv_fp8_e5m2, __nv_fp8_e5m2, float, "+f", "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32")
#endif
#undef TW_MMA_K32

#else

// The models are instantiated in mma_host.cpp for exactly the formats above.
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] TW_SITE);
template <class T>
void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] TW_SITE);
template <class A, class B, class D>
void mma_m16n8k32(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] TW_SITE);
void mma_m16n8k16_f16acc(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2] TW_SITE);

#endif

}  // namespace tw::ptx
