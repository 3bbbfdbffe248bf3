// Atomics: one compare-and-swap loop on the value's bits, because blocks really do run at the same time.
#pragma once

namespace tw::emu {

template <std::size_t bytes>
struct Bits;
template <>
struct Bits<2> { using type = std::uint16_t; };
template <>
struct Bits<4> { using type = std::uint32_t; };
template <>
struct Bits<8> { using type = std::uint64_t; };

template <class T>
constexpr bool kFloating = !std::is_integral_v<T>;

template <class T, class Function>
TW_UNTRACED T atomic_update(T* address, Function function, const char* what, Site site) {
  using Word = typename Bits<sizeof(T)>::type;
  require_aligned(address, sizeof(T), what, site);
  note_atomic(address, sizeof(T), true, site);
  auto* word = reinterpret_cast<Word*>(address);
  Word before = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T old;
    std::memcpy(static_cast<void*>(&old), &before, sizeof(T));
    const T fresh = function(old);
    Word after;
    std::memcpy(&after, &fresh, sizeof(T));
    if (__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return old;
  }
}

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  } else {
    return a + b;
  }
}
inline float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

template <class T>
T atomic_add(T* address, T value, Site site) {
  if (kFloating<T>) order_atomic(address);
  return atomic_update(address, [value](T old) { return add(old, value); }, "atomicAdd()", site);
}

}  // namespace tw::emu

#define TW_AT tw::emu::Site site = tw::emu::Site::current()

#define TW_ATOMIC_ADD(T) \
  inline T atomicAdd(T* address, T value, TW_AT) { return tw::emu::atomic_add(address, value, site); }
TW_ATOMIC_ADD(int)
TW_ATOMIC_ADD(unsigned)
TW_ATOMIC_ADD(unsigned long long)
TW_ATOMIC_ADD(float)
TW_ATOMIC_ADD(double)
TW_ATOMIC_ADD(float2)
TW_ATOMIC_ADD(__half)
TW_ATOMIC_ADD(__half2)
TW_ATOMIC_ADD(__nv_bfloat16)
TW_ATOMIC_ADD(__nv_bfloat162)
#undef TW_ATOMIC_ADD

inline int atomicSub(int* address, int value, TW_AT) { return tw::emu::atomic_add(address, -value, site); }
inline unsigned atomicSub(unsigned* address, unsigned value, TW_AT) { return tw::emu::atomic_add(address, 0u - value, site); }

#define TW_ATOMIC(name, T, expression) \
  inline T name(T* address, T value, TW_AT) { \
    return tw::emu::atomic_update(address, [value](T old) -> T { return expression; }, #name "()", site); \
  }
#define TW_ATOMIC_INTEGERS(name, expression) \
  TW_ATOMIC(name, int, expression) \
  TW_ATOMIC(name, unsigned, expression) \
  TW_ATOMIC(name, unsigned long long, expression)
TW_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
TW_ATOMIC_INTEGERS(atomicMax, old < value ? value : old)
TW_ATOMIC(atomicMin, long long, value < old ? value : old)
TW_ATOMIC(atomicMax, long long, old < value ? value : old)
TW_ATOMIC_INTEGERS(atomicAnd, old & value)
TW_ATOMIC_INTEGERS(atomicOr, old | value)
TW_ATOMIC_INTEGERS(atomicXor, old ^ value)
TW_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1u)
TW_ATOMIC(atomicDec, unsigned, (old == 0 || old > value) ? value : old - 1u)
#undef TW_ATOMIC_INTEGERS
#undef TW_ATOMIC

// Exchanges and failed compare-and-swaps are how locks spin, so both count as polling.
#define TW_EXCHANGE(T) \
  inline T atomicExch(T* address, T value, TW_AT) { \
    const T old = tw::emu::atomic_update(address, [value](T) { return value; }, "atomicExch()", site); \
    if (std::memcmp(&old, &value, sizeof(T)) == 0) tw::emu::poll("atomicExch()", site); \
    return old; \
  }
TW_EXCHANGE(int)
TW_EXCHANGE(unsigned)
TW_EXCHANGE(unsigned long long)
TW_EXCHANGE(float)
#undef TW_EXCHANGE

#define TW_CAS(T) \
  inline T atomicCAS(T* address, T compare, T value, TW_AT) { \
    const T old = tw::emu::atomic_update(address, [=](T was) { return was == compare ? value : was; }, "atomicCAS()", site); \
    if (old != compare) tw::emu::poll("atomicCAS()", site); \
    return old; \
  }
TW_CAS(int)
TW_CAS(unsigned)
TW_CAS(unsigned long long)
TW_CAS(unsigned short)
#undef TW_CAS
#undef TW_AT
