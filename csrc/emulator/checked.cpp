// The checked build: where the compiler's instrumentation and the host models meet the shadow.
//
// Kernels are compiled with -fsanitize=thread and -fsanitize=alignment,bounds, but against these functions instead of the
// sanitizers' libraries: each load and store of device code arrives here with its return address, which is the place in the
// source. Device code stays ordinary CUDA C++.
#ifdef TW_EMULATOR_CHECKED

#include <link.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "emulator/launch.h"
#include "emulator/machine.h"
#include "emulator/runtime.h"

namespace tw::emu {

namespace {

struct Segment {
  std::uintptr_t begin;
  std::uintptr_t end;
};

// Constants and tables of this module: global memory that no buffer stands for.
const std::vector<Segment>& own_segments() {
  static const std::vector<Segment> segments = [] {
    std::vector<Segment> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* out) {
          std::vector<Segment> all;
          bool ours = false;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_LOAD) continue;
            const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
            all.push_back(Segment{begin, begin + header.p_memsz});
            const auto probe = reinterpret_cast<std::uintptr_t>(&own_segments);
            ours = ours || (probe >= begin && probe < begin + header.p_memsz);
          }
          if (ours) *static_cast<std::vector<Segment>*>(out) = all;
          return ours ? 1 : 0;
        },
        &found);
    return found;
  }();
  return segments;
}

void check_global(Thread& thread, std::uintptr_t address, std::size_t bytes, bool writes, Where where) {
  const auto bottom = reinterpret_cast<std::uintptr_t>(thread.stack->bottom);
  if (address - bottom < thread.stack->size + 16384) return;
  // threadIdx and its like are members of the thread and its block, found through `here`.
  if (address == reinterpret_cast<std::uintptr_t>(&here)) return;
  const Block& block = *thread.block;
  if (address - reinterpret_cast<std::uintptr_t>(&block) < sizeof(Block)) return;
  if (address - reinterpret_cast<std::uintptr_t>(block.threads.data()) < block.threads.size() * sizeof(Thread)) return;
  if (address < 65536) return;  // a null pointer: the fault will say so
  const Buffer* nearest = nullptr;
  std::uintptr_t distance = ~std::uintptr_t{0};
  for (const Buffer& buffer : buffers()) {
    if (address >= buffer.begin && address + bytes <= buffer.end) {
      if (!writes || buffer.writable) return;
      fail("out_of_bounds_global", "write to '" + buffer.name + "', which the kernel may only read, at byte " +
                                       std::to_string(address - buffer.begin),
           resolve(where));
    }
    const std::uintptr_t away = address < buffer.begin ? buffer.begin - address : address + bytes - buffer.end;
    if (away < distance) {
      distance = away;
      nearest = &buffer;
    }
  }
  for (const Segment& segment : own_segments()) {
    if (!writes && address >= segment.begin && address + bytes <= segment.end) return;
  }
  std::ostringstream text;
  text << (writes ? "write" : "read") << " of " << bytes << " bytes ";
  if (address < nearest->begin) {
    text << distance << " bytes before the start of '" << nearest->name << "'";
  } else {
    text << "that ends " << distance << " bytes behind the end of '" << nearest->name << "' (" << nearest->end - nearest->begin
         << " bytes long)";
  }
  fail("out_of_bounds_global", text.str(), resolve(where));
}

inline void trace(const void* address, std::size_t bytes, Access kind, void* pc) {
  Thread* thread = here;
  if (thread == nullptr) return;  // the module's own initialisation
  Block& block = *thread->block;
  const auto offset = reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(block.window);
  if (offset < kWindowBytes) {
    block.shadow.access(*thread, offset, bytes, kind, where_of(reinterpret_cast<std::uintptr_t>(pc)));
  } else if (!buffers().empty()) {
    check_global(*thread, reinterpret_cast<std::uintptr_t>(address), bytes, kind != Access::kRead,
                 where_of(reinterpret_cast<std::uintptr_t>(pc)));
  }
}

void trace_volatile(const void* address, std::size_t bytes, bool writes, void* pc) {
  Thread* thread = here;
  if (thread == nullptr) return;
  // A volatile load is how threads poll; a volatile access does not race with another one or with an atomic.
  if (!writes) poll("a volatile load", Site{});
  if (is_shared(address)) {
    const std::size_t offset = shared_offset(address);
    thread->block->shadow.access(*thread, offset, bytes, Access::kAtomic, where_of(reinterpret_cast<std::uintptr_t>(pc)));
  } else {
    trace(address, bytes, writes ? Access::kWrite : Access::kRead, pc);
  }
  thread->block->shadow.publish(*thread, address, writes);
}

void land(Thread& thread, const AsyncCopy& copy) {
  if (copy.source_bytes != 0) std::memcpy(copy.destination, copy.source, copy.source_bytes);
  std::memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
  thread.block->shadow.copy_lands(thread, shared_offset(copy.destination), copy.bytes, where_of(copy.site));
}

}  // namespace

void note_read(const Thread& thread, const void* address, std::size_t bytes, const char*, Site site) {
  thread.block->shadow.access(const_cast<Thread&>(thread), shared_offset(address), bytes, Access::kRead, where_of(site));
}

void note_write(const Thread& thread, const void* address, std::size_t bytes, const char*, Site site) {
  thread.block->shadow.access(const_cast<Thread&>(thread), shared_offset(address), bytes, Access::kWrite, where_of(site));
}

