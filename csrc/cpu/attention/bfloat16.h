// Both products on the tile units, for bfloat16 queries and pages whose elements are bfloat16 numbers: bf16, fp8, int8.
//
// Products of bfloat16 numbers are exact, and summed in float32; weights are rounded to bfloat16. What a tile instruction
// gives for an element depends neither on the others nor on which operand comes first.
//
// Values become tiles of 32 keys by 16 columns in which keys 2 j and 2 j + 1 lie side by side in row j. Where many rows
// share what is packed, keys become tiles of 16 keys by 32 dimensions likewise. For few rows that would cost more than
// the products: there the keys come first, with rows as they lie in the pages, and the queries are what is paired.
#pragma once

#if defined(__AMX_TILE__) && defined(__x86_64__)

#include "cpu/attention/bfloat16_rows.h"
#include "cpu/runtime/amx.h"

namespace tw::TW_ISA {
namespace {

// GCC's tile intrinsics don't say that they read memory.
inline void publish() { __asm__ volatile("" : : : "memory"); }

struct Bfloat16Tiles : Bfloat16Rows {
  static constexpr int kGroup = 32;
  static constexpr bool kPairsQueries = true;

  static std::int64_t padded_rows(std::int64_t rows) { return rows <= 16 ? 16 : (rows + kGroup - 1) / kGroup * kGroup; }
  // Results of eight tiles and 32 rows of keys, or values of a chunk in four columns of tiles.
  static std::size_t few_bytes(std::int64_t dim, std::int64_t) { return 8 * kTileBytes + 2 * kPair * padded(dim); }

  // How often few_scores asks for what comes next.
  static std::int64_t score_asks(std::int64_t dim) { return kChunk / kPair * padded(dim) / kPair; }

  static void enter() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = 16;
      config.row_bytes[tile] = 64;
    }
    load_tile_config(config);
  }
  static void leave() { release_tiles(); }

  // Packed rows, a multiple of sixteen, as tiles of 32 dimensions by 16 rows.
  static void pair_queries(const void* packed, std::int64_t rows, std::int64_t dim, void* paired) {
    const std::int64_t steps = padded(dim) / kPair;
    const float* from = static_cast<const float*>(packed);
    float* tile = static_cast<float*>(paired);
    for (std::int64_t r = 0; r < rows; r += kLanes) {
      for (std::int64_t s = 0; s < steps; ++s, tile += kTileFloats) {
        f32x16 v[kLanes];
        for (int i = 0; i < kLanes; ++i) v[i] = load(from + (r + i) * steps * kLanes + s * kLanes);
        transpose(v);
        for (int i = 0; i < kLanes; ++i) store(tile + i * kLanes, v[i]);
      }
    }
  }

  template <class T>
  static void pack_keys(const char* const* rows, int from, int to, std::int64_t dim, void* packed, Upcoming&) {
    if constexpr (kIsBfloat16<T>) {
      const std::int64_t steps = padded(dim) / kPair;
      for (int key = from / kLanes * kLanes; key < to; key += kLanes) {
        float* tiles = static_cast<float*>(packed) + key / kLanes * steps * kTileFloats;
        pair_dimensions<T>(rows + key, dim, [&](std::int64_t pair, f32x16 keys) { store(tiles + pair * kLanes, keys); });
      }
    }
  }

  static void scores(const void* queries, int, const void* keys, int from, int to, std::int64_t dim, float* products) {
    publish();
    const std::int64_t steps = padded(dim) / kPair, bytes = padded(dim) * 2;
    for (int key = from / kPair * kPair; key < to; key += kPair) {
      const char* k = static_cast<const char*>(keys) + key / kLanes * steps * kTileBytes;
      score_tiles_of_32(static_cast<const char*>(queries), bytes, k, steps, products + key);
    }
  }

  static void weigh(const float*, const void* weights, int count, const void* values, const float* const*, int from,
                    int to, std::int64_t dim, const float* turns, float* o) {
    const std::int64_t stride = padded(dim), tiles = stride / kLanes;
    turn_rows(turns, count, o, stride);
    publish();
    const int first = from / kPair, last = (to + kPair - 1) / kPair;
    const Bfloat16* w = static_cast<const Bfloat16*>(weights);
    for (std::int64_t t = 0; t < tiles; t += 2) {
      const char* v = static_cast<const char*>(values) + t * kSteps * kTileBytes;
      weigh_tiles_of_32(w, v, first, last, o + t * kLanes, stride);
    }
  }

