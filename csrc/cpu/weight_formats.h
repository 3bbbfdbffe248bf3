// How each weight format is decoded, for units that are compiled once a level.
//
// Weights are taken 32 at a time, a step, and scales for up to kChunk steps at once, where one vector operation
// converts them all. A format F has
//   F::prepare(row, step, count, scales)          the scales of `count` steps from `step`, a multiple of kChunk
//   F::decode(row, step, columns, scales, i, w)   the weights of `step`, the i-th of those, as two vectors
// The numbers are those of reference/quantized.py bit for bit on every level: products of a float16 scale and a small
// integer are exact in float32, so it makes no difference whether the sum that follows is fused.
#pragma once

#include "common/weight_format.h"
#include "cpu/lanes.h"

// What runs once for 32 weights is part of its caller's loop: a call would spill the accumulators.
#define TW_INLINE [[gnu::always_inline]] inline

namespace tw::TW_ISA {
namespace {

constexpr int kStep = 32;
constexpr int kChunk = 8;  // 256 weights: a block of the K formats

struct PairScales {
  alignas(64) float scale[kChunk];
  float offset[kChunk];  // directly after `scale`: both are stored as one vector
};

struct NoScales {};

// What integers of four bits, or with kFifth of five, stand for: scale * q + offset.
template <bool kFifth>
struct LinearValues {
#if defined(__AVX512F__)
  __m512 low, high;  // of q below 16 and of the others: worked out once and looked up, by the low 4 bits of an index
  LinearValues(float scale, float offset) {
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 factor = _mm512_set1_ps(scale), addend = _mm512_set1_ps(offset);
    low = _mm512_fmadd_ps(factor, integers, addend);
    if constexpr (kFifth) high = _mm512_fmadd_ps(factor, _mm512_add_ps(integers, _mm512_set1_ps(16)), addend);
  }
#else
  Lanes scale, offset;
  LinearValues(float s, float o) : scale(splat_lanes(s)), offset(splat_lanes(o)) {}
#endif

  // Of the nibbles of 16 bytes from bit `shift`, 0 or 4.
  TW_INLINE Lanes operator()(const std::uint8_t* packed, int shift, [[maybe_unused]] FifthBits fifth = FifthBits()) const {
#if defined(__AVX512F__)
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
    const __m512i index = _mm512_srli_epi32(bytes, shift);
    const __m512 values = _mm512_permutexvar_ps(index, low);
    if constexpr (kFifth) return {_mm512_mask_permutexvar_ps(values, fifth, index, high)};
    else return {values};
#else
    u8x16 q = shift_and_mask(load_bytes(packed), shift, 0x0f);
    if constexpr (kFifth) q |= fifth;
    return fma(scale, to_lanes(q), offset);
#endif
  }
};

// scale * table[q] of the low nibbles q of 16 bytes, then of the high ones.
TW_INLINE void table_nibbles(const std::uint8_t* packed, i8x16 table, float scale, Lanes (&w)[2]) {
#if defined(__AVX512F__)
  const __m512 values = _mm512_mul_ps(_mm512_set1_ps(scale), to_lanes(table).v);
  const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  w[0] = {_mm512_permutexvar_ps(index, values)};
  w[1] = {_mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), values)};
#else
  const u8x16 bytes = load_bytes(packed), values = reinterpret_cast<u8x16>(table);
  const u8x16 q[2] = {lookup(values, bytes & 0x0f), lookup(values, shift_and_mask(bytes, 4, 0x0f))};
  for (int h = 0; h < 2; ++h) w[h] = multiply(splat_lanes(scale), to_lanes(reinterpret_cast<i8x16>(q[h])));
#endif
}

// Blocks of 32 weights in kBytes bytes that begin with a float16 scale and, in some formats, a float16 offset.
template <int kBytes, bool kOffset>
struct SmallBlocks {
  using Scales = PairScales;
  static const std::uint8_t* block(const std::uint8_t* row, std::int64_t step) { return row + step * kBytes; }

