// The product with a dense or quantised weight on the CPU; kernels/matmul/__init__.py says what it computes.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/weight_format.h"

namespace tw {

struct Weight {
  const void* data;
  std::int64_t rows, columns;  // N output features, K input features
  std::int64_t row_bytes;      // from one row to the next
  WeightFormat format;
};

struct Matmul {
  std::int64_t rows;  // M
  const void* x;
  std::int64_t x_stride;  // in elements
  Weight weight;
  const void* bias;  // of one element an output feature, or null
  void* out;
  std::int64_t out_stride;
  Dtype dtype;  // of x and out: f32, f16 or bf16
  Dtype bias_dtype;
};

struct DecodeRows {
  std::int64_t count;
  const void* ids;
  bool wide_ids;  // int64, else int32
  Weight weight;
  float scale;
  void* out;
  std::int64_t out_stride;  // in elements
  Dtype dtype;              // of out
};

#define TW_DECLARE(isa)               \
  namespace isa {                     \
  void matmul(const Matmul& p);       \
  void decode_rows(const DecodeRows& p); \
  }
TW_DECLARE(portable)
TW_DECLARE(avx2)
TW_DECLARE(avx512)
#undef TW_DECLARE

}  // namespace tw
