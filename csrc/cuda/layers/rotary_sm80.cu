#include "cuda/layers/rotary_sm80.cuh"

#include "cuda/launch.h"

using namespace tw::layers;

// rotary_<pairing>_<q>_x<elements an access>
TW_KERNEL("rotary_halves_f32_x4", rotary<float, 4, false>)
TW_KERNEL("rotary_halves_f32_x1", rotary<float, 1, false>)
TW_KERNEL("rotary_halves_f16_x8", rotary<__half, 8, false>)
TW_KERNEL("rotary_halves_f16_x1", rotary<__half, 1, false>)
TW_KERNEL("rotary_halves_bf16_x8", rotary<__nv_bfloat16, 8, false>)
TW_KERNEL("rotary_halves_bf16_x1", rotary<__nv_bfloat16, 1, false>)
TW_KERNEL("rotary_interleaved_f32_x4", rotary<float, 4, true>)
TW_KERNEL("rotary_interleaved_f32_x1", rotary<float, 1, true>)
TW_KERNEL("rotary_interleaved_f16_x8", rotary<__half, 8, true>)
TW_KERNEL("rotary_interleaved_f16_x1", rotary<__half, 1, true>)
TW_KERNEL("rotary_interleaved_bf16_x8", rotary<__nv_bfloat16, 8, true>)
TW_KERNEL("rotary_interleaved_bf16_x1", rotary<__nv_bfloat16, 1, true>)