  TW_INLINE static void prepare(const std::uint8_t* row, std::int64_t step, int count, Scales& scales) {
    const std::uint8_t* from = block(row, step);
#if defined(__AVX512F__)
    if (count == kChunk) {
      // The scale and what follows it, of eight blocks; then all scales first; then sixteen conversions at once. The
      // words are put into vectors one by one: collected in memory, they would be stored in pieces and loaded as one.
      const auto words = [from](int i) {
        const auto word = [from](int at) {
          int bits;
          __builtin_memcpy(&bits, from + at * kBytes, sizeof bits);
          return bits;
        };
        const __m128i two = _mm_insert_epi32(_mm_cvtsi32_si128(word(i)), word(i + 1), 1);
        return _mm_insert_epi32(_mm_insert_epi32(two, word(i + 2), 2), word(i + 3), 3);
      };
      __m256i pairs = _mm256_inserti128_si256(_mm256_castsi128_si256(words(0)), words(4), 1);
      const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      pairs = _mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(apart));
      _mm512_store_ps(scales.scale, _mm512_cvtph_ps(_mm256_permute4x64_epi64(pairs, 0xd8)));
      return;
    }
#endif
    for (int i = 0; i < count; ++i) {
      scales.scale[i] = load_half(from + i * kBytes);
      if constexpr (kOffset) scales.offset[i] = load_half(from + i * kBytes + 2);
    }
  }
};

struct Q4_0 : SmallBlocks<18, false> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    constexpr i8x16 kValues = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    table_nibbles(block(row, step) + 2, kValues, s.scale[i], w);
  }
};

struct Q4_1 : SmallBlocks<20, true> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const LinearValues<false> values(s.scale[i], s.offset[i]);
    for (int h = 0; h < 2; ++h) w[h] = values(block(row, step) + 4, 4 * h);
  }
};

// Nibbles at `low`; their fifth bits are the 32 bits at `high`.
TW_INLINE void five_bits(const std::uint8_t* low, const std::uint8_t* high, float scale, float offset, Lanes (&w)[2]) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, high, sizeof bits);
  const LinearValues<true> values(scale, offset);
  for (int h = 0; h < 2; ++h) w[h] = values(low, 4 * h, fifth_bits(bits >> 16 * h));
}

struct Q5_0 : SmallBlocks<22, false> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const std::uint8_t* from = block(row, step);
    five_bits(from + 6, from + 2, s.scale[i], -16.0f * s.scale[i], w);
  }
};

struct Q5_1 : SmallBlocks<24, true> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const std::uint8_t* from = block(row, step);
    five_bits(from + 8, from + 4, s.scale[i], s.offset[i], w);
  }
};

struct Q8_0 : SmallBlocks<34, false> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const Lanes scale = splat_lanes(s.scale[i]);
    for (int h = 0; h < 2; ++h) {
      w[h] = multiply(scale, to_lanes(reinterpret_cast<i8x16>(load_bytes(block(row, step) + 2 + 16 * h))));
    }
  }
};

struct Mxfp4 {
  using Scales = NoScales;
  TW_INLINE static void prepare(const std::uint8_t*, std::int64_t, int, NoScales&) {}
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, NoScales, int, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 17;
    // The e2m1 values, doubled, and so 2^(e - 128) for the scale; the two smallest of those are subnormal.
    constexpr i8x16 kValues = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const std::uint32_t exponent = block[0];
    const float scale = bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    table_nibbles(block + 1, kValues, scale, w);
  }
};

// Q4_K and Q5_K: a block of kBytes has 8 groups of 32 weights, each with a scale and a minimum of 6 bits, times the
// block's d and dmin. reference/quantized.py says where the bits are.
template <int kBytes>
struct KBlocks {
  using Scales = PairScales;
  static const std::uint8_t* block(const std::uint8_t* row, std::int64_t step) { return row + step / kChunk * kBytes; }

  TW_INLINE static void prepare(const std::uint8_t* row, std::int64_t step, int, Scales& scales) {
    const std::uint8_t* from = block(row, step);
    std::uint32_t packed[3];
    __builtin_memcpy(packed, from + 4, sizeof packed);
    constexpr std::uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTopTwo = 0x30303030;
    using u32x4 = std::uint32_t __attribute__((vector_size(16)));
    const u32x4 integers = {packed[0] & kSix, (packed[2] & kFour) | (packed[0] >> 2 & kTopTwo), packed[1] & kSix,
                            (packed[2] >> 4 & kFour) | (packed[1] >> 2 & kTopTwo)};
    const Lanes factors = two_halves(load_half(from), -load_half(from + 2));
    store_lanes(scales.scale, multiply(factors, to_lanes(reinterpret_cast<u8x16>(integers))));
  }
};

