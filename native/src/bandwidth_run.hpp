// One bandwidth run: kernels on a set of CPUs with memory on one node, interleaved, bracketed, labelled.
//
// Inside the timed region: one kernel over one window of each thread's arrays, as many times as make it
// last 50 us (once beyond the caches), from the last thread's start to the last one's end. One pass over
// 256 KiB lasts as long as threads need to start together. Kernels take turns in a seeded order, so that
// a disturbance or a move of the vCPUs falls on all alike; a simpler loop that finishes one kernel before
// the next compares moments, not kernels. Which register width suits a kernel in caches is tried. Around each sample of several threads stands a bracket of core-to-core latencies:
// samples of different placement states are never pooled.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "kernel.hpp"
#include "placement_state.hpp"
#include "samples.hpp"
#include "session.hpp"
#include "stream_arrays.hpp"
#include "team.hpp"

namespace homenode {

struct BandwidthSample {
  std::size_t kernel;  // index into the request's kernels
  Nanoseconds at_ns;   // since the run's first sample
  Nanoseconds elapsed_ns;
  Nanoseconds start_spread_ns;
  Nanoseconds away_ns;  // the longest that a thread was off its CPU
  double bytes_per_s;  // reported bytes
  bool disturbed;
};

struct BandwidthRequest {
  PuSet pus;
  std::optional<int> node;
  PageKind pages = PageKind::automatic;
  std::size_t array_bytes = 0;  // per array, all threads together
  std::vector<Kernel> kernels;
  bool any_width = false;  // within caches each kernel may be that of another instruction set
  double seconds = 1.0;
};

struct BandwidthResult {
  std::vector<Kernel> kernels;           // as they were run
  std::vector<BandwidthSample> samples;  // in the order of time
  std::vector<Bracket> brackets;         // one per sample; empty for a single thread
  StateSeries states;                    // likewise
  std::vector<Stop> stop_of_kernel;
  PageReport pages;
  std::size_t array_bytes_per_thread = 0;
  std::size_t window_elements = 0;  // of each array and thread in one pass
  std::size_t passes = 1;           // of one sample, over the same window
  std::optional<double> latency_full_ns;     // chase over the whole destination arrays
  std::optional<double> latency_quarter_ns;  // and over a quarter: lower if caches still hold that
};

// Throws Failure for memory that is not got, a figure that cannot be, or a result that is wrong.
BandwidthResult run_bandwidth(const BandwidthRequest& request, Session& session);

// Values of one kernel in one state: of the undisturbed samples, while there are three of them or more;
// else of all, and the document says so.
struct Pool {
  std::vector<double> bytes_per_s;
  bool disturbed = false;
};
Pool pooled(const BandwidthResult& result, std::size_t kernel, std::optional<std::size_t> state);

// The states of a run's samples in order; {nothing} for one thread, which has no bracket.
std::vector<std::optional<std::size_t>> states_of(const BandwidthResult& result);

// Writes "threads" to "kernels" of one run into the open object.
void write_bandwidth(Json& json, const BandwidthRequest& request, const BandwidthResult& result);

}  // namespace homenode
