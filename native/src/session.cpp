// A session: what every command shares. Nothing is timed here.
#include "session.hpp"

#include <array>
#include <cstdio>
#include <utility>

#include "buffer.hpp"
#include "failure.hpp"
#include "gate.hpp"
#include "kernel.hpp"
#include "pinning.hpp"

namespace homenode {
namespace {

std::string percent(std::optional<double> ratio) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100.0 * ratio.value_or(0.0));
  return text.data();
}

}  // namespace

void write_head(Json& json, const std::string& command) {
  json.object().field("format", document_format);
  json.field("probe_version", probe_version).field("command", command);
}

Session::Session(std::string command, const Options& options) : host_(read_host()) {
  pus_ = options.pus("pus").value_or(host_.allowed);
  tolerance_ratio_ = options.number("tolerance", 0.0001, 1.0);
  seed_ = options.count("seed", 0, 0xffffffffU);
  require_pus(host_, pus_);
  clock_hz_ = measure_clock_hz();
  if (!(clock_hz_ > 1e6)) {
    throw measure_failure("expected a clock above 1 MHz, found " + std::to_string(clock_hz_) + " Hz",
                          "the machine's time source stands still or jumps");
  }
  write_head(json_, command);
  json_.object("machine");
#if defined(__x86_64__)
  json_.field("architecture", "x86_64");
#else
  json_.field("architecture", "aarch64");
#endif
  json_.field("instruction_sets", instruction_sets());
  json_.field("clock_hz_measured", clock_hz_);
  write_host(json_, host_);
  json_.end();
  json_.field("pus", pus_.text()).field("seed", seed_);
  watch_.emplace_back(pus_);
  if (host_.emulated.value_or(false)) {
    add_caveat({"emulated", "the processor is emulated in software (TCG): no figure here is of hardware",
           "use it to check where pages are, and measure on real processors"});
  }
}

StopRule Session::stop_rule(double seconds, std::size_t min_samples) const {
  StopRule rule;
  rule.min_samples = min_samples;
  rule.tolerance_ratio = tolerance_ratio_;
  rule.deadline_ns = now_ns() + static_cast<Nanoseconds>(seconds * 1e9);
  return rule;
}

void Session::add_caveat(Caveat caveat) {
  for (const auto& known : caveats_) {
    if (known.id == caveat.id && known.detail == caveat.detail) return;
  }
  caveats_.push_back(std::move(caveat));
}

void Session::report_pages(const PageReport& report, bool wanted_huge) {
  constexpr double enough = 0.95;
  if (wanted_huge && report.huge_ratio() < enough) {
    add_caveat({"no-huge-pages",
           "expected huge pages, found " + std::to_string(report.huge_bytes) + " of " +
               std::to_string(report.bytes) + " bytes in them: page walks are in the figures",
           "set /sys/kernel/mm/transparent_hugepage/enabled to madvise, or reserve pages and use "
           "--pages hugetlb"});
  }
  if (report.pages_of_node.empty() && host_.nodes.size() > 1) {
    add_caveat({"nodes-not-verified", "the kernel did not say where the pages are: " + report.method,
           "run outside of the container's seccomp filter, or with CAP_SYS_NICE"});
  }
}

std::string Session::finish() {
  const Contention contention = watch_.front().read();
  write_contention(json_, contention);
  if (contention.busy_neighbour()) {
    add_caveat({"busy-neighbour",
           "others used " + percent(contention.others_ratio) +
               " of these CPUs, and the hypervisor took " + percent(contention.steal_ratio),
           "stop what runs on CPUs " + pus_.text() + " and measure again"});
  }
  json_.array("caveats");
  for (const auto& caveat : caveats_) {
    json_.object().field("id", caveat.id).field("detail", caveat.detail).field("fix", caveat.fix).end();
  }
  json_.end().end();
  return json_.text();
}

std::vector<OptionSpec> common_options(const std::string& seconds) {
  return {{"pus", "LIST", "", "CPUs to run on, such as 0-3,8; without it, all that are allowed"},
          {"seconds", "S", seconds, "time for measuring; stops earlier when intervals are tight"},
          {"tolerance", "RATIO", "0.01", "tight enough: half the interval of the median, over the median"},
          {"seed", "N", "1", "of orders and permutations"}};
}

}  // namespace homenode
