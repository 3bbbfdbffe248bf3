#ifdef TW_EMULATOR_CHECKED

#include "emulator/shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "emulator/machine.h"
#include "emulator/runtime.h"

namespace tw::emu {

namespace {

enum Flag : std::uint8_t { kAllocated = 1, kInitialized = 2, kPending = 4, kWritten = 8, kAtomicReaders = 16 };

std::shared_ptr<Ticks> copy_of(const Clock& clock, std::uint32_t threads) {
  return clock != nullptr ? std::make_shared<Ticks>(*clock) : std::make_shared<Ticks>(threads, 0u);
}

void raise_to(Ticks& ticks, const Ticks& other) {
  for (std::size_t i = 0; i < ticks.size(); ++i) ticks[i] = std::max(ticks[i], other[i]);
}

Clock join(const Clock& a, const Clock& b, std::uint32_t threads) {
  if (a == nullptr || a == b) return b;
  if (b == nullptr) return a;
  auto both = copy_of(a, threads);
  raise_to(*both, *b);
  return both;
}

std::mutex sites_mutex;
std::vector<Site> sites;
constexpr Where kIsSite = 0x80000000u;
const char anchor = 0;  // code addresses are kept relative to this module

const char* name_of(Access kind) {
  static const char* const kNames[] = {"read", "write", "atomic update"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace

void ThreadClock::restart() {
  known.reset();
  fenced.reset();
  seen.reset();
  own = 1;
}

void ClockJoin::release(ThreadClock& clock, std::uint32_t thread, std::uint32_t threads) {
  if (joined_ == nullptr) {
    joined_ = copy_of(clock.known, threads);
  } else if (clock.known != nullptr && clock.known != last_) {
    raise_to(*joined_, *clock.known);
  }
  last_ = clock.known;
  (*joined_)[thread] = std::max((*joined_)[thread], clock.own);
  ++clock.own;
}

void ClockJoin::reset() {
  joined_.reset();
  last_.reset();
}

Where where_of(std::uintptr_t pc) {
  return static_cast<Where>(pc - reinterpret_cast<std::uintptr_t>(&anchor)) & ~kIsSite;
}

Where where_of(Site site) {
  thread_local std::unordered_map<std::uint64_t, Where> known;
  const std::uint64_t key = reinterpret_cast<std::uintptr_t>(site.file) * 4096 + static_cast<unsigned>(site.line);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const std::lock_guard<std::mutex> lock(sites_mutex);
  const Where where = kIsSite | static_cast<Where>(sites.size());
  sites.push_back(site);
  known[key] = where;
  return where;
}

std::string resolve(Where where) {
  if ((where & kIsSite) != 0) {
    const std::lock_guard<std::mutex> lock(sites_mutex);
    return resolve_site(sites[where & ~kIsSite]);
  }
  const auto offset = static_cast<std::int32_t>(where << 1) >> 1;
  return resolve_address(reinterpret_cast<std::uintptr_t>(&anchor) + static_cast<std::intptr_t>(offset));
}

Shadow::~Shadow() {
  if (cells_ != nullptr) munmap(cells_, kWindowBytes * sizeof(Cell));
}

void Shadow::reset(const char*) {
  if (cells_ == nullptr) {
    void* mapped = mmap(nullptr, kWindowBytes * sizeof(Cell), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    cells_ = static_cast<Cell*>(mapped);
  }
  for (const auto& [offset, bytes] : used_) std::memset(static_cast<void*>(cells_ + offset), 0, bytes * sizeof(Cell));
  used_.clear();
  more_used_ = 0;
  published_.clear();
  uninitialized.reset();
}

void Shadow::allocate(std::size_t offset, std::size_t bytes) {
  used_.emplace_back(offset, bytes);
  for (std::size_t i = 0; i < bytes; ++i) cells_[offset + i].flags = kAllocated;
}

void Shadow::check_writer(Thread& thread, const Cell& cell, std::size_t offset, const char* does, Where where) {
  if ((cell.flags & kWritten) == 0 || cell.writer == thread.linear) return;
  if (thread.clock.knows(cell.writer, cell.write_tick)) return;
  here = &thread;
  fail("race", std::string(does) + " of " + describe_shared(*thread.block, offset) + ", which another thread wrote with no barrier between",
       resolve(where), cell.writer, resolve(cell.write_where), shared_byte(*thread.block, offset));
}

// A write conflicts with every earlier access, a read with atomics, an atomic with reads.
void Shadow::check_readers(Thread& thread, const Cell& cell, std::size_t offset, Access kind, Where where) {
  const auto check = [&](const Reader& reader) {
    if (reader.thread == thread.linear || thread.clock.knows(reader.thread, reader.tick)) return;
    if (kind != Access::kWrite && reader.atomic == (kind == Access::kAtomic)) return;
    here = &thread;
    fail("race", std::string(name_of(kind)) + " of " + describe_shared(*thread.block, offset) + ", which another thread " +
                     (reader.atomic ? "updated atomically" : "read") + " with no barrier between",
         resolve(where), static_cast<int>(reader.thread), resolve(reader.where), shared_byte(*thread.block, offset));
  };
  if (cell.read) check(Reader{cell.read_tick, cell.read_where, cell.reader, cell.read_atomic});
  if (cell.more != 0) {
    for (const Reader& reader : more_[cell.more - 1]) check(reader);
  }
}

// Keeps the readers that no later access is known to be ordered after; the usual cell has one. A reader makes an earlier
// one of its own kind superfluous if it knows of it: whoever is ordered after the later one is after both.
void Shadow::add_reader(Thread& thread, Cell& cell, bool atomic, Where where) {
  const Reader fresh{thread.clock.own, where, static_cast<std::uint16_t>(thread.linear), atomic};
  if (!cell.read || (cell.read_atomic == atomic &&
                     (cell.reader == thread.linear || thread.clock.knows(cell.reader, cell.read_tick)))) {
    cell.read = true;
    cell.reader = fresh.thread;
    cell.read_tick = fresh.tick;
    cell.read_where = where;
    cell.read_atomic = atomic;
    return;
  }
  if (cell.more == 0) {
    if (more_used_ == more_.size()) more_.emplace_back();
    more_[more_used_].clear();
    cell.more = static_cast<std::uint32_t>(++more_used_);
  }
  std::vector<Reader>& readers = more_[cell.more - 1];
  if (!readers.empty() && readers.back().thread == fresh.thread && readers.back().atomic == atomic) {
    readers.back() = fresh;
    return;
  }
  if (readers.size() >= 16 && (readers.size() & (readers.size() - 1)) == 0) {
    // At each doubling, drop what is superfluous by now: all but a thread's latest access of a kind among it.
    bool latest[kMaxThreads][2] = {};
    std::vector<Reader> kept;
    for (auto it = readers.rbegin(); it != readers.rend(); ++it) {
      if (latest[it->thread][it->atomic] || (it->atomic == atomic && thread.clock.knows(it->thread, it->tick))) continue;
      latest[it->thread][it->atomic] = true;
      kept.push_back(*it);
    }
    std::reverse(kept.begin(), kept.end());
    readers.swap(kept);
  }
  readers.push_back(fresh);
}

void Shadow::wrote(Thread& thread, Cell& cell, Where where) {
  cell.writer = static_cast<std::uint16_t>(thread.linear);
  cell.write_tick = thread.clock.own;
  cell.write_where = where;
  cell.flags = static_cast<std::uint8_t>((cell.flags | kInitialized | kWritten) & ~kAtomicReaders);
  cell.read = false;
  cell.more = 0;
}

void Shadow::access(Thread& thread, std::size_t offset, std::size_t bytes, Access kind, Where where) {
  const char* does = name_of(kind);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (offset + i >= kWindowBytes || (cells_[offset + i].flags & kAllocated) == 0) {
      here = &thread;
      fail("out_of_bounds_shared", std::string(does) + " of " + std::to_string(bytes) + " bytes, of which number " + std::to_string(i) +
                                       " is " + describe_shared(*thread.block, offset + i),
           resolve(where), -1, {}, shared_byte(*thread.block, offset + i));
    }
    Cell& cell = cells_[offset + i];
    if ((cell.flags & kPending) != 0) {
      here = &thread;
      fail("async_copy_not_waited",
           std::string(does) + " of " + describe_shared(*thread.block, offset + i) +
               ", while a cp.async into it has not been waited for by the thread that issued it",
           resolve(where), cell.writer, resolve(cell.write_where), shared_byte(*thread.block, offset + i));
    }
    check_writer(thread, cell, offset + i, does, where);
    switch (kind) {
      case Access::kRead:
        if ((cell.flags & kAtomicReaders) != 0) check_readers(thread, cell, offset + i, kind, where);
        if ((cell.flags & kInitialized) == 0 && !uninitialized) {
          uninitialized = Uninitialized{thread.linear, offset + i, bytes, where};
        }
        add_reader(thread, cell, false, where);
        break;
      case Access::kAtomic:
        // Atomics are kept as readers: they do not conflict with each other, but with every plain access.
        if ((cell.flags & kInitialized) == 0 && !uninitialized) {
          uninitialized = Uninitialized{thread.linear, offset + i, bytes, where};
        }
        check_readers(thread, cell, offset + i, kind, where);
        add_reader(thread, cell, true, where);
        cell.flags |= kAtomicReaders;
        break;
      case Access::kWrite:
        check_readers(thread, cell, offset + i, kind, where);
        wrote(thread, cell, where);
        break;
    }
  }
}

void Shadow::copy_begins(Thread& thread, std::size_t offset, std::size_t bytes, Where where) {
  access(thread, offset, bytes, Access::kWrite, where);
  for (std::size_t i = 0; i < bytes; ++i) cells_[offset + i].flags |= kPending;
}

void Shadow::copy_lands(Thread& thread, std::size_t offset, std::size_t bytes, Where where) {
  for (std::size_t i = 0; i < bytes; ++i) {
    Cell& cell = cells_[offset + i];
    cell.flags = static_cast<std::uint8_t>(cell.flags & ~kPending);
    wrote(thread, cell, where);
  }
}

void Shadow::fence(Thread& thread, std::uint32_t threads) {
  ThreadClock& clock = thread.clock;
  clock.known = join(clock.known, clock.seen, threads);
  auto snapshot = copy_of(clock.known, threads);
  (*snapshot)[thread.linear] = clock.own++;
  clock.fenced = std::move(snapshot);
}

void Shadow::publish(Thread& thread, const void* address, bool writes) {
  Clock& at = published_[address];
  const auto threads = static_cast<std::uint32_t>(thread.block->count);
  thread.clock.seen = join(thread.clock.seen, at, threads);
  if (writes && thread.clock.fenced != nullptr) at = join(at, thread.clock.fenced, threads);
}

void report_uninitialized(const Shadow::Uninitialized& read) {
  Block& block = *here->block;
  here = &block.threads[read.thread];
  block.shadow.uninitialized.reset();
  fail("uninitialized", "read of " + describe_shared(block, read.offset) + ", which nobody had written", resolve(read.where), -1, {},
       shared_byte(block, read.offset));
}

}  // namespace tw::emu

#endif
