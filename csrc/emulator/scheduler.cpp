// Which fiber runs next, and what happens when none can.
#include <sched.h>

#include <map>
#include <sstream>
#include <string>

#include "emulator/runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace tw::emu {

__thread Thread* here __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

// AddressSanitizer has to know which stack is in use. A worker's own stack is learnt on the first switch away from it.
#if defined(__SANITIZE_ADDRESS__)
thread_local const void* worker_bottom = nullptr;
thread_local std::size_t worker_size = 0;

void announce(void** fake, const Stack* to) {
  if (to != nullptr) {
    __sanitizer_start_switch_fiber(fake, to->bottom, to->size);
  } else {
    __sanitizer_start_switch_fiber(fake, worker_bottom, worker_size);
  }
}
void arrived(void* fake, bool from_worker = false) {
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(fake, &bottom, &size);
  if (from_worker && worker_bottom == nullptr) {
    worker_bottom = bottom;
    worker_size = size;
  }
}
#else
void announce(void**, const Stack*) {}
void arrived(void*, bool = false) {}
#endif

std::uint64_t next_random(Block& block) {
  // xorshift64*: seeded per block, so that the order does not depend on which worker runs it.
  block.random ^= block.random >> 12;
  block.random ^= block.random << 25;
  block.random ^= block.random >> 27;
  return block.random * 0x2545F4914F6CDD1Dull;
}

// The lowest set bit at or above `from`, going round.
unsigned next_bit(std::uint32_t bits, unsigned from) {
  const std::uint32_t above = from < 32 ? bits & (~0u << from) : 0;
  return static_cast<unsigned>(__builtin_ctz(above != 0 ? above : bits));
}

Thread* take(Block& block, unsigned warp, unsigned lane) {
  block.runnable[warp] &= ~(1u << lane);
  if (block.runnable[warp] == 0) block.runnable_warps &= ~(1u << warp);
  return &block.threads[warp * kWarpSize + lane];
}

// In order: the warp's next lane, then the next warp, so that a warp stays together and few stacks are in use at once.
Thread* pick(Block& block, unsigned warp, unsigned lane) {
  if (block.runnable_warps == 0) return nullptr;
  if (block.launch->settings.random_order) {
    const std::uint64_t random = next_random(block);
    warp = next_bit(block.runnable_warps, random & 31);
    return take(block, warp, next_bit(block.runnable[warp], (random >> 8) & 31));
  }
  if (block.runnable[warp] != 0) return take(block, warp, next_bit(block.runnable[warp], lane + 1));
  warp = next_bit(block.runnable_warps, warp + 1);
  return take(block, warp, next_bit(block.runnable[warp], 0));
}

// For a thread that polls: everybody else gets a turn first, other resident blocks now and then.
Thread* pick_fairly(Worker& worker, Block& block, const Thread& thread) {
  if (block.launch->settings.random_order && worker.group_size == 1) return pick(block, 0, 0);
  if (worker.group_size > 1 && block.spins % 64 == 0) {
    for (std::size_t i = 1; i < worker.group_size; ++i) {
      const std::size_t at = (worker.group_current + i) % worker.group_size;
      if (Thread* next = pick(*worker.group[at], 0, 31)) {
        worker.group_current = at;
        return next;
      }
    }
  }
  const std::uint32_t above = thread.lane < 31 ? block.runnable[thread.warp] & (~0u << (thread.lane + 1)) : 0;
  if (above != 0) return take(block, thread.warp, next_bit(above, 0));
  const unsigned warp = next_bit(block.runnable_warps, thread.warp + 1);
  return take(block, warp, next_bit(block.runnable[warp], 0));
}

Thread* pick_in_group(Worker& worker, Block& block, unsigned warp, unsigned lane) {
  if (Thread* next = pick(block, warp, lane)) return next;
  for (std::size_t i = 1; i < worker.group_size; ++i) {
    const std::size_t at = (worker.group_current + i) % worker.group_size;
    if (Thread* next = pick(*worker.group[at], 0, 31)) {
      worker.group_current = at;
      return next;
    }
  }
  return nullptr;
}