  // Products of up to 32 rows of paired queries with the keys [from, to) of a chunk. `regular`: the rows of sixteen keys
  // lie at equal distances, where all of them are wanted.
  template <class T>
  static void few_scores(const char* queries, int count, const char* const* rows, bool regular, int from, int to,
                         std::int64_t dim, float* products, char* memory, Upcoming& next) {
    if constexpr (kIsBfloat16<T>) {
      const std::int64_t steps = padded(dim) / kPair;
      float* results = reinterpret_cast<float*>(memory);
      const int halves = count > kLanes ? 2 : 1, first = from / kPair * kPair;
      for (int key = first; key < to; key += kPair) {
        Operand keys[2];
        for (int half = 0; half < 2; ++half) {
          const int start = key + half * kLanes;
          char* copies = memory + 8 * kTileBytes + half * 2 * kLanes * padded(dim);
          keys[half] = key_operand<T>(rows + start, regular && start >= from && start + kLanes <= to, dim, copies);
        }
        publish();
        float* out = results + key / kLanes * 2 * kTileFloats;
        if (halves == 1) score_16_queries(queries, keys, steps, out, next);
        else score_32_queries(queries, keys, steps, out, next);
      }
      publish();
      for (int key = first; key < to; key += kLanes) {
        for (int half = 0; half < halves; ++half) {
          const float* tile = results + (key / kLanes * 2 + half) * kTileFloats;
          turn_scores(tile, count - half * kLanes, products + half * kLanes * kBlock + key);
        }
      }
    }
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
      const Bfloat16* w = static_cast<const Bfloat16*>(weights);
      const int first = from / kPair, last = (to + kPair - 1) / kPair;
      for (std::int64_t d = 0; d < stride; d += 2 * kPair) {
        const int columns = d + kPair < stride ? 4 : 2;
        for (int step = first; step < last; ++step) {
          pair_values<T>(rows, step * kPair, from, to, d, dim, check, memory + step * kTileBytes, kFar, wild, next);
        }
        publish();
        for (int r = 0; r < count; r += kLanes) {
          const Bfloat16* some = w + r * kBlock;
          if (columns == 4) weigh_tiles_of_16<4>(some, memory, kFar, first, last, o + r * stride + d, stride);
          else weigh_tiles_of_16<2>(some, memory, kFar, first, last, o + r * stride + d, stride);
        }
        publish();
      }
    }
  }

 private:
  struct Operand {  // of a tile load
    const char* at;
    std::int64_t stride;
  };

  // Sixteen keys as they lie, or copied.
  template <class T>
  static Operand key_operand(const char* const* rows, bool regular, std::int64_t dim, char* copies) {
    if (sizeof(T) == sizeof(Bfloat16) && regular && dim % kPair == 0) return {rows[0], rows[1] - rows[0]};
    const std::int64_t bytes = 2 * padded(dim);
    for (int i = 0; i < kLanes; ++i) store_row(elements<T>(rows[i]), dim, copies + i * bytes);
    return {copies, bytes};
  }

  static void score_16_queries(const char* q, const Operand (&k)[2], std::int64_t steps, float* out,
                               Upcoming& next) {
    _tile_zero(0);
    _tile_zero(1);
    for (std::int64_t s = 0; s < steps; ++s) {
      next.ask();
      _tile_loadd(6, q + s * kTileBytes, 64);
      _tile_loadd(4, k[0].at + s * 64, k[0].stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, k[1].at + s * 64, k[1].stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 2 * kTileFloats, 64);
  }

  static void score_32_queries(const char* q, const Operand (&k)[2], std::int64_t steps, float* out,
                               Upcoming& next) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t s = 0; s < steps; ++s) {
      next.ask();
      _tile_loadd(4, k[0].at + s * 64, k[0].stride);
      _tile_loadd(6, q + s * kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, q + (steps + s) * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, k[1].at + s * 64, k[1].stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + kTileFloats, 64);
    _tile_stored(2, out + 2 * kTileFloats, 64);
    _tile_stored(3, out + 3 * kTileFloats, 64);
  }

  // The scores of 16 keys with 16 queries, a key a row, as rows of queries.
  static void turn_scores(const float* tile, int count, float* products) {
    if (count <= 4) return turn_four_scores(tile, count, products);
    f32x16 v[kLanes];
    for (int i = 0; i < kLanes; ++i) v[i] = load(tile + i * kLanes);
    transpose(v);
    for (int i = 0; i < kLanes && i < count; ++i) store(products + i * kBlock, v[i]);
  }

  static void turn_four_scores(const float* tile, int count, float* products) {
    __m512 v[4];  // of keys i, 4 + i, 8 + i and 12 + i
    for (int i = 0; i < 4; ++i) {
      const auto four = [&](int key) { return _mm_loadu_ps(tile + key * kLanes); };
      v[i] = _mm512_castps128_ps512(four(i));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, four(4 + i));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, four(8 + i));
      v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, four(12 + i));
    }
    const __m512d low[2] = {_mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1])),
                            _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]))};
    const __m512d high[2] = {_mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1])),
                             _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]))};
    const __m512d turned[4] = {_mm512_unpacklo_pd(low[0], low[1]), _mm512_unpackhi_pd(low[0], low[1]),
                               _mm512_unpacklo_pd(high[0], high[1]), _mm512_unpackhi_pd(high[0], high[1])};
    for (int r = 0; r < count; ++r) _mm512_storeu_pd(products + r * kBlock, turned[r]);
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

  // Sixteen rows of weights times columns of tiles of values that lie `far` apart.
  template <int kColumns>
  static void weigh_tiles_of_16(const Bfloat16* w, const char* v, std::int64_t far, int first, int last, float* o,
                                std::int64_t stride) {
    _tile_loadd(0, o, 4 * stride);
    _tile_loadd(1, o + 16, 4 * stride);
    if (kColumns == 4) {
      _tile_loadd(2, o + 32, 4 * stride);
      _tile_loadd(3, o + 48, 4 * stride);
    }
    for (int s = first; s < last; ++s) {
      const char* tile = v + s * kTileBytes;
      _tile_loadd(4, w + s * kPair, 2 * kBlock);
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, tile + far, 64);
      _tile_dpbf16ps(1, 4, 6);
      if (kColumns == 4) {
        _tile_loadd(5, tile + 2 * far, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, tile + 3 * far, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    _tile_stored(0, o, 4 * stride);
    _tile_stored(1, o + 16, 4 * stride);
    if (kColumns == 4) {
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
