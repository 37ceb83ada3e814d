// Bandwidth kernels: the table of what they are, what they count, and which instructions run them.
// The timed loops are in kernel_body.hpp.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace homenode {

enum class Operation { read, write, copy, scale, add, triad };
enum class Stores { regular, non_temporal };

// Runs `passes` times over `count` doubles (a multiple of kernel_grain); c, a and b are 64-byte aligned
// and do not overlap. Sources are never written, so values stay finite however often it runs. The sum of
// what was read for `read`, 0 for the others.
using KernelFunction = double (*)(double* c, const double* a, const double* b, std::size_t count,
                                  std::size_t passes);

constexpr std::size_t kernel_grain = 128;  // doubles: sixteen lines of 64 bytes
constexpr double kernel_scalar = 3.0;

struct Kernel {
  Operation operation;
  Stores stores;
  KernelFunction run;
  std::string_view instruction_set;

  std::string name() const;
  // Bytes per element that STREAM would report: each array once.
  std::size_t reported_bytes() const;
  // Bytes per element that move: a regular store first reads its line (write-allocate). Nominal:
  // some processors avoid that read for whole lines (Zen 4's write kernel does).
  std::size_t moved_bytes() const;
  bool reads_a() const { return operation != Operation::write; }
  // What c holds afterwards where a and b hold these values; nothing for `read`.
  std::optional<double> expected(double a, double b) const;
};

std::string_view name_of(Operation operation);
std::optional<Operation> operation_of(std::string_view name);

// Instruction sets that this processor and its kernel run, best first: avx512, avx2, sse2 or neon.
std::vector<std::string> instruction_sets();
// All kernels of one set: six operations, and non-temporal forms of the five that store.
std::vector<Kernel> kernels_of(std::string_view instruction_set);
// The same, each of the set whose register width suits it best for arrays beyond the caches.
std::vector<Kernel> best_kernels();

// One instruction set's functions, in the order of Operation; `read` has no non-temporal form.
struct KernelSet {
  std::string_view name;
  std::size_t register_bytes;
  KernelFunction regular[6];
  KernelFunction non_temporal[6];
};
extern const KernelSet avx512_kernels;
extern const KernelSet avx2_kernels;
extern const KernelSet sse2_kernels;
extern const KernelSet neon_kernels;

}  // namespace homenode
