// A plain pointer chase as the reference to compare with: one random cycle by Sattolo's shuffle, one
// pointer per 64-byte line, timed over whole milliseconds.
//
// Timed: dependent loads in a loop of 100. It prints the median of its samples.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

double nanoseconds() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// chase CPU BYTES huge|base [SAMPLES]: prints the ns of one load, random order.
int main(int count, char** values) {
  if (count < 4) return std::fprintf(stderr, "usage: chase CPU BYTES huge|base [SAMPLES]\n"), 2;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(static_cast<std::size_t>(std::atoi(values[1])), &mask);
  sched_setaffinity(0, sizeof mask, &mask);
  const std::size_t bytes = std::strtoull(values[2], nullptr, 10);
  const bool huge = std::string(values[3]) == "huge";
  const int samples = count > 4 ? std::max(1, std::atoi(values[4])) : 9;
  constexpr std::size_t align = 2UL << 20U;
  const std::size_t mapped = (bytes + align - 1) / align * align + align;
  void* const raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return 3;
  const auto base = (reinterpret_cast<std::uintptr_t>(raw) + align - 1) / align * align;
  madvise(reinterpret_cast<void*>(base), mapped - align, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  auto* const lines = reinterpret_cast<void**>(base);
  const std::size_t n = std::max<std::size_t>(bytes / 64, 2);
  std::vector<std::uint32_t> next(n);
  std::iota(next.begin(), next.end(), 0U);
  std::mt19937_64 random(1);
  for (std::size_t i = n - 1; i > 0; --i) std::swap(next[i], next[random() % i]);
  for (std::size_t i = 0; i < n; ++i) lines[i * 8] = &lines[std::size_t{next[i]} * 8];
  void** at = lines;
  const auto run = [&](std::size_t loads) {
    for (std::size_t i = 0; i < loads; i += 100) {
#pragma GCC unroll 100
      for (int k = 0; k < 100; ++k) {
        at = static_cast<void**>(*at);
        asm volatile("" : "+r"(at));
      }
    }
  };
  run(std::min<std::size_t>(n, 500'000));
  const double start = nanoseconds();
  run(20'000);
  const double pace = (nanoseconds() - start) / 20'000;
  const auto loads = static_cast<std::size_t>(4e6 / pace) / 100 * 100 + 100;
  std::vector<double> times;
  for (int sample = 0; sample < samples; ++sample) {
    const double begin = nanoseconds();
    run(loads);
    times.push_back((nanoseconds() - begin) / static_cast<double>(loads));
  }
  std::sort(times.begin(), times.end());
  std::printf("%.4f %.4f\n", times.front(), times[times.size() / 2]);
  return 0;
}
