// The command "throughput": CPU events per second on one CPU and on all, per thread, with fairness.
// The timed region is in work.cpp.
#include <algorithm>
#include <numeric>

#include "failure.hpp"
#include "session.hpp"
#include "work.hpp"

namespace homenode {
namespace {

constexpr double sample_s = 0.05;

struct Series {
  std::vector<RateSample> samples;
  std::vector<double> sums;  // events/s of all active threads, one per sample
  Stop stop = Stop::go_on;

  void add(RateSample sample) {
    sums.push_back(sum_of(sample.events_per_s));
    samples.push_back(std::move(sample));
  }
  std::vector<double> rates_of(std::size_t place) const {
    std::vector<double> rates;
    for (const auto& sample : samples) rates.push_back(sample.events_per_s[place]);
    return rates;
  }
};

void write_series(Json& json, const std::string& name, const Series& series, const std::vector<int>& pus) {
  json.object(name);
  write_summary(json, "events_per_s", series.sums, true);
  json.field("stop", name_of(series.stop));
  json.field("samples_disturbed", std::ranges::count(series.samples, true, &RateSample::disturbed));
  std::vector<double> medians;
  for (std::size_t place = 0; place < pus.size(); ++place) medians.push_back(median(series.rates_of(place)));
  const double mean = sum_of(medians) / static_cast<double>(medians.size());
  json.array("threads");
  for (std::size_t place = 0; place < pus.size(); ++place) {
    std::uint64_t events = 0;
    for (const auto& sample : series.samples) events += sample.events[place];
    json.object().field("pu", pus[place]).field("events", events);
    json.field("median_events_per_s", medians[place]);
    json.field("fairness_ratio", medians[place] / mean);  // 1 = its even share
    json.field("samples_events_per_s", series.rates_of(place)).end();
  }
  json.end();
  const double squares = std::inner_product(medians.begin(), medians.end(), medians.begin(), 0.0);
  const double total = sum_of(medians);
  json.field("fairness_index", total * total / (static_cast<double>(medians.size()) * squares));  // Jain's
  json.end();
}

std::string run(const Options& options) {
  Session session("throughput", options);
  const auto work = work_of(options.text("work"));
  if (!work) options.reject("work", "primes or saturate");
  const auto& pus = session.pus().indices();
  Team team(session.pus());
  std::vector<std::size_t> all(pus.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const std::uint64_t expected = do_event(*work);
  StopRule rule = session.stop_rule(options.number("seconds", 0.05, 3600));
  Series one;
  Series every;
  // In turns, so that a change of clock falls on both.
  while (one.stop == Stop::go_on || every.stop == Stop::go_on) {
    one.add(measure_rates(team, {0}, *work, expected, sample_s));
    every.add(measure_rates(team, all, *work, expected, sample_s));
    one.stop = stop_of(rule, one.sums, now_ns());
    every.stop = stop_of(rule, every.sums, now_ns());
  }
  Json& json = session.json();
  json.field("work", name_of(*work));
  write_series(json, "one", one, {pus.front()});
  write_series(json, "all", every, pus);
  json.field("scaling_ratio",
             median(every.sums) / (median(one.sums) * static_cast<double>(pus.size())));  // 1 = linear
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("2");
  specs.push_back({"work", "KIND", "primes", "primes (sysbench's cpu event) or saturate (multiply-add)"});
  return specs;
}

}  // namespace

Command throughput_command() {
  return {"throughput", "CPU events per second on one CPU and on all, per thread", options, run};
}

}  // namespace homenode
