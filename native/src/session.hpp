// A session: what every command shares, from reading the host to the closing of the document. No timing.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "contention.hpp"
#include "host.hpp"
#include "json.hpp"
#include "options.hpp"
#include "samples.hpp"

namespace homenode {

// Something that makes a figure less certain, with what would settle it.
struct Caveat {
  std::string id;
  std::string detail;
  std::string fix;
};

class Session {
 public:
  // Reads the host, checks --pus, measures the clock and writes the document's head.
  Session(std::string command, const Options& options);

  const Host& host() const { return host_; }
  const PuSet& pus() const { return pus_; }
  double clock_hz() const { return clock_hz_; }
  std::uint64_t seed() const { return seed_; }
  Json& json() { return json_; }

  // A stop rule that starts now: --tolerance, and `seconds`.
  StopRule stop_rule(double seconds, std::size_t min_samples = 5) const;
  void add_caveat(Caveat caveat);
  // Marks the page sizes and nodes that the kernel gave where they are not what one would want.
  void report_pages(const struct PageReport& report, bool wanted_huge);
  // Closes the document with who else ran here and with the caveats.
  std::string finish();

 private:
  Host host_;
  PuSet pus_;
  double clock_hz_ = 0.0;
  double tolerance_ratio_ = 0.01;
  std::uint64_t seed_ = 1;
  Json json_;
  std::vector<Caveat> caveats_;
  std::vector<ContentionWatch> watch_;
};

// --pus, --seconds, --tolerance, --seed, with the command's own time limit as the default.
std::vector<OptionSpec> common_options(const std::string& seconds);

struct Command {
  std::string name;
  std::string summary;
  std::function<std::vector<OptionSpec>()> options;
  std::function<std::string(const Options&)> run;  // returns the document
};

Command bandwidth_command();
Command latency_command();
Command loaded_latency_command();
Command core_to_core_command();
Command throughput_command();
Command smt_command();
Command placement_command();

constexpr const char* probe_version = "0.2.0";
constexpr const char* document_format = "homenode.probe/1";

// The first fields of every document, also of replays that touch no host.
void write_head(Json& json, const std::string& command);

}  // namespace homenode
