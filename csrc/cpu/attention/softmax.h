// The online softmax of one row over one block of keys, in base 2.
//
// Logits are multiplied by log2(e) on the way, so that the exponential needs no other product. A row keeps a reference m
// near its largest logit, sixteen sums of 2^(logit - m), and the weighted sum of values. Everything here is arithmetic of
// one row over positions that are fixed by the keys' own, and a key that is not visible adds exactly nothing, so it does
// not matter which rows and keys are worked on together.
#pragma once

#include "cpu/vector.h"

namespace tw::TW_ISA {
namespace {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;
constexpr float kLowest = -3e38f;  // stands for -inf where a difference is formed

inline f32x16 larger(f32x16 a, f32x16 b) {  // b where a is NaN
#if defined(__AVX512F__)
  return bit_cast<f32x16>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return bit_cast<f32x16>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#else
  return a * b + c;
#endif
}

// Lanes are compared with those 8, 4, 2 and 1 apart.
inline float largest(f32x16 v) {
  v = larger(v, __builtin_shuffle(v, lanes([](int i) { return i ^ 8; })));
  v = larger(v, __builtin_shuffle(v, lanes([](int i) { return i ^ 4; })));
  v = larger(v, __builtin_shuffle(v, lanes([](int i) { return i ^ 2; })));
  return larger(v, __builtin_shuffle(v, lanes([](int i) { return i ^ 1; })))[0];
}

// 2^x; exactly 1 at 0, 0 at -inf, NaN for NaN. The fit is minimax in the relative error, 2e-9: float32's rounding is what
// remains.
inline f32x16 power_of_two(f32x16 x) {
#if defined(__AVX512F__)
  const __m512 n = _mm512_roundscale_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const f32x16 r = bit_cast<f32x16>(
      _mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));  // 0 for -inf
#else
  x = x < -160.0f ? splat(-160.0f) : x;
  x = x > 160.0f ? splat(160.0f) : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 n = (x + kRound) - kRound;
  const f32x16 r = x - n;
#endif
  f32x16 fit = splat(0.000153533618f);
  fit = fused(fit, r, splat(0.00133988744f));
  fit = fused(fit, r, splat(0.00961843736f));
  fit = fused(fit, r, splat(0.0555033247f));
  fit = fused(fit, r, splat(0.240226479f));
  fit = fused(fit, r, splat(0.693147203f));
  fit = fused(fit, r, splat(1.0f));
#if defined(__AVX512F__)
  return bit_cast<f32x16>(_mm512_scalef_ps(bit_cast<__m512>(fit), n));
#else
  // 2^n in two factors, each of which is a normal number; a NaN lane's n is any integer.
  const i32x16 exponent = __builtin_convertvector(n == n ? n : splat(0.0f), i32x16);
  const i32x16 half = exponent >> 1;
  return fit * bit_cast<f32x16>((half + 127) << 23) * bit_cast<f32x16>((exponent - half + 127) << 23);
#endif
}

inline float power_of_two(float x) { return power_of_two(splat(x))[0]; }

// Below 0.625 an odd polynomial (minimax, 2e-10), above it 1 - 2 / (e^2|x| + 1), which loses nothing there.
inline f32x16 hyperbolic_tangent(f32x16 x) {
  const f32x16 magnitude = bit_cast<f32x16>(bit_cast<u32x16>(x) & 0x7fffffffu);
  const f32x16 square = x * x;
  f32x16 fit = splat(0.00214296207f);
  fit = fused(fit, square, splat(-0.00817739853f));
  fit = fused(fit, square, splat(0.0217007034f));
  fit = fused(fit, square, splat(-0.0539467631f));
  fit = fused(fit, square, splat(0.13333206f));
  fit = fused(fit, square, splat(-0.333333308f));
  const f32x16 near = fused(fit * square, x, x);
  const f32x16 capped = magnitude > 20.0f ? splat(20.0f) : magnitude;  // 1 in float32
  const f32x16 far = 1.0f - 2.0f / (power_of_two(capped * (2 * kLog2e)) + 1.0f);
  const f32x16 signed_far = bit_cast<f32x16>(bit_cast<u32x16>(far) | (bit_cast<u32x16>(x) & 0x80000000u));
  return magnitude < 0.625f ? near : magnitude == magnitude ? signed_far : x;
}

// v in the lanes whose bit is set, `other` elsewhere.
inline f32x16 where(std::uint32_t bits, f32x16 v, f32x16 other) {
#if defined(__AVX512F__)
  return bit_cast<f32x16>(
      _mm512_mask_mov_ps(bit_cast<__m512>(other), static_cast<__mmask16>(bits), bit_cast<__m512>(v)));
#else
  constexpr u32x16 kBit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const u32x16 mine = (u32x16{} + bits) & kBit;
  return mine != 0u ? v : other;
#endif
}

// What turns products into logits, for one row and one block.
struct LogitRule {
  float scale;               // of the whole call and of all keys of the head; with log2(e) where there is no soft cap
  float softcap;             // none where 0
  float slope;               // of ALiBi, times log2(e)
  float position;            // of the query
  const float* k_factor;     // one a key, or null
  const float* v_factor;     // likewise
  const float* positions;    // of the keys; null where there is no ALiBi
};

inline f32x16 logits(f32x16 products, int i, const LogitRule& rule) {
  f32x16 t = products * rule.scale;
  if (rule.k_factor) t *= load(rule.k_factor + i);
  if (rule.softcap != 0.0f) t = hyperbolic_tangent(t * (1.0f / rule.softcap)) * (rule.softcap * kLog2e);
  if (rule.positions) {
    const f32x16 distance = load(rule.positions + i) - rule.position;
    t -= bit_cast<f32x16>(bit_cast<u32x16>(distance) & 0x7fffffffu) * rule.slope;
  }
  return t;
}

// A row's state over the keys seen so far. `sums` is sixteen lanes.
struct RowState {
  float* m;
  float* sums;
};

// The peak of a row's logits, and what its reference becomes: it follows the peak once that is more than `slack` above it.
// Weights then stay below 2^slack, and most blocks leave it alone.
inline float reference_after(float before, float peak, float slack) { return peak > before + slack ? peak : before; }

// Sixteen lanes of a block's bits.
template <int kBlock>
inline std::uint32_t bits_of(const std::uint64_t (&visible)[kBlock / 64], int vector) {
  return static_cast<std::uint32_t>(visible[vector / 4] >> (16 * (vector % 4)) & 0xffff);
}

template <int kBlock>
inline bool all_visible(const std::uint64_t (&visible)[kBlock / 64]) {
  std::uint64_t together = ~std::uint64_t{0};
  for (const std::uint64_t word : visible) together &= word;
  return together == ~std::uint64_t{0};
}

// A factor beside the visible keys may be anything.
template <int kBlock>
inline f32x16 with_value_factors(f32x16 weights, int vector, const std::uint64_t (&visible)[kBlock / 64],
                                 const LogitRule& rule) {
  if (!rule.v_factor) return weights;
  return where(bits_of<kBlock>(visible, vector), weights * load(rule.v_factor + kLanes * vector), f32x16{});
}

// Turns a row's products with a block of keys into weights, in place, and takes them into the row's state. Bit i of
// `visible` is key i. Returns what the row's sum of values has to be multiplied by.
template <int kBlock>
inline float softmax_block(float* products, const std::uint64_t (&visible)[kBlock / 64], const LogitRule& rule,
                           float slack, RowState state) {
  constexpr int kVectors = kBlock / kLanes;
  f32x16 t[kVectors];
  f32x16 top = splat(-__builtin_inff());
  for (int i = 0; i < kVectors; ++i) t[i] = logits(load(products + kLanes * i), kLanes * i, rule);
  if (!all_visible<kBlock>(visible)) {
    for (int i = 0; i < kVectors; ++i) t[i] = where(bits_of<kBlock>(visible, i), t[i], splat(-__builtin_inff()));
  }
  for (int i = 0; i < kVectors; ++i) top = larger(t[i], top);
  const float before = *state.m, m = reference_after(before, largest(top), slack);
  const f32x16 reference = splat(m > kLowest ? m : kLowest);
  f32x16 total{};
  for (int i = 0; i < kVectors; ++i) {
    const f32x16 weights = power_of_two(t[i] - reference);
    total += weights;
    store(products + kLanes * i, with_value_factors<kBlock>(weights, i, visible, rule));
  }
  const float turn = m == before ? 1.0f : power_of_two(before - m);
  store(state.sums, fused(load(state.sums), splat(turn), total));
  *state.m = m;
  return turn;
}

}  // namespace
}  // namespace tw::TW_ISA
