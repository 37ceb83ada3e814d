// The host as the kernel shows it to this process. Nothing is timed here.
#include "host.hpp"

#include <sched.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "emulation.hpp"
#include "memory_limit.hpp"

namespace homenode {
namespace {

const std::string cpu_directory = "/sys/devices/system/cpu/";
const std::string node_directory = "/sys/devices/system/node/";
constexpr int max_cache_indices = 16;

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

PuSet read_pus(const std::string& path) {
  const auto line = read_line(path);
  return line ? PuSet::parse(*line).value_or(PuSet{}) : PuSet{};
}

PuSet read_allowed(const PuSet& online) {
  // The kernel wants a mask as wide as its own; 8192 CPUs is the widest that it can be built with.
  constexpr int widest = 8192;
  cpu_set_t* mask = CPU_ALLOC(widest);
  if (mask == nullptr) return online;
  const std::size_t bytes = CPU_ALLOC_SIZE(widest);
  CPU_ZERO_S(bytes, mask);
  std::vector<int> allowed;
  if (sched_getaffinity(0, bytes, mask) == 0) {
    for (int pu = 0; pu < widest; ++pu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(pu), bytes, mask)) allowed.push_back(pu);
    }
  }
  CPU_FREE(mask);
  return PuSet(std::move(allowed));
}

// "Node 0 MemTotal:  4679680 kB" and "MemAvailable:  24222944 kB" alike.
std::uint64_t meminfo_bytes(const std::string& path, const std::string& field) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const auto at = line.find(field + ":");
    if (at == std::string::npos) continue;
    const auto digits = line.find_first_of("0123456789", at);
    if (digits == std::string::npos) return 0;
    return parse_number(std::string_view(line).substr(digits)).value_or(0) * 1024;
  }
  return 0;
}

std::vector<HostNode> read_nodes() {
  std::vector<HostNode> nodes;
  const PuSet online = read_pus(node_directory + "online");  // the same list form as CPUs
  for (const int index : online.indices()) {
    const std::string directory = node_directory + "node" + std::to_string(index) + "/";
    const std::string meminfo = directory + "meminfo";
    nodes.push_back({index, read_pus(directory + "cpulist"), meminfo_bytes(meminfo, "MemTotal"),
                     meminfo_bytes(meminfo, "MemFree") + meminfo_bytes(meminfo, "Active(file)") +
                         meminfo_bytes(meminfo, "Inactive(file)")});
  }
  return nodes;
}

std::uint64_t cache_bytes(const std::string& text) {
  const auto value = parse_number(text).value_or(0);
  if (text.find('K') != std::string::npos) return value << 10U;
  if (text.find('M') != std::string::npos) return value << 20U;
  return value;
}

std::vector<HostLlc> read_llcs(const PuSet& online) {
  std::map<std::vector<int>, HostLlc> by_pus;
  for (const int pu : online.indices()) {
    std::optional<HostLlc> last;
    for (int index = 0; index < max_cache_indices; ++index) {
      const std::string directory = cpu_directory + "cpu" + std::to_string(pu) + "/cache/index" +
                                 std::to_string(index) + "/";
      const auto level_text = read_line(directory + "level");
      if (!level_text) break;
      const int level = static_cast<int>(parse_number(*level_text).value_or(0));
      if (read_line(directory + "type").value_or("") == "Instruction") continue;
      if (last && last->level >= level) continue;
      // Grouped by shared_cpu_list, never by id: some hypervisors number each CPU's LLC apart.
      last = HostLlc{cache_bytes(read_line(directory + "size").value_or("")), level,
                     read_pus(directory + "shared_cpu_list")};
    }
    if (last && last->bytes > 0 && !last->pus.empty()) {
      by_pus.emplace(last->pus.indices(), *last);
    }
  }
  std::vector<HostLlc> llcs;
  for (const auto& [pus, llc] : by_pus) llcs.push_back(llc);
  return llcs;
}

std::vector<PuSet> read_siblings(const PuSet& allowed) {
  std::vector<PuSet> cores;
  for (const int pu : allowed.indices()) {
    const PuSet core = read_pus(cpu_directory + "cpu" + std::to_string(pu) +
                                "/topology/thread_siblings_list")
                           .intersection(allowed);
    if (core.size() > 1 && std::ranges::find(cores, core) == cores.end()) cores.push_back(core);
  }
  return cores;
}

