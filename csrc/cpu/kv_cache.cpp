// Writes to the paged KV cache, and the merge of partial attention.
//
// Both are bounded by memory: every element is read once and written once, beside a few operations. A row, one head's key
// or value of one token, is one unit of work.
#include "cpu/kv_cache.h"

#include "cpu/attention/pages.h"
#include "cpu/attention/softmax.h"
#include "cpu/runtime/thread_pool.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kElementsOfThread = 32768;  // worth waking another thread for

template <class F>
void with_float_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f16: return f(Half{});
    case Dtype::bf16: return f(Bfloat16{});
    default: return f(float{});
  }
}

f32x16 magnitude(f32x16 x) { return bit_cast<f32x16>(bit_cast<u32x16>(x) & 0x7fffffffu); }

// Largest numbers; what int8 and fp8 saturate at.
template <class T>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<E4m3> = 448.0f;
template <>
constexpr float kLargest<E5m2> = 57344.0f;
template <>
constexpr float kLargest<Int8> = 127.0f;

// A float that does not exceed the largest number, as fp8 with `kFraction` bits of fraction and an exponent whose bias is
// `kBias`; to nearest, ties to even. NaN is all ones.
template <int kFraction, int kBias>
std::uint8_t to_float8(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x), sign = (bits >> 24) & 0x80, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<std::uint8_t>(sign | 0x7f);
  constexpr int kShift = 23 - kFraction;
  constexpr std::uint32_t kSmallestNormal = std::uint32_t(128 - kBias) << 23;
  if (size < kSmallestNormal) {
    // Counts units of the smallest subnormal: adding 2^23 of them leaves the count, rounded to even, in the low bits.
    const float unit = bit_cast<float>(std::uint32_t(128 - kBias - kFraction + 23) << 23);
    const float sum = bit_cast<float>(size) + unit;
    return static_cast<std::uint8_t>(sign | (bit_cast<std::uint32_t>(sum) - bit_cast<std::uint32_t>(unit)));
  }
  const std::uint32_t even = (size >> kShift) & 1;
  const std::uint32_t rounded = size + ((1u << (kShift - 1)) - 1) + even - (std::uint32_t(127 - kBias) << 23);
  return static_cast<std::uint8_t>(sign | (rounded >> kShift));
}

E4m3 narrowed(float x, E4m3) { return {to_float8<3, 7>(x)}; }
E5m2 narrowed(float x, E5m2) { return {to_float8<2, 15>(x)}; }
Int8 narrowed(float x, Int8) {
  if (x != x) return {0};
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return {static_cast<std::int8_t>((x + kRound) - kRound)};
}

// max |x| over the finite x, as a scale; see append_kv's documentation.
template <class T, class P>
float scale_of_row(const T* row, std::int64_t dim) {
  f32x16 peak{};
  bool nan = false;
  for (std::int64_t d = 0; d < dim; d += kLanes) {
    const f32x16 x = load(row + d, dim - d), size = magnitude(x);
    peak = size <= 3.402823466e38f && size > peak ? size : peak;
    if (sizeof(P) == 1 && kLargest<P> == 127.0f) {
      const i32x16 odd = x != x;
      for (int i = 0; i < kLanes; ++i) nan |= odd[i] != 0;
    }
  }
  if (nan) return __builtin_nanf("");
  const float scale = largest(peak) / kLargest<P>;
  return scale < 1.17549435e-38f ? 0.0f : scale;
}

template <class T, class P>
void write_row(const T* row, P* to, std::int64_t dim, float scale) {
  if constexpr (sizeof(P) > 1) {
    for (std::int64_t d = 0; d < dim; d += kLanes) store(to + d, load(row + d, dim - d), dim - d);
  } else {
    for (std::int64_t d = 0; d < dim; d += kLanes) {
      const f32x16 x = load(row + d, dim - d);
      f32x16 ratio = x / scale;
      if (scale == 0.0f) ratio = f32x16{};
      ratio = x == x ? ratio : x;
      ratio = ratio > kLargest<P> ? splat(kLargest<P>) : ratio;
      ratio = ratio < -kLargest<P> ? splat(-kLargest<P>) : ratio;
      const std::int64_t count = dim - d < kLanes ? dim - d : kLanes;
      for (std::int64_t i = 0; i < count; ++i) to[d + i] = narrowed(ratio[i], P{});
    }
  }
}

