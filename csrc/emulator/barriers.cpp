// Barriers of a block, collectives of a warp, the barrier of a grid: who waits, who is woken, whose memory is ordered.
#include <string>

#include "emulator/runtime.h"

namespace tw::emu {

void finish_barrier(Block& block, Barrier& barrier) {
  block.spins = 0;
  for (unsigned warp = 0; warp * kWarpSize < block.count; ++warp) {
    for (std::uint32_t lanes = barrier.waiting[warp]; lanes != 0; lanes &= lanes - 1) {
      Thread& waiter = block.threads[warp * kWarpSize + static_cast<unsigned>(__builtin_ctz(lanes))];
      waiter.wait = Wait::kNone;
      waiter.result = barrier.count;
#ifdef TW_EMULATOR_CHECKED
      barrier.join.acquire(waiter.clock);
#endif
      block.make_runnable(waiter);
    }
    barrier.waiting[warp] = 0;
  }
#ifdef TW_EMULATOR_CHECKED
  barrier.join.reset();
#endif
  barrier.arrived = 0;
  barrier.expected = 0;
  barrier.count = 0;
  barrier.first_thread = -1;
}

namespace {

// Counts the running thread in. True when it completes the barrier.
bool arrive(Thread& thread, unsigned id, unsigned threads, bool predicate, Site site) {
  Block& block = *thread.block;
  if (id >= kNamedBarriers) {
    fail("bad_barrier", "barrier number " + std::to_string(id) + ", should be 0 to 15", resolve_site(site));
  }
  if (threads % kWarpSize != 0 || threads > ((block.count + 31) / 32) * 32) {
    fail("bad_barrier",
         "barrier " + std::to_string(id) + " for " + std::to_string(threads) +
             " threads, should be a multiple of 32 and no more than the block has (" + std::to_string(block.count) + ")",
         resolve_site(site));
  }
  Barrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.first = site;
    barrier.first_thread = static_cast<int>(thread.linear);
  } else if (barrier.expected != threads) {
    fail("divergent_barrier",
         "barrier " + std::to_string(id) + " is waited for by " + std::to_string(threads) + " threads here and by " +
             std::to_string(barrier.expected) + " there (0 stands for all)",
         resolve_site(site), barrier.first_thread, resolve_site(barrier.first));
  }
#ifdef TW_EMULATOR_CHECKED
  else if (threads == 0 && id == 0 && (barrier.first.line != site.line || barrier.first.file != site.file)) {
    fail("divergent_barrier", "threads of one block wait in different __syncthreads()", resolve_site(site),
         barrier.first_thread, resolve_site(barrier.first));
  }
  barrier.join.release(thread.clock, thread.linear, block.count);
#endif
  ++barrier.arrived;
  barrier.count += predicate ? 1 : 0;
#ifdef TW_EMULATOR_CHECKED
  const std::uint32_t all = block.count;
#else
  const std::uint32_t all = block.live;
#endif
  return barrier.arrived == (barrier.expected != 0 ? barrier.expected : all);
}

}  // namespace

Thread& lane_thread(unsigned lane) { return here->block->threads[here->warp * kWarpSize + lane]; }

int barrier_sync(unsigned id, unsigned threads, bool predicate, const char* what, Site site) {
  Thread& thread = *here;
  Block& block = *thread.block;
  const bool last = arrive(thread, id, threads, predicate, site);
  Barrier& barrier = block.barriers[id];
  if (last) {
    const int count = barrier.count;
#ifdef TW_EMULATOR_CHECKED
    barrier.join.acquire(thread.clock);
#endif
    finish_barrier(block, barrier);
    maybe_yield(thread);
    return count;
  }
  barrier.waiting[thread.warp] |= 1u << thread.lane;
  thread.wait = Wait::kBarrier;
  thread.what = what;
  thread.site = site;
  thread.mask = id;
  suspend(thread);
  return thread.result;
}

void barrier_arrive(unsigned id, unsigned threads, Site site) {
  Thread& thread = *here;
  if (arrive(thread, id, threads, false, site)) finish_barrier(*thread.block, thread.block->barriers[id]);
  maybe_yield(thread);
}

