// A tile: some queries of one sequence with the query heads of one key head or several, over some splits of the keys.
// Several heads take turns split by split: their keys share pages of memory, of which the processor knows few at a time.
//
// Keys are cut at multiples of the math's block and of kSplit, counted from the sequence's first key. A split is worked
// on from a fresh state, and the splits' states are folded in order, so which thread takes which split does not show.
#pragma once

#include "cpu/attention/float32.h"
#include "cpu/attention/sight.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kSplit = 512;            // keys
constexpr std::int64_t kPanelBytes = 512 << 10;  // of packed keys and values at once, which the second-level cache holds

struct Tile {
  std::int64_t sequence, query, queries;
  std::int64_t head, heads;    // key heads
  std::int64_t rows;           // of each
  std::int64_t begin, end;     // the keys that some row sees
  std::int64_t first_item, items;
  std::int64_t run;            // splits an item
  char* partials;              // one Partial a split and head where there are several items, else null
  std::int64_t unfinished;     // items that have not arrived

  std::int64_t first_split() const { return begin / kSplit; }
  std::int64_t splits() const { return end > begin ? (end - 1) / kSplit - first_split() + 1 : 0; }
};

// What is known of rows after some of the keys: reference, sum and weighted sum of values of each.
struct Partial {
  float* m;
  float* sum;
  float* o;

  static std::size_t bytes(std::int64_t rows, std::int64_t stride) {
    return sizeof(float) * ((rows * (2 + stride) + 15) / 16 * 16);
  }
  Partial(char* at, std::int64_t rows, std::int64_t stride)
      : m(reinterpret_cast<float*>(at) + rows * stride), sum(m + rows), o(reinterpret_cast<float*>(at)) {}

  void clear(std::int64_t rows, std::int64_t stride) const {
    for (std::int64_t i = 0; i < rows * stride; i += kLanes) store(o + i, f32x16{}, rows * stride - i);
    for (std::int64_t r = 0; r < rows; ++r) {
      m[r] = -__builtin_inff();
      sum[r] = 0.0f;
    }
  }

  // Takes in the keys after these.
  void fold(const Partial& next, std::int64_t rows, std::int64_t stride) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float together = next.m[r] > m[r] ? next.m[r] : m[r];
      const float here = m[r] == together ? 1.0f : power_of_two(m[r] - together);
      const float there = next.m[r] == together ? 1.0f : power_of_two(next.m[r] - together);
      m[r] = together;
      sum[r] = sum[r] * here + next.sum[r] * there;
      for (std::int64_t d = 0; d < stride; d += kLanes) {
        float* mine = o + r * stride + d;
        store(mine, load(mine) * here + load(next.o + r * stride + d) * there);
      }
    }
  }
};

// Hands out pieces of a thread's scratch memory.
class Arena {
 public:
  explicit Arena(char* at) : at_(at), start_(at) {}
  template <class T>
  T* take(std::size_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
  std::size_t used() const { return static_cast<std::size_t>(at_ - start_); }

 private:
  char *at_, *start_;
};

template <class Math>
class Worker {
 public:
  static constexpr int kBlock = Math::kBlock;

  // Memory for tiles of up to these heads, rows of each, and queries; with null, only counts `bytes`.
  Worker(const PagedAttention& p, std::int64_t heads, std::int64_t rows, std::int64_t queries, char* memory)
      : p_(p), arena_(memory) {
    const std::int64_t padded = Math::padded_rows(rows);
    stride_ = Math::padded_values(p.v.dim);
    const std::size_t block_bytes = Math::key_bytes(p.k.dim) + Math::value_bytes(p.v.dim);
    most_blocks_ = static_cast<int>(at_least(1, at_most(kSplit / kBlock, kPanelBytes / std::int64_t(block_bytes))));
    queries_ = arena_.take<char>(padded * Math::query_bytes(p.k.dim));
    state_ = arena_.take<char>(Partial::bytes(padded, stride_));
    folded_ = arena_.take<char>(heads * Partial::bytes(padded, stride_));
    sums_ = arena_.take<float>(padded * kLanes);
    products_ = arena_.take<float>(Math::kGroup * kBlock);
    group_ = arena_.take<char>(Math::group_bytes());
    spans_ = arena_.take<Span>(queries);
    upcoming_ = arena_.take<BlockRows<kBlock>>(1);
    blocks_ = arena_.take<Block>(most_blocks_);
    panel_ = arena_.take<char>(most_blocks_ * block_bytes);
  }

  std::size_t bytes() const { return arena_.used(); }

