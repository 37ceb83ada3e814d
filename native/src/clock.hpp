// The clock: one steady time in integer nanoseconds. Read at the two ends of each timed region.
//
// CLOCK_MONOTONIC is read in user space (vDSO) in 20 to 60 ns. Sub-nanosecond figures come from many
// operations between two readings, never from a finer clock: a timer that truncates to whole
// milliseconds or microseconds, as several known tools do, rounds a fast result to nothing.
#pragma once

#include <ctime>

#include <cstdint>

namespace homenode {

using Nanoseconds = std::int64_t;

inline Nanoseconds now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<Nanoseconds>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Time that this thread was really on a CPU: short of the wall clock, something else ran there.
inline Nanoseconds thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<Nanoseconds>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

inline double seconds_of(Nanoseconds duration_ns) { return static_cast<double>(duration_ns) * 1e-9; }

}  // namespace homenode
