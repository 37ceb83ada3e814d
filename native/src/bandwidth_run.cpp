// One bandwidth run. Inside the timed region: one kernel over one window; bandwidth_run.hpp says why.
#include "bandwidth_run.hpp"

#include <algorithm>
#include <limits>

#include "bracket.hpp"
#include "chase.hpp"
#include "failure.hpp"
#include "gate.hpp"
#include "permutation.hpp"

namespace homenode {
namespace {

// Six times what is wanted: passes are counted by the first kernel, and another is five times as fast.
constexpr Nanoseconds least_sample_ns = 300'000;
constexpr std::size_t most_passes = 1U << 16U;

// No core has a larger L1. From there it may load two lines in a cycle and store a third.
constexpr std::size_t most_l1_bytes = std::size_t{256} << 10U;
constexpr std::size_t lines_of_l1 = 3;
constexpr int trials = 5;
constexpr double faster_ratio = 1.03;

constexpr std::size_t least_undisturbed = 3;
constexpr double least_quarter_ratio = 0.8;
constexpr int check_parts = 6;
constexpr std::uint64_t check_loads = 4'000;

// One thread's place in the team: only that thread writes it inside a task.
struct alignas(128) Place {
  StreamArrays arrays;
  Stint stint;
  double returned = 0.0;
  PageReport pages;
  double chase_ns = 0.0;
};

class BandwidthRun {
 public:
  BandwidthRun(const BandwidthRequest& request, Session& session)
      : request_(request), session_(session), team_(request.pus), ring_(team_.size()),
        places_(team_.size()) {
    result_.kernels = request.kernels;
  }

  BandwidthResult measure() {
    allocate();
    check_caches();
    warm_up();
    if (request_.any_width && result_.passes > 1) choose_widths();
    const StopRule rule = session_.stop_rule(request_.seconds);
    result_.stop_of_kernel.assign(result_.kernels.size(), Stop::go_on);
    for (std::uint64_t round = 0; !done(); ++round) {
      const Permutation order(result_.kernels.size(), session_.seed() + round);
      for (std::size_t turn = 0; turn < result_.kernels.size(); ++turn) {
        const std::size_t kernel = order(turn);
        if (result_.stop_of_kernel[kernel] == Stop::go_on) sample(kernel);
      }
      judge(rule);
    }
    team_.run([this](std::size_t rank) { places_[rank].arrays.verify(); });  // still where they were
    return std::move(result_);
  }

 private:
  void allocate() {
    const std::size_t per_thread = request_.array_bytes / team_.size();
    require_memory(session_.host(), StreamArrays::footprint_bytes(per_thread) * team_.size(), request_.node);
    team_.run([&](std::size_t rank) {
      Place& place = places_[rank];
      place.arrays = StreamArrays(per_thread, request_.pages, request_.node, session_.host());
      place.pages = place.arrays.verify();
    });
    for (const auto& place : places_) result_.pages.add(place.pages);
    result_.array_bytes_per_thread = places_.front().arrays.elements() * sizeof(double);
    result_.window_elements = places_.front().arrays.window_elements();
  }

  // All threads at once, so that they share the caches as they will. Uses the destination arrays,
  // whose contents no kernel reads.
  double chase_over(std::size_t divisor) {
    const std::size_t bytes = result_.array_bytes_per_thread / divisor;
    team_.run([&](std::size_t rank) {
      Place& place = places_[rank];
      std::uint64_t loads = 0;
      void** const start =
          link_chain(place.arrays.destination(), bytes, line_bytes, Order::local, session_.seed());
      team_.barrier().wait();
      void** at = start;
      place.chase_ns = std::numeric_limits<double>::infinity();
      for (int part = 0; part < check_parts; ++part) {  // the best: a neighbour's turn spoils the others
        const Nanoseconds begin = now_ns();
        at = walk(at, check_loads, loads);
        const auto elapsed = static_cast<double>(now_ns() - begin);
        place.chase_ns = std::min(place.chase_ns, elapsed / static_cast<double>(loads));
      }
    });
    std::vector<double> latencies;
    for (const auto& place : places_) latencies.push_back(place.chase_ns);
    return median(latencies);
  }

