// The JSON document that the probe prints: written in order, never held as a tree. Nothing is timed here.
#pragma once

#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace homenode {

// Writes one document. Objects and arrays are opened and closed in pairs; `text()` is the result.
// A number that is not finite, and an optional that is empty, are written as null.
class Json {
 public:
  Json& object() { return open('{', '}'); }
  Json& array() { return open('[', ']'); }
  Json& object(std::string_view name) { return key(name).object(); }
  Json& array(std::string_view name) { return key(name).array(); }
  Json& end();

  Json& key(std::string_view name);
  Json& value(std::string_view text);
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(double number);
  Json& value(bool truth);
  template <std::integral T>
  Json& value(T number) {
    return raw(std::to_string(number));
  }
  template <typename T>
  Json& value(const std::optional<T>& maybe) {
    return maybe ? value(*maybe) : raw("null");
  }
  template <typename T>
  Json& value(const std::vector<T>& items) {
    array();
    for (const auto& item : items) value(item);
    return end();
  }
  template <typename T>
  Json& field(std::string_view name, const T& content) {
    return key(name).value(content);
  }

  const std::string& text() const { return text_; }

 private:
  struct Level {
    char closing;
    bool empty;
  };

  Json& open(char opening, char closing);
  Json& raw(std::string_view token);
  void separate();

  std::string text_;
  std::vector<Level> levels_;
  bool after_key_ = false;
};

}  // namespace homenode
