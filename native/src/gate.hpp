// The gate: figures that cannot be true are refused, not printed.
//
// A loop that the compiler deleted, a buffer that was not there or a clock that stood still gives a
// wonderful bandwidth. No core takes more than one line of 64 bytes per cycle from beyond its L1; so
// 64 bytes x clock x CPUs bounds every figure here from above, or three lines within the L1: two that are
// loaded and one that is stored. Nothing is ever zero.
//
// Inside the timed region of measure_clock_hz(): additions, each of which needs the one before, one
// cycle each. Register to register: additions of constants are folded away by newer cores. The best
// of several runs counts, because an interrupt can only make the clock look slower.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace homenode {

double measure_clock_hz();

// Why a bandwidth cannot be true; nothing if it can.
std::optional<std::string> bandwidth_doubt(double bytes_per_s, double clock_hz, std::size_t pus,
                                           std::size_t lines = 1);
// Why a latency cannot be true: a load that hits L1 takes three cycles or more on every known core.
std::optional<std::string> latency_doubt(double latency_ns, double clock_hz);

// The same as refusals: throw Failure naming `what`.
void require_bandwidth(const std::string& what, double bytes_per_s, double clock_hz, std::size_t pus,
                       std::size_t lines = 1);
void require_latency(const std::string& what, double latency_ns, double clock_hz);

}  // namespace homenode