std::string read_thp_mode() {
  const auto line = read_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (!line) return "";
  const auto open = line->find('[');
  const auto close = line->find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return line->substr(open + 1, close - open - 1);
}

std::uint64_t read_available_bytes() {
  const std::uint64_t available = meminfo_bytes("/proc/meminfo", "MemAvailable");
  std::ifstream file("/proc/self/cgroup");
  std::stringstream text;
  text << file.rdbuf();
  // In a container the limit stands at the mount, whatever the path in front of it says.
  auto directories = limit_directories(text.str(), "/sys/fs/cgroup");
  directories.insert(directories.end(), {"/sys/fs/cgroup", "/sys/fs/cgroup/memory"});
  return std::min(available, limit_left(directories).value_or(available));
}

std::optional<std::string> read_hypervisor() {
#if defined(__x86_64__)
  constexpr unsigned present_bit = 31;  // of leaf 1's ECX; then leaf 0x40000000 holds twelve letters
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx >> present_bit & 1U) == 0) return std::nullopt;
  __cpuid(0x40000000U, eax, ebx, ecx, edx);
  std::string name;
  for (const unsigned word : {ebx, ecx, edx}) {
    for (unsigned byte = 0; byte < 4; ++byte) {
      const auto letter = static_cast<char>(word >> (8 * byte) & 0xffU);
      if (letter != '\0') name += letter;
    }
  }
  return name;
#else
  return std::nullopt;  // aarch64 names none to user space
#endif
}

}  // namespace

std::optional<std::string> read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::uint64_t free_hugetlb_pages(std::optional<int> node, std::uint64_t page_bytes) {
  const std::string size = "hugepages-" + std::to_string(page_bytes >> 10U) + "kB/";
  const std::string directory =
      node ? node_directory + "node" + std::to_string(*node) + "/hugepages/" : "/sys/kernel/mm/hugepages/";
  const auto line = read_line(directory + size + "free_hugepages");
  return line ? parse_number(*line).value_or(0) : 0;
}

const HostNode* Host::node(int index) const {
  const auto found = std::ranges::find(nodes, index, &HostNode::index);
  return found == nodes.end() ? nullptr : &*found;
}

std::optional<int> Host::node_of(int pu) const {
  const auto found = std::ranges::find_if(nodes, [pu](const auto& n) { return n.pus.contains(pu); });
  if (found == nodes.end()) return std::nullopt;
  return found->index;
}

std::optional<PuSet> Host::llc_of(int pu) const {
  const auto found = std::ranges::find_if(llcs, [pu](const auto& l) { return l.pus.contains(pu); });
  if (found == llcs.end()) return std::nullopt;
  return found->pus;
}

std::uint64_t Host::llc_bytes_of(const PuSet& pus) const {
  std::uint64_t bytes = 0;
  for (const auto& llc : llcs) {
    if (!llc.pus.intersection(pus).empty()) bytes += llc.bytes;
  }
  return bytes;
}

Host read_host() {
  Host host{};
  host.online = read_pus(cpu_directory + "online");
  host.allowed = read_allowed(host.online);
  if (host.online.empty()) host.online = host.allowed;  // no /sys in this container
  host.nodes = read_nodes();
  host.llcs = read_llcs(host.online);
  host.siblings = read_siblings(host.allowed);
  host.thp_mode = read_thp_mode();
  host.page_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const auto huge = read_line("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  if (huge) host.huge_page_bytes = parse_number(*huge);
  host.available_bytes = read_available_bytes();
  host.hypervisor = read_hypervisor();
  host.emulated = emulated_by(read_emulation_evidence(host.hypervisor));
  return host;
}

void write_host(Json& json, const Host& host) {
  json.field("online_pus", host.online.text()).field("allowed_pus", host.allowed.text());
  json.array("nodes");
  for (const auto& node : host.nodes) {
    json.object().field("node", node.index).field("pus", node.pus.text());
    json.field("memory_bytes", node.memory_bytes).field("available_bytes", node.available_bytes).end();
  }
  json.end().array("llcs_reported");
  for (const auto& llc : host.llcs) {
    json.object().field("pus", llc.pus.text()).field("level", llc.level).field("bytes", llc.bytes).end();
  }
  json.end();
  json.field("page_bytes", host.page_bytes).field("huge_page_bytes", host.huge_page_bytes);
  json.field("transparent_huge_pages", host.thp_mode).field("available_bytes", host.available_bytes);
  json.field("hypervisor", host.hypervisor).field("emulated", host.emulated);
}

}  // namespace homenode
