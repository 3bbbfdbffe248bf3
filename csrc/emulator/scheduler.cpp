// Which fiber runs next.
#include <sched.h>

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

}  // namespace

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

void yield_fairly(Thread& thread) {
  Block& block = *thread.block;
  block.make_runnable(thread);
  Thread* next = pick_fairly(*block.worker, block, thread);
  jump(thread, next);
  if (next == &thread) sched_yield();  // what it waits for can only come from a block on another worker
}

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

}  // namespace tw::emu
