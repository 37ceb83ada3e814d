// The command "loaded-latency": what a load waits while other CPUs draw bandwidth.
//
// Inside the timed region: one chase, on the first CPU, of some milliseconds; the injectors' counters are
// read by the chasing thread itself at its start and end. So latency and bandwidth are of the same
// interval; rates added from the threads' own, different intervals overstate the load. Injectors run
// non-stop and wait a number of dependent additions (cycles) between blocks of 4 KiB.
#include <algorithm>
#include <atomic>

#include "failure.hpp"
#include "gate.hpp"
#include "latency_point.hpp"
#include "session.hpp"
#include "stream_arrays.hpp"

namespace homenode {
namespace {

constexpr std::size_t block_elements = 512;
constexpr std::size_t least_array_bytes = std::size_t{256} << 10U;  // less loads nothing that is shared
constexpr double sample_s = 0.004;
constexpr double settle_s = 0.002;

struct alignas(128) Injected {
  std::atomic<std::uint64_t> bytes{0};
};

struct LoadedPoint {
  std::optional<std::uint64_t> delay_cycles;  // nothing: no injectors
  std::vector<double> latency_ns;
  std::vector<double> bytes_per_s;
  std::vector<bool> disturbed;  // the chase was off its CPU, or some injector did nothing
  Stop stop = Stop::go_on;

  std::size_t disturbed_count() const {
    return static_cast<std::size_t>(std::ranges::count(disturbed, true));
  }
  // Of the undisturbed samples while there are three of them, else of all.
  bool from_disturbed() const { return disturbed.size() < disturbed_count() + 3 && disturbed_count() > 0; }
  std::vector<double> pooled(const std::vector<double>& series) const {
    if (from_disturbed()) return series;
    std::vector<double> calm;
    for (std::size_t i = 0; i < series.size(); ++i) {
      if (!disturbed[i]) calm.push_back(series[i]);
    }
    return calm;
  }
};

void wait_cycles(std::uint64_t cycles) {
  std::uint64_t value = cycles;
  for (std::uint64_t i = 0; i < cycles; ++i) asm volatile("" : "+r"(value));
}

class LoadedLatency {
 public:
  LoadedLatency(const Options& options, Session& session)
      : session_(session), team_(session.pus()), arrays_(team_.size()), injected_(team_.size()),
        chain_bytes_(options.bytes("chain-bytes")), array_bytes_(options.bytes("array-bytes")) {
    const auto pages = page_kind_of(options.text("pages"));
    if (!pages) options.reject("pages", "auto, huge, base or hugetlb");
    if (chain_bytes_ < 65536) options.reject("chain-bytes", "64K or more");
    if (array_bytes_ < least_array_bytes) {
      options.reject("array-bytes", std::to_string(least_array_bytes >> 10U) + "K or more");
    }
    const auto kernel_name = options.text("mix");
    for (const auto& kernel : best_kernels()) {
      if (kernel.name() == kernel_name) kernel_ = kernel;
    }
    if (kernel_.run == nullptr) options.reject("mix", "a kernel: read, copy, triad, copy_nt, triad_nt, ...");
    const auto node = options.node("node");
    require_memory(session.host(), chain_bytes_ + array_bytes_ * 3 * (team_.size() - 1), node);
    team_.run([&](std::size_t rank) {
      if (rank > 0) {
        arrays_[rank] = StreamArrays(array_bytes_, *pages, node, session_.host());
        arrays_[rank].verify();
        return;
      }
      chain_ = Buffer({chain_bytes_, *pages, node}, session_.host());
      for (std::size_t at = 0; at < chain_.bytes(); at += 1024) chain_.data()[at] = std::byte{1};
      report_ = chain_.verify();
      at_ = link_chain(chain_.data(), chain_bytes_, line_bytes, Order::random, session_.seed());
    });
    session.report_pages(report_, *pages != PageKind::base);
  }

  LoadedPoint measure(std::optional<std::uint64_t> delay_cycles, double seconds) {
    LoadedPoint point;
    point.delay_cycles = delay_cycles;
    std::atomic<bool> over{false};
    team_.run([&](std::size_t rank) {
      team_.barrier().wait();
      if (rank == 0) {
        chase(point, seconds);
        over.store(true);
      } else if (delay_cycles) {
        inject(rank, *delay_cycles, over);
      }
    });
    require_latency("loaded latency", median(point.pooled(point.latency_ns)), session_.clock_hz());
    if (point.from_disturbed()) {
      session_.add_caveat({"load-not-steady",
                      "the chase or an injector was off its CPU in " + std::to_string(point.disturbed_count()) +
                          " of " + std::to_string(point.disturbed.size()) + " samples of one point",
                      "stop what runs on CPUs " + session_.pus().text() + ", or allow more --seconds"});
    }
    return point;
  }

  const PageReport& report() const { return report_; }
  const Kernel& kernel() const { return kernel_; }

 private:
  std::vector<std::uint64_t> injected_bytes() const {
    std::vector<std::uint64_t> bytes;
    for (const auto& one : injected_) bytes.push_back(one.bytes.load(std::memory_order_relaxed));
    return bytes;
  }

