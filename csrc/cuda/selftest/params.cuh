// The parameter struct that the self-test kernels share.
#pragma once

#include "cuda/device.h"

namespace tw::selftest {

struct Params {
  const void* a;
  const void* b;
  void* out;
  int32_t n;
  int32_t op;    // which of the operations that a kernel knows
  int32_t arg;   // its argument, where it takes one
  int32_t width; // of a shuffle's segments
};

}  // namespace tw::selftest
