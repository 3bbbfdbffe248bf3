#include "cuda/selftest/gemm.cuh"

#include "cuda/launch.h"

TW_KERNEL("gemm_bf16", tw::selftest::gemm_bf16)
