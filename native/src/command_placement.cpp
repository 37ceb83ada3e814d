// The command "placement": do the CPUs stand where they seem to stand, and do they stay there?
//
// Inside the timed regions: the handoffs of bracket.cpp, and streaming stores over 16 MiB by one thread,
// then by two at once. In a guest whose vCPUs are not pinned, the same two CPUs share a cache link in
// one second (27 ns, no more bandwidth than one) and have one each in the next (110 ns, twice as much),
// and the kernel always shows one shared LLC. No single figure shows that; the two together do.
#include <algorithm>
#include <cmath>

#include "bracket.hpp"
#include "failure.hpp"
#include "gate.hpp"
#include "placement_state.hpp"
#include "replay.hpp"
#include "session.hpp"
#include "stream_arrays.hpp"

namespace homenode {
namespace {

constexpr std::size_t array_bytes = std::size_t{32} << 20U;  // two windows of 16 MiB
constexpr double far_ns = 90.0;      // beyond every known latency within one LLC
constexpr double sibling_ns = 14.0;  // below every known latency between two cores

// One look: fill by the pair's first CPU alone, then by both, between two brackets.
struct Look {
  Nanoseconds at_ns = 0;
  std::size_t pair = 0;
  std::optional<double> fill_one_bytes_per_s;
  std::optional<double> fill_both_bytes_per_s;
  bool disturbed = false;

  std::optional<double> ratio() const {
    if (!fill_one_bytes_per_s || !fill_both_bytes_per_s) return std::nullopt;
    return *fill_both_bytes_per_s / *fill_one_bytes_per_s;
  }
};

struct Watch {
  std::vector<Look> looks;
  std::vector<Bracket> brackets;
};

struct alignas(128) Place {
  StreamArrays arrays;
  Stint stint;
};

Watch watch(const Options& options, Session& session) {
  Watch watch;
  Team team(session.pus());
  Ring ring(team.size());
  std::vector<Place> places(team.size());
  const auto kernels = best_kernels();
  const auto fill = *std::ranges::find_if(kernels, [](const Kernel& kernel) {
    return kernel.operation == Operation::write && kernel.stores == Stores::non_temporal;
  });
  require_memory(session.host(), StreamArrays::footprint_bytes(array_bytes) * team.size(), std::nullopt);
  team.run([&](std::size_t rank) {
    places[rank].arrays = StreamArrays(array_bytes, PageKind::automatic, std::nullopt, session.host());
  });
  session.report_pages(places.front().arrays.verify(), true);
  const auto interval_ns = static_cast<Nanoseconds>(options.number("interval", 0.0, 3600) * 1e9);
  const double seconds = options.number("seconds", 0.01, 86400);
  const Nanoseconds begin = now_ns();
  const Nanoseconds end = begin + static_cast<Nanoseconds>(seconds * 1e9);
  const double bytes = static_cast<double>(places.front().arrays.window_elements() * sizeof(double));
  for (std::size_t round = 0; round == 0 || now_ns() < end; ++round) {
    Look look;
    look.pair = round % ring.pairs();
    look.at_ns = now_ns() - begin;
    Bracket bracket;
    bracket.before_ns.resize(ring.pairs());
    bracket.after_ns.resize(ring.pairs());
    const std::size_t window = round % places.front().arrays.windows();
    const auto fill_with = [&](std::size_t rank, bool works) {
      team.barrier().wait();
      if (!works) return;
      places[rank].stint = timed([] {}, [&] { places[rank].arrays.run(fill, window); });
    };
    TeamTime one{};
    TeamTime both{};
    team.run([&](std::size_t rank) {
      ring.measure(rank, team.barrier(), bracket.before_ns);
      fill_with(rank, rank == look.pair);
      team.barrier().wait();
      if (rank == look.pair) one = team_time({places[rank].stint});
      fill_with(rank, rank == look.pair || rank == look.pair + 1);
      team.barrier().wait();
      if (rank == look.pair) both = team_time({places[rank].stint, places[rank + 1].stint});
      ring.measure(rank, team.barrier(), bracket.after_ns);
    });
    look.fill_one_bytes_per_s = bytes / seconds_of(std::max<Nanoseconds>(one.elapsed_ns, 1));
    look.fill_both_bytes_per_s = 2.0 * bytes / seconds_of(std::max<Nanoseconds>(both.elapsed_ns, 1));
    look.disturbed = one.disturbed || both.disturbed;
    require_bandwidth("fill by one", *look.fill_one_bytes_per_s, session.clock_hz(), 1);
    require_bandwidth("fill by two", *look.fill_both_bytes_per_s, session.clock_hz(), 2);
    watch.looks.push_back(look);
    watch.brackets.push_back(std::move(bracket));
    const Nanoseconds next = begin + static_cast<Nanoseconds>(round + 1) * interval_ns;
    if (now_ns() < next && next < end) {
      const timespec until{next / 1'000'000'000, next % 1'000'000'000};
      clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
    }
  }
  return watch;
}

std::vector<double> calm_ratios(const Watch& watch, const StateSeries& series, std::size_t state,
                                std::size_t pair) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < watch.looks.size(); ++i) {
    const auto ratio = watch.looks[i].ratio();
    const bool counts = series.labels[i].state == state && watch.looks[i].pair == pair;
    if (counts && ratio && !watch.looks[i].disturbed) ratios.push_back(*ratio);
  }
  return ratios;
}

