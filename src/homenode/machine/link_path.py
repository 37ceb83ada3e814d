"""PCIe links: link rates, links from a function up to its root port, and each device's path.

Source: PCIe 6.0, 4.2 (8b/10b and 128b/130b encoding; 236 of 256 bytes of a flit are payload).
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.pci import (
    AMD,
    INTEL,
    MELLANOX,
    DeviceKind,
    LinkKind,
    PciDevice,
    PciLink,
    PortType,
    is_emulated,
)
from homenode.machine.topology import Host

SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)
"""GT/s of generations 1 to 6."""

WIDTHS = (1, 2, 4, 8, 16)

_BITS_PER_TRANSFER = {2.5: 8 / 10, 5.0: 8 / 10, 64.0: 236 / 256}
_REACHED = 0.6
"""Copies of large pinned buffers reach at least this share of a link's rate, and never more than
the rate. Measured: 26 of 31.5, 57 of 63, 12.6 of 15.8 and 5.3 of 8 GB/s."""


class LinkRate(Struct, frozen=True):
    """Speed in GT/s a lane, and lanes.

    >>> str(LinkRate(5.0, 16)), round(LinkRate(32.0, 16).bytes_per_s / 1e9, 1)
    ('5 GT/s x16', 63.0)
    >>> LinkRate(5.0, 16).bytes_per_s / 1e9, LinkRate(8.0, 8).generation
    (8.0, 3)
    >>> LinkRate(64.0, 16).bytes_per_s / 1e9
    118.0
    """

    gt_per_s: float
    width: int

    @property
    def bytes_per_s(self) -> float:
        """The rate in one direction, after encoding, before packet headers."""
        bits = _BITS_PER_TRANSFER.get(self.gt_per_s, 128 / 130)
        return self.gt_per_s * 1e9 * bits * self.width / 8

    @property
    def generation(self) -> int:
        """1 for 2.5 GT/s; speeds between two generations count as the lower."""
        return max(1, sum(speed <= self.gt_per_s for speed in SPEEDS))

    def __str__(self) -> str:
        return f"{self.gt_per_s:g} GT/s x{self.width}"

    @property
    def as_generation(self) -> str:
        """
        >>> LinkRate(5.0, 16).as_generation
        'Gen2 x16'
        """
        return f"Gen{self.generation} x{self.width}"

    def format_with_rate(self) -> str:
        """
        >>> LinkRate(5.0, 16).format_with_rate()
        '5 GT/s x16 (8.0 GB/s)'
        """
        return f"{self} ({format_rate(self.bytes_per_s)})"


def choose_slower(a: LinkRate, b: LinkRate) -> LinkRate:
    """Return the lower speed and the lower width of both."""
    return LinkRate(min(a.gt_per_s, b.gt_per_s), min(a.width, b.width))


def format_rate(bytes_per_s: float) -> str:
    """
    >>> format_rate(63.01e9)
    '63.0 GB/s'
    """
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def find_rates(bytes_per_s: float, limit: LinkRate) -> tuple[LinkRate, ...]:
    """Return links up to the limit that fit a copy of that rate, the lowest speed first.

    >>> [str(rate) for rate in find_rates(5.3e9, LinkRate(16.0, 16))]
    ['5 GT/s x16', '8 GT/s x8', '16 GT/s x4']
    """
    return tuple(
        rate
        for speed in SPEEDS
        for width in reversed(WIDTHS)
        if speed <= limit.gt_per_s and width <= limit.width
        if (rate := LinkRate(speed, width)).bytes_per_s * _REACHED <= bytes_per_s
        and bytes_per_s <= rate.bytes_per_s
    )


_MAX_DEPTH = 32
_CARD_MAKERS_WITH_SWITCHES = frozenset({AMD, INTEL, MELLANOX})
"""AMD's and Intel's GPUs and NVIDIA's BlueFields sit behind a switch on their own card."""


class Link(Struct, frozen=True, kw_only=True):
    upper: PciDevice  # the root port or downstream port
    lower: PciDevice  # the function right below it
    # lanes of a slot that is wired narrower than its port reports, if the user passed --known-width
    known_width: int | None = None

    @property
    def capable(self) -> LinkRate | None:
        """The capability of both ends and the slot; None if either end is unknown."""
        a, b = capable_rate(self.upper.link), capable_rate(self.lower.link)
        if a is None or b is None:
            return None
        rate = choose_slower(a, b)
        lanes = rate.width if self.known_width is None else min(rate.width, self.known_width)
        return LinkRate(rate.gt_per_s, lanes)

    @property
    def current(self) -> LinkRate | None:
        """The current rate; the lower of the two ends if they were read during a change."""
        a, b = find_current_rate(self.upper.link), find_current_rate(self.lower.link)
        if a is None or b is None:
            return a or b
        return choose_slower(a, b)

    @property
    def target_gt_per_s(self) -> float | None:
        """The port's target speed (Link Control 2)."""
        return self.upper.target_gt_per_s

    @property
    def is_inside_a_card(self) -> bool:
        """Whether the link is inside one card: such links report arbitrary rates. Seen: Intel Arc
        reports 2.5 GT/s x1, AMD Navi always reports its maximum."""
        return (
            self.upper.bridge is not None
            and self.upper.bridge.port_type is PortType.SWITCH_DOWNSTREAM
            and self.upper.vendor_id == self.lower.vendor_id
            and self.upper.vendor_id in _CARD_MAKERS_WITH_SWITCHES
        )

    @property
    def is_virtual(self) -> bool:
        """Whether the link is below a port that QEMU emulates: it does not limit transfers."""
        return is_emulated(self.upper)

    @property
    def ends_at_gpu(self) -> bool:
        """Whether the lower end is a GPU, or the switch on a GPU's own card."""
        if self.lower.kind is DeviceKind.GPU:
            return True
        bridge = self.lower.bridge
        return (
            bridge is not None
            and bridge.port_type is PortType.SWITCH_UPSTREAM
            and self.lower.vendor_id in (AMD, INTEL)
        )


