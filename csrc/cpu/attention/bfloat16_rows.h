// Rows of pages as bfloat16 numbers, and the softmax whose weights are rounded to them. For the `amx` level.
#pragma once

#if defined(__AMX_TILE__) && defined(__x86_64__)

#include "cpu/attention/float32.h"

namespace tw::TW_ISA {
namespace {

constexpr int kPair = 32;  // bfloat16 numbers in a row of a tile: 16 pairs

// As many elements as two rows have, those from `count` on zero.
struct Pairs {
  __m512i low, high;
};

inline __mmask64 first_lanes(std::int64_t count) {
  return count >= 2 * kPair ? ~__mmask64{0} : (__mmask64{1} << (count > 0 ? count : 0)) - 1;
}

inline Pairs load_pairs(const Bfloat16* p, std::int64_t count) {
  const __mmask64 lanes = first_lanes(count);
  return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>(lanes), p),
          _mm512_maskz_loadu_epi16(static_cast<__mmask32>(lanes >> kPair), p + kPair)};
}

inline __m512i rounded(f32x16 low, f32x16 high) {
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low)));
}

// The bfloat16 number of a magnitude.
constexpr std::uint16_t bfloat16_bits(E4m3 magnitude) {
  const int exponent = magnitude.bits >> 3, fraction = magnitude.bits & 7;
  if (magnitude.bits == 0x7f) return 0x7fc0;
  if (exponent != 0) return static_cast<std::uint16_t>((exponent + 120) << 7 | fraction << 4);
  if (fraction >= 4) return static_cast<std::uint16_t>(120 << 7 | (fraction & 3) << 5);
  if (fraction >= 2) return static_cast<std::uint16_t>(119 << 7 | (fraction & 1) << 6);
  return fraction == 1 ? 118 << 7 : 0;
}

constexpr std::uint16_t bfloat16_bits(E5m2 magnitude) {
  const int exponent = magnitude.bits >> 2, fraction = magnitude.bits & 3;
  if (exponent == 31) return fraction == 0 ? 0x7f80 : 0x7fc0;
  if (exponent != 0) return static_cast<std::uint16_t>((exponent + 112) << 7 | fraction << 5);
  if (fraction >= 2) return static_cast<std::uint16_t>(112 << 7 | (fraction & 1) << 6);
  return fraction == 1 ? 111 << 7 : 0;
}

constexpr std::uint16_t bfloat16_bits(Int8 magnitude) {
  int exponent = 6;
  while (exponent >= 0 && (magnitude.bits >> exponent) == 0) --exponent;
  if (exponent < 0) return 0;
  return static_cast<std::uint16_t>((exponent + 127) << 7 | ((magnitude.bits << (7 - exponent)) & 0x7f));
}

template <class T>
struct MagnitudeBytes {
  alignas(64) std::uint8_t low[128] = {}, high[128] = {};

  constexpr MagnitudeBytes() {
    for (int i = 0; i < 128; ++i) {
      const std::uint16_t bits = bfloat16_bits(T{static_cast<decltype(T::bits)>(i)});
      low[i] = static_cast<std::uint8_t>(bits & 0xff);
      high[i] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
};

// Both bytes of each number are looked up by its magnitude; its sign goes into the higher.
template <class T>
inline Pairs load_pairs(const T* p, std::int64_t count) {
  static constexpr MagnitudeBytes<T> kBytes;
  constexpr bool kIsInteger = decltype(T::bits)(-1) < 0;
  const auto look_up = [](const std::uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  // The bytes of each half of a lane become one vector's lane.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
  const __m512i raw = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(first_lanes(count), p));
  const __m512i magnitude = kIsInteger ? _mm512_abs_epi8(raw) : raw;
  const __m512i low = look_up(kBytes.low, magnitude);
  __m512i high = _mm512_ternarylogic_epi64(look_up(kBytes.high, magnitude), raw, sign, 0xf8);
  if (kIsInteger) {  // -128, whose magnitude no seven bits hold
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(raw, sign), _mm512_set1_epi8(static_cast<char>(0xc3)));
  }
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
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
