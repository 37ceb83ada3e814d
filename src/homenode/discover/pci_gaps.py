"""PCI gaps: what a tree does not give of functions that a VM may get."""

from collections.abc import Sequence

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.pci import DeviceKind, PciDevice
from homenode.snapshot.protocol import Snapshot

NAMED_KINDS = frozenset({DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME})
"""Kinds of which each function is worth a gap of its own."""


def several(bdfs: Sequence[Bdf]) -> str:
    """How gaps name functions: "0000:03:00.0", or "4 PCI functions (0000:03:00.0, ...)"."""
    return str(bdfs[0]) if len(bdfs) == 1 else f"{len(bdfs)} PCI functions ({bdfs[0]}, ...)"


def unknown_fields(devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
    """A gap for each field that some functions lack. Links, BARs and IOMMU groups count only for
    kinds that a VM may get, and for physical functions: virtual ones have no link of their own."""
    physical = [d for d in devices if d.kind in NAMED_KINDS and d.physical_function is None]
    has_groups = any(device.iommu_group is not None for device in devices)
    missing = (
        ("vendor", "no vendor file", [d for d in devices if d.vendor_id is None]),
        ("device id", "no device file", [d for d in devices if d.device_id is None]),
        ("link", "no link files, as on conventional PCI", [d for d in physical if d.link is None]),
        ("BARs", "no resource file, or an empty one", [d for d in physical if not d.bars]),
        (
            "IOMMU group",
            "other functions have one" if has_groups else "none has one: is the IOMMU off?",
            [d for d in physical if d.iommu_group is None],
        ),
    )
    return tuple(
        Gap(f"{what} of {several([device.bdf for device in found])}", reason)
        for what, reason, found in missing
        if found
    )


def functions_off_the_bus(
    snapshot: Snapshot, folders: Sequence[str], known: frozenset[Bdf]
) -> tuple[Gap, ...]:
    """Functions with a folder below a root complex or bridge that /sys/bus/pci does not list."""
    stray: list[Bdf] = []
    for folder in folders:
        for name in snapshot.list(folder) or ():
            try:
                bdf = Bdf.parse(name)
            except ParseError:
                continue
            if bdf not in known:
                stray.append(bdf)
    if not stray:
        return ()
    reason = "has a folder in /sys/devices, but is not in /sys/bus/pci/devices: left out"
    return (Gap(several(sorted(stray)), reason),)
