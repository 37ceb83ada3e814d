"""Path: the links from a function up to its root port, each with both of its ends."""

from collections.abc import Mapping

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.machine.link_rate import WIDTHS, LinkRate, least
from homenode.machine.pci import DeviceKind, PciDevice, PciLink, PortType
from homenode.machine.topology import Host

_QEMU = 0x1B36
_INTEL = 0x8086
_DEEPEST = 32
_CARD_MAKERS_WITH_SWITCHES = frozenset({0x1002, 0x8086, 0x15B3})
"""AMD's and Intel's GPUs and NVIDIA's BlueFields sit behind a switch on their own card."""


class Link(Struct, frozen=True, kw_only=True):
    """One link. upper: the root port or downstream port. lower: the function right below it.

    known_width: lanes of a slot that is wired narrower than its port says, where a person said so.
    """

    upper: PciDevice
    lower: PciDevice
    known_width: int | None = None

    @property
    def capable(self) -> LinkRate | None:
        """What both ends and the slot can; None where either end does not say."""
        a, b = _maximum(self.upper.link), _maximum(self.lower.link)
        if a is None or b is None:
            return None
        both = least(a, b)
        lanes = both.width if self.known_width is None else min(both.width, self.known_width)
        return LinkRate(both.gt_per_s, lanes)

    @property
    def current(self) -> LinkRate | None:
        """What is up. The ends agree, unless they were read while it changed: then the lower."""
        a, b = _current(self.upper.link), _current(self.lower.link)
        if a is None or b is None:
            return a or b
        return least(a, b)

    @property
    def target_gt_per_s(self) -> float | None:
        """The speed that the port is set to train to at most (Link Control 2)."""
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

    A switch's upstream and downstream ports are one chip: no link is between them. Ports that face
    the same way have none either: there the source lacks the port between them.
    """
    links: list[Link] = []
    lower = device
    while lower.parent is not None and lower.parent in by_bdf and len(links) < _DEEPEST:
        upper = by_bdf[lower.parent]
        if _may_be_wired(upper, lower):
            links.append(Link(upper=upper, lower=lower))
        lower = upper
    return tuple(links)


def lane_sharers(link: Link, host: Host) -> tuple[Bdf, ...]:
    """Ports with which the upper end shares its lanes, all of them in use; () where it has its own.

    Intel's desktop CPUs split 16 lanes over functions of one device, and the first function's
    LnkCap says x16 all the same.
    """
    upper, width = link.upper, link.current
    lanes = None if upper.link is None else upper.link.max_width
    if lanes is None or width is None or upper.vendor_id != _INTEL or upper.parent is not None:
        return ()
    place = (upper.bdf.domain, upper.bdf.bus, upper.bdf.device)
    others = [
        other
        for other in host.pci_devices
        if other.bridge is not None
        and other.bdf != upper.bdf
        and (other.bdf.domain, other.bdf.bus, other.bdf.device) == place
        and any(below.parent == other.bdf for below in host.pci_devices)
    ]
    in_use = sum((other.link.current_width or 0) for other in others if other.link is not None)
    left = lanes - in_use
    most = max((each for each in WIDTHS if each <= left), default=0)  # x12 is no width of a slot
    return tuple(other.bdf for other in others) if in_use and width.width == most else ()


def path_rate(links: tuple[Link, ...]) -> LinkRate | None:
    """What the path can carry: the slowest of its links by what both ends can.

    None without a link, or where a link does not say.
    """
    rates = [link.capable for link in links]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return None
    return min(known, key=lambda rate: rate.bytes_per_s)


def _may_be_wired(upper: PciDevice, lower: PciDevice) -> bool:
    above = None if upper.bridge is None else upper.bridge.port_type
    below = None if lower.bridge is None else lower.bridge.port_type
    faces_down = (PortType.ROOT_PORT, PortType.SWITCH_DOWNSTREAM)
    return above is not PortType.SWITCH_UPSTREAM and below not in faces_down


def _maximum(link: PciLink | None) -> LinkRate | None:
    if link is None or link.max_gt_per_s is None or link.max_width is None:
        return None
    return LinkRate(link.max_gt_per_s, link.max_width)


def _current(link: PciLink | None) -> LinkRate | None:
    if link is None or link.current_gt_per_s is None or link.current_width is None:
        return None
    return LinkRate(link.current_gt_per_s, link.current_width)
