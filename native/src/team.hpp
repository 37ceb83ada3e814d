// A team of threads, each pinned to its CPU before it touches anything, asleep between tasks.
//
// Threads live as long as the team: creating and joining them inside a timed window, as some tools
// do, adds tens of microseconds and lets the first run on a CPU that is not its own. The timed
// regions are in the tasks; a task aligns its threads with barrier().
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "barrier.hpp"
#include "clock.hpp"
#include "pu_set.hpp"

namespace homenode {

class Team {
 public:
  explicit Team(const PuSet& pus);  // throws Failure if a thread cannot be pinned
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return pus_.size(); }
  const PuSet& pus() const { return pus_; }
  Barrier& barrier() { return barrier_; }

  // Runs the task on every thread with its rank, 0 to size - 1, in the order of the CPUs. Returns
  // when all are done; a failure of any thread breaks the barrier for the others and is rethrown.
  void run(const std::function<void(std::size_t)>& task);

 private:
  void live(std::size_t rank);
  void dismiss();

  PuSet pus_;
  Barrier barrier_;
  const std::function<void(std::size_t)>* task_ = nullptr;
  alignas(128) std::atomic<std::uint64_t> generation_{0};
  alignas(128) std::atomic<std::size_t> running_{0};
  bool dismissed_ = false;
  std::vector<std::exception_ptr> failures_;
  std::vector<std::thread> threads_;
};

// One thread's record of one timed region.
struct alignas(128) Stint {
  Nanoseconds start_ns = 0;
  Nanoseconds end_ns = 0;
  Nanoseconds cpu_ns = 0;  // time on the CPU within the stint
};

// Times `work` on the calling thread. The clock reads are innermost: the CPU time that tells whether
// something else ran on the CPU (a system call) is read outside of start_ns to end_ns.
Stint timed(const std::function<void()>& align, const std::function<void()>& work);

// What a team's stints say together: from the last start to the last end, never a sum of threads.
struct TeamTime {
  Nanoseconds elapsed_ns;
  Nanoseconds start_spread_ns;
  Nanoseconds away_ns;  // the longest that a thread was off its CPU
  bool disturbed;       // some thread was off its CPU for over 1 % of its time, or started late
};
TeamTime team_time(const std::vector<Stint>& stints);

}  // namespace homenode
