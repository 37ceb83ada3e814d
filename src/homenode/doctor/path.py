"""Path: the links from a function up to its root port, each with both of its ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.doctor.link_rate import LinkRate, least
from homenode.pci import DeviceKind, PciDevice, PciLink, PortType

_QEMU = 0x1B36
_DEEPEST = 32
_CARD_MAKERS_WITH_SWITCHES = frozenset({0x1002, 0x8086, 0x15B3})
"""AMD's and Intel's GPUs and NVIDIA's BlueFields sit behind a switch on their own card."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link. upper: the root port or downstream port. lower: the function right below it."""

    upper: PciDevice
    lower: PciDevice

    @property
    def capable(self) -> LinkRate | None:
        """What both ends can; None where either end does not say."""
        a, b = _maximum(self.upper.link), _maximum(self.lower.link)
        return None if a is None or b is None else least(a, b)

    @property
    def current(self) -> LinkRate | None:
        """What is up. The ends agree, unless they were read while it changed: then the lower."""
        a, b = _current(self.upper.link), _current(self.lower.link)
        if a is None or b is None:
            return a or b
        return least(a, b)

    @property
    def target_gt_per_s(self) -> float | None:
        """The speed that the port is told to train to at most (Link Control 2)."""
        return self.upper.target_gt_per_s

    @property
    def is_inside_a_card(self) -> bool:
        """Whether it is wires of one package: such links report what their maker likes.

        Seen: Intel Arc says 2.5 GT/s x1, AMD Navi says its maximum always.
        """
        return (
            self.upper.bridge is not None
            and self.upper.bridge.port_type is PortType.SWITCH_DOWNSTREAM
            and self.upper.vendor_id == self.lower.vendor_id
            and self.upper.vendor_id in _CARD_MAKERS_WITH_SWITCHES
        )

    @property
    def is_virtual(self) -> bool:
        """Below a port that QEMU emulates: no wires, and no limit."""
        return self.upper.vendor_id == _QEMU

    @property
    def ends_at_gpu(self) -> bool:
        """Whether the lower end is a GPU, or the switch on a GPU's own card."""
        if self.lower.kind is DeviceKind.GPU:
            return True
        bridge = self.lower.bridge
        return (
            bridge is not None
            and bridge.port_type is PortType.SWITCH_UPSTREAM
            and self.lower.vendor_id in (0x1002, 0x8086)
        )


def links_above(device: PciDevice, by_bdf: Mapping[Bdf, PciDevice]) -> tuple[Link, ...]:
    """Every link from the function to its root port, the nearest first.

    A switch's upstream and downstream ports are one chip: no link is between them.
    """
    links: list[Link] = []
    lower = device
    while lower.parent is not None and lower.parent in by_bdf and len(links) < _DEEPEST:
        upper = by_bdf[lower.parent]
        if not _are_one_switch(upper, lower):
            links.append(Link(upper, lower))
        lower = upper
    return tuple(links)


def path_rate(links: tuple[Link, ...]) -> LinkRate | None:
    """What the path can carry: the slowest of its links by what both ends can.

    None without a link, or where a link does not say.
    """
    rates = [link.capable for link in links]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None
    return min(known, key=lambda rate: rate.bytes_per_s)


def _are_one_switch(upper: PciDevice, lower: PciDevice) -> bool:
    return (
        upper.bridge is not None
        and lower.bridge is not None
        and upper.bridge.port_type is PortType.SWITCH_UPSTREAM
        and lower.bridge.port_type is PortType.SWITCH_DOWNSTREAM
    )


def _maximum(link: PciLink | None) -> LinkRate | None:
    if link is None or link.max_gt_per_s is None or link.max_width is None:
        return None
    return LinkRate(link.max_gt_per_s, link.max_width)


def _current(link: PciLink | None) -> LinkRate | None:
    if link is None or link.current_gt_per_s is None or link.current_width is None:
        return None
    return LinkRate(link.current_gt_per_s, link.current_width)
