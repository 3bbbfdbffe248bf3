// Norms, rotary embedding and gated activations on the CPU; kernels/layers/__init__.py says what they compute.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tw {

// A matrix whose rows are contiguous; the stride counts elements.
struct Rows {
  void* data;
  std::int64_t stride;
};

struct RmsNorm {
  std::int64_t rows, columns;
  Rows x;
  Rows residual;  // data is null where nothing is added
  const void* weight;
  float eps, weight_offset;
  Rows out;
  Rows sum;  // x + residual
  Dtype dtype, weight_dtype;
};

struct Heads {
  void* data;
  std::int64_t heads, token_stride, head_stride;
};

struct Rotary {
  std::int64_t tokens, head_dim, rotary_dim, max_position;
  Heads in[2], out[2];  // q and k
  const void* positions;
  bool wide_positions;  // int64, else int32
  const float* cos_sin;
  bool interleaved;
  Dtype dtype;
};

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2 };

struct GatedActivation {
  std::int64_t rows, columns;  // of the result
  Rows x, out;
  Activation activation;
  Dtype dtype;
};

#define TW_DECLARE(isa)                          \
  namespace isa {                                \
  void rms_norm(const RmsNorm& p);               \
  void rotary(const Rotary& p);                  \
  void gated_activation(const GatedActivation&); \
  }
TW_DECLARE(portable)
TW_DECLARE(avx2)
TW_DECLARE(avx512)
#undef TW_DECLARE

}  // namespace tw
