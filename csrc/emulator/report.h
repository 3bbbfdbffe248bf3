// What the emulator says when a kernel does something wrong.
#pragma once

#include <cstdint>
#include <string>

namespace tw::emu {

// A place in a kernel's source. Default arguments fill it in: `Site at = Site::current()` is the caller's line.
struct Site {
  const char* file = nullptr;
  int line = 0;
  static constexpr Site current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return Site{file, line};
  }
};

struct Report {
  std::string kind;         // "race", "uninitialized", ...: bindings/emulator.cpp lists them
  std::string kernel;
  std::string message;      // the whole text
  std::string place;        // "file:line" of the access or of the wait
  std::string other_place;  // of the conflicting access, where there is one
  std::uint32_t block[3] = {0, 0, 0};
  int thread = -1;          // linear index in the block
  int other_thread = -1;
  long long byte = -1;      // offset in shared memory, where it is one
  std::uint64_t order = 0;  // position of the block in the launch: the first failure in this order is the one reported
};

// "file:line" (with the chain of inlined callers) of a code address, from the module's debug information.
std::string resolve_address(std::uintptr_t pc);
std::string resolve_site(const Site& site);

}  // namespace tw::emu
