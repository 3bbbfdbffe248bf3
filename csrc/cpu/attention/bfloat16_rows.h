// What the levels with instructions for bfloat16 share: rows of pages as bfloat16 numbers, the softmax whose weights are
// rounded to them, and values in pairs of keys.
#pragma once

#if defined(__AVX512BF16__) && defined(__x86_64__)

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

constexpr std::int64_t kTileBytes = 1024;  // of sixteen rows of pairs
constexpr int kTileFloats = 256;

// Sixteen rows of keys, turned: use(p, the dimensions 2 p and 2 p + 1 of each key) for every pair.
template <class T, class Use>
inline void pair_dimensions(const char* const* rows, std::int64_t dim, Use use) {
  for (std::int64_t d = 0; d < dim; d += 2 * kPair) {
    Pairs pairs[kLanes];
    for (int i = 0; i < kLanes; ++i) pairs[i] = load_pairs(elements<T>(rows[i]) + d, dim - d);
    for (int half = 0; half < 2 && d + half * kPair < dim; ++half) {
      f32x16 v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = bit_cast<f32x16>(half == 0 ? pairs[i].low : pairs[i].high);
      transpose(v);
      for (int i = 0; i < kLanes; ++i) use(d / 2 + half * kLanes + i, v[i]);
    }
  }
}

// Of a Worker's mathematics, what does not depend on how products are formed.
struct Bfloat16Rows {
  static constexpr int kBlock = 128;
  static constexpr int kChunk = 64;
  static constexpr int kSteps = kBlock / kPair;  // tiles of values along the keys

  static std::int64_t padded(std::int64_t dim) { return (dim + kPair - 1) / kPair * kPair; }
  static std::int64_t padded_values(std::int64_t dim) { return padded(dim); }
  static std::size_t query_bytes(std::int64_t dim) { return 2 * padded(dim); }
  static std::size_t key_bytes(std::int64_t dim) { return 2 * kBlock * padded(dim); }
  static std::size_t value_bytes(std::int64_t dim) { return 2 * kBlock * padded(dim); }
  static std::size_t weight_bytes() { return 2 * kBlock; }  // of a row

  // How often few_values asks for what comes next.
  static std::int64_t value_asks(std::int64_t dim) { return kChunk / 2 * ((dim + 2 * kPair - 1) / (2 * kPair)); }

  template <class T>
  static void pack_query(const T* q, std::int64_t dim, void* packed) {
    if constexpr (kIsBfloat16<T>) {
      store_row(q, dim, static_cast<char*>(packed));
    }
  }

  static float softmax(float* products, const std::uint64_t (&visible)[kBlock / 64], const LogitRule& rule,
                       RowState state, void* weights) {
    return softmax_to_bfloat16<kBlock>(products, visible, rule, 8.0f, state, static_cast<Bfloat16*>(weights));
  }

  static float weight(const float*, const void* weights, int key) {
    const std::uint32_t bits = static_cast<const Bfloat16*>(weights)[key].bits;
    return bit_cast<float>(bits << 16);
  }

  template <class T>
  static void pack_values(const char* const* rows, int from, int to, std::int64_t dim, bool check, void* packed,
                          const float**, std::uint64_t* wild, Upcoming& next) {
    if constexpr (kIsBfloat16<T>) {
      for (int step = from / kPair; step * kPair < to; ++step) {
        for (std::int64_t d = 0; d < dim; d += 2 * kPair) {
          char* tile = static_cast<char*>(packed) + (d / kLanes * kSteps + step) * kTileBytes;
          pair_values<T>(rows, step * kPair, from, to, d, dim, check, tile, kSteps * kTileBytes, wild, next);
        }
      }
    }
  }

  // Undoes the order that pack_values leaves: of 32 columns, one tile has those whose number has no 4, one the others.
  static f32x16 columns(const float* o, std::int64_t d) {
    constexpr i32x16 kFirst = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const float* pair = o + d / kPair * kPair;
    return __builtin_shuffle(load(pair), load(pair + kLanes), d % kPair == 0 ? kFirst : kFirst + 8);
  }

  static void add_columns(float* o, std::int64_t d, f32x16 x) {
    float lanes[kLanes];
    store(lanes, x);
    float* pair = o + d / kPair * kPair;
    for (int i = 0; i < kLanes; ++i) {
      const int column = static_cast<int>(d % kPair) + i;
      pair[(column & 4) * 4 + column / 8 * 4 + column % 4] += lanes[i];
    }
  }

 protected:
  static void turn_rows(const float* turns, int count, float* o, std::int64_t stride) {
    for (int r = 0; r < count; ++r) {
      if (turns[r] == 1.0f) continue;
      for (std::int64_t d = 0; d < stride; d += kLanes) store(o + r * stride + d, load(o + r * stride + d) * turns[r]);
    }
  }

  // A row of pages or queries as bfloat16 numbers, padded with zeros.
  template <class T>
  static void store_row(const T* row, std::int64_t dim, char* to) {
    for (std::int64_t d = 0; d < dim; d += 2 * kPair) {
      const Pairs pairs = load_pairs(row + d, dim - d);
      _mm512_storeu_si512(to + 2 * d, pairs.low);
      if (d + kPair < dim) _mm512_storeu_si512(to + 2 * d + 64, pairs.high);
    }
  }

  // Values of 32 keys from `key` and 64 columns from `d`, or 32 where there are no more, as tiles `far` apart. Columns
  // stay within 16 bytes: `columns` puts them back into their order. Keys beside [from, to) are 0; with `check` so is
  // what is not finite.
  template <class T>
  static void pair_values(const char* const* rows, int key, int from, int to, std::int64_t d, std::int64_t dim,
                          bool check, char* tile, std::int64_t far, std::uint64_t* wild, Upcoming& next) {
    const bool wide = d + kPair < dim;
    const auto store_pair = [&](int j, const Pairs& a, const Pairs& b) {
      char* at = tile + j * 64;
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(a.low, b.low));
      _mm512_storeu_si512(at + far, _mm512_unpackhi_epi16(a.low, b.low));
      if (!wide) return;
      _mm512_storeu_si512(at + 2 * far, _mm512_unpacklo_epi16(a.high, b.high));
      _mm512_storeu_si512(at + 3 * far, _mm512_unpackhi_epi16(a.high, b.high));
    };
    const auto load = [&](int i) { return load_pairs(elements<T>(rows[key + i]) + d, dim - d); };
    if (!check && key >= from && key + kPair <= to) {
      for (int j = 0; j < 16; ++j) {
        next.ask();
        store_pair(j, load(2 * j), load(2 * j + 1));
      }
      return;
    }
    const auto finite = [&](__m512i v) {
      const __m512i exponent = _mm512_set1_epi16(0x7f80);
      return _mm512_cmpneq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    };
    const auto row = [&](int i) {
      if (key + i < from || key + i >= to) return Pairs{_mm512_setzero_si512(), _mm512_setzero_si512()};
      const Pairs v = load(i);
      if (!check) return v;
      const __mmask32 low = finite(v.low), high = finite(v.high);
      if ((low & high) != ~__mmask32{0}) wild[(key + i) / 64] |= std::uint64_t{1} << ((key + i) % 64);
      return Pairs{_mm512_maskz_mov_epi16(low, v.low), _mm512_maskz_mov_epi16(high, v.high)};
    };
    for (int j = 0; j < 16; ++j) store_pair(j, row(2 * j), row(2 * j + 1));
  }
};

}  // namespace
}  // namespace tw::TW_ISA

#endif
