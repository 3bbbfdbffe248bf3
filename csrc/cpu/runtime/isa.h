// The levels of the instruction set that CPU kernels are compiled for, and the one in use.
//
// A level is everything of the levels below it and:
//   avx2    AVX2, FMA, F16C
//   avx512  AVX-512 F, BW, DQ and VL: what every server core with AVX-512 has
//   avx512_bf16    AVX-512 VNNI, BF16 and VBMI: Zen 4 and newer, and every core with AMX
//   amx     AMX-TILE, INT8 and BF16
// csrc/cpu/toolchain.py has the compiler's flags for each.
#pragma once

#include <string>

namespace tw {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

const char* isa_name(Isa isa);

// std::invalid_argument where there is no such level.
Isa isa_from_name(const std::string& name);

// The highest level that the processor and the operating system have. On Linux, asks for the right to use tiles.
Isa detected_isa();

// The level in use: the detected one, or a lower one that TILEWRIGHT_ISA or set_isa chose. std::invalid_argument where
// the variable names no level or one that this machine does not have.
Isa isa();

// Chooses a level no higher than the detected one; std::invalid_argument for others.
void set_isa(Isa isa);

// The function for the level in use, among the same kernel's forms. A family without code of the two highest levels
// names three.
template <class F>
F pick(F portable, F avx2, F avx512, F avx512_bf16, F amx) {
  const F forms[] = {portable, avx2, avx512, avx512_bf16, amx};
  return forms[static_cast<int>(isa())];
}

template <class F>
F pick(F portable, F avx2, F avx512) {
  return pick(portable, avx2, avx512, avx512, avx512);
}

}  // namespace tw
