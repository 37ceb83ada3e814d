// A buffer: memory of a chosen page size on a chosen node, or a refusal. Nothing is timed here.
#include "buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "failure.hpp"
#include "page_query.hpp"

namespace homenode {
namespace {

constexpr double enough_huge_ratio = 0.95;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20U) + " MiB"; }

void require_hugetlb(const BufferRequest& request, std::size_t bytes, std::size_t huge_bytes) {
  // A bound mapping that finds no page of its node at the first write dies of SIGBUS: ask before.
  const std::uint64_t free_bytes = free_hugetlb_pages(request.node, huge_bytes) * huge_bytes;
  if (free_bytes >= bytes) return;
  const std::string where = request.node ? " on node " + std::to_string(*request.node) : "";
  throw measure_failure("huge pages" + where + ": expected " + mib(bytes) + " reserved and free, found " +
                            mib(free_bytes),
                        "reserve more (vm.nr_hugepages), or use --pages huge for transparent ones");
}

}  // namespace

std::optional<PageKind> page_kind_of(const std::string& name) {
  if (name == "4k") return PageKind::base;
  for (const auto kind : {PageKind::automatic, PageKind::huge, PageKind::base, PageKind::hugetlb}) {
    if (name == name_of(kind)) return kind;
  }
  return std::nullopt;
}

std::string name_of(PageKind kind) {
  switch (kind) {
    case PageKind::automatic: return "auto";
    case PageKind::huge: return "huge";
    case PageKind::base: return "base";
    case PageKind::hugetlb: return "hugetlb";
  }
  return "";
}

void PageReport::add(const PageReport& other) {
  bytes += other.bytes;
  huge_bytes += other.huge_bytes;
  for (const auto& [node, pages] : other.pages_of_node) pages_of_node[node] += pages;
  pages_unknown += other.pages_unknown;
  method = other.method;
}

double PageReport::huge_ratio() const {
  return bytes == 0 ? 0.0 : static_cast<double>(huge_bytes) / static_cast<double>(bytes);
}

std::optional<double> PageReport::ratio_on(int node) const {
  std::uint64_t all = 0;
  for (const auto& [found, pages] : pages_of_node) all += pages;
  if (all == 0) return std::nullopt;
  const auto here = pages_of_node.find(node);
  return here == pages_of_node.end() ? 0.0 : static_cast<double>(here->second) / static_cast<double>(all);
}

Buffer::Buffer(const BufferRequest& request, const Host& host) : request_(request) {
  const std::size_t huge = host.huge_page_bytes.value_or(buffer_alignment);
  const std::size_t unit = std::max<std::size_t>(huge, buffer_alignment);
  bytes_ = round_up(request.bytes, unit);
  const bool hugetlb = request.pages == PageKind::hugetlb;
  if (hugetlb) require_hugetlb(request, bytes_, huge);
  // One huge page of guard at each end: neighbours cannot merge into our mapping, so that what smaps
  // and numa_maps say about it is about it alone.
  reserved_bytes_ = bytes_ + 3 * unit;
  void* const reserved =
      mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    throw measure_failure("buffer of " + mib(bytes_) + ": expected address space, found: " +
                              std::strerror(errno), "raise the limit (ulimit -v), or ask for less");
  }
  reserved_ = static_cast<std::byte*>(reserved);
  const auto start = reinterpret_cast<std::uintptr_t>(reserved_) + unit;
  std::byte* const wanted = reserved_ + unit + (unit - start % unit) % unit;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | (hugetlb ? MAP_HUGETLB : 0);
  void* const data = mmap(wanted, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (data == MAP_FAILED) {
    const std::string why = std::strerror(errno);
    release();
    throw measure_failure("buffer of " + mib(bytes_) + ": expected memory, found: " + why,
                          "ask for less with --array-bytes or --max-bytes");
  }
  data_ = static_cast<std::byte*>(data);
  if (!hugetlb) {
    // Advice only: verify() asks what came of it.
    madvise(data_, bytes_, request.pages == PageKind::base ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  }
  if (!request.node) return;
  const auto refused = bind_to_node(data_, bytes_, *request.node);
  const bool only_node = host.nodes.size() <= 1 && *request.node == 0;
  if (refused && !only_node) {
    release();
    throw measure_failure("buffer on node " + std::to_string(*request.node) +
                              ": expected to bind it there, found: " + *refused,
                          "does the node exist and have memory? A container needs mbind in its seccomp "
                          "profile (CAP_SYS_NICE in Docker's)");
  }
}

Buffer::~Buffer() { release(); }

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  request_ = other.request_;
  reserved_ = std::exchange(other.reserved_, nullptr);
  reserved_bytes_ = std::exchange(other.reserved_bytes_, 0);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void Buffer::release() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
  reserved_ = nullptr;
}

