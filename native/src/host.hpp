// The host as the kernel shows it to this process: CPUs, nodes, caches, pages. Nothing is timed here.
//
// In a guest every one of these may be invented (a 16 MiB LLC that is not there, one node for two).
// They choose defaults and are printed; what they are worth is for the measurements to say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "json.hpp"
#include "pu_set.hpp"

namespace homenode {

struct HostNode {
  int index;
  PuSet pus;
  std::uint64_t memory_bytes;
  std::uint64_t available_bytes;  // free, or file pages that the kernel can drop
};

struct HostLlc {
  std::uint64_t bytes;
  int level;
  PuSet pus;
};

struct Host {
  PuSet online;
  PuSet allowed;                // by affinity and cgroup
  std::vector<HostNode> nodes;  // empty where the kernel has no NUMA
  std::vector<HostLlc> llcs;    // empty where the kernel shows no caches
  std::vector<PuSet> siblings;  // one per core with more than one allowed CPU
  std::string thp_mode;         // always, madvise, never; "" where the kernel has none
  std::uint64_t page_bytes;
  std::optional<std::uint64_t> huge_page_bytes;
  std::uint64_t available_bytes;  // the smaller of MemAvailable and the cgroup's rest
  // As CPUID names it: KVMKVMKVM, TCGTCGTCGTCG, ...; nothing on bare metal and where it is not known.
  std::optional<std::string> hypervisor;

  std::optional<bool> emulated;  // instructions are translated (QEMU's TCG); nothing where none tells

  const HostNode* node(int index) const;
  std::optional<int> node_of(int pu) const;
  std::optional<PuSet> llc_of(int pu) const;
  std::uint64_t llc_bytes_of(const PuSet& pus) const;  // summed over the LLCs that the CPUs touch
};

Host read_host();
std::optional<std::string> read_line(const std::string& path);  // the first line; nothing if unreadable
std::uint64_t free_hugetlb_pages(std::optional<int> node, std::uint64_t page_bytes);
void write_host(Json& json, const Host& host);

}  // namespace homenode
