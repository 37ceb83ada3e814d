"""Aperture: address space, locked memory and IOMMU entries that passed-through devices need.

Source: QEMU's q35 has 32 GiB of 64-bit PCI window by default and OVMF gives out as much; both take
more (pcihole64; fw_cfg opt/ovmf/X-PciMmio64Mb). CPU models other than host and max have 40 physical
address bits. libvirt's memlock limit with VFIO: memory, memory devices included, + 1 GiB, once a
device with a vIOMMU.
"""

from collections.abc import Iterable

from msgspec import Struct

from homenode.findings import Finding, Gap, Severity, finding
from homenode.machine.pci import PciDevice
from homenode.machine.settings import HostSettings
from homenode.plan.request import GuestRequest
from homenode.text import shorten_list
from homenode.units import GIB, KIB, MIB, format_bytes
from homenode.vm.layout import GuestPcie
from homenode.vm.model import Vm
from homenode.vm.plan import Aperture

DEFAULT_WINDOW_BYTES = 32 * GIB
"""Default 64-bit PCI window of q35 and of OVMF."""

VIRT_WINDOW_BYTES = 512 * GIB
"""High PCI window of the virt machine (aarch64)."""

DEFAULT_ADDRESS_BITS = 40
"""Physical address bits of QEMU's x86 models other than host and max."""

QEMU_VERSION = "QEMU's version"
"""The subject of the gap."""

WINDOW = "64-bit PCI window"
WINDOW_FINDINGS = ("address-bits-small", "pci-window-small", "virt-window-small")
"""The subject of gaps and findings, and the ids."""

_HOST_BITS_MODES = frozenset({"host-passthrough", "maximum"})
_HOST_BITS_QEMU = (6, 0, 0)
_LOW_WINDOW_BYTES = 4 * GIB
_SMALL_PAGE_BYTES = 4 * KIB
_OWN_BARS = 6
"""Later entries are the ROM and virtual functions' space, which a guest does not map."""


class ApertureChoice(Struct, frozen=True):
    """The values to set, and their cost; None without devices."""

    aperture: Aperture | None
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = ()


