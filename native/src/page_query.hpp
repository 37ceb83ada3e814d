// Questions to the kernel about pages: their node and their size. Nothing is timed here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace homenode {

// Node of each sampled page. `error` is empty if every sampled page was answered for.
struct PageNodes {
  std::map<int, std::uint64_t> pages_of_node;
  std::uint64_t unknown = 0;  // not present, or not answered
  std::string error;
};

// Asks move_pages about every page, or about `most` spread evenly; moves nothing.
PageNodes query_move_pages(const std::byte* data, std::size_t bytes, std::size_t page_bytes,
                           std::size_t most = 4096);

// The counts of the mapping at `data` in /proc/self/numa_maps: needs no privilege, where a container's
// seccomp filter forbids move_pages. Nothing if the file or the mapping is not there.
std::optional<PageNodes> query_numa_maps(const std::byte* data);
// The same from one line of that file, "7f... bind:1 anon=512 N0=12 N1=500 kernelpagesize_kB=4".
PageNodes parse_numa_maps_line(const std::string& line);

// Bytes of the mapping at `data` in huge pages (transparent or hugetlb), from /proc/self/smaps.
std::optional<std::uint64_t> query_huge_bytes(const std::byte* data, std::size_t bytes);

// Binds the range to one node (MPOL_BIND). The error text, or nothing if the kernel did it.
std::optional<std::string> bind_to_node(std::byte* data, std::size_t bytes, int node);

}  // namespace homenode
