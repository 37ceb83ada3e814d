// Options of a command: declared in a table, read with messages that say what was expected. No timing.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pu_set.hpp"

namespace homenode {

struct OptionSpec {
  std::string name;     // without the dashes
  std::string metavar;  // "" for a switch
  std::string fallback; // shown in the help; the value when the option is not given
  std::string help;
  bool hidden = false;
};

class Options {
 public:
  // Reads "--name value", "--name=value" and switches. Throws a usage Failure for anything else.
  Options(std::string command, std::vector<OptionSpec> specs, const std::vector<std::string>& arguments);

  bool given(const std::string& name) const { return values_.contains(name); }
  std::string text(const std::string& name) const;
  bool flag(const std::string& name) const { return given(name); }
  double number(const std::string& name, double least, double most) const;
  std::uint64_t count(const std::string& name, std::uint64_t least, std::uint64_t most) const;
  std::uint64_t bytes(const std::string& name) const;  // "64M", "1GiB", "4096"
  std::optional<int> node(const std::string& name) const;
  std::optional<PuSet> pus(const std::string& name) const;
  std::vector<std::string> list(const std::string& name) const;  // parts between commas

  // A usage Failure that names the option.
  [[noreturn]] void reject(const std::string& name, const std::string& expected) const;

 private:
  const OptionSpec* spec(std::string_view name) const;

  std::string command_;
  std::vector<OptionSpec> specs_;
  std::map<std::string, std::string> values_;
};

std::optional<std::uint64_t> parse_bytes(std::string_view text);
std::string help_of(const std::vector<OptionSpec>& specs);

}  // namespace homenode
