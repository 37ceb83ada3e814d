// CPU work: two fixed events whose results are known, and their rate on a team of CPUs.
//
// Inside the timed region: whole events, from a thread's own start to its own end; the clock is read
// once per event of about a millisecond. A simpler loop counts events within a common window: then each
// thread's last, unfinished event is lost, one part in seventy of a 0.1 s window. Results are checked,
// so that no compiler can delete the work.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "samples.hpp"
#include "team.hpp"

namespace homenode {

// `primes`: the odd and even numbers from 3 to 9999 tried by division, as sysbench's cpu event does:
// waits on the divider, so that an SMT sibling finds room. `saturate`: eight chains of multiply-add
// that keep the multiplier busy every cycle, so that a sibling finds none.
enum class Work { primes, saturate };

std::string name_of(Work work);
std::optional<Work> work_of(const std::string& name);

// One event; its result depends on the work alone.
std::uint64_t do_event(Work work);

struct RateSample {
  std::vector<double> events_per_s;  // one per active rank
  std::vector<std::uint64_t> events;
  bool disturbed = false;
};

// Rates of the ranks in `active`, in that order (the others sleep), over about `seconds`. Throws
// Failure if an event's result is not `expected`.
RateSample measure_rates(Team& team, const std::vector<std::size_t>& active, Work work,
                         std::uint64_t expected, double seconds);

double sum_of(const std::vector<double>& values);

}  // namespace homenode