  void check_caches() {
    result_.latency_full_ns = chase_over(1);
    result_.latency_quarter_ns = chase_over(4);
    if (*result_.latency_quarter_ns >= least_quarter_ratio * *result_.latency_full_ns) return;
    session_.add_caveat({"arrays-near-caches",
                    "expected arrays of four times the caches or more; a chase over a quarter of them took " +
                        std::to_string(*result_.latency_quarter_ns) + " ns, over all " +
                        std::to_string(*result_.latency_full_ns) + " ns: caches hold that quarter",
                    "use a larger --array-bytes"});
  }

  void warm_up() {
    // The first pass over memory that a hypervisor has yet to back is slower by an order of magnitude.
    const std::size_t windows = places_.front().arrays.windows();
    for (std::size_t window = 0; window < windows; ++window) elapsed_of(result_.kernels.front(), window);
    // Doubled, as one pass over a few KiB takes less than reading the clock. Of several windows none is
    // run over twice: caches would hold it.
    while (windows == 1 && result_.passes < most_passes &&
           best_of(result_.kernels.front()) < least_sample_ns) {
      result_.passes *= 2;
    }
  }

  // Of a few turns the best: a neighbour's turn spoils some.
  Nanoseconds best_of(const Kernel& kernel) {
    Nanoseconds best = elapsed_of(kernel, 0);
    for (int trial = 1; trial < trials; ++trial) best = std::min(best, elapsed_of(kernel, 0));
    return best;
  }

  // Zen 4 copies twice as fast within its L1 with 32 bytes as with the 16 that suit it beyond the caches;
  // others differ. A little faster is no reason.
  void choose_widths() {
    for (auto& kernel : result_.kernels) {
      const std::string_view first = kernel.instruction_set;
      auto best = static_cast<Nanoseconds>(static_cast<double>(best_of(kernel)) / faster_ratio);
      for (const auto& set : instruction_sets()) {
        for (const auto& other : kernels_of(set)) {
          if (other.name() != kernel.name() || set == first) continue;
          if (const Nanoseconds elapsed = best_of(other); elapsed < best) {
            best = elapsed;
            kernel = other;
          }
        }
      }
    }
  }

  Nanoseconds elapsed_of(const Kernel& kernel, std::size_t window) {
    team_.run([&](std::size_t rank) {
      Place& place = places_[rank];
      place.stint = timed([&] { team_.barrier().wait(); },
                          [&] { place.returned = place.arrays.run(kernel, window, result_.passes); });
    });
    std::vector<Stint> stints;
    for (const auto& place : places_) stints.push_back(place.stint);
    return std::max<Nanoseconds>(team_time(stints).elapsed_ns, 1);
  }

  void sample(std::size_t index) {
    const Kernel& kernel = result_.kernels[index];
    const std::size_t window = result_.samples.size() % places_.front().arrays.windows();
    Bracket bracket;
    bracket.before_ns.resize(ring_.pairs());
    bracket.after_ns.resize(ring_.pairs());
    team_.run([&](std::size_t rank) {
      Place& place = places_[rank];
      place.arrays.spoil(window);
      ring_.measure(rank, team_.barrier(), bracket.before_ns);
      place.stint = timed([&] { team_.barrier().wait(); },
                          [&] { place.returned = place.arrays.run(kernel, window, result_.passes); });
      team_.barrier().wait();
      ring_.measure(rank, team_.barrier(), bracket.after_ns);
      place.arrays.require_result(kernel, window, place.returned, result_.passes);
    });
    std::vector<Stint> stints;
    for (const auto& place : places_) stints.push_back(place.stint);
    record(index, team_time(stints), stints.front().start_ns);
    if (team_.size() > 1) result_.brackets.push_back(std::move(bracket));
  }

