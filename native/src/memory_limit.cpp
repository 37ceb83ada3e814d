// Memory limits of cgroups, version 2 and 1. Nothing is timed here.
#include "memory_limit.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>

namespace homenode {
namespace {

constexpr std::size_t most_levels = 64;

struct Files {
  const char* limit;
  const char* used;
  const char* file_pages[2];  // fields of memory.stat, in bytes
};

constexpr Files versions[] = {
    {"memory.max", "memory.current", {"inactive_file", "active_file"}},
    {"memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}}};

std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;  // "max"
  return value;
}

std::uint64_t file_bytes(const std::string& directory, const Files& files) {
  std::ifstream stat(directory + "/memory.stat");
  std::string line;
  std::uint64_t bytes = 0;
  while (std::getline(stat, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (!(words >> name >> value)) continue;
    if (name == files.file_pages[0] || name == files.file_pages[1]) bytes += value;
  }
  return bytes;
}

bool names_memory(std::string_view controllers) {
  while (!controllers.empty()) {
    const auto comma = controllers.find(',');
    if (controllers.substr(0, comma) == "memory") return true;
    controllers.remove_prefix(comma == std::string_view::npos ? controllers.size() : comma + 1);
  }
  return false;
}

}  // namespace

std::vector<std::string> limit_directories(const std::string& text, const std::string& mounts) {
  std::vector<std::string> directories;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (!controllers.empty() && !names_memory(controllers)) continue;
    if (path.find("/..") != std::string::npos || path.empty() || path[0] != '/') path.clear();
    const std::string mount = mounts + (controllers.empty() ? "" : "/memory");
    for (std::size_t level = 0; level < most_levels; ++level) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      directories.push_back(mount + path);
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return directories;
}

std::optional<std::uint64_t> limit_left(const std::vector<std::string>& directories) {
  std::optional<std::uint64_t> least;
  for (const auto& directory : directories) {
    for (const auto& files : versions) {
      const auto limit = number_in(directory + "/" + files.limit);
      const auto used = number_in(directory + "/" + files.used);
      if (!limit || !used) continue;
      const std::uint64_t kept = *used - std::min(*used, file_bytes(directory, files));
      const std::uint64_t left = *limit - std::min(*limit, kept);
      least = std::min(least.value_or(left), left);
    }
  }
  return least;
}

}  // namespace homenode
