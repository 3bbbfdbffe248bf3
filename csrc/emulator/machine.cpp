// Shared memory, asynchronous copies and reports of the running thread.
#include "emulator/machine.h"

#include <sched.h>

#include <cstring>
#include <sstream>

#include "emulator/runtime.h"

namespace tw::emu {

namespace {

std::string hex(std::uintptr_t value) {
  std::ostringstream text;
  text << "0x" << std::hex << value;
  return text.str();
}

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

}  // namespace

std::string describe_thread(const Block& block, int linear) {
  std::ostringstream text;
  const uint3& t = block.threads[static_cast<std::size_t>(linear)].index;
  text << "thread " << linear << " (" << t.x << "," << t.y << "," << t.z << ")";
  return text.str();
}

namespace {

// The array that an offset in the window lies in, or the nearest one before it.
struct Located {
  std::string name;
  std::size_t begin;
  std::size_t bytes;
};

Located locate(const Block& block, std::size_t offset) {
  Located best{"dynamic shared memory", kWindowMargin, block.launch->geometry.shared_bytes};
  for (std::size_t i = 0; i < block.statics.size(); ++i) {
    const StaticArray& array = block.statics[i];
    if (offset + kArrayMargin / 2 < array.offset) continue;
    if (array.offset >= best.begin) best = Located{"shared array '" + std::string(array.name) + "'", array.offset, array.bytes};
  }
  return best;
}

}  // namespace

std::string describe_shared(const Block& block, std::size_t offset) {
  const Located array = locate(block, offset);
  return "byte " + std::to_string(shared_byte(block, offset)) + " of " + array.name + " (" + std::to_string(array.bytes) + " bytes)";
}

long long shared_byte(const Block& block, std::size_t offset) {
  return static_cast<long long>(offset) - static_cast<long long>(locate(block, offset).begin);
}

void fail(const char* kind, const std::string& message, const std::string& place, int other_thread,
          const std::string& other_place, long long byte) {
#ifdef TW_EMULATOR_CHECKED
  // Garbage that was read explains most of what goes wrong later.
  if (here->block->shadow.uninitialized && std::strcmp(kind, "race") != 0 && std::strcmp(kind, "async_copy_not_waited") != 0) {
    report_uninitialized(*here->block->shadow.uninitialized);
  }
#endif
  Thread& thread = *here;
  Block& block = *thread.block;
  Report report;
  report.kind = kind;
  report.kernel = block.launch->kernel->name;
  report.place = place;
  report.other_place = other_place;
  report.block[0] = block.index.x;
  report.block[1] = block.index.y;
  report.block[2] = block.index.z;
  report.thread = static_cast<int>(thread.linear);
  report.other_thread = other_thread;
  report.byte = byte;
  report.order = block.order;
  std::ostringstream text;
  text << kind << " in kernel '" << report.kernel << "', block (" << block.index.x << "," << block.index.y << ","
       << block.index.z << "), " << describe_thread(block, report.thread) << " at " << place << ": " << message;
  if (other_thread >= 0) text << "\n  the other: " << describe_thread(block, other_thread) << " at " << other_place;
  report.message = text.str();
  block.worker->report = report;
  leave_fiber(*block.worker);
}

bool is_shared(const void* address) {
  const auto offset = reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(here->block->window);
  return offset < kWindowBytes;
}

void* dynamic_shared() { return here->block->window + kWindowMargin; }

// As on a device, where a shared address is small and never null.
std::uint32_t shared_offset(const void* address) {
  return static_cast<std::uint32_t>(static_cast<const char*>(address) - here->block->window);
}

void* shared_address(std::uint32_t offset) { return here->block->window + offset; }

void* shared_array(const char* key, std::size_t bytes, std::size_t align, Site site) {
  Block& block = *here->block;
  for (const StaticArray& array : block.statics) {
    if (array.key == key) return block.window + array.offset;
  }
  block.static_bytes += round_up(bytes, align);
  if (block.static_bytes > kStaticSharedLimit) {
    fail("shared_limit", "static shared arrays take " + std::to_string(block.static_bytes) + " bytes, the limit is " +
                             std::to_string(kStaticSharedLimit),
         resolve_site(site));
  }
  if (block.static_bytes + block.launch->geometry.shared_bytes > kSharedLimit) {
    fail("shared_limit",
         std::to_string(block.static_bytes) + " bytes of static and " +
             std::to_string(block.launch->geometry.shared_bytes) + " of dynamic shared memory, the limit is " +
             std::to_string(kSharedLimit),
         resolve_site(site));
  }
  const std::size_t offset = round_up(block.window_used + kArrayMargin, align > 128 ? align : 128);
  block.window_used = offset + bytes;
  block.statics.push_back(StaticArray{key, key, offset, bytes});
  std::memset(block.window + offset, 0xFF, bytes);
#ifdef TW_EMULATOR_CHECKED
  block.shadow.allocate(offset, bytes);
#endif
  return block.window + offset;
}

void require_aligned(const void* address, std::size_t align, const char* what, Site site) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value % align == 0) return;
  const bool shared = is_shared(address);
  fail("misaligned",
       std::string(what) + " needs an address that is a multiple of " + std::to_string(align) + ", got " +
           (shared ? describe_shared(*here->block, shared_offset(address)) : hex(value)),
       resolve_site(site), -1, {}, shared ? shared_byte(*here->block, shared_offset(address)) : -1);
}