  // All splits of a tile.
  void run(const Tile& tile) {
    padded_ = Math::padded_rows(tile.rows);
    const Partial state(state_, padded_, stride_);
    for (std::int64_t s = 0; s < tile.splits(); ++s) {
      for (std::int64_t h = 0; h < tile.heads; ++h) {
        attend(tile, h, s, s == 0 ? folded(h) : state);
        if (s > 0) folded(h).fold(state, tile.rows, stride_);
      }
    }
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      if (tile.splits() == 0) folded(h).clear(padded_, stride_);
      finish(tile, h, folded(h));
    }
  }

  // Some splits of a tile; the last item that arrives folds all of them.
  void run(Tile& tile, std::int64_t item) {
    padded_ = Math::padded_rows(tile.rows);
    const auto partial = [&](std::int64_t s, std::int64_t h) {
      return Partial(tile.partials + (s * tile.heads + h) * Partial::bytes(padded_, stride_), padded_, stride_);
    };
    const std::int64_t last = at_most((item + 1) * tile.run, tile.splits());
    for (std::int64_t s = item * tile.run; s < last; ++s) {
      for (std::int64_t h = 0; h < tile.heads; ++h) attend(tile, h, s, partial(s, h));
    }
    if (__atomic_sub_fetch(&tile.unfinished, 1, __ATOMIC_ACQ_REL) != 0) return;
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      for (std::int64_t s = 1; s < tile.splits(); ++s) partial(0, h).fold(partial(s, h), tile.rows, stride_);
      finish(tile, h, partial(0, h));
    }
  }

  static std::size_t partial_bytes(const PagedAttention& p, std::int64_t rows) {
    return Partial::bytes(Math::padded_rows(rows), Math::padded_values(p.v.dim));
  }

 private:
  struct Block {
    std::int64_t start;
    int from, to;  // the keys of the tile within it
    BlockRows<kBlock> rows;
    const float* values[kBlock];
    std::uint64_t wild[kBlock / 64];  // keys with values that are not finite, which were packed as 0
    float positions[kBlock];
    const char *packed_keys, *packed_values;
  };

  Partial folded(std::int64_t head) const {
    return Partial(folded_ + head * Partial::bytes(padded_, stride_), padded_, stride_);
  }

  std::int64_t group_size() const { return p_.num_q_heads / p_.num_kv_heads; }

  void start(const Tile& tile) {
    upcoming_start_ = -1;
    const Sequence sequence(p_, tile.sequence);
    seen_by_all_begin_ = 0;
    seen_by_all_end_ = sequence.tree ? sequence.first : tile.end;
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      spans_[i] = sequence.span(tile.query + i);
      const Span& span = spans_[i];
      const std::int64_t begin = p_.left < 0 ? span.begin : at_least(span.begin, span.position - p_.left + 1);
      seen_by_all_begin_ = at_least(seen_by_all_begin_, begin);
      seen_by_all_end_ = at_most(seen_by_all_end_, span.end);
    }
    switch (p_.dtype) {
      case Dtype::f16: return pack_queries<Half>(tile, sequence);
      case Dtype::bf16: return pack_queries<Bfloat16>(tile, sequence);
      default: return pack_queries<float>(tile, sequence);
    }
  }

  template <class T>
  void pack_queries(const Tile& tile, const Sequence& sequence) {
    const std::int64_t heads = group_size();
    const std::size_t bytes = Math::query_bytes(p_.k.dim);
    char* packed = queries_;
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      const T* q = static_cast<const T*>(p_.q) + (sequence.row + tile.query + i) * p_.q_token_stride;
      for (std::int64_t h = head_ * heads; h < (head_ + 1) * heads; ++h, packed += bytes) {
        Math::pack_query(q + h * p_.q_head_stride, p_.k.dim, packed);
      }
    }
    __builtin_memset(packed, 0, (padded_ - tile.rows) * bytes);
  }

  // One head and split, both counted from the tile's first, into `state`.
  void attend(const Tile& tile, std::int64_t head, std::int64_t number, const Partial& state) {
    head_ = tile.head + head;
    const std::int64_t split = tile.first_split() + number;
    keys_end_ = at_most(tile.end, (split + 1) * kSplit);
    start(tile);
    state.clear(padded_, stride_);
    for (std::int64_t r = 0; r < tile.rows; ++r) store(sums_ + r * kLanes, f32x16{});
    const std::int64_t begin = at_least(tile.begin, split * kSplit), end = keys_end_;
    // Few rows use a block while it is in the first-level cache; many share what was packed.
    const std::int64_t at_once = kBlock * (tile.rows <= Math::kGroup ? 1 : most_blocks_);
    for (std::int64_t at = begin / kBlock * kBlock; at < end; at += at_once) {
      const int blocks = pack(tile, at, at_most(at + at_once, end));
      for (std::int64_t r = 0; r < tile.rows; r += Math::kGroup) {
        const int count = static_cast<int>(at_most(Math::kGroup, tile.rows - r));
        for (int b = 0; b < blocks; ++b) attend_block(tile, blocks_[b], r, count, state);
      }
    }
    for (std::int64_t r = 0; r < tile.rows; ++r) state.sum[r] = sum(load(sums_ + r * kLanes));
  }

  // Packs the blocks that hold the tile's keys from `at`, a block's start, to `end`; returns how many.
  int pack(const Tile& tile, std::int64_t at, std::int64_t end) {
    const Sequence sequence(p_, tile.sequence);
    const std::size_t key_bytes = Math::key_bytes(p_.k.dim), value_bytes = Math::value_bytes(p_.v.dim);
    int count = 0;
    char* panel = panel_;
    for (; at < end; at += kBlock, ++count) {
      Block& block = blocks_[count];
      block.start = at;
      const std::int64_t begin = at_least(at, tile.begin), stop = at_most(at + kBlock, end);
      block.from = static_cast<int>(begin - at);
      block.to = static_cast<int>(stop - at);
      block.packed_keys = panel;
      block.packed_values = panel + key_bytes;
      for (std::uint64_t& word : block.wild) word = 0;
      find_block(sequence, tile, at, block.rows);
      const bool check = begin < seen_by_all_begin_ || stop > seen_by_all_end_;
      with_page_type(p_.pages_dtype, [&](auto element) {
        using T = decltype(element);
        Math::template pack_keys<T>(block.rows, block.from, block.to, p_.k.dim, panel);
        Math::template pack_values<T>(block.rows, block.from, block.to, p_.v.dim, check, panel + key_bytes,
                                      block.values, block.wild);
      });
      if (p_.alibi_slopes) {
        for (int i = 0; i < kBlock; ++i) {
          const std::int64_t key = at + i, own = key - sequence.first;
          const bool node = sequence.tree && own >= 0 && key < sequence.length;
          block.positions[i] = static_cast<float>(node ? sequence.position(own) : key);
        }
      }
      panel += key_bytes + value_bytes;
    }
    return count;
  }

  // The rows of the tile's keys in the block that starts at `at`, and what is to be asked for meanwhile.
  void find_block(const Sequence& sequence, const Tile& tile, std::int64_t at, BlockRows<kBlock>& rows) {
    const auto find = [&](std::int64_t start, BlockRows<kBlock>& found) {
      const std::int64_t begin = at_least(start, tile.begin), end = at_most(start + kBlock, keys_end_);
      find_rows(p_, sequence.table, head_, start, begin, end, found);
    };
    if (upcoming_start_ == at) rows = *upcoming_;
    else find(at, rows);
    rows.next = nullptr;
    if (at + kBlock >= keys_end_) return;
    upcoming_start_ = at + kBlock;
    find(upcoming_start_, *upcoming_);
    rows.next = upcoming_;
  }

  // Rows [r, r + count) of a tile and one block.
  void attend_block(const Tile& tile, const Block& block, std::int64_t r, int count, const Partial& state) {
    const std::int64_t heads = group_size(), first = r / heads, last = (r + count - 1) / heads;
    bool any = false;
    for (std::int64_t i = first; i <= last; ++i) {
      any |= spans_[i].begin < block.start + block.to && spans_[i].end > block.start + block.from;
    }
    if (!any) return;
    const Sequence sequence(p_, tile.sequence);
    const char* q = queries_ + r * Math::query_bytes(p_.k.dim);
    Math::scores(q, count, block.packed_keys, block.from, block.to, p_.k.dim, products_);
    LogitRule rule{};
    rule.scale = p_.scale * head_factor(p_.k.scales, head_) * (p_.softcap == 0.0f ? kLog2e : 1.0f);
    rule.softcap = p_.softcap;
    rule.k_factor = has_slot_factors(p_.k.scales) ? block.rows.k_factor : nullptr;
    rule.v_factor = has_slot_factors(p_.v.scales) ? block.rows.v_factor : nullptr;
    rule.positions = p_.alibi_slopes ? block.positions : nullptr;
    float turns[Math::kGroup];
    std::uint64_t seen[Math::kGroup][kBlock / 64];
    for (int i = 0; i < count; ++i) {
      const std::int64_t query = (r + i) / heads, head = head_ * heads + (r + i) % heads;
      const Span& span = spans_[query];
      for (int w = 0; w < kBlock / 64; ++w) {
        if (i > 0 && query == (r + i - 1) / heads) seen[i][w] = seen[i - 1][w];
        else seen[i][w] = sequence.visible(tile.query + query, span, block.start + 64 * w);
      }
      if (p_.alibi_slopes) rule.slope = p_.alibi_slopes[head] * kLog2e;
      rule.position = static_cast<float>(span.position);
      const RowState row{state.m + r + i, sums_ + (r + i) * kLanes};
      turns[i] = softmax_block<kBlock, Math::kPrecision>(products_ + i * kBlock, seen[i], rule, Math::kSlack, row);
    }
    float* o = state.o + r * stride_;
    Math::weigh(products_, count, block.packed_values, block.values, block.from, block.to, p_.v.dim, turns, o, group_);
    for (int i = 0; i < count; ++i) add_wild(block, seen[i], i, o + i * stride_);
  }

  // What was packed as 0, for a row that does see it.
  void add_wild(const Block& block, const std::uint64_t (&seen)[kBlock / 64], int row, float* o) {
    for (int w = 0; w < kBlock / 64; ++w) {
      for (std::uint64_t left = block.wild[w] & seen[w]; left != 0; left &= left - 1) {
        const int key = 64 * w + __builtin_ctzll(left);
        const f32x16 weight = splat(Math::weight(products_, group_, row, key));
        with_page_type(p_.pages_dtype, [&](auto element) {
          const auto* v = elements<decltype(element)>(block.rows.v[key]);
          for (std::int64_t d = 0; d < p_.v.dim; d += kLanes) {
            const f32x16 value = load(v + d, p_.v.dim - d);
            const f32x16 wild = (bit_cast<u32x16>(value) & 0x7f800000u) == 0x7f800000u ? weight * value : f32x16{};
            Math::add_columns(o, d, wild);
          }
        });
      }
    }
  }

  void finish(const Tile& tile, std::int64_t head, const Partial& state) {
    head_ = tile.head + head;
    switch (p_.dtype) {
      case Dtype::f16: return finish_as<Half>(tile, state);
      case Dtype::bf16: return finish_as<Bfloat16>(tile, state);
      default: return finish_as<float>(tile, state);
    }
  }

  template <class T>
  void finish_as(const Tile& tile, const Partial& state) {
    const std::int64_t heads = group_size();
    const float v_factor = head_factor(p_.v.scales, head_);
    const std::int64_t token = p_.query_start[tile.sequence] + tile.query;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const std::int64_t head = head_ * heads + r % heads, t = token + r / heads;
      const float sink = p_.sinks ? p_.sinks[head] : -__builtin_inff();
      float m = state.m[r], total = state.sum[r], keep = 1.0f;
      float lse = sink;
      if (total != 0.0f) {
        if (sink > -__builtin_inff() || sink != sink) {
          const float top = sink * kLog2e > m ? sink * kLog2e : m;
          keep = power_of_two(m - top);
          total = total * keep + power_of_two(sink * kLog2e - top);
          m = top;
        }
        lse = m * kLn2 + __builtin_logf(total);
      }
      const float scale = total == 0.0f ? 0.0f : keep / total * v_factor;
      T* out = static_cast<T*>(p_.out) + t * p_.out_token_stride + head * p_.out_head_stride;
      for (std::int64_t d = 0; d < p_.v.dim; d += kLanes) {
        // Adding 0 leaves no negative zero, whose sign could tell of keys that were not seen.
        store(out + d, Math::columns(state.o + r * stride_, d) * scale + 0.0f, p_.v.dim - d);
      }
      if (p_.lse) p_.lse[t * p_.lse_token_stride + head] = lse;
    }
  }

  const PagedAttention& p_;
  Arena arena_;
  std::int64_t stride_;  // of a row of results
  int most_blocks_;
  char *queries_, *state_, *folded_, *group_, *panel_;
  float *sums_, *products_;
  Span* spans_;
  Block* blocks_;
  BlockRows<kBlock>* upcoming_;  // of the block that starts at upcoming_start_
  std::int64_t upcoming_start_ = -1;
  std::int64_t keys_end_ = 0;    // of what is being worked on
  std::int64_t head_ = 0;    // that is being worked on
  std::int64_t padded_ = 0;  // rows
  std::int64_t seen_by_all_begin_ = 0, seen_by_all_end_ = 0;
};

}  // namespace
}  // namespace tw::TW_ISA
