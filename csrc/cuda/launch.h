// The registry of kernels and the rules of a launch; the same on a device and on the emulator.
//
// A kernel is `__global__ void name(const __grid_constant__ Params p)`: one trivially copyable struct, by value. A .cu
// file names its instantiations,
//
//     TW_KERNEL("rms_norm_bf16", rms_norm<__nv_bfloat16>)
//
// and the native module that it is linked into launches them by name: launch(name, grid, block, shared_bytes, stream,
// params), where params are the bytes of the struct. Host code only: device code never includes this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace tw::cuda {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr std::size_t kMaxSharedBytes = 227 * 1024;  // sm_90; older devices refuse less themselves
constexpr std::size_t kMaxParamBytes = 4096;

struct Kernel {
  const char* name;
  const char* file;
  void* function;
  std::size_t param_bytes;
  void (*invoke)(void* function, const void* params);  // the emulator's way in
};

struct Geometry {
  unsigned grid[3];
  unsigned block[3];
  std::size_t shared_bytes;
  bool cooperative;
  unsigned cluster[3];
};

inline std::vector<Kernel>& registry() {
  static std::vector<Kernel> kernels;
  return kernels;
}

struct Registrar {
  template <class Params>
  Registrar(const char* name, const char* file, void (*kernel)(Params)) {
    static_assert(std::is_trivially_copyable_v<Params>, "a kernel's parameter struct is copied byte by byte");
    static_assert(sizeof(Params) <= kMaxParamBytes, "a kernel's parameters are limited to 4 KiB");
    for (const Kernel& other : registry()) {
      if (std::string(other.name) == name) throw std::logic_error(std::string("kernel registered twice: ") + name);
    }
    registry().push_back(Kernel{name, file, reinterpret_cast<void*>(kernel), sizeof(Params), [](void* function, const void* params) {
                                  reinterpret_cast<void (*)(Params)>(function)(*static_cast<const Params*>(params));
                                }});
  }
};

#define TW_KERNEL_JOIN_(a, b) a##b
#define TW_KERNEL_NAME_(line) TW_KERNEL_JOIN_(tw_kernel_registrar_, line)
#define TW_KERNEL(name, ...) \
  static const ::tw::cuda::Registrar TW_KERNEL_NAME_(__LINE__)(name, __FILE__, __VA_ARGS__);

// Throws std::invalid_argument, which Python sees as ValueError, before anything is launched.
inline const Kernel& find_kernel(const std::string& name) {
  for (const Kernel& kernel : registry()) {
    if (name == kernel.name) return kernel;
  }
  std::string near;
  const std::string stem = name.substr(0, name.find('_'));
  for (const Kernel& kernel : registry()) {
    if (!stem.empty() && std::string(kernel.name).rfind(stem, 0) == 0) near += std::string(near.empty() ? "" : ", ") + kernel.name;
  }
  throw std::invalid_argument("unknown kernel '" + name + "': " +
                              (near.empty() ? std::to_string(registry().size()) + " kernels are registered, none like it"
                                            : "registered are " + near));
}

inline void check_launch(const Kernel& kernel, const Geometry& geometry, std::size_t param_bytes) {
  const std::string who = std::string("kernel '") + kernel.name + "': ";
  if (param_bytes != kernel.param_bytes) {
    throw std::invalid_argument(who + "params has " + std::to_string(param_bytes) + " bytes, its struct has " +
                                std::to_string(kernel.param_bytes));
  }
  const unsigned long long limits[3] = {2147483647ull, 65535ull, 65535ull};
  for (int i = 0; i < 3; ++i) {
    const std::string axis(1, "xyz"[i]);
    if (geometry.grid[i] == 0 || geometry.grid[i] > limits[i]) {
      throw std::invalid_argument(who + "grid." + axis + " is " + std::to_string(geometry.grid[i]) + ", should be 1 to " +
                                  std::to_string(limits[i]));
    }
    if (geometry.block[i] == 0 || geometry.block[i] > (i == 2 ? 64u : kMaxBlockThreads)) {
      throw std::invalid_argument(who + "block." + axis + " is " + std::to_string(geometry.block[i]) + ", should be 1 to " +
                                  std::to_string(i == 2 ? 64u : kMaxBlockThreads));
    }
  }
  const auto threads = static_cast<unsigned long long>(geometry.block[0]) * geometry.block[1] * geometry.block[2];
  if (threads > kMaxBlockThreads) {
    throw std::invalid_argument(who + "a block of " + std::to_string(threads) + " threads, the limit is " +
                                std::to_string(kMaxBlockThreads));
  }
  if (geometry.shared_bytes > kMaxSharedBytes) {
    throw std::invalid_argument(who + "shared_bytes is " + std::to_string(geometry.shared_bytes) + ", the limit is " +
                                std::to_string(kMaxSharedBytes));
  }
  for (int i = 0; i < 3; ++i) {
    if (geometry.cluster[i] == 0 || geometry.grid[i] % geometry.cluster[i] != 0) {
      throw std::invalid_argument(who + "grid." + std::string(1, "xyz"[i]) + " = " + std::to_string(geometry.grid[i]) +
                                  " is no multiple of the cluster's " + std::to_string(geometry.cluster[i]));
    }
  }
}

}  // namespace tw::cuda
