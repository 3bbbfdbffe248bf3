// Both products on the tile units, for bfloat16 queries and pages whose elements are bfloat16 numbers: bf16, fp8, int8.
//
// Products of bfloat16 numbers are exact, and summed in float32. Keys become tiles of 16 keys by 32 dimensions in which
// dimensions 2 j and 2 j + 1 of a key lie side by side in row j, values tiles of 32 keys by 16 columns in which keys are
// paired so. Weights are rounded to bfloat16. What a tile instruction gives for a row does not depend on the others.
#pragma once

#if defined(__AMX_TILE__) && defined(__x86_64__)

#include "cpu/attention/float32.h"
#include "cpu/runtime/amx.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kTileBytes = 1024;
constexpr int kPair = 32;  // bfloat16 numbers in a row of a tile

// GCC's tile intrinsics don't say that they read memory.
inline void publish() { __asm__ volatile("" : : : "memory"); }

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

struct Bfloat16Tiles {
  static constexpr int kBlock = 128;
  static constexpr int kGroup = 32;
  static constexpr Precision kPrecision = Precision::bfloat16;
  static constexpr float kSlack = 8.0f;
  static constexpr int kSteps = kBlock / kPair;  // tiles of values along the keys

  static std::int64_t padded(std::int64_t dim) { return (dim + kPair - 1) / kPair * kPair; }
  static std::int64_t padded_values(std::int64_t dim) { return padded(dim); }
  static std::int64_t padded_rows(std::int64_t rows) { return rows <= 16 ? 16 : (rows + kGroup - 1) / kGroup * kGroup; }
  static std::size_t query_bytes(std::int64_t dim) { return 2 * padded(dim); }
  static std::size_t key_bytes(std::int64_t dim) { return 2 * kBlock * padded(dim); }
  static std::size_t value_bytes(std::int64_t dim) { return 2 * kBlock * padded(dim); }
  static std::size_t group_bytes() { return 2 * kGroup * kBlock; }  // weights in bfloat16

