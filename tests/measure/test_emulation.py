"""Whether a machine is QEMU's translator: told, denied, or not known."""

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.topology import CpuModel, Host
from homenode.measure.environment import is_emulated, is_virtual
from tests.small_hosts import even_host

PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
VIRT = {"/proc/device-tree/compatible": "linux,dummy-virt\0"}


def machine(files: dict[str, str]) -> MemorySnapshot:
    return MemorySnapshot("guest", files)


def arm(vendor: str = "ARM", pci_vendor: int | None = None) -> Host:
    """An aarch64 machine, with one PCI function of that vendor or none."""
    devices: tuple[PciDevice, ...] = ()
    if pci_vendor is not None:
        bdf, bus = Bdf.parse("0000:00:00.0"), "pci0000:00"
        kind, class_code = DeviceKind.OTHER, 0x060000
        devices = (PciDevice(bdf, kind, class_code, pci_vendor, 1, bus, None, None),)
    return replace(
        even_host(), architecture="aarch64", cpu=CpuModel(vendor, None), pci_devices=devices
    )


@pytest.mark.parametrize(
    ("host", "files", "expected"),
    [
        # As QEMU 7.2's "virt" shows itself under TCG: -cpu max; cortex-a57 with UEFI, and without
        (arm("0x00"), VIRT, True),
        (arm("ARM"), {PRODUCT: "QEMU Virtual Machine\n"}, True),
        (arm("ARM"), VIRT, None),
        (arm("ARM"), {PRODUCT: "KVM Virtual Machine\n"}, False),
        (arm("ARM"), {PRODUCT: "OpenStack Nova\n"}, None),
    ],
)
def test_an_arm_guest_is_judged_only_by_what_tells(
    host: Host, files: dict[str, str], expected: bool | None
) -> None:
    assert is_emulated(machine(files), host) is expected


def test_an_arm_server_without_devices_of_qemu_is_none_of_its_machines() -> None:
    assert is_emulated(machine({PRODUCT: "Grace"}), arm(pci_vendor=0x10DE)) is False
    assert is_emulated(machine({PRODUCT: "Nova"}), arm(pci_vendor=0x1AF4)) is None


def test_of_x86_a_virtual_machine_tells_nothing_by_itself() -> None:
    host = replace(even_host(), architecture="x86_64")
    flags = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu hypervisor lm\n"}
    assert is_emulated(machine({}), host) is False
    assert is_emulated(machine(flags), host) is None
    named = replace(host, cpu=replace(host.cpu, name="QEMU TCG CPU version 2.5+"))
    assert is_emulated(machine(flags), named) is True


def test_virtual_machines_show_it_in_one_way_or_another() -> None:
    assert is_virtual(machine({"/proc/cpuinfo": "flags\t\t: fpu hypervisor\n"}))
    assert is_virtual(machine({PRODUCT: "KVM Virtual Machine\n"}))
    assert is_virtual(machine(VIRT))
    assert not is_virtual(machine({PRODUCT: "PowerEdge", "/proc/cpuinfo": "flags\t\t: fpu\n"}))
