// A team of pinned threads. Inside the timed region of timed(): the work alone.
#include "team.hpp"

#include <algorithm>

#include "pinning.hpp"

namespace homenode {
namespace {

constexpr double late_start_ratio = 0.02;    // of the elapsed time: the others ran alone so long
// Of the wall time. A kernel thread's 5 us in a stint of milliseconds is no disturbance; counting
// preemptions instead would mark every other sample of a quiet machine.
constexpr double most_away_ratio = 0.01;
constexpr Nanoseconds away_slack_ns = 5'000;  // the two CPU-time readings lie outside of the stint

}  // namespace

Team::Team(const PuSet& pus)
    : pus_(pus), barrier_(static_cast<std::uint32_t>(pus.size())), failures_(pus.size()) {
  try {
    for (std::size_t rank = 0; rank < pus_.size(); ++rank) {
      threads_.emplace_back([this, rank] { live(rank); });
    }
    run([this](std::size_t rank) { pin_to(pus_.indices()[rank]); });
  } catch (...) {
    dismiss();
    throw;
  }
}

Team::~Team() { dismiss(); }

void Team::dismiss() {
  dismissed_ = true;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Team::live(std::size_t rank) {
  std::uint64_t seen = 0;
  while (true) {
    generation_.wait(seen, std::memory_order_acquire);
    ++seen;
    if (dismissed_) return;
    try {
      (*task_)(rank);
    } catch (...) {
      failures_[rank] = std::current_exception();
      barrier_.break_up();
    }
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
  }
}

void Team::run(const std::function<void(std::size_t)>& task) {
  task_ = &task;
  running_.store(threads_.size(), std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::size_t left = running_.load(); left != 0; left = running_.load()) running_.wait(left);
  barrier_.mend();
  std::vector<std::exception_ptr> found(failures_.size());
  found.swap(failures_);
  std::exception_ptr consequence;
  for (const auto& failure : found) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const BarrierBroken&) {
      consequence = failure;  // another thread holds the cause
    }
  }
  if (consequence) std::rethrow_exception(consequence);
}

Stint timed(const std::function<void()>& align, const std::function<void()>& work) {
  Stint stint;
  align();
  const Nanoseconds cpu = thread_cpu_ns();
  stint.start_ns = now_ns();
  work();
  stint.end_ns = now_ns();
  stint.cpu_ns = thread_cpu_ns() - cpu;
  return stint;
}

TeamTime team_time(const std::vector<Stint>& stints) {
  const auto start = [](const Stint& stint) { return stint.start_ns; };
  const auto end = [](const Stint& stint) { return stint.end_ns; };
  const Nanoseconds first_start = start(*std::ranges::min_element(stints, {}, start));
  const Nanoseconds last_start = start(*std::ranges::max_element(stints, {}, start));
  const Nanoseconds last_end = end(*std::ranges::max_element(stints, {}, end));
  TeamTime time{last_end - last_start, last_start - first_start, 0, false};
  time.disturbed = static_cast<double>(time.start_spread_ns) >
                   late_start_ratio * static_cast<double>(std::max<Nanoseconds>(time.elapsed_ns, 1));
  for (const auto& stint : stints) {
    const Nanoseconds wall = stint.end_ns - stint.start_ns;
    const Nanoseconds away = std::max<Nanoseconds>(wall - stint.cpu_ns, 0);
    time.away_ns = std::max(time.away_ns, away);
    const double most_away = most_away_ratio * static_cast<double>(wall);
    time.disturbed = time.disturbed || static_cast<double>(away) >
                                           std::max(most_away, static_cast<double>(away_slack_ns));
  }
  return time;
}

}  // namespace homenode
