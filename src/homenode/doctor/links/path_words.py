"""PathWords: each GPU's path in a line: what it carries, what bounds it, and its isolation."""

from collections.abc import Iterator

from homenode.doctor.links.device_path import device_paths
from homenode.pci import DeviceKind, PciDevice
from homenode.topology import Host


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
