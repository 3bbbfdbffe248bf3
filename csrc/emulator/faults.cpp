// Faults of device code become reports. The handler cannot switch stacks itself, so it makes the interrupted thread
// continue in fault_landing(), on a stack of its own, and the signal is over before anything else happens.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdlib>
#include <sstream>

#include "emulator/runtime.h"

namespace tw::emu {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGURG};
constexpr std::size_t kHandlerStack = 64 * 1024;
constexpr std::size_t kLandingStack = 512 * 1024;

struct sigaction previous[4];
__thread Worker* this_worker __attribute__((tls_model("initial-exec"))) = nullptr;

bool on_stack(const Stack* stack, std::uintptr_t address) {
  const auto bottom = reinterpret_cast<std::uintptr_t>(stack->bottom);
  return address < bottom && bottom - address <= 65536;
}

// The faulting line. A fault inside the emulator's own code is its caller's: the return addresses above it on the stack tell.
std::string faulting_place(const Worker& worker, const Thread& thread) {
  const std::string direct = resolve_address(worker.fault_pc + 1);
  if (direct.rfind("csrc/emulator/", 0) != 0 || thread.stack == nullptr) return direct;
  const auto bottom = reinterpret_cast<std::uintptr_t>(thread.stack->bottom);
  const auto top = bottom + thread.stack->size;
  std::uintptr_t at = worker.fault_sp > bottom ? worker.fault_sp & ~std::uintptr_t{7} : bottom;
  for (int words = 0; words < 64 && at + 8 <= top; ++words, at += 8) {
    const std::string place = resolve_address(*reinterpret_cast<const std::uintptr_t*>(at));
    if (place.rfind("csrc/", 0) == 0 || place.rfind("tests/", 0) == 0) {
      if (place.rfind("csrc/emulator/", 0) != 0) return place;
    }
  }
  return direct;
}

void fault_landing() {
  Worker& worker = *this_worker;
  const Thread& thread = *here;
  const std::string place = faulting_place(worker, thread);
  std::ostringstream address;
  address << "0x" << std::hex << worker.fault_address;
  if (worker.fault_signal == watchdog_signal()) {
    fail("infinite_spin", "the block made no progress until the watchdog's time was up", place);
  }
  if (worker.fault_signal == SIGFPE) fail("division_by_zero", "an integer was divided by zero", place);
  if (thread.stack != nullptr && on_stack(thread.stack, worker.fault_address)) {
    fail("stack_overflow", "the thread's local variables do not fit into its emulated stack", place);
  }
  fail("illegal_address",
       "access to address " + address.str() + ", which is not mapped" +
           (worker.fault_address == 0 ? " (or an access that is not aligned to its vector type)" : ""),
       place);
}

void handler(int signal, siginfo_t* info, void* raw) {
  Worker* worker = this_worker;
  const bool ours = worker != nullptr && here != nullptr;
  if (!ours || worker->fault_signal != 0) {
    if (signal == watchdog_signal()) return;
    for (int i = 0; i < 4; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
    }
    return;  // the instruction faults again, under the handler that was there before
  }
  auto* context = static_cast<ucontext_t*>(raw);
  const auto top = reinterpret_cast<std::uintptr_t>(worker->fault_stack) + kHandlerStack + kLandingStack;
  worker->fault_signal = signal;
  worker->fault_address = signal == watchdog_signal() ? 0 : reinterpret_cast<std::uintptr_t>(info->si_addr);
#if defined(__x86_64__)
  worker->fault_pc = static_cast<std::uintptr_t>(context->uc_mcontext.gregs[REG_RIP]);
  worker->fault_sp = static_cast<std::uintptr_t>(context->uc_mcontext.gregs[REG_RSP]);
  context->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(top - 8);
  context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&fault_landing);
#elif defined(__aarch64__)
  worker->fault_pc = context->uc_mcontext.pc;
  worker->fault_sp = context->uc_mcontext.sp;
  context->uc_mcontext.sp = top;
  context->uc_mcontext.pc = reinterpret_cast<std::uintptr_t>(&fault_landing);
#endif
}

}  // namespace

int watchdog_signal() { return SIGURG; }  // ignored by default, so a late one does no harm

FaultGuard::FaultGuard() {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
#if defined(__SANITIZE_ADDRESS__)
  constexpr int first = 3;  // AddressSanitizer reports the faults itself
#else
  constexpr int first = 0;
#endif
  for (int i = first; i < 4; ++i) sigaction(kSignals[i], &action, &previous[i]);
}

FaultGuard::~FaultGuard() {
#if defined(__SANITIZE_ADDRESS__)
  constexpr int first = 3;
#else
  constexpr int first = 0;
#endif
  for (int i = first; i < 4; ++i) sigaction(kSignals[i], &previous[i], nullptr);
}

void enter_worker_thread(Worker& worker) {
  if (worker.fault_stack == nullptr) {
    worker.fault_stack = static_cast<char*>(mmap(nullptr, kHandlerStack + kLandingStack, PROT_READ | PROT_WRITE,
                                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  stack_t stack = {};
  stack.ss_sp = worker.fault_stack;
  stack.ss_size = kHandlerStack;
  sigaltstack(&stack, nullptr);
  worker.fault_signal = 0;
  this_worker = &worker;
}

void leave_worker_thread(Worker&) {
  stack_t stack = {};
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
  this_worker = nullptr;
}

}  // namespace tw::emu
