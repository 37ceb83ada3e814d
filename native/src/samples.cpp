// Samples: order statistics, an interval without assumptions, and when to stop. Nothing is timed here.
#include "samples.hpp"

#include <algorithm>
#include <cmath>

namespace homenode {
namespace {

constexpr double wanted_confidence = 0.95;

double sorted_quantile(const std::vector<double>& sorted, double fraction) {
  const double position = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const auto above = std::min(below + 1, sorted.size() - 1);
  const double rest = position - static_cast<double>(below);
  return sorted[below] + rest * (sorted[above] - sorted[below]);
}

}  // namespace

double quantile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return std::nan("");
  std::sort(samples.begin(), samples.end());
  return sorted_quantile(samples, fraction);
}

double median(std::vector<double> samples) { return quantile(std::move(samples), 0.5); }

Interval median_interval(std::vector<double> samples) {
  const std::size_t count = samples.size();
  if (count == 0) return {std::nan(""), std::nan(""), 0.0};
  std::sort(samples.begin(), samples.end());
  // P(median below the (cut+1)-th smallest) is the binomial tail up to `cut`; in logarithms, since
  // 0.5 to the power of a thousand samples is zero as a double.
  const double n = static_cast<double>(count);
  double tail = 0.0;
  double chosen_tail = std::exp(-n * std::log(2.0));
  std::size_t cut = 0;
  for (std::size_t k = 0; 2 * k + 1 < count; ++k) {
    const double rank = static_cast<double>(k);
    tail += std::exp(std::lgamma(n + 1) - std::lgamma(rank + 1) - std::lgamma(n - rank + 1) -
                     n * std::log(2.0));
    if (1.0 - 2.0 * tail < wanted_confidence) break;
    cut = k;
    chosen_tail = tail;
  }
  return {samples[cut], samples[count - 1 - cut], std::max(0.0, 1.0 - 2.0 * chosen_tail)};
}

std::optional<double> relative_half_width(const std::vector<double>& samples) {
  if (samples.size() < 2) return std::nullopt;
  const double middle = median(samples);
  if (!(middle > 0.0)) return std::nullopt;
  const Interval interval = median_interval(samples);
  return (interval.high - interval.low) / 2.0 / middle;
}

Stop stop_of(const StopRule& rule, const std::vector<double>& samples, Nanoseconds now) {
  if (samples.size() >= rule.max_samples) return Stop::samples;
  if (samples.size() >= rule.min_samples) {
    const auto width = relative_half_width(samples);
    if (width && *width <= rule.tolerance_ratio) return Stop::interval;
  }
  if (now >= rule.deadline_ns && samples.size() >= 2) return Stop::time;
  return Stop::go_on;
}

std::string_view name_of(Stop stop) {
  switch (stop) {
    case Stop::interval: return "interval tight enough";
    case Stop::time: return "time up";
    case Stop::samples: return "all samples taken";
    case Stop::go_on: break;
  }
  return "not stopped";
}

void write_summary(Json& json, std::string_view suffix, const std::vector<double>& samples,
                   bool larger_is_better) {
  const std::string unit(suffix);
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  json.field("samples", samples.size());
  if (sorted.empty()) return;
  json.field("median_" + unit, sorted_quantile(sorted, 0.5));
  json.field("best_" + unit, larger_is_better ? sorted.back() : sorted.front());
  json.field("p10_" + unit, sorted_quantile(sorted, 0.1));
  json.field("p90_" + unit, sorted_quantile(sorted, 0.9));
  const Interval interval = median_interval(sorted);
  json.object("interval");
  json.field("low_" + unit, interval.low).field("high_" + unit, interval.high);
  json.field("confidence", interval.confidence);
  json.end();
  json.field("relative_half_width", relative_half_width(sorted));
}

}  // namespace homenode
