// Chosen rows of a dense or quantised matrix as numbers: the token embedding.
//
// Bound by memory: a row's bytes are read once and its numbers written once. A row is one unit of work.
#include "cpu/matmul.h"
#include "cpu/runtime/thread_pool.h"
#include "cpu/weight_formats.h"

namespace tw::TW_ISA {
namespace {

template <class Format, class T>
void decode_row(const DecodeRows& p, std::int64_t r) {
  const std::int64_t id =
      p.wide_ids ? static_cast<const std::int64_t*>(p.ids)[r] : static_cast<const std::int32_t*>(p.ids)[r];
  const std::int64_t columns = p.weight.columns;
  T* out = static_cast<T*>(p.out) + r * p.out_stride;
  const bool known = id >= 0 && id < p.weight.rows;
  const std::uint8_t* row = static_cast<const std::uint8_t*>(p.weight.data) + (known ? id * p.weight.row_bytes : 0);
  const Lanes scale = splat_lanes(p.scale);
  const std::int64_t steps = (columns + kStep - 1) / kStep;
  typename Format::Scales scales;
  for (std::int64_t step = 0; step < steps; ++step) {
    const int i = static_cast<int>(step % kChunk);
    const std::int64_t left = steps - step;
    Lanes w[2] = {splat_lanes(0.0f), splat_lanes(0.0f)};
    if (known && i == 0) Format::prepare(row, step, left < kChunk ? static_cast<int>(left) : kChunk, scales);
    if (known) Format::decode(row, step, columns, scales, i, w);
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = step * kStep + i * kLanes;
      if (at < columns) store(out + at, bit_cast<f32x16>(known ? multiply(w[i], scale) : w[i]), columns - at);
    }
  }
}

template <class Format, class T>
void decode_all(const DecodeRows& p) {
  parallel_for(p.count, 1 + 8192 / (p.weight.columns + 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) decode_row<Format, T>(p, r);
  });
}

}  // namespace

void decode_rows(const DecodeRows& p) {
  with_format(p.weight.format, [&](auto format) {
    switch (p.dtype) {
      case Dtype::f16: return decode_all<decltype(format), Half>(p);
      case Dtype::bf16: return decode_all<decltype(format), Bfloat16>(p);
      default: return decode_all<decltype(format), float>(p);
    }
  });
}

}  // namespace tw::TW_ISA
