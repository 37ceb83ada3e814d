// A plain STREAM, our own re-implementation, as the baseline to compare with: four kernels over three
// arrays, first touch by the thread that uses them, best and median of the runs after the first.
//
// Kept as naive as the original is: plain loops, whatever the compiler makes of them, small pages,
// no pinning inside a thread's loop. Timed: one kernel over all arrays, barrier to barrier.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr double scalar = 3.0;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void copy(double* c, const double* a, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) c[i] = a[i];
}
void scale(double* b, const double* c, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) b[i] = scalar * c[i];
}
void add(double* c, const double* a, const double* b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) c[i] = a[i] + b[i];
}
void triad(double* a, const double* b, const double* c, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] = b[i] + scalar * c[i];
}

void pin(int pu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(static_cast<std::size_t>(pu), &mask);
  pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
}

}  // namespace

// stream THREADS [MIB_PER_ARRAY] [RUNS]: threads on CPUs 0 to THREADS - 1. Prints "kernel best median", GB/s.
int main(int count, char** values) {
  const int threads = count > 1 ? std::max(1, std::atoi(values[1])) : 1;
  const std::size_t mib = count > 2 ? static_cast<std::size_t>(std::max(1, std::atoi(values[2]))) : 256;
  const int runs = count > 3 ? std::max(2, std::atoi(values[3])) : 10;
  const std::size_t n = (mib << 20U) / sizeof(double) / static_cast<std::size_t>(threads) * static_cast<std::size_t>(threads);
  auto* const a = static_cast<double*>(std::malloc(n * sizeof(double)));
  auto* const b = static_cast<double*>(std::malloc(n * sizeof(double)));
  auto* const c = static_cast<double*>(std::malloc(n * sizeof(double)));
  if (a == nullptr || b == nullptr || c == nullptr) {
    std::fprintf(stderr, "stream: expected %zu MiB, found less\n", 3 * mib);
    return 3;
  }
  std::barrier sync(threads);
  std::vector<double> times[4];
  const auto live = [&](int rank) {
    pin(rank);
    const std::size_t share = n / static_cast<std::size_t>(threads);
    const std::size_t start = share * static_cast<std::size_t>(rank);
    for (std::size_t i = start; i < start + share; ++i) {
      a[i] = 1.0;
      b[i] = 2.0;
      c[i] = 0.0;
    }
    for (int run = 0; run < runs; ++run) {
      for (int kernel = 0; kernel < 4; ++kernel) {
        sync.arrive_and_wait();
        const double begin = seconds();
        if (kernel == 0) copy(c + start, a + start, share);
        if (kernel == 1) scale(b + start, c + start, share);
        if (kernel == 2) add(c + start, a + start, b + start, share);
        if (kernel == 3) triad(a + start, b + start, c + start, share);
        sync.arrive_and_wait();
        if (rank == 0 && run > 0) times[kernel].push_back(seconds() - begin);
      }
    }
  };
  std::vector<std::thread> team;
  for (int rank = 0; rank < threads; ++rank) team.emplace_back(live, rank);
  for (auto& thread : team) thread.join();
  const char* const names[] = {"copy", "scale", "add", "triad"};
  const double arrays[] = {2, 2, 3, 3};
  for (int kernel = 0; kernel < 4; ++kernel) {
    auto& series = times[kernel];
    std::sort(series.begin(), series.end());
    const double bytes = arrays[kernel] * static_cast<double>(n) * sizeof(double);
    std::printf("%s %.3f %.3f\n", names[kernel], bytes / series.front() / 1e9,
                bytes / series[series.size() / 2] / 1e9);
  }
  std::free(a);
  std::free(b);
  std::free(c);
  return 0;
}
