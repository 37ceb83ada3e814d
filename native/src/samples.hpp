// Samples: order statistics, an interval without assumptions, and when to stop. Nothing is timed here.
//
// Timings are skewed to one side by interrupts and neighbours, so the mean and its deviation mislead.
// The interval is that of the median from order statistics: true for any distribution.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clock.hpp"
#include "json.hpp"

namespace homenode {

// `confidence` is what was reached: five samples span the median with 0.9375, not with 0.95.
struct Interval {
  double low;
  double high;
  double confidence;
};

double quantile(std::vector<double> samples, double fraction);  // linear between neighbours
double median(std::vector<double> samples);
Interval median_interval(std::vector<double> samples);
// Half the interval's width over the median; nothing below two samples or at median zero.
std::optional<double> relative_half_width(const std::vector<double>& samples);

struct StopRule {
  std::size_t min_samples = 5;
  std::size_t max_samples = 100'000;
  double tolerance_ratio = 0.01;  // of the relative half width
  Nanoseconds deadline_ns = 0;    // on the clock of now_ns()
};

enum class Stop { go_on, interval, time, samples };

// The time rule waits for two samples: a median needs more than one, whatever the clock says.
Stop stop_of(const StopRule& rule, const std::vector<double>& samples, Nanoseconds now);
std::string_view name_of(Stop stop);

// Writes "samples", "median", "best", "p10", "p90" and "interval" of one series into the open
// object; `suffix` is the unit, as in "median_ns". `larger_is_better` decides what "best" is.
void write_summary(Json& json, std::string_view suffix, const std::vector<double>& samples,
                   bool larger_is_better);

}  // namespace homenode
