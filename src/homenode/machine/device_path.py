"""DevicePath: the devices whose links are judged, each with its links up to the root port, and each
GPU's path in a line: what it carries, what bounds it, and its isolation."""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.link_path import Link, links_above, path_rate
from homenode.machine.link_rate import LinkRate
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Host

JUDGED = {
    DeviceKind.GPU: "GPU",
    DeviceKind.NVSWITCH: "NVSwitch",
    DeviceKind.NIC: "NIC",
    DeviceKind.NVME: "NVMe drive",
}
"""The kinds of device whose links are looked at, as people call them."""


class DevicePath(Struct, frozen=True, kw_only=True):
    """A device of interest and the links that are judged for it, the nearest first.

    expected: what the path can carry; None where no link says.
    """

    device: PciDevice
    links: tuple[Link, ...]
    expected: LinkRate | None


def device_paths(
    host: Host, known_widths: Mapping[Bdf, int] | None = None
) -> tuple[DevicePath, ...]:
    """Paths of GPUs, NVSwitches, NICs and NVMe drives, ascending by address.

    known_widths: lanes of slots that are wired narrower than their ports say, by a device on them.
    Virtual functions have no link of their own, and functions above 0 share that of function 0.
    """
    by_bdf = {device.bdf: device for device in host.pci_devices}
    found: list[DevicePath] = []
    seen: set[tuple[int, int, int]] = set()
    for device in host.pci_devices:
        slot = (device.bdf.domain, device.bdf.bus, device.bdf.device)
        if device.kind not in JUDGED or device.physical_function is not None or slot in seen:
            continue
        seen.add(slot)
        links = tuple(
            link
            for link in links_above(device, by_bdf)
            if not (link.is_inside_a_card or link.is_virtual or link.capable is None)
        )
        found.append(DevicePath(device=device, links=links, expected=path_rate(links)))
    return tuple(_in_known_slots(path, known_widths or {}) for path in found)


def _in_known_slots(path: DevicePath, known: Mapping[Bdf, int]) -> DevicePath:
    """The path with what is known of its slots: of the device's own, and of those above."""
    if not known:
        return path
    own = known.get(path.device.bdf)
    lanes = [known.get(link.lower.bdf) for link in path.links]
    lanes[:1] = [lanes[0] or own] if lanes else []
    links = tuple(
        replace(link, known_width=width) for link, width in zip(path.links, lanes, strict=True)
    )
    return DevicePath(device=path.device, links=links, expected=path_rate(links))


def describe_paths(host: Host) -> Iterator[str]:
    """One line for each GPU: what its path carries, and what bounds it."""
    for path in device_paths(host):
        if path.device.kind is not DeviceKind.GPU or path.expected is None or not path.links:
            continue
        port = path.links[0].upper
        own = path.device.link
        more = ""
        if own is not None and own.max_gt_per_s and own.max_gt_per_s > path.expected.gt_per_s:
            more = f"; the card could {own.max_gt_per_s:g} GT/s, its path cannot"
        current = min(
            (link.current for link in path.links if link.current is not None),
            key=lambda rate: rate.bytes_per_s,
            default=None,
        )
        now = "unknown" if current is None else str(current)
        yield (
            f"GPU {path.device.bdf} below {port.bdf}: path {path.expected.with_rate()}, "
            f"now {now}{more}{_isolation(path.device, host)}"
        )


def _isolation(gpu: PciDevice, host: Host) -> str:
    """ACS of each port above, the nearest first, ATS and the IOMMU's mode; what is unknown not."""
    stated = [
        f"{port.bdf} {'+'.join(port.acs) or 'none'}"
        for port in host.bridges_above(gpu.bdf)
        if port.acs is not None
    ]
    parts = [f"ACS {', '.join(stated)}"] if stated else []
    if gpu.ats_enabled is not None:
        parts.append(f"ATS {'on' if gpu.ats_enabled else 'off'}")
    if gpu.iommu_domain is not None:
        parts.append(f"IOMMU domain {gpu.iommu_domain}")
    return "".join(f"; {part}" for part in parts)
