// Unit tests of the parts that need no quiet machine. Built with the sanitizers; nothing is timed here.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "chase.hpp"
#include "contention.hpp"
#include "emulation.hpp"
#include "failure.hpp"
#include "gate.hpp"
#include "json.hpp"
#include "kernel.hpp"
#include "levels.hpp"
#include "memory_limit.hpp"
#include "options.hpp"
#include "page_query.hpp"
#include "permutation.hpp"
#include "placement_state.hpp"
#include "samples.hpp"
#include "stream_arrays.hpp"
#include "team.hpp"
#include "work.hpp"

namespace {

using namespace homenode;

int failures = 0;
int checks = 0;

void check(bool holds, const char* what, int line) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "unit_tests.cpp:%d: expected %s\n", line, what);
}
#define CHECK(condition) check((condition), #condition, __LINE__)

template <typename Work>
std::string failure_of(const Work& work) {
  try {
    work();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

void limits_of_a_job_are_found_in_its_own_cgroup_and_above() {
  const std::string text = "0::/system.slice/job_7/step_0\n4:memory,hugetlb:/slurm/job_7\n2:cpu,cpuacct:/other\n";
  const std::vector<std::string> expected{
      "/m/system.slice/job_7/step_0", "/m/system.slice/job_7", "/m/system.slice", "/m",
      "/m/memory/slurm/job_7", "/m/memory/slurm", "/m/memory"};
  CHECK(limit_directories(text, "/m") == expected);
  CHECK(limit_directories("0::/../../x\n", "/m") == std::vector<std::string>{"/m"});
  CHECK(limit_directories("nothing\n0::\n", "/m") == std::vector<std::string>{"/m"});
}

void a_cgroup_leaves_its_limit_without_what_cannot_be_dropped() {
  const auto top = std::filesystem::temp_directory_path() / ("homenode-limit-" + std::to_string(getpid()));
  const auto job = top / "job";
  std::filesystem::create_directories(job);
  const auto write = [](const std::filesystem::path& path, const char* text) { std::ofstream(path) << text; };
  CHECK(!limit_left({top.string(), job.string()}));
  write(top / "memory.max", "max\n");
  write(top / "memory.current", "500\n");
  CHECK(!limit_left({top.string(), job.string()}));
  write(job / "memory.max", "1000\n");
  write(job / "memory.current", "700\n");
  CHECK(limit_left({job.string(), top.string()}) == 300);
  write(job / "memory.stat", "anon 300\ninactive_file 250\nactive_file 50\n");
  CHECK(limit_left({job.string(), top.string()}) == 600);
  write(top / "memory.max", "550\n");
  CHECK(limit_left({job.string(), top.string()}) == 50);
  std::filesystem::remove_all(top);
}

void pu_sets_read_and_print_the_kernels_list_form() {
  CHECK(PuSet::parse("0-3,8,10-11\n")->text() == "0-3,8,10-11");
  CHECK(PuSet::parse("3,1,2")->text() == "1-3");
  CHECK(PuSet::parse("")->empty());
  for (const char* wrong : {"3-1", "a", "1,", ",1", "1--2", "-1", "99999999999", "70000", "1 2"}) {
    CHECK(!PuSet::parse(wrong));
  }
}

void sizes_take_binary_units_and_refuse_overflow() {
  CHECK(parse_bytes("64M") == std::uint64_t{64} << 20U);
  CHECK(parse_bytes("1GiB") == std::uint64_t{1} << 30U);
  CHECK(!parse_bytes("1X") && !parse_bytes("") && !parse_bytes("-1") && !parse_bytes("99999999999999G"));
}

void every_chain_is_one_cycle_through_every_cell() {
  const Host host = read_host();
  for (const std::size_t bytes : {128UL, 192UL, 4096UL, 65536UL, 3UL << 18U, (1UL << 20U) + 320UL}) {
    for (const std::size_t stride : {64UL, 256UL}) {
      if (bytes / stride < 2) continue;
      for (const auto order : {Order::local, Order::random}) {
        const Buffer buffer({bytes, PageKind::base, std::nullopt}, host);
        void** const start = link_chain(buffer.data(), bytes, stride, order, 7);
        std::set<std::size_t> cells;
        void** at = start;
        do {
          cells.insert(static_cast<std::size_t>(reinterpret_cast<std::byte*>(at) - buffer.data()) / stride);
          at = static_cast<void**>(*at);
        } while (at != start && cells.size() <= bytes / stride);
        CHECK(cells.size() == bytes / stride && *cells.rbegin() < bytes / stride);
        std::uint64_t loads = 0;
        walk(start, 250, loads);
        CHECK(loads == 400);
      }
    }
  }
}

void permutations_reach_everything_once() {
  for (std::uint64_t count : {1U, 2U, 3U, 7U, 64U, 1000U}) {
    std::set<std::uint64_t> seen;
    const Permutation permutation(count, 3);
    for (std::uint64_t i = 0; i < count; ++i) seen.insert(permutation(i));
    CHECK(seen.size() == count && *seen.rbegin() == count - 1);
  }
}

void kernels_count_and_compute_what_they_say() {
  const Host host = read_host();
  const StreamArrays arrays(std::size_t{1} << 20U, PageKind::base, std::nullopt, host);
  CHECK(!failure_of([] { kernels_of("avx1024"); }).empty());
  std::vector<std::vector<Kernel>> sets{best_kernels()};
  for (const auto& set : instruction_sets()) sets.push_back(kernels_of(set));
  for (const auto& kernels : sets) {
    CHECK(kernels.size() == 11);
    for (const auto& kernel : kernels) {
      arrays.spoil(0);
      const double returned = arrays.run(kernel, 0);
      CHECK(failure_of([&] { arrays.require_result(kernel, 0, returned); }).empty());
      arrays.spoil(0);
      CHECK(!failure_of([&] { arrays.require_result(kernel, 0, -1.0); }).empty());
      const bool allocates = kernel.operation != Operation::read && kernel.stores == Stores::regular;
      CHECK(kernel.moved_bytes() == kernel.reported_bytes() + (allocates ? 8 : 0));
    }
  }
  CHECK(arrays.verify().pages_unknown == 0);
  for (const auto& kernel : best_kernels()) {
    if (kernel.stores != Stores::regular) continue;
    if (kernel.operation == Operation::read) CHECK(kernel.instruction_set == instruction_sets().front());
    if (kernel.operation == Operation::copy) CHECK(kernel.instruction_set == instruction_sets().back());
  }
}

void buffers_are_where_they_were_asked_for_or_refused() {
  const Host host = read_host();
  CHECK(!failure_of([&] { require_memory(host, std::uint64_t{1} << 60U, std::nullopt); }).empty());
  CHECK(!failure_of([&] { Buffer({1U << 20U, PageKind::base, 1023}, host); }).empty());
  CHECK(!failure_of([&] { Buffer({std::size_t{1} << 46U, PageKind::hugetlb, std::nullopt}, host); }).empty());
  Buffer buffer({1U << 20U, PageKind::base, std::nullopt}, host);
  const PageReport untouched = buffer.verify();
  CHECK(untouched.pages_of_node.empty() || untouched.pages_unknown > 0);
  for (std::size_t at = 0; at < buffer.bytes(); at += 1024) buffer.data()[at] = std::byte{1};
  const PageReport report = buffer.verify();
  CHECK(report.huge_bytes == 0);
  CHECK(report.pages_unknown == 0);
  const PageNodes line = parse_numa_maps_line("7f00 bind:1 anon=512 dirty=512 N0=12 N1=500 kernelpagesize_kB=4");
  CHECK(line.pages_of_node.at(0) == 12 && line.pages_of_node.at(1) == 500);
  CHECK(!parse_numa_maps_line("7f00 default N=3 Nx=1 N1=x").error.empty());
  PageReport mixed;
  mixed.pages_of_node = line.pages_of_node;
  CHECK(mixed.ratio_on(1) < 1.0 && mixed.ratio_on(2) == 0.0);
}

void the_gate_refuses_what_cannot_be() {
  CHECK(bandwidth_doubt(945e9, 3.7e9, 1).has_value());
  CHECK(!bandwidth_doubt(41e9, 3.7e9, 1).has_value());
  CHECK(bandwidth_doubt(0.0, 3.7e9, 1) && bandwidth_doubt(std::nan(""), 3.7e9, 1) && bandwidth_doubt(-1, 3.7e9, 1));
  CHECK(latency_doubt(0.01, 3.7e9) && latency_doubt(0.0, 3.7e9) && !latency_doubt(1.09, 3.7e9));
  CHECK(!failure_of([] { require_bandwidth("read", 945e9, 3.7e9, 1); }).empty());
  CHECK(measure_clock_hz() > 1e7);
}

void intervals_say_the_confidence_that_they_reach() {
  const Interval five = median_interval({5, 1, 4, 2, 3});
  CHECK(five.low == 1 && five.high == 5 && std::abs(five.confidence - 0.9375) < 1e-9);
  std::vector<double> many;
  for (int i = 0; i < 1001; ++i) many.push_back(100 + i % 3);
  const Interval interval = median_interval(many);
  CHECK(interval.confidence >= 0.95 && interval.low == 101 && interval.high == 101);
  std::vector<double> ramp;
  for (int i = 1; i <= 25; ++i) ramp.push_back(i);
  CHECK(median_interval(ramp).low == 8 && median_interval(ramp).high == 18);  // Conover's table, n = 25
  StopRule rule;
  rule.deadline_ns = 100;
  CHECK(stop_of(rule, {1, 1, 1, 1, 1}, 0) == Stop::interval);
  CHECK(stop_of(rule, {1, 2, 1, 2, 1}, 0) == Stop::go_on);
  CHECK(stop_of(rule, {1, 2, 1}, 100) == Stop::time);
  CHECK(stop_of(rule, {1}, 100) == Stop::go_on);
  CHECK(!relative_half_width({0, 0}).has_value() && std::isnan(median({})));
}

void classes_split_at_the_widest_gap() {
  CHECK((classes_of({27, 110, 30, 33, 106}) == std::vector<std::size_t>{0, 1, 0, 0, 1}));
  CHECK((classes_of({10, 27, 107}) == std::vector<std::size_t>{0, 1, 2}));
  CHECK(classes_of({}).empty());
  std::vector<double> creeping;  // no gap anywhere, and still not one class
  for (double value = 27; value < 110; value *= 1.05) creeping.push_back(value);
  const auto classes = classes_of(creeping);
  CHECK(classes.front() != classes.back());
}

void a_lone_disturbed_end_is_no_transition() {
  std::vector<Bracket> brackets(6, Bracket{{28.0}, {29.0}});
  brackets[2].after_ns = {190.0};
  const StateSeries series = label_states(brackets);
  CHECK(series.transitions.empty() && series.signatures.size() == 1 && !series.labels[2].state);
  brackets[2].after_ns = {std::nullopt};
  CHECK(!label_states(brackets).labels[2].state);
  CHECK(label_states({}).labels.empty());
}

void levels_need_a_curve_that_rises() {
  CHECK(find_levels({}).empty());
  std::vector<CurvePoint> flat;
  for (std::uint64_t size = 4096; size <= 1U << 20U; size *= 2) flat.push_back({size, 1.0});
  CHECK(find_levels(flat).empty());
}

void json_escapes_and_writes_unknown_as_null() {
  Json json;
  json.object().field("a\"\\\n", "x\x01").field("nan", std::nan("")).field("none", std::optional<int>{});
  json.field("list", std::vector<double>{1.5, 2}).end();
  CHECK(json.text().find("\"a\\\"\\\\\\u000a\": \"x\\u0001\"") != std::string::npos);
  CHECK(json.text().find("\"nan\": null") != std::string::npos);
}

void proc_stat_is_summed_over_the_wanted_pus_only() {
  const std::string text = "cpu  9 9 9 9\ncpu0 100 0 50 800 0 0 10 5 0 0\ncpu1 1 1 1 1 1 1 1 1\nintr 5\n";
  const auto account = parse_proc_stat(text, PuSet({0}), 100);
  CHECK(account && std::abs(account->busy_s - 1.6) < 1e-9 && std::abs(account->steal_s - 0.05) < 1e-9);
  CHECK(!parse_proc_stat(text, PuSet({0, 7}), 100));
  Contention contention{0.5, 0.0, 1.0};
  CHECK(contention.busy_neighbour());
}

void a_failing_thread_breaks_the_barrier_and_is_reported() {
  const PuSet pus = read_host().allowed;
  Team team(pus);
  const auto fail_on_last = [&](std::size_t rank) {
    if (rank + 1 == pus.size()) throw measure_failure("the cause");
    team.barrier().wait();
  };
  CHECK(failure_of([&] { team.run(fail_on_last); }) == "the cause");
  std::vector<int> ran(pus.size(), 0);
  team.run([&](std::size_t rank) {
    team.barrier().wait();
    ran[rank] = 1;
  });
  for (const int one : ran) CHECK(one == 1);
  CHECK(!failure_of([] { Team other(PuSet({65000})); }).empty());
}

void work_gives_the_same_result_each_time() {
  CHECK(do_event(Work::primes) == 1228);  // odd primes below 10000
  CHECK(do_event(Work::saturate) == do_event(Work::saturate));
}

}  // namespace

void an_arm_machine_is_called_emulated_or_not_only_where_something_tells() {
  // Seen on Debian 12 in QEMU 7.2's "virt" machine under TCG: -cpu max, then cortex-a57.
  constexpr std::uint64_t midr_of_max = 0x000f0510;
  constexpr std::uint64_t midr_of_a57 = 0x411fd070;
  const auto arm = [](std::uint64_t midr, std::optional<std::string> product, std::vector<std::string> vendors) {
    return emulated_by({std::nullopt, true, midr, std::move(product), std::move(vendors)});
  };
  CHECK(arm(midr_of_max, std::nullopt, {"0x1b36"}) == true);
  CHECK(arm(midr_of_a57, "QEMU Virtual Machine", {"0x1b36"}) == true);
  CHECK(arm(midr_of_a57, "KVM Virtual Machine", {"0x1b36"}) == false);
  CHECK(!arm(midr_of_a57, std::nullopt, {"0x1b36"}).has_value());
  CHECK(!arm(midr_of_a57, "OpenStack Nova", {"0x10de", "0x1af4"}).has_value());
  CHECK(!arm(midr_of_a57, std::nullopt, {}).has_value());
  CHECK(arm(midr_of_a57, "a server", {"0x10de", "0x15b3"}) == false);
  CHECK(emulated_by({"TCGTCGTCGTCG", false, {}, {}, {}}) == true);
  CHECK(emulated_by({"KVMKVMKVM", false, {}, {}, {}}) == false);
  CHECK(emulated_by({}) == false);
}

void arrays_shrink_to_the_memory_and_stay_larger_than_the_caches() {
  constexpr std::uint64_t mib = std::uint64_t{1} << 20U;
  CHECK(StreamArrays::default_bytes(32 * mib, 4096 * mib, 4) == 160 * mib);
  const std::size_t small = StreamArrays::default_bytes(32 * mib, 489 * mib, 2);
  CHECK(small >= 128 * mib && small < 160 * mib);
  CHECK(StreamArrays::footprint_bytes(small / 2) * 2 <= 489 * mib);
  CHECK(StreamArrays::default_bytes(32 * mib, 100 * mib, 2) == 128 * mib);
  CHECK(StreamArrays::default_bytes(64 * mib, 100 * mib, 2) == 256 * mib);
}

int main() {
  limits_of_a_job_are_found_in_its_own_cgroup_and_above();
  a_cgroup_leaves_its_limit_without_what_cannot_be_dropped();
  pu_sets_read_and_print_the_kernels_list_form();
  sizes_take_binary_units_and_refuse_overflow();
  every_chain_is_one_cycle_through_every_cell();
  permutations_reach_everything_once();
  kernels_count_and_compute_what_they_say();
  buffers_are_where_they_were_asked_for_or_refused();
  the_gate_refuses_what_cannot_be();
  intervals_say_the_confidence_that_they_reach();
  classes_split_at_the_widest_gap();
  a_lone_disturbed_end_is_no_transition();
  levels_need_a_curve_that_rises();
  json_escapes_and_writes_unknown_as_null();
  proc_stat_is_summed_over_the_wanted_pus_only();
  a_failing_thread_breaks_the_barrier_and_is_reported();
  an_arm_machine_is_called_emulated_or_not_only_where_something_tells();
  work_gives_the_same_result_each_time();
  arrays_shrink_to_the_memory_and_stay_larger_than_the_caches();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
