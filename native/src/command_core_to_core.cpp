// The command "core-to-core": latency of a handed-over cache line for every pair of CPUs.
// The timed region is in handoff.cpp.
#include <memory>

#include "failure.hpp"
#include "gate.hpp"
#include "handoff.hpp"
#include "permutation.hpp"
#include "session.hpp"
#include "team.hpp"

namespace homenode {
namespace {

struct Pair {
  int one;
  int other;
  std::vector<double> samples_ns;
  Stop stop = Stop::go_on;
};

// A team for the pair alone: threads spinning elsewhere would take power and siblings' cycles.
void measure_pair(Pair& pair, const Session& session, const StopRule& rule) {
  // Long: a neighbour may have one of the CPUs for a while, and a median bears that.
  constexpr HandoffPlan plan{.chunks = 5, .round_trips = 200, .patience_ns = 10'000'000'000};
  constexpr std::size_t most_rounds = 40;
  Team team(PuSet({pair.one, pair.other}));
  const auto line = std::make_unique<HandoffLine>();
  for (std::size_t round = 0; round < most_rounds && pair.stop == Stop::go_on; ++round) {
    line->turn.store(0);
    std::vector<double> samples;
    team.run([&](std::size_t rank) {
      team.barrier().wait();
      if (rank == 0) {
        samples = lead_handoff(*line, plan);
      } else {
        follow_handoff(*line, plan);
      }
    });
    if (samples.empty()) {
      throw measure_failure("CPUs " + std::to_string(pair.one) + " and " + std::to_string(pair.other) +
                                ": no cache line was handed over within 10 s",
                            "are both CPUs really running? Something else may hold one of them");
    }
    // The first chunk of the first round still warms up clocks and the line.
    pair.samples_ns.insert(pair.samples_ns.end(), samples.begin() + (round == 0 ? 1 : 0), samples.end());
    pair.stop = stop_of(rule, pair.samples_ns, now_ns());
  }
  if (pair.stop == Stop::go_on) pair.stop = Stop::samples;
  require_latency("core-to-core latency", median(pair.samples_ns), session.clock_hz());
}

std::string run(const Options& options) {
  Session session("core-to-core", options);
  const auto& pus = session.pus().indices();
  if (pus.size() < 2) {
    throw measure_failure("core-to-core: expected two CPUs or more, found " + session.pus().text(),
                          "choose with --pus, such as --pus 0-3");
  }
  const double seconds = options.number("seconds", 0.01, 3600);
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < pus.size(); ++i) {
    for (std::size_t j = i + 1; j < pus.size(); ++j) pairs.push_back({pus[i], pus[j], {}, Stop::go_on});
  }
  // In a seeded order: a disturbance that passes over the machine does not colour one corner.
  const Permutation order(pairs.size(), session.seed());
  const Nanoseconds end = now_ns() + static_cast<Nanoseconds>(seconds * 1e9);
  for (std::uint64_t turn = 0; turn < pairs.size(); ++turn) {
    StopRule rule = session.stop_rule(0.0);
    const Nanoseconds share = (end - now_ns()) / static_cast<Nanoseconds>(pairs.size() - turn);
    rule.deadline_ns = now_ns() + std::max<Nanoseconds>(share, 0);
    measure_pair(pairs[order(turn)], session, rule);
  }
  Json& json = session.json();
  json.array("pairs");
  for (const auto& pair : pairs) {
    json.object().field("pus", std::vector<int>{pair.one, pair.other});
    write_summary(json, "ns", pair.samples_ns, false);
    json.field("stop", name_of(pair.stop)).field("samples_ns", pair.samples_ns).end();
  }
  json.end().object("matrix_ns");  // rows and columns in the order of the CPUs; one way, median
  json.field("pus", pus).array("rows");
  std::vector<std::vector<std::optional<double>>> rows(pus.size());
  for (auto& row : rows) row.resize(pus.size());
  std::size_t next = 0;  // the pairs were listed row by row
  for (std::size_t i = 0; i < pus.size(); ++i) {
    for (std::size_t j = i + 1; j < pus.size(); ++j, ++next) {
      rows[i][j] = rows[j][i] = median(pairs[next].samples_ns);
    }
  }
  for (const auto& row : rows) json.value(row);
  json.end().end();
  return session.finish();
}

}  // namespace

Command core_to_core_command() {
  return {"core-to-core", "latency between each pair of CPUs", [] { return common_options("5"); }, run};
}

}  // namespace homenode
