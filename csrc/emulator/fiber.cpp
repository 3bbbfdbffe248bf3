#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace tw::emu {

namespace {

// A fiber ends without returning from its frames, whose guards would be found by the next one on the stack.
void unpoison([[maybe_unused]] const Stack& stack) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack.bottom, stack.size);
#endif
}

}  // namespace

#if defined(__x86_64__)

// System V ABI: rbx, rbp and r12 to r15 belong to the caller. MXCSR is never changed by device code.
asm(R"(
.text
.p2align 4
.globl tw_fiber_switch
.hidden tw_fiber_switch
.type tw_fiber_switch, @function
tw_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size tw_fiber_switch, .-tw_fiber_switch
)");

void* fiber_prepare(char* top, void (*entry)()) {
  // A function expects rsp + 8 to be a multiple of 16 on entry: the null word above stands for its return address, which
  // also ends a debugger's walk of the stack.
  auto* sp = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{15});
  *--sp = 0;
  *--sp = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--sp = 0;
  return sp;
}

#elif defined(__aarch64__)

// AAPCS64: x19 to x30 and the low halves of v8 to v15 belong to the caller.
asm(R"(
.text
.p2align 4
.globl tw_fiber_switch
.hidden tw_fiber_switch
.type tw_fiber_switch, %function
tw_fiber_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size tw_fiber_switch, .-tw_fiber_switch
)");

void* fiber_prepare(char* top, void (*entry)()) {
  auto* sp = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{15}) - 20;
  for (int i = 0; i < 20; ++i) sp[i] = 0;
  sp[11] = reinterpret_cast<std::uintptr_t>(entry);
  return sp;
}

#else
#error "the emulator has no context switch for this processor: write tw_fiber_switch and fiber_prepare for it"
#endif

StackPool::~StackPool() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (Stack* stack : all_) {
    munmap(stack->bottom - page, stack_bytes_ + page);
    delete stack;
  }
}

Stack* StackPool::take() {
  if (!free_.empty()) {
    Stack* stack = free_.back();
    free_.pop_back();
    unpoison(*stack);
    return stack;
  }
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* mapped = mmap(nullptr, stack_bytes_ + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* stack = new Stack;
  all_.push_back(stack);
  stack->bottom = static_cast<char*>(mapped) + page;
  mprotect(mapped, page, PROT_NONE);
  // Tops at the same offset in a page would all fall into the same cache sets: 32 lanes that switch in turn would evict
  // each other. Each stack starts a few cache lines lower than the one before.
  const std::size_t colour = (all_.size() % 61) * 192;
  stack->top = stack->bottom + stack_bytes_ - colour;
  stack->size = static_cast<std::size_t>(stack->top - stack->bottom);
  return stack;
}

}  // namespace tw::emu
