// Both products with AVX-512's products of bfloat16 pairs, for what bfloat16.h takes on the tile units, where there are
// none: an instruction adds sixteen times two products to float32 sums, twice as many as a fused one in float32.
//
// Keys become a panel of dimension pairs by keys, so that sixteen scores of a row are one vector, and values tiles of key
// pairs by sixteen columns. A score adds the products of pair after pair of dimensions, a result those of pair after pair
// of keys, whatever rows are worked on together. A register tile of kTileRows rows by four vectors takes four loads and
// as many broadcasts as rows for four products a row. Turning a key costs 2 D / 16 shuffles and pairing its values
// Dv / 32, which few rows pay as well: for D = Dv = 128 and four rows a key then takes some 50 cycles, where memory
// takes as long for its 512 bytes at 10 bytes a cycle.
#pragma once

#if defined(__AVX512BF16__) && defined(__x86_64__)

#include "cpu/attention/bfloat16_rows.h"

namespace tw::TW_ISA {
namespace {

struct Bfloat16Vectors : Bfloat16Rows {
  static constexpr int kGroup = 4 * kTileRows;  // so that few rows of several queries share what is turned and paired
  static constexpr bool kPairsQueries = false;

  static std::int64_t padded_rows(std::int64_t rows) { return rows; }
  // Keys of a chunk, or its values in four columns of tiles.
  static std::size_t few_bytes(std::int64_t dim, std::int64_t) {
    const std::int64_t keys = 2 * kChunk * padded(dim), values = 4 * kChunk / kPair * kTileBytes;
    return keys > values ? keys : values;
  }

  // How often few_scores asks for what comes next.
  static std::int64_t score_asks(std::int64_t dim) { return kChunk / kLanes * padded(dim) / kPair; }

  static void enter() {}
  static void leave() {}

  template <class T>
  static void pack_keys(const char* const* rows, int from, int to, std::int64_t dim, void* packed, Upcoming& next) {
    turn_keys<T, kBlock>(rows, from, to, dim, packed, next);
  }

  static void scores(const void* queries, int count, const void* keys, int from, int to, std::int64_t dim,
                     float* products) {
    score_rows<kBlock>(queries, count, keys, from, to, dim, products);
  }

  static void weigh(const float*, const void* weights, int count, const void* values, const float* const*, int from,
                    int to, std::int64_t dim, const float* turns, float* o) {
    const std::int64_t stride = padded(dim);
    turn_rows(turns, count, o, stride);
    for (std::int64_t d = 0; d < stride; d += 2 * kPair) {
      const char* v = static_cast<const char*>(values) + d / kLanes * kSteps * kTileBytes;
      weigh_rows(weights, count, v, kSteps * kTileBytes, from, to, d, o, stride);
    }
  }

  // Products with the keys [from, to) of a chunk.
  template <class T>
  static void few_scores(const char* queries, int count, const char* const* rows, bool, int from, int to,
                         std::int64_t dim, float* products, char* memory, Upcoming& next) {
    turn_keys<T, kChunk>(rows, from, to, dim, memory, next);
    score_rows<kChunk>(queries, count, memory, from, to, dim, products);
  }

  // Adds to o the weights of the keys [from, to) of a chunk times their values, after `turns` where they are given.
  template <class T>
  static void few_values(const float*, const void* weights, int count, const char* const* rows, int from, int to,
                         std::int64_t dim, bool check, const float* turns, float* o, char* memory, std::uint64_t* wild,
                         Upcoming& next) {
    if constexpr (kIsBfloat16<T>) {
      constexpr std::int64_t kFar = kChunk / kPair * kTileBytes;  // from a column of tiles to the next
      const std::int64_t stride = padded(dim);
      if (turns) turn_rows(turns, count, o, stride);
      for (std::int64_t d = 0; d < stride; d += 2 * kPair) {
        for (int step = from / kPair; step * kPair < to; ++step) {
          pair_values<T>(rows, step * kPair, from, to, d, dim, check, memory + step * kTileBytes, kFar, wild, next);
        }
        weigh_rows(weights, count, memory, kFar, from, to, d, o, stride);
      }
    }
  }

 private:
  template <int kCount>
  struct Count {
    static constexpr int value = kCount;
  };

