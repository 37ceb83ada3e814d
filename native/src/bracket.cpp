// The bracket. Inside the timed region: handoff.cpp's chunks; bracket.hpp says why.
#include "bracket.hpp"

#include "samples.hpp"

namespace homenode {
namespace {

constexpr HandoffPlan ring_plan{.chunks = 5, .round_trips = 60, .patience_ns = 5'000'000};

}  // namespace

Ring::Ring(std::size_t threads) : threads_(threads), lines_(new HandoffLine[threads]) {}

void Ring::measure(std::size_t rank, Barrier& barrier,
                   std::vector<std::optional<double>>& latencies_ns) {
  if (threads_ < 2) return;
  for (std::size_t parity = 0; parity < 2 && parity + 1 < threads_; ++parity) {
    const bool leads = rank % 2 == parity && rank + 1 < threads_;
    const bool follows = rank % 2 != parity && rank >= 1;
    if (leads) {
      latencies_ns[rank] = std::nullopt;
      lines_[rank].turn.store(0, std::memory_order_relaxed);
      lines_[rank].given_up.store(false, std::memory_order_relaxed);
    }
    barrier.wait();
    if (leads) {
      const auto samples = lead_handoff(lines_[rank], ring_plan);
      if (!samples.empty()) latencies_ns[rank] = median(samples);
    } else if (follows) {
      follow_handoff(lines_[rank - 1], ring_plan);
    }
    barrier.wait();
  }
}

}  // namespace homenode
