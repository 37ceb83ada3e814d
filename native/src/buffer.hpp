// A buffer: memory of a chosen page size on a chosen node, or a refusal. Nothing is timed here.
//
// A simpler malloc would lie four ways: 4 KiB pages mix page walks into every figure (read bandwidth
// of one thread fell from 33 to 18 GB/s); pages never written are one shared zero page, read at L1
// speed; first touch by another thread puts them on its node; and a size that was not granted goes
// unnoticed. So: the thread that will use a buffer maps it, binds it, writes it and has it verified.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "host.hpp"
#include "json.hpp"

namespace homenode {

enum class PageKind { automatic, huge, base, hugetlb };

std::optional<PageKind> page_kind_of(const std::string& name);  // auto, huge, base (or 4k), hugetlb
std::string name_of(PageKind kind);

struct BufferRequest {
  std::size_t bytes;  // rounded up to whole huge pages
  PageKind pages;
  std::optional<int> node;  // bound there (MPOL_BIND); without it, wherever first touch puts it
};

// What the kernel says it gave, asked after the pages were written.
struct PageReport {
  std::uint64_t bytes = 0;
  std::uint64_t huge_bytes = 0;  // in transparent huge pages or hugetlb
  std::map<int, std::uint64_t> pages_of_node;  // of the pages that were asked about
  std::uint64_t pages_unknown = 0;
  std::string method;  // move_pages, numa_maps, or why neither answered

  void add(const PageReport& other);
  double huge_ratio() const;
  std::optional<double> ratio_on(int node) const;  // nothing if no page was answered for
};

class Buffer {
 public:
  Buffer() = default;
  Buffer(const BufferRequest& request, const Host& host);  // throws Failure
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Asks the kernel where the pages are and how large. Throws Failure if a page that was bound to a
  // node is elsewhere, or if huge pages were demanded (not `automatic`) and less than 95 % came.
  PageReport verify() const;

 private:
  void release();

  BufferRequest request_{};
  std::byte* reserved_ = nullptr;  // the whole reservation, with a guard at each end
  std::size_t reserved_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

constexpr std::size_t buffer_alignment = std::size_t{2} << 20U;

// Of what is available to us, there or in all, the share that may be used.
std::uint64_t usable_bytes(const Host& host, std::optional<int> node);
// Throws Failure if `bytes` would not leave the machine or cgroup a fifth of what is available.
void require_memory(const Host& host, std::uint64_t bytes, std::optional<int> node);
void write_pages(Json& json, const PageReport& report);

}  // namespace homenode
