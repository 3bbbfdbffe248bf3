// csrc/cpu/attention and csrc/cpu/kv_cache as Python functions of addresses, sizes and strides;
// kernels/attention/cpu.py calls them with checked tensors. An address of 0 is an argument that is not given.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/cpu.h"
#include "cpu/kv_cache.h"
#include "cpu/runtime/isa.h"

namespace py = pybind11;

namespace tw::bindings {
namespace {

template <class T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Page, slot and head strides of one tensor of pages or scales.
struct Strides {
  std::int64_t page, slot, head;
};

Scales scales(float number, std::uintptr_t data, Strides strides) {
  return {number, pointer<const float>(data), strides.page, strides.slot, strides.head};
}

Pages pages(std::uintptr_t data, Strides strides, std::int64_t dim, const Scales& of) {
  return {pointer(data), strides.page, strides.slot, strides.head, dim, of};
}

void paged_attention(std::int64_t tokens, std::int64_t num_q_heads, std::int64_t num_kv_heads, std::int64_t sequences,
                     std::int64_t page_size, std::int64_t dim, std::int64_t value_dim, int dtype, int pages_dtype,
                     std::uintptr_t q, std::int64_t q_token, std::int64_t q_head,                         //
                     std::uintptr_t k, std::int64_t k_page, std::int64_t k_slot, std::int64_t k_head,     //
                     std::uintptr_t v, std::int64_t v_page, std::int64_t v_slot, std::int64_t v_head,     //
                     float k_number, std::uintptr_t k_scale, std::int64_t k_scale_page, std::int64_t k_scale_slot,
                     std::int64_t k_scale_head,  //
                     float v_number, std::uintptr_t v_scale, std::int64_t v_scale_page, std::int64_t v_scale_slot,
                     std::int64_t v_scale_head,  //
                     std::uintptr_t page_table, std::int64_t table_stride, std::uintptr_t seq_lens,
                     std::uintptr_t query_start, float scale, float softcap, bool causal, std::int64_t left,
                     std::int64_t right, std::uintptr_t alibi_slopes, std::uintptr_t sinks, std::uintptr_t tree_mask,
                     std::int64_t tree_stride, std::int64_t tree_words, std::uintptr_t out, std::int64_t out_token,
                     std::int64_t out_head, std::uintptr_t lse, std::int64_t lse_token) {
  const Scales of_k = scales(k_number, k_scale, {k_scale_page, k_scale_slot, k_scale_head});
  const Scales of_v = scales(v_number, v_scale, {v_scale_page, v_scale_slot, v_scale_head});
  const PagedAttention p{tokens,
                         num_q_heads,
                         num_kv_heads,
                         sequences,
                         page_size,
                         pointer<const void>(q),
                         q_token,
                         q_head,
                         pages(k, {k_page, k_slot, k_head}, dim, of_k),
                         pages(v, {v_page, v_slot, v_head}, value_dim, of_v),
                         pointer<const std::int32_t>(page_table),
                         table_stride,
                         pointer<const std::int32_t>(seq_lens),
                         pointer<const std::int32_t>(query_start),
                         scale,
                         softcap,
                         causal,
                         left,
                         right,
                         pointer<const float>(alibi_slopes),
                         pointer<const float>(sinks),
                         pointer<const std::int32_t>(tree_mask),
                         tree_stride,
                         tree_words,
                         pointer(out),
                         out_token,
                         out_head,
                         pointer<float>(lse),
                         lse_token,
                         Dtype(dtype),
                         Dtype(pages_dtype)};
  pick(portable::paged_attention, avx2::paged_attention, avx512::paged_attention, avx512_bf16::paged_attention,
       amx::paged_attention)(p);
}

// Rows (address, token stride, head stride), pages (address, page, slot and head strides, dim) and scales (a number, or an
// address and its page, slot and head strides; whether one a slot is to be computed and written).
using RowsTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
using PagesTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using ScalesTuple = std::tuple<float, std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

AppendRows append_rows(const RowsTuple& r, const PagesTuple& p, const ScalesTuple& s, bool write_scales) {
  const auto [rows, token, head] = r;
  const auto [data, page_stride, slot_stride, head_stride, dim] = p;
  const auto [number, scale, scale_page, scale_slot, scale_head] = s;
  const Scales of = scales(number, write_scales ? 0 : scale, {scale_page, scale_slot, scale_head});
  return {pointer<const void>(rows), token, head, pages(data, {page_stride, slot_stride, head_stride}, dim, of),
          write_scales ? pointer<float>(scale) : nullptr};
}

void append_kv(std::int64_t tokens, std::int64_t heads, std::int64_t num_pages, std::int64_t page_size,
               std::uintptr_t slots, bool wide_slots, const RowsTuple& k, const PagesTuple& k_pages,
               const ScalesTuple& k_scales, bool write_k_scales, const RowsTuple& v, const PagesTuple& v_pages,
               const ScalesTuple& v_scales, bool write_v_scales, int dtype, int pages_dtype) {
  const AppendKv p{tokens,
                   heads,
                   num_pages,
                   page_size,
                   pointer<const void>(slots),
                   wide_slots,
                   append_rows(k, k_pages, k_scales, write_k_scales),
                   append_rows(v, v_pages, v_scales, write_v_scales),
                   Dtype(dtype),
                   Dtype(pages_dtype)};
  pick(portable::append_kv, avx2::append_kv, avx512::append_kv)(p);
}

// (result, its token and head strides, LSE, its token stride) of each part and of the whole.
using PartTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

void merge_attention(std::int64_t tokens, std::int64_t heads, std::int64_t dim, const std::vector<PartTuple>& parts,
                     const PartTuple& whole, int dtype) {
  std::vector<PartialAttention> partials;
  for (const auto& [out, token, head, lse, lse_token] : parts) {
    partials.push_back({pointer<const void>(out), token, head, pointer<const float>(lse), lse_token});
  }
  const auto [out, token, head, lse, lse_token] = whole;
  const MergeAttention p{static_cast<std::int64_t>(partials.size()), tokens, heads, dim, partials.data(), pointer(out),
                         token, head, pointer<float>(lse), lse_token, Dtype(dtype)};
  pick(portable::merge_attention, avx2::merge_attention, avx512::merge_attention)(p);
}

}  // namespace

void bind_attention(py::module_& m) {
  using nogil = py::call_guard<py::gil_scoped_release>;
  m.def("paged_attention", &paged_attention, nogil());
  m.def("append_kv", &append_kv, nogil());
  m.def("merge_attention", &merge_attention, nogil());
}

}  // namespace tw::bindings
