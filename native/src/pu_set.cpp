// Sets of CPUs: parsing and printing of Linux's list form. Nothing is timed here.
#include "pu_set.hpp"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace homenode {
namespace {

std::optional<int> parse_index(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if (value < 0 || value > PuSet::max_index) return std::nullopt;
  return value;
}

}  // namespace

PuSet::PuSet(std::vector<int> indices) : indices_(std::move(indices)) {
  std::sort(indices_.begin(), indices_.end());
  indices_.erase(std::unique(indices_.begin(), indices_.end()), indices_.end());
}

std::optional<PuSet> PuSet::parse(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  std::vector<int> indices;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const auto range = text.substr(0, comma);
    const auto dash = range.find('-');
    const auto first = parse_index(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_index(range.substr(dash + 1));
    if (!first || !last || *last < *first) return std::nullopt;
    for (int pu = *first; pu <= *last; ++pu) indices.push_back(pu);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) return std::nullopt;
  }
  return PuSet(std::move(indices));
}

bool PuSet::contains(int pu) const {
  return std::binary_search(indices_.begin(), indices_.end(), pu);
}

PuSet PuSet::intersection(const PuSet& other) const {
  std::vector<int> both;
  std::ranges::set_intersection(indices_, other.indices_, std::back_inserter(both));
  return PuSet(std::move(both));
}

PuSet PuSet::minus(const PuSet& other) const {
  std::vector<int> rest;
  std::ranges::set_difference(indices_, other.indices_, std::back_inserter(rest));
  return PuSet(std::move(rest));
}

std::string PuSet::text() const {
  std::string text;
  for (std::size_t i = 0; i < indices_.size();) {
    std::size_t last = i;
    while (last + 1 < indices_.size() && indices_[last + 1] == indices_[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(indices_[i]);
    if (last > i) text += '-' + std::to_string(indices_[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace homenode
