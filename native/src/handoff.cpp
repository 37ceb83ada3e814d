// The handoff. Inside the timed region: one chunk of round trips; handoff.hpp says why.
#include "handoff.hpp"

#include "spin_wait.hpp"

namespace homenode {
namespace {

constexpr std::uint32_t spins_per_look = 1U << 14U;  // at the clock: rare, so that it is not timed

// Waits for `mine` and answers with the next turn. False when patience ended.
bool pass(HandoffLine& line, std::uint64_t mine, Nanoseconds patience_ns) {
  std::uint32_t spins = 0;
  Nanoseconds deadline = 0;
  while (true) {
    std::uint64_t expected = mine;
    if (line.turn.compare_exchange_strong(expected, mine + 1, std::memory_order_acq_rel,
                                          std::memory_order_relaxed)) {
      return true;
    }
    if (++spins % spins_per_look != 0) continue;
    if (line.given_up.load(std::memory_order_relaxed)) return false;
    const Nanoseconds now = now_ns();
    if (deadline == 0) deadline = now + patience_ns;
    if (now < deadline) continue;
    line.given_up.store(true, std::memory_order_relaxed);
    return false;
  }
}

}  // namespace

std::vector<double> lead_handoff(HandoffLine& line, const HandoffPlan& plan) {
  std::vector<double> samples_ns;
  std::uint64_t turn = 0;
  for (std::uint32_t trip = 0; trip < 10; ++trip, turn += 2) {  // both are there, the line is warm
    if (!pass(line, turn, plan.patience_ns)) return {};
  }
  for (std::uint32_t chunk = 0; chunk < plan.chunks; ++chunk) {
    if (!pass(line, turn, plan.patience_ns)) return {};
    turn += 2;
    const Nanoseconds start = now_ns();
    for (std::uint32_t trip = 0; trip < plan.round_trips; ++trip, turn += 2) {
      if (!pass(line, turn, plan.patience_ns)) return {};
    }
    const auto elapsed = static_cast<double>(now_ns() - start);
    samples_ns.push_back(elapsed / (2.0 * plan.round_trips));
  }
  return samples_ns;
}

void follow_handoff(HandoffLine& line, const HandoffPlan& plan) {
  const std::uint64_t trips = 10 + std::uint64_t{plan.chunks} * (plan.round_trips + 1);
  for (std::uint64_t trip = 0; trip < trips; ++trip) {
    if (!pass(line, 2 * trip + 1, plan.patience_ns)) return;
  }
}

}  // namespace homenode