void write_states(Json& json, const Watch& watch, const StateSeries& series) {
  json.array("states");
  for (std::size_t state = 0; state < series.signatures.size(); ++state) {
    json.object().field("state", state).field("pair_classes", series.signatures[state]);
    json.field("cas_median_ns", series.median_ns[state]);
    json.field("samples", std::ranges::count_if(series.labels, [state](const StateLabel& label) {
      return label.state == state;
    }));
    json.array("pairs");
    const std::size_t pairs = watch.brackets.front().before_ns.size();
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      const auto ratios = calm_ratios(watch, series, state, pair);
      if (ratios.empty()) continue;
      json.object().field("pair", pair);
      write_summary(json, "fill_ratio", ratios, true);
      json.field("link", name_of(link_use_of(median(ratios)))).end();
    }
    json.end().end();
  }
  json.end();
}

void write_watch(Json& json, const Watch& watch, const StateSeries& series) {
  write_states(json, watch, series);
  json.field("transitions", series.transitions);
  const char* verdict = series.transitions.empty() ? "steady" : "moves";
  json.field("verdict", series.signatures.empty() ? "unknown" : verdict);
  json.array("series");
  for (std::size_t i = 0; i < watch.looks.size(); ++i) {
    const Look& look = watch.looks[i];
    json.object().field("at_ns", look.at_ns).field("pair", look.pair);
    json.field("state", series.labels[i].state).field("no_state", series.labels[i].reason);
    json.field("cas_before_ns", watch.brackets[i].before_ns);
    json.field("cas_after_ns", watch.brackets[i].after_ns);
    json.field("fill_one_bytes_per_s", look.fill_one_bytes_per_s);
    json.field("fill_both_bytes_per_s", look.fill_both_bytes_per_s);
    json.field("fill_ratio", look.ratio()).field("disturbed", look.disturbed).end();
  }
  json.end();
}

bool shown_as_siblings(const Host& host, int one, int other) {
  return std::ranges::any_of(host.siblings, [&](const PuSet& core) {
    return core.contains(one) && core.contains(other);
  });
}

