// One thread's three arrays for the bandwidth kernels: filled by that thread, used in windows, checked.
// Inside the timed region: run() alone.
//
// A sample runs over one window of the arrays and the next sample over the next window, so that a
// sample stays short while everything between two visits to a window is several caches large. The
// arrays start at different offsets: equal low address bits would make loads wait for older stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "buffer.hpp"
#include "kernel.hpp"

namespace homenode {

class StreamArrays {
 public:
  StreamArrays() = default;
  // Maps, binds and fills on the calling thread, which must be the pinned user of the arrays.
  StreamArrays(std::size_t array_bytes, PageKind pages, std::optional<int> node, const Host& host);

  static std::size_t footprint_bytes(std::size_t array_bytes);  // of the three arrays together
  // Of one array of all threads: five times the LLCs, and four times where less memory is usable.
  static std::size_t default_bytes(std::uint64_t llc_bytes, std::uint64_t usable_bytes, std::size_t threads);
  static std::size_t least_bytes();  // of one array: whole periods of its values, which are whole grains

  std::size_t elements() const { return elements_; }
  std::size_t windows() const { return windows_; }
  std::size_t window_elements() const { return elements_ / windows_; }

  // The timed region: one kernel over one window, so many times. What the kernel returned.
  double run(const Kernel& kernel, std::size_t window, std::size_t passes = 1) const;

  // The same over any whole number of grains from `first` on.
  double run_block(const Kernel& kernel, std::size_t first, std::size_t count) const {
    return kernel.run(c_ + first, a_ + first, b_ + first, count, 1);
  }

  // Throws Failure unless the kernel really did its work over the window: the exact sum for read, the
  // right values at spread places for the others.
  void require_result(const Kernel& kernel, std::size_t window, double returned,
                      std::size_t passes = 1) const;
  // Spoils those places, so that one kernel's results cannot pass for the next one's.
  void spoil(std::size_t window) const;

  PageReport verify() const;
  std::byte* destination() const { return reinterpret_cast<std::byte*>(c_); }

 private:
  std::size_t elements_ = 0;
  std::size_t windows_ = 1;
  Buffer buffers_[3];
  double* a_ = nullptr;
  double* b_ = nullptr;
  double* c_ = nullptr;
};

}  // namespace homenode
