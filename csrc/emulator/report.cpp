#include "emulator/report.h"

#include <dlfcn.h>

#include <cstdio>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace tw::emu {

namespace {

// Paths in reports start at the repository's own folder names, so that they are short and the same on every machine.
std::string shorten(const std::string& path) {
  for (const char* root : {"/csrc/", "/tests/"}) {
    const auto at = path.rfind(root);
    if (at != std::string::npos) return path.substr(at + 1);
  }
  return path;
}

std::string look_up(std::uintptr_t pc) {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(pc), &info) == 0 || info.dli_fname == nullptr) return "an unknown place";
  // A return address lies behind its call: one byte back is inside it.
  const auto offset = pc - reinterpret_cast<std::uintptr_t>(info.dli_fbase) - 1;
  std::ostringstream command;
  command << "addr2line -i -e '" << info.dli_fname << "' 0x" << std::hex << offset << " 2>/dev/null";
  std::vector<std::string> chain;
  if (FILE* pipe = popen(command.str().c_str(), "r")) {
    char line[1024];
    while (std::fgets(line, sizeof line, pipe) != nullptr) {
      std::string text(line);
      text = text.substr(0, text.find_first_of(" \n"));
      if (!text.empty() && text[0] != '?') chain.push_back(shorten(text));
    }
    pclose(pipe);
  }
  if (chain.empty()) {
    std::ostringstream raw;
    raw << info.dli_fname << "+0x" << std::hex << offset << " (addr2line of binutils would name the line)";
    return raw.str();
  }
  // Loads through the emulator's own headers (__ldg) are the caller's.
  std::size_t first = 0;
  while (first + 1 < chain.size() && chain[first].rfind("csrc/emulator/", 0) == 0) ++first;
  std::string text = chain[first];
  for (std::size_t i = first + 1; i < chain.size(); ++i) text += " < " + chain[i];
  return text;
}

}  // namespace

std::string resolve_address(std::uintptr_t pc) {
  static std::mutex mutex;
  static std::unordered_map<std::uintptr_t, std::string> known;  // a lookup starts a process
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(pc);
  if (found == known.end()) found = known.emplace(pc, look_up(pc)).first;
  return found->second;
}

std::string resolve_site(const Site& site) {
  if (site.file == nullptr) return "an unknown place";
  return shorten(site.file) + ":" + std::to_string(site.line);
}

}  // namespace tw::emu