  static void enter() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = 16;
      config.row_bytes[tile] = 64;
    }
    load_tile_config(config);
  }
  static void leave() { release_tiles(); }

  template <class T>
  static void pack_query(const T* q, std::int64_t dim, void* packed) {
    if constexpr (kIsBfloat16<T>) {
      for (std::int64_t d = 0; d < dim; d += kPair) {
        _mm512_storeu_si512(static_cast<std::uint16_t*>(packed) + d, pair_row(q + d, dim - d));
      }
    }
  }

  template <class T>
  static void pack_keys(const BlockRows<kBlock>& rows, int from, int to, std::int64_t dim, void* packed) {
    if constexpr (kIsBfloat16<T>) {
      const std::int64_t steps = padded(dim) / kPair;
      for (int key = from / kLanes * kLanes; key < to; key += kLanes) {
        char* tile = static_cast<char*>(packed) + key / kLanes * steps * kTileBytes;
        for (std::int64_t d = 0; d < dim; d += kPair, tile += kTileBytes) {
          f32x16 v[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            v[i] = bit_cast<f32x16>(pair_row(elements<T>(rows.k[key + i]) + d, dim - d));
            if (rows.next) ask_for(rows.next->k[key + i] + d * sizeof(T));
          }
          transpose(v);
          for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(tile) + i * kLanes, v[i]);
        }
      }
    }
  }

  template <class T>
  static void pack_values(const BlockRows<kBlock>& rows, int from, int to, std::int64_t dim, bool check, void* packed,
                          const float**, std::uint64_t (&wild)[kBlock / 64]) {
    if constexpr (kIsBfloat16<T>) {
      const auto row = [&](int key, std::int64_t d) {
        if (key < from || key >= to) return _mm512_setzero_si512();
        const __m512i v = pair_row(elements<T>(rows.v[key]) + d, dim - d);
        if (rows.next) ask_for(rows.next->v[key] + d * sizeof(T));
        if (!check) return v;
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        const __mmask32 finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
        if (finite != ~__mmask32{0}) wild[key / 64] |= std::uint64_t{1} << (key % 64);
        return _mm512_maskz_mov_epi16(finite, v);
      };
      for (int step = from / kPair; step * kPair < to; ++step) {
        for (std::int64_t d = 0; d < dim; d += kPair) {
          char* tile = static_cast<char*>(packed) + (d / kLanes * kSteps + step) * kTileBytes;
          for (int j = 0; j < 16; ++j, tile += 64) {
            // Within 16 bytes at a time: `columns` puts the columns back into their order.
            const __m512i a = row(step * kPair + 2 * j, d), b = row(step * kPair + 2 * j + 1, d);
            _mm512_storeu_si512(tile, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(tile + kSteps * kTileBytes, _mm512_unpackhi_epi16(a, b));
          }
        }
      }
    }
  }

  static void scores(const void* queries, int count, const void* keys, int from, int to, std::int64_t dim,
                     float* products) {
    publish();
    const std::int64_t steps = padded(dim) / kPair, bytes = padded(dim) * 2;
    const char* q = static_cast<const char*>(queries);
    const int columns = count <= 16 ? 4 * kLanes : 2 * kLanes;  // that the accumulators hold
    for (int key = from / columns * columns; key < to; key += columns) {
      const char* k = static_cast<const char*>(keys) + key / kLanes * steps * kTileBytes;
      if (count <= 16) score_tiles_of_16(q, bytes, k, steps, products + key);
      else score_tiles_of_32(q, bytes, k, steps, products + key);
    }
  }

  static void weigh(const float* weights, int count, const void* values, const float* const*, int from, int to,
                    std::int64_t dim, const float* turns, float* o, void* rounded_weights) {
    const std::int64_t stride = padded(dim), tiles = stride / kLanes;
    Bfloat16* w = static_cast<Bfloat16*>(rounded_weights);
    for (int r = 0; r < count; ++r) {
      for (int key = 0; key < kBlock; key += kPair) {
        const float* row = weights + r * kBlock + key;
        _mm512_storeu_si512(w + r * kBlock + key, rounded(load(row), load(row + kLanes)));
      }
      if (turns[r] == 1.0f) continue;
      for (std::int64_t d = 0; d < stride; d += kLanes) store(o + r * stride + d, load(o + r * stride + d) * turns[r]);
    }
    publish();
    const int first = from / kPair, last = (to + kPair - 1) / kPair;
    const char* v = static_cast<const char*>(values);
    if (count > 16) {
      for (std::int64_t t = 0; t < tiles; t += 2) {
        weigh_tiles_of_32(w, v + t * kSteps * kTileBytes, first, last, o + t * kLanes, stride);
      }
      return;
    }
    std::int64_t t = 0;
    for (; t + 4 <= tiles; t += 4) {
      weigh_tiles_of_16<true>(w, v + t * kSteps * kTileBytes, first, last, o + t * kLanes, stride);
    }
    if (t < tiles) weigh_tiles_of_16<false>(w, v + t * kSteps * kTileBytes, first, last, o + t * kLanes, stride);
  }

  static float weight(const float*, const void* rounded_weights, int row, int key) {
    const std::uint32_t bits = static_cast<const Bfloat16*>(rounded_weights)[row * kBlock + key].bits;
    return bit_cast<float>(bits << 16);
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

 private:
  static void score_tiles_of_16(const char* q, std::int64_t q_bytes, const char* k, std::int64_t steps, float* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t s = 0; s < steps; ++s, k += kTileBytes) {
      _tile_loadd(4, q + s * 64, q_bytes);
      _tile_loadd(5, k, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, k + steps * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, k + 2 * steps * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, k + 3 * steps * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, out, 4 * kBlock);
    _tile_stored(1, out + 16, 4 * kBlock);
    _tile_stored(2, out + 32, 4 * kBlock);
    _tile_stored(3, out + 48, 4 * kBlock);
  }

  static void score_tiles_of_32(const char* q, std::int64_t q_bytes, const char* k, std::int64_t steps, float* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t s = 0; s < steps; ++s, k += kTileBytes) {
      _tile_loadd(4, q + s * 64, q_bytes);
      _tile_loadd(6, k, 64);
      _tile_loadd(7, k + steps * kTileBytes, 64);
      _tile_loadd(5, q + 16 * q_bytes + s * 64, q_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 4 * kBlock);
    _tile_stored(1, out + 16, 4 * kBlock);
    _tile_stored(2, out + 16 * kBlock, 4 * kBlock);
    _tile_stored(3, out + 16 * kBlock + 16, 4 * kBlock);
  }

  // Columns of four tiles of values, or of two.
  template <bool kFour>
  static void weigh_tiles_of_16(const Bfloat16* w, const char* v, int first, int last, float* o, std::int64_t stride) {
    _tile_loadd(0, o, 4 * stride);
    _tile_loadd(1, o + 16, 4 * stride);
    if (kFour) {
      _tile_loadd(2, o + 32, 4 * stride);
      _tile_loadd(3, o + 48, 4 * stride);
    }
    for (int s = first; s < last; ++s) {
      const char* tile = v + s * kTileBytes;
      _tile_loadd(4, w + s * kPair, 2 * kBlock);
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, tile + kSteps * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (kFour) {
        _tile_loadd(5, tile + 2 * kSteps * kTileBytes, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, tile + 3 * kSteps * kTileBytes, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, o, 4 * stride);
    _tile_stored(1, o + 16, 4 * stride);
    if (kFour) {
      _tile_stored(2, o + 32, 4 * stride);
      _tile_stored(3, o + 48, 4 * stride);
    }
  }

  static void weigh_tiles_of_32(const Bfloat16* w, const char* v, int first, int last, float* o, std::int64_t stride) {
    _tile_loadd(0, o, 4 * stride);
    _tile_loadd(1, o + 16, 4 * stride);
    _tile_loadd(2, o + 16 * stride, 4 * stride);
    _tile_loadd(3, o + 16 * stride + 16, 4 * stride);
    for (int s = first; s < last; ++s) {
      _tile_loadd(4, w + s * kPair, 2 * kBlock);
      _tile_loadd(6, v + s * kTileBytes, 64);
      _tile_loadd(7, v + (kSteps + s) * kTileBytes, 64);
      _tile_loadd(5, w + 16 * kBlock + s * kPair, 2 * kBlock);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, o, 4 * stride);
    _tile_stored(1, o + 16, 4 * stride);
    _tile_stored(2, o + 16 * stride, 4 * stride);
    _tile_stored(3, o + 16 * stride + 16, 4 * stride);
  }
};

}  // namespace
}  // namespace tw::TW_ISA

#endif
