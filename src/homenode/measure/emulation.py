"""Emulation: whether a machine's instructions are translated (QEMU's TCG), and no figure means
anything. homenode-probe knows more where it runs: native/src/emulation.hpp.

Source: QEMU, target/arm/tcg/cpu64.c (the identification of "max") and hw/arm/virt.c (the product's
name); seen on Debian 12 in QEMU 7.2's "virt" machine.
"""

from homenode.discover.settings import read_cpu_fields
from homenode.snapshot.protocol import Snapshot
from homenode.topology import Host

_PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
_TREE = "/proc/device-tree/compatible"
_OF_QEMU = frozenset({0x1B36, 0x1AF4, 0x1234})
"""PCI vendors: Red Hat (QEMU's own devices, virtio), Bochs."""

_NO_MAKER = "0x00"


def is_emulated(snapshot: Snapshot, host: Host) -> bool | None:
    """None where nothing gives: an aarch64 guest of QEMU with a real CPU's model and no firmware
    tables, or anything that is neither x86 nor aarch64."""
    if "TCG" in (host.cpu.name or "").split():  # "QEMU TCG CPU version 2.5+"
        return True
    if host.architecture in ("x86_64", "i686"):
        # A virtual machine's CPU may have any name; CPUID, which gives, is the probe's to read.
        return None if is_virtual(snapshot) else False
    if host.architecture != "aarch64":
        return None
    if host.cpu.vendor == _NO_MAKER:
        return True
    product = (snapshot.read_text(_PRODUCT) or "").strip()
    if product in ("QEMU Virtual Machine", "KVM Virtual Machine"):
        return product == "QEMU Virtual Machine"
    if host.pci_devices and not _has_devices_of_qemu(host):
        return False
    return None


def is_virtual(snapshot: Snapshot) -> bool:
    """Whether the machine shows that it is a virtual one. aarch64 names no hypervisor: a virtual
    machine there may show nothing."""
    if "hypervisor" in read_cpu_fields(snapshot).get("flags", "").split():
        return True
    product = (snapshot.read_text(_PRODUCT) or "").strip()
    tree = (snapshot.read_text(_TREE) or "").replace("\0", " ").split()
    return product.endswith("Virtual Machine") or "linux,dummy-virt" in tree


def _has_devices_of_qemu(host: Host) -> bool:
    return any(device.vendor_id in _OF_QEMU for device in host.pci_devices)
