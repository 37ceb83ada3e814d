// Whether the processor is QEMU's translator (TCG) and no silicon. Nothing is timed here.
//
// x86-64 names its hypervisor to everybody. aarch64 names none, so what surrounds it must tell: a CPU
// that no maker put his number on, the machine's name, and whether anything of QEMU is on the PCI bus.
// A guest with the CPU model of a real one, booted without firmware tables, tells nothing at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace homenode {

struct EmulationEvidence {
  std::optional<std::string> hypervisor;   // as CPUID names it; x86-64 only
  bool is_arm = false;
  std::optional<std::uint64_t> midr;       // MIDR_EL1 of aarch64
  std::optional<std::string> product;      // the machine's name in its firmware's tables
  std::vector<std::string> pci_vendors;    // of every function, "0x1b36"
};

EmulationEvidence read_emulation_evidence(const std::optional<std::string>& hypervisor);

// Nothing where the evidence does not tell.
std::optional<bool> emulated_by(const EmulationEvidence& evidence);

}  // namespace homenode
