// Spreads the blocks of a launch over operating-system threads, and watches them.
#include "emulator/launch.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "emulator/runtime.h"

namespace tw::emu {

namespace {

constexpr std::uint64_t kResidentThreads = 16384;  // each has a stack and a guard page of its own

std::mutex launch_mutex;  // one launch at a time
std::vector<std::unique_ptr<Worker>> idle_workers;
std::size_t idle_stack_bytes = 0;

std::uint64_t mix(std::uint64_t value) {  // splitmix64
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

std::unique_ptr<Worker> take_worker(const Settings& settings) {
  if (idle_stack_bytes != settings.stack_bytes) {
    idle_workers.clear();
    idle_stack_bytes = settings.stack_bytes;
  }
  if (idle_workers.empty()) return std::make_unique<Worker>(settings.stack_bytes);
  auto worker = std::move(idle_workers.back());
  idle_workers.pop_back();
  return worker;
}

void work(Worker& worker, Launch& launch) {
  enter_worker_thread(worker);
  for (;;) {
    if (launch.failed.load(std::memory_order_relaxed)) break;
    const std::uint64_t first = launch.next.fetch_add(launch.geometry.cooperative ? launch.blocks : 1);
    if (first >= launch.blocks) break;
    if (!worker.run_group(launch, first, launch.geometry.cooperative ? launch.blocks : 1)) break;
  }
  leave_worker_thread(worker);
}

}  // namespace

Settings& settings() {
  static Settings value;
  return value;
}

std::vector<Buffer>& buffers() {
  static std::vector<Buffer> value;
  return value;
}

Worker::~Worker() {
  for (const auto& block : group) {
    if (block->window != nullptr) munmap(block->window, kWindowBytes);
  }
}

void Launch::finish(std::uint64_t order) {
  const std::lock_guard<std::mutex> lock(mutex);
  finished[order].store(true);
  std::uint64_t before = finished_before.load();
  while (before < blocks && finished[before].load()) ++before;
  finished_before.store(before, std::memory_order_release);
}

void Worker::prepare(Launch& launch, Block& block, std::uint64_t order) {
  const cuda::Geometry& geometry = launch.geometry;
  const std::uint64_t linear = launch.permutation.empty() ? order : launch.permutation[order];
  if (block.window == nullptr) {
    void* window = mmap(nullptr, kWindowBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (window == MAP_FAILED) throw std::bad_alloc();
    block.window = static_cast<char*>(window);
  }
  block.launch = &launch;
  block.worker = this;
  block.order = order;
  block.index.x = static_cast<unsigned>(linear % geometry.grid[0]);
  block.index.y = static_cast<unsigned>(linear / geometry.grid[0] % geometry.grid[1]);
  block.index.z = static_cast<unsigned>(linear / geometry.grid[0] / geometry.grid[1]);
  block.random = mix(launch.settings.seed ^ mix(linear)) | 1;
  block.spins = 0;
  block.statics.clear();
  block.static_bytes = 0;
  block.window_used = kWindowMargin + geometry.shared_bytes;
  std::memset(block.window + kWindowMargin, 0xFF, geometry.shared_bytes);  // NaN in every floating-point format
  const unsigned count = geometry.block[0] * geometry.block[1] * geometry.block[2];
  for (Barrier& barrier : block.barriers) {
    barrier.arrived = barrier.expected = 0;
    barrier.count = 0;
    std::fill(std::begin(barrier.waiting), std::end(barrier.waiting), 0u);
#ifdef TW_EMULATOR_CHECKED
    barrier.join.reset();
#endif
  }
  block.count = block.live = count;
  if (block.threads.size() < count) block.threads.resize((count + kWarpSize - 1) / kWarpSize * kWarpSize);
  std::fill(std::begin(block.runnable), std::end(block.runnable), 0u);
  block.runnable_warps = 0;
#ifdef TW_EMULATOR_CHECKED
  block.shadow.reset(block.window);
  block.shadow.allocate(kWindowMargin, geometry.shared_bytes);
#endif
  unsigned t = 0;
  for (unsigned z = 0; z < geometry.block[2]; ++z) {
    for (unsigned y = 0; y < geometry.block[1]; ++y) {
      for (unsigned x = 0; x < geometry.block[0]; ++x, ++t) {
        Thread& thread = block.threads[t];
        thread.block = &block;
        thread.index = uint3{x, y, z};
        thread.linear = t;
        thread.lane = t % kWarpSize;
        thread.warp = t / kWarpSize;
        thread.state = State::kUnstarted;
        thread.wait = Wait::kNone;
        if (thread.stack != nullptr) {  // left over from a launch that failed
          stacks.give_back(thread.stack);
          thread.stack = nullptr;
        }
        block.make_runnable(thread);
#ifdef TW_EMULATOR_CHECKED
        thread.clock.restart();
        thread.copies.clear();
        thread.open_group = 0;
#endif
      }
    }
  }
}

bool Worker::run_group(Launch& launch, std::uint64_t first_order, std::uint64_t count) {
  while (group.size() < count) group.push_back(std::make_unique<Block>());
  group_size = count;
  grid_arrived = 0;
  stopped = false;
  report.reset();
  for (std::uint64_t i = 0; i < count; ++i) prepare(launch, *group[i], first_order + i);
  resume_first(*this);
  if (stopped) {
    for (std::uint64_t i = 0; i < count; ++i) {
      for (Thread& thread : group[i]->threads) {
        if (thread.stack == nullptr) continue;
        stacks.give_back(thread.stack);
        thread.stack = nullptr;
      }
    }
    const std::lock_guard<std::mutex> lock(launch.mutex);
    launch.failed.store(true);
    if (report && (!launch.report || report->order < launch.report->order)) launch.report = report;
    return false;
  }
  for (std::uint64_t i = 0; i < count; ++i) launch.finish(first_order + i);
  return true;
}

std::optional<Report> run(const cuda::Kernel& kernel, const cuda::Geometry& geometry, const void* params) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  Launch launch;
  launch.kernel = &kernel;
  launch.params = params;
  launch.geometry = geometry;
  launch.settings = settings();
  launch.blocks = std::uint64_t{geometry.grid[0]} * geometry.grid[1] * geometry.grid[2];
  launch.finished = std::vector<std::atomic<bool>>(launch.blocks);
  const std::uint64_t threads = std::uint64_t{geometry.block[0]} * geometry.block[1] * geometry.block[2];
  if (geometry.cooperative && launch.blocks * threads > kResidentThreads) {
    throw std::invalid_argument("kernel '" + std::string(kernel.name) + "': a cooperative launch of " +
                                std::to_string(launch.blocks * threads) + " threads, the emulator keeps " +
                                std::to_string(kResidentThreads) + " resident");
  }
  if (launch.settings.random_order) {
    launch.permutation.resize(launch.blocks);
    for (std::uint64_t i = 0; i < launch.blocks; ++i) launch.permutation[i] = i;
    std::uint64_t random = launch.settings.seed;
    for (std::uint64_t i = launch.blocks; i > 1; --i) {
      random = mix(random);
      std::swap(launch.permutation[i - 1], launch.permutation[random % i]);
    }
  }
  unsigned wanted = launch.settings.threads != 0 ? launch.settings.threads : std::max(1u, std::thread::hardware_concurrency());
  if (geometry.cooperative) wanted = 1;
  wanted = static_cast<unsigned>(std::min<std::uint64_t>(wanted, launch.blocks));

  const FaultGuard guard;
  std::vector<std::unique_ptr<Worker>> workers;
  for (unsigned i = 0; i < wanted; ++i) workers.push_back(take_worker(launch.settings));
  std::mutex done_mutex;
  std::condition_variable done;
  unsigned running = wanted;
  std::vector<std::thread> os_threads;
  for (unsigned i = 0; i < wanted; ++i) {
    os_threads.emplace_back([&, i] {
      work(*workers[i], launch);
      const std::lock_guard<std::mutex> ended(done_mutex);
      --running;
      done.notify_all();
    });
  }
  {
    // The caller's thread watches: a fiber that computes without end never comes back to the scheduler by itself.
    std::vector<std::uint64_t> seen(wanted, 0);
    std::unique_lock<std::mutex> waiting(done_mutex);
    const auto period = std::chrono::duration<double>(launch.settings.watchdog_seconds);
    while (!done.wait_for(waiting, period, [&] { return running == 0; })) {
      for (unsigned i = 0; i < wanted; ++i) {
        const std::uint64_t beat = workers[i]->heartbeat.load();
        if (beat == seen[i]) pthread_kill(os_threads[i].native_handle(), watchdog_signal());
        seen[i] = beat;
      }
    }
  }
  for (std::thread& thread : os_threads) thread.join();
  for (auto& worker : workers) idle_workers.push_back(std::move(worker));
  return launch.report;
}

}  // namespace tw::emu
