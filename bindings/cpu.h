// The parts of the module _cpu, one a family.
#pragma once

#include <pybind11/pybind11.h>

namespace tw::bindings {

void bind_runtime(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_layers(pybind11::module_& m);
void bind_matmul(pybind11::module_& m);

}  // namespace tw::bindings
