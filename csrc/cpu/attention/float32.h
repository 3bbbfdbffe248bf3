// Both products in float32, for every dtype of queries and pages.
//
// Keys are turned into a panel [dim][64 keys], so that sixteen scores of a row are one vector: a score is the chain of
// fused products over d = 0, 1, ..., and a result that over the keys in order, whatever rows are worked on together. A
// register tile of R rows by 64 keys (or by 64 columns of values) takes 4 loads and R broadcasts for 4 R products.
#pragma once

#include "cpu/attention/pages.h"
#include "cpu/attention/softmax.h"

namespace tw::TW_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 2, kTileVectors = 2;
#endif

// Lane l of vector i becomes lane i of vector l. In stage s the halves of pairs of blocks of s lanes change places.
template <int kStep>
inline void exchange(f32x16 (&v)[kLanes]) {
  constexpr i32x16 low = lanes([](int l) { return (l & kStep) == 0 ? l : l - kStep + kLanes; });
  constexpr i32x16 high = lanes([](int l) { return (l & kStep) == 0 ? l + kStep : l + kLanes; });
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const f32x16 a = v[i], b = v[i + kStep];
    v[i] = __builtin_shuffle(a, b, low);
    v[i + kStep] = __builtin_shuffle(a, b, high);
  }
}

inline void transpose(f32x16 (&v)[kLanes]) {
  exchange<8>(v);
  exchange<4>(v);
  exchange<2>(v);
  exchange<1>(v);
}

template <class T>
inline const T* elements(const void* row) {
  return static_cast<const T*>(row);
}

struct Float32 {
  static constexpr int kBlock = 64;       // keys
  static constexpr int kChunk = kBlock;   // that few rows read together
  static constexpr int kGroup = kTileRows;  // rows that are worked on together
  static constexpr bool kPairsQueries = false;

  static std::int64_t padded_values(std::int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
  static std::int64_t padded_rows(std::int64_t rows) { return rows; }
  static std::size_t query_bytes(std::int64_t dim) { return sizeof(float) * dim; }
  static std::size_t key_bytes(std::int64_t dim) { return sizeof(float) * kBlock * padded_values(dim); }
  static std::size_t value_bytes(std::int64_t dim) { return sizeof(float) * kBlock * padded_values(dim); }
  static std::size_t few_bytes(std::int64_t dim, std::int64_t value_dim) {
    return key_bytes(dim > value_dim ? dim : value_dim);
  }

  // How often few_scores and few_values ask for what comes next.
  static std::int64_t score_asks(std::int64_t dim) { return kBlock * padded_values(dim) / (kLanes * kLanes); }
  static std::int64_t value_asks(std::int64_t) { return kBlock; }

  static void enter() {}
  static void leave() {}

  // A row of the queries of a tile.
  template <class T>
  static void pack_query(const T* q, std::int64_t dim, void* packed) {
    for (std::int64_t d = 0; d < dim; d += kLanes) store(static_cast<float*>(packed) + d, load(q + d, dim - d), dim - d);
  }

  template <class T>
  static void pack_keys(const char* const* rows, int from, int to, std::int64_t dim, void* packed, Upcoming& next) {
    float* panel = static_cast<float*>(packed);
    for (int key = 0; key < kBlock; key += kLanes) {
      if (key + kLanes <= from || key >= to) {
        // Whatever lay here would be multiplied too, and subnormal numbers make that a hundred times slower.
        for (std::int64_t d = 0; d < dim; ++d) store(panel + d * kBlock + key, f32x16{});
        continue;
      }
      for (std::int64_t d = 0; d < dim; d += kLanes) {
        next.ask();
        f32x16 v[kLanes];
        for (int i = 0; i < kLanes; ++i) v[i] = load(elements<T>(rows[key + i]) + d, dim - d);
        transpose(v);
        for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kBlock + key, v[i]);
      }
    }
  }

  // Values of the keys [from, to) as float32 rows, of which `starts` gets the addresses. With `check`, elements that
  // are not finite become 0, and `wild` gets the bits of the keys that have some.
  template <class T>
  static void pack_values(const char* const* rows, int from, int to, std::int64_t dim, bool check, void* packed,
                          const float** starts, std::uint64_t* wild, Upcoming& next) {
    const std::int64_t stride = padded_values(dim);
    const bool as_they_lie = sizeof(T) == sizeof(float) && !check && dim % kLanes == 0;
    for (int key = from; key < to; ++key) {
      next.ask();
      float* row = static_cast<float*>(packed) + key * stride;
      starts[key] = as_they_lie ? elements<float>(rows[key]) : row;
      if (as_they_lie) continue;
      i32x16 finite = ~i32x16{};
      for (std::int64_t d = 0; d < dim; d += kLanes) {
        f32x16 v = load(elements<T>(rows[key]) + d, dim - d);
        if (check) {
          const i32x16 fine = (bit_cast<u32x16>(v) & 0x7f800000u) != 0x7f800000u;
          finite &= fine;
          v = bit_cast<f32x16>(bit_cast<i32x16>(v) & fine);
        }
        store(row + d, v);
      }
      if (check && sum(__builtin_convertvector(finite, f32x16)) != -kLanes) *wild |= std::uint64_t{1} << key;
    }
  }

