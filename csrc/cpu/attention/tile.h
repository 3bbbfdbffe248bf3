// A tile: some queries of one sequence with the query heads of one key head or several, over some splits of the keys.
// Where rows are few, a tile takes several heads, which take turns: their keys lie side by side in memory.
//
// Keys are cut at multiples of the math's block and of kSplit, counted from the sequence's first key. A split is worked
// on from a fresh state, and the splits' states are folded in order, so which thread takes which split does not show.
#pragma once

#include "cpu/attention/float32.h"
#include "cpu/attention/sight.h"
#include "cpu/attention/state.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kPanelBytes = 512 << 10;  // of packed keys and values at once, which the second-level cache holds

template <class Math>
class Worker {
 public:
  static constexpr int kBlock = Math::kBlock;

  // Memory for tiles of up to these heads, rows of each, and queries; with null, only counts `bytes`.
  Worker(const PagedAttention& p, std::int64_t heads, std::int64_t rows, std::int64_t queries, char* memory)
      : p_(p), arena_(memory) {
    const std::int64_t padded = Math::padded_rows(rows), group = at_most(padded, Math::kGroup);
    stride_ = Math::padded_values(p.v.dim);
    const std::size_t block_bytes = Math::key_bytes(p.k.dim) + Math::value_bytes(p.v.dim);
    most_blocks_ = static_cast<int>(at_least(1, at_most(kSplit / kBlock, kPanelBytes / std::int64_t(block_bytes))));
    queries_ = arena_.take<char>(heads * padded * Math::query_bytes(p.k.dim));
    if (Math::kPairsQueries) unpaired_ = arena_.take<char>(group * Math::query_bytes(p.k.dim));
    state_ = arena_.take<char>(heads * Partial::bytes(padded, stride_));
    folded_ = arena_.take<char>(heads * Partial::bytes(padded, stride_));
    sums_ = arena_.take<float>(heads * padded * kLanes);
    products_ = arena_.take<float>(heads * group * kBlock);
    weights_ = arena_.take<char>(heads * group * Math::weight_bytes());
    turns_ = arena_.take<float>(heads * group);
    spans_ = arena_.take<Span>(queries);
    blocks_ = arena_.take<Block>(at_least(2, most_blocks_));
    few_ = arena_.take<char>(Math::few_bytes(p.k.dim, p.v.dim));
    panel_ = arena_.take<char>(rows > Math::kGroup ? most_blocks_ * block_bytes : 0);
  }

  std::size_t bytes() const { return arena_.used(); }

