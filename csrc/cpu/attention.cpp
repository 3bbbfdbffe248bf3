// Attention of a ragged batch over paged keys: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023,
// arXiv:2307.08691) over blocks of keys, query heads of a key head and query tokens packed into the rows of one tile.
//
// Decode reads every visible key and value once: keys * (D + Dv) * element bytes a key head, against 2 * G * (D + Dv)
// flops for its G query heads: memory bounds it. Few rows therefore take keys as they lie in the pages, read all key
// heads of a chunk of keys before the next chunk, since pieces of 256 bytes come at half the speed of long runs, and ask
// for what comes next. For D = Dv = 128 in bf16 a key costs some 25 ns of arithmetic where memory takes 50.
//
// Prefill computes 2 * (D + Dv) flops a score: at 512 products a cycle and core on the tile units (D + Dv) / 512 cycles,
// half a cycle for D = Dv = 128, if tiles were loaded for nothing; with one load a product it is twice that. The softmax
// of a score takes some 12 instructions in vectors of sixteen, of which two issue in a cycle: 0.4 cycles. In float32, at
// 32 products a cycle, (D + Dv) / 32 bound it. results/ has what is reached.
//
// A unit of work is a tile (attention/tile.h), or one split of its keys where tiles alone would leave threads without
// work: long decode. Blocks and splits lie at fixed positions, and rows share no arithmetic, so a row's bits depend
// neither on the plan nor on the rows beside it.
#include "cpu/attention.h"

#include "cpu/attention/bfloat16.h"
#include "cpu/attention/bfloat16_vectors.h"
#include "cpu/attention/tile.h"
#include "cpu/runtime/aligned.h"
#include "cpu/runtime/thread_pool.h"

namespace tw::TW_ISA {
namespace {

constexpr std::int64_t kRowsOfTile = 256;      // that share packed keys
constexpr std::int64_t kWorkOfThread = 65536;  // products worth waking another thread for, a few microseconds

struct Plan {
  Tile* tiles;
  std::int64_t count, items, work;
  std::int64_t most_heads, most_rows, most_queries;
};

// Sixteen rows of values cost about as much as packing a key does.
std::int64_t work_of(const Tile& tile) { return (tile.end - tile.begin) * (tile.rows + 16) * tile.heads; }

std::int64_t queries_of_tile(const PagedAttention& p) {
  return at_least(1, kRowsOfTile / (p.num_q_heads / p.num_kv_heads));
}

std::int64_t count_tiles(const PagedAttention& p) {
  const std::int64_t together = queries_of_tile(p);
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < p.sequences; ++b) {
    count += (p.query_start[b + 1] - p.query_start[b] + together - 1) / together;
  }
  return count * p.num_kv_heads;
}

// Few rows that stand at one place leave nothing to share but the memory's pages: there a tile takes as many key heads as
// leave two splits or more for each thread. Memory that is read in short pieces comes at half the speed.
std::int64_t heads_of_tile(const PagedAttention& p, std::int64_t few_rows, int threads) {
  std::int64_t splits = 0;
  for (std::int64_t b = 0; b < p.sequences; ++b) {
    const std::int64_t queries = p.query_start[b + 1] - p.query_start[b];
    if (queries * (p.num_q_heads / p.num_kv_heads) <= few_rows) splits += (p.seq_lens[b] + kSplit - 1) / kSplit;
  }
  if (threads == 1 || splits == 0) return p.num_kv_heads;
  const std::int64_t parts = (2 * threads + splits - 1) / splits;
  return at_least(1, p.num_kv_heads / parts);
}

Plan cut(const PagedAttention& p, Tile* tiles, std::int64_t few_rows, int threads) {
  const std::int64_t together = queries_of_tile(p), heads = p.num_q_heads / p.num_kv_heads;
  const std::int64_t together_heads = heads_of_tile(p, few_rows, threads);
  Plan plan{tiles, 0, 0, 0, 1, 0, 0};
  for (std::int64_t b = 0; b < p.sequences; ++b) {
    const Sequence sequence(p, b);
    for (std::int64_t query = 0; query < sequence.queries; query += together) {
      Tile tile{};
      tile.sequence = b;
      tile.query = query;
      tile.queries = at_most(together, sequence.queries - query);
      tile.rows = tile.queries * heads;
      tile.begin = sequence.length;
      for (std::int64_t i = 0; i < tile.queries; ++i) {
        const Span span = sequence.span(query + i);
        if (span.begin >= span.end) continue;
        tile.begin = at_most(tile.begin, span.begin);
        tile.end = at_least(tile.end, span.end);
      }
      if (tile.end == 0) tile.begin = 0;
      plan.most_rows = at_least(plan.most_rows, tile.rows);
      plan.most_queries = at_least(plan.most_queries, tile.queries);
      const std::int64_t most = tile.rows <= few_rows ? together_heads : 1;
      plan.most_heads = at_least(plan.most_heads, most);
      for (tile.head = 0; tile.head < p.num_kv_heads; tile.head += tile.heads) {
        tile.heads = at_most(most, p.num_kv_heads - tile.head);
        plan.work += work_of(tile);
        plan.tiles[plan.count++] = tile;
      }
    }
  }
  return plan;
}

// Shares the splits of a tile out where it is more than a quarter of a thread's share, in runs of such a quarter, as
// memory likes runs. Returns the bytes of the partial results.
std::size_t split(Plan& plan, int threads, std::size_t (*partial_bytes)(const PagedAttention&, std::int64_t),
                  const PagedAttention& p) {
  std::size_t bytes = 0;
  for (std::int64_t t = 0; t < plan.count; ++t) {
    Tile& tile = plan.tiles[t];
    const bool apart = threads > 1 && tile.splits() > 1 && work_of(tile) * threads * 4 > plan.work;
    tile.first_item = plan.items;
    const std::int64_t share = plan.work / (threads * 4);
    const std::int64_t split_work = kSplit * work_of(tile) / (tile.end - tile.begin + 1);
    tile.run = apart ? at_least(1, share / (split_work + 1)) : tile.splits();
    tile.items = apart ? (tile.splits() + tile.run - 1) / tile.run : 1;
    tile.unfinished = tile.items;
    plan.items += tile.items;
    if (tile.items > 1) bytes += tile.splits() * tile.heads * partial_bytes(p, tile.rows);
  }
  return bytes;
}

Tile& tile_of(const Plan& plan, std::int64_t item) {
  std::int64_t low = 0, high = plan.count - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (plan.tiles[middle].first_item <= item) low = middle;
    else high = middle - 1;
  }
  return plan.tiles[low];
}

