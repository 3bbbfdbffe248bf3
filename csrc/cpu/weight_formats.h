// How each weight format is decoded, 32 weights at a time, for units that are compiled once a level.
//
// A format F has `F::decode(row, step, columns, w)`: weights 32 step .. 32 step + 31 of a row of `columns` weights, as two
// vectors of sixteen. The numbers are those of reference/quantized.py bit for bit on every level: products of a float16
// scale and a small integer are exact in float32, so it makes no difference whether the sum that follows is fused.
#pragma once

#include "common/weight_format.h"
#include "cpu/lanes.h"

namespace tw::TW_ISA {
namespace {

constexpr int kStep = 32;

// scale * q + offset for 16 bytes of two nibbles each: all low nibbles, then all high ones.
inline void decode_nibbles(const std::uint8_t* packed, float scale, float offset, Lanes (&w)[2]) {
#if defined(__AVX512F__)
  // A nibble has 16 values: they are worked out once and then looked up, which ignores all but an index's low 4 bits.
  const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 values = _mm512_fmadd_ps(_mm512_set1_ps(scale), integers, _mm512_set1_ps(offset));
  const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  w[0].v = _mm512_permutexvar_ps(index, values);
  w[1].v = _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), values);
#else
  const u8x16 bytes = load_bytes(packed);
  const Lanes scales = splat_lanes(scale), offsets = splat_lanes(offset);
  w[0] = fma(scales, to_lanes(bytes & 0x0f), offsets);
  w[1] = fma(scales, to_lanes(shift_and_mask(bytes, 4, 0x0f)), offsets);
#endif
}

struct Q4_0 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 18;
    const u8x16 bytes = load_bytes(block + 2);
    const Lanes scale = splat_lanes(load_half(block));
    w[0] = multiply(scale, to_lanes(reinterpret_cast<i8x16>((bytes & 0x0f) - 8)));
    w[1] = multiply(scale, to_lanes(reinterpret_cast<i8x16>(shift_and_mask(bytes, 4, 0x0f) - 8)));
  }
};

struct Q4_1 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 20;
    decode_nibbles(block + 4, load_half(block), load_half(block + 2), w);
  }
};

// The 5-bit integers of a block: nibbles at `low`, fifth bits at `high`.
inline void five_bits(const std::uint8_t* low, const std::uint8_t* high, u8x16 (&q)[2]) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, high, sizeof bits);
  const u8x16 bytes = load_bytes(low);
  q[0] = (bytes & 0x0f) | fifth_bits(bits);
  q[1] = shift_and_mask(bytes, 4, 0x0f) | fifth_bits(bits >> 16);
}

struct Q5_0 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 22;
    u8x16 q[2];
    five_bits(block + 6, block + 2, q);
    const Lanes scale = splat_lanes(load_half(block));
    for (int i = 0; i < 2; ++i) w[i] = multiply(scale, to_lanes(reinterpret_cast<i8x16>(q[i] - 16)));
  }
};

struct Q5_1 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 24;
    u8x16 q[2];
    five_bits(block + 8, block + 4, q);
    const Lanes scale = splat_lanes(load_half(block)), offset = splat_lanes(load_half(block + 2));
    for (int i = 0; i < 2; ++i) w[i] = fma(scale, to_lanes(q[i]), offset);
  }
};

struct Q8_0 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 34;
    const Lanes scale = splat_lanes(load_half(block));
    for (int i = 0; i < 2; ++i) {
      w[i] = multiply(scale, to_lanes(reinterpret_cast<i8x16>(load_bytes(block + 2 + 16 * i))));
    }
  }
};

// Scale and offset of group `group` of 32 in a Q4_K or Q5_K block. The 8 scales and 8 minima have 6 bits each, in 12
// bytes: see reference/quantized.py.
struct GroupScale {
  float scale, offset;
};

inline GroupScale group_scale(const std::uint8_t* block, int group) {
  const std::uint8_t* packed = block + 4;
  int scale, minimum;
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
    minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
  }
  return {load_half(block) * static_cast<float>(scale), -(load_half(block + 2) * static_cast<float>(minimum))};
}

