// Host model of mma.sync.
//
// Products of two operands are exact in double (at most 11 + 11 significant bits), and so is their sum up to 2^-53 of its
// largest term. The model adds the products in order of k, then the accumulator, and rounds to the accumulator's format
// once. Hardware aligns the terms to the largest one and truncates below it, by rules that differ between generations and
// are not documented: the model is therefore the more exact of the two, and tests must allow the hardware its error.
// Integer sums wrap around, as without .satfinite.
#include "cuda/ptx/mma.cuh"

namespace tw::ptx {

namespace {

struct MmaCall {
  const uint32_t* a;
  const uint32_t* b;
  void* d;
};

template <class T>
struct Format;
template <>
struct Format<__nv_bfloat16> {
  static constexpr int per_register = 2;
  static double decode(uint32_t bits) { return static_cast<double>(__uint_as_float(bits << 16)); }
};
template <>
struct Format<__half> {
  static constexpr int per_register = 2;
  static double decode(uint32_t bits) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(bits);
    return static_cast<double>(__half2float(__half(raw)));
  }
};
template <>
struct Format<Tf32> {
  static constexpr int per_register = 1;
  // The instruction takes a float32 and ignores the low 13 bits of its significand.
  static double decode(uint32_t bits) { return static_cast<double>(__uint_as_float(bits & 0xffffe000u)); }
};
template <__nv_fp8_interpretation_t kind>
struct Fp8 {
  static constexpr int per_register = 4;
  static double decode(uint32_t bits) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), kind);
    return static_cast<double>(__half2float(__half(raw)));
  }
};
template <>
struct Format<__nv_fp8_e4m3> : Fp8<__NV_E4M3> {};
template <>
struct Format<__nv_fp8_e5m2> : Fp8<__NV_E5M2> {};
template <>
struct Format<int8_t> {
  static constexpr int per_register = 4;
  static double decode(uint32_t bits) { return static_cast<int8_t>(bits); }
};
template <>
struct Format<uint8_t> {
  static constexpr int per_register = 4;
  static double decode(uint32_t bits) { return static_cast<uint8_t>(bits); }
};

double accumulator(const float& value) { return static_cast<double>(value); }
double accumulator(const int& value) { return value; }
double accumulator(const __half& value) { return static_cast<double>(__half2float(value)); }
void store(float& to, double value) { to = static_cast<float>(value); }
// The sum is an integer below 2^53, so it is exact; only the 32-bit result wraps.
void store(int& to, double value) { to = static_cast<int>(static_cast<uint32_t>(static_cast<long long>(value))); }
void store(__half& to, double value) { to = __double2half(value); }

template <class A, class B, class D>
void run_mma(void* const* args, std::uint32_t) {
  constexpr int E = Format<A>::per_register;
  static_assert(E == Format<B>::per_register);
  constexpr int K = 8 * E;
  constexpr uint32_t low = E == 1 ? ~0u : (1u << (32 / E)) - 1;
  double a[16][K];
  double b[K][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* call = static_cast<const MmaCall*>(args[lane]);
    const int group = lane / 4;
    const int t = lane % 4;
    for (int j = 0; j < E; ++j) {
      const int shift = E == 1 ? 0 : j * (32 / E);
      for (int r = 0; r < 4; ++r) {
        a[group + 8 * (r % 2)][t * E + j + 4 * E * (r / 2)] = Format<A>::decode(call->a[r] >> shift & low);
      }
      for (int r = 0; r < 2; ++r) b[t * E + j + 4 * E * r][group] = Format<B>::decode(call->b[r] >> shift & low);
    }
  }
  for (int row = 0; row < 16; ++row) {
    double sum[8] = {};
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    }
    for (int column = 0; column < 8; ++column) {
      const int lane = row % 8 * 4 + column / 2;
      D& held = static_cast<D*>(static_cast<const MmaCall*>(args[lane])->d)[row / 8 * 2 + column % 2];
      store(held, sum[column] + accumulator(held));
    }
  }
}

template <class A, class B, class D>
void mma(void* d, const uint32_t* a, const uint32_t* b, const char* what, emu::Site site) {
  MmaCall call{a, b, d};
  emu::warp_sync(~0u, run_mma<A, B, D>, &call, false, what, site);
}

}  // namespace

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], emu::Site site) {
  mma<T, T, float>(d, a, b, "mma.m16n8k16", site);
}
template void mma_m16n8k16<__nv_bfloat16>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], emu::Site);
template void mma_m16n8k16<__half>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], emu::Site);

template <class T>
void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], emu::Site site) {
  mma<T, T, float>(d, a, b, "mma.m16n8k8", site);
}
template void mma_m16n8k8<Tf32>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], emu::Site);

void mma_m16n8k16_f16acc(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2], emu::Site site) {
  mma<__half, __half, __half>(d, a, b, "mma.m16n8k16", site);
}

template <class A, class B, class D>
void mma_m16n8k32(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], emu::Site site) {
  mma<A, B, D>(d, a, b, "mma.m16n8k32", site);
}
#define TW_MMA_K32(A, B, D) \
  template void mma_m16n8k32<A, B, D>(D (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], emu::Site);
TW_MMA_K32(int8_t, int8_t, int)
TW_MMA_K32(int8_t, uint8_t, int)
TW_MMA_K32(uint8_t, int8_t, int)
TW_MMA_K32(uint8_t, uint8_t, int)
TW_MMA_K32(__nv_fp8_e4m3, __nv_fp8_e4m3, float)
TW_MMA_K32(__nv_fp8_e4m3, __nv_fp8_e5m2, float)
TW_MMA_K32(__nv_fp8_e5m2, __nv_fp8_e4m3, float)
TW_MMA_K32(__nv_fp8_e5m2, __nv_fp8_e5m2, float)
#undef TW_MMA_K32

}  // namespace tw::ptx