void finish_barrier(Block& block, Barrier& barrier);
[[noreturn]] void report_stuck(Worker& worker);

[[noreturn]] void end_group(Worker& worker, void** fake) {
  announce(fake, nullptr);
  here = nullptr;
  void* dropped = nullptr;
  tw_fiber_switch(&dropped, worker.sp);
  __builtin_unreachable();
}

[[gnu::noinline]] void thread_exits(Thread& thread) {
  Block& block = *thread.block;
  thread.state = State::kExited;
  block.spins = 0;
  --block.live;
#ifndef TW_EMULATOR_CHECKED
  // The hardware counts exited threads out of __syncthreads; the checked build reports them instead.
  Barrier& barrier = block.barriers[0];
  if (barrier.arrived != 0 && barrier.expected == 0 && barrier.arrived == block.live) finish_barrier(block, barrier);
#endif
}

void fiber_main() {
  arrived(nullptr, true);
  for (;;) {
    Thread& thread = *here;
    Block& block = *thread.block;
    Worker& worker = *block.worker;
    const cuda::Kernel& kernel = *block.launch->kernel;
    kernel.invoke(kernel.function, block.launch->params);
    thread_exits(thread);
    worker.heartbeat.store(worker.heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    Thread* next = pick_in_group(worker, block, thread.warp, thread.lane);
    Stack* stack = thread.stack;
    thread.stack = nullptr;
    if (next != nullptr && next->state == State::kUnstarted) {
      next->state = State::kStarted;
      next->stack = stack;
      here = next;
      continue;  // the same stack runs the next thread: a kernel without barriers never switches
    }
    if (next == nullptr) {
#ifdef TW_EMULATOR_CHECKED
      for (std::size_t i = 0; i < worker.group_size; ++i) {
        Block& ended = *worker.group[i];
        if (ended.live != 0 || !ended.shadow.uninitialized) continue;
        thread.stack = stack;
        here = &ended.threads[0];
        report_uninitialized(*ended.shadow.uninitialized);
      }
#endif
      for (std::size_t i = 0; i < worker.group_size; ++i) {
        if (worker.group[i]->live == 0) continue;
        thread.stack = stack;
        report_stuck(worker);
      }
      worker.stacks.give_back(stack);
      end_group(worker, nullptr);
    }
    worker.stacks.give_back(stack);
    here = next;
    announce(nullptr, next->stack);
    void* dropped = nullptr;
    tw_fiber_switch(&dropped, next->sp);
  }
}

void jump(Thread& from, Thread* next) {
  if (next == &from) return;
  Worker& worker = *from.block->worker;
  worker.heartbeat.store(worker.heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (next->state == State::kUnstarted) {
    next->state = State::kStarted;
    next->stack = worker.stacks.take();
    next->sp = fiber_prepare(next->stack->top, fiber_main);
  }
  here = next;
  void* fake = nullptr;
  announce(&fake, next->stack);
  tw_fiber_switch(&from.sp, next->sp);
  arrived(fake);
}

void suspend(Thread& thread) {
  Worker& worker = *thread.block->worker;
  Thread* next = pick_in_group(worker, *thread.block, thread.warp, thread.lane);
  if (next == nullptr) report_stuck(worker);
  jump(thread, next);
}

// A scheduling point at which the thread could go on: only a random order makes use of it.
void maybe_yield(Thread& thread) {
  Block& block = *thread.block;
  if (!block.launch->settings.random_order) return;
  block.make_runnable(thread);
  jump(thread, pick(block, thread.warp, thread.lane));
}

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

std::string describe_wait(const Thread& thread) {
  std::ostringstream text;
  if (thread.state == State::kExited) return "have returned from the kernel";
  if (thread.state == State::kUnstarted || thread.wait == Wait::kNone) return "could run";
  text << "wait in " << thread.what << " at " << resolve_site(thread.site);
  if (thread.wait == Wait::kWarp) text << " for the lanes of mask 0x" << std::hex << thread.mask;
  return text.str();
}

std::string ranges(const std::vector<std::uint32_t>& threads) {
  std::string text;
  for (std::size_t i = 0; i < threads.size();) {
    std::size_t j = i;
    while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) ++j;
    text += (text.empty() ? "" : ",") + std::to_string(threads[i]);
    if (j > i) text += "-" + std::to_string(threads[j]);
    i = j + 1;
  }
  return text;
}

// Nobody in the group can run: say who waits where, and call it by the most telling name.
[[noreturn]] void report_stuck(Worker& worker) {
  const char* kind = "deadlock";
  Block* stuck = nullptr;
  for (std::size_t i = 0; i < worker.group_size && stuck == nullptr; ++i) {
    if (worker.group[i]->live != 0) stuck = worker.group[i].get();
  }
  Thread* waiting = nullptr;
  for (Thread& thread : stuck->threads) {
    if (thread.linear >= stuck->count || thread.state == State::kExited) continue;
    const bool block_wide = thread.wait == Wait::kBarrier && stuck->barriers[thread.mask].expected == 0;
    if (block_wide || waiting == nullptr) waiting = &thread;
    if (block_wide) {
      kind = "divergent_barrier";
      break;
    }
    if (thread.wait == Wait::kWarp) kind = "divergent_warp";
  }
  std::map<std::string, std::vector<std::uint32_t>> groups;
  std::map<std::string, std::string> described;  // place lookups are cached by the wait's own key
  int other = -1;
  std::string other_place;
  for (const Thread& thread : stuck->threads) {
    if (thread.linear >= stuck->count) continue;
    const std::string key = std::to_string(static_cast<int>(thread.state)) + "/" + std::to_string(thread.site.line) + "/" +
                            (thread.site.file ? thread.site.file : "") + "/" + std::to_string(thread.mask);
    auto found = described.find(thread.state == State::kExited ? "exited" : key);
    if (found == described.end()) {
      found = described.emplace(thread.state == State::kExited ? "exited" : key, describe_wait(thread)).first;
    }
    groups[found->second].push_back(thread.linear);
    if (other < 0 && (thread.state == State::kExited || thread.site.line != waiting->site.line ||
                      thread.wait != waiting->wait)) {
      other = static_cast<int>(thread.linear);
      other_place = thread.state == State::kExited ? "returned from the kernel" : resolve_site(thread.site);
    }
  }
  std::string text = "no thread can go on:";
  for (const auto& [wait, threads] : groups) text += "\n  threads " + ranges(threads) + " " + wait;
  if (waiting->wait == Wait::kBarrier) {
    const Barrier& barrier = stuck->barriers[waiting->mask];
    text += "\n  barrier " + std::to_string(waiting->mask) + " has " + std::to_string(barrier.arrived) + " of " +
            std::to_string(barrier.expected != 0 ? barrier.expected : stuck->count) + " arrivals";
  }
  here = waiting;
  fail(kind, text, resolve_site(waiting->site), other, other_place);
}

}  // namespace

void resume_first(Worker& worker) {
  Block& block = *worker.group[0];
  worker.group_current = 0;
  Thread* first = pick(block, 0, 31);
  first->state = State::kStarted;
  first->stack = worker.stacks.take();
  first->sp = fiber_prepare(first->stack->top, fiber_main);
  here = first;
  void* fake = nullptr;
  announce(&fake, first->stack);
  tw_fiber_switch(&worker.sp, first->sp);
  arrived(fake);
  here = nullptr;
}

void leave_fiber(Worker& worker) {
  worker.stopped = true;
  end_group(worker, nullptr);
}

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
  block.make_runnable(thread);
  Thread* next = pick_fairly(*block.worker, block, thread);
  jump(thread, next);
  if (next == &thread) sched_yield();  // what it waits for can only come from a block on another worker
}

}  // namespace tw::emu
