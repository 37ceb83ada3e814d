// Sets of CPUs: Linux's list form, "0-3,8,10-11". Nothing is timed here.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace homenode {

// Logical CPUs by OS index; sorted, each once.
class PuSet {
 public:
  static constexpr int max_index = 65535;  // Linux's NR_CPUS is 8192 at most today

  PuSet() = default;
  explicit PuSet(std::vector<int> indices);

  // Nothing if the text is not a list of indices and ascending ranges.
  static std::optional<PuSet> parse(std::string_view text);

  const std::vector<int>& indices() const { return indices_; }
  std::size_t size() const { return indices_.size(); }
  bool empty() const { return indices_.empty(); }
  bool contains(int pu) const;
  PuSet intersection(const PuSet& other) const;
  PuSet minus(const PuSet& other) const;
  std::string text() const;
  bool operator==(const PuSet&) const = default;

 private:
  std::vector<int> indices_;
};

}  // namespace homenode
