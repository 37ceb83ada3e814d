// Bandwidth kernels: the table. The timed loops are in kernel_body.hpp.
#include "kernel.hpp"

#include <algorithm>

#include "failure.hpp"

namespace homenode {
namespace {

constexpr Operation operations[] = {Operation::read,  Operation::write, Operation::copy,
                                    Operation::scale, Operation::add,   Operation::triad};

// Those that this processor and its kernel run, widest first.
std::vector<const KernelSet*> sets() {
#if defined(__x86_64__)
  std::vector<const KernelSet*> found;
  // Asks CPUID, and XGETBV for whether the operating system keeps the wide registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) found.push_back(&avx512_kernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2_kernels);
  found.push_back(&sse2_kernels);
  return found;
#elif defined(__aarch64__)
  return {&neon_kernels};
#else
#error "homenode-probe has kernels for x86-64 and aarch64 only"
#endif
}

std::vector<Kernel> kernels_of(const KernelSet& set) {
  std::vector<Kernel> kernels;
  for (const auto operation : operations) {
    const auto index = static_cast<std::size_t>(operation);
    kernels.push_back({operation, Stores::regular, set.regular[index], set.name});
    if (set.non_temporal[index] != nullptr) {
      kernels.push_back({operation, Stores::non_temporal, set.non_temporal[index], set.name});
    }
  }
  return kernels;
}

constexpr std::size_t widest_bytes = 64;

// Measured on Zen 4, one thread: kernels that only read or only write care little. Where loads and
// stores mix, wide registers are slower, perhaps because more lines are in flight than the core has
// buffers for: copy, add and triad with regular stores gain 10 to 20 % from 16-byte registers, with
// non-temporal ones 5 % from 32-byte registers.
std::size_t best_register_bytes(const Kernel& kernel) {
  if (kernel.operation == Operation::read || kernel.operation == Operation::write) return widest_bytes;
  return kernel.stores == Stores::regular ? 16 : 32;
}

// The widest set of at most that many bytes that runs here; the narrowest where none is as narrow.
const KernelSet& set_up_to(std::size_t bytes) {
  const auto running = sets();
  const auto found = std::ranges::find_if(running, [&](const auto* set) { return set->register_bytes <= bytes; });
  return found == running.end() ? *running.back() : **found;
}

}  // namespace

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::read: return "read";
    case Operation::write: return "write";
    case Operation::copy: return "copy";
    case Operation::scale: return "scale";
    case Operation::add: return "add";
    case Operation::triad: return "triad";
  }
  return "";
}

std::optional<Operation> operation_of(std::string_view name) {
  for (const auto operation : operations) {
    if (name_of(operation) == name) return operation;
  }
  return std::nullopt;
}

std::string Kernel::name() const {
  return std::string(name_of(operation)) + (stores == Stores::non_temporal ? "_nt" : "");
}

std::size_t Kernel::reported_bytes() const {
  switch (operation) {
    case Operation::read:
    case Operation::write: return sizeof(double);
    case Operation::copy:
    case Operation::scale: return 2 * sizeof(double);
    case Operation::add:
    case Operation::triad: return 3 * sizeof(double);
  }
  return 0;
}

std::size_t Kernel::moved_bytes() const {
  const bool allocates = operation != Operation::read && stores == Stores::regular;
  return reported_bytes() + (allocates ? sizeof(double) : 0);
}

std::optional<double> Kernel::expected(double a, double b) const {
  switch (operation) {
    case Operation::read: return std::nullopt;
    case Operation::write: return kernel_scalar;
    case Operation::copy: return a;
    case Operation::scale: return kernel_scalar * a;
    case Operation::add: return a + b;
    case Operation::triad: return a + kernel_scalar * b;
  }
  return std::nullopt;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto* set : sets()) names.emplace_back(set->name);
  return names;
}

std::vector<Kernel> kernels_of(std::string_view instruction_set) {
  const auto running = sets();
  const auto found = std::ranges::find(running, instruction_set, &KernelSet::name);
  if (found == running.end()) throw usage_failure("no kernels for " + std::string(instruction_set));
  return kernels_of(**found);
}

std::vector<Kernel> best_kernels() {
  std::vector<Kernel> best = kernels_of(set_up_to(widest_bytes));
  for (auto& kernel : best) {
    for (const auto& other : kernels_of(set_up_to(best_register_bytes(kernel)))) {
      if (other.name() == kernel.name()) kernel = other;
    }
  }
  return best;
}

}  // namespace homenode
