// Contention: who else ran on our CPUs while we measured. Nothing is timed here.
#include "contention.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace homenode {
namespace {

constexpr double busy_others_ratio = 0.05;
constexpr double busy_steal_ratio = 0.02;
constexpr double least_wall_s = 0.1;  // the kernel counts in ticks of 10 ms: less proves nothing

std::optional<PuAccount> read_account(const PuSet& pus) {
  std::ifstream file("/proc/stat");
  std::stringstream text;
  text << file.rdbuf();
  return parse_proc_stat(text.str(), pus, sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

std::optional<PuAccount> parse_proc_stat(const std::string& text, const PuSet& pus, long ticks_per_s) {
  std::istringstream lines(text);
  std::string line;
  PuAccount account;
  std::size_t found = 0;
  while (std::getline(lines, line)) {
    if (!line.starts_with("cpu") || line.size() < 5 || line[3] < '0' || line[3] > '9') continue;
    std::istringstream words(line.substr(3));
    int pu = -1;
    double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
    if (!(words >> pu >> user >> nice >> system >> idle >> iowait >> irq >> softirq)) continue;
    words >> steal;  // absent before Linux 2.6.11
    if (!pus.contains(pu)) continue;
    ++found;
    account.busy_s += (user + nice + system + irq + softirq) / static_cast<double>(ticks_per_s);
    account.steal_s += steal / static_cast<double>(ticks_per_s);
  }
  if (found != pus.size() || pus.empty()) return std::nullopt;
  return account;
}

bool Contention::busy_neighbour() const {
  if (wall_s < least_wall_s) return false;
  return others_ratio.value_or(0.0) > busy_others_ratio || steal_ratio.value_or(0.0) > busy_steal_ratio;
}

ContentionWatch::ContentionWatch(PuSet pus)
    : pus_(std::move(pus)), account_(read_account(pus_)), own_s_(own_seconds()), start_ns_(now_ns()) {}

Contention ContentionWatch::read() const {
  Contention contention;
  contention.wall_s = seconds_of(now_ns() - start_ns_);
  const auto account = read_account(pus_);
  if (!account || !account_) return contention;
  const double offered_s = contention.wall_s * static_cast<double>(pus_.size());
  const double others_s = account->busy_s - account_->busy_s - (own_seconds() - own_s_);
  contention.others_ratio = std::clamp(others_s / offered_s, 0.0, 1.0);
  contention.steal_ratio = std::clamp((account->steal_s - account_->steal_s) / offered_s, 0.0, 1.0);
  return contention;
}

void write_contention(Json& json, const Contention& contention) {
  json.object("contention").field("wall_s", contention.wall_s);
  json.field("others_ratio", contention.others_ratio).field("steal_ratio", contention.steal_ratio);
  json.field("busy_neighbour", contention.busy_neighbour()).end();
}

}  // namespace homenode
