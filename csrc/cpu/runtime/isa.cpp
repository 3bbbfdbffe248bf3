#include "cpu/runtime/isa.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tw {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
constexpr Isa kLevels[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx};

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // leaves zeros where there is no such leaf
  return r;
}

bool all(unsigned word, std::initializer_list<int> bits) {
  for (const int bit : bits) {
    if (!(word >> bit & 1)) return false;
  }
  return true;
}

// Which registers the operating system saves when it switches threads; without that an instruction set is of no use.
std::uint64_t saved_state() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t(high) << 32 | low;
}

// Linux hands out the 8 KiB of tile state on request; the right is the whole process's, for threads to come as well.
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa detect() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  if (!all(basic.c, {12, 27, 28, 29})) return Isa::portable;  // FMA, OSXSAVE, AVX, F16C
  const std::uint64_t saved = saved_state();
  constexpr std::uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  if (!all(extended.b, {5}) || (saved & kYmm) != kYmm) return Isa::portable;                       // AVX2
  if (!all(extended.b, {16, 17, 30, 31}) || (saved & kZmm) != kZmm) return Isa::avx2;              // F, DQ, BW, VL
  if (!all(extended.c, {1, 11}) || !all(more.a, {5})) return Isa::avx512;                              // VBMI, VNNI; BF16
  if (!all(extended.d, {22, 24, 25})) return Isa::avx512_bf16;                                         // AMX
  if ((saved & kTiles) != kTiles || !request_tiles()) return Isa::avx512_bf16;
  return Isa::amx;
}

#else

Isa detect() { return Isa::portable; }

#endif

void check_available(Isa isa, const std::string& where) {
  if (isa > detected_isa()) {
    throw std::invalid_argument(where + " is '" + isa_name(isa) + "'; this machine has '" + isa_name(detected_isa()) +
                                "' at most");
  }
}

Isa initial() {
  const char* chosen = std::getenv("TILEWRIGHT_ISA");
  if (chosen == nullptr || *chosen == '\0') return detected_isa();
  for (const Isa isa : kLevels) {
    if (std::string(chosen) != isa_name(isa)) continue;
    check_available(isa, "the environment variable TILEWRIGHT_ISA");
    return isa;
  }
  throw std::invalid_argument(std::string("the environment variable TILEWRIGHT_ISA is '") + chosen +
                              "'; it should be one of portable, avx2, avx512, avx512_bf16, amx");
}

std::atomic<int> current{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa isa_from_name(const std::string& name) {
  for (const Isa isa : kLevels) {
    if (name == isa_name(isa)) return isa;
  }
  throw std::invalid_argument("isa is '" + name + "'; it should be one of portable, avx2, avx512, avx512_bf16, amx");
}

Isa detected_isa() {
  static const Isa detected = detect();
  return detected;
}

Isa isa() {
  const int chosen = current.load(std::memory_order_relaxed);
  if (chosen >= 0) return static_cast<Isa>(chosen);
  const Isa first = initial();
  int unset = -1;
  current.compare_exchange_strong(unset, static_cast<int>(first));
  return static_cast<Isa>(current.load());
}

void set_isa(Isa isa) {
  check_available(isa, "isa");
  current.store(static_cast<int>(isa));
}

}  // namespace tw
