// One latency: a chain of one size and order in a buffer, walked until its interval is tight.
//
// Inside the timed region: walk() over enough loads for about a millisecond, so that reading the clock
// stays below a ten-thousandth; the quotient has sub-nanosecond resolution. Before the
// first sample the chain is walked once, or for a while: a first walk times page walks and cold caches
// (97 ns were seen where 13 are true).
#pragma once

#include <string>
#include <vector>

#include "buffer.hpp"
#include "chase.hpp"
#include "samples.hpp"
#include "team.hpp"

namespace homenode {

struct ChainShape {
  std::size_t bytes;
  std::size_t stride_bytes = line_bytes;
  Order order;
  std::uint64_t seed;
};

struct LatencyEffort {
  double sample_s;     // aim of one sample
  double warm_s;       // at most
  double point_s;      // for the samples of one point
  int more_points_s = 3;  // as much time again, so many times, where a neighbour took the first
  std::size_t min_samples = 5;
  double tolerance_ratio = 0.01;
};

struct LatencyPoint {
  ChainShape shape;
  std::uint64_t loads_per_sample = 0;
  std::vector<double> samples_ns;
  std::size_t disturbed = 0;  // samples in which something else ran on the CPU: kept, not in `calm_ns`
  std::vector<double> calm_ns;
  Stop stop = Stop::go_on;

  bool from_disturbed() const { return calm_ns.size() < 3 && disturbed > 0; }
  const std::vector<double>& pooled() const { return from_disturbed() ? samples_ns : calm_ns; }
};

// Runs on the calling thread, which must be pinned and have written the buffer.
LatencyPoint measure_latency(const Buffer& buffer, const ChainShape& shape, const LatencyEffort& effort);

void write_latency_point(Json& json, const LatencyPoint& point);

}  // namespace homenode
