// Pinning: a thread on exactly one CPU, proved by asking where it runs. Nothing is timed here.
#include "pinning.hpp"

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "failure.hpp"

namespace homenode {

void pin_to(int pu) {
  cpu_set_t* mask = CPU_ALLOC(static_cast<std::size_t>(pu) + 1);
  if (mask == nullptr) throw measure_failure("CPU " + std::to_string(pu) + ": no memory for its mask");
  const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(pu) + 1);
  CPU_ZERO_S(bytes, mask);
  CPU_SET_S(static_cast<std::size_t>(pu), bytes, mask);
  const int result = sched_setaffinity(0, bytes, mask);
  const int error = errno;
  CPU_FREE(mask);
  if (result != 0) {
    throw measure_failure("CPU " + std::to_string(pu) + ": expected to pin a thread there, found: " +
                              std::strerror(error),
                          "is the CPU online, and allowed by this cgroup?");
  }
  const int found = sched_getcpu();
  if (found != pu) {
    throw measure_failure("CPU " + std::to_string(pu) + ": expected to run there after pinning, found CPU " +
                              std::to_string(found),
                          "a sandbox that ignores affinity cannot be measured per CPU");
  }
}

void require_pus(const Host& host, const PuSet& pus) {
  const PuSet missing = pus.minus(host.allowed);
  if (missing.empty()) return;
  const PuSet offline = missing.minus(host.online);
  const std::string why = offline.empty() ? "not allowed by affinity or cgroup: " + missing.text()
                                          : "not online: " + offline.text();
  throw measure_failure("expected CPUs among " + host.allowed.text() + ", found " + pus.text() + " (" + why + ")",
                        "choose with --pus, or start the probe with those CPUs (taskset, cpuset)");
}

}  // namespace homenode
