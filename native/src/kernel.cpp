// Bandwidth kernels: the table. The timed loops are in kernel_body.hpp.
#include "kernel.hpp"

#include "failure.hpp"

namespace homenode {
namespace {

constexpr Operation operations[] = {Operation::read,  Operation::write, Operation::copy,
                                    Operation::scale, Operation::add,   Operation::triad};

const KernelSet* set_of(std::string_view name) {
#if defined(__x86_64__)
  if (name == "avx512") return &avx512_kernels;
  if (name == "avx2") return &avx2_kernels;
  if (name == "sse2") return &sse2_kernels;
#elif defined(__aarch64__)
  if (name == "neon") return &neon_kernels;
#endif
  return nullptr;
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
  std::vector<std::string> sets;
#if defined(__x86_64__)
  // Asks CPUID, and XGETBV for whether the operating system keeps the wide registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) sets.emplace_back("avx512");
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.emplace_back("avx2");
  sets.emplace_back("sse2");
#elif defined(__aarch64__)
  sets.emplace_back("neon");
#else
#error "homenode-probe has kernels for x86-64 and aarch64 only"
#endif
  return sets;
}

std::vector<Kernel> kernels_of(std::string_view instruction_set) {
  const KernelSet* const set = set_of(instruction_set);
  if (set == nullptr) throw usage_failure("no kernels for " + std::string(instruction_set));
  std::vector<Kernel> kernels;
  for (const auto operation : operations) {
    const auto index = static_cast<std::size_t>(operation);
    kernels.push_back({operation, Stores::regular, set->regular[index]});
    if (set->non_temporal[index] != nullptr) {
      kernels.push_back({operation, Stores::non_temporal, set->non_temporal[index]});
    }
  }
  return kernels;
}

}  // namespace homenode
