// csrc/cpu/matmul and csrc/cpu/decode as Python functions of addresses and sizes; kernels/matmul/cpu.py and
// kernels/layers/cpu.py call them with checked tensors.
#include <pybind11/pybind11.h>

#include "bindings/cpu.h"
#include "cpu/matmul.h"
#include "cpu/runtime/isa.h"

namespace py = pybind11;

namespace tw::bindings {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

void quantized_matmul(std::int64_t rows, std::uintptr_t x, std::int64_t x_stride, std::uintptr_t weight,
                      std::int64_t weight_rows, std::int64_t columns, std::int64_t row_bytes, int format,
                      std::uintptr_t bias, std::uintptr_t out, std::int64_t out_stride, int dtype, int bias_dtype) {
  const Weight w{pointer(weight), weight_rows, columns, row_bytes, WeightFormat(format)};
  const Matmul p{rows,         pointer(x), x_stride,     w,                pointer(bias),
                 pointer(out), out_stride, Dtype(dtype), Dtype(bias_dtype)};
  pick(portable::matmul, avx2::matmul, avx512::matmul)(p);
}

void decode_rows(std::int64_t count, std::uintptr_t ids, bool wide_ids, std::uintptr_t weight, std::int64_t weight_rows,
                 std::int64_t columns, std::int64_t row_bytes, int format, float scale, std::uintptr_t out,
                 std::int64_t out_stride, int dtype) {
  const Weight w{pointer(weight), weight_rows, columns, row_bytes, WeightFormat(format)};
  const DecodeRows p{count, pointer(ids), wide_ids, w, scale, pointer(out), out_stride, Dtype(dtype)};
  pick(portable::decode_rows, avx2::decode_rows, avx512::decode_rows)(p);
}

}  // namespace

void bind_matmul(py::module_& m) {
  using nogil = py::call_guard<py::gil_scoped_release>;
  m.def("quantized_matmul", &quantized_matmul, nogil(), "A bias of address 0 is none.");
  m.def("decode_rows", &decode_rows, nogil(), "Row ids[i] times scale; zeros for an id that is no row.");
}

}  // namespace tw::bindings
