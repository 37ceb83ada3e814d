// The command "bandwidth": choices and defaults. The timed region is in bandwidth_run.cpp.
#include <algorithm>

#include "bandwidth_run.hpp"
#include "failure.hpp"

namespace homenode {
namespace {

std::vector<Kernel> chosen_kernels(const Options& options) {
  const std::string set = options.text("isa");
  const auto available = instruction_sets();
  if (set != "auto" && std::ranges::find(available, set) == available.end()) {
    std::string names = "auto";
    for (const auto& one : available) names += ", " + one;
    options.reject("isa", "one that this processor runs (" + names + ")");
  }
  const std::string stores = options.text("stores");
  if (stores != "both" && stores != "regular" && stores != "non-temporal") {
    options.reject("stores", "both, regular or non-temporal");
  }
  const auto names = options.list("kernels");
  for (const auto& name : names) {
    if (name != "all" && !operation_of(name)) {
      options.reject("kernels", "all, or some of read, write, copy, scale, add, triad");
    }
  }
  const auto wanted = [&](const Kernel& kernel) {
    const bool named = std::ranges::find(names, name_of(kernel.operation)) != names.end() ||
                       std::ranges::find(names, "all") != names.end();
    const bool stored = kernel.operation == Operation::read || stores == "both" ||
                        (stores == "regular") == (kernel.stores == Stores::regular);
    return named && stored;
  };
  std::vector<Kernel> kernels = set == "auto" ? best_kernels() : kernels_of(set);
  std::erase_if(kernels, [&](const Kernel& kernel) { return !wanted(kernel); });
  if (kernels.empty()) options.reject("kernels", "at least one kernel");
  return kernels;
}

// "avx512+avx2+sse2": figures of other instructions are not compared with these.
std::string sets_of(const std::vector<Kernel>& kernels) {
  std::string names;
  for (const auto& set : instruction_sets()) {
    if (std::ranges::find(kernels, set, &Kernel::instruction_set) == kernels.end()) continue;
    names += (names.empty() ? "" : "+") + set;
  }
  return names;
}

BandwidthRequest request_of(const Options& options, const Session& session, const PuSet& pus,
                            std::optional<int> node) {
  const Host& host = session.host();
  BandwidthRequest request;
  request.pus = pus;
  request.node = node;
  const auto pages = page_kind_of(options.text("pages"));
  if (!pages) options.reject("pages", "auto, huge, base or hugetlb");
  request.pages = *pages;
  request.array_bytes =
      options.given("array-bytes")
          ? options.bytes("array-bytes")
          : StreamArrays::default_bytes(host.llc_bytes_of(pus), usable_bytes(host, node), pus.size());
  if (request.array_bytes / pus.size() < StreamArrays::least_bytes()) {
    options.reject("array-bytes", std::to_string((StreamArrays::least_bytes() * pus.size()) >> 10U) +
                                      "K or more, " + std::to_string(StreamArrays::least_bytes() >> 10U) +
                                      "K a thread");
  }
  request.kernels = chosen_kernels(options);
  request.any_width = options.text("isa") == "auto";
  request.seconds = options.number("seconds", 0.01, 3600);
  return request;
}

// The kernels as they were run.
std::vector<Kernel> measure_one(const BandwidthRequest& request, Session& session) {
  const BandwidthResult result = run_bandwidth(request, session);
  session.report_pages(result.pages, request.pages != PageKind::base);
  if (!result.states.transitions.empty()) {
    session.add_caveat({"placement-moves",
                   "core-to-core latency changed in " + std::to_string(result.states.transitions.size()) +
                       " samples: the hypervisor moved vCPUs between caches; states are kept apart",
                   "pin the vCPUs on the host; homenode-probe placement shows when they move"});
  }
  session.json().object();
  write_bandwidth(session.json(), request, result);
  session.json().end();
  return result.kernels;
}

std::string run(const Options& options) {
  Session session("bandwidth", options);
  const BandwidthRequest one = request_of(options, session, session.pus(), options.node("node"));
  std::vector<Kernel> kernels;
  session.json().array("runs");
  if (!options.flag("matrix")) {
    kernels = measure_one(one, session);
  } else {
    if (options.given("node")) options.reject("node", "--matrix or --node, not both");
    std::size_t cells = 0;
    for (const auto& from : session.host().nodes) {
      const PuSet pus = from.pus.intersection(session.pus());
      for (const auto& to : session.host().nodes) {
        if (pus.empty() || to.memory_bytes == 0) continue;
        kernels = measure_one(request_of(options, session, pus, to.index), session);
        ++cells;
      }
    }
    if (cells == 0) {
      throw measure_failure("no node with CPUs, or no node with memory",
                            "the kernel shows no NUMA nodes: leave --matrix out");
    }
  }
  session.json().end().field("instruction_set", sets_of(kernels));
  return session.finish();
}

std::vector<OptionSpec> options() {
  auto specs = common_options("1");
  specs.push_back({"node", "N", "", "bind memory to this node; without it, where first touch puts it"});
  specs.push_back({"matrix", "", "", "CPUs of each node against the memory of each node; --seconds per cell"});
  specs.push_back({"kernels", "LIST", "all", "read, write, copy, scale, add, triad"});
  specs.push_back({"stores", "KIND", "both", "both, regular or non-temporal"});
  specs.push_back({"pages", "KIND", "auto", "auto (huge if allowed), huge, base, hugetlb; all but auto demand"});
  specs.push_back({"array-bytes", "SIZE", "", "of each of three arrays, all threads together; without it, "
                                              "five times the LLCs (four where memory is short), 128M at least"});
  specs.push_back({"isa", "NAME", "auto", "auto (the best for each kernel), avx512, avx2, sse2; neon on aarch64"});
  return specs;
}

}  // namespace

Command bandwidth_command() {
  return {"bandwidth", "memory bandwidth of kernels, per placement state, or node x node", options, run};
}

}  // namespace homenode