template <class T, class P>
void append_head(const AppendRows& a, std::int64_t token, std::int64_t head, std::int64_t page, std::int64_t slot) {
  const T* row = static_cast<const T*>(a.rows) + token * a.token_stride + head * a.head_stride;
  const Pages& pages = a.pages;
  P* to = static_cast<P*>(pages.data) + page * pages.page_stride + slot * pages.slot_stride + head * pages.head_stride;
  float scale = head_factor(pages.scales, head);
  if constexpr (sizeof(P) == 1) {
    if (a.written_scales) {
      const Scales& s = pages.scales;
      scale = scale_of_row<T, P>(row, pages.dim);
      a.written_scales[page * s.page_stride + slot * s.slot_stride + head * s.head_stride] = scale;
    }
  }
  write_row(row, to, pages.dim, scale);
}

template <class T, class P>
void append_tokens(const AppendKv& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int64_t slot = p.wide_slots ? static_cast<const std::int64_t*>(p.slots)[t]
                                           : static_cast<const std::int32_t*>(p.slots)[t];
    if (slot < 0 || slot >= p.num_pages * p.page_size) continue;
    const std::int64_t page = slot / p.page_size, offset = slot % p.page_size;
    for (std::int64_t h = 0; h < p.heads; ++h) {
      append_head<T, P>(p.k, t, h, page, offset);
      if (p.v.rows) append_head<T, P>(p.v, t, h, page, offset);
    }
  }
}

template <class T>
void merge_row(const MergeAttention& p, std::int64_t token, std::int64_t head) {
  const auto lse_of = [&](const PartialAttention& part) { return part.lse[token * part.lse_token_stride + head]; };
  float peak = -__builtin_inff(), only = peak;
  int present = 0;
  for (std::int64_t s = 0; s < p.parts; ++s) {
    const float lse = lse_of(p.partials[s]);
    if (lse == -__builtin_inff()) continue;
    only = lse;
    ++present;
    peak = lse > peak ? lse : peak;
  }
  float total = 0.0f;
  const auto weight = [&](const PartialAttention& part) { return exp(splat(lse_of(part) - peak))[0]; };
  for (std::int64_t s = 0; s < p.parts; ++s) {
    if (lse_of(p.partials[s]) != -__builtin_inff()) total += weight(p.partials[s]);
  }
  T* out = static_cast<T*>(p.out) + token * p.token_stride + head * p.head_stride;
  for (std::int64_t d = 0; d < p.dim; d += kLanes) {
    f32x16 sums{};
    for (std::int64_t s = 0; s < p.parts; ++s) {
      const PartialAttention& part = p.partials[s];
      if (lse_of(part) == -__builtin_inff()) continue;
      const T* row = static_cast<const T*>(part.out) + token * part.token_stride + head * part.head_stride;
      const f32x16 x = load(row + d, p.dim - d);
      sums = present == 1 ? (only == only ? x : splat(only)) : sums + x * weight(part);
    }
    store(out + d, present > 1 ? sums / total : sums, p.dim - d);
  }
  p.lse[token * p.lse_token_stride + head] = present > 1 ? peak + __builtin_logf(total) : only;
}

}  // namespace

void append_kv(const AppendKv& p) {
  const std::int64_t grain = 1 + kElementsOfThread / (1 + p.heads * (p.k.pages.dim + p.v.pages.dim));
  with_float_type(p.dtype, [&](auto row) {
    with_page_type(p.pages_dtype, [&](auto page) {
      parallel_for(p.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
        append_tokens<decltype(row), decltype(page)>(p, begin, end);
      });
    });
  });
}

void merge_attention(const MergeAttention& p) {
  const std::int64_t grain = 1 + kElementsOfThread / (1 + p.heads * p.dim * p.parts);
  with_float_type(p.dtype, [&](auto element) {
    parallel_for(p.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t h = 0; h < p.heads; ++h) merge_row<decltype(element)>(p, t, h);
      }
    });
  });
}

}  // namespace tw::TW_ISA
