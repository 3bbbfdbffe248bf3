// Writes to the paged KV cache and the merge of partial attention; kernels/attention/__init__.py says what they compute.
#pragma once

#include "cpu/attention.h"

namespace tw {

struct AppendRows {
  const void* rows;
  std::int64_t token_stride, head_stride;
  Pages pages;
  float* written_scales;  // one a slot and head, with the strides of pages.scales; null where scales are given
};

struct AppendKv {
  std::int64_t tokens, heads, num_pages, page_size;
  const void* slots;
  bool wide_slots;  // int64, else int32
  AppendRows k, v;  // v.rows is null where there are keys alone
  Dtype dtype, pages_dtype;
};

struct PartialAttention {
  const void* out;
  std::int64_t token_stride, head_stride;
  const float* lse;
  std::int64_t lse_token_stride;
};

struct MergeAttention {
  std::int64_t parts, tokens, heads, dim;
  const PartialAttention* partials;
  void* out;
  std::int64_t token_stride, head_stride;
  float* lse;
  std::int64_t lse_token_stride;
  Dtype dtype;
};

#define TW_DECLARE(isa)                            \
  namespace isa {                                  \
  void append_kv(const AppendKv& p);               \
  void merge_attention(const MergeAttention& p);   \
  }
TW_DECLARE(portable)
TW_DECLARE(avx2)
TW_DECLARE(avx512)
#undef TW_DECLARE

}  // namespace tw
