// The command "latency": curves over size, page size and order; node x node; levels from the curve.
// The timed region is in latency_point.cpp and chase.cpp.
#include <algorithm>
#include <bit>
#include <limits>

#include "failure.hpp"
#include "gate.hpp"
#include "latency_point.hpp"
#include "levels.hpp"
#include "replay.hpp"
#include "session.hpp"

namespace homenode {
namespace {

constexpr std::uint64_t first_bytes = std::uint64_t{4} << 10U;
constexpr std::uint64_t most_bytes = std::uint64_t{16} << 30U;
constexpr std::uint64_t dram_per_llc = 4;
constexpr double quick_s = 2.0;
constexpr std::uint64_t quick_bytes = std::uint64_t{256} << 20U;

struct CurvePlan {
  PageKind pages;
  Order order;
};

struct Curve {
  CurvePlan plan;
  std::optional<int> node;
  PageReport page_report;
  std::vector<LatencyPoint> points;
};

// Powers of two, and half way between them where that is wanted (3/4 of the next one).
std::vector<std::uint64_t> sizes_between(std::uint64_t from, std::uint64_t to, bool half_steps) {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t size = from; size <= to; size *= 2) {
    sizes.push_back(size);
    if (half_steps && size + size / 2 <= to) sizes.push_back(size + size / 2);
  }
  return sizes;
}

// The best sample of each size over all curves. What disturbs a load only delays it, so does a page walk,
// and levels are about the machine: each chain of a size bounds its latency from above.
std::vector<CurvePoint> floor_of(const std::vector<Curve>& curves) {
  std::vector<CurvePoint> points;
  for (std::size_t i = 0; i < curves.front().points.size(); ++i) {
    double least = std::numeric_limits<double>::infinity();
    for (const auto& curve : curves) {
      least = std::min(least, *std::ranges::min_element(curve.points[i].samples_ns));
    }
    points.push_back({curves.front().points[i].shape.bytes, least});
  }
  return points;
}

void write_levels(Json& json, const std::vector<Level>& levels) {
  json.array("levels");
  for (const auto& level : levels) {
    json.object().field("level", level.name).field("latency_ns", level.latency_ns);
    json.field("from_bytes", level.from_bytes).field("to_bytes", level.to_bytes);
    json.field("capacity_bytes", level.capacity_bytes).end();
  }
  json.end().field("llc_bytes_measured", llc_bytes_of(levels));
}

class LatencyRun {
 public:
  LatencyRun(const Options& options, Session& session)
      : session_(session), stride_bytes_(options.bytes("stride")), quick_(options.flag("quick")),
        max_bytes_(quick_ && !options.given("max-bytes") ? quick_bytes : options.bytes("max-bytes")) {
    if (stride_bytes_ < line_bytes || stride_bytes_ > 4096 || (stride_bytes_ & (stride_bytes_ - 1)) != 0) {
      options.reject("stride", "64, 128, 256, 512, 1K, 2K or 4K");
    }
    if (max_bytes_ < first_bytes * 4 || max_bytes_ > most_bytes) options.reject("max-bytes", "16K to 16G");
    const double asked_s = options.number("seconds", 0.1, 3600);
    const double seconds = quick_ && !options.given("seconds") ? quick_s : asked_s;
    const double points = static_cast<double>(sizes_between(first_bytes, max_bytes_, !quick_).size());
    const double curves = static_cast<double>(plans(options).size());
    effort_.sample_s = 0.001;  // short enough to fit between a neighbour's turns on the CPU
    effort_.warm_s = quick_ ? 0.01 : 0.04;
    effort_.point_s = seconds / 2.0 / points / curves;  // the other half goes into linking and warming
    effort_.more_points_s = quick_ ? 1 : 3;
    effort_.tolerance_ratio = options.number("tolerance", 0.0001, 1.0);
  }

  std::vector<CurvePlan> plans(const Options& options) const {
    const auto kinds = options.list("pages");
    const auto orders = options.list("orders");
    std::vector<CurvePlan> plans;
    for (const auto& kind_name : kinds) {
      const auto kind = page_kind_of(kind_name);
      if (!kind) options.reject("pages", "some of auto, huge, base, hugetlb");
      for (const auto& order_name : orders) {
        const auto order = order_of(order_name);
        if (!order) options.reject("orders", "local, random or both");
        plans.push_back({*kind, *order});
      }
    }
    if (plans.empty()) options.reject("pages", "at least one page size and one order");
    return plans;
  }

  // All curves on one CPU with memory on one node. One buffer per page size, mapped once.
  std::vector<Curve> curves(int pu, std::optional<int> node, const std::vector<CurvePlan>& plans,
                            const std::vector<std::uint64_t>& sizes) {
    std::vector<Curve> curves;
    Team team(PuSet({pu}));
    std::optional<PageKind> mapped;
    Buffer buffer;
    PageReport report;
    for (const auto& plan : plans) {
      if (!mapped || *mapped != plan.pages) {
        buffer = Buffer();
        require_memory(session_.host(), sizes.back(), node);
        team.run([&](std::size_t) {
          buffer = Buffer({sizes.back(), plan.pages, node}, session_.host());
          for (std::size_t at = 0; at < buffer.bytes(); at += 1024) buffer.data()[at] = std::byte{1};
          report = buffer.verify();
        });
        mapped = plan.pages;
        session_.report_pages(report, plan.pages != PageKind::base);
      }
      Curve curve{plan, node, report, {}};
      for (const auto bytes : sizes) {
        const ChainShape shape{bytes, stride_bytes_, plan.order, session_.seed()};
        team.run([&](std::size_t) { curve.points.push_back(measure_latency(buffer, shape, effort_)); });
        require_latency("latency at " + std::to_string(bytes) + " bytes",
                        median(curve.points.back().pooled()), session_.clock_hz());
      }
      curves.push_back(std::move(curve));
    }
    return curves;
  }

