// csrc/cpu/layers as Python functions of addresses and sizes; kernels/layers/cpu.py calls them with checked tensors.
#include <pybind11/pybind11.h>

#include "bindings/cpu.h"
#include "cpu/layers.h"
#include "cpu/runtime/isa.h"

namespace py = pybind11;

namespace tw::bindings {
namespace {

template <class T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void rms_norm(std::int64_t rows, std::int64_t columns, std::uintptr_t x, std::int64_t x_stride, std::uintptr_t weight,
              float eps, float weight_offset, std::uintptr_t out, std::int64_t out_stride, int dtype, int weight_dtype) {
  const RmsNorm p{rows, columns, {pointer(x), x_stride}, {}, pointer<const void>(weight), eps, weight_offset,
                  {pointer(out), out_stride}, {}, Dtype(dtype), Dtype(weight_dtype)};
  pick(portable::rms_norm, avx2::rms_norm, avx512::rms_norm)(p);
}

void fused_add_rms_norm(std::int64_t rows, std::int64_t columns, std::uintptr_t x, std::int64_t x_stride,
                        std::uintptr_t residual, std::int64_t residual_stride, std::uintptr_t weight, float eps,
                        float weight_offset, std::uintptr_t out, std::int64_t out_stride, std::uintptr_t sum,
                        std::int64_t sum_stride, int dtype, int weight_dtype) {
  const RmsNorm p{rows, columns, {pointer(x), x_stride}, {pointer(residual), residual_stride},
                  pointer<const void>(weight), eps, weight_offset, {pointer(out), out_stride},
                  {pointer(sum), sum_stride}, Dtype(dtype), Dtype(weight_dtype)};
  pick(portable::rms_norm, avx2::rms_norm, avx512::rms_norm)(p);
}

using HeadsTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

Heads heads(const HeadsTuple& t) { return {pointer(std::get<0>(t)), std::get<1>(t), std::get<2>(t), std::get<3>(t)}; }

void rotary(std::int64_t tokens, std::int64_t head_dim, std::int64_t rotary_dim, std::int64_t max_position,
            const HeadsTuple& q, const HeadsTuple& k, const HeadsTuple& q_out, const HeadsTuple& k_out,
            std::uintptr_t positions, bool wide_positions, std::uintptr_t cos_sin, bool interleaved, int dtype) {
  const Rotary p{tokens, head_dim, rotary_dim, max_position, {heads(q), heads(k)}, {heads(q_out), heads(k_out)},
                 pointer<const void>(positions), wide_positions, pointer<const float>(cos_sin), interleaved,
                 Dtype(dtype)};
  pick(portable::rotary, avx2::rotary, avx512::rotary)(p);
}

void gated_activation(std::int64_t rows, std::int64_t columns, std::uintptr_t x, std::int64_t x_stride,
                      std::uintptr_t out, std::int64_t out_stride, int activation, int dtype) {
  const GatedActivation p{rows, columns, {pointer(x), x_stride}, {pointer(out), out_stride}, Activation(activation),
                          Dtype(dtype)};
  pick(portable::gated_activation, avx2::gated_activation, avx512::gated_activation)(p);
}

}  // namespace

void bind_layers(py::module_& m) {
  using nogil = py::call_guard<py::gil_scoped_release>;
  m.def("rms_norm", &rms_norm, nogil());
  m.def("fused_add_rms_norm", &fused_add_rms_norm, nogil());
  m.def("rotary", &rotary, nogil());
  m.def("gated_activation", &gated_activation, nogil());
}

}  // namespace tw::bindings
