"""Bus windows: which of the 256 PCI bus numbers lie below each expander bus of a guest.

An expander bus owns the numbers from its busNr up to the next expander's. libvirt takes a window
that is too small without a word, and the guest's enumeration then breaks.
Source: tried on libvirt 9.0 and QEMU 7.2; libvirt domain XML, <target busNr> is 1 to 254.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from homenode.vm.plan_model import Unplannable

BUS_COUNT = 256
HOTPLUG_SPACE = 16
"""Buses kept on pcie.0 beyond those in use, for the ports that libvirt adds by itself."""

WIDEST_WINDOW = 64
LARGEST_SHARE = BUS_COUNT // 2
"""Expander buses take the upper half of the numbers at most, unless they need more."""


class Window(NamedTuple):
    """First bus number and how many follow it, itself included."""

    bus_nr: int
    bus_count: int


class ExpanderNeed(Struct, frozen=True):
    """An expander bus. buses: itself and every bus below it. bus_nr: None = to be chosen."""

    index: int
    buses: int
    bus_nr: int | None


def assign_windows(
    needs: Sequence[ExpanderNeed],
    expanders: int,
    root_buses: int,
    foreign: Sequence[Window] = (),
) -> tuple[Window, ...]:
    """A window for each need, lowest first in the order given.

    Numbers of the document stay if they hold what they must; else all are given out again.
    expanders: the count that sets the usual width, so that the width does not follow the devices.
    root_buses: buses of pcie.0 and below it. foreign: what expander buses that are not ours take.
    Raises Unplannable if there are not enough numbers.
    """
    if not needs:
        return ()
    others = [window.bus_nr for window in foreign]
    width = _usual_width(expanders, min(others, default=BUS_COUNT), root_buses)
    numbers = _keep(needs, width, root_buses, others)
    if numbers is None:
        numbers = _relay(needs, width, root_buses, foreign)
    in_use = sorted([*numbers, *others, BUS_COUNT])
    return tuple(Window(nr, next(n for n in in_use if n > nr) - nr) for nr in numbers)


def _usual_width(expanders: int, top: int, root_buses: int) -> int:
    space = min(LARGEST_SHARE, top - root_buses - HOTPLUG_SPACE)
    width = min(WIDEST_WINDOW, space // max(expanders, 1))
    return max(width - width % 4, 2)


def _keep(
    needs: Sequence[ExpanderNeed], width: int, root_buses: int, others: Sequence[int]
) -> list[int] | None:
    """The document's numbers, new ones below them; None if they cannot stay."""
    fixed = [need.bus_nr for need in needs if need.bus_nr is not None]
    in_use = sorted([*fixed, *others])
    if len(set(in_use)) != len(in_use) or not fixed:
        return None
    lowest = in_use[0]
    numbers: list[int] = []
    for need in reversed(needs):
        if need.bus_nr is None:
            lowest -= max(width, need.buses)
            numbers.append(lowest)
        else:
            end = next((n for n in in_use if n > need.bus_nr), BUS_COUNT)
            if end - need.bus_nr < need.buses:
                return None
            numbers.append(need.bus_nr)
    return numbers[::-1] if lowest >= root_buses else None


def _relay(
    needs: Sequence[ExpanderNeed], width: int, root_buses: int, foreign: Sequence[Window]
) -> list[int]:
    """All numbers again, the last highest; exact windows where the usual ones are too many."""
    space: list[tuple[int, int]] = []  # free numbers as (first, past the last), the highest first
    end = BUS_COUNT
    for other in sorted(foreign, reverse=True):
        space.append((max(root_buses, other.bus_nr + other.bus_count), end))
        end = min(end, other.bus_nr)
    space.append((root_buses, end))
    exact = [max(need.buses, 2) for need in needs]
    for widths in ([max(width, need.buses) for need in needs], exact):
        numbers = _stack(widths, space)
        if numbers is not None:
            return numbers
    free = sum(max(0, end - start) for start, end in space)
    shown = ", ".join(f"controller {need.index}: {need.buses}" for need in needs)
    raise Unplannable(
        f"PCI bus numbers: expected at most {free} for expander buses ({BUS_COUNT} less "
        f"{root_buses} for pcie.0"
        + (f" and {BUS_COUNT - root_buses - free} for other expander buses" if foreign else "")
        + f"), found {sum(exact)} ({shown})",
        hint="pass fewer devices, ask for fewer --spare-ports, or use --pci-granularity cell",
    )


def _stack(widths: list[int], space: list[tuple[int, int]]) -> list[int] | None:
    """First numbers of windows of these widths, each at the top of the highest free numbers that
    hold it; None if one finds no space."""
    left = list(space)
    numbers: list[int] = []
    for count in reversed(widths):
        for position, (start, end) in enumerate(left):
            if end - start >= count:
                left[position] = (start, end - count)
                numbers.append(end - count)
                break
        else:
            return None
    return numbers[::-1]
