// The document of one bandwidth run: every raw sample beside what was derived from it. No timing.
#include <algorithm>

#include "bandwidth_run.hpp"

namespace homenode {
namespace {

void write_sample(Json& json, const BandwidthResult& result, std::size_t i) {
  const BandwidthSample& sample = result.samples[i];
  json.object().field("at_ns", sample.at_ns).field("elapsed_ns", sample.elapsed_ns);
  json.field("bytes_per_s", sample.bytes_per_s).field("start_spread_ns", sample.start_spread_ns);
  json.field("away_ns", sample.away_ns);
  json.field("disturbed", sample.disturbed);
  if (!result.brackets.empty()) {
    json.field("state", result.states.labels[i].state);
    if (!result.states.labels[i].reason.empty()) json.field("no_state", result.states.labels[i].reason);
    json.field("cas_before_ns", result.brackets[i].before_ns);
    json.field("cas_after_ns", result.brackets[i].after_ns);
  }
  json.end();
}

void write_kernel(Json& json, const BandwidthRequest& request, const BandwidthResult& result,
                  std::size_t index) {
  const Kernel& kernel = result.kernels[index];
  const std::size_t elements = result.window_elements * result.passes * request.pus.size();
  json.object().field("kernel", name_of(kernel.operation));
  json.field("stores", kernel.stores == Stores::regular ? "regular" : "non-temporal");
  json.field("instruction_set", kernel.instruction_set);
  json.field("reported_bytes_per_element", kernel.reported_bytes());
  json.field("moved_bytes_per_element", kernel.moved_bytes());
  json.field("reported_bytes_per_sample", kernel.reported_bytes() * elements);
  json.field("moved_bytes_per_sample", kernel.moved_bytes() * elements);
  const double moved_ratio =
      static_cast<double>(kernel.moved_bytes()) / static_cast<double>(kernel.reported_bytes());
  json.field("stop", name_of(result.stop_of_kernel[index]));
  json.array("by_state");
  for (const auto& state : states_of(result)) {
    const auto [values, disturbed] = pooled(result, index, state);
    if (values.empty()) continue;
    json.object().field("state", state).field("from_disturbed_samples", disturbed);
    write_summary(json, "bytes_per_s", values, true);
    json.field("moved_median_bytes_per_s", median(values) * moved_ratio).end();
  }
  json.end().array("raw");
  for (std::size_t i = 0; i < result.samples.size(); ++i) {
    if (result.samples[i].kernel == index) write_sample(json, result, i);
  }
  json.end().end();
}

}  // namespace

void write_bandwidth(Json& json, const BandwidthRequest& request, const BandwidthResult& result) {
  json.field("pus", request.pus.text()).field("threads", request.pus.size()).field("node", request.node);
  json.field("array_bytes_per_thread", result.array_bytes_per_thread);
  json.field("pages_wanted", name_of(request.pages));
  json.object("pages");
  write_pages(json, result.pages);
  json.end().object("cache_check");
  json.field("latency_full_ns", result.latency_full_ns);
  json.field("latency_quarter_ns", result.latency_quarter_ns).end();
  const auto disturbed = std::ranges::count(result.samples, true, &BandwidthSample::disturbed);
  json.field("samples", result.samples.size()).field("samples_disturbed", disturbed);
  if (!result.brackets.empty()) {
    json.array("states");
    for (std::size_t state = 0; state < result.states.signatures.size(); ++state) {
      const auto is_state = [state](const StateLabel& label) { return label.state == state; };
      json.object().field("state", state).field("pair_classes", result.states.signatures[state]);
      json.field("cas_median_ns", result.states.median_ns[state]);
      json.field("samples", std::ranges::count_if(result.states.labels, is_state)).end();
    }
    json.end().field("transitions", result.states.transitions);
  }
  json.array("kernels");
  for (std::size_t index = 0; index < result.kernels.size(); ++index) {
    write_kernel(json, request, result, index);
  }
  json.end();
}

}  // namespace homenode
