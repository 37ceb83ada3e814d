// One thread's three arrays for the bandwidth kernels. Inside the timed region, run(): the kernel alone.
#include "stream_arrays.hpp"

#include <algorithm>

#include "failure.hpp"

namespace homenode {
namespace {

constexpr std::size_t offset_bytes[3] = {0, 1344, 2752};  // lines apart, none a multiple of 4096
constexpr std::size_t offset_room_bytes = 4096;
// Samples of about a millisecond: where a neighbour shares the CPU, some still fit between its turns.
constexpr std::size_t most_windows = 16;
constexpr std::size_t least_window_bytes = std::size_t{16} << 20U;
constexpr std::size_t period = 256;  // values repeat: small integers, exact in every sum
static_assert(period % kernel_grain == 0);
constexpr std::size_t checks_per_window = 61;

double a_at(std::size_t i) { return static_cast<double>(i % period); }
double b_at(std::size_t i) { return static_cast<double>((i / 3) % period); }

std::size_t check_place(std::size_t window, std::size_t window_elements, std::size_t check) {
  const std::size_t last = window_elements - 1;
  return window * window_elements + last * check / (checks_per_window - 1);
}

}  // namespace

std::size_t StreamArrays::footprint_bytes(std::size_t array_bytes) {
  return 3 * (array_bytes + offset_room_bytes + buffer_alignment);
}

// At exactly four times, the caches could still hold that quarter: hence five where it fits.
std::size_t StreamArrays::default_bytes(std::uint64_t llc_bytes, std::uint64_t usable_bytes, std::size_t threads) {
  constexpr std::uint64_t least_of_all = std::uint64_t{128} << 20U;
  const std::uint64_t least = std::max(least_of_all, 4 * llc_bytes);
  std::uint64_t bytes = std::max(least_of_all, 5 * llc_bytes);
  while (bytes > least && footprint_bytes(bytes / threads) * threads > usable_bytes) {
    bytes = std::max(least, bytes - bytes / 64);
  }
  return bytes;
}

std::size_t StreamArrays::least_bytes() { return period * sizeof(double); }

StreamArrays::StreamArrays(std::size_t array_bytes, PageKind pages, std::optional<int> node,
                           const Host& host) {
  windows_ = std::clamp<std::size_t>(array_bytes / least_window_bytes, 1, most_windows);
  const std::size_t grain = windows_ * period;
  elements_ = std::max<std::size_t>(array_bytes / sizeof(double) / grain, 1) * grain;
  double* starts[3];
  for (std::size_t k = 0; k < 3; ++k) {
    buffers_[k] = Buffer({elements_ * sizeof(double) + offset_room_bytes, pages, node}, host);
    starts[k] = reinterpret_cast<double*>(buffers_[k].data() + offset_bytes[k]);
  }
  a_ = starts[0];
  b_ = starts[1];
  c_ = starts[2];
  for (std::size_t i = 0; i < elements_; ++i) {
    a_[i] = a_at(i);
    b_[i] = b_at(i);
    c_[i] = 0.0;
  }
  // The whole buffers, also the rest behind the arrays: a page not written is not there to verify.
  for (std::size_t k = 0; k < 3; ++k) {
    const std::size_t end = offset_bytes[k] + elements_ * sizeof(double);
    for (std::size_t at = end; at < buffers_[k].bytes(); at += 1024) buffers_[k].data()[at] = std::byte{1};
  }
}

double StreamArrays::run(const Kernel& kernel, std::size_t window, std::size_t passes) const {
  const std::size_t start = window * window_elements();
  return kernel.run(c_ + start, a_ + start, b_ + start, window_elements(), passes);
}

void StreamArrays::require_result(const Kernel& kernel, std::size_t window, double returned,
                                  std::size_t passes) const {
  if (kernel.operation == Operation::read) {
    // Windows are whole periods: every period sums to 0 + 1 + ... + 255.
    const double expected =
        static_cast<double>(window_elements() / period * passes) * (period * (period - 1) / 2.0);
    if (returned == expected) return;
    throw measure_failure("kernel read: expected the sum " + std::to_string(expected) + ", found " +
                              std::to_string(returned), "the memory or the processor is at fault");
  }
  for (std::size_t check = 0; check < checks_per_window; ++check) {
    const std::size_t i = check_place(window, window_elements(), check);
    const double expected = kernel.expected(a_at(i), b_at(i)).value_or(0.0);
    if (c_[i] == expected) continue;
    throw measure_failure("kernel " + kernel.name() + ": expected c[" + std::to_string(i) + "] = " +
                              std::to_string(expected) + ", found " + std::to_string(c_[i]),
                          "the memory or the processor is at fault");
  }
}

void StreamArrays::spoil(std::size_t window) const {
  for (std::size_t check = 0; check < checks_per_window; ++check) {
    c_[check_place(window, window_elements(), check)] = -1.0;
  }
}

PageReport StreamArrays::verify() const {
  PageReport report;
  for (const auto& buffer : buffers_) report.add(buffer.verify());
  return report;
}

}  // namespace homenode
