// Where the keys of a sequence lie, and their elements as sixteen floats.
#pragma once

#include "cpu/attention.h"
#include "cpu/lanes.h"

namespace tw::TW_ISA {
namespace {

struct E4m3 {
  std::uint8_t bits;
};
struct E5m2 {
  std::uint8_t bits;
};
struct Int8 {
  std::int8_t bits;
};

inline f32x16 half_lanes(u16x16 bits) {
#if defined(__AVX512F__)
  return bit_cast<f32x16>(_mm512_cvtph_ps(bit_cast<__m256i>(bits)));
#else
  Half lanes[kLanes];
  __builtin_memcpy(lanes, &bits, sizeof lanes);
  return load(lanes);
#endif
}

inline u16x16 widened(const void* p) { return __builtin_convertvector(load_bytes(p), u16x16); }

// Moved into float16's fields e4m3 is 2^8 too small, subnormals too. Its all-ones magnitude is the NaN.
inline f32x16 load(const E4m3* p) {
  const u16x16 raw = widened(p), magnitude = raw & 0x7f;
  const u16x16 nan = bit_cast<u16x16>(magnitude == 0x7f) & 0x7c00;
  return half_lanes((magnitude << 7) | ((raw & 0x80) << 8) | nan) * 256.0f;
}

// float16 without the last byte of its fraction.
inline f32x16 load(const E5m2* p) { return half_lanes(widened(p) << 8); }

inline f32x16 load(const Int8* p) {
  const u8x16 raw = load_bytes(p);
  return __builtin_convertvector(__builtin_convertvector(bit_cast<i8x16>(raw), i32x16), f32x16);
}

// Calls f with an element of the pages' type.
template <class F>
inline void with_page_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::f16: return f(Half{});
    case Dtype::bf16: return f(Bfloat16{});
    case Dtype::e4m3: return f(E4m3{});
    case Dtype::e5m2: return f(E5m2{});
    case Dtype::i8: return f(Int8{});
  }
}

inline std::int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : dtype == Dtype::f16 || dtype == Dtype::bf16 ? 2 : 1;
}

// Walks the keys [begin, end) of a sequence in order: f(key, page, slot).
template <class F>
inline void walk(const std::int32_t* table, std::int64_t page_size, std::int64_t begin, std::int64_t end, F f) {
  std::int64_t entry = begin / page_size, slot = begin % page_size;
  for (std::int64_t key = begin; key < end; ++entry, slot = 0) {
    const std::int64_t page = table[entry];
    for (; slot < page_size && key < end; ++slot, ++key) f(key, page, slot);
  }
}

// A block's keys and values of one head: where each row starts, and the factors of its own that it has. `next` is the
// block whose rows are asked of the memory while these are packed: they lie where no hardware would look for them. Null
// for none.
template <int kBlock>
struct BlockRows {
  const BlockRows* next;
  const char* k[kBlock];
  const char* v[kBlock];
  float k_factor[kBlock], v_factor[kBlock];
};

inline void ask_for(const char* p) { __builtin_prefetch(p, 0, 2); }

// One factor for each slot, which is not folded into the scale of the call.
inline bool has_slot_factors(const Scales& s) {
  return s.data != nullptr && (s.page_stride != 0 || s.slot_stride != 0);
}

// The factor of all keys of a head.
inline float head_factor(const Scales& s, std::int64_t head) {
  return s.data == nullptr || has_slot_factors(s) ? s.number : s.number * s.data[head * s.head_stride];
}

// Fills the rows of the keys [begin, end), which lie in the block that starts at `start`. The keys beside them get the
// first row's address, so that whole vectors of keys can be read; what comes of those is thrown away.
template <int kBlock>
inline void find_rows(const PagedAttention& p, const std::int32_t* table, std::int64_t head, std::int64_t start,
                      std::int64_t begin, std::int64_t end, BlockRows<kBlock>& rows) {
  const std::int64_t bytes = element_bytes(p.pages_dtype);
  const auto base = [&](const Pages& pages) {
    return static_cast<const char*>(pages.data) + head * pages.head_stride * bytes;
  };
  const char *k = base(p.k), *v = base(p.v);
  const bool k_factors = has_slot_factors(p.k.scales), v_factors = has_slot_factors(p.v.scales);
  const auto factor = [&](const Scales& s, std::int64_t page, std::int64_t slot) {
    return s.data[page * s.page_stride + slot * s.slot_stride + head * s.head_stride];
  };
  walk(table, p.page_size, begin, end, [&](std::int64_t key, std::int64_t page, std::int64_t slot) {
    const std::int64_t i = key - start;
    rows.k[i] = k + (page * p.k.page_stride + slot * p.k.slot_stride) * bytes;
    rows.v[i] = v + (page * p.v.page_stride + slot * p.v.slot_stride) * bytes;
    if (k_factors) rows.k_factor[i] = factor(p.k.scales, page, slot);
    if (v_factors) rows.v_factor[i] = factor(p.v.scales, page, slot);
  });
  const auto fill = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      rows.k[i] = rows.k[begin - start];
      rows.v[i] = rows.v[begin - start];
      rows.k_factor[i] = rows.v_factor[i] = 0.0f;
    }
  };
  fill(0, begin - start);
  fill(end - start, kBlock);
}

}  // namespace
}  // namespace tw::TW_ISA
