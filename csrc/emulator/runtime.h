// Private to the emulator's own sources: a launch in flight and the operating-system threads that run it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "emulator/launch.h"
#include "emulator/machine.h"

namespace tw::emu {

struct Launch {
  const cuda::Kernel* kernel = nullptr;
  const void* params = nullptr;
  cuda::Geometry geometry{};
  Settings settings;
  std::uint64_t blocks = 0;
  std::vector<std::uint64_t> permutation;  // order -> block, empty when blocks run by index
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::atomic<std::uint64_t> finished_before{0};  // every block before this order has ended
  std::vector<std::atomic<bool>> finished;
  std::mutex mutex;                // guards the two below
  std::optional<Report> report;    // the failure with the lowest order
  void finish(std::uint64_t order);
};

// Everything that one operating-system thread needs; kept between launches, because stacks and windows are warm.
struct Worker {
  explicit Worker(std::size_t stack_bytes) : stacks(stack_bytes) {}
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void* sp = nullptr;  // of the scheduler, while a fiber runs
  StackPool stacks;
  std::vector<std::unique_ptr<Block>> group;  // resident blocks; group_size of them are in use
  std::size_t group_size = 0;
  std::size_t group_current = 0;
  std::uint32_t grid_arrived = 0;
  std::atomic<std::uint64_t> heartbeat{0};  // counts scheduling, for the watchdog
  std::optional<Report> report;
  bool stopped = false;
  // Set by the signal handlers: what the fault was, and where.
  int fault_signal = 0;
  std::uintptr_t fault_pc = 0;
  std::uintptr_t fault_sp = 0;
  std::uintptr_t fault_address = 0;
  char* fault_stack = nullptr;

  // Runs the blocks of these orders together; false when the launch has to end.
  bool run_group(Launch& launch, std::uint64_t first_order, std::uint64_t count);

 private:
  void prepare(Launch& launch, Block& block, std::uint64_t order);
};

// scheduler.cpp
void resume_first(Worker& worker);              // enters the first fiber of the group; returns when all have ended
[[noreturn]] void leave_fiber(Worker& worker);  // back to run_group(); the fibers are given up
void suspend(Thread& thread);                   // until somebody makes it runnable
void maybe_yield(Thread& thread);               // a scheduling point at which the thread could go on
void yield_fairly(Thread& thread);              // everybody else gets a turn first

void finish_barrier(Block& block, Barrier& barrier);  // barriers.cpp: wakes all who wait in it
[[noreturn]] void report_stuck(Worker& worker);       // stuck.cpp

// faults.cpp: turns SIGSEGV, SIGBUS, SIGFPE in a fiber, and the watchdog's signal, into a report.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
};
void enter_worker_thread(Worker& worker);  // an alternative stack for the handlers, once a thread
void leave_worker_thread(Worker& worker);
int watchdog_signal();

}  // namespace tw::emu
