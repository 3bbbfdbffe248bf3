// Rows of a tensor with at most two leading dimensions, each with a stride of its own (in elements).
#pragma once

#include "cuda/device.h"

namespace tw::layers {

struct RowStrides {
  int64_t outer;
  int64_t inner;
};

// Where row `row` starts, when `inner_rows` rows follow each other along the inner dimension.
__device__ __forceinline__ int64_t row_offset(const RowStrides& strides, uint32_t row, uint32_t inner_rows) {
  const uint32_t outer = row / inner_rows;
  return static_cast<int64_t>(outer) * strides.outer + static_cast<int64_t>(row - outer * inner_rows) * strides.inner;
}

}  // namespace tw::layers
