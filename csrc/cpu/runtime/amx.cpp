#include "cpu/runtime/amx.h"

#include <cstring>
#include <stdexcept>

#include "cpu/runtime/isa.h"

namespace tw {

TileConfig tile_config_roundtrip(const TileConfig& config) {
  if (detected_isa() != Isa::amx) {
    throw std::runtime_error(std::string("this machine has '") + isa_name(detected_isa()) + "' at most, and no AMX");
  }
  TileConfig found;
  std::memset(static_cast<void*>(&found), 0xff, sizeof found);
#if defined(__x86_64__)
  load_tile_config(config);
  __asm__ volatile("sttilecfg %0" : "=m"(found) : : "memory");
  release_tiles();
#endif
  return found;
}

TileConfigPair distinct_tile_config_roundtrip() {
  TileConfigPair pair;
  for (int tile = 0; tile < 8; ++tile) {
    pair.loaded.rows[tile] = static_cast<std::uint8_t>(16 - tile);
    pair.loaded.row_bytes[tile] = static_cast<std::uint16_t>(4 * (tile + 3));
  }
  pair.found = tile_config_roundtrip(pair.loaded);
  return pair;
}

}  // namespace tw
