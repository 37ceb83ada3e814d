// Placement states: labels of a series of core-to-core latencies. Nothing is timed here.
#include "placement_state.hpp"

#include <algorithm>
#include <map>
#include <numeric>

namespace homenode {
namespace {

constexpr double most_shared_ratio = 1.25;  // measured: 1.00 to 1.05 on one link, 1.9 to 2.0 on two
constexpr double least_apart_ratio = 1.6;

// Cuts sorted[first, last) into classes; adds the first index of each class after the first one.
void cut(const std::vector<double>& sorted, std::size_t first, std::size_t last, double most_span,
         std::vector<std::size_t>& cuts) {
  if (last - first < 2 || sorted[last - 1] <= most_span * sorted[first]) return;
  std::size_t widest = first + 1;
  for (std::size_t i = first + 1; i < last; ++i) {
    if (sorted[i] / sorted[i - 1] > sorted[widest] / sorted[widest - 1]) widest = i;
  }
  cut(sorted, first, widest, most_span, cuts);
  cuts.push_back(widest);
  cut(sorted, widest, last, most_span, cuts);
}

using PairClasses = std::vector<std::optional<std::size_t>>;

std::string signature_of(const PairClasses& classes) {
  std::string text;
  for (const auto& one : classes) text += (text.empty() ? "" : ",") + std::to_string(one.value_or(0));
  return text;
}

bool complete(const PairClasses& classes) {
  return std::ranges::all_of(classes, [](const auto& one) { return one.has_value(); });
}

// A class that is never seen twice in a row, between two ends that agree, is a disturbed handoff and no
// place to stand: a CPU was taken away for a moment. Such ends become gaps.
void drop_lone_ends(const std::vector<std::size_t>& ends, const std::vector<std::size_t>& classes,
                    std::vector<PairClasses>& classes_of_end, std::size_t pair) {
  std::vector<bool> lasting(classes.size() + 1, false);
  for (std::size_t i = 1; i < classes.size(); ++i) {
    if (classes[i] == classes[i - 1]) lasting[classes[i]] = true;
  }
  for (std::size_t i = 1; i + 1 < classes.size(); ++i) {
    const bool lone = !lasting[classes[i]] && classes[i - 1] == classes[i + 1];
    if (lone) classes_of_end[ends[i]][pair] = std::nullopt;
  }
}

// Class of each pair at each end, in time order: before of bracket 0, after of bracket 0, before of 1...
std::vector<PairClasses> classes_over_time(const std::vector<Bracket>& brackets, std::size_t pairs) {
  std::vector<PairClasses> ends(2 * brackets.size(), PairClasses(pairs));
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    std::vector<double> known;
    std::vector<std::size_t> end_of_known;
    for (std::size_t end = 0; end < ends.size(); ++end) {
      const auto& bracket = brackets[end / 2];
      const auto& side = end % 2 == 0 ? bracket.before_ns : bracket.after_ns;
      if (pair < side.size() && side[pair] && *side[pair] > 0.0) {
        known.push_back(*side[pair]);
        end_of_known.push_back(end);
      }
    }
    const auto classes = classes_of(known);
    for (std::size_t i = 0; i < known.size(); ++i) ends[end_of_known[i]][pair] = classes[i];
    drop_lone_ends(end_of_known, classes, ends, pair);
  }
  return ends;
}

}  // namespace

std::vector<std::size_t> classes_of(const std::vector<double>& latencies_ns, double most_span) {
  std::vector<std::size_t> order(latencies_ns.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return latencies_ns[i]; });
  std::vector<double> sorted;
  for (const auto i : order) sorted.push_back(latencies_ns[i]);
  std::vector<std::size_t> cuts;
  cut(sorted, 0, sorted.size(), most_span, cuts);
  std::vector<std::size_t> classes(latencies_ns.size());
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    const auto above = std::ranges::upper_bound(cuts, rank);
    classes[order[rank]] = static_cast<std::size_t>(above - cuts.begin());
  }
  return classes;
}

StateSeries label_states(const std::vector<Bracket>& brackets) {
  StateSeries series;
  std::size_t pairs = 0;
  for (const auto& bracket : brackets) {
    pairs = std::max({pairs, bracket.before_ns.size(), bracket.after_ns.size()});
  }
  const auto ends = classes_over_time(brackets, pairs);
  std::map<std::string, std::size_t> state_of_signature;
  std::vector<std::vector<double>> latencies_of_state;
  std::optional<std::string> previous;
  for (std::size_t i = 0; i < brackets.size(); ++i) {
    const PairClasses& before = ends[2 * i];
    const PairClasses& after = ends[2 * i + 1];
    if (pairs == 0 || !complete(before) || !complete(after)) {
      series.labels.push_back({std::nullopt, "core-to-core latency not measured, or disturbed"});
      continue;
    }
    const std::string signature = signature_of(after);
    const bool moved_inside = signature_of(before) != signature;
    if (moved_inside || (previous && *previous != signature_of(before))) series.transitions.push_back(i);
    previous = signature;
    if (moved_inside) {
      series.labels.push_back({std::nullopt, "placement changed during the sample"});
      continue;
    }
    const auto [entry, fresh] = state_of_signature.emplace(signature, series.signatures.size());
    if (fresh) {
      series.signatures.push_back(signature);
      latencies_of_state.emplace_back();
    }
    series.labels.push_back({entry->second, ""});
    for (const auto* side : {&brackets[i].before_ns, &brackets[i].after_ns}) {
      for (const auto& latency : *side) latencies_of_state[entry->second].push_back(*latency);
    }
  }
  for (auto& latencies : latencies_of_state) {
    std::ranges::sort(latencies);
    series.median_ns.push_back(latencies[latencies.size() / 2]);
  }
  return series;
}

LinkUse link_use_of(double fill_ratio) {
  if (fill_ratio <= most_shared_ratio) return LinkUse::shared;
  if (fill_ratio >= least_apart_ratio) return LinkUse::apart;
  return LinkUse::unclear;
}

std::string name_of(LinkUse use) {
  switch (use) {
    case LinkUse::shared: return "shared";
    case LinkUse::apart: return "apart";
    case LinkUse::unclear: return "unclear";
  }
  return "";
}

}  // namespace homenode
