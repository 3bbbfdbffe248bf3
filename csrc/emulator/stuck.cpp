// What to say when no thread can go on.
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "emulator/runtime.h"

namespace tw::emu {

namespace {

std::string describe_wait(const Thread& thread) {
  std::ostringstream text;
  if (thread.state == State::kExited) return "have returned from the kernel";
  if (thread.state == State::kUnstarted || thread.wait == Wait::kNone) return "could run";
  text << "wait in " << thread.what << " at " << resolve_site(thread.site);
  if (thread.wait == Wait::kWarp) text << " for the lanes of mask 0x" << std::hex << thread.mask;
  return text.str();
}

std::string ranges(const std::vector<std::uint32_t>& threads) {
  std::string text;
  for (std::size_t i = 0; i < threads.size();) {
    std::size_t j = i;
    while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) ++j;
    text += (text.empty() ? "" : ",") + std::to_string(threads[i]);
    if (j > i) text += "-" + std::to_string(threads[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace

// Nobody in the group can run: say who waits where, and call it by the most telling name.
[[noreturn]] void report_stuck(Worker& worker) {
  const char* kind = "deadlock";
  Block* stuck = nullptr;
  for (std::size_t i = 0; i < worker.group_size && stuck == nullptr; ++i) {
    if (worker.group[i]->live != 0) stuck = worker.group[i].get();
  }
  Thread* waiting = nullptr;
  for (Thread& thread : stuck->threads) {
    if (thread.linear >= stuck->count || thread.state == State::kExited) continue;
    const bool block_wide = thread.wait == Wait::kBarrier && stuck->barriers[thread.mask].expected == 0;
    if (block_wide || waiting == nullptr) waiting = &thread;
    if (block_wide) {
      kind = "divergent_barrier";
      break;
    }
    if (thread.wait == Wait::kWarp) kind = "divergent_warp";
  }
  std::map<std::string, std::vector<std::uint32_t>> groups;
  std::map<std::string, std::string> described;  // place lookups are cached by the wait's own key
  int other = -1;
  std::string other_place;
  for (const Thread& thread : stuck->threads) {
    if (thread.linear >= stuck->count) continue;
    const std::string key = std::to_string(static_cast<int>(thread.state)) + "/" + std::to_string(thread.site.line) + "/" +
                            (thread.site.file ? thread.site.file : "") + "/" + std::to_string(thread.mask);
    auto found = described.find(thread.state == State::kExited ? "exited" : key);
    if (found == described.end()) {
      found = described.emplace(thread.state == State::kExited ? "exited" : key, describe_wait(thread)).first;
    }
    groups[found->second].push_back(thread.linear);
    if (other < 0 && (thread.state == State::kExited || thread.site.line != waiting->site.line ||
                      thread.wait != waiting->wait)) {
      other = static_cast<int>(thread.linear);
      other_place = thread.state == State::kExited ? "returned from the kernel" : resolve_site(thread.site);
    }
  }
  std::string text = "no thread can go on:";
  for (const auto& [wait, threads] : groups) text += "\n  threads " + ranges(threads) + " " + wait;
  if (waiting->wait == Wait::kBarrier) {
    const Barrier& barrier = stuck->barriers[waiting->mask];
    text += "\n  barrier " + std::to_string(waiting->mask) + " has " + std::to_string(barrier.arrived) + " of " +
            std::to_string(barrier.expected != 0 ? barrier.expected : stuck->count) + " arrivals";
  }
  here = waiting;
  fail(kind, text, resolve_site(waiting->site), other, other_place);
}

}  // namespace tw::emu
