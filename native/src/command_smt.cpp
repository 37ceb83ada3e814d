// The command "smt": what a core's siblings cost each other: one alone against all together.
// The timed region is in work.cpp.
#include <algorithm>
#include <numeric>

#include "failure.hpp"
#include "session.hpp"
#include "work.hpp"

namespace homenode {
namespace {

constexpr double sample_s = 0.03;

std::vector<PuSet> chosen_cores(const Options& options, const Session& session) {
  if (options.given("core")) {
    const auto core = options.pus("core");
    if (core->size() < 2) options.reject("core", "two CPUs or more, such as 0,32");
    if (core->intersection(session.pus()).size() != core->size()) {
      options.reject("core", "CPUs among " + session.pus().text());
    }
    return {*core};
  }
  std::vector<PuSet> cores;
  for (const auto& siblings : session.host().siblings) {
    const PuSet core = siblings.intersection(session.pus());
    if (core.size() > 1) cores.push_back(core);
  }
  if (cores.empty()) {
    throw measure_failure("smt: no core with two CPUs among " + session.pus().text() +
                              ": SMT is off or hidden from this guest",
                          "--core 0,1 measures two CPUs of your choice as if they were siblings");
  }
  const auto most = options.count("cores", 1, 65536);
  if (cores.size() > most) cores.resize(most);
  return cores;
}

void measure_core(const PuSet& core, Work work, std::uint64_t expected, const StopRule& rule, Json& json) {
  Team team(core);
  std::vector<std::size_t> all(core.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  std::vector<double> alone;
  std::vector<double> together;
  std::vector<std::vector<double>> each(core.size());
  Stop stop = Stop::go_on;
  std::size_t disturbed = 0;
  while (stop == Stop::go_on) {
    const RateSample one = measure_rates(team, {0}, work, expected, sample_s);
    const RateSample both = measure_rates(team, all, work, expected, sample_s);
    alone.push_back(one.events_per_s.front());
    together.push_back(sum_of(both.events_per_s));
    for (std::size_t place = 0; place < core.size(); ++place) each[place].push_back(both.events_per_s[place]);
    disturbed += (one.disturbed ? 1U : 0U) + (both.disturbed ? 1U : 0U);
    const Stop of_one = stop_of(rule, alone, now_ns());
    const Stop of_all = stop_of(rule, together, now_ns());
    if (of_one != Stop::go_on && of_all != Stop::go_on) stop = of_all;
  }
  json.object().field("pus", core.text()).field("work", name_of(work));
  json.object("alone");
  write_summary(json, "events_per_s", alone, true);
  json.field("samples_events_per_s", alone).end().object("together");
  write_summary(json, "events_per_s", together, true);
  json.array("threads");
  for (std::size_t place = 0; place < core.size(); ++place) {
    json.object().field("pu", core.indices()[place]);
    json.field("median_events_per_s", median(each[place]));
    json.field("of_alone_ratio", median(each[place]) / median(alone));  // 1 = no cost, 0.5 = all of it
    json.field("samples_events_per_s", each[place]).end();
  }
  json.end().end();
  json.field("gain_ratio", median(together) / median(alone));  // 1 = the siblings add nothing
  json.field("samples_disturbed", disturbed).field("stop", name_of(stop)).end();
}

std::string run(const Options& options) {
  Session session("smt", options);
  const auto cores = chosen_cores(options, session);
  std::vector<Work> works;
  for (const auto& name : options.list("work")) {
    const auto work = work_of(name);
    if (!work) options.reject("work", "primes, saturate or both");
    works.push_back(*work);
  }
  if (works.empty()) options.reject("work", "primes, saturate or both");
  const double seconds = options.number("seconds", 0.05, 3600);
  const double share_s = seconds / static_cast<double>(cores.size() * works.size());
  session.json().field("siblings_known", !options.given("core")).array("cores");
  for (const auto& core : cores) {
    for (const auto work : works) {
      measure_core(core, work, do_event(work), session.stop_rule(share_s), session.json());
    }
  }
  session.json().end();
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("3");
  specs.push_back({"work", "LIST", "primes,saturate", "primes (leaves room), saturate (leaves none)"});
  specs.push_back({"cores", "N", "4", "measure at most so many cores, the first ones"});
  specs.push_back({"core", "LIST", "", "measure these CPUs as if they were siblings"});
  return specs;
}

}  // namespace

Command smt_command() {
  return {"smt", "what the siblings of a core cost each other", options, run};
}

}  // namespace homenode