PageReport Buffer::verify() const {
  PageReport report;
  report.bytes = bytes_;
  report.huge_bytes = query_huge_bytes(data_, bytes_).value_or(0);
  const std::size_t step = request_.pages == PageKind::base ? 4096 : std::size_t{64} << 10U;
  PageNodes nodes = query_move_pages(data_, bytes_, step);
  report.method = "move_pages";
  if (nodes.pages_of_node.empty()) {
    const auto fallback = query_numa_maps(data_);
    report.method = fallback && fallback->error.empty() ? "numa_maps" : nodes.error;
    if (fallback && fallback->error.empty()) nodes = *fallback;
  }
  report.pages_of_node = nodes.pages_of_node;
  report.pages_unknown = nodes.unknown;
  if (request_.node) {
    const auto on_node = report.ratio_on(*request_.node);
    if (on_node && (*on_node < 1.0 || report.pages_unknown > 0)) {
      std::string found;
      for (const auto& [node, pages] : report.pages_of_node) {
        found += (found.empty() ? "" : ", ") + std::to_string(pages) + " on node " + std::to_string(node);
      }
      throw measure_failure("buffer on node " + std::to_string(*request_.node) +
                                ": expected all its pages there, found " + found + ", " +
                                std::to_string(report.pages_unknown) + " unknown",
                            "is the node out of free memory? (numactl -H)");
    }
  }
  const bool demanded = request_.pages == PageKind::huge || request_.pages == PageKind::hugetlb;
  if (demanded && report.huge_ratio() < enough_huge_ratio) {
    throw measure_failure("buffer of " + mib(bytes_) + ": expected huge pages, found " +
                              mib(report.huge_bytes) + " in huge pages",
                          "allow them (/sys/kernel/mm/transparent_hugepage/enabled: madvise), compact "
                          "memory, or use --pages auto");
  }
  return report;
}

std::uint64_t usable_bytes(const Host& host, std::optional<int> node) {
  // With one node its own figure may be wrong (hot-added memory is missing from it), and adds nothing.
  const HostNode* const bound = node && host.nodes.size() > 1 ? host.node(*node) : nullptr;
  const std::uint64_t available =
      bound == nullptr ? host.available_bytes : std::min(host.available_bytes, bound->available_bytes);
  return available / 5 * 4;
}

void require_memory(const Host& host, std::uint64_t bytes, std::optional<int> node) {
  const HostNode* const bound = node ? host.node(*node) : nullptr;
  if (node && !host.nodes.empty() && (bound == nullptr || bound->memory_bytes == 0)) {
    std::string with_memory;
    for (const auto& found : host.nodes) {
      if (found.memory_bytes > 0) with_memory += (with_memory.empty() ? "" : ",") + std::to_string(found.index);
    }
    throw measure_failure("expected a node with memory (" + with_memory + "), found node " +
                              std::to_string(*node), "choose with --node");
  }
  const std::uint64_t usable = usable_bytes(host, node);
  if (bytes <= usable) return;
  throw measure_failure("needs " + mib(bytes) + " of memory" +
                            (node ? " on node " + std::to_string(*node) : std::string()) + ", may use " +
                            mib(usable) + " (four fifths of what is available)",
                        "ask for less with --array-bytes or --max-bytes, or free memory");
}

void write_pages(Json& json, const PageReport& report) {
  json.field("bytes", report.bytes).field("huge_bytes", report.huge_bytes);
  json.object("pages_of_node");
  for (const auto& [node, pages] : report.pages_of_node) json.field(std::to_string(node), pages);
  json.end();
  json.field("pages_unknown", report.pages_unknown).field("verified_by", report.method);
}

}  // namespace homenode
