#include "cuda/layers/embedding_sm80.cuh"

#include "cuda/launch.h"

using namespace tw::layers;

// embedding_<weight>_<out>_x<elements an access>
TW_KERNEL("embedding_f32_f32_x4", embedding<float, float, 4>)
TW_KERNEL("embedding_f32_f32_x1", embedding<float, float, 1>)
TW_KERNEL("embedding_f32_f16_x8", embedding<float, __half, 8>)
TW_KERNEL("embedding_f32_f16_x1", embedding<float, __half, 1>)
TW_KERNEL("embedding_f32_bf16_x8", embedding<float, __nv_bfloat16, 8>)
TW_KERNEL("embedding_f32_bf16_x1", embedding<float, __nv_bfloat16, 1>)
TW_KERNEL("embedding_f16_f32_x8", embedding<__half, float, 8>)
TW_KERNEL("embedding_f16_f32_x1", embedding<__half, float, 1>)
TW_KERNEL("embedding_f16_f16_x8", embedding<__half, __half, 8>)
TW_KERNEL("embedding_f16_f16_x1", embedding<__half, __half, 1>)
TW_KERNEL("embedding_f16_bf16_x8", embedding<__half, __nv_bfloat16, 8>)
TW_KERNEL("embedding_f16_bf16_x1", embedding<__half, __nv_bfloat16, 1>)
TW_KERNEL("embedding_bf16_f32_x8", embedding<__nv_bfloat16, float, 8>)
TW_KERNEL("embedding_bf16_f32_x1", embedding<__nv_bfloat16, float, 1>)
TW_KERNEL("embedding_bf16_f16_x8", embedding<__nv_bfloat16, __half, 8>)
TW_KERNEL("embedding_bf16_f16_x1", embedding<__nv_bfloat16, __half, 1>)
TW_KERNEL("embedding_bf16_bf16_x8", embedding<__nv_bfloat16, __nv_bfloat16, 8>)
TW_KERNEL("embedding_bf16_bf16_x1", embedding<__nv_bfloat16, __nv_bfloat16, 1>)
