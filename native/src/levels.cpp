// Levels of the memory hierarchy, found from a latency curve alone. Nothing is timed here.
#include "levels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace homenode {
namespace {

constexpr double flat_slope = 0.25;           // log2(latency) per log2(size): 19 % per doubling
constexpr double least_flat_octaves = 0.9;    // of size: shorter flats are pauses of a climb
constexpr double least_level_ratio = 1.25;    // between neighbouring levels
constexpr double still_inside_ratio = 1.15;   // of the level's latency: where a level ends

// Latency cannot fall as the buffer grows, and disturbances only add to it: a point above a later one was
// disturbed. So each point counts as the least of itself and all later ones; in the logarithm, because
// levels differ by factors. An average would let one point of 280 ns lift three of 95.
std::vector<double> rising_log2(const std::vector<CurvePoint>& curve) {
  std::vector<double> rising(curve.size());
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = curve.size(); i-- > 0;) {
    least = std::min(least, std::log2(curve[i].latency_ns));
    rising[i] = least;
  }
  return rising;
}

struct Flat {
  std::size_t first;
  std::size_t last;
};

double octaves(const std::vector<CurvePoint>& curve, std::size_t first, std::size_t last) {
  return std::log2(static_cast<double>(curve[last].bytes) / static_cast<double>(curve[first].bytes));
}

std::vector<Flat> flats_of(const std::vector<CurvePoint>& curve, const std::vector<double>& rising) {
  std::vector<Flat> flats;
  std::size_t first = 0;
  for (std::size_t i = 1; i <= curve.size(); ++i) {
    const bool flat = i < curve.size() &&
                      rising[i] - rising[i - 1] < flat_slope * octaves(curve, i - 1, i);
    if (flat) continue;
    if (octaves(curve, first, i - 1) >= least_flat_octaves) flats.push_back({first, i - 1});
    first = i;
  }
  return flats;
}

// Three quarters along the flat: there the hits in smaller caches have faded, and the next climb has not
// begun. The middle of a short flat still mixes (2.8 ns for a 256 KiB L2 of 3.4 ns).
double log_latency_of(const std::vector<double>& rising, const Flat& flat) {
  return rising[flat.first + (3 * (flat.last - flat.first) + 2) / 4];
}

// A slow climb within one level (a mesh's LLC) may fall into two flats: joined if nearly equal.
std::vector<Flat> joined(const std::vector<Flat>& flats, const std::vector<double>& rising) {
  std::vector<Flat> levels;
  for (const auto& flat : flats) {
    const bool same = !levels.empty() && log_latency_of(rising, flat) <
                                             log_latency_of(rising, levels.back()) + std::log2(least_level_ratio);
    if (same) {
      levels.back().last = flat.last;
    } else {
      levels.push_back(flat);
    }
  }
  return levels;
}

std::string cache_name(std::size_t index, std::size_t caches) {
  return index > 0 && index + 1 == caches ? "LLC" : "L" + std::to_string(index + 1);
}

}  // namespace

std::vector<Level> find_levels(const std::vector<CurvePoint>& curve) {
  constexpr std::size_t least_points = 4;
  if (curve.size() < least_points) return {};
  const auto rising = rising_log2(curve);
  const auto flats = joined(flats_of(curve, rising), rising);
  if (flats.empty() || rising.back() - rising.front() < std::log2(least_level_ratio)) return {};
  const bool reaches_dram = flats.size() > 1 && flats.back().last + 1 == curve.size();
  const std::size_t caches = flats.size() - (reaches_dram ? 1 : 0);
  std::vector<Level> levels;
  for (std::size_t index = 0; index < flats.size(); ++index) {
    const Flat& flat = flats[index];
    const double log_latency = log_latency_of(rising, flat);
    Level level{index < caches ? cache_name(index, caches) : "DRAM", std::exp2(log_latency),
                curve[flat.first].bytes, curve[flat.last].bytes, std::nullopt};
    if (index < caches) {
      std::size_t last = flat.last;
      while (last + 1 < curve.size() && rising[last + 1] <= log_latency + std::log2(still_inside_ratio)) {
        ++last;
      }
      level.capacity_bytes = curve[last].bytes;
    }
    levels.push_back(level);
  }
  return levels;
}

std::optional<std::uint64_t> llc_bytes_of(const std::vector<Level>& levels) {
  if (levels.size() < 2 || levels.back().name != "DRAM") return std::nullopt;
  return levels[levels.size() - 2].capacity_bytes;
}

}  // namespace homenode
