// Norms, rotary embedding and gated activations.
//
// Every element is read once and written once, and the arithmetic is a few operations an element, so memory bounds all
// of them: (reads + writes) bytes over the bandwidth. One row (a token's, in rotary) is one unit of work and stays in
// the first-level cache between the two passes of a norm. Sums run in sixteen lanes and end in a fixed tree, so a row's
// result depends on its own elements alone.
#include "cpu/layers.h"

#include "cpu/runtime/thread_pool.h"
#include "cpu/vector.h"

namespace tw::TW_ISA {
namespace {

// Rows that one thread should have at least: about 16 thousand elements outweigh waking a thread.
std::int64_t grain(std::int64_t elements_a_row) { return 1 + 16384 / (elements_a_row + 1); }

template <class F>
void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f16: return f(Half{});
    case Dtype::bf16: return f(Bfloat16{});
    default: return f(float{});
  }
}

template <class T>
T* row(const Rows& rows, std::int64_t r) {
  return static_cast<T*>(rows.data) + r * rows.stride;
}

template <class T>
f32x16 norm_input(const RmsNorm& p, std::int64_t r, std::int64_t c) {
  const std::int64_t left = p.columns - c;
  f32x16 v = load(row<const T>(p.x, r) + c, left);
  if (p.residual.data) v += load(row<const T>(p.residual, r) + c, left);
  return v;
}

template <class T, class W>
void norm_row(const RmsNorm& p, std::int64_t r) {
  f32x16 squares{};
  for (std::int64_t c = 0; c < p.columns; c += kLanes) {
    const f32x16 v = norm_input<T>(p, r, c);
    squares += v * v;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(p.columns) + p.eps);
  for (std::int64_t c = 0; c < p.columns; c += kLanes) {
    const std::int64_t left = p.columns - c;
    const f32x16 v = norm_input<T>(p, r, c);
    const f32x16 w = load(static_cast<const W*>(p.weight) + c, left) + p.weight_offset;
    // Both are stored after both are loaded: the outputs may be the inputs.
    store(row<T>(p.out, r) + c, v * scale * w, left);
    if (p.residual.data) store(row<T>(p.sum, r) + c, v, left);
  }
}

// Both read what they need before they write: the output may be the input.
template <class T>
void turn_halves(const T* in, T* out, const float* cosines, const float* sines, std::int64_t half) {
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const std::int64_t left = half - i;
    const f32x16 c = load(cosines + i, left), s = load(sines + i, left);
    const f32x16 a = load(in + i, left), b = load(in + half + i, left);
    store(out + i, a * c - b * s, left);
    store(out + half + i, b * c + a * s, left);
  }
}

template <class T>
void turn_pairs(const T* in, T* out, const float* cosines, const float* sines, std::int64_t half) {
  for (std::int64_t i = 0; i < half; i += kLanes / 2) {
    const std::int64_t left = half - i;
    const f32x16 c8 = load(cosines + i, left < 8 ? left : 8), s8 = load(sines + i, left < 8 ? left : 8);
    const f32x16 c = __builtin_shufflevector(c8, c8, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const f32x16 s = __builtin_shufflevector(s8, -s8, 16, 0, 17, 1, 18, 2, 19, 3, 20, 4, 21, 5, 22, 6, 23, 7);
    const f32x16 v = load(in + 2 * i, 2 * left);
    const f32x16 swapped = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    store(out + 2 * i, v * c + swapped * s, 2 * left);
  }
}

template <class T>
void rotate_token(const Rotary& p, std::int64_t t) {
  const std::int64_t position = p.wide_positions ? static_cast<const std::int64_t*>(p.positions)[t]
                                                 : static_cast<const std::int32_t*>(p.positions)[t];
  const bool known = position >= 0 && position < p.max_position;
  const std::int64_t half = p.rotary_dim / 2;
  const float* cosines = p.cos_sin + (known ? position * p.rotary_dim : 0);
  for (int which = 0; which < 2; ++which) {
    const Heads &from = p.in[which], &to = p.out[which];
    for (std::int64_t h = 0; h < from.heads; ++h) {
      const T* in = static_cast<const T*>(from.data) + t * from.token_stride + h * from.head_stride;
      T* out = static_cast<T*>(to.data) + t * to.token_stride + h * to.head_stride;
      for (std::int64_t i = 0; !known && i < p.rotary_dim; i += kLanes) {
        store(out + i, splat(__builtin_nanf("")), p.rotary_dim - i);
      }
      for (std::int64_t i = p.rotary_dim; in != out && i < p.head_dim; i += kLanes) {
        store(out + i, load(in + i, p.head_dim - i), p.head_dim - i);
      }
      if (!known) continue;
      if (p.interleaved) turn_pairs(in, out, cosines, cosines + half, half);
      else turn_halves(in, out, cosines, cosines + half, half);
    }
  }
}

// The exponential of -|x| alone: that of |x| would overflow where the result is still a normal number.
f32x16 sigmoid(f32x16 x) {
  const f32x16 e = exp(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

f32x16 silu(f32x16 x) { return x * sigmoid(x); }

// 0.5 (1 + tanh u) is sigmoid(2 u), without the cancellation.
f32x16 gelu_tanh(f32x16 x) {
  const f32x16 u = (x + x * x * x * 0.044715f) * 0.7978845608f;
  return x * sigmoid(u * 2.0f);
}

// x times the normal distribution function. The complementary error function of z >= 0 is t e^(P(t) - z^2) with
// t = 1 / (1 + z / 2); P is a minimax fit over z in [0, 14], within 6.1e-8.
f32x16 gelu(f32x16 x) {
  constexpr float kFit[] = {0.16099882f, -0.76803404f, 1.36105764f,  -0.96668351f, 0.14178309f,
                            -0.11560829f, 0.07386807f, 0.37855595f, 0.99955451f,  -1.26549220f};
  const f32x16 z = (x < 0.0f ? -x : x) * 0.70710678f;
  const f32x16 t = 1.0f / (z * 0.5f + 1.0f);
  f32x16 fit{};
  for (const float coefficient : kFit) fit = fit * t + coefficient;
  const f32x16 tail = t * exp(fit - z * z) * 0.5f;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <class T, class F>
void activate_rows(const GatedActivation& p, F activation) {
  parallel_for(p.rows, grain(p.columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* gate = row<const T>(p.x, r);
      for (std::int64_t c = 0; c < p.columns; c += kLanes) {
        const std::int64_t left = p.columns - c;
        store(row<T>(p.out, r) + c, activation(load(gate + c, left)) * load(gate + p.columns + c, left), left);
      }
    }
  });
}

}  // namespace

void rms_norm(const RmsNorm& p) {
  with_dtype(p.dtype, [&](auto element) {
    with_dtype(p.weight_dtype, [&](auto weight) {
      parallel_for(p.rows, grain(p.columns), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) norm_row<decltype(element), decltype(weight)>(p, r);
      });
    });
  });
}

void rotary(const Rotary& p) {
  with_dtype(p.dtype, [&](auto element) {
    parallel_for(p.tokens, grain((p.in[0].heads + p.in[1].heads) * p.head_dim),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t t = begin; t < end; ++t) rotate_token<decltype(element)>(p, t);
                 });
  });
}

void gated_activation(const GatedActivation& p) {
  with_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    switch (p.activation) {
      case Activation::silu: return activate_rows<T>(p, silu);
      case Activation::gelu_tanh: return activate_rows<T>(p, gelu_tanh);
      case Activation::gelu: return activate_rows<T>(p, gelu);
    }
  });
}

}  // namespace tw::TW_ISA