// In the K formats a block has 256 weights in 8 groups; two neighbouring groups share 32 bytes of nibbles.
inline u8x16 nibbles_of_group(const std::uint8_t* packed, int group, int half) {
  return shift_and_mask(load_bytes(packed + group / 2 * 32 + half * 16), group % 2 * 4, 0x0f);
}

struct Q4_K {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step / 8 * 144;
    const int group = static_cast<int>(step % 8);
    const GroupScale s = group_scale(block, group);
    const Lanes scale = splat_lanes(s.scale), offset = splat_lanes(s.offset);
    for (int i = 0; i < 2; ++i) w[i] = fma(scale, to_lanes(nibbles_of_group(block + 16, group, i)), offset);
  }
};

struct Q5_K {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step / 8 * 176;
    const int group = static_cast<int>(step % 8);
    const GroupScale s = group_scale(block, group);
    const Lanes scale = splat_lanes(s.scale), offset = splat_lanes(s.offset);
    for (int i = 0; i < 2; ++i) {
      const u8x16 fifth = shift_left_and_mask(shift_and_mask(load_bytes(block + 16 + i * 16), group, 1), 4, 0x10);
      w[i] = fma(scale, to_lanes(nibbles_of_group(block + 48, group, i) | fifth), offset);
    }
  }
};

struct Q6_K {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step / 8 * 210;
    const int group = static_cast<int>(step % 8), half = group / 4, quarter = group % 4;
    const float d = load_half(block + 208);
    for (int i = 0; i < 2; ++i) {
      // Groups 0 and 1 of each half of the block are the low nibbles of 64 bytes, 2 and 3 the high ones.
      const u8x16 low = load_bytes(block + half * 64 + quarter % 2 * 32 + i * 16);
      const u8x16 high = load_bytes(block + 128 + half * 32 + i * 16);
      const u8x16 top = shift_left_and_mask(shift_and_mask(high, quarter * 2, 3), 4, 0x30);
      const u8x16 q = shift_and_mask(low, quarter / 2 * 4, 0x0f) | top;
      const float scale = d * static_cast<float>(static_cast<std::int8_t>(block[192 + group * 2 + i]));
      w[i] = multiply(splat_lanes(scale), to_lanes(reinterpret_cast<i8x16>(q - 32)));
    }
  }
};

struct Mxfp4 {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t, Lanes (&w)[2]) {
    const std::uint8_t* block = row + step * 17;
    // The e2m1 values, doubled, and so 2^(e - 128) for the scale; the two smallest of those are subnormal.
    constexpr i8x16 kValues = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const std::uint32_t exponent = block[0];
    const float scale = bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    const u8x16 bytes = load_bytes(block + 1), table = reinterpret_cast<u8x16>(kValues);
    const u8x16 q[2] = {lookup(table, bytes & 0x0f), lookup(table, shift_and_mask(bytes, 4, 0x0f))};
    for (int i = 0; i < 2; ++i) w[i] = multiply(splat_lanes(scale), to_lanes(reinterpret_cast<i8x16>(q[i])));
  }
};

inline Lanes load_lanes(const Half* p) { return to_lanes(load(p)); }
inline Lanes load_lanes(const Bfloat16* p) { return to_lanes(load(p)); }

// A dense row; beyond its end the weights are zero.
template <class T>
struct Dense {
  static void decode(const std::uint8_t* row, std::int64_t step, std::int64_t columns, Lanes (&w)[2]) {
    const T* from = reinterpret_cast<const T*>(row) + step * kStep;
    const std::int64_t left = columns - step * kStep;
    for (int i = 0; i < 2; ++i) {
      const std::int64_t count = left - i * kLanes;
      if (count >= kLanes) w[i] = load_lanes(from + i * kLanes);
      else w[i] = count > 0 ? to_lanes(load(from + i * kLanes, count)) : splat_lanes(0.0f);
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
