// Sixteen float lanes, whatever the machine's registers: GCC's vector types are lowered to what the unit's ISA has, so a
// kernel is written once and gives the same bits on every level. For units that are compiled once a level.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/dtype.h"


namespace tw::TW_ISA {
namespace {

constexpr int kLanes = 16;

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));

struct Half {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline f32x16 splat(float x) { return f32x16{} + x; }

// {f(0), ..., f(15)}, a constant. A loop that fills a vector would be run each time.
template <class F>
constexpr i32x16 lanes(F f) {
  return i32x16{f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)};
}

#if !defined(__F16C__)
inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000) << 16;
  const std::uint32_t magnitude = std::uint32_t(h & 0x7fff) << 13;
  if (magnitude >= 0x0f800000) return bit_cast<float>(sign | (magnitude + 0x70000000));  // infinity, NaN
  // A multiplication by 2^112 moves the exponent's bias and normalises subnormals.
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(std::uint32_t(0x77800000));
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(scaled));
}

inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return std::uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));  // NaN, made quiet
  if (magnitude >= 0x477ff000) return std::uint16_t(sign | 0x7c00);  // rounds to 2^16 or beyond
  if (magnitude < 0x38800000) {
    // Below 2^-14 the result counts units of 2^-24: adding 0.5 leaves that count, rounded to even, in the low bits.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return std::uint16_t(sign | (bit_cast<std::uint32_t>(sum) - 0x3f000000));
  }
  return std::uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}
#endif

inline f32x16 load(const float* p) {
  f32x16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, f32x16 v) { __builtin_memcpy(p, &v, sizeof v); }

inline f32x16 load(const Bfloat16* p) {
  u16x16 raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  return bit_cast<f32x16>(__builtin_convertvector(raw, u32x16) << 16);
}

inline void store(Bfloat16* p, f32x16 v) {
  const u32x16 bits = bit_cast<u32x16>(v);
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const u32x16 quiet = (bits >> 16) | 0x40;
  const u16x16 raw = __builtin_convertvector(v == v ? rounded : quiet, u16x16);
  __builtin_memcpy(p, &raw, sizeof raw);
}

inline f32x16 load(const Half* p) {
#if defined(__AVX512F__)
  return bit_cast<f32x16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  f32x16 v;
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1))};
  __builtin_memcpy(&v, halves, sizeof v);
  return v;
#else
  f32x16 v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

inline void store(Half* p, f32x16 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  __m256 halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + i, _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT));
  }
#else
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_half(v[i]);
#endif
}

// The first `count` lanes, the others zero; a whole vector where count >= kLanes.
template <class T>
inline f32x16 load(const T* p, std::int64_t count) {
  if (count >= kLanes) return load(p);
  T lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

template <class T>
inline void store(T* p, f32x16 v, std::int64_t count) {
  if (count >= kLanes) return store(p, v);
  T lanes[kLanes];
  store(lanes, v);
  __builtin_memcpy(p, lanes, count * sizeof(T));
}

// Lanes are added in a fixed tree.
inline float sum(f32x16 v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

// e^x within 2 units in the last place; 0 and infinity beyond float's range, NaN for NaN.
inline f32x16 exp(f32x16 x) {
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -105.0f ? splat(-105.0f) : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 n = (x * 1.44269504f + kRound) - kRound;
  const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  f32x16 p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  // 2^n in two factors, each of which is a normal number; a NaN lane's n is any integer.
  const i32x16 exponent = __builtin_convertvector(n == n ? n : splat(0.0f), i32x16);
  const i32x16 half = exponent >> 1;
  p = p * bit_cast<f32x16>((half + 127) << 23);
  return p * bit_cast<f32x16>((exponent - half + 127) << 23);
}

}  // namespace
}  // namespace tw::TW_ISA
