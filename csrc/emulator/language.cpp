#include "emulator/language.h"

#include "emulator/runtime.h"

namespace tw::emu {

uint3 block_dim() {
  const unsigned* block = here->block->launch->geometry.block;
  return uint3{block[0], block[1], block[2]};
}

uint3 grid_dim() {
  const unsigned* grid = here->block->launch->geometry.grid;
  return uint3{grid[0], grid[1], grid[2]};
}

void run_ballot(void* const* args, std::uint32_t mask) {
  unsigned result = 0;
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (static_cast<const Vote*>(args[lane])->predicate != 0) result |= 1u << lane;
  }
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) static_cast<Vote*>(args[__builtin_ctz(rest)])->result = result;
}

}  // namespace tw::emu
