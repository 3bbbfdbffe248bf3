// The configuration of the AMX tile registers.
//
// It is loaded by our own instruction rather than by the compiler's `_tile_loadconfig`: GCC 12 declares 8 bytes of
// input for that, so stores to the other 56 bytes of the configuration look dead and are dropped.
#pragma once

#include <cstdint>

namespace tw {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};  // palette 1 has eight tiles; the rest stays zero
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(__x86_64__)

// For a thread that may use tiles: isa() is Isa::amx.
[[gnu::always_inline]] inline void load_tile_config(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

// Frees the tiles: while they are in use every switch of threads saves 8 KiB, and idle states are shallower.
[[gnu::always_inline]] inline void release_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

#endif

// What the processor holds after `config` was loaded. std::runtime_error where there is no AMX.
TileConfig tile_config_roundtrip(const TileConfig& config);

// A configuration in which no two tiles are alike, built in the way kernels build theirs, and what came back.
struct TileConfigPair {
  TileConfig loaded, found;
};
TileConfigPair distinct_tile_config_roundtrip();

}  // namespace tw