  void record(std::size_t index, const TeamTime& time, Nanoseconds start_ns) {
    if (result_.samples.empty()) first_ns_ = start_ns;
    const Kernel& kernel = result_.kernels[index];
    const double bytes = static_cast<double>(kernel.reported_bytes()) *
                         static_cast<double>(places_.front().arrays.window_elements()) *
                         static_cast<double>(result_.passes) * static_cast<double>(team_.size());
    const double bytes_per_s = bytes / seconds_of(std::max<Nanoseconds>(time.elapsed_ns, 1));
    const std::size_t window_bytes = result_.window_elements * sizeof(double);
    require_bandwidth("kernel " + kernel.name(), bytes_per_s, session_.clock_hz(), team_.size(),
                      window_bytes <= most_l1_bytes ? lines_of_l1 : 1);
    result_.samples.push_back({index, start_ns - first_ns_, time.elapsed_ns, time.start_spread_ns,
                               time.away_ns, bytes_per_s, time.disturbed});
  }

  bool done() const {
    return std::ranges::find(result_.stop_of_kernel, Stop::go_on) == result_.stop_of_kernel.end();
  }

  // A kernel is done when the state with most of its samples is tight, or when the time is up.
  void judge(const StopRule& rule) {
    if (team_.size() > 1) result_.states = label_states(result_.brackets);
    const Nanoseconds now = now_ns();
    for (std::size_t kernel = 0; kernel < result_.kernels.size(); ++kernel) {
      if (result_.stop_of_kernel[kernel] != Stop::go_on) continue;
      Pool most;
      for (const auto& state : states_of(result_)) {
        Pool pool = pooled(result_, kernel, state);
        if (pool.bytes_per_s.size() > most.bytes_per_s.size()) most = std::move(pool);
      }
      Stop stop = stop_of(rule, most.bytes_per_s, now);
      // Where every bracket failed there is nothing to pool, and the time still ends.
      const auto taken = std::ranges::count(result_.samples, kernel, &BandwidthSample::kernel);
      if (stop == Stop::go_on && now >= rule.deadline_ns && taken >= 2) stop = Stop::time;
      // As much time again where a neighbour took the first: three samples without it may yet come.
      const bool later = now < rule.deadline_ns + static_cast<Nanoseconds>(request_.seconds * 1e9);
      if (most.disturbed && later) stop = Stop::go_on;
      result_.stop_of_kernel[kernel] = stop;
    }
  }

  const BandwidthRequest& request_;
  Session& session_;
  Team team_;
  Ring ring_;
  std::vector<Place> places_;
  BandwidthResult result_;
  Nanoseconds first_ns_ = 0;
};

std::optional<std::size_t> state_of(const BandwidthResult& result, std::size_t sample) {
  return result.brackets.empty() ? std::nullopt : result.states.labels[sample].state;
}

}  // namespace

BandwidthResult run_bandwidth(const BandwidthRequest& request, Session& session) {
  return BandwidthRun(request, session).measure();
}

Pool pooled(const BandwidthResult& result, std::size_t kernel, std::optional<std::size_t> state) {
  std::vector<double> calm;
  std::vector<double> all;
  for (std::size_t i = 0; i < result.samples.size(); ++i) {
    const auto& sample = result.samples[i];
    if (sample.kernel != kernel || state_of(result, i) != state) continue;
    all.push_back(sample.bytes_per_s);
    if (!sample.disturbed) calm.push_back(sample.bytes_per_s);
  }
  if (calm.size() >= least_undisturbed || calm.size() == all.size()) return {std::move(calm), false};
  return {std::move(all), true};
}

std::vector<std::optional<std::size_t>> states_of(const BandwidthResult& result) {
  if (result.brackets.empty()) return {std::nullopt};
  std::vector<std::optional<std::size_t>> states;
  for (std::size_t state = 0; state < result.states.signatures.size(); ++state) states.emplace_back(state);
  return states;
}

}  // namespace homenode