  // Products of `count` rows of queries with the keys of a block, [count][kBlock].
  static void scores(const void* queries, int count, const void* keys, int from, int to, std::int64_t dim,
                     float* products) {
    with_rows(count, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      const float* q = static_cast<const float*>(queries);
      for (int key = 0; key < kBlock; key += kTileVectors * kLanes) {
        if (key >= to || key + kTileVectors * kLanes <= from) continue;
        const float* k = static_cast<const float*>(keys) + key;
        Lanes sums[kRows][kTileVectors];
        for (auto& row : sums) for (Lanes& s : row) s = splat_lanes(0.0f);
        for (std::int64_t d = 0; d < dim; ++d, k += kBlock) {
          Lanes part[kTileVectors];
          for (int v = 0; v < kTileVectors; ++v) part[v] = load_lanes(k + v * kLanes);
          for (int r = 0; r < kRows; ++r) {
            const Lanes x = splat_lanes(q[r * dim + d]);
            for (int v = 0; v < kTileVectors; ++v) sums[r][v] = fma(x, part[v], sums[r][v]);
          }
        }
        for (int r = 0; r < kRows; ++r) {
          for (int v = 0; v < kTileVectors; ++v) store_lanes(products + r * kBlock + key + v * kLanes, sums[r][v]);
        }
      }
    });
  }

  // o = o * turn + weights of the keys [from, to) times their values, for `count` rows.
  static void weigh(const float* weights, const void*, int count, const void*, const float* const* starts, int from,
                    int to, std::int64_t dim, const float* turns, float* o) {
    const std::int64_t stride = padded_values(dim);
    with_rows(count, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      std::int64_t d = 0;
      for (; d + kTileVectors * kLanes <= stride; d += kTileVectors * kLanes) {
        weigh_columns<kRows, kTileVectors>(weights, starts, from, to, d, turns, o + d, stride);
      }
      for (; d < stride; d += kLanes) weigh_columns<kRows, 1>(weights, starts, from, to, d, turns, o + d, stride);
    });
  }

  // For few rows, the keys [from, to) of one block.
  template <class T>
  static void few_scores(const char* queries, int count, const char* const* rows, bool, int from, int to,
                         std::int64_t dim, float* products, char* memory, Upcoming& next) {
    pack_keys<T>(rows, from, to, dim, memory, next);
    scores(queries, count, memory, from, to, dim, products);
  }

  template <class T>
  static void few_values(const float* weights, const void*, int count, const char* const* rows, int from, int to,
                         std::int64_t dim, bool check, const float* turns, float* o, char* memory, std::uint64_t* wild,
                         Upcoming& next) {
    const float* starts[kBlock];
    pack_values<T>(rows, from, to, dim, check, memory, starts, wild, next);
    weigh(weights, nullptr, count, nullptr, starts, from, to, dim, turns, o);
  }

  // Weights take the place of products.
  static std::size_t weight_bytes() { return 0; }
  static float softmax(float* products, const std::uint64_t (&visible)[kBlock / 64], const LogitRule& rule,
                       RowState state, void*) {
    return softmax_block<kBlock>(products, visible, rule, 0.0f, state);
  }
  static float weight(const float* weights, const void*, int key) { return weights[key]; }

  // Sixteen columns of a row of results, from column d.
  static f32x16 columns(const float* o, std::int64_t d) { return load(o + d); }
  static void add_columns(float* o, std::int64_t d, f32x16 x) { store(o + d, load(o + d) + x); }

 private:
  template <int kRows>
  struct Rows {
    static constexpr int value = kRows;
  };

  template <class F>
  static void with_rows(int count, F f) {
    switch (count) {
      case 1: return f(Rows<1>{});
      case 2: return f(Rows<2>{});
#if defined(__AVX512F__)
      case 3: return f(Rows<3>{});
      case 4: return f(Rows<4>{});
      case 5: return f(Rows<5>{});
      case 6: return f(Rows<6>{});
#endif
    }
  }

  template <int kRows, int kVectors>
  static void weigh_columns(const float* weights, const float* const* starts, int from, int to, std::int64_t d,
                            const float* turns, float* o, std::int64_t stride) {
    Lanes sums[kRows][kVectors];
    for (auto& row : sums) for (Lanes& s : row) s = splat_lanes(0.0f);
    for (int key = from; key < to; ++key) {
      const float* v = starts[key] + d;
      Lanes part[kVectors];
      for (int c = 0; c < kVectors; ++c) part[c] = load_lanes(v + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Lanes w = splat_lanes(weights[r * kBlock + key]);
        for (int c = 0; c < kVectors; ++c) sums[r][c] = fma(w, part[c], sums[r][c]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kVectors; ++c) {
        float* to_row = o + r * stride + c * kLanes;
        store_lanes(to_row, fma(load_lanes(to_row), splat_lanes(turns[r]), sums[r][c]));
      }
    }
  }
};

}  // namespace
}  // namespace tw::TW_ISA
