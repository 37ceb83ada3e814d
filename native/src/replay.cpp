// Replay: recorded series from a file. Nothing is timed here.
#include "replay.hpp"

#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <string_view>

#include "failure.hpp"

namespace homenode {
namespace {

constexpr std::uintmax_t most_bytes = std::uintmax_t{64} << 20U;
constexpr std::string_view separators = " \t,\r";

std::vector<double> numbers_of(std::string_view line, const std::string& where) {
  std::vector<double> numbers;
  while (true) {
    const auto start = line.find_first_not_of(separators);
    if (start == std::string_view::npos) return numbers;
    line.remove_prefix(start);
    const std::string_view word = line.substr(0, line.find_first_of(separators));
    line.remove_prefix(word.size());
    double value = std::numeric_limits<double>::quiet_NaN();
    if (word != "-") {
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      const bool whole = error == std::errc{} && end == word.data() + word.size();
      if (!whole || !std::isfinite(value) || value < 0.0) {
        throw usage_failure(where + ": expected numbers from zero on, found \"" +
                            std::string(word.substr(0, 40)) + "\"");
      }
    }
    numbers.push_back(value);
  }
}

}  // namespace

std::vector<std::vector<double>> read_series(const std::string& path, std::size_t least, std::size_t most) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw usage_failure(path + ": no such file, or it cannot be read");
  std::vector<std::vector<double>> series;
  std::string line;
  std::uintmax_t bytes = 0;
  for (std::size_t number = 1; std::getline(file, line); ++number) {
    bytes += line.size() + 1;
    if (bytes > most_bytes) throw usage_failure(path + ": expected at most 64 MiB, found more");
    const auto start = line.find_first_not_of(separators);
    if (start == std::string::npos || line[start] == '#') continue;
    const std::string where = path + ":" + std::to_string(number);
    auto numbers = numbers_of(line, where);
    if (numbers.size() < least || numbers.size() > most) {
      throw usage_failure(where + ": expected " + std::to_string(least) + " to " + std::to_string(most) +
                          " numbers, found " + std::to_string(numbers.size()));
    }
    series.push_back(std::move(numbers));
  }
  if (series.empty()) throw usage_failure(path + ": no lines of numbers in it");
  return series;
}

}  // namespace homenode