def choose_aperture(
    request: GuestRequest,
    devices: Iterable[PciDevice],
    iommu_needed: bool,
    settings: HostSettings,
) -> ApertureChoice:
    """Return the aperture of these devices.

    Sizes are set if the layout mirrors PCIe or a device is not in the definition yet. Otherwise the
    tree is kept, and a finding reports a window that is too small.
    """
    # Long because one window decides the hole, the address bits and the firmware's setting.
    passed_devices = list(devices)
    if not passed_devices:
        return ApertureChoice(None)
    unknown = [str(device.bdf) for device in passed_devices if not device.bars]
    gaps: list[Gap] = []
    if unknown:
        gaps.append(
            Gap(
                WINDOW,
                f"BAR sizes of {shorten_list(unknown, 4)} are unknown, so they do not count",
            )
        )
    window = compute_window_bytes(passed_devices)
    bars = sum(
        bar.size_bytes
        for device in passed_devices
        for bar in device.bars
        if bar.is_memory and bar.index < _OWN_BARS
    )
    factor = len(passed_devices) if iommu_needed else 1
    step = request.page_bytes or _SMALL_PAGE_BYTES
    total_bytes = request.memory_bytes + request.guest.memory_device_bytes
    entries = -(-total_bytes // step) + -(-bars // step)
    memlock = factor * (total_bytes + GIB)
    guest = request.guest
    findings: tuple[Finding, ...] = ()
    hole = bits = firmware = None
    is_mirrored = request.layout.pcie is GuestPcie.HOST
    documented_bdfs = {hostdev.bdf for hostdev in guest.hostdevs}
    is_ours = is_mirrored or any(device.bdf not in documented_bdfs for device in passed_devices)
    has_space = window <= max(DEFAULT_WINDOW_BYTES, guest.pcihole64_bytes or 0)
    if is_ours and guest.architecture == "x86_64" and (guest.is_q35 or is_mirrored):
        if not has_space:
            hole = window
        has_ovmf = guest.firmware is not None and guest.firmware.lower() != "bios"
        if window > DEFAULT_WINDOW_BYTES and has_ovmf:
            firmware = window // MIB
        bits = _compute_address_bits(guest, request.memory_bytes, window, settings, gaps)
    elif guest.architecture == "x86_64" and (
        needed_bits := _compute_address_bits(guest, request.memory_bytes, window, settings, [])
    ):
        findings = (_small_address(guest, window, needed_bits),)
    elif guest.architecture == "x86_64" and not has_space and not guest.has_qemu_commandline:
        findings = (_report_small_window(guest, window),)
    elif is_ours and guest.architecture == "aarch64" and window > VIRT_WINDOW_BYTES:
        findings = (
            finding(
                "virt-window-small",
                WINDOW,
                f"space for {format_bytes(window)} of BARs",
                f"{format_bytes(VIRT_WINDOW_BYTES)} on the virt machine",
            ),
        )
    return ApertureChoice(Aperture(hole, bits, firmware, memlock, entries), findings, tuple(gaps))


def _small_address(guest: Vm, window: int, needed_bits: int) -> Finding:
    return finding(
        "address-bits-small",
        "<cpu>",
        f"{needed_bits} physical address bits for {format_bytes(window)} of BARs above the memory",
        str(guest.physical_address_bits or DEFAULT_ADDRESS_BITS),
        values={"bits": needed_bits},
    )


def _report_small_window(guest: Vm, window: int) -> Finding:
    """Return a finding if the definition has these devices, but no known space for them. Firmware
    of 2023 sizes its window by the address bits, if it sees the host's."""
    has = format_bytes(max(DEFAULT_WINDOW_BYTES, guest.pcihole64_bytes or 0))
    sees_host = guest.domain_type == "kvm" and guest.cpu_mode in _HOST_BITS_MODES
    return finding(
        "pci-window-small",
        WINDOW,
        f"space for {format_bytes(window)} of BARs",
        f"{has}, which this layout leaves as it is: firmware that does not size the window itself "
        "leaves the devices without BARs",
        severity=Severity.INFO if sees_host else Severity.WARNING,
        case="of a layout" if guest.is_q35 else "other machine",
        values={"kibibytes": window // KIB},
    )


def compute_window_bytes(devices: Iterable[PciDevice]) -> int:
    """Return the window for these functions' 64-bit prefetchable BARs, a power of two or 0. A
    port's window starts at a multiple of its largest BAR, so each device is rounded up to that."""
    total = 0
    for device in devices:
        sizes = [
            _power_of_two(bar.size_bytes)
            for bar in device.bars
            if bar.is_memory and bar.is_64bit and bar.is_prefetchable and bar.index < _OWN_BARS
        ]
        if sizes:
            largest = max(sizes)
            total += -(-sum(sizes) // largest) * largest
    return _power_of_two(total) if total else 0


def _compute_address_bits(
    guest: Vm, memory_bytes: int, window: int, settings: HostSettings, gaps: list[Gap]
) -> int | None:
    """Return the bits for <maxphysaddr>; None if the guest has enough."""
    if window <= DEFAULT_WINDOW_BYTES:
        return None
    # Firmware places the window above the memory, at a multiple of its size.
    start = -(-(max(memory_bytes, guest.max_memory_bytes or 0) + _LOW_WINDOW_BYTES) // window)
    needed_bits = ((start + 1) * window - 1).bit_length()
    if guest.physical_address_bits is not None:
        return needed_bits if guest.physical_address_bits < needed_bits else None
    if guest.domain_type == "kvm" and guest.cpu_mode in _HOST_BITS_MODES:
        if settings.qemu_version is None:
            gaps.append(Gap(QEMU_VERSION, "6.0 or newer is assumed"))
            return None
        if settings.qemu_version >= _HOST_BITS_QEMU:
            return None
    return needed_bits if needed_bits > DEFAULT_ADDRESS_BITS else None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
