// One latency. Inside the timed region: walk() alone; latency_point.hpp says why.
#include "latency_point.hpp"

#include <algorithm>

namespace homenode {
namespace {

constexpr std::uint64_t least_loads = 2'000;

}  // namespace

LatencyPoint measure_latency(const Buffer& buffer, const ChainShape& shape, const LatencyEffort& effort) {
  LatencyPoint point;
  point.shape = shape;
  const std::uint64_t cells = std::max<std::uint64_t>(shape.bytes / shape.stride_bytes, 2);
  void** at = link_chain(buffer.data(), shape.bytes, shape.stride_bytes, shape.order, shape.seed);

  const Nanoseconds warm_start = now_ns();
  std::uint64_t walked = 0;
  Nanoseconds warm_ns = 0;
  do {
    std::uint64_t loads = 0;
    at = walk(at, least_loads, loads);
    walked += loads;
    warm_ns = std::max<Nanoseconds>(now_ns() - warm_start, 1);
  } while (walked < cells && seconds_of(warm_ns) < effort.warm_s);

  const auto calibrate = [&](double loads, double seconds) {
    return std::max<std::uint64_t>(least_loads, static_cast<std::uint64_t>(loads / seconds * effort.sample_s));
  };
  // The pace of the warm walk misleads where it filled the caches: once more, now that they are full.
  std::uint64_t paced = 0;
  const Nanoseconds pace_start = now_ns();
  at = walk(at, std::max<std::uint64_t>(least_loads,
                          calibrate(static_cast<double>(walked), seconds_of(warm_ns)) / 8), paced);
  const double pace_s = seconds_of(std::max<Nanoseconds>(now_ns() - pace_start, 1));
  point.loads_per_sample = calibrate(static_cast<double>(paced), pace_s);

  StopRule rule;
  rule.min_samples = effort.min_samples;
  rule.tolerance_ratio = effort.tolerance_ratio;
  rule.deadline_ns = now_ns() + static_cast<Nanoseconds>(effort.point_s * 1e9);
  while (point.stop == Stop::go_on) {
    std::uint64_t loads = 0;
    const Stint stint = timed([] {}, [&] { at = walk(at, point.loads_per_sample, loads); });
    const double ns = static_cast<double>(stint.end_ns - stint.start_ns) / static_cast<double>(loads);
    point.samples_ns.push_back(ns);
    if (team_time({stint}).disturbed) {
      ++point.disturbed;
    } else {
      point.calm_ns.push_back(ns);
    }
    const bool late = now_ns() >= rule.deadline_ns && point.samples_ns.size() >= 2;
    point.stop = stop_of(rule, point.pooled(), now_ns());
    if (point.stop == Stop::go_on && late) point.stop = Stop::time;
    // Five samples are promised whatever the clock says, and some more time where a neighbour took it.
    const bool few = point.samples_ns.size() < rule.min_samples;
    const bool later = now_ns() < rule.deadline_ns + effort.more_points_s * static_cast<Nanoseconds>(effort.point_s * 1e9);
    if (point.stop == Stop::time && (few || (point.from_disturbed() && later))) point.stop = Stop::go_on;
  }
  return point;
}

void write_latency_point(Json& json, const LatencyPoint& point) {
  json.object().field("bytes", point.shape.bytes).field("loads_per_sample", point.loads_per_sample);
  write_summary(json, "ns", point.pooled(), false);
  json.field("stop", name_of(point.stop)).field("samples_disturbed", point.disturbed);
  json.field("from_disturbed_samples", point.from_disturbed());
  json.field("samples_ns", point.samples_ns).end();
}

}  // namespace homenode
