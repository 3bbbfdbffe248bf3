// out[M, N] = x[M, K] w[N, K]^T + bias for dense and quantised weights, in float32.
//
// Order of the sum, the same for every M, N, place in the batch and number of threads: lane l of sixteen adds the
// products of k = l, l + 16, l + 32, ... one after the other, each fused where the level has such an instruction; the
// lanes are added in a fixed tree; the bias comes last; the result is rounded once to the output's dtype. Weights are
// decoded to float32 exactly, so how they are stored does not matter either.
//
// Few rows (M <= kFewRows, decode): each weight byte is read once and used in registers, so the bound is N * row_bytes
// over the memory's bandwidth as long as decoding keeps up: on AVX-512, 28 vector operations for 4 x 32 four-bit weights
// and a fifth more for their scales, some 25 cycles on a Zen 4 core, which at 3.7 GHz is 12 GB/s of Q4_1.
// Many rows (prefill): 2 M N K flops bound it. A panel of weight rows is decoded once for all of M into a buffer of
// kPanelBytes, which stays in the second-level cache; x is walked in tiles of kTileRows rows by kTileColumns weight
// rows, whose accumulators fill the registers. Threads split the columns of `out`, and its rows too where there are
// more threads than groups of kTileColumns columns.
#include "cpu/matmul.h"

#include "cpu/runtime/aligned.h"
#include "cpu/runtime/thread_pool.h"
#include "cpu/weight_formats.h"

namespace tw::TW_ISA {
namespace {

constexpr int kTileColumns = 4;
#if defined(__AVX512F__)
constexpr int kTileRows = 6;  // 24 accumulators, 4 weights and a row of x in 32 registers
constexpr int kFewRows = 3;
#else
constexpr int kTileRows = 2;
constexpr int kFewRows = 1;
#endif
constexpr std::int64_t kPanelBytes = 256 << 10;
constexpr std::int64_t kAhead = 8 << 10;  // bytes that are asked for before they are needed, or more
constexpr std::int64_t kStepFloats = kTileColumns * kStep;  // of one group's weights in a panel

// x as float32 with rows padded by zeros to whole steps.
struct Operand {
  const float* data;
  std::int64_t stride;
};

struct Problem {
  const Matmul& p;
  Operand x;
  std::int64_t steps;   // of kStep along K
  std::int64_t groups;  // of kTileColumns along N
};

std::int64_t groups_ahead(const Weight& w) { return 1 + kAhead / (kTileColumns * w.row_bytes); }

// Weights of one group of output features straight from their format. Where memory is slower than decoding, its answer
// has to be on the way before it is needed: while a group is read, the next one's bytes are asked for. The processor's
// own prefetching starts anew at every page and sees the four rows as four streams, short ones where K is small.
template <class Format>
struct PackedGroup {
  const std::uint8_t* rows[kTileColumns];
  std::int64_t columns;
  std::int64_t ahead;        // bytes to the next group
  std::int64_t chunk_bytes;  // of kChunk steps of a row

  // A group that runs over the end repeats the last row; what that gives is not stored.
  PackedGroup(const Weight& w, std::int64_t group, std::int64_t steps)
      : columns(w.columns), ahead(groups_ahead(w) * kTileColumns * w.row_bytes), chunk_bytes(w.row_bytes * kChunk / steps) {
    for (int n = 0; n < kTileColumns; ++n) {
      const std::int64_t row = group * kTileColumns + n;
      rows[n] = static_cast<const std::uint8_t*>(w.data) + (row < w.rows ? row : w.rows - 1) * w.row_bytes;
    }
  }

  using Scales = typename Format::Scales;
  TW_INLINE void prepare(std::int64_t step, int count, int n, Scales& s) const {
    const std::uint8_t* next = rows[n] + ahead + step / kChunk * chunk_bytes;
    for (std::int64_t i = 0; i < chunk_bytes; i += kCacheLine) __builtin_prefetch(next + i, 0, 2);
    Format::prepare(rows[n], step, count, s);
  }
  TW_INLINE void load(std::int64_t step, int n, const Scales& s, int i, Lanes (&w)[2]) const {
    Format::decode(rows[n], step, columns, s, i, w);
  }
};

// The same from a panel: for each step the group's rows, 32 weights of each.
struct DecodedGroup {
  const float* data;

