// The CPU kernels as a Python module of addresses and sizes; the packages kernels/<family>/cpu.py call it.
#include "bindings/cpu.h"

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Kernels for the CPU: functions of addresses, sizes and strides, which they trust.";
  tw::bindings::bind_runtime(m);
  tw::bindings::bind_attention(m);
  tw::bindings::bind_layers(m);
  tw::bindings::bind_matmul(m);
}
