// One CUDA thread is one fiber: a stack of its own and a saved stack pointer. Switching saves the registers that the
// platform's calling convention asks a callee to keep, and nothing else, so that it costs a few nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tw::emu {

// Pushes the callee-saved registers, stores the stack pointer into *from, and continues where `to` was saved.
extern "C" void tw_fiber_switch(void** from, void* to);

// The stack pointer from which a first switch enters `entry` (which must never return) on the stack that ends at `top`.
void* fiber_prepare(char* top, void (*entry)());

struct Stack {
  char* bottom = nullptr;  // lowest usable address; an unmapped page lies below it
  char* top = nullptr;     // where execution starts
  std::size_t size = 0;    // top - bottom
};

// Stacks are mapped once and reused in last-in first-out order, so that the warm ones are used again.
class StackPool {
 public:
  explicit StackPool(std::size_t stack_bytes) : stack_bytes_(stack_bytes) {}
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  Stack* take();
  void give_back(Stack* stack) { free_.push_back(stack); }

 private:
  std::size_t stack_bytes_;
  std::vector<Stack*> all_;
  std::vector<Stack*> free_;
};

}  // namespace tw::emu
