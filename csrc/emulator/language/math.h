// Floating-point intrinsics. Fast approximations (__expf and its like) are computed precisely: an error bound that holds
// for the device's approximation holds for these too. Results are IEEE; the device's ftz mode is not modelled.
#pragma once

#include <cfenv>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

inline float __int_as_float(int x) { float r; std::memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(unsigned x) { float r; std::memcpy(&r, &x, 4); return r; }
inline int __float_as_int(float x) { int r; std::memcpy(&r, &x, 4); return r; }
inline unsigned __float_as_uint(float x) { unsigned r; std::memcpy(&r, &x, 4); return r; }
inline double __longlong_as_double(long long x) { double r; std::memcpy(&r, &x, 8); return r; }
inline long long __double_as_longlong(double x) { long long r; std::memcpy(&r, &x, 8); return r; }

#if !defined(__GLIBC_PREREQ) || !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
#endif
inline float __expf(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }
inline float __exp10f(float x) { return static_cast<float>(std::pow(10.0, static_cast<double>(x))); }
inline float __logf(float x) { return static_cast<float>(std::log(static_cast<double>(x))); }
inline float __log2f(float x) { return static_cast<float>(std::log2(static_cast<double>(x))); }
inline float __log10f(float x) { return static_cast<float>(std::log10(static_cast<double>(x))); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline void sincospif(float x, float* s, float* c) {
  const double angle = 3.14159265358979323846 * std::fmod(static_cast<double>(x), 2.0);
  *s = static_cast<float>(std::sin(angle));
  *c = static_cast<float>(std::cos(angle));
}
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0
inline float fdividef(float a, float b) { return a / b; }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-static_cast<double>(x) * 0.70710678118654752440)); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }

namespace tw::emu {
// Runs an operation in another rounding mode. Not inlined, or the compiler would compute it before the mode is set.
template <class Function>
[[gnu::noinline]] auto rounded(int mode, Function function) {
  const int before = std::fegetround();
  std::fesetround(mode);
  const auto result = function();
  std::fesetround(before);
  return result;
}
template <class T>
[[gnu::noinline]] T opaque(T x) { asm volatile("" : "+m"(x)); return x; }
}  // namespace tw::emu

#define TW_ROUNDED(suffix, mode) \
  inline float __fadd_##suffix(float a, float b) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(tw::emu::opaque(a) + tw::emu::opaque(b)); }); } \
  inline float __fsub_##suffix(float a, float b) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(tw::emu::opaque(a) - tw::emu::opaque(b)); }); } \
  inline float __fmul_##suffix(float a, float b) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(tw::emu::opaque(a) * tw::emu::opaque(b)); }); } \
  inline float __fdiv_##suffix(float a, float b) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(tw::emu::opaque(a) / tw::emu::opaque(b)); }); } \
  inline float __frcp_##suffix(float a) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(tw::emu::opaque(1.0f) / tw::emu::opaque(a)); }); } \
  inline float __fsqrt_##suffix(float a) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(sqrtf(tw::emu::opaque(a))); }); } \
  inline float __fmaf_##suffix(float a, float b, float c) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(fmaf(tw::emu::opaque(a), tw::emu::opaque(b), tw::emu::opaque(c))); }); } \
  inline float __double2float_##suffix(double a) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(static_cast<float>(tw::emu::opaque(a))); }); } \
  inline float __int2float_##suffix(int a) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(static_cast<float>(tw::emu::opaque(a))); }); } \
  inline float __uint2float_##suffix(unsigned a) { return tw::emu::rounded(mode, [&] { return tw::emu::opaque(static_cast<float>(tw::emu::opaque(a))); }); }
TW_ROUNDED(rz, FE_TOWARDZERO)
TW_ROUNDED(ru, FE_UPWARD)
TW_ROUNDED(rd, FE_DOWNWARD)
#undef TW_ROUNDED
// Round to nearest is the host's own mode.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return rsqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __ll2float_rn(long long a) { return static_cast<float>(a); }
inline float __ull2float_rn(unsigned long long a) { return static_cast<float>(a); }

namespace tw::emu {
// Conversions to integers saturate, and NaN becomes 0, as cvt does for 32-bit results.
template <class T>
T saturate_to(double x) {
  if (std::isnan(x)) return 0;
  constexpr int bits = static_cast<int>(sizeof(T)) * 8 - (std::is_signed_v<T> ? 1 : 0);
  const double end = std::ldexp(1.0, bits);
  if (x >= end) return static_cast<T>(~static_cast<std::make_unsigned_t<T>>(0) >> (std::is_signed_v<T> ? 1 : 0));
  if (std::is_signed_v<T>) {
    if (x <= -end) return static_cast<T>(static_cast<std::make_unsigned_t<T>>(1) << bits);
  } else if (x <= 0) {
    return 0;
  }
  return static_cast<T>(x);
}
}  // namespace tw::emu

#define TW_TO_INTEGER(name, T) \
  inline T __##name##_rn(float x) { return tw::emu::saturate_to<T>(std::nearbyint(static_cast<double>(x))); } \
  inline T __##name##_rz(float x) { return tw::emu::saturate_to<T>(std::trunc(static_cast<double>(x))); } \
  inline T __##name##_ru(float x) { return tw::emu::saturate_to<T>(std::ceil(static_cast<double>(x))); } \
  inline T __##name##_rd(float x) { return tw::emu::saturate_to<T>(std::floor(static_cast<double>(x))); }
TW_TO_INTEGER(float2int, int)
TW_TO_INTEGER(float2uint, unsigned)
TW_TO_INTEGER(float2ll, long long)
TW_TO_INTEGER(float2ull, unsigned long long)
#undef TW_TO_INTEGER
