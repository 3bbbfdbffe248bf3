// Which keys a query sees. Rows of a tile are the query heads of one key head, token by token.
#pragma once

#include "cpu/attention.h"

namespace tw::TW_ISA {
namespace {

inline std::int64_t at_least(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t at_most(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Bits [from, to) of a word, both clamped to 0 .. 64.
inline std::uint64_t bit_range(std::int64_t from, std::int64_t to) {
  from = at_least(from, 0);
  to = at_most(to, 64);
  if (from >= to) return 0;
  return (~std::uint64_t{0} >> (64 - (to - from))) << from;
}

// The keys [begin, end) that a query may see; within a tree its own part of them are picked by bits.
struct Span {
  std::int64_t position, begin, end;
};

struct Sequence {
  const PagedAttention& p;
  const std::int32_t* table;
  std::int64_t row;      // of its first query in q
  std::int64_t queries;
  std::int64_t length;   // keys
  std::int64_t first;    // the first query's own key; negative where there are more queries than keys
  bool tree;

  Sequence(const PagedAttention& call, std::int64_t b)
      : p(call),
        table(call.page_table + b * call.table_stride),
        row(call.query_start[b]),
        queries(call.query_start[b + 1] - row),
        length(at_least(call.seq_lens[b], 0)),
        first(length - queries),
        tree(call.tree_mask != nullptr && queries <= 32 * call.tree_words) {}

  bool bit(std::int64_t query, std::int64_t other) const {
    const std::int32_t word = p.tree_mask[(row + query) * p.tree_stride + other / 32];
    return (static_cast<std::uint32_t>(word) >> (other % 32)) & 1;
  }

  // Where a query stands: a node of a tree as deep as it has ancestors, itself among the bits of its row.
  std::int64_t position(std::int64_t query) const {
    if (!tree) return first + query;
    std::int64_t depth = 0;
    for (std::int64_t w = 0; w < p.tree_words && 32 * w < queries; ++w) {
      std::uint32_t word = static_cast<std::uint32_t>(p.tree_mask[(row + query) * p.tree_stride + w]);
      if (queries - 32 * w < 32) word &= (std::uint32_t{1} << (queries - 32 * w)) - 1;
      for (; word != 0; word &= word - 1) ++depth;
    }
    return first + depth - 1;
  }

  Span span(std::int64_t query) const {
    const std::int64_t at = position(query);
    std::int64_t begin = p.left < 0 ? 0 : at_least(0, at - p.left + 1), end = length;
    if (tree) return {at, at_least(0, at_most(begin, first)), end};
    if (p.causal) end = at_most(end, at + 1);
    if (p.right >= 0) end = at_most(end, at + p.right + 1);
    return {at, begin, at_least(begin, end)};
  }

  // The 64 keys from `start` on that a query sees, as bits.
  std::uint64_t visible(std::int64_t query, const Span& span, std::int64_t start) const {
    const std::uint64_t bits = bit_range(span.begin - start, span.end - start);
    if (!tree || start + 64 <= first || bits == 0) return bits;
    std::uint64_t kept = bits & bit_range(0, first - start);
    if (p.left >= 0) kept &= bit_range(span.position - p.left + 1 - start, 64);
    for (std::int64_t key = at_least(at_least(start, first), 0); key < at_most(start + 64, length); ++key) {
      if (!bit(query, key - first)) continue;
      const std::int64_t distance = span.position - position(key - first);
      const bool near = (p.left < 0 || distance < p.left) && (p.right < 0 || distance >= -p.right);
      if (near) kept |= std::uint64_t{1} << (key - start);
    }
    return kept;
  }
};

}  // namespace
}  // namespace tw::TW_ISA
