// Attention over a paged KV cache on the CPU; kernels/attention/__init__.py says what it computes.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tw {

// What stored keys or values are multiplied by: `number`, and where `data` is not null a factor of their own too. Strides
// count elements; where all are 0 there is one factor, where only that of heads is not there is one a head.
struct Scales {
  float number;
  const float* data;
  std::int64_t page_stride, slot_stride, head_stride;
};

// Keys or values; strides count elements.
struct Pages {
  void* data;
  std::int64_t page_stride, slot_stride, head_stride, dim;
  Scales scales;
};

struct PagedAttention {
  std::int64_t tokens, num_q_heads, num_kv_heads, sequences, page_size;
  const void* q;
  std::int64_t q_token_stride, q_head_stride;
  Pages k, v;
  const std::int32_t* page_table;
  std::int64_t table_stride;
  const std::int32_t* seq_lens;
  const std::int32_t* query_start;
  float scale, softcap;      // no cap where softcap is 0
  bool causal;
  std::int64_t left, right;  // of the window; unlimited where negative
  const float* alibi_slopes;  // null where there are none; so are the next three
  const float* sinks;
  const std::int32_t* tree_mask;
  std::int64_t tree_stride, tree_words;
  void* out;
  std::int64_t out_token_stride, out_head_stride;
  float* lse;
  std::int64_t lse_token_stride;
  Dtype dtype, pages_dtype;
};

#define TW_DECLARE(isa)                            \
  namespace isa {                                  \
  void paged_attention(const PagedAttention& p);   \
  }
TW_DECLARE(portable)
TW_DECLARE(avx2)
TW_DECLARE(avx512)
TW_DECLARE(avx512_bf16)
TW_DECLARE(amx)
#undef TW_DECLARE

}  // namespace tw
