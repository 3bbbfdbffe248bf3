// Sixteen float lanes held in the level's own registers (one of 512 bits, two of 256, or an array), with the operations
// that matrix kernels are made of. Unlike the general vectors of vector.h these stay in registers on every level, and
// `fma` rounds once where the level has such an instruction. For units that are compiled once a level.
#pragma once

#include "cpu/vector.h"

namespace tw::TW_ISA {
namespace {

using u8x16 = std::uint8_t __attribute__((vector_size(16)));
using i8x16 = std::int8_t __attribute__((vector_size(16)));
using u16x8 = std::uint16_t __attribute__((vector_size(16)));

inline u8x16 load_bytes(const void* p) {
  u8x16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Each byte shifted right by `count` < 8, and then only the bits of `mask` kept.
inline u8x16 shift_and_mask(u8x16 v, int count, std::uint8_t mask) {
  return reinterpret_cast<u8x16>(reinterpret_cast<u16x8>(v) >> count) & mask;
}

// Each byte shifted left by `count` < 8, and then only the bits of `mask` kept.
inline u8x16 shift_left_and_mask(u8x16 v, int count, std::uint8_t mask) {
  return reinterpret_cast<u8x16>(reinterpret_cast<u16x8>(v) << count) & mask;
}

#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
};

inline Lanes splat_lanes(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_lanes(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes multiply(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes to_lanes(i8x16 q) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(q)))}; }
inline Lanes to_lanes(u8x16 q) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(q)))}; }
inline Lanes to_lanes(f32x16 v) { return {bit_cast<__m512>(v)}; }
// `low` in the first eight lanes, `high` in the others.
inline Lanes two_halves(float low, float high) {
  return {_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(low), _mm512_set1_ps(high))};
}

#elif defined(__AVX2__)

struct Lanes {
  __m256 low, high;
};

inline Lanes splat_lanes(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load_lanes(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_lanes(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes multiply(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes to_lanes(i8x16 q) {
  const __m128i v = reinterpret_cast<__m128i>(q);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
inline Lanes to_lanes(u8x16 q) {
  const __m128i v = reinterpret_cast<__m128i>(q);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
inline Lanes to_lanes(f32x16 v) { return bit_cast<Lanes>(v); }
inline Lanes two_halves(float low, float high) { return {_mm256_set1_ps(low), _mm256_set1_ps(high)}; }

#else

struct Lanes {
  float v[kLanes];
};

inline Lanes splat_lanes(float x) {
  Lanes a;
  for (float& lane : a.v) lane = x;
  return a;
}
inline Lanes load_lanes(const float* p) {
  Lanes a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store_lanes(float* p, Lanes a) { __builtin_memcpy(p, &a, sizeof a); }
inline Lanes fma(const Lanes& a, const Lanes& b, Lanes c) {
  for (int i = 0; i < kLanes; ++i) c.v[i] = a.v[i] * b.v[i] + c.v[i];
  return c;
}
inline Lanes multiply(Lanes a, const Lanes& b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
inline Lanes to_lanes(i8x16 q) {
  Lanes a;
  for (int i = 0; i < kLanes; ++i) a.v[i] = static_cast<float>(q[i]);
  return a;
}
inline Lanes to_lanes(u8x16 q) {
  Lanes a;
  for (int i = 0; i < kLanes; ++i) a.v[i] = static_cast<float>(q[i]);
  return a;
}
inline Lanes to_lanes(f32x16 v) { return bit_cast<Lanes>(v); }
inline Lanes two_halves(float low, float high) {
  Lanes a;
  for (int i = 0; i < kLanes; ++i) a.v[i] = i < kLanes / 2 ? low : high;
  return a;
}

#endif

inline float load_half(const void* p) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return half_to_float(bits);
#endif
}

// The bytes of `table` that the bytes of `index`, each below 16, name.
inline u8x16 lookup(u8x16 table, u8x16 index) {
#if defined(__AVX2__)
  return reinterpret_cast<u8x16>(
      _mm_shuffle_epi8(reinterpret_cast<__m128i>(table), reinterpret_cast<__m128i>(index)));
#else
  u8x16 found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// Sixteen integers' fifth bits: a mask, or bytes that have the value 16 where the bit is set.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
using FifthBits = __mmask16;
inline FifthBits fifth_bits(std::uint32_t bits) { return static_cast<__mmask16>(bits); }
inline FifthBits fifth_bits(u8x16 bytes, int bit) {
  return _mm_test_epi8_mask(reinterpret_cast<__m128i>(bytes), _mm_set1_epi8(static_cast<char>(1 << bit)));
}
#else
using FifthBits = u8x16;
inline FifthBits fifth_bits(std::uint32_t bits) {
  constexpr u8x16 kBit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const std::uint8_t low = static_cast<std::uint8_t>(bits), high = static_cast<std::uint8_t>(bits >> 8);
  const u8x16 spread = {low, low, low, low, low, low, low, low, high, high, high, high, high, high, high, high};
  return reinterpret_cast<u8x16>((spread & kBit) == kBit) & 0x10;
}
inline FifthBits fifth_bits(u8x16 bytes, int bit) { return shift_left_and_mask(shift_and_mask(bytes, bit, 1), 4, 0x10); }
#endif

// Four vectors, each summed in the tree of `sum` (vector.h): lanes 8 apart, then 4, 2 and 1.
[[gnu::always_inline]] inline void sum_four(const Lanes (&a)[4], float (&sums)[4]) {
#if defined(__AVX512F__)
  // Halves of two vectors side by side are added at once, then quarters of all four.
  const auto halves = [](__m512 p, __m512 q) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
  };
  const __m512 ab = halves(a[0].v, a[1].v), cd = halves(a[2].v, a[3].v);
  __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v)));
#else
  for (int i = 0; i < 4; ++i) {
    float lanes[kLanes];
    store_lanes(lanes, a[i]);
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
    }
    sums[i] = lanes[0];
  }
#endif
}

}  // namespace
}  // namespace tw::TW_ISA
