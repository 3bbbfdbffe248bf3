// csrc/cpu/runtime as Python functions; kernels/cpu_runtime.py is their public face.
#include <pybind11/pybind11.h>

#include "bindings/cpu.h"
#include "cpu/runtime/amx.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/thread_pool.h"

namespace py = pybind11;

namespace tw::bindings {
namespace {

py::bytes raw(const TileConfig& config) { return {reinterpret_cast<const char*>(&config), sizeof config}; }

// The body takes the interpreter's lock for each part: this is for tests of the pool, not for speed.
void python_parallel_for(std::int64_t n, std::int64_t grain, const py::function& body) {
  const py::gil_scoped_release release;
  parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    const py::gil_scoped_acquire acquire;
    body(begin, end);
  });
}

void empty_parallel_for(std::int64_t n, std::int64_t repeats) {
  for (std::int64_t i = 0; i < repeats; ++i) parallel_for(n, 1, [](std::int64_t, std::int64_t) {});
}

}  // namespace

void bind_runtime(py::module_& m) {
  using nogil = py::call_guard<py::gil_scoped_release>;
  m.def("detected_isa", [] { return isa_name(detected_isa()); }, "The highest level that this machine has.");
  m.def("isa", [] { return isa_name(isa()); }, "The level in use.");
  m.def("set_isa", [](const std::string& name) { set_isa(isa_from_name(name)); }, py::arg("name"),
        "Chooses a level no higher than the detected one.");
  m.def("num_threads", &num_threads, "Threads that an operation uses, the calling one included.");
  m.def("set_num_threads", &set_num_threads, py::arg("threads"));
  m.def("amx_config_roundtrip", [] {
    const TileConfigPair pair = distinct_tile_config_roundtrip();
    return py::make_tuple(raw(pair.loaded), raw(pair.found));
  }, "(what was loaded, what the processor then held), 64 bytes each. RuntimeError where there is no AMX.");
  m.def("parallel_for", &python_parallel_for, py::arg("n"), py::arg("grain"), py::arg("body"),
        "Calls body(begin, end) for parts that cover 0 .. n - 1, on the pool.");
  m.def("empty_parallel_for", &empty_parallel_for, py::arg("n"), py::arg("repeats"), nogil(),
        "Dispatches bodies that do nothing: what a call of the pool costs.");
}

}  // namespace tw::bindings
