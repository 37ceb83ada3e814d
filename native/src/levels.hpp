// Levels of the memory hierarchy, found from a latency curve alone. Nothing is timed here.
//
// In a guest the cache sizes that CPUID reports may be invented; the curve is not. A level is a stretch
// where latency stays nearly flat while size grows; its capacity is where latency leaves it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace homenode {

struct CurvePoint {
  std::uint64_t bytes;
  double latency_ns;
};

struct Level {
  std::string name;          // L1, L2, L3 ..., LLC for the last cache, DRAM
  double latency_ns;         // three quarters along its flat stretch
  std::uint64_t from_bytes;  // first and last size of the flat stretch
  std::uint64_t to_bytes;
  std::optional<std::uint64_t> capacity_bytes;  // largest size still at its latency; nothing for DRAM
};

// Levels in order of size. Points must ascend in size. Fewer than four points, or a curve that never
// rises, has no levels that could be told apart: then the list is empty. DRAM is named only if the
// curve is flat at its end; a curve that still climbs there ends with its last cache.
std::vector<Level> find_levels(const std::vector<CurvePoint>& curve);

// The last cache's capacity; nothing if no DRAM was reached or no cache was found below it.
std::optional<std::uint64_t> llc_bytes_of(const std::vector<Level>& levels);

}  // namespace homenode