void warp_sync(std::uint32_t mask, WarpFunction function, void* args, [[maybe_unused]] bool orders_memory,
               const char* what, Site site) {
  Thread& thread = *here;
  Block& block = *thread.block;
  const std::uint32_t present =
      block.count - thread.warp * kWarpSize >= 32 ? ~0u : (1u << (block.count - thread.warp * kWarpSize)) - 1;
  mask &= present;  // a partial last warp: lanes that do not exist are not waited for
  if ((mask >> thread.lane & 1u) == 0) {
    fail("bad_mask", std::string(what) + " by lane " + std::to_string(thread.lane) + ", which its own mask leaves out",
         resolve_site(site));
  }
  thread.wait = Wait::kWarp;
  thread.what = what;
  thread.site = site;
  thread.mask = mask;
  thread.function = function;
  thread.args = args;
  Thread* lanes = &block.threads[thread.warp * kWarpSize];
  // From the highest lane down: in order, it is the last to come, and one look is enough until then.
  for (std::uint32_t rest = mask; rest != 0;) {
    const int lane = 31 - __builtin_clz(rest);
    rest &= ~(1u << lane);
    const Thread& other = lanes[lane];
    if (other.wait != Wait::kWarp || other.mask != mask || other.function != function) {
      suspend(thread);
      return;
    }
  }
  void* collected[kWarpSize] = {};
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    collected[lane] = lanes[lane].args;
  }
  block.spins = 0;
#ifdef TW_EMULATOR_CHECKED
  if (orders_memory) {
    ClockJoin join;
    for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      Thread& lane = lanes[__builtin_ctz(rest)];
      join.release(lane.clock, lane.linear, block.count);
    }
    for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) join.acquire(lanes[__builtin_ctz(rest)].clock);
    join.reset();
  }
#endif
  if (function != nullptr) function(collected, mask);
  for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    Thread& lane = lanes[__builtin_ctz(rest)];
    lane.wait = Wait::kNone;
    if (&lane != &thread) block.make_runnable(lane);
  }
  maybe_yield(thread);
}

void grid_sync(Site site) {
  Thread& thread = *here;
  Worker& worker = *thread.block->worker;
  if (!thread.block->launch->geometry.cooperative) {
    fail("bad_barrier", "grid.sync() in a launch that is not cooperative", resolve_site(site));
  }
  std::uint32_t everyone = 0;
  for (std::size_t i = 0; i < worker.group_size; ++i) everyone += worker.group[i]->count;
#ifdef TW_EMULATOR_CHECKED
  // Inside a block a grid barrier orders memory as __syncthreads does. Barrier 15's clock is borrowed for it.
  thread.block->barriers[kNamedBarriers - 1].join.release(thread.clock, thread.linear, thread.block->count);
#endif
  thread.wait = Wait::kGrid;
  thread.what = "grid.sync()";
  thread.site = site;
  if (++worker.grid_arrived != everyone) {
    suspend(thread);
    return;
  }
  worker.grid_arrived = 0;
  for (std::size_t i = 0; i < worker.group_size; ++i) {
    Block& block = *worker.group[i];
    block.spins = 0;
    for (std::uint32_t t = 0; t < block.count; ++t) {
      Thread& waiter = block.threads[t];
      waiter.wait = Wait::kNone;
#ifdef TW_EMULATOR_CHECKED
      block.barriers[kNamedBarriers - 1].join.acquire(waiter.clock);
#endif
      if (&waiter != &thread) block.make_runnable(waiter);
    }
#ifdef TW_EMULATOR_CHECKED
    block.barriers[kNamedBarriers - 1].join.reset();
#endif
  }
  maybe_yield(thread);
}

void poll(const char* what, Site site) {
  Thread& thread = *here;
  Block& block = *thread.block;
  if (++block.spins > block.launch->settings.poll_limit) {
    fail("infinite_spin",
         std::string(what) + " was polled " + std::to_string(block.spins) + " times while no thread of the block made progress",
         resolve_site(site));
  }
  yield_fairly(thread);
}

}  // namespace tw::emu
