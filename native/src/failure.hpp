// Failures: what stops the probe, with its exit code and the next thing to try. Nothing is timed here.
#pragma once

#include <stdexcept>
#include <string>

namespace homenode {

enum class ExitCode : int { done = 0, usage = 2, cannot_measure = 3 };

// A message says where, what was expected and what was found; `hint` is the next thing to try.
class Failure : public std::runtime_error {
 public:
  Failure(ExitCode code, const std::string& message, std::string hint)
      : std::runtime_error(message), code_(code), hint_(std::move(hint)) {}

  ExitCode code() const { return code_; }
  const std::string& hint() const { return hint_; }

 private:
  ExitCode code_;
  std::string hint_;
};

inline Failure usage_failure(const std::string& message, const std::string& hint = "") {
  return {ExitCode::usage, message, hint};
}

inline Failure measure_failure(const std::string& message, const std::string& hint = "") {
  return {ExitCode::cannot_measure, message, hint};
}

}  // namespace homenode
