// The bracket: core-to-core latencies of a team's neighbours, right before and after a sample.
//
// Pairs are ranks (0,1), (1,2), ...: first all that start even, then all that start odd, each round at
// the same time on all pairs. It costs some 50 to 200 us around a sample of milliseconds, on the same
// threads, so that no wake-up lies between it and the sample. The sample is timed apart.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "handoff.hpp"
#include "team.hpp"

namespace homenode {

class Ring {
 public:
  explicit Ring(std::size_t threads);

  std::size_t pairs() const { return threads_ == 0 ? 0 : threads_ - 1; }
  // Called by every thread of the team, inside one task. `latencies_ns` has one place per pair, and
  // each leader fills its own; a pair that lost patience stays empty.
  void measure(std::size_t rank, Barrier& barrier, std::vector<std::optional<double>>& latencies_ns);

 private:
  std::size_t threads_;
  std::unique_ptr<HandoffLine[]> lines_;
};

}  // namespace homenode