  // All splits of a tile.
  void run(const Tile& tile) {
    start(tile);
    const auto partial = [&](char* at, std::int64_t h) {
      return Partial(at + h * Partial::bytes(padded_, stride_), padded_, stride_);
    };
    for (std::int64_t s = 0; s < tile.splits(); ++s) {
      attend(tile, s, [&](std::int64_t h) { return partial(s == 0 ? folded_ : state_, h); });
      for (std::int64_t h = 0; s > 0 && h < tile.heads; ++h) {
        partial(folded_, h).fold(partial(state_, h), tile.rows, stride_);
      }
    }
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      if (tile.splits() == 0) partial(folded_, h).clear(padded_, stride_);
      finish(tile, h, partial(folded_, h));
    }
  }

  // Some splits of a tile; the last item that arrives folds all of them.
  void run(Tile& tile, std::int64_t item) {
    start(tile);
    const auto partial = [&](std::int64_t s, std::int64_t h) {
      return Partial(tile.partials + (s * tile.heads + h) * Partial::bytes(padded_, stride_), padded_, stride_);
    };
    const std::int64_t last = at_most((item + 1) * tile.run, tile.splits());
    for (std::int64_t s = item * tile.run; s < last; ++s) {
      attend(tile, s, [&](std::int64_t h) { return partial(s, h); });
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
    bool check;    // some row may not see all of them: values that are not finite are set apart
    BlockRows<kBlock> rows;
    BlockFactors<kBlock> factors;
    const float* values[kBlock];
    std::uint64_t wild[kBlock / 64];  // keys with values that are not finite, which were packed as 0
    float positions[kBlock];
    const char *packed_keys, *packed_values;
  };
  using Seen = std::uint64_t[kBlock / 64];

  std::int64_t group_size() const { return p_.num_q_heads / p_.num_kv_heads; }
  bool few(const Tile& tile) const { return tile.rows <= Math::kGroup; }

  void start(const Tile& tile) {
    padded_ = Math::padded_rows(tile.rows);
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
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      switch (p_.dtype) {
        case Dtype::f16: pack_queries<Half>(tile, h, sequence); break;
        case Dtype::bf16: pack_queries<Bfloat16>(tile, h, sequence); break;
        default: pack_queries<float>(tile, h, sequence);
      }
    }
  }

  template <class T>
  void pack_queries(const Tile& tile, std::int64_t head, const Sequence& sequence) {
    const std::int64_t heads = group_size(), first = (tile.head + head) * heads;
    const std::size_t bytes = Math::query_bytes(p_.k.dim);
    char* const rows = queries_ + head * padded_ * bytes;
    char* const start = Math::kPairsQueries && few(tile) ? unpaired_ : rows;
    char* packed = start;
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      const T* q = static_cast<const T*>(p_.q) + (sequence.row + tile.query + i) * p_.q_token_stride;
      for (std::int64_t h = first; h < first + heads; ++h, packed += bytes) {
        Math::pack_query(q + h * p_.q_head_stride, p_.k.dim, packed);
      }
    }
    __builtin_memset(packed, 0, (padded_ - tile.rows) * bytes);
    if constexpr (Math::kPairsQueries) {
      if (few(tile)) Math::pair_queries(start, padded_, p_.k.dim, rows);
    }
  }

  // One split, counted from the tile's first, of all its heads, into the states that `state` gives.
  template <class State>
  void attend(const Tile& tile, std::int64_t number, State state) {
    const std::int64_t split = tile.first_split() + number;
    const std::int64_t begin = at_least(tile.begin, split * kSplit), end = at_most(tile.end, (split + 1) * kSplit);
    for (std::int64_t h = 0; h < tile.heads; ++h) state(h).clear(padded_, stride_);
    for (std::int64_t r = 0; r < tile.heads * padded_; ++r) store(sums_ + r * kLanes, f32x16{});
    if (few(tile)) attend_few(tile, begin, end, state);
    else attend_many(tile, begin, end, state(0));
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      for (std::int64_t r = 0; r < tile.rows; ++r) state(h).sum[r] = sum(load(sums_ + (h * padded_ + r) * kLanes));
    }
  }

  // Heads take turns chunk by chunk, so that memory is read in long runs.
  template <class State>
  void attend_few(const Tile& tile, std::int64_t begin, std::int64_t end, State state) {
    Block *block = blocks_, *next = blocks_ + 1;
    find_block(tile, begin / kBlock * kBlock, begin, end, *block);
    for (std::int64_t at = block->start; at < end; at += kBlock) {
      const bool more = at + kBlock < end;
      if (more) find_block(tile, at + kBlock, begin, end, *next);
      attend_few_block(tile, *block, more ? next : nullptr, state);
      Block* const done = block;
      block = next;
      next = done;
    }
  }

  template <class State>
  void attend_few_block(const Tile& tile, Block& block, const Block* after, State state) {
    const int count = static_cast<int>(tile.rows), first = block.from / Math::kChunk * Math::kChunk;
    const std::int64_t asks = Math::score_asks(p_.k.dim), value_asks = Math::value_asks(p_.v.dim);
    const Upcoming values = run_of(tile, block.rows.v + first, p_.v, asks);
    each_chunk(tile, block, block.rows.k, p_.k, asks, values, [&](auto element, const Turn& turn, Upcoming& next) {
      Math::template few_scores<decltype(element)>(queries_ + turn.head * padded_ * Math::query_bytes(p_.k.dim), count,
                                                   turn.rows, p_.page_size % kLanes == 0, turn.from, turn.to, p_.k.dim,
                                                   products(turn.head) + turn.chunk, few_, next);
    });
    Seen seen[Math::kGroup];
    see(tile, block, 0, count, seen);
    for (std::int64_t h = 0; h < tile.heads; ++h) {
      find_factors_of(tile, h, block);
      soften(tile, h, block, 0, count, seen, state(h));
    }
    const Upcoming keys = after ? run_of(tile, after->rows.k, p_.k, value_asks) : Upcoming();
    each_chunk(tile, block, block.rows.v, p_.v, value_asks, keys, [&](auto element, const Turn& turn, Upcoming& next) {
      const std::int64_t h = turn.head;
      std::uint64_t& wild = block.wild[turn.chunk / 64];
      wild = 0;
      Math::template few_values<decltype(element)>(products(h) + turn.chunk, weights(h, 0, turn.chunk), count, turn.rows,
                                                   turn.from, turn.to, p_.v.dim, block.check,
                                                   turn.chunk == first ? turns_of(h) : nullptr, state(h).o, few_, &wild,
                                                   next);
      if (wild != 0) add_wild(block, h, 0, count, turn.chunk / 64, seen, state(h).o);
    });
  }

  // A head's turn with a chunk of a block: where the chunk starts in it, its keys [from, to) of the tile, and its rows.
  struct Turn {
    std::int64_t head;
    int chunk, from, to;
    const char* rows[Math::kChunk];
  };

  // Calls f(element of the pages, turn, what is read next) chunk by chunk for each head. `rows` are the block's for the
  // tile's first head, `asks` how often f asks, `after` what is read behind the last chunk.
  template <class F>
  void each_chunk(const Tile& tile, const Block& block, const char* const* rows, const Pages& pages, std::int64_t asks,
                  const Upcoming& after, F f) {
    const std::int64_t bytes = head_bytes(p_, pages);
    with_page_type(p_.pages_dtype, [&](auto element) {
      Turn turn;
      for (turn.chunk = block.from / Math::kChunk * Math::kChunk; turn.chunk < block.to; turn.chunk += Math::kChunk) {
        turn.from = block.from > turn.chunk ? block.from - turn.chunk : 0;
        turn.to = block.to - turn.chunk < Math::kChunk ? block.to - turn.chunk : Math::kChunk;
        const int other = turn.chunk + Math::kChunk;
        Upcoming next = other < block.to ? run_of(tile, rows + other, pages, asks) : after;
        for (turn.head = 0; turn.head < tile.heads; ++turn.head) {
          for (int i = 0; i < Math::kChunk; ++i) turn.rows[i] = rows[turn.chunk + i] + turn.head * bytes;
          f(element, turn, next);
        }
      }
    });
  }

  // The rows of a chunk for all heads of a tile, where those lie side by side.
  Upcoming run_of(const Tile& tile, const char* const* rows, const Pages& pages, std::int64_t asks) const {
    if (tile.heads > 1 && pages.head_stride != pages.dim) return {};
    return {rows, Math::kChunk, tile.heads * pages.dim * element_bytes(p_.pages_dtype), asks * tile.heads};
  }

  // Many rows share what was packed.
  void attend_many(const Tile& tile, std::int64_t begin, std::int64_t end, const Partial& state) {
    for (std::int64_t at = begin / kBlock * kBlock; at < end; at += kBlock * most_blocks_) {
      const int blocks = pack(tile, at, begin, at_most(at + kBlock * most_blocks_, end));
      for (std::int64_t r = 0; r < tile.rows; r += Math::kGroup) {
        const int count = static_cast<int>(at_most(Math::kGroup, tile.rows - r));
        for (int b = 0; b < blocks; ++b) attend_block(tile, blocks_[b], r, count, state);
      }
    }
  }

  // Packs the blocks from `at`, a block's start, with the keys [begin, end); returns how many.
  int pack(const Tile& tile, std::int64_t at, std::int64_t begin, std::int64_t end) {
    const std::size_t key_bytes = Math::key_bytes(p_.k.dim), value_bytes = Math::value_bytes(p_.v.dim);
    int count = 0;
    for (char* panel = panel_; at < end; at += kBlock, ++count, panel += key_bytes + value_bytes) {
      Block& block = blocks_[count];
      find_block(tile, at, begin, end, block);
      find_factors_of(tile, 0, block);
      block.packed_keys = panel;
      block.packed_values = panel + key_bytes;
      for (std::uint64_t& word : block.wild) word = 0;
      with_page_type(p_.pages_dtype, [&](auto element) {
        using T = decltype(element);
        Upcoming none;
        Math::template pack_keys<T>(block.rows.k, block.from, block.to, p_.k.dim, panel, none);
        Math::template pack_values<T>(block.rows.v, block.from, block.to, p_.v.dim, block.check, panel + key_bytes,
                                      block.values, block.wild, none);
      });
    }
    return count;
  }

  // The block that starts at `at`, of the keys [begin, end).
  void find_block(const Tile& tile, std::int64_t at, std::int64_t begin, std::int64_t end, Block& block) {
    const Sequence sequence(p_, tile.sequence);
    begin = at_least(at, begin);
    end = at_most(at + kBlock, end);
    block.start = at;
    block.from = static_cast<int>(begin - at);
    block.to = static_cast<int>(end - at);
    block.check = begin < seen_by_all_begin_ || end > seen_by_all_end_;
    find_rows(p_, sequence.table, tile.head, at, begin, end, block.rows);
    for (int i = 0; p_.alibi_slopes && i < kBlock; ++i) {
      const std::int64_t key = at + i, own = key - sequence.first;
      const bool node = sequence.tree && own >= 0 && key < sequence.length;
      block.positions[i] = static_cast<float>(node ? sequence.position(own) : key);
    }
  }

  void find_factors_of(const Tile& tile, std::int64_t head, Block& block) {
    const std::int32_t* table = Sequence(p_, tile.sequence).table;
    find_factors(p_, table, tile.head + head, block.start, block.start + block.from, block.start + block.to,
                 block.factors);
  }

  // Rows [r, r + count) of a tile and one block.
  void attend_block(const Tile& tile, const Block& block, std::int64_t r, int count, const Partial& state) {
    const std::int64_t heads = group_size(), first = r / heads, last = (r + count - 1) / heads;
    bool any = false;
    for (std::int64_t i = first; i <= last; ++i) {
      any |= spans_[i].begin < block.start + block.to && spans_[i].end > block.start + block.from;
    }
    if (!any) return;
    Math::scores(queries_ + r * Math::query_bytes(p_.k.dim), count, block.packed_keys, block.from, block.to, p_.k.dim,
                 products_);
    Seen seen[Math::kGroup];
    see(tile, block, r, count, seen);
    soften(tile, 0, block, r, count, seen, state);
    float* o = state.o + r * stride_;
    Math::weigh(products_, weights_, count, block.packed_values, block.values, block.from, block.to, p_.v.dim, turns_,
                o);
    for (int w = 0; w < kBlock / 64; ++w) {
      if (block.wild[w] != 0) add_wild(block, 0, r, count, w, seen, state.o);
    }
  }

  // The keys of a block that rows [r, r + count) of a tile see.
  void see(const Tile& tile, const Block& block, std::int64_t r, int count, Seen* seen) const {
    const Sequence sequence(p_, tile.sequence);
    const std::int64_t heads = group_size();
    for (int i = 0; i < count; ++i) {
      const std::int64_t query = (r + i) / heads;
      for (int w = 0; w < kBlock / 64; ++w) {
        if (i > 0 && query == (r + i - 1) / heads) seen[i][w] = seen[i - 1][w];
        else seen[i][w] = sequence.visible(tile.query + query, spans_[query], block.start + 64 * w);
      }
    }
  }

  // Products into weights, for rows [r, r + count) of a head and one block.
  void soften(const Tile& tile, std::int64_t head, const Block& block, std::int64_t r, int count, const Seen* seen,
              const Partial& state) {
    const std::int64_t heads = group_size(), kv_head = tile.head + head;
    LogitRule rule{};
    rule.scale = p_.scale * head_factor(p_.k.scales, kv_head) * (p_.softcap == 0.0f ? kLog2e : 1.0f);
    rule.softcap = p_.softcap;
    rule.k_factor = has_slot_factors(p_.k.scales) ? block.factors.k : nullptr;
    rule.v_factor = has_slot_factors(p_.v.scales) ? block.factors.v : nullptr;
    rule.positions = p_.alibi_slopes ? block.positions : nullptr;
    for (int i = 0; i < count; ++i) {
      if (p_.alibi_slopes) rule.slope = p_.alibi_slopes[kv_head * heads + (r + i) % heads] * kLog2e;
      rule.position = static_cast<float>(spans_[(r + i) / heads].position);
      const RowState row{state.m + r + i, sums_ + (head * padded_ + r + i) * kLanes};
      turns_of(head)[i] = Math::softmax(products(head) + i * kBlock, seen[i], rule, row, weights(head, i, 0));
    }
  }

  // What was packed as 0 among 64 keys, for the rows that do see it.
  void add_wild(const Block& block, std::int64_t head, std::int64_t r, int count, int w, const Seen* seen, float* o) {
    for (int i = 0; i < count; ++i) {
      for (std::uint64_t left = block.wild[w] & seen[i][w]; left != 0; left &= left - 1) {
        const int key = 64 * w + __builtin_ctzll(left);
        const f32x16 weight = splat(Math::weight(products(head) + i * kBlock, weights(head, i, 0), key));
        with_page_type(p_.pages_dtype, [&](auto element) {
          const auto* v = elements<decltype(element)>(block.rows.v[key] + head * head_bytes(p_, p_.v));
          for (std::int64_t d = 0; d < p_.v.dim; d += kLanes) {
            const f32x16 value = load(v + d, p_.v.dim - d);
            const f32x16 wild = (bit_cast<u32x16>(value) & 0x7f800000u) == 0x7f800000u ? weight * value : f32x16{};
            Math::add_columns(o + (r + i) * stride_, d, wild);
          }
        });
      }
    }
  }

  void finish(const Tile& tile, std::int64_t head, const Partial& state) {
    switch (p_.dtype) {
      case Dtype::f16: return finish_as<Half>(tile, tile.head + head, state);
      case Dtype::bf16: return finish_as<Bfloat16>(tile, tile.head + head, state);
      default: return finish_as<float>(tile, tile.head + head, state);
    }
  }

  template <class T>
  void finish_as(const Tile& tile, std::int64_t kv_head, const Partial& state) {
    const std::int64_t heads = group_size();
    const float v_factor = head_factor(p_.v.scales, kv_head);
    const std::int64_t token = p_.query_start[tile.sequence] + tile.query;
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const std::int64_t head = kv_head * heads + r % heads, t = token + r / heads;
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

  float* products(std::int64_t head) const { return products_ + head * at_most(padded_, Math::kGroup) * kBlock; }
  float* turns_of(std::int64_t head) const { return turns_ + head * at_most(padded_, Math::kGroup); }
  void* weights(std::int64_t head, std::int64_t row, int key) const {
    const std::int64_t bytes = Math::weight_bytes();
    return weights_ + (head * at_most(padded_, Math::kGroup) + row) * bytes + key * bytes / kBlock;
  }

  const PagedAttention& p_;
  Arena arena_;
  std::int64_t stride_;      // of a row of results
  std::int64_t padded_ = 0;  // rows
  std::int64_t seen_by_all_begin_ = 0, seen_by_all_end_ = 0;
  int most_blocks_;
  // Of each head: queries, the states of a split and of all before it, sixteen sums a row, and for the rows that are
  // worked on together products, weights and turns.
  char *queries_, *state_, *folded_, *weights_;
  float *sums_, *products_, *turns_;
  char* unpaired_ = nullptr;
  char *few_, *panel_;
  Span* spans_;
  Block* blocks_;
};

}  // namespace
}  // namespace tw::TW_ISA