// Says where the cores and LLCs that the kernel shows cannot be what these CPUs stand on.
void report_topology(Session& session, const Watch& watch, const StateSeries& series) {
  const auto& pus = session.pus().indices();
  for (std::size_t state = 0; state < series.signatures.size(); ++state) {
    for (std::size_t pair = 0; pair + 1 < pus.size(); ++pair) {
      std::vector<double> latencies;
      for (std::size_t i = 0; i < watch.brackets.size(); ++i) {
        if (series.labels[i].state == state) latencies.push_back(*watch.brackets[i].before_ns[pair]);
      }
      const std::string names = "CPUs " + std::to_string(pus[pair]) + " and " + std::to_string(pus[pair + 1]);
      if (median(latencies) < sibling_ns && !shown_as_siblings(session.host(), pus[pair], pus[pair + 1])) {
        session.add_caveat({"siblings-not-shown",
                       "the kernel shows " + names + " as cores of their own, but a line takes " +
                           std::to_string(median(latencies)) + " ns between them, as between two siblings",
                       "pin each vCPU to a core of its own, or show the guest its siblings"});
      }
      const auto llc = session.host().llc_of(pus[pair]);
      const auto ratios = calm_ratios(watch, series, state, pair);
      if (!llc || !llc->contains(pus[pair + 1]) || ratios.empty()) continue;
      const bool apart = median(latencies) > far_ns && link_use_of(median(ratios)) == LinkUse::apart;
      if (!apart) continue;
      session.add_caveat({"llc-not-shared",
                     "the kernel shows one LLC for " + names + ", but a line takes " +
                         std::to_string(median(latencies)) + " ns between them and two fill " +
                         std::to_string(median(ratios)) + " times as fast as one",
                     "give the guest the host's caches (host-passthrough and true dies), and pin the vCPUs"});
    }
  }
  if (series.transitions.empty()) return;
  session.add_caveat({"placement-moves",
                 "core-to-core latency changed " + std::to_string(series.transitions.size()) +
                     " times: the hypervisor moves the vCPUs between caches",
                 "pin the vCPUs on the host (vcpupin), whole LLCs first"});
}

std::string replay(const std::string& path) {
  Watch watch;
  for (const auto& line : read_series(path, 2, 4)) {
    const auto known = [](double value) {
      return std::isnan(value) || value <= 0.0 ? std::nullopt : std::optional<double>(value);
    };
    Look look;
    if (line.size() > 2) look.fill_one_bytes_per_s = known(line[2]);
    if (line.size() > 3) look.fill_both_bytes_per_s = known(line[3]);
    watch.looks.push_back(look);
    watch.brackets.push_back({{known(line[0])}, {known(line[1])}});
  }
  Json json;
  write_head(json, "placement");
  json.field("replayed", path);
  write_watch(json, watch, label_states(watch.brackets));
  json.end();
  return json.text();
}

std::string run(const Options& options) {
  if (options.given("replay")) return replay(options.text("replay"));
  Session session("placement", options);
  if (session.pus().size() < 2) {
    throw measure_failure("placement: expected two CPUs or more, found " + session.pus().text(),
                          "choose with --pus, such as --pus 0-3");
  }
  const Watch seen = watch(options, session);
  const StateSeries series = label_states(seen.brackets);
  const auto& pus = session.pus().indices();
  Json& json = session.json();
  json.array("pairs");
  for (std::size_t pair = 0; pair + 1 < pus.size(); ++pair) {
    const auto llc = session.host().llc_of(pus[pair]);
    json.object().field("pair", pair).field("pus", std::vector<int>{pus[pair], pus[pair + 1]});
    json.field("llc_shared_reported",
               llc ? std::optional<bool>(llc->contains(pus[pair + 1])) : std::nullopt).end();
  }
  json.end();
  write_watch(json, seen, series);
  report_topology(session, seen, series);
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("2");
  specs.push_back({"interval", "S", "0.01", "from one look to the next; 0: without pause"});
  specs.push_back({"replay", "FILE", "", "label lines of CAS before, CAS after [fill one, fill both]", true});
  return specs;
}

}  // namespace

Command placement_command() {
  return {"placement", "do the CPUs stand where they seem to, and do they stay there", options, run};
}

}  // namespace homenode
