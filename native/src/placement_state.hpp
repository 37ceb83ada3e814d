// Placement states: from core-to-core latencies over time, when the same CPUs stood differently.
//
// A hypervisor may move a vCPU to another LLC at any moment; the guest sees the same CPU numbers and
// twice or half the bandwidth (27 against 110 ns, one cache link against two). Nothing is timed here: a
// series goes in, labels come out, so that a recorded series can be replayed.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace homenode {

// Latencies of each pair of CPUs, in the order of the pairs, before and after one sample.
struct Bracket {
  std::vector<std::optional<double>> before_ns;  // nothing: not measured (a CPU was taken away)
  std::vector<std::optional<double>> after_ns;
};

// `state` is an index into `signatures`, or nothing: then the sample belongs to no state.
struct StateLabel {
  std::optional<std::size_t> state;
  std::string reason;  // why there is none; "" otherwise
};

struct StateSeries {
  std::vector<StateLabel> labels;         // one per bracket
  std::vector<std::string> signatures;    // per state: the class of each pair, as in "0,1"
  std::vector<double> median_ns;          // per state, over its brackets and pairs
  std::vector<std::size_t> transitions;   // brackets in which, or before which, a pair changed class
};

// Classes of latencies: sorted, then cut at the widest gap until no class spans more than
// `most_span` from its least to its greatest. The class of each value, 0 for the least.
std::vector<std::size_t> classes_of(const std::vector<double>& latencies_ns, double most_span = 1.6);

// Labels each bracket with the classes of all its pairs. Each pair has classes of its own: CPUs far
// apart in a mesh differ for good. A bracket whose two ends differ, or with a gap, has no state; so has
// one with an end whose class is seen at no other moment in a row, between two ends that agree.
StateSeries label_states(const std::vector<Bracket>& brackets);

// What fill(2 threads) / fill(1 thread) says: one link shared (about 1), one each (about 2).
enum class LinkUse { shared, apart, unclear };
LinkUse link_use_of(double fill_ratio);
std::string name_of(LinkUse use);

}  // namespace homenode
