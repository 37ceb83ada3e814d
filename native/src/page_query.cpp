// Questions to the kernel about pages: raw system calls, so that no libnuma is needed. Nothing is timed.
#include "page_query.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

namespace homenode {
namespace {

constexpr int mpol_bind = 2;  // linux/mempolicy.h
constexpr std::size_t bits_per_word = 8 * sizeof(unsigned long);

std::optional<std::uint64_t> parse_hex(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

std::uint64_t address_of(const std::byte* data) { return reinterpret_cast<std::uint64_t>(data); }

}  // namespace

PageNodes query_move_pages(const std::byte* data, std::size_t bytes, std::size_t page_bytes,
                           std::size_t most) {
  const std::size_t pages = bytes / page_bytes;
  const std::size_t count = std::min(pages, most);
  std::vector<const void*> addresses(count);
  for (std::size_t i = 0; i < count; ++i) {
    // In two factors: pages times count does not fit 64 bits only beyond any memory.
    addresses[i] = data + (i * pages / count) * page_bytes;
  }
  std::vector<int> status(count, -ENODATA);
  PageNodes nodes;
  if (syscall(SYS_move_pages, 0, count, addresses.data(), nullptr, status.data(), 0) < 0) {
    nodes.unknown = count;
    nodes.error = std::string("move_pages: ") + std::strerror(errno);
    return nodes;
  }
  for (const int node : status) {
    if (node >= 0) {
      ++nodes.pages_of_node[node];
    } else {
      ++nodes.unknown;
      nodes.error = std::string("move_pages: a page: ") + std::strerror(-node);
    }
  }
  return nodes;
}

PageNodes parse_numa_maps_line(const std::string& line) {
  PageNodes nodes;
  std::istringstream words(line);
  std::string word;
  while (words >> word) {
    if (word.size() < 4 || word[0] != 'N' || word[1] < '0' || word[1] > '9') continue;
    const auto equals = word.find('=');
    if (equals == std::string::npos) continue;
    int node = 0;
    std::uint64_t pages = 0;
    const char* const text = word.data();
    const auto [node_end, node_error] = std::from_chars(text + 1, text + equals, node);
    const auto [end, error] = std::from_chars(text + equals + 1, text + word.size(), pages);
    const bool whole = node_end == text + equals && end == text + word.size();
    if (node_error == std::errc{} && error == std::errc{} && whole) nodes.pages_of_node[node] += pages;
  }
  if (nodes.pages_of_node.empty()) nodes.error = "numa_maps: no page counts";
  return nodes;
}

std::optional<PageNodes> query_numa_maps(const std::byte* data) {
  std::ifstream file("/proc/self/numa_maps");
  std::string line;
  while (std::getline(file, line)) {
    // Lines name the start of a mapping only; ours start at `data`, between two guards.
    if (parse_hex(line.substr(0, line.find(' '))) == address_of(data)) return parse_numa_maps_line(line);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> query_huge_bytes(const std::byte* data, std::size_t bytes) {
  std::ifstream file("/proc/self/smaps");
  std::string line;
  bool inside = false;
  bool found = false;
  std::uint64_t size_kib = 0;
  std::uint64_t huge_kib = 0;
  while (std::getline(file, line)) {
    const auto dash = line.find('-');
    const auto colon = line.find(": ");
    if (dash != std::string::npos && (colon == std::string::npos || dash < colon)) {
      if (const auto start = parse_hex(line.substr(0, dash))) {
        inside = *start >= address_of(data) && *start < address_of(data) + bytes;
        found = found || inside;
        continue;
      }
    }
    if (!inside) continue;
    std::istringstream words(line);
    std::string name;
    std::uint64_t kib = 0;
    if (!(words >> name >> kib)) continue;
    if (name == "Size:") size_kib = kib;
    if (name == "AnonHugePages:") huge_kib += kib;
    if (name == "KernelPageSize:" && kib >= 1024) huge_kib += size_kib;  // hugetlb counts apart
  }
  if (!found) return std::nullopt;
  return huge_kib * 1024;
}

std::optional<std::string> bind_to_node(std::byte* data, std::size_t bytes, int node) {
  const auto bit = static_cast<std::size_t>(node);
  std::vector<unsigned long> mask(bit / bits_per_word + 1, 0UL);
  mask[bit / bits_per_word] |= 1UL << (bit % bits_per_word);
  // The kernel takes one bit less than it is told: an old quirk that libnuma allows for as well.
  const unsigned long max_node = mask.size() * bits_per_word + 1;
  if (syscall(SYS_mbind, data, bytes, mpol_bind, mask.data(), max_node, 0U) == 0) return std::nullopt;
  return std::string("mbind: ") + std::strerror(errno);
}

}  // namespace homenode
