// The checker's memory: for every byte of a block's shared memory, who wrote it last and who has read it since.
//
// Time is a vector clock. Each thread counts its own synchronisations; it knows how far along every other thread was at
// the last one that ordered the two. An access is ordered after another if the thread knows that the other thread had
// got beyond it. Barriers and __syncwarp join the clocks of those who take part; shuffles and votes do not, because they
// order no memory; a fence and an atomic together carry a clock through the atomic's address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/report.h"

namespace tw::emu {

struct Thread;

using Ticks = std::vector<std::uint32_t>;  // by linear thread index; a null pointer stands for all zeros
using Clock = std::shared_ptr<const Ticks>;

struct ThreadClock {
  Clock known;             // of the other threads
  std::uint32_t own = 1;
  Clock fenced;            // snapshot at the last fence: what an atomic publishes
  Clock seen;              // published by atomics that this thread has read: known after its next fence
  void restart();
  bool knows(std::uint32_t thread, std::uint32_t tick) const {
    return known != nullptr && (*known)[thread] >= tick;
  }
};

// Collects the clocks of those who come to a barrier, and hands the union to those who wait in it. Threads that left the
// same barrier share one vector, so the usual join costs one element a thread.
class ClockJoin {
 public:
  void release(ThreadClock& clock, std::uint32_t thread, std::uint32_t threads);
  void acquire(ThreadClock& clock) const { clock.known = joined_; }
  void reset();

 private:
  std::shared_ptr<Ticks> joined_;
  Clock last_;
};

// Where an access was made: a code address or a Site, in 32 bits.
using Where = std::uint32_t;
Where where_of(std::uintptr_t pc);
Where where_of(Site site);
std::string resolve(Where where);

enum class Access : std::uint8_t { kRead, kWrite, kAtomic };

class Shadow {
 public:
  ~Shadow();
  void reset(const char* window);
  void allocate(std::size_t offset, std::size_t bytes);
  // Offsets are in the block's window. Reports, and does not return, when the access is wrong.
  void access(Thread& thread, std::size_t offset, std::size_t bytes, Access kind, Where where);
  void copy_begins(Thread& thread, std::size_t offset, std::size_t bytes, Where where);
  void copy_lands(Thread& thread, std::size_t offset, std::size_t bytes, Where where);
  void fence(Thread& thread, std::uint32_t threads);
  void publish(Thread& thread, const void* address, bool writes);

  // A read of bytes that nobody had written. It is told only when the block ends or fails otherwise: if another thread
  // writes them later, unordered, the race is the cause and is what the report should say.
  struct Uninitialized {
    std::uint32_t thread;
    std::size_t offset;
    std::size_t bytes;
    Where where;
  };
  std::optional<Uninitialized> uninitialized;

 private:
  struct Reader {
    std::uint32_t tick;
    Where where;
    std::uint16_t thread;
    bool atomic;
  };
  struct Cell {
    std::uint32_t write_tick;
    Where write_where;
    std::uint32_t read_tick;
    Where read_where;
    std::uint32_t more;  // 1 + index of further readers, 0: none
    std::uint16_t writer;
    std::uint16_t reader;
    std::uint8_t flags;
    bool read;
    bool read_atomic;
  };
  Cell& cell(std::size_t offset) { return cells_[offset]; }
  void check_writer(Thread& thread, const Cell& cell, std::size_t offset, const char* does, Where where);
  void check_readers(Thread& thread, const Cell& cell, std::size_t offset, Access kind, Where where);
  void add_reader(Thread& thread, Cell& cell, bool atomic, Where where);
  void wrote(Thread& thread, Cell& cell, Where where);

  Cell* cells_ = nullptr;
  std::vector<std::pair<std::size_t, std::size_t>> used_;  // ranges of cells to clear
  std::vector<std::vector<Reader>> more_;
  std::size_t more_used_ = 0;
  std::unordered_map<const void*, Clock> published_;
};

[[noreturn]] void report_uninitialized(const Shadow::Uninitialized& read);

}  // namespace tw::emu
