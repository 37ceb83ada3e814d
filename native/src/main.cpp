// homenode-probe: command line, printing and exit codes. Nothing is timed here.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "failure.hpp"
#include "guest_init.hpp"
#include "session.hpp"

namespace {

using namespace homenode;

std::vector<Command> commands() {
  return {bandwidth_command(), latency_command(),    loaded_latency_command(), core_to_core_command(),
          throughput_command(), smt_command(), placement_command()};
}

std::string help() {
  std::string text = "homenode-probe measures memory and processors and prints JSON.\n\n";
  text += "usage: homenode-probe COMMAND [OPTIONS]\n\n";
  for (const auto& command : commands()) {
    text += "  " + command.name + std::string(16 - command.name.size(), ' ') + command.summary + "\n";
  }
  text += "\n  homenode-probe COMMAND --help lists a command's options\n"
          "  homenode-probe --version\n\n"
          "Exit codes: 0 done, 2 usage, 3 could not measure. As a guest's first process (init) it\n"
          "mounts /proc and /sys, takes its arguments from the kernel command line after \"--\",\n"
          "and switches the machine off when it is done.\n";
  return text;
}

std::string run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) throw usage_failure("missing command", "homenode-probe --help lists them");
  if (arguments[0] == "--help" || arguments[0] == "-h") return help();
  if (arguments[0] == "--version") return std::string("homenode-probe ") + probe_version + "\n";
  for (const auto& command : commands()) {
    if (command.name != arguments[0]) continue;
    const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
    for (const auto& argument : rest) {
      if (argument != "--help" && argument != "-h") continue;
      return "homenode-probe " + command.name + ": " + command.summary + "\n\n" + help_of(command.options());
    }
    return command.run(Options(command.name, command.options(), rest));
  }
  throw usage_failure("expected a command, found \"" + arguments[0] + "\"", "homenode-probe --help lists them");
}

int report(ExitCode code, const std::string& message, const std::string& hint) {
  std::fprintf(stderr, "homenode-probe: %s\n", message.c_str());
  if (!hint.empty()) std::fprintf(stderr, "  hint: %s\n", hint.c_str());
  return static_cast<int>(code);
}

int print(const std::string& text) {
  const bool whole = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && whole) return static_cast<int>(ExitCode::done);
  return report(ExitCode::cannot_measure, "expected to write to standard output, found it closed or full", "");
}

int run_and_print(const std::vector<std::string>& arguments) {
  try {
    return print(run(arguments));
  } catch (const Failure& failure) {
    return report(failure.code(), failure.what(), failure.hint());
  } catch (const std::exception& error) {
    return report(ExitCode::cannot_measure, std::string("could not go on: ") + error.what(), "");
  }
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> arguments(values + 1, values + count);
  if (!is_init()) return run_and_print(arguments);
  prepare_guest();
  run_and_print(arguments);
  power_off();
}
