#include "cpu/runtime/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace tw {
namespace {

int allowed_cores() {
  // The mask is as wide as the kernel's: with more cores than the usual 1024 a smaller one is refused.
  for (int width = CPU_SETSIZE; width <= 1 << 20; width *= 2) {
    cpu_set_t* mask = CPU_ALLOC(width);
    if (mask == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(width);
    const bool known = sched_getaffinity(0, bytes, mask) == 0;
    const int count = known ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (known) return count;
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// The quota of the control group over its period, in cores; no limit where there is no quota.
double quota_in_cores() {
  double quota = -1, period = -1;
  std::string first;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> first >> period) {
    if (first == "max") return INFINITY;
    quota = std::strtod(first.c_str(), nullptr);
  } else {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : INFINITY;
}

}  // namespace

int usable_cores() {
  const int allowed = allowed_cores();
  return std::max(1, static_cast<int>(std::min<double>(allowed, std::ceil(quota_in_cores()))));
}

}  // namespace tw
