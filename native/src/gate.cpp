// The gate: figures that cannot be true are refused. Timed: dependent additions; gate.hpp says why.
#include "gate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "clock.hpp"
#include "failure.hpp"

namespace homenode {
namespace {

constexpr std::size_t line_bytes = 64;
// One cycle and a bit: three is the least known, but the clock may rise after it was measured, and
// emulators fold loads in ways of their own.
constexpr double least_load_cycles = 1.2;

std::string figure(double value, const char* unit) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.4g %s", value, unit);
  return text.data();
}

}  // namespace

double measure_clock_hz() {
  constexpr int runs = 7;
  constexpr int turns = 2'000;
  constexpr int adds_per_turn = 100;
  double best_hz = 0.0;
  std::uint64_t value = 1;
  std::uint64_t step = 3;
  for (int run = 0; run < runs; ++run) {
    const Nanoseconds start = now_ns();
    for (int turn = 0; turn < turns; ++turn) {
#define HOMENODE_10(x) x x x x x x x x x x
#if defined(__x86_64__)
#define HOMENODE_ADD asm volatile("add %1, %0" : "+r"(value) : "r"(step) : "cc");
#elif defined(__aarch64__)
#define HOMENODE_ADD asm volatile("add %0, %0, %1" : "+r"(value) : "r"(step));
#endif
      HOMENODE_10(HOMENODE_10(HOMENODE_ADD))
    }
    const auto elapsed = static_cast<double>(std::max<Nanoseconds>(now_ns() - start, 1));
    best_hz = std::max(best_hz, static_cast<double>(turns) * adds_per_turn / elapsed * 1e9);
  }
  return best_hz;
}

std::optional<std::string> bandwidth_doubt(double bytes_per_s, double clock_hz, std::size_t pus,
                                           std::size_t lines) {
  if (!std::isfinite(bytes_per_s) || bytes_per_s <= 0.0) {
    return "expected a bandwidth above zero, found " + figure(bytes_per_s / 1e9, "GB/s");
  }
  const double bound = static_cast<double>(lines * line_bytes * pus) * clock_hz;
  if (bytes_per_s <= bound) return std::nullopt;
  return "expected at most " + figure(bound / 1e9, "GB/s") + " (" + std::to_string(lines * line_bytes) +
         " bytes per cycle and CPU at " +
         figure(clock_hz / 1e9, "GHz") + "), found " + figure(bytes_per_s / 1e9, "GB/s");
}

std::optional<std::string> latency_doubt(double latency_ns, double clock_hz) {
  const double least_ns = least_load_cycles * 1e9 / clock_hz;
  if (std::isfinite(latency_ns) && latency_ns >= least_ns) return std::nullopt;
  return "expected a load to take at least " + figure(least_ns, "ns") + ", found " + figure(latency_ns, "ns");
}

void require_bandwidth(const std::string& what, double bytes_per_s, double clock_hz, std::size_t pus,
                       std::size_t lines) {
  if (const auto doubt = bandwidth_doubt(bytes_per_s, clock_hz, pus, lines)) {
    throw measure_failure(what + ": " + *doubt, "the figure is refused: is the clock of this machine steady?");
  }
}

void require_latency(const std::string& what, double latency_ns, double clock_hz) {
  if (const auto doubt = latency_doubt(latency_ns, clock_hz)) {
    throw measure_failure(what + ": " + *doubt, "the figure is refused: is the clock of this machine steady?");
  }
}

}  // namespace homenode