  using Scales = NoScales;
  TW_INLINE void prepare(std::int64_t, int, int, NoScales&) const {}
  TW_INLINE void load(std::int64_t step, int n, NoScales, int, Lanes (&w)[2]) const {
    const float* from = data + step * kStepFloats + n * kStep;
    w[0] = load_lanes(from);
    w[1] = load_lanes(from + kLanes);
  }
};

template <class T>
inline void store_element(void* to, std::int64_t index, float value) {
  // vector.h rounds; one lane of it costs no more than a scalar form would.
  store(static_cast<T*>(to) + index, splat(value), 1);
}

inline float load_element(const void* from, Dtype dtype, std::int64_t index) {
  switch (dtype) {
    case Dtype::f16: return load_half(static_cast<const Half*>(from) + index);
    case Dtype::bf16: return bit_cast<float>(std::uint32_t(static_cast<const Bfloat16*>(from)[index].bits) << 16);
    default: return static_cast<const float*>(from)[index];
  }
}

// One group's results of one row.
inline void store_row(const Matmul& p, std::int64_t row, std::int64_t group, const float (&sums)[kTileColumns],
                      const float (&bias)[kTileColumns]) {
  const std::int64_t column = group * kTileColumns, at = row * p.out_stride + column;
  const std::int64_t left = p.weight.rows - column;
  const int count = left < kTileColumns ? static_cast<int>(left) : kTileColumns;
  for (int n = 0; n < count; ++n) {
    const float value = p.bias ? sums[n] + bias[n] : sums[n];
    switch (p.dtype) {
      case Dtype::f16: store_element<Half>(p.out, at + n, value); break;
      case Dtype::bf16: store_element<Bfloat16>(p.out, at + n, value); break;
      default: static_cast<float*>(p.out)[at + n] = value;
    }
  }
}

// use(step, weights of the group) for each step in turn.
template <class Group, class Use>
TW_INLINE void for_each_step(std::int64_t steps, const Group& weights, Use use) {
  for (std::int64_t start = 0; start < steps; start += kChunk) {
    const int count = steps - start < kChunk ? static_cast<int>(steps - start) : kChunk;
    typename Group::Scales scales[kTileColumns];
    for (int n = 0; n < kTileColumns; ++n) weights.prepare(start, count, n, scales[n]);
    const auto step = [&](int i) __attribute__((always_inline)) {
      Lanes w[kTileColumns][2];
      for (int n = 0; n < kTileColumns; ++n) weights.load(start + i, n, scales[n], i, w[n]);
      use(start + i, w);
    };
    // In pairs, so that where two steps share bytes it is known at compile time which of the two a step is.
    for (int i = 0; i < count; i += 2) {
      step(i);
      if (i + 1 < count) step(i + 1);
    }
  }
}

// kRows rows of x by one group of output features. Every element has an accumulator of its own.
template <int kRows, class Group>
inline void tile(const Problem& problem, std::int64_t row, std::int64_t group, const Group& weights,
                 const float (&bias)[kTileColumns]) {
  Lanes sums[kRows][kTileColumns];
  for (auto& row_sums : sums) {
    for (Lanes& lanes : row_sums) lanes = splat_lanes(0.0f);
  }
  const float* x = problem.x.data + row * problem.x.stride;
  for_each_step(problem.steps, weights, [&](std::int64_t step, const Lanes (&w)[kTileColumns][2]) {
    for (int half = 0; half < 2; ++half) {
      for (int m = 0; m < kRows; ++m) {
        const Lanes values = load_lanes(x + m * problem.x.stride + step * kStep + half * kLanes);
        for (int n = 0; n < kTileColumns; ++n) sums[m][n] = fma(values, w[n][half], sums[m][n]);
      }
    }
  });
  for (int m = 0; m < kRows; ++m) {
    float totals[kTileColumns];
    sum_four(sums[m], totals);
    store_row(problem.p, row + m, group, totals, bias);
  }
}

// `rows` <= kMost rows by one group.
template <int kMost, class Group>
inline void rows_by_group(const Problem& problem, std::int64_t row, std::int64_t rows, std::int64_t group,
                          const Group& weights, const float (&bias)[kTileColumns]) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return rows_by_group<kMost - 1>(problem, row, rows, group, weights, bias);
  }
  tile<kMost>(problem, row, group, weights, bias);
}

inline void load_bias(const Matmul& p, std::int64_t group, float (&bias)[kTileColumns]) {
  for (int n = 0; n < kTileColumns; ++n) {
    const std::int64_t column = group * kTileColumns + n;
    bias[n] = p.bias && column < p.weight.rows ? load_element(p.bias, p.bias_dtype, column) : 0.0f;
  }
}

template <class Format>
void few_rows(const Problem& problem, std::int64_t begin, std::int64_t end) {
  for (std::int64_t group = begin; group < end; ++group) {
    float bias[kTileColumns];
    load_bias(problem.p, group, bias);
    const PackedGroup<Format> weights(problem.p.weight, group, problem.steps);
    rows_by_group<kFewRows>(problem, 0, problem.p.rows, group, weights, bias);
  }
}