  void chase(LoadedPoint& point, double seconds) {
    std::uint64_t loads = 0;
    const Nanoseconds settle_end = now_ns() + static_cast<Nanoseconds>(settle_s * 1e9);
    std::uint64_t paced = 0;
    const Nanoseconds pace_start = now_ns();
    do {
      at_ = walk(at_, 1000, loads);
      paced += loads;
    } while (now_ns() < settle_end);
    const double pace_s = seconds_of(std::max<Nanoseconds>(now_ns() - pace_start, 1));
    const auto per_sample = static_cast<std::uint64_t>(static_cast<double>(paced) / pace_s * sample_s);
    const StopRule rule = session_.stop_rule(seconds);
    while (point.stop == Stop::go_on) {
      std::vector<std::uint64_t> before;
      std::vector<std::uint64_t> after;
      const Stint stint = timed([] {}, [&] {
        before = injected_bytes();
        at_ = walk(at_, per_sample, loads);
        after = injected_bytes();
      });
      const auto elapsed = static_cast<double>(stint.end_ns - stint.start_ns);
      bool idle = false;
      std::uint64_t bytes = 0;
      for (std::size_t rank = 1; rank < before.size(); ++rank) {
        bytes += after[rank] - before[rank];
        idle = idle || (point.delay_cycles && after[rank] == before[rank]);
      }
      point.latency_ns.push_back(elapsed / static_cast<double>(loads));
      point.bytes_per_s.push_back(static_cast<double>(bytes) / elapsed * 1e9);
      point.disturbed.push_back(idle || team_time({stint}).disturbed);
      point.stop = stop_of(rule, point.pooled(point.latency_ns), now_ns());
      const bool late = now_ns() >= rule.deadline_ns && point.latency_ns.size() >= 2;
      if (point.stop == Stop::go_on && late) point.stop = Stop::time;
    }
  }

  void inject(std::size_t rank, std::uint64_t delay_cycles, const std::atomic<bool>& over) {
    const StreamArrays& arrays = arrays_[rank];
    const std::uint64_t block_bytes = kernel_.reported_bytes() * block_elements;
    std::size_t block = 0;
    while (!over.load(std::memory_order_relaxed)) {
      arrays.run_block(kernel_, block * block_elements, block_elements);
      block = (block + 1) % (arrays.elements() / block_elements);
      auto& bytes = injected_[rank].bytes;
      bytes.store(bytes.load(std::memory_order_relaxed) + block_bytes, std::memory_order_relaxed);
      wait_cycles(delay_cycles);
    }
  }

  Session& session_;
  Team team_;
  std::vector<StreamArrays> arrays_;
  std::vector<Injected> injected_;
  std::size_t chain_bytes_;
  std::size_t array_bytes_;
  Kernel kernel_{Operation::read, Stores::regular, nullptr, {}};
  Buffer chain_;
  PageReport report_;
  void** at_ = nullptr;
};

std::string run(const Options& options) {
  Session session("loaded-latency", options);
  if (session.pus().size() < 2) {
    throw measure_failure("loaded-latency: expected two CPUs or more (one chases, the others load), found " +
                              session.pus().text(), "choose with --pus, such as --pus 0-3");
  }
  std::vector<std::optional<std::uint64_t>> delays{std::nullopt};
  for (const auto& text : options.list("delays")) {
    const auto delay = parse_bytes(text);
    if (!delay || *delay > 10'000'000) options.reject("delays", "cycles up to 10000000, such as 0,100,1000");
    delays.emplace_back(*delay);
  }
  const double seconds = options.number("seconds", 0.05, 3600);
  LoadedLatency loaded(options, session);
  std::vector<LoadedPoint> points;
  for (const auto& delay : delays) {
    points.push_back(loaded.measure(delay, seconds / static_cast<double>(delays.size())));
  }
  Json& json = session.json();
  json.field("chasing_pu", session.pus().indices().front()).field("node", options.node("node"));
  json.field("mix", loaded.kernel().name()).object("pages");
  write_pages(json, loaded.report());
  json.end().array("points");
  for (const auto& point : points) {
    json.object().field("delay_cycles", point.delay_cycles);
    write_summary(json, "ns", point.pooled(point.latency_ns), false);
    json.field("median_injected_bytes_per_s", median(point.pooled(point.bytes_per_s)));
    json.field("stop", name_of(point.stop)).field("samples_disturbed", point.disturbed_count());
    json.field("from_disturbed_samples", point.from_disturbed()).field("samples_ns", point.latency_ns);
    json.field("samples_injected_bytes_per_s", point.bytes_per_s).end();
  }
  json.end();
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("2");
  specs.push_back({"node", "N", "", "bind all memory to this node"});
  specs.push_back({"mix", "KERNEL", "read", "what the injectors run: read, copy, triad, copy_nt, triad_nt, ..."});
  specs.push_back({"delays", "LIST", "20000,10000,5000,2500,1500,1000,700,500,300,200,100,50,0",
                   "cycles that an injector waits after each 4 KiB"});
  specs.push_back({"pages", "KIND", "auto", "auto (huge if allowed), huge, base, hugetlb"});
  specs.push_back({"chain-bytes", "SIZE", "256M", "of the chased buffer"});
  specs.push_back({"array-bytes", "SIZE", "64M", "of each of an injector's three arrays"});
  return specs;
}

}  // namespace

Command loaded_latency_command() {
  return {"loaded-latency", "load latency while other CPUs draw bandwidth", options, run};
}

}  // namespace homenode
