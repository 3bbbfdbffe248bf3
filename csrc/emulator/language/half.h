// What the toolkit's half and bfloat16 headers define for the device only. One rounding of the exact float result, as the
// device's instructions do for these short formats.
#pragma once

namespace tw::emu {
inline float to_float(__half x) { return __half2float(x); }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
T from_double(double x);
template <>
inline __half from_double<__half>(double x) { return __double2half(x); }
template <>
inline __nv_bfloat16 from_double<__nv_bfloat16>(double x) { return __double2bfloat16(x); }
template <class T>
T half_fma(T a, T b, T c) {
  // The product is exact in double, and the sum of values this short too, up to a rounding far below the format's own.
  return from_double<T>(static_cast<double>(to_float(a)) * to_float(b) + to_float(c));
}
}  // namespace tw::emu

#define TW_HALF_UNARY(name, expression) \
  inline __half h##name(__half h) { const double x = tw::emu::to_float(h); return tw::emu::from_double<__half>(expression); } \
  inline __nv_bfloat16 h##name(__nv_bfloat16 h) { const double x = tw::emu::to_float(h); return tw::emu::from_double<__nv_bfloat16>(expression); } \
  inline __half2 h2##name(__half2 h) { return __halves2half2(h##name(h.x), h##name(h.y)); } \
  inline __nv_bfloat162 h2##name(__nv_bfloat162 h) { return __halves2bfloat162(h##name(h.x), h##name(h.y)); }
TW_HALF_UNARY(trunc, std::trunc(x))
TW_HALF_UNARY(ceil, std::ceil(x))
TW_HALF_UNARY(floor, std::floor(x))
TW_HALF_UNARY(rint, std::nearbyint(x))
TW_HALF_UNARY(sqrt, std::sqrt(x))
TW_HALF_UNARY(rsqrt, 1.0 / std::sqrt(x))
TW_HALF_UNARY(rcp, 1.0 / x)
TW_HALF_UNARY(log, std::log(x))
TW_HALF_UNARY(log2, std::log2(x))
TW_HALF_UNARY(log10, std::log10(x))
TW_HALF_UNARY(exp, std::exp(x))
TW_HALF_UNARY(exp2, std::exp2(x))
TW_HALF_UNARY(exp10, std::pow(10.0, x))
TW_HALF_UNARY(cos, std::cos(x))
TW_HALF_UNARY(sin, std::sin(x))
TW_HALF_UNARY(tanh, std::tanh(x))
TW_HALF_UNARY(tanh_approx, std::tanh(x))
#undef TW_HALF_UNARY

inline __half __hfma(__half a, __half b, __half c) { return tw::emu::half_fma(a, b, c); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return tw::emu::half_fma(a, b, c); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
