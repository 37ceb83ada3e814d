// The pointer chase: each load's address is the load before it, so that its latency is all there is.
//
// Inside the timed region: walk(), 200 dependent loads per turn of the loop and nothing else. A simpler
// chase would lie: a fixed stride is prefetched (DRAM at L2 speed); an index instead of a pointer adds
// one or two cycles to each L1 hit; one pointer per page or per 256 bytes uses a quarter of the cache's
// sets and puts the knees at four times the size; and a random order over all of a large buffer adds
// page walks, which is why both orders are offered and named.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace homenode {

// `local` visits all lines of 256 KiB (64 small pages: the reach of a first-level TLB) in random order
// before it goes to the next, random, 256 KiB. `random` visits all lines in one random order.
enum class Order { local, random };

std::string name_of(Order order);
std::optional<Order> order_of(const std::string& name);

constexpr std::size_t line_bytes = 64;
constexpr std::size_t loads_per_turn = 200;

// Links all cells of the buffer into one cycle and returns where to start. A cell is `stride_bytes`
// (a power of two from 64 on); the pointer's place within its cell is mixed: any of its lines, so
// that a wide stride still uses every cache set, and any word of the line. Places repeat from run to
// run with the same seed. `bytes` is rounded down to whole cells, two at least.
void** link_chain(std::byte* buffer, std::size_t bytes, std::size_t stride_bytes, Order order,
                  std::uint64_t seed);

// Follows `loads` pointers, rounded up to whole turns, and returns where it stands. `loads_done`
// gets the exact count.
void** walk(void** start, std::uint64_t loads, std::uint64_t& loads_done);

}  // namespace homenode
