// The pointer chase. Inside the timed region: walk(); chase.hpp says why a simpler loop would lie.
#include "chase.hpp"

#include <algorithm>

#include "permutation.hpp"

namespace homenode {
namespace {

constexpr std::size_t group_bytes = std::size_t{256} << 10U;
constexpr std::size_t words_per_line = line_bytes / sizeof(void*);

// Cells in the order of visit: groups one after the other, each with an order of its own.
class Visit {
 public:
  Visit(std::size_t cells, std::size_t cells_per_group, std::uint64_t seed)
      : cells_(cells), per_group_(std::min(cells, cells_per_group)), seed_(seed),
        groups_((cells + per_group_ - 1) / per_group_, seed), inside_(1, seed) {
    enter(0);
  }

  // Calls see(cell) for every cell once.
  template <typename See>
  void each(const See& see) {
    for (std::uint64_t turn = 0; turn < groups_.count(); ++turn) {
      const std::uint64_t first = groups_(turn) * per_group_;
      enter(first);
      for (std::uint64_t i = 0; i < inside_.count(); ++i) see(first + inside_(i));
    }
  }

 private:
  void enter(std::uint64_t first) {
    const std::uint64_t size = std::min<std::uint64_t>(per_group_, cells_ - first);
    inside_ = Permutation(size, seed_ + first + 1);
  }

  std::uint64_t cells_;
  std::uint64_t per_group_;
  std::uint64_t seed_;
  Permutation groups_;
  Permutation inside_;
};

#if defined(__x86_64__)
#define HOMENODE_LOAD asm volatile("mov (%0), %0" : "+r"(at) : : "memory");
#elif defined(__aarch64__)
#define HOMENODE_LOAD asm volatile("ldr %0, [%0]" : "+r"(at) : : "memory");
#endif
#define HOMENODE_10(x) x x x x x x x x x x

}  // namespace

std::string name_of(Order order) { return order == Order::local ? "local" : "random"; }

std::optional<Order> order_of(const std::string& name) {
  if (name == "local") return Order::local;
  if (name == "random") return Order::random;
  return std::nullopt;
}

void** link_chain(std::byte* buffer, std::size_t bytes, std::size_t stride_bytes, Order order,
                  std::uint64_t seed) {
  const std::size_t cells = std::max<std::size_t>(bytes / stride_bytes, 2);
  const std::size_t lines_per_cell = stride_bytes / line_bytes;
  const auto place = [&](std::uint64_t cell) {
    const std::uint64_t mix = Permutation::scramble(cell ^ (seed << 32U));
    const std::size_t line = lines_per_cell == 1 ? 0 : mix % lines_per_cell;
    const std::size_t word = (mix >> 32U) % words_per_line;
    return reinterpret_cast<void**>(buffer + cell * stride_bytes + line * line_bytes) + word;
  };
  const std::size_t whole = order == Order::random ? cells : group_bytes / stride_bytes;
  Visit visit(cells, std::max<std::size_t>(whole, 1), seed);
  void** first = nullptr;
  void** last = nullptr;
  visit.each([&](std::uint64_t cell) {
    void** const here = place(cell);
    if (last == nullptr) {
      first = here;
    } else {
      *last = here;
    }
    last = here;
  });
  *last = first;
  return first;
}

void** walk(void** start, std::uint64_t loads, std::uint64_t& loads_done) {
  const std::uint64_t turns = std::max<std::uint64_t>((loads + loads_per_turn - 1) / loads_per_turn, 1);
  void** at = start;
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    HOMENODE_10(HOMENODE_10(HOMENODE_LOAD)) HOMENODE_10(HOMENODE_10(HOMENODE_LOAD))
  }
  loads_done = turns * loads_per_turn;
  return at;
}

}  // namespace homenode
