// The emulator as a Python module; built plain (_emulator) and with the checker (_emulator_checked).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/launch.h"
#include "emulator/launch.h"

namespace py = pybind11;

namespace {

py::object error_class;  // EmulatorError: the module's own until kernels/emulator.py sets the shared one

void raise(const tw::emu::Report& report) {
  py::object error = error_class(report.message);
  error.attr("kind") = report.kind;
  error.attr("kernel") = report.kernel;
  error.attr("block") = py::make_tuple(report.block[0], report.block[1], report.block[2]);
  error.attr("place") = report.place;
  error.attr("other_place") = report.other_place.empty() ? py::object(py::none()) : py::str(report.other_place);
  error.attr("thread") = report.thread;
  error.attr("other_thread") = report.other_thread < 0 ? py::object(py::none()) : py::int_(report.other_thread);
  error.attr("byte") = report.byte < 0 ? py::object(py::none()) : py::int_(report.byte);
  PyErr_SetObject(error_class.ptr(), error.ptr());
  throw py::error_already_set();
}

void launch(const std::string& name, const py::tuple& grid, const py::tuple& block, std::size_t shared_bytes,
            std::uintptr_t, const py::bytes& params, bool cooperative, const py::tuple& cluster) {
  const tw::cuda::Kernel& kernel = tw::cuda::find_kernel(name);
  const tw::cuda::Geometry geometry = tw::bindings::geometry(grid, block, shared_bytes, cooperative, cluster);
  const std::string bytes = params;
  tw::cuda::check_launch(kernel, geometry, bytes.size());
  if (geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2] != 1) {
    throw std::invalid_argument("kernel '" + name + "': the emulator has no clusters yet");
  }
  // A copy with the strictest alignment a parameter struct can ask for.
  const tw::bindings::AlignedBytes aligned(bytes);
  std::optional<tw::emu::Report> report;
  {
    const py::gil_scoped_release release;
    report = tw::emu::run(kernel, geometry, aligned.data());
  }
  if (report) raise(*report);
}

}  // namespace

PYBIND11_MODULE(TW_MODULE, m) {
  m.doc() = "Runs the CUDA kernels of csrc/cuda on the host.";
#ifdef TW_EMULATOR_CHECKED
  m.attr("checked") = true;
#else
  m.attr("checked") = false;
#endif
  error_class = py::reinterpret_steal<py::object>(
      PyErr_NewException("tilewright_emulator.EmulatorError", PyExc_RuntimeError, nullptr));
  m.def("set_error_class", [](const py::object& cls) { error_class = cls; }, py::arg("cls"),
        "The class that a failed launch raises; it is called with the report's text.");
  m.def("kernels", &tw::bindings::kernels, "Name -> bytes of the parameter struct.");
  m.def("launch", &launch, py::arg("name"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"), py::arg("stream"),
        py::arg("params"), py::arg("cooperative") = false, py::arg("cluster") = py::make_tuple(1, 1, 1),
        "Runs a kernel to its end. ValueError: the launch is malformed. EmulatorError: the kernel did something wrong.");
  m.def("set_threads", [](unsigned n) { tw::emu::settings().threads = n; }, py::arg("n"),
        "Operating-system threads to spread blocks over; 0 is one a core. Results do not depend on it.");
  m.def("set_order", [](const std::string& order) {
    if (order != "in_order" && order != "random") throw std::invalid_argument("order is '" + order + "', should be 'in_order' or 'random'");
    tw::emu::settings().random_order = order == "random";
  }, py::arg("order"), "'in_order' runs threads by index, 'random' in a seeded random order.");
  m.def("set_seed", [](std::uint64_t seed) { tw::emu::settings().seed = seed; }, py::arg("seed"));
  m.def("set_poll_limit", [](std::uint64_t polls) { tw::emu::settings().poll_limit = polls; }, py::arg("polls"),
        "Polls without progress after which a block is reported to spin for ever.");
  m.def("set_watchdog", [](double seconds) {
    if (!(seconds > 0)) throw std::invalid_argument("seconds should be positive");
    tw::emu::settings().watchdog_seconds = seconds;
  }, py::arg("seconds"), "Time without scheduling after which a thread is reported to compute for ever.");
  m.def("set_stack_bytes", [](std::size_t bytes) {
    if (bytes < 16384 || bytes % 4096 != 0) throw std::invalid_argument("stack bytes should be a multiple of 4096, at least 16384");
    tw::emu::settings().stack_bytes = bytes;
  }, py::arg("bytes"), "The emulated stack of one thread.");
  m.def("set_buffers", [](const std::vector<std::tuple<std::uintptr_t, std::size_t, std::string, bool>>& ranges) {
    tw::emu::buffers().clear();
    for (const auto& [address, bytes, name, writable] : ranges) {
      tw::emu::buffers().push_back(tw::emu::Buffer{address, address + bytes, name, writable});
    }
  }, py::arg("ranges"), "(address, bytes, name, writable) of every buffer that a kernel may touch; only the checked build looks. Empty: no check.");
}