// Rows [first, last) of x by the groups [begin, end).
template <class Format>
void many_rows(const Problem& problem, std::int64_t first, std::int64_t last, std::int64_t begin, std::int64_t end) {
  const std::int64_t group_floats = problem.steps * kStepFloats;
  const std::int64_t fitting = kPanelBytes / (group_floats * std::int64_t(sizeof(float)));
  const std::int64_t panel_groups = fitting > 1 ? fitting : 1;
  float* panel = static_cast<float*>(thread_scratch(Scratch::panel, panel_groups * group_floats * sizeof(float)));
  for (std::int64_t start = begin; start < end; start += panel_groups) {
    const std::int64_t stop = start + panel_groups < end ? start + panel_groups : end;
    for (std::int64_t group = start; group < stop; ++group) {
      const PackedGroup<Format> packed(problem.p.weight, group, problem.steps);
      float* to = panel + (group - start) * group_floats;
      for_each_step(problem.steps, packed, [&](std::int64_t, const Lanes (&w)[kTileColumns][2]) {
        for (int n = 0; n < kTileColumns; ++n, to += kStep) {
          store_lanes(to, w[n][0]);
          store_lanes(to + kLanes, w[n][1]);
        }
      });
    }
    for (std::int64_t row = first; row < last; row += kTileRows) {
      const std::int64_t rows = last - row < kTileRows ? last - row : kTileRows;
      for (std::int64_t group = start; group < stop; ++group) {
        float bias[kTileColumns];
        load_bias(problem.p, group, bias);
        const DecodedGroup weights{panel + (group - start) * group_floats};
        rows_by_group<kTileRows>(problem, row, rows, group, weights, bias);
      }
    }
  }
}

template <class T>
void widen_rows(const Matmul& p, float* to, std::int64_t stride) {
  parallel_for(p.rows, 1 + 16384 / stride, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(p.x) + r * p.x_stride;
      for (std::int64_t k = 0; k < stride; k += kLanes) {
        const std::int64_t left = p.weight.columns - k;
        store(to + r * stride + k, left > 0 ? load(from + k, left) : f32x16{});
      }
    }
  });
}

Operand operand(const Matmul& p, std::int64_t steps) {
  if (p.dtype == Dtype::f32 && p.weight.columns % kStep == 0) return {static_cast<const float*>(p.x), p.x_stride};
  const std::int64_t stride = steps * kStep;
  float* to = static_cast<float*>(thread_scratch(Scratch::operand, p.rows * stride * sizeof(float)));
  switch (p.dtype) {
    case Dtype::f16: widen_rows<Half>(p, to, stride); break;
    case Dtype::bf16: widen_rows<Bfloat16>(p, to, stride); break;
    default: widen_rows<float>(p, to, stride);
  }
  return {to, stride};
}

// Parts into which the rows of x are cut so that every thread gets work, each a whole number of tiles.
std::int64_t row_parts(const Problem& problem) {
  const std::int64_t threads = num_threads(), tiles = (problem.p.rows + kTileRows - 1) / kTileRows;
  if (problem.groups >= threads) return 1;
  const std::int64_t wanted = (threads + problem.groups - 1) / problem.groups;
  return wanted < tiles ? wanted : tiles;
}

template <class Format>
void multiply_by(const Problem& problem) {
  // Multiply-adds for which it pays to wake another thread.
  constexpr std::int64_t kWorthwhile = 1 << 16;
  const std::int64_t rows = problem.p.rows, grain = 1 + kWorthwhile / (problem.steps * kStepFloats * rows);
  if (rows <= kFewRows) {
    parallel_for(problem.groups, grain,
                 [&](std::int64_t begin, std::int64_t end) { few_rows<Format>(problem, begin, end); });
    return;
  }
  const std::int64_t parts = row_parts(problem), tiles = (rows + kTileRows - 1) / kTileRows;
  const auto bound = [&](std::int64_t part) {
    const std::int64_t row = tiles * part / parts * kTileRows;
    return row < rows ? row : rows;
  };
  // Units are numbered with the groups running fastest, so a thread's units are one range of groups in each of the row
  // parts that they touch.
  parallel_for(parts * problem.groups, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin / problem.groups; part * problem.groups < end; ++part) {
      const std::int64_t from = begin - part * problem.groups, to = end - part * problem.groups;
      many_rows<Format>(problem, bound(part), bound(part + 1), from > 0 ? from : 0,
                        to < problem.groups ? to : problem.groups);
    }
  });
}

}  // namespace

void matmul(const Matmul& p) {
  if (p.rows <= 0 || p.weight.rows <= 0) return;
  const std::int64_t steps = (p.weight.columns + kStep - 1) / kStep;
  const Problem problem{p, operand(p, steps), steps, (p.weight.rows + kTileColumns - 1) / kTileColumns};
  with_format(p.weight.format, [&](auto format) { multiply_by<decltype(format)>(problem); });
}

}  // namespace tw::TW_ISA