void require_shared(const void* address, std::size_t bytes, const char* what, Site site) {
  const Block& block = *here->block;
  if (is_shared(address)) {
    const std::size_t offset = shared_offset(address);
    if (offset >= kWindowMargin && offset + bytes <= kWindowMargin + block.launch->geometry.shared_bytes) return;
    for (const StaticArray& array : block.statics) {
      if (offset >= array.offset && offset + bytes <= array.offset + array.bytes) return;
    }
    fail("out_of_bounds_shared",
         std::string(what) + " of " + std::to_string(bytes) + " bytes at " + describe_shared(block, offset),
         resolve_site(site), -1, {}, shared_byte(block, offset));
  }
  fail("not_shared", std::string(what) + " takes an address in shared memory, got " +
                         hex(reinterpret_cast<std::uintptr_t>(address)),
       resolve_site(site));
}

void order_atomic(const void* address) {
  if (is_shared(address)) return;
  Block& block = *here->block;
  Launch& launch = *block.launch;
  if (launch.geometry.cooperative) return;  // one worker runs all blocks
  while (launch.finished_before.load(std::memory_order_acquire) < block.order) {
    if (launch.failed.load(std::memory_order_relaxed)) leave_fiber(*block.worker);
    block.worker->heartbeat.fetch_add(1, std::memory_order_relaxed);
    sched_yield();
  }
}

#ifndef TW_EMULATOR_CHECKED

void note_read(const Thread&, const void*, std::size_t, const char*, Site) {}
void note_write(const Thread&, const void*, std::size_t, const char*, Site) {}
void note_atomic(const void*, std::size_t, bool, Site) {}
void note_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Without the checker a copy lands at once: the earliest moment that the hardware allows.
void async_copy(void* destination, const void* source, unsigned bytes, unsigned source_bytes, Site site) {
  require_aligned(destination, bytes, "cp.async's destination", site);
  if (source_bytes != 0) require_aligned(source, bytes, "cp.async's source", site);
  require_shared(destination, bytes, "cp.async's destination", site);
  if (source_bytes != 0) std::memcpy(destination, source, source_bytes);
  std::memset(static_cast<char*>(destination) + source_bytes, 0, bytes - source_bytes);
}
void async_commit() {}
void async_wait(unsigned) {}
void async_wait_all() {}

#endif

}  // namespace tw::emu
