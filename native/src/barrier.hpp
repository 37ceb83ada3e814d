// The barrier: lets pinned threads leave at the same instant. Spins: leaving takes tens of ns.
// It lies before and after timed regions, never in one.
//
// A sleeping barrier wakes its threads tens of microseconds apart: as long as a short sample. Where
// there are more threads than CPUs, it yields instead of starving the thread that it waits for.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "spin_wait.hpp"

namespace homenode {

// Thrown to threads that wait for one that failed: the failure itself is reported by that one.
struct BarrierBroken : std::runtime_error {
  BarrierBroken() : std::runtime_error("another thread of the team failed") {}
};

class Barrier {
 public:
  explicit Barrier(std::uint32_t parties) : parties_(parties) {}

  void wait() {
    const std::uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    std::uint32_t spins = 0;
    while (phase_.load(std::memory_order_acquire) == phase) {
      if (broken_.load(std::memory_order_relaxed)) throw BarrierBroken();
      if (++spins < yield_after) {
        spin_wait();
      } else {
        sched_yield();
      }
    }
  }

  void break_up() { broken_.store(true, std::memory_order_relaxed); }
  void mend() {
    broken_.store(false, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr std::uint32_t yield_after = 20'000;

  std::uint32_t parties_;
  alignas(128) std::atomic<std::uint32_t> arrived_{0};
  alignas(128) std::atomic<std::uint32_t> phase_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace homenode
