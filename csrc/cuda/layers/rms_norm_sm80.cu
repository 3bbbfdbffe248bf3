#include "cuda/layers/rms_norm_sm80.cuh"

#include "cuda/launch.h"

using namespace tw::layers;

// rms_norm_<x>_<weight>_x<elements an access>
TW_KERNEL("rms_norm_f32_f32_x4", rms_norm<float, float, 4, 4, false>)
TW_KERNEL("rms_norm_f32_f32_x1", rms_norm<float, float, 4, 1, false>)
TW_KERNEL("rms_norm_f16_f16_x8", rms_norm<__half, __half, 8, 8, false>)
TW_KERNEL("rms_norm_f16_f16_x1", rms_norm<__half, __half, 8, 1, false>)
TW_KERNEL("rms_norm_f16_f32_x8", rms_norm<__half, float, 8, 8, false>)
TW_KERNEL("rms_norm_f16_f32_x1", rms_norm<__half, float, 8, 1, false>)
TW_KERNEL("rms_norm_bf16_bf16_x8", rms_norm<__nv_bfloat16, __nv_bfloat16, 8, 8, false>)
TW_KERNEL("rms_norm_bf16_bf16_x1", rms_norm<__nv_bfloat16, __nv_bfloat16, 8, 1, false>)
TW_KERNEL("rms_norm_bf16_f32_x8", rms_norm<__nv_bfloat16, float, 8, 8, false>)
TW_KERNEL("rms_norm_bf16_f32_x1", rms_norm<__nv_bfloat16, float, 8, 1, false>)
TW_KERNEL("fused_add_rms_norm_f32_f32_x4", rms_norm<float, float, 4, 4, true>)
TW_KERNEL("fused_add_rms_norm_f32_f32_x1", rms_norm<float, float, 4, 1, true>)
TW_KERNEL("fused_add_rms_norm_f16_f16_x8", rms_norm<__half, __half, 8, 8, true>)
TW_KERNEL("fused_add_rms_norm_f16_f16_x1", rms_norm<__half, __half, 8, 1, true>)
TW_KERNEL("fused_add_rms_norm_f16_f32_x8", rms_norm<__half, float, 8, 8, true>)
TW_KERNEL("fused_add_rms_norm_f16_f32_x1", rms_norm<__half, float, 8, 1, true>)
TW_KERNEL("fused_add_rms_norm_bf16_bf16_x8", rms_norm<__nv_bfloat16, __nv_bfloat16, 8, 8, true>)
TW_KERNEL("fused_add_rms_norm_bf16_bf16_x1", rms_norm<__nv_bfloat16, __nv_bfloat16, 8, 1, true>)
TW_KERNEL("fused_add_rms_norm_bf16_f32_x8", rms_norm<__nv_bfloat16, float, 8, 8, true>)
TW_KERNEL("fused_add_rms_norm_bf16_f32_x1", rms_norm<__nv_bfloat16, float, 8, 1, true>)