template <class Math>
void run(const PagedAttention& p) {
  const std::int64_t tiles = count_tiles(p);
  if (tiles == 0) return;
  Tile* memory_of_tiles = static_cast<Tile*>(thread_scratch(Scratch::operand, tiles * sizeof(Tile)));
  Plan plan = cut(p, memory_of_tiles, Math::kGroup, num_threads());
  const std::int64_t worth = at_least(1, plan.work * at_least(p.k.dim, p.v.dim) / kWorkOfThread);
  const int threads = static_cast<int>(at_most(num_threads(), worth));
  const std::size_t partials = split(plan, threads, Worker<Math>::partial_bytes, p);
  char* partial = partials == 0 ? nullptr : static_cast<char*>(thread_scratch(Scratch::partial, partials));
  for (std::int64_t t = 0; t < plan.count; ++t) {
    Tile& tile = plan.tiles[t];
    if (tile.items == 1) continue;
    tile.partials = partial;
    partial += tile.splits() * tile.heads * Worker<Math>::partial_bytes(p, tile.rows);
  }
  std::int64_t taken = 0;
  const std::size_t memory = Worker<Math>(p, plan.most_heads, plan.most_rows, plan.most_queries, nullptr).bytes();
  parallel_for(threads, 1, [&](std::int64_t, std::int64_t) {
    Worker<Math> worker(p, plan.most_heads, plan.most_rows, plan.most_queries,
                        static_cast<char*>(thread_scratch(Scratch::panel, memory)));
    Math::enter();
    for (;;) {
      // From the end: the last tiles of a prompt see the most keys.
      const std::int64_t item = plan.items - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
      if (item < 0) break;
      Tile& tile = tile_of(plan, item);
      if (tile.partials) worker.run(tile, item - tile.first_item);
      else worker.run(tile);
    }
    Math::leave();
  });
}

template <class T>
void clear_rows(const PagedAttention& p, std::int64_t from) {
  for (std::int64_t t = from; t < p.tokens; ++t) {
    for (std::int64_t h = 0; h < p.num_q_heads; ++h) {
      T* out = static_cast<T*>(p.out) + t * p.out_token_stride + h * p.out_head_stride;
      for (std::int64_t d = 0; d < p.v.dim; d += kLanes) store(out + d, f32x16{}, p.v.dim - d);
      if (p.lse) p.lse[t * p.lse_token_stride + h] = -__builtin_inff();
    }
  }
}

}  // namespace

void paged_attention(const PagedAttention& p) {
  const std::int64_t rest = p.sequences == 0 ? 0 : p.query_start[p.sequences];  // rows that belong to no sequence
  switch (p.dtype) {
    case Dtype::f16: clear_rows<Half>(p, rest); break;
    case Dtype::bf16: clear_rows<Bfloat16>(p, rest); break;
    default: clear_rows<float>(p, rest);
  }
#if defined(__AVX512BF16__) && defined(__x86_64__)
  if (p.dtype == Dtype::bf16 && p.pages_dtype != Dtype::f32 && p.pages_dtype != Dtype::f16) {
#if defined(__AMX_TILE__)
    return run<Bfloat16Tiles>(p);
#else
    return run<Bfloat16Vectors>(p);
#endif
  }
#endif
  run<Float32>(p);
}

}  // namespace tw::TW_ISA
