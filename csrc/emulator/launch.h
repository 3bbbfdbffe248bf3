// The launch of one kernel on the emulator.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "emulator/report.h"

namespace tw::emu {

struct Settings {
  unsigned threads = 0;                // operating-system threads; 0: one a core
  bool random_order = false;           // fibers in a seeded random order instead of by index
  std::uint64_t seed = 0;
  std::uint64_t poll_limit = 1u << 22; // polls without progress after which a block is said to spin for ever
  double watchdog_seconds = 60;        // time without any scheduling after which it is
  std::size_t stack_bytes = 256 * 1024;
};

struct Buffer {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string name;
  bool writable;
};

Settings& settings();
// The checked build holds global accesses against these when there are any.
std::vector<Buffer>& buffers();

// Runs the kernel to its end, or to the first report in the order of blocks.
std::optional<Report> run(const cuda::Kernel& kernel, const cuda::Geometry& geometry, const void* params);

}  // namespace tw::emu
