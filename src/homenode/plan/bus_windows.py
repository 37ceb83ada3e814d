"""Bus windows: which of the 256 PCI bus numbers lie below each expander bus of a guest.

An expander bus owns the numbers from its busNr up to the next expander's. libvirt takes a window
that is too small without a word, and the guest's enumeration then breaks.
Source: tried on libvirt 9.0 and QEMU 7.2; libvirt domain XML, <target busNr> is 1 to 254.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from homenode.plan.model import Unplannable

BUS_COUNT = 256
HOTPLUG_ROOM = 16
"""Buses kept on pcie.0 beyond those in use, for the ports that libvirt adds by itself."""

WIDEST_WINDOW = 64
LARGEST_SHARE = BUS_COUNT // 2
"""Expander buses take the upper half of the numbers at most, unless they need more."""


class Window(NamedTuple):
    """First bus number and how many follow it, itself included."""

    bus_nr: int
    bus_count: int


@dataclass(frozen=True, slots=True)
class ExpanderNeed:
    """An expander bus. buses: itself and every bus below it. bus_nr: None = to be chosen."""

    index: int
    buses: int
    bus_nr: int | None


def assign_windows(
    needs: Sequence[ExpanderNeed], expanders: int, root_buses: int, foreign: Sequence[int] = ()
) -> tuple[Window, ...]:
    """A window for each need, lowest first in the order given.

    Numbers of the document stay if they hold what they must; else all are given out anew.
    expanders: the count that sets the usual width, so that the width does not follow the devices.
    root_buses: buses of pcie.0 and below it. foreign: busNr of expander buses that are not ours.
    Raises Unplannable if there are not enough numbers.
    """
    if not needs:
        return ()
    top = min(foreign, default=BUS_COUNT)
    width = _usual_width(expanders, top, root_buses)
    numbers = _keep(needs, width, root_buses, foreign)
    if numbers is None:
        numbers = _relay(needs, width, top, root_buses)
    taken = sorted([*numbers, *foreign, BUS_COUNT])
    return tuple(Window(nr, next(n for n in taken if n > nr) - nr) for nr in numbers)


def _usual_width(expanders: int, top: int, root_buses: int) -> int:
    room = min(LARGEST_SHARE, top - root_buses - HOTPLUG_ROOM)
    width = min(WIDEST_WINDOW, room // max(expanders, 1))
    return max(width - width % 4, 2)


def _keep(
    needs: Sequence[ExpanderNeed], width: int, root_buses: int, foreign: Sequence[int]
) -> list[int] | None:
    """The document's numbers, new ones below them; None if they cannot stay."""
    fixed = [need.bus_nr for need in needs if need.bus_nr is not None]
    taken = sorted([*fixed, *foreign])
    if len(set(taken)) != len(taken) or not fixed:
        return None
    lowest = taken[0]
    numbers: list[int] = []
    for need in reversed(needs):
        if need.bus_nr is None:
            lowest -= max(width, need.buses)
            numbers.append(lowest)
        else:
            end = next((n for n in taken if n > need.bus_nr), BUS_COUNT)
            if end - need.bus_nr < need.buses:
                return None
            numbers.append(need.bus_nr)
    return numbers[::-1] if lowest >= root_buses else None


def _relay(needs: Sequence[ExpanderNeed], width: int, top: int, root_buses: int) -> list[int]:
    """All numbers anew from `top` down; exact windows where the usual ones are too many."""
    widths = [max(width, need.buses) for need in needs]
    if sum(widths) > top - root_buses:
        widths = [max(need.buses, 2) for need in needs]
    if sum(widths) > top - root_buses:
        shown = ", ".join(f"controller {need.index}: {need.buses}" for need in needs)
        raise Unplannable(
            f"PCI bus numbers: expected at most {top - root_buses} for expander buses "
            f"({BUS_COUNT} less {root_buses} for pcie.0"
            + (f" and {BUS_COUNT - top} for other expander buses" if top < BUS_COUNT else "")
            + f"), found {sum(widths)} ({shown})",
            hint="pass fewer devices, ask for fewer --spare-ports, or use --pci-granularity cell",
        )
    numbers: list[int] = []
    for count in reversed(widths):
        top -= count
        numbers.append(top)
    return numbers[::-1]
