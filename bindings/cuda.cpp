// The kernels on a device, as a Python module with the emulator's interface: kernels() and launch().
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <set>
#include <utility>

#include "bindings/launch.h"

namespace py = pybind11;

namespace {

void check(cudaError_t error, const tw::cuda::Kernel& kernel, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not be found again by the next one
  throw std::runtime_error(std::string(what) + " of kernel '" + kernel.name + "' failed: " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

// More than 48 KiB of dynamic shared memory has to be asked for, once per kernel and device.
void allow_shared(const tw::cuda::Kernel& kernel, std::size_t bytes) {
  if (bytes <= 48 * 1024) return;
  static std::mutex mutex;
  static std::set<std::pair<int, void*>> allowed;
  int device = 0;
  check(cudaGetDevice(&device), kernel, "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (!allowed.insert({device, kernel.function}).second) return;
  int most = 0;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kernel, "cudaDeviceGetAttribute");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel.function), kernel, "cudaFuncGetAttributes");
  const int dynamic = most - static_cast<int>(attributes.sharedSizeBytes);
  const auto error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
  if (error != cudaSuccess) allowed.erase({device, kernel.function});
  check(error, kernel, "cudaFuncSetAttribute");
}

void launch(const std::string& name, const py::tuple& grid, const py::tuple& block, std::size_t shared_bytes,
            std::uintptr_t stream, const py::bytes& params, bool cooperative, const py::tuple& cluster) {
  const tw::cuda::Kernel& kernel = tw::cuda::find_kernel(name);
  const tw::cuda::Geometry geometry = tw::bindings::geometry(grid, block, shared_bytes, cooperative, cluster);
  const std::string bytes = params;
  tw::cuda::check_launch(kernel, geometry, bytes.size());
  const tw::bindings::AlignedBytes aligned(bytes);
  allow_shared(kernel, shared_bytes);

  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(geometry.grid[0], geometry.grid[1], geometry.grid[2]);
  config.blockDim = dim3(geometry.block[0], geometry.block[1], geometry.block[2]);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2] != 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = geometry.cluster[0];
    attributes[config.numAttrs].val.clusterDim.y = geometry.cluster[1];
    attributes[config.numAttrs++].val.clusterDim.z = geometry.cluster[2];
  }
  void* arguments[] = {const_cast<void*>(aligned.data())};
  check(cudaLaunchKernelExC(&config, kernel.function, arguments), kernel, "launch");
}

}  // namespace

PYBIND11_MODULE(TW_MODULE, m) {
  m.doc() = "Launches the CUDA kernels of csrc/cuda on the current device.";
  m.def("kernels", &tw::bindings::kernels, "Name -> bytes of the parameter struct.");
  m.def("launch", &launch, py::arg("name"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"), py::arg("stream"),
        py::arg("params"), py::arg("cooperative") = false, py::arg("cluster") = py::make_tuple(1, 1, 1),
        "Queues a kernel on a stream (a cudaStream_t as an integer). ValueError: the launch is malformed. RuntimeError: the "
        "device refused it. Nothing waits for the kernel.");
}
