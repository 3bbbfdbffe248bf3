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

// Where the rows of a block's keys and values start, for one head.
template <int kBlock>
struct BlockRows {
  const char* k[kBlock];
  const char* v[kBlock];
};

// Rows that will be read next. They are asked of memory in the order of addresses, some lines at a time between other
// work: no hardware foresees the next page, and pieces of rows come at half the speed.
class Upcoming {
 public:
  Upcoming() = default;

  // `count` rows of so many bytes, of which each of `calls` calls of `ask` takes its part.
  Upcoming(const char* const* rows, int count, std::int64_t bytes, std::int64_t calls)
      : rows_(rows), left_(count), bytes_(bytes), lines_((count * ((bytes + kLine - 1) / kLine) + calls - 1) / calls) {}

  void ask() {
    for (std::int64_t line = 0; line < lines_ && left_ > 0; ++line) {
      __builtin_prefetch(*rows_ + at_, 0, 2);
      at_ += kLine;
      if (at_ < bytes_) continue;
      at_ = 0;
      ++rows_;
      --left_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const char* const* rows_ = nullptr;
  std::int64_t left_ = 0, bytes_ = 0, at_ = 0, lines_ = 0;
};

// The factors of their own that a block's keys and values have, for one head.
template <int kBlock>
struct BlockFactors {
  float k[kBlock], v[kBlock];
};

// One factor for each slot, which is not folded into the scale of the call.
inline bool has_slot_factors(const Scales& s) {
  return s.data != nullptr && (s.page_stride != 0 || s.slot_stride != 0);
}

// The factor of all keys of a head.
inline float head_factor(const Scales& s, std::int64_t head) {
  return s.data == nullptr || has_slot_factors(s) ? s.number : s.number * s.data[head * s.head_stride];
}

inline std::int64_t head_bytes(const PagedAttention& p, const Pages& pages) {
  return pages.head_stride * element_bytes(p.pages_dtype);
}

// Fills the rows of the keys [begin, end), which lie in the block that starts at `start`. The keys beside them get the
// first row's address, so that whole vectors of keys can be read; what comes of those is thrown away.
template <int kBlock>
inline void find_rows(const PagedAttention& p, const std::int32_t* table, std::int64_t head, std::int64_t start,
                      std::int64_t begin, std::int64_t end, BlockRows<kBlock>& rows) {
  const std::int64_t bytes = element_bytes(p.pages_dtype);
  const char* k = static_cast<const char*>(p.k.data) + head * head_bytes(p, p.k);
  const char* v = static_cast<const char*>(p.v.data) + head * head_bytes(p, p.v);
  walk(table, p.page_size, begin, end, [&](std::int64_t key, std::int64_t page, std::int64_t slot) {
    rows.k[key - start] = k + (page * p.k.page_stride + slot * p.k.slot_stride) * bytes;
    rows.v[key - start] = v + (page * p.v.page_stride + slot * p.v.slot_stride) * bytes;
  });
  const auto fill = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) {
      rows.k[i] = rows.k[begin - start];
      rows.v[i] = rows.v[begin - start];
    }
  };
  fill(0, begin - start);
  fill(end - start, kBlock);
}

// Likewise the factors, where slots have some; those beside [begin, end) are not written.
template <int kBlock>
inline void find_factors(const PagedAttention& p, const std::int32_t* table, std::int64_t head, std::int64_t start,
                         std::int64_t begin, std::int64_t end, BlockFactors<kBlock>& factors) {
  const auto find = [&](const Scales& s, float* found) {
    if (!has_slot_factors(s)) return;
    walk(table, p.page_size, begin, end, [&](std::int64_t key, std::int64_t page, std::int64_t slot) {
      found[key - start] = s.data[page * s.page_stride + slot * s.slot_stride + head * s.head_stride];
    });
  };
  find(p.k.scales, factors.k);
  find(p.v.scales, factors.v);
}

}  // namespace
}  // namespace tw::TW_ISA
