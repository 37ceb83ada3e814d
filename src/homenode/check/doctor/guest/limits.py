"""GuestLimits: locked memory, IOMMU mappings and address space that a VM with devices needs.

Source: qemuDomainGetMemLockLimitBytes of libvirt 9 (memory + 1 GiB, once for each device with a
vIOMMU); vfio_iommu_type1's dma_entry_limit; QEMU's default of 40 physical address bits.
"""

from collections.abc import Iterator

from msgspec import Struct

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from homenode.plan.shape.aperture import (
    DEFAULT_ADDRESS_BITS,
    DEFAULT_WINDOW_BYTES,
    prefetchable_window_bytes,
)
from homenode.units import GIB, KIB, MIB, format_bytes, format_limit
from homenode.vm.domain.document import Document
from homenode.vm.domain.iommu import has_iommufd
from homenode.vm.model import Vm

DMA_ENTRY_LIMIT = 65535
"""Default of vfio_iommu_type1.dma_entry_limit."""

_OWN_BARS = 6
_HOST_BITS_MODES = frozenset({"host-passthrough", "maximum"})
_CONFIDENTIAL_PAGE_BYTES = 2 * MIB
_LOW_WINDOW_BYTES = 4 * GIB


class Limits(Struct, frozen=True, kw_only=True):
    """What a VM of this size and these devices needs.

    memlock_bytes: RLIMIT_MEMLOCK of QEMU. mapped_bytes: memory and BARs that the IOMMU maps.
    iommu_pages: entries in the IOMMU's tables at the page size. dma_entries: mappings that VFIO
    counts against its limit: one a region, or one a page for guests with private memory.
    window_bytes: 64-bit window for the BARs, a power of two. address_bits: to address all that.
    """

    memlock_bytes: int
    mapped_bytes: int
    iommu_pages: int
    dma_entries: int
    window_bytes: int
    address_bits: int


def limits(facts: Vm, devices: list[PciDevice]) -> Limits:
    """The needs of a domain with these devices."""
    guest = facts
    factor = len(devices) if guest.has_iommu and devices else 1
    bars = sum(
        bar.size_bytes
        for device in devices
        for bar in device.bars
        if bar.is_memory and bar.index < _OWN_BARS
    )
    whole = guest.memory_bytes + guest.memory_device_bytes
    mapped = whole + bars
    page = facts.page_bytes or 4 * KIB
    window = prefetchable_window_bytes(devices)
    regions = len(devices) * _OWN_BARS + 8
    entries = regions
    if guest.launch_security is not None:
        entries += -(-whole // _CONFIDENTIAL_PAGE_BYTES)
    return Limits(
        memlock_bytes=factor * (whole + GIB),
        mapped_bytes=mapped,
        iommu_pages=-(-mapped // page),
        dma_entries=entries,
        window_bytes=window,
        address_bits=_address_bits(max(whole, guest.max_memory_bytes or 0), window),
    )


def _address_bits(memory_bytes: int, window: int) -> int:
    """Firmware puts the window at a multiple of its own size above the memory."""
    if not window:
        return (memory_bytes + _LOW_WINDOW_BYTES - 1).bit_length()
    start = -(-(memory_bytes + _LOW_WINDOW_BYTES) // window)
    return ((start + 1) * window - 1).bit_length()


def describe_limits(needs: Limits, devices: int) -> str:
    """One line for people. What is locked is rounded up to GiB: as a limit it must not be short."""
    return (
        f"with {devices} devices: {format_limit(needs.memlock_bytes)} locked, "
        f"{needs.iommu_pages} pages in the IOMMU, {needs.dma_entries} DMA mappings, "
        f"{format_bytes(needs.window_bytes)} of 64-bit window, {needs.address_bits} address bits"
    )


def limit_findings(facts: Vm, document: Document, host: Host) -> Iterator[Finding]:
    """What will exceed a limit: DMA mappings, address bits, the window for BARs."""
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    devices = [device for device in host.pci_devices if device.bdf in passed]
    if not devices:
        return
    needs = limits(facts, devices)
    limit = host.settings.dma_entry_limit or DMA_ENTRY_LIMIT
    if needs.dma_entries > limit and not has_iommufd(document):
        yield finding(
            "dma-map-limit",
            f"{facts.launch_security} guest of {format_bytes(facts.memory_bytes)}",
            expected=f"at most {limit} mappings (vfio_iommu_type1.dma_entry_limit)",
            observed=f"about {needs.dma_entries}: private memory is mapped in pieces of 2 MiB",
            values={"entries": 1 << (needs.dma_entries - 1).bit_length()},
            source=facts.source,
        )
    if facts.architecture == "x86_64" and needs.window_bytes > DEFAULT_WINDOW_BYTES:
        yield from _addresses(facts, needs)


def _addresses(facts: Vm, needs: Limits) -> Iterator[Finding]:
    guest = facts
    bits = guest.physical_address_bits
    shows_host = guest.domain_type == "kvm" and guest.cpu_mode in _HOST_BITS_MODES
    if bits is None and not shows_host:
        bits = DEFAULT_ADDRESS_BITS
    if bits is not None and bits < needs.address_bits:
        yield finding(
            "address-bits-small",
            "<cpu>",
            expected=f"{needs.address_bits} physical address bits for "
            f"{format_bytes(needs.window_bytes)} of BARs above the memory",
            observed=str(bits),
            values={"bits": needs.address_bits},
            source=facts.source,
        )
    elif (
        not shows_host
        and (guest.firmware or "bios").lower() != "bios"
        and not guest.has_qemu_commandline
        and max(DEFAULT_WINDOW_BYTES, guest.pcihole64_bytes or 0) < needs.window_bytes
    ):
        yield finding(
            "pci-window-small",
            "pcie-root",
            expected=f"a 64-bit window of {format_bytes(needs.window_bytes)} for the BARs",
            observed=format_bytes(max(DEFAULT_WINDOW_BYTES, guest.pcihole64_bytes or 0)),
            values={"kibibytes": needs.window_bytes // KIB},
            source=facts.source,
        )
