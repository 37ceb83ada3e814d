// The JSON document that the probe prints. Nothing is timed here.
#include "json.hpp"

#include <array>
#include <cmath>
#include <cstdio>

namespace homenode {
namespace {

constexpr std::size_t lines_down_to_depth = 3;  // deeper values stay on one line: samples are long

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (code < 0x20 || code >= 0x7f) {
      // Arguments and sysfs texts may hold any byte: Latin-1 escapes keep the document valid.
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", code);
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

void Json::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (levels_.empty()) return;
  if (!levels_.back().empty) text_ += ',';
  if (levels_.size() <= lines_down_to_depth) {
    text_ += '\n';
    text_.append(levels_.size(), ' ');
  } else if (!levels_.back().empty) {
    text_ += ' ';
  }
  levels_.back().empty = false;
}

Json& Json::open(char opening, char closing) {
  separate();
  text_ += opening;
  levels_.push_back({closing, true});
  return *this;
}

Json& Json::end() {
  const Level level = levels_.back();
  levels_.pop_back();
  if (!level.empty && levels_.size() < lines_down_to_depth) {
    text_ += '\n';
    text_.append(levels_.size(), ' ');
  }
  text_ += level.closing;
  if (levels_.empty()) text_ += '\n';
  return *this;
}

Json& Json::key(std::string_view name) {
  separate();
  text_ += quoted(name);
  text_ += ": ";
  after_key_ = true;
  return *this;
}

Json& Json::raw(std::string_view token) {
  separate();
  text_ += token;
  return *this;
}

Json& Json::value(std::string_view text) { return raw(quoted(text)); }

Json& Json::value(bool truth) { return raw(truth ? "true" : "false"); }

Json& Json::value(double number) {
  if (!std::isfinite(number)) return raw("null");
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.9g", number);
  return raw(digits.data());
}

}  // namespace homenode
