// The emulated machine: threads, blocks, barriers and what one operating-system thread needs to run them. Device code
// reaches it through csrc/emulator/language/*.h and the host models in csrc/cuda/ptx; nothing else includes it.
//
// A block runs on one operating-system thread, so its fibers share memory without locks; several blocks run at once on
// several such threads. A group is the set of blocks that must be resident together: one block, or all blocks of a
// cooperative launch.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/fiber.h"
#include "emulator/report.h"

#ifdef TW_EMULATOR_CHECKED
#include "emulator/shadow.h"
#endif

namespace tw::emu {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kNamedBarriers = 16;
constexpr std::size_t kSharedLimit = 227 * 1024;       // dynamic and static together, as on sm_90
constexpr std::size_t kStaticSharedLimit = 48 * 1024;  // what the compiler accepts for static arrays
// A block's shared memory lies in a window: an unused margin, dynamic shared memory, then each static array behind a
// margin of its own. Whatever falls into the window but into no array is out of bounds.
constexpr std::size_t kWindowBytes = 512 * 1024;
constexpr std::size_t kWindowMargin = 64 * 1024;
constexpr std::size_t kArrayMargin = 128;

struct Block;
struct Worker;
struct Launch;

enum class State : std::uint8_t { kUnstarted, kStarted, kExited };
enum class Wait : std::uint8_t { kNone, kBarrier, kWarp, kGrid };

// Runs a warp-wide operation once all lanes of `mask` have come: args[lane] is what the lane brought.
using WarpFunction = void (*)(void* const* args, std::uint32_t mask);

#ifdef TW_EMULATOR_CHECKED
struct AsyncCopy {
  char* destination;
  const char* source;
  std::uint32_t bytes;         // written to shared memory
  std::uint32_t source_bytes;  // read from global memory; the rest is zero
  std::uint32_t group;
  Site site;
};
#endif

struct Thread {
  void* sp = nullptr;
  Stack* stack = nullptr;
  Block* block = nullptr;
  uint3 index{};
  std::uint32_t linear = 0;
  std::uint32_t lane = 0;
  std::uint32_t warp = 0;
  State state = State::kUnstarted;
  Wait wait = Wait::kNone;
  const char* what = nullptr;  // the operation it waits in
  Site site;                   // and where
  std::uint32_t mask = 0;      // kWarp: the lanes that must come; kBarrier: the barrier's number
  WarpFunction function = nullptr;
  void* args = nullptr;
  int result = 0;  // of a barrier that reduces a predicate
#ifdef TW_EMULATOR_CHECKED
  ThreadClock clock;
  std::vector<AsyncCopy> copies;
  std::uint32_t open_group = 0;  // number of the cp.async group that is being filled
#endif
};

struct Barrier {
  std::uint32_t arrived = 0;
  std::uint32_t expected = 0;  // 0: every thread of the block
  std::uint32_t waiting[kWarpSize] = {};
  int count = 0;  // threads whose predicate was true
  Site first;     // where the first thread of this phase arrived, and which thread
  int first_thread = -1;
#ifdef TW_EMULATOR_CHECKED
  ClockJoin join;
#endif
};

struct StaticArray {
  const void* key;
  const char* name;
  std::size_t offset;  // in the window
  std::size_t bytes;
};

struct Block {
  Launch* launch = nullptr;
  Worker* worker = nullptr;
  uint3 index{};
  std::uint64_t order = 0;
  std::uint32_t count = 0;  // threads
  std::uint32_t live = 0;
  std::uint32_t runnable[kWarpSize] = {};  // a bit per lane; the running thread's is clear
  std::uint32_t runnable_warps = 0;
  Barrier barriers[kNamedBarriers];
  char* window = nullptr;
  std::size_t window_used = 0;
  std::vector<StaticArray> statics;
  std::size_t static_bytes = 0;
  std::uint64_t random = 0;
  std::uint64_t spins = 0;  // polls since the last progress
  std::vector<Thread> threads;
#ifdef TW_EMULATOR_CHECKED
  Shadow shadow;
#endif

  void make_runnable(const Thread& thread) {
    runnable[thread.warp] |= 1u << thread.lane;
    runnable_warps |= 1u << thread.warp;
  }
};

// The running thread. A plain thread-local pointer, because every threadIdx in device code reads it.
extern __thread Thread* here __attribute__((tls_model("initial-exec")));

// --- what device code calls ------------------------------------------------------------------------------------------

// The number of threads whose predicate was true.
int barrier_sync(unsigned id, unsigned threads, bool predicate, const char* what, Site site);
void barrier_arrive(unsigned id, unsigned threads, Site site);
void warp_sync(std::uint32_t mask, WarpFunction function, void* args, bool orders_memory, const char* what, Site site);
void grid_sync(Site site);

// Called where a thread polls: lets the others run, and ends the launch if nobody makes progress.
void poll(const char* what, Site site);
// Floating-point atomics on global memory wait for the blocks before theirs, so that sums do not depend on timing.
void order_atomic(const void* address);
// A relaxed atomic or volatile access to shared or global memory, told to the checker.
void note_atomic(const void* address, std::size_t bytes, bool writes, Site site);
void note_fence();

// `key` is the array's name, in storage of its own: its address tells arrays of the same name apart.
void* shared_array(const char* key, std::size_t bytes, std::size_t align, Site site);
void* dynamic_shared();
std::uint32_t shared_offset(const void* address);  // what __cvta_generic_to_shared gives
void* shared_address(std::uint32_t offset);
bool is_shared(const void* address);

// Accesses that a host model makes for a thread; checked against the shadow in the checked build, free otherwise.
void note_read(const Thread& thread, const void* address, std::size_t bytes, const char* what, Site site);
void note_write(const Thread& thread, const void* address, std::size_t bytes, const char* what, Site site);
void require_aligned(const void* address, std::size_t align, const char* what, Site site);
void require_shared(const void* address, std::size_t bytes, const char* what, Site site);

void async_copy(void* destination, const void* source, unsigned bytes, unsigned source_bytes, Site site);
void async_commit();
void async_wait(unsigned pending_groups);  // all groups but the newest `pending_groups` have landed afterwards
void async_wait_all();

// The thread that runs in the same warp on another lane.
Thread& lane_thread(unsigned lane);

// Ends the launch with a report about the running thread. Does not return to device code.
[[noreturn]] void fail(const char* kind, const std::string& message, const std::string& place, int other_thread = -1,
                       const std::string& other_place = {}, long long byte = -1);
std::string describe_thread(const Block& block, int linear);
// "byte 12 of dynamic shared memory"; the offset is the window's.
std::string describe_shared(const Block& block, std::size_t offset);
long long shared_byte(const Block& block, std::size_t offset);  // that 12

}  // namespace tw::emu