  // f(row, how many from there on) for `count` rows in register tiles.
  template <class F>
  static void for_row_tiles(int count, F f) {
    int r = 0;
    for (; r + kTileRows <= count; r += kTileRows) f(r, Count<kTileRows>{});
    switch (count - r) {
      case 1: return f(r, Count<1>{});
      case 2: return f(r, Count<2>{});
      case 3: return f(r, Count<3>{});
      case 4: return f(r, Count<4>{});
      case 5: return f(r, Count<5>{});
    }
  }

  // Keys as a panel of dimension pairs by kKeys keys.
  template <class T, int kKeys>
  static void turn_keys(const char* const* rows, int from, int to, std::int64_t dim, void* packed, Upcoming& next) {
    if constexpr (kIsBfloat16<T>) {
      for (int key = from / kLanes * kLanes; key < to; key += kLanes) {
        float* panel = static_cast<float*>(packed) + key;
        pair_dimensions<T>(rows + key, dim, [&](std::int64_t pair, f32x16 keys) {
          if (pair % kLanes == 0) next.ask();
          store(panel + pair * kKeys, keys);
        });
      }
    }
  }

  static __m512 add_products(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }

  template <int kKeys>
  static void score_rows(const void* queries, int count, const void* panel, int from, int to, std::int64_t dim,
                         float* products) {
    const std::int64_t pairs = padded(dim) / 2;
    const std::int32_t* keys = static_cast<const std::int32_t*>(panel);
    for_row_tiles(count, [&](int r, auto rows) {
      const std::int32_t* q = static_cast<const std::int32_t*>(queries) + r * pairs;
      float* out = products + r * kBlock;
      int key = from / kLanes * kLanes;
      for (; key + kTileVectors * kLanes <= to; key += kTileVectors * kLanes) {
        score_tile<kKeys, decltype(rows)::value, kTileVectors>(q, pairs, keys + key, out + key);
      }
      for (; key < to; key += kLanes) score_tile<kKeys, decltype(rows)::value, 1>(q, pairs, keys + key, out + key);
    });
  }

  template <int kKeys, int kRows, int kVectors>
  static void score_tile(const std::int32_t* q, std::int64_t pairs, const std::int32_t* keys, float* products) {
    __m512 sums[kRows][kVectors];
    for (auto& row : sums) for (__m512& s : row) s = _mm512_setzero_ps();
    for (std::int64_t p = 0; p < pairs; ++p, keys += kKeys) {
      __m512i part[kVectors];
      for (int v = 0; v < kVectors; ++v) part[v] = _mm512_loadu_si512(keys + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const __m512i x = _mm512_set1_epi32(q[r * pairs + p]);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = add_products(sums[r][v], x, part[v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(products + r * kBlock + v * kLanes, sums[r][v]);
    }
  }

  // Columns from d, 64 or the last 32, whose tiles begin at `values` and lie `far` apart.
  static void weigh_rows(const void* weights, int count, const char* values, std::int64_t far, int from, int to,
                         std::int64_t d, float* o, std::int64_t stride) {
    const int first = from / kPair * kLanes, last = (to + kPair - 1) / kPair * kLanes;  // pairs of keys
    for_row_tiles(count, [&](int r, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const std::int32_t* w = static_cast<const std::int32_t*>(weights) + r * kBlock / 2;
      float* out = o + r * stride + d;
      if (d + kPair < stride) weigh_tile<kRows, 4>(w, values, far, first, last, out, stride);
      else weigh_tile<kRows, 2>(w, values, far, first, last, out, stride);
    });
  }

  template <int kRows, int kColumns>
  static void weigh_tile(const std::int32_t* w, const char* values, std::int64_t far, int first, int last, float* o,
                         std::int64_t stride) {
    __m512 sums[kRows][kColumns];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) sums[r][c] = _mm512_loadu_ps(o + r * stride + c * kLanes);
    }
    for (int pair = first; pair < last; ++pair) {
      __m512i part[kColumns];
      for (int c = 0; c < kColumns; ++c) part[c] = _mm512_loadu_si512(values + c * far + pair * 64);
      for (int r = 0; r < kRows; ++r) {
        const __m512i x = _mm512_set1_epi32(w[r * kBlock / 2 + pair]);
        for (int c = 0; c < kColumns; ++c) sums[r][c] = add_products(sums[r][c], x, part[c]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) _mm512_storeu_ps(o + r * stride + c * kLanes, sums[r][c]);
    }
  }
};

}  // namespace
}  // namespace tw::TW_ISA

#endif
