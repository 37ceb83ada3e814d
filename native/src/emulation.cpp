// Whether the processor is QEMU's translator (TCG) and no silicon. Nothing is timed here.
#include "emulation.hpp"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "host.hpp"

namespace homenode {
namespace {

// Red Hat (QEMU's own devices, virtio) and Bochs (its display). The machines of QEMU that servers are
// made of always have one: at least the root of the PCI bus.
constexpr std::array<std::string_view, 3> qemu_vendors{"0x1b36", "0x1af4", "0x1234"};

std::optional<std::uint64_t> read_midr() {
#if defined(__aarch64__)
  // The kernel answers in the CPU's place, where it says that it does.
  if ((getauxval(AT_HWCAP) & HWCAP_CPUID) == 0) return std::nullopt;
  std::uint64_t value = 0;
  __asm__("mrs %0, midr_el1" : "=r"(value));
  return value;
#else
  return std::nullopt;
#endif
}

std::vector<std::string> read_pci_vendors() {
  std::vector<std::string> vendors;
  std::error_code error;
  std::filesystem::directory_iterator function("/sys/bus/pci/devices", error);
  for (; !error && function != std::filesystem::directory_iterator(); function.increment(error)) {
    const auto vendor = read_line(function->path().string() + "/vendor");
    if (vendor) vendors.push_back(*vendor);
  }
  return vendors;
}

}  // namespace

EmulationEvidence read_emulation_evidence(const std::optional<std::string>& hypervisor) {
  EmulationEvidence evidence;
  evidence.hypervisor = hypervisor;
#if defined(__aarch64__)
  evidence.is_arm = true;
#endif
  evidence.midr = read_midr();
  evidence.product = read_line("/sys/devices/virtual/dmi/id/product_name");
  evidence.pci_vendors = read_pci_vendors();
  return evidence;
}

std::optional<bool> emulated_by(const EmulationEvidence& evidence) {
  if (!evidence.is_arm) return evidence.hypervisor == "TCGTCGTCGTCG";
  constexpr unsigned implementer_bit = 24;
  if (evidence.midr && *evidence.midr >> implementer_bit == 0) return true;  // QEMU's "max"
  // QEMU names its "virt" machine so, unless the user named it otherwise.
  if (evidence.product == "QEMU Virtual Machine") return true;
  if (evidence.product == "KVM Virtual Machine") return false;
  const bool is_qemu = std::ranges::any_of(evidence.pci_vendors, [](const auto& vendor) {
    return std::ranges::find(qemu_vendors, vendor) != qemu_vendors.end();
  });
  if (!evidence.pci_vendors.empty() && !is_qemu) return false;
  return std::nullopt;
}

}  // namespace homenode