def list_links_above(device: PciDevice, by_bdf: Mapping[Bdf, PciDevice]) -> tuple[Link, ...]:
    """Return every link from the function to its root port, the nearest first.

    A switch's upstream and downstream ports are one chip: no link is between them. Two ports of the
    same direction have no link either: the source lacks the port between them.
    """
    links: list[Link] = []
    lower = device
    while lower.parent is not None and lower.parent in by_bdf and len(links) < _MAX_DEPTH:
        upper = by_bdf[lower.parent]
        if _may_be_wired(upper, lower):
            links.append(Link(upper=upper, lower=lower))
        lower = upper
    return tuple(links)


def find_lane_sharers(link: Link, host: Host) -> tuple[Bdf, ...]:
    """Return the ports with which the upper end shares its lanes, all of them in use; () if it does
    not share. Intel's desktop CPUs split 16 lanes over functions of one device, although the first
    function's LnkCap reports x16."""
    upper, width = link.upper, link.current
    lanes = None if upper.link is None else upper.link.max_width
    if lanes is None or width is None or upper.vendor_id != INTEL or upper.parent is not None:
        return ()
    place = (upper.bdf.domain, upper.bdf.bus, upper.bdf.device)
    other_ports = [
        other
        for other in host.pci_devices
        if other.bridge is not None
        and other.bdf != upper.bdf
        and (other.bdf.domain, other.bdf.bus, other.bdf.device) == place
        and any(child.parent == other.bdf for child in host.pci_devices)
    ]
    in_use = sum((other.link.current_width or 0) for other in other_ports if other.link is not None)
    free_lanes = lanes - in_use
    widest = max(
        (lane_count for lane_count in WIDTHS if lane_count <= free_lanes), default=0
    )  # x12 is no width of a slot
    return tuple(other.bdf for other in other_ports) if in_use and width.width == widest else ()


def compute_path_rate(links: tuple[Link, ...]) -> LinkRate | None:
    """Return the rate of the path: that of its slowest link by the capability of both ends. None
    without a link, or if a link is unknown."""
    rates = [link.capable for link in links]
    known_rates = [rate for rate in rates if rate is not None]
    if not known_rates or len(known_rates) < len(rates):
        return None
    return min(known_rates, key=lambda rate: rate.bytes_per_s)


def _may_be_wired(upper: PciDevice, lower: PciDevice) -> bool:
    upper_type = None if upper.bridge is None else upper.bridge.port_type
    lower_type = None if lower.bridge is None else lower.bridge.port_type
    faces_down = (PortType.ROOT_PORT, PortType.SWITCH_DOWNSTREAM)
    return upper_type is not PortType.SWITCH_UPSTREAM and lower_type not in faces_down


def capable_rate(link: PciLink | None) -> LinkRate | None:
    """Return the capability of an end; None if unknown."""
    if link is None or link.max_gt_per_s is None or link.max_width is None:
        return None
    return LinkRate(link.max_gt_per_s, link.max_width)


def find_current_rate(link: PciLink | None) -> LinkRate | None:
    if link is None or link.current_gt_per_s is None or link.current_width is None:
        return None
    return LinkRate(link.current_gt_per_s, link.current_width)


JUDGED = {
    DeviceKind.GPU: "GPU",
    DeviceKind.NVSWITCH: "NVSwitch",
    DeviceKind.NIC: "NIC",
    DeviceKind.NVME: "NVMe drive",
}
"""Kinds of device whose links are checked, and their names in messages."""


class DevicePath(Struct, frozen=True, kw_only=True):
    """A device of interest and the links that are judged for it, the nearest first."""

    device: PciDevice
    links: tuple[Link, ...]
    expected: LinkRate | None  # rate of the path; None if no link reports one


