// CPU work. Inside the timed region: whole events; work.hpp says why.
#include "work.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>

#include "failure.hpp"
#include "spin_wait.hpp"

namespace homenode {
namespace {

constexpr std::uint64_t primes_below = 10'000;  // sysbench's default --cpu-max-prime

std::uint64_t count_primes() {
  std::uint64_t found = 0;
  for (std::uint64_t candidate = 3; candidate < primes_below; ++candidate) {
    bool prime = true;
    for (std::uint64_t divisor = 2; divisor * divisor <= candidate; ++divisor) {
      std::uint64_t rest = candidate;
      asm volatile("" : "+r"(rest));  // a real division each time, whatever the compiler knows
      if (rest % divisor == 0) {
        prime = false;
        break;
      }
    }
    if (prime) ++found;
  }
  return found;
}

std::uint64_t multiply_chains() {
  constexpr std::uint64_t turns = 250'000;
  std::array<std::uint64_t, 8> chain{1, 2, 3, 4, 5, 6, 7, 8};
  std::uint64_t factor = 0xd1342543de82ef95U;
  asm volatile("" : "+r"(factor));
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    for (auto& value : chain) {
      value = value * factor + 1;
      asm volatile("" : "+r"(value));  // no vector unit, no closed form
    }
  }
  return std::accumulate(chain.begin(), chain.end(), std::uint64_t{0});
}

}  // namespace

std::string name_of(Work work) { return work == Work::primes ? "primes" : "saturate"; }

std::optional<Work> work_of(const std::string& name) {
  if (name == "primes") return Work::primes;
  if (name == "saturate") return Work::saturate;
  return std::nullopt;
}

std::uint64_t do_event(Work work) { return work == Work::primes ? count_primes() : multiply_chains(); }

RateSample measure_rates(Team& team, const std::vector<std::size_t>& active, Work work,
                         std::uint64_t expected, double seconds) {
  RateSample sample;
  sample.events_per_s.resize(active.size());
  sample.events.resize(active.size());
  std::vector<Stint> stints(active.size());
  std::atomic<std::size_t> ready{0};
  const auto wanted_ns = static_cast<Nanoseconds>(seconds * 1e9);
  team.run([&](std::size_t rank) {
    const auto found = std::ranges::find(active, rank);
    if (found == active.end()) return;  // asleep again: a spinning sibling would be load itself
    const auto place = static_cast<std::size_t>(found - active.begin());
    std::uint64_t events = 0;
    std::uint64_t wrong = 0;
    const auto align = [&] {
      ready.fetch_add(1);
      while (ready.load(std::memory_order_relaxed) < active.size()) spin_wait();
    };
    stints[place] = timed(align, [&] {
      const Nanoseconds end = now_ns() + wanted_ns;
      do {
        if (do_event(work) != expected) ++wrong;
        ++events;
      } while (now_ns() < end);
    });
    if (wrong > 0) {
      throw measure_failure("work " + name_of(work) + ": expected the result " + std::to_string(expected) +
                                ", found another " + std::to_string(wrong) + " times",
                            "the processor of CPU " + std::to_string(team.pus().indices()[rank]) + " is at fault");
    }
    sample.events[place] = events;
    const Nanoseconds elapsed = std::max<Nanoseconds>(stints[place].end_ns - stints[place].start_ns, 1);
    sample.events_per_s[place] = static_cast<double>(events) / seconds_of(elapsed);
  });
  sample.disturbed = team_time(stints).disturbed;
  return sample;
}

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

}  // namespace homenode
