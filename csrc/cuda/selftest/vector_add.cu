#include "cuda/selftest/vector_add.cuh"

#include "cuda/launch.h"

TW_KERNEL("vector_add", tw::selftest::vector_add)