def list_device_paths(
    host: Host, known_widths: Mapping[Bdf, int] | None = None
) -> tuple[DevicePath, ...]:
    """Return paths of GPUs, NVSwitches, NICs and NVMe drives, ascending by address. known_widths:
    lanes of slots that are wired narrower than their ports report, by device."""
    # A dozen checks of one host read them: they hang on it, as its cached properties do.
    if "device_paths" not in host.__dict__:
        host.__dict__["device_paths"] = _compute_device_paths(host)
    paths: tuple[DevicePath, ...] = host.__dict__["device_paths"]
    return tuple(_set_slot_widths(path, known_widths) for path in paths) if known_widths else paths


def _compute_device_paths(host: Host) -> tuple[DevicePath, ...]:
    """Virtual functions have no link of their own, and functions above 0 share that of 0."""
    paths: list[DevicePath] = []
    seen_keys: set[tuple[int, int, int]] = set()
    for device in host.pci_devices:
        slot = (device.bdf.domain, device.bdf.bus, device.bdf.device)
        if device.kind not in JUDGED or device.physical_function is not None or slot in seen_keys:
            continue
        seen_keys.add(slot)
        links = tuple(
            link
            for link in list_links_above(device, host.device_at)
            if not (link.is_inside_a_card or link.is_virtual or link.capable is None)
        )
        paths.append(DevicePath(device=device, links=links, expected=compute_path_rate(links)))
    return tuple(paths)


def _set_slot_widths(path: DevicePath, lanes_of_port: Mapping[Bdf, int]) -> DevicePath:
    """Return the path with the known widths of its slots: the device's own and those above."""
    device_lanes = lanes_of_port.get(path.device.bdf)
    lanes = [lanes_of_port.get(link.lower.bdf) for link in path.links]
    lanes[:1] = [lanes[0] or device_lanes] if lanes else []
    links = tuple(
        replace(link, known_width=width) for link, width in zip(path.links, lanes, strict=True)
    )
    return DevicePath(device=path.device, links=links, expected=compute_path_rate(links))


def describe_paths(host: Host) -> Iterator[str]:
    """Yield one line for each GPU: the rate of its path, and the limiting link."""
    for path in list_device_paths(host):
        if path.device.kind is not DeviceKind.GPU or path.expected is None or not path.links:
            continue
        port = path.links[0].upper
        card_link = path.device.link
        remark = ""
        if (
            card_link is not None
            and card_link.max_gt_per_s
            and card_link.max_gt_per_s > path.expected.gt_per_s
        ):
            remark = f"; the card could {card_link.max_gt_per_s:g} GT/s, its path cannot"
        current = min(
            (link.current for link in path.links if link.current is not None),
            key=lambda rate: rate.bytes_per_s,
            default=None,
        )
        now = "unknown" if current is None else str(current)
        yield (
            f"GPU {path.device.bdf} below {port.bdf}: path {path.expected.format_with_rate()}, "
            f"now {now}{remark}{_format_isolation(path.device, host)}"
        )


def _format_isolation(gpu: PciDevice, host: Host) -> str:
    """Return ACS of each port above, the nearest first, ATS and the IOMMU's mode, if known."""
    acs_of_ports = [
        f"{port.bdf} {'+'.join(port.acs) or 'none'}"
        for port in host.bridges_above(gpu.bdf)
        if port.acs is not None
    ]
    parts = [f"ACS {', '.join(acs_of_ports)}"] if acs_of_ports else []
    if gpu.ats_enabled is not None:
        parts.append(f"ATS {'on' if gpu.ats_enabled else 'off'}")
    if gpu.iommu_domain is not None:
        parts.append(f"IOMMU domain {gpu.iommu_domain}")
    return "".join(f"; {part}" for part in parts)


_LINK_GAPS = frozenset({"NVLinks", "xGMI links"})


def peer_links(host: Host) -> dict[Bdf, int]:
    """Return the NVLinks, or GPUs joined by xGMI, of each GPU of a host with such links; a GPU
    without any has 0 if it is one that the vendor's tool would show. Empty if the tools left a gap.

    With switches a GPU has as many links as to any other, without them as to all others.
    """
    kinds = (LinkKind.NVLINK, LinkKind.XGMI)
    pair_links = [link for link in host.links if link.kind in kinds and link.b is not None]
    if not pair_links or any(gap.subject in _LINK_GAPS for gap in host.gaps):
        return {}
    if any(link.kind is LinkKind.NVLINK and link.count is None for link in pair_links):
        return {}  # hwloc has the joined GPUs, but not the number of links
    drivers = {host.device_at[link.a].driver for link in pair_links if link.a in host.device_at}
    per: dict[Bdf, list[int]] = {
        gpu.bdf: []
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None and gpu.driver in drivers and gpu.partition_mode != "mig"
    }
    for link in pair_links:
        for end in (link.a, link.b):
            if end in per:
                per[end].append(link.count or 1)
    # All pairs of a GPU have more links together than any GPU only if they share switches.
    shared = bool(host.devices_of_kind(DeviceKind.NVSWITCH))
    shared = shared or max(map(sum, per.values()), default=0) > _MAX_LINKS
    return {bdf: (max(n, default=0) if shared else sum(n)) for bdf, n in per.items()}


_MAX_LINKS = 18
"""NVLinks that a GPU has at most, up to Blackwell."""
