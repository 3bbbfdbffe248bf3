// Codes by which Python names how a weight matrix is stored; kernels/dtypes.py has the same. The dense ones are those of
// csrc/common/dtype.h.
#pragma once

namespace tw {

enum class WeightFormat : int {
  f32 = 0,
  f16 = 1,
  bf16 = 2,
  q4_0 = 16,
  q4_1 = 17,
  q5_0 = 18,
  q5_1 = 19,
  q8_0 = 20,
  q4_k = 21,
  q5_k = 22,
  q6_k = 23,
  mxfp4 = 24,
};

}  // namespace tw
