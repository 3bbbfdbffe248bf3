// Loads and stores with cache hints. The hints change nothing here; alignment is checked, because the instruction needs it.
#pragma once

#define TW_LOAD(name)                                                                                    \
  template <class T>                                                                                     \
  __attribute__((always_inline)) inline T name(const T* address) {                                       \
    return *address;                                                                                     \
  }
TW_LOAD(__ldg)
TW_LOAD(__ldcg)
TW_LOAD(__ldca)
TW_LOAD(__ldcs)
TW_LOAD(__ldlu)
TW_LOAD(__ldcv)
#undef TW_LOAD

#define TW_STORE(name)                                                                                   \
  template <class T>                                                                                     \
  __attribute__((always_inline)) inline void name(T* address, std::remove_const_t<T> value) {            \
    *address = value;                                                                                    \
  }
TW_STORE(__stwb)
TW_STORE(__stcg)
TW_STORE(__stcs)
TW_STORE(__stwt)
#undef TW_STORE

inline std::size_t __cvta_generic_to_shared(const void* address) { return tw::emu::shared_offset(address); }
inline void* __cvta_shared_to_generic(std::size_t offset) { return tw::emu::shared_address(static_cast<std::uint32_t>(offset)); }
inline std::size_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<std::size_t>(address); }
inline unsigned __isShared(const void* address) { return tw::emu::is_shared(address); }
inline unsigned __isGlobal(const void* address) { return !tw::emu::is_shared(address); }