struct Q4_K : KBlocks<144> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const LinearValues<false> values(s.scale[i], s.offset[i]);
    // Two neighbouring groups are the low and the high nibbles of 32 bytes.
    const std::uint8_t* packed = block(row, step) + 16 + i / 2 * 32;
    for (int h = 0; h < 2; ++h) w[h] = values(packed + 16 * h, i % 2 * 4);
  }
};

struct Q5_K : KBlocks<176> {
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const std::uint8_t* from = block(row, step);
    const LinearValues<true> values(s.scale[i], s.offset[i]);
    for (int h = 0; h < 2; ++h) {
      const FifthBits fifth = fifth_bits(load_bytes(from + 16 + h * 16), i);
      w[h] = values(from + 48 + i / 2 * 32 + h * 16, i % 2 * 4, fifth);
    }
  }
};

struct Q6_K {
  struct Scales {
    alignas(64) float scale[2 * kChunk];  // one for 16 weights
  };

  TW_INLINE static void prepare(const std::uint8_t* row, std::int64_t step, int, Scales& scales) {
    const std::uint8_t* from = row + step / kChunk * 210;
    const Lanes integers = to_lanes(reinterpret_cast<i8x16>(load_bytes(from + 192)));
    store_lanes(scales.scale, multiply(splat_lanes(load_half(from + 208)), integers));
  }

  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, const Scales& s, int i,
                               Lanes (&w)[2]) {
    const std::uint8_t* from = row + step / kChunk * 210;
    const int half = i / 4, quarter = i % 4;
    for (int h = 0; h < 2; ++h) {
      // Groups 0 and 1 of each half of the block are the low nibbles of 64 bytes, 2 and 3 the high ones.
      const u8x16 low = load_bytes(from + half * 64 + quarter % 2 * 32 + h * 16);
      const u8x16 high = load_bytes(from + 128 + half * 32 + h * 16);
      const u8x16 top = shift_left_and_mask(shift_and_mask(high, quarter * 2, 3), 4, 0x30);
      const u8x16 q = shift_and_mask(low, quarter / 2 * 4, 0x0f) | top;
      w[h] = multiply(splat_lanes(s.scale[2 * i + h]), to_lanes(reinterpret_cast<i8x16>(q - 32)));
    }
  }
};

inline Lanes load_lanes(const Half* p) { return to_lanes(load(p)); }
inline Lanes load_lanes(const Bfloat16* p) { return to_lanes(load(p)); }

// A dense row; beyond its end the weights are zero.
template <class T>
struct Dense {
  using Scales = NoScales;
  TW_INLINE static void prepare(const std::uint8_t*, std::int64_t, int, NoScales&) {}
  TW_INLINE static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t columns, NoScales, int,
                               Lanes (&w)[2]) {
    const T* from = reinterpret_cast<const T*>(row) + step * kStep;
    const std::int64_t left = columns - step * kStep;
    if (left >= kStep) {
      for (int i = 0; i < 2; ++i) w[i] = load_lanes(from + i * kLanes);
      return;
    }
    for (int i = 0; i < 2; ++i) {
      const std::int64_t count = left - i * kLanes;
      w[i] = count > 0 ? to_lanes(load(from + i * kLanes, count)) : splat_lanes(0.0f);
    }
  }
};

// f(F{}) for the format's F.
template <class Function>
void with_format(WeightFormat format, Function f) {
  switch (format) {
    case WeightFormat::f32: return f(Dense<float>{});
    case WeightFormat::f16: return f(Dense<Half>{});
    case WeightFormat::bf16: return f(Dense<Bfloat16>{});
    case WeightFormat::q4_0: return f(Q4_0{});
    case WeightFormat::q4_1: return f(Q4_1{});
    case WeightFormat::q5_0: return f(Q5_0{});
    case WeightFormat::q5_1: return f(Q5_1{});
    case WeightFormat::q8_0: return f(Q8_0{});
    case WeightFormat::q4_k: return f(Q4_K{});
    case WeightFormat::q5_k: return f(Q5_K{});
    case WeightFormat::q6_k: return f(Q6_K{});
    case WeightFormat::mxfp4: return f(Mxfp4{});
  }
}

}  // namespace
}  // namespace tw::TW_ISA
