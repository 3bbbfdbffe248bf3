// What the emulator's and the device's module share: the arguments of launch().
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>

#include "cuda/launch.h"

namespace tw::bindings {

inline void read_dims(const pybind11::tuple& from, unsigned* to, const char* name) {
  if (from.size() != 3) throw std::invalid_argument(std::string(name) + " has " + std::to_string(from.size()) + " numbers, should be 3");
  for (std::size_t i = 0; i < 3; ++i) {
    const auto value = from[i].cast<long long>();
    if (value < 0 || value > 0xffffffffll) throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value));
    to[i] = static_cast<unsigned>(value);
  }
}

inline cuda::Geometry geometry(const pybind11::tuple& grid, const pybind11::tuple& block, std::size_t shared_bytes,
                               bool cooperative, const pybind11::tuple& cluster) {
  cuda::Geometry result{};
  read_dims(grid, result.grid, "grid");
  read_dims(block, result.block, "block");
  read_dims(cluster, result.cluster, "cluster");
  result.shared_bytes = shared_bytes;
  result.cooperative = cooperative;
  return result;
}

inline std::map<std::string, std::size_t> kernels() {
  std::map<std::string, std::size_t> result;
  for (const cuda::Kernel& kernel : cuda::registry()) result[kernel.name] = kernel.param_bytes;
  return result;
}

class AlignedBytes {
 public:
  explicit AlignedBytes(const std::string& bytes) : data_(::operator new(bytes.size() + 1, std::align_val_t{128})) {
    std::memcpy(data_, bytes.data(), bytes.size());
  }
  ~AlignedBytes() { ::operator delete(data_, std::align_val_t{128}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  const void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace tw::bindings
