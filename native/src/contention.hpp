// Contention: who else ran on our CPUs while we measured. Nothing is timed here.
//
// The kernel's own account of each CPU (/proc/stat) against this process's own time. A run with a busy
// neighbour is marked, never averaged away. Steal is time that the hypervisor gave to others.
#pragma once

#include <cstdint>
#include <optional>

#include "clock.hpp"
#include "json.hpp"
#include "pu_set.hpp"

namespace homenode {

struct PuAccount {
  double busy_s = 0.0;   // user, nice, system, irq, softirq
  double steal_s = 0.0;
};

// Summed over the CPUs; nothing if the text does not list them all.
std::optional<PuAccount> parse_proc_stat(const std::string& text, const PuSet& pus, long ticks_per_s);

struct Contention {
  std::optional<double> others_ratio;  // CPU time of others over (wall time x CPUs)
  std::optional<double> steal_ratio;
  double wall_s = 0.0;

  bool busy_neighbour() const;
};

// From construction to read(): one window of observation.
class ContentionWatch {
 public:
  explicit ContentionWatch(PuSet pus);
  Contention read() const;

 private:
  PuSet pus_;
  std::optional<PuAccount> account_;
  double own_s_;
  Nanoseconds start_ns_;
};

void write_contention(Json& json, const Contention& contention);

}  // namespace homenode
