// The handoff: one cache line passed to and fro between two CPUs by compare-and-swap.
//
// Inside the timed region: the round trips of one chunk, first to last. Half a round trip is the
// core-to-core latency. One long run would hide a migration in its mean; so the chunks are short and
// each is a sample. A plain store and load instead of compare-and-swap lets the line be shared, and
// measures something else on every protocol.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "clock.hpp"

namespace homenode {

// The line that is passed, alone in its pair of lines: neighbours are prefetched in pairs.
struct alignas(256) HandoffLine {
  std::atomic<std::uint64_t> turn{0};
  alignas(128) std::atomic<bool> given_up{false};
};

struct HandoffPlan {
  std::uint32_t chunks = 5;
  std::uint32_t round_trips = 100;             // per chunk
  Nanoseconds patience_ns = 20'000'000;        // for one turn: the other thread may be off its CPU
};

// One-way latency in ns of each chunk, on the side that leads; the other side gets none. Both sides
// must call it at about the same time, on the same line, which must be fresh. Empty on both sides
// when one lost patience: then the line cannot be used again.
std::vector<double> lead_handoff(HandoffLine& line, const HandoffPlan& plan);
void follow_handoff(HandoffLine& line, const HandoffPlan& plan);

}  // namespace homenode
