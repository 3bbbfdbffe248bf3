// Each worker has a mailbox of its own, so that a call wakes as many workers as it has parts and no more. A mailbox is
// a counter of posts: the worker spins on it for a while, since the next operation of a model is microseconds away, and
// then sleeps in the kernel (futex) until it changes. The caller waits for its workers in the same way, but a part that
// no worker has begun by the time the caller is idle, the caller runs itself: on a machine with other work to do, a
// worker may not be scheduled for milliseconds.
#include "cpu/runtime/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/runtime/cores.h"

namespace tw {

void RangeBody::operator()(std::int64_t begin, std::int64_t end) const { call_(object_, begin, end); }

namespace {

using Counter = std::atomic<std::uint32_t>;
static_assert(sizeof(Counter) == 4 && Counter::is_always_lock_free);

constexpr std::chrono::microseconds kSpin{60};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(Counter& word, int operation, std::uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr,
                 nullptr, 0);
}

// A counter that one thread waits on and others change.
struct alignas(64) Event {
  Counter value{0};
  std::atomic<bool> asleep{false};

  // Waits until done(value): spins, then sleeps.
  template <class Done>
  void wait(Done done) {
    const auto limit = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (done(value.load(std::memory_order_acquire))) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < limit);
    // Either this thread sees the change, or the one that changes sees `asleep`: both are sequentially consistent.
    asleep.store(true);
    for (std::uint32_t seen = value.load(); !done(seen); seen = value.load()) futex(value, FUTEX_WAIT, seen);
    asleep.store(false);
  }

  void add(std::uint32_t amount) {
    value.fetch_add(amount);
    if (asleep.load()) futex(value, FUTEX_WAKE, INT_MAX);
  }
};

struct Part {
  const RangeBody* body;
  std::int64_t begin, end;
};

thread_local bool inside = false;

void run(const Part& part, std::exception_ptr& error) {
  inside = true;
  try {
    (*part.body)(part.begin, part.end);
  } catch (...) {
    error = std::current_exception();
  }
  inside = false;
}

struct Worker {
  Event posted;
  // The last post that somebody has taken on; only who raises it to the current post may touch the part.
  alignas(64) Counter claimed{0};
  Part part{};
  std::exception_ptr error;

  bool claim(std::uint32_t post) {
    std::uint32_t before = post - 1;
    return claimed.compare_exchange_strong(before, post);
  }
};

class Pool {
 public:
  // Of the caller's own thread and `parts - 1` workers; the lock is held.
  void run_parts(std::int64_t n, int parts, const RangeBody& body) {
    start_workers(parts - 1);
    const auto bound = [&](int i) { return static_cast<std::int64_t>(static_cast<__int128>(n) * i / parts); };
    for (int i = 1; i < parts; ++i) {
      Worker& worker = *workers_[i - 1];
      worker.part = {&body, bound(i), bound(i + 1)};
      worker.posted.add(1);
    }
    std::exception_ptr error;
    run({&body, 0, bound(1)}, error);
    for (int i = 1; i < parts; ++i) {
      Worker& worker = *workers_[i - 1];
      if (worker.claim(worker.posted.value.load())) run(worker.part, worker.error);
      else ++awaited_;
    }
    done_.wait([this](std::uint32_t value) { return value == awaited_; });
    for (int i = 1; i < parts; ++i) {
      std::exception_ptr other = std::exchange(workers_[i - 1]->error, nullptr);
      if (!error) error = std::move(other);
    }
    if (error) std::rethrow_exception(error);
  }

  std::mutex lock;

 private:
  void start_workers(int count) {
    while (static_cast<int>(workers_.size()) < count) {
      auto worker = std::make_unique<Worker>();
      // Signals are the business of the program's own threads: Python wants them on its main thread.
      sigset_t every, before;
      sigfillset(&every);
      pthread_sigmask(SIG_SETMASK, &every, &before);
      try {
        std::thread(&Pool::work, this, worker.get()).detach();
      } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw std::runtime_error("cannot start worker thread " + std::to_string(workers_.size() + 1) + " of " +
                                 std::to_string(count) + ": " + error.what());
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      workers_.push_back(std::move(worker));
    }
  }

  void work(Worker* worker) {
    std::uint32_t seen = 0;
    for (;;) {
      worker->posted.wait([&](std::uint32_t post) { return post != std::exchange(seen, post); });
      if (!worker->claim(seen)) continue;
      run(worker->part, worker->error);
      done_.add(1);
    }
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  Event done_;                  // parts that workers have run
  std::uint32_t awaited_ = 0;   // what it will be when the current call has ended
};

// Never destroyed: its threads sleep in it until the process ends. A forked child has none of them, and makes its own.
std::atomic<Pool*> current_pool{nullptr};
std::atomic<int> threads{0};  // 0: not decided yet

Pool& pool() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr, std::memory_order_relaxed); });
  (void)registered;
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  auto made = std::make_unique<Pool>();
  if (current_pool.compare_exchange_strong(existing, made.get())) existing = made.release();
  return *existing;
}

int initial_threads() {
  const char* chosen = std::getenv("TILEWRIGHT_NUM_THREADS");
  if (chosen == nullptr || *chosen == '\0') return std::min(usable_cores(), kMaxThreads);
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(chosen, &end, 10);
  if (*end != '\0' || errno != 0 || value < 1 || value > kMaxThreads) {
    throw std::invalid_argument(std::string("the environment variable TILEWRIGHT_NUM_THREADS is '") + chosen +
                                "'; it should be an integer in 1 .. " + std::to_string(kMaxThreads));
  }
  return static_cast<int>(value);
}

}  // namespace

int num_threads() {
  const int chosen = threads.load(std::memory_order_relaxed);
  if (chosen > 0) return chosen;
  int undecided = 0;
  threads.compare_exchange_strong(undecided, initial_threads());
  return threads.load();
}

void set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument("num_threads is " + std::to_string(count) + "; it should be in 1 .. " +
                                std::to_string(kMaxThreads));
  }
  if (inside) throw std::logic_error("the number of threads cannot change inside a parallel_for");
  threads.store(count);
}

void parallel_for(std::int64_t n, std::int64_t grain, RangeBody body) {
  if (n <= 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, n / std::max<std::int64_t>(1, grain));
  const int parts = static_cast<int>(std::min<std::int64_t>(num_threads(), most));
  if (parts == 1 || inside) return body(0, n);
  Pool& shared = pool();
  const std::unique_lock<std::mutex> held(shared.lock, std::try_to_lock);
  if (!held.owns_lock()) return body(0, n);
  shared.run_parts(n, parts, body);
}

}  // namespace tw
