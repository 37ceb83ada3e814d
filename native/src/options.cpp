// Options of a command. Nothing is timed here.
#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

#include "failure.hpp"

namespace homenode {

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  unsigned shift = 0;
  if (unit == "K" || unit == "KiB") shift = 10;
  else if (unit == "M" || unit == "MiB") shift = 20;
  else if (unit == "G" || unit == "GiB") shift = 30;
  else if (!unit.empty() && unit != "B") return std::nullopt;
  if (value > (std::numeric_limits<std::uint64_t>::max() >> shift)) return std::nullopt;
  return value << shift;
}

Options::Options(std::string command, std::vector<OptionSpec> specs,
                 const std::vector<std::string>& arguments)
    : command_(std::move(command)), specs_(std::move(specs)) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const auto equals = argument.find('=');
    const std::string name = argument.starts_with("--") ? argument.substr(2, equals - 2) : "";
    const OptionSpec* const known = name.empty() ? nullptr : spec(name);
    const std::string hint = "homenode-probe " + command_ + " --help lists the options";
    if (known == nullptr) {
      throw usage_failure(command_ + ": expected an option, found \"" + argument + "\"", hint);
    }
    if (values_.contains(name)) {
      throw usage_failure(command_ + ": expected --" + name + " once, found it twice", hint);
    }
    if (known->metavar.empty()) {
      if (equals != std::string::npos) {
        throw usage_failure(command_ + ": expected --" + name + " without a value, found \"" + argument + "\"", hint);
      }
      values_[name] = "";
    } else if (equals != std::string::npos) {
      values_[name] = argument.substr(equals + 1);
    } else if (i + 1 < arguments.size()) {
      values_[name] = arguments[++i];
    } else {
      throw usage_failure(command_ + ": expected a value after --" + name + ", found the end", hint);
    }
  }
}

const OptionSpec* Options::spec(std::string_view name) const {
  const auto found = std::ranges::find(specs_, name, &OptionSpec::name);
  return found == specs_.end() ? nullptr : &*found;
}

std::string Options::text(const std::string& name) const {
  const auto found = values_.find(name);
  if (found != values_.end()) return found->second;
  const OptionSpec* const known = spec(name);
  return known == nullptr ? "" : known->fallback;
}

void Options::reject(const std::string& name, const std::string& expected) const {
  throw usage_failure(command_ + ": --" + name + ": expected " + expected + ", found \"" + text(name) + "\"",
                      "homenode-probe " + command_ + " --help lists the options");
}

double Options::number(const std::string& name, double least, double most) const {
  const std::string value = text(name);
  double number = 0.0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole = error == std::errc{} && end == value.data() + value.size();
  if (!whole || !(number >= least && number <= most)) {
    reject(name, "a number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

std::uint64_t Options::count(const std::string& name, std::uint64_t least, std::uint64_t most) const {
  const std::string value = text(name);
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool whole = error == std::errc{} && end == value.data() + value.size();
  if (!whole || number < least || number > most) {
    reject(name, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

std::uint64_t Options::bytes(const std::string& name) const {
  const auto value = parse_bytes(text(name));
  constexpr std::uint64_t most_bytes = std::uint64_t{1} << 50U;  // sums of several stay in 64 bits
  if (!value || *value == 0 || *value > most_bytes) {
    reject(name, "a size above zero, up to 1048576G, such as 65536, 64M or 1G");
  }
  return *value;
}

std::optional<int> Options::node(const std::string& name) const {
  if (!given(name)) return std::nullopt;
  constexpr std::uint64_t most_nodes = 1024;
  return static_cast<int>(count(name, 0, most_nodes - 1));
}

std::optional<PuSet> Options::pus(const std::string& name) const {
  if (!given(name)) return std::nullopt;
  const auto pus = PuSet::parse(text(name));
  if (!pus || pus->empty()) reject(name, "CPUs such as 0-3,8");
  return pus;
}

std::vector<std::string> Options::list(const std::string& name) const {
  std::vector<std::string> parts;
  std::string rest = text(name);
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    if (comma != 0) parts.push_back(rest.substr(0, comma));
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return parts;
}

std::string help_of(const std::vector<OptionSpec>& specs) {
  constexpr std::size_t column = 26;
  std::string help;
  for (const auto& one : specs) {
    if (one.hidden) continue;
    std::string left = "  --" + one.name + (one.metavar.empty() ? "" : " " + one.metavar);
    left += std::string(left.size() < column ? column - left.size() : 1, ' ');
    help += left + one.help + (one.fallback.empty() ? "" : " (default: " + one.fallback + ")") + "\n";
  }
  return help;
}

}  // namespace homenode
