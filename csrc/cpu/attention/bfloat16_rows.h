// Rows of pages as bfloat16 numbers, and the softmax whose weights are rounded to them. For the `amx` level.
#pragma once

#if defined(__AMX_TILE__) && defined(__x86_64__)

#include "cpu/attention/float32.h"

namespace tw::TW_ISA {
namespace {

constexpr int kPair = 32;  // bfloat16 numbers in a row of a tile

// 32 elements as bfloat16, those from `count` on zero.
inline __mmask32 first_lanes(std::int64_t count) {
  return count >= kPair ? ~__mmask32{0} : static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
}

inline __m512i pair_row(const Bfloat16* p, std::int64_t count) {
  return _mm512_maskz_loadu_epi16(first_lanes(count), p);
}

inline __m512i rounded(f32x16 low, f32x16 high) {
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low)));
}

inline __m512i pair_row(const Int8* p, std::int64_t count) {
  const __m256i raw = _mm256_maskz_loadu_epi8(first_lanes(count), p);
  const auto floats = [](__m128i part) { return bit_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part))); };
  return rounded(floats(_mm256_castsi256_si128(raw)), floats(_mm256_extracti128_si256(raw, 1)));
}

inline __m512i pair_row(const E5m2* p, std::int64_t count) {
  const __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first_lanes(count), p)), 8);
  return rounded(bit_cast<f32x16>(_mm512_cvtph_ps(_mm512_castsi512_si256(half))),
                 bit_cast<f32x16>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))));
}

// A normal number's exponent is 120 more in bfloat16; the eight magnitudes below those are looked up.
inline __m512i pair_row(const E4m3* p, std::int64_t count) {
  constexpr std::uint16_t kSubnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i raw = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first_lanes(count), p));
  const __m512i magnitude = _mm512_and_si512(raw, _mm512_set1_epi16(0x7f));
  __m512i v = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kSubnormal)));
  v = _mm512_mask_permutexvar_epi16(v, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, table);
  v = _mm512_mask_mov_epi16(v, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(raw, 8), _mm512_set1_epi16(-0x8000));
  return _mm512_or_si512(v, sign);
}

template <class T>
constexpr bool kIsBfloat16 = !(sizeof(T) == sizeof(float));
template <>
constexpr bool kIsBfloat16<Half> = false;

// 2^x within 3e-6, exactly 1 at 0 and 0 at -inf: the fit is over 0 <= x - floor(x) < 1.
inline f32x16 coarse_power_of_two(f32x16 x) {
  const __m512 v = bit_cast<__m512>(x);
  const f32x16 r = bit_cast<f32x16>(_mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  f32x16 fit = splat(0.0134267015f);
  fit = fused(fit, r, splat(0.0522424467f));
  fit = fused(fit, r, splat(0.241280213f));
  fit = fused(fit, r, splat(0.693044841f));
  fit = fused(fit, r, splat(1.0f));
  return bit_cast<f32x16>(_mm512_scalef_ps(bit_cast<__m512>(fit), v));
}

// As softmax_block, with the weights rounded to bfloat16 beside the products. Where a logit is only a product times a
// positive scale, the scale is left to the subtraction of the reference.
template <int kBlock>
inline float softmax_to_bfloat16(const float* products, const std::uint64_t (&visible)[kBlock / 64],
                                 const LogitRule& rule, float slack, RowState state, Bfloat16* rounded_weights) {
  constexpr int kVectors = kBlock / kLanes;
  const bool plain = rule.scale > 0.0f && !rule.k_factor && rule.softcap == 0.0f && !rule.positions;
  f32x16 t[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) t[i] = load(products + kLanes * i);
  if (!plain) {
    for (int i = 0; i < kVectors; ++i) t[i] = logits(t[i], kLanes * i, rule);
  }
  if (!all_visible<kBlock>(visible)) {
    for (int i = 0; i < kVectors; ++i) t[i] = where(bits_of<kBlock>(visible, i), t[i], splat(-__builtin_inff()));
  }
  f32x16 top[2] = {t[0], t[1]};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) top[i % 2] = larger(t[i], top[i % 2]);
  const float scale = plain ? rule.scale : 1.0f;
  const float before = *state.m;
  const float m = reference_after(before, largest(larger(top[0], top[1])) * scale, slack);
  const f32x16 reference = splat(m > kLowest ? -m : -kLowest), scales = splat(scale);
  f32x16 total[2] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    t[i] = coarse_power_of_two(fused(t[i], scales, reference));
    total[i % 2] += t[i];
  }
  const float turn = m == before ? 1.0f : power_of_two(before - m);
  store(state.sums, fused(load(state.sums), splat(turn), total[0] + total[1]));
  *state.m = m;
  if (rule.v_factor) {
    for (int i = 0; i < kVectors; ++i) t[i] = with_value_factors<kBlock>(t[i], i, visible, rule);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; i += 2) _mm512_storeu_si512(rounded_weights + kLanes * i, rounded(t[i], t[i + 1]));
  return turn;
}

}  // namespace
}  // namespace tw::TW_ISA

#endif
