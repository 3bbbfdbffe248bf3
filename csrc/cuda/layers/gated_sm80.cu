#include "cuda/layers/gated_sm80.cuh"

#include "cuda/launch.h"

using namespace tw::layers;

// <activation>_and_mul_<x>_x<elements an access>
TW_KERNEL("silu_and_mul_f32_x4", gated<float, Gate::silu, 4>)
TW_KERNEL("silu_and_mul_f32_x1", gated<float, Gate::silu, 1>)
TW_KERNEL("silu_and_mul_f16_x8", gated<__half, Gate::silu, 8>)
TW_KERNEL("silu_and_mul_f16_x1", gated<__half, Gate::silu, 1>)
TW_KERNEL("silu_and_mul_bf16_x8", gated<__nv_bfloat16, Gate::silu, 8>)
TW_KERNEL("silu_and_mul_bf16_x1", gated<__nv_bfloat16, Gate::silu, 1>)
TW_KERNEL("gelu_tanh_and_mul_f32_x4", gated<float, Gate::gelu_tanh, 4>)
TW_KERNEL("gelu_tanh_and_mul_f32_x1", gated<float, Gate::gelu_tanh, 1>)
TW_KERNEL("gelu_tanh_and_mul_f16_x8", gated<__half, Gate::gelu_tanh, 8>)
TW_KERNEL("gelu_tanh_and_mul_f16_x1", gated<__half, Gate::gelu_tanh, 1>)
TW_KERNEL("gelu_tanh_and_mul_bf16_x8", gated<__nv_bfloat16, Gate::gelu_tanh, 8>)
TW_KERNEL("gelu_tanh_and_mul_bf16_x1", gated<__nv_bfloat16, Gate::gelu_tanh, 1>)
TW_KERNEL("gelu_none_and_mul_f32_x4", gated<float, Gate::gelu_none, 4>)
TW_KERNEL("gelu_none_and_mul_f32_x1", gated<float, Gate::gelu_none, 1>)
TW_KERNEL("gelu_none_and_mul_f16_x8", gated<__half, Gate::gelu_none, 8>)
TW_KERNEL("gelu_none_and_mul_f16_x1", gated<__half, Gate::gelu_none, 1>)
TW_KERNEL("gelu_none_and_mul_bf16_x8", gated<__nv_bfloat16, Gate::gelu_none, 8>)
TW_KERNEL("gelu_none_and_mul_bf16_x1", gated<__nv_bfloat16, Gate::gelu_none, 1>)