void note_atomic(const void* address, std::size_t bytes, bool writes, Site site) {
  Thread& thread = *here;
  if (is_shared(address)) {
    thread.block->shadow.access(thread, shared_offset(address), bytes, Access::kAtomic, where_of(site));
  } else if (!buffers().empty()) {
    check_global(thread, reinterpret_cast<std::uintptr_t>(address), bytes, writes, where_of(site));
  }
  thread.block->shadow.publish(thread, address, writes);
}

void note_fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  here->block->shadow.fence(*here, here->block->count);
}

void async_copy(void* destination, const void* source, unsigned bytes, unsigned source_bytes, Site site) {
  Thread& thread = *here;
  require_aligned(destination, bytes, "cp.async's destination", site);
  if (source_bytes != 0) require_aligned(source, bytes, "cp.async's source", site);
  require_shared(destination, bytes, "cp.async's destination", site);
  if (source_bytes != 0 && !buffers().empty()) {
    check_global(thread, reinterpret_cast<std::uintptr_t>(source), source_bytes, false, where_of(site));
  }
  thread.block->shadow.copy_begins(thread, shared_offset(destination), bytes, where_of(site));
  std::memset(destination, 0xFF, bytes);
  thread.copies.push_back(AsyncCopy{static_cast<char*>(destination), static_cast<const char*>(source), bytes, source_bytes,
                                    thread.open_group, site});
}

void async_commit() { ++here->open_group; }

void async_wait(unsigned pending_groups) {
  Thread& thread = *here;
  const auto covered = [&](const AsyncCopy& copy) { return copy.group + pending_groups < thread.open_group; };
  for (const AsyncCopy& copy : thread.copies) {
    if (covered(copy)) land(thread, copy);
  }
  thread.copies.erase(std::remove_if(thread.copies.begin(), thread.copies.end(), covered), thread.copies.end());
}

void async_wait_all() {
  for (const AsyncCopy& copy : here->copies) land(*here, copy);
  here->copies.clear();
}

// What UBSan's instrumentation passes.
struct SourceLocation {
  const char* file;
  std::uint32_t line;
  std::uint32_t column;
};
struct TypeDescriptor {
  std::uint16_t kind;
  std::uint16_t info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char check;
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

void misaligned(const TypeMismatch& data, std::uintptr_t address, void* pc) {
  if (here == nullptr) return;
  const bool shared = is_shared(reinterpret_cast<void*>(address));
  const Block& block = *here->block;
  std::ostringstream text;
  text << "access to type " << data.type->name << " needs an address that is a multiple of " << (1u << data.log_alignment) << ", got ";
  if (shared) {
    text << describe_shared(block, shared_offset(reinterpret_cast<void*>(address)));
  } else {
    text << "0x" << std::hex << address;
  }
  fail("misaligned", text.str(), resolve_address(reinterpret_cast<std::uintptr_t>(pc)), -1, {},
       shared ? shared_byte(block, shared_offset(reinterpret_cast<void*>(address))) : -1);
}

}  // namespace tw::emu

using tw::emu::Access;

#define TW_HOOK extern "C" __attribute__((visibility("hidden"), used)) void
#define TW_HOOKS(n)                                                                                                       \
  TW_HOOK __tsan_read##n(void* a) { tw::emu::trace(a, n, Access::kRead, __builtin_return_address(0)); }                   \
  TW_HOOK __tsan_write##n(void* a) { tw::emu::trace(a, n, Access::kWrite, __builtin_return_address(0)); }                 \
  TW_HOOK __tsan_unaligned_read##n(void* a) { tw::emu::trace(a, n, Access::kRead, __builtin_return_address(0)); }         \
  TW_HOOK __tsan_unaligned_write##n(void* a) { tw::emu::trace(a, n, Access::kWrite, __builtin_return_address(0)); }       \
  TW_HOOK __tsan_volatile_read##n(void* a) { tw::emu::trace_volatile(a, n, false, __builtin_return_address(0)); }         \
  TW_HOOK __tsan_volatile_write##n(void* a) { tw::emu::trace_volatile(a, n, true, __builtin_return_address(0)); }         \
  TW_HOOK __tsan_unaligned_volatile_read##n(void* a) { tw::emu::trace_volatile(a, n, false, __builtin_return_address(0)); } \
  TW_HOOK __tsan_unaligned_volatile_write##n(void* a) { tw::emu::trace_volatile(a, n, true, __builtin_return_address(0)); }
TW_HOOKS(1)
TW_HOOKS(2)
TW_HOOKS(4)
TW_HOOKS(8)
TW_HOOKS(16)
TW_HOOK __tsan_read_range(void* a, std::size_t n) { tw::emu::trace(a, n, Access::kRead, __builtin_return_address(0)); }
TW_HOOK __tsan_write_range(void* a, std::size_t n) { tw::emu::trace(a, n, Access::kWrite, __builtin_return_address(0)); }
TW_HOOK __tsan_init() {}
// The guard of a function-local static, in the registry.
extern "C" __attribute__((visibility("hidden"), used)) std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t* a, int) {
  return __atomic_load_n(a, __ATOMIC_ACQUIRE);
}
TW_HOOK __ubsan_handle_type_mismatch_v1(const tw::emu::TypeMismatch* data, std::uintptr_t address) {
  tw::emu::misaligned(*data, address, __builtin_return_address(0));
}
TW_HOOK __ubsan_handle_out_of_bounds(const tw::emu::OutOfBounds* data, std::uintptr_t index) {
  if (tw::emu::here == nullptr) return;
  tw::emu::fail("out_of_bounds_array", "index " + std::to_string(static_cast<long long>(index)) + " into " + data->array->name,
                tw::emu::resolve_address(reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))));
}

#endif