  void write(const Curve& curve, int pu) {
    Json& json = session_.json();
    json.object().field("pu", pu).field("node", curve.node);
    json.field("pages_wanted", name_of(curve.plan.pages)).field("order", name_of(curve.plan.order));
    json.field("stride_bytes", stride_bytes_);
    json.object("pages");
    write_pages(json, curve.page_report);
    json.end().array("points");
    for (const auto& point : curve.points) write_latency_point(json, point);
    json.end().end();
  }

  bool quick() const { return quick_; }
  std::uint64_t max_bytes() const { return max_bytes_; }

 private:
  Session& session_;
  std::size_t stride_bytes_;
  bool quick_;
  std::uint64_t max_bytes_;
  LatencyEffort effort_{};
};

void measure_curves(LatencyRun& run, const Options& options, Session& session) {
  const int pu = session.pus().indices().front();
  const auto node = options.node("node");
  auto sizes = sizes_between(first_bytes, run.max_bytes(), !run.quick());
  auto curves = run.curves(pu, node, run.plans(options), sizes);
  auto levels = find_levels(floor_of(curves));
  const auto llc = llc_bytes_of(levels);
  const std::uint64_t wanted = std::min(most_bytes, dram_per_llc * llc.value_or(0));
  if (wanted > run.max_bytes() && !options.given("max-bytes")) {
    // A cache so large that the curve ended too near to it: once more, further out.
    sizes = sizes_between(first_bytes, std::bit_ceil(wanted), !run.quick());
    curves = run.curves(pu, node, run.plans(options), sizes);
    levels = find_levels(floor_of(curves));
  }
  session.json().array("curves");
  for (const auto& curve : curves) run.write(curve, pu);
  session.json().end();
  write_levels(session.json(), levels);
  if (levels.empty() || levels.back().name != "DRAM") {
    session.add_caveat({"no-dram-level", "the curve is not flat at its end: DRAM was not told from the caches",
                   "use a larger --max-bytes, huge pages, or a quieter machine"});
  }
}

void measure_matrix(LatencyRun& run, const Options& options, Session& session) {
  if (options.given("node")) options.reject("node", "--matrix or --node, not both");
  const auto& nodes = session.host().nodes;
  std::size_t cells = 0;
  session.json().array("curves");
  for (const auto& from : nodes) {
    const PuSet pus = from.pus.intersection(session.pus());
    for (const auto& to : nodes) {
      if (pus.empty() || to.memory_bytes == 0) continue;
      const int pu = pus.indices().front();
      for (const auto& curve : run.curves(pu, to.index, run.plans(options), {run.max_bytes()})) {
        run.write(curve, pu);
        ++cells;
      }
    }
  }
  session.json().end();
  if (cells > 0) return;
  throw measure_failure("no node with CPUs, or no node with memory",
                        "the kernel shows no NUMA nodes: leave --matrix out");
}

std::string replay(const std::string& path) {
  std::vector<CurvePoint> curve;
  for (const auto& line : read_series(path, 2, 2)) {
    const bool ascends = curve.empty() || line[0] > static_cast<double>(curve.back().bytes);
    if (!(line[0] >= 1.0) || !(line[1] > 0.0) || !(line[0] < 0x1p53) || !ascends) {
      throw usage_failure(path + ": expected ascending sizes in bytes and latencies above zero, found " +
                          std::to_string(line[0]) + " " + std::to_string(line[1]));
    }
    curve.push_back({static_cast<std::uint64_t>(line[0]), line[1]});
  }
  Json json;
  write_head(json, "latency");
  json.field("replayed", path);
  write_levels(json, find_levels(curve));
  json.end();
  return json.text();
}

std::string run(const Options& options) {
  if (options.given("replay")) return replay(options.text("replay"));
  Session session("latency", options);
  LatencyRun latency(options, session);
  if (options.flag("matrix")) {
    measure_matrix(latency, options, session);
  } else {
    measure_curves(latency, options, session);
  }
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("8");
  specs.push_back({"node", "N", "", "bind memory to this node"});
  specs.push_back({"matrix", "", "", "first CPU of each node against the memory of each node, at --max-bytes"});
  specs.push_back({"pages", "LIST", "auto,base", "page sizes: auto, huge, base, hugetlb"});
  specs.push_back({"orders", "LIST", "local,random", "local (within 256 KiB: no page walks), random"});
  specs.push_back({"max-bytes", "SIZE", "512M", "largest buffer; without it, more if the LLC asks for it"});
  specs.push_back({"stride", "SIZE", "64", "bytes per pointer; its line within them is mixed"});
  specs.push_back({"quick", "", "", "powers of two only, to 256M, in a quarter of the time"});
  specs.push_back({"replay", "FILE", "", "find levels in lines of bytes and ns; measures nothing", true});
  return specs;
}

}  // namespace

Command latency_command() {
  return {"latency", "load latency over buffer size, page size and order; levels found", options, run};
}

}  // namespace homenode
