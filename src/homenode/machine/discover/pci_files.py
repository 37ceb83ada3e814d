"""Files of one PCI function in sysfs: link, BARs, errors, interrupts, some registers.

Source: Documentation/ABI/testing/sysfs-bus-pci.
"""

import re

from homenode.errors import ParseError
from homenode.machine.discover.readings import (
    list_numbers,
    read_lines,
    read_number,
    read_pus,
)
from homenode.machine.pci import PciBar, PciErrors, PciInterrupt, PciRegisters
from homenode.machine.snapshot.protocol import Snapshot
from homenode.units import whole_number

_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s(?: PCIe)?", re.ASCII)
_REGION = re.compile(r"(0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16})", re.ASCII)

# Bits of a resource's flags. Source: include/linux/ioport.h.
_IO, _MEMORY, _PREFETCH, _MEMORY_64 = 0x100, 0x200, 0x2000, 0x100000

_LAST_BAR = 12  # 0-5 BARs, 6 ROM, 7-12 SR-IOV; what follows are a bridge's windows
_ROM = 6


def parse_link_speed(text: str | None) -> float | None:
    """GT/s of "32.0 GT/s PCIe" or "8 GT/s"; None of "Unknown" and "Unknown speed".

    >>> parse_link_speed("32.0 GT/s PCIe"), parse_link_speed("Unknown")
    (32.0, None)
    """
    match = None if text is None else _SPEED.fullmatch(text)
    return None if match is None else float(match[1])


def read_link_width(snapshot: Snapshot, path: str) -> int | None:
    """Lanes; None if the file says 0 (no link) or 255 (old kernels: not known)."""
    width = read_number(snapshot, path)
    return None if width in (None, 0, 255) else width


def read_resource(snapshot: Snapshot, path: str, *, is_bridge: bool) -> tuple[PciBar, ...]:
    """The regions of a `resource` file, unused ones omitted.

    Lines "0x<first> 0x<last> 0x<flags>", by index. Raises ParseError.
    Source: Documentation/PCI/sysfs-pci.rst.
    """
    bars: list[PciBar] = []
    for index, line in enumerate(read_lines(snapshot, path)):
        if index > (_ROM if is_bridge else _LAST_BAR):
            break
        match = _REGION.fullmatch(line.strip())
        if match is None:
            raise ParseError(
                f"{snapshot.name}: {path}",
                "first, last and flags in hexadecimal",
                line,
                line=index + 1,
            )
        first, last, flags = (int(field, 16) for field in match.groups())
        if last <= first or not flags & (_IO | _MEMORY):
            continue
        bars.append(
            PciBar(
                index=index,
                size_bytes=last - first + 1,
                is_64bit=bool(flags & _MEMORY_64),
                is_prefetchable=bool(flags & _PREFETCH),
                is_memory=bool(flags & _MEMORY),
            )
        )
    return tuple(bars)


_UNSET = 0x20000000  # the kernel found no place for it; include/linux/ioport.h


def read_kernel_registers(snapshot: Snapshot, directory: str) -> PciRegisters | None:
    """Memory BARs that have no address, as the kernel shows them, which wakes no device."""
    unplaced: list[int] = []
    for index, line in enumerate(read_lines(snapshot, f"{directory}/resource")[:_ROM]):
        match = _REGION.fullmatch(line.strip())
        first, last, flags = (
            (0, 0, 0) if match is None else (int(number, 16) for number in match.groups())
        )
        if flags & _MEMORY and last > first and (flags & _UNSET or not first):
            unplaced.append(index)
    return PciRegisters(unplaced_bars=tuple(unplaced)) if unplaced else None


def read_errors(snapshot: Snapshot, directory: str) -> PciErrors | None:
    """Return the error counts of a function; None without AER. Totals of the kernel are omitted.

    Raises ParseError. Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
    """
    paths = [f"{directory}/aer_dev_{name}" for name in ("correctable", "nonfatal", "fatal")]
    texts = [snapshot.read_text(path) for path in paths]
    if all(text is None for text in texts):
        return None
    return PciErrors(*(_counts(snapshot, path) for path in paths))


def _counts(snapshot: Snapshot, path: str) -> tuple[tuple[str, int], ...]:
    """Return the nonzero lines such as "RxErr 3"."""
    counts: list[tuple[str, int]] = []
    for number, line in enumerate(read_lines(snapshot, path), start=1):
        name, _, word = line.strip().rpartition(" ")
        count = whole_number(word)
        if not name or count is None:
            raise ParseError(f"{snapshot.name}: {path}", "a name and a count", line, line=number)
        if count and not name.startswith("TOTAL_"):
            counts.append((name, count))
    return tuple(counts)


def read_interrupts(snapshot: Snapshot, directory: str) -> tuple[PciInterrupt, ...] | None:
    """The function's message-signalled interrupts, ascending; None if the source has none.

    The CPUs are the effective ones, else the allowed ones. Raises ParseError.
    """
    numbers = list_numbers(snapshot.list(f"{directory}/msi_irqs"), "")
    interrupts: list[PciInterrupt] = []
    for number in numbers:
        for name in ("effective_affinity_list", "smp_affinity_list"):
            pus = read_pus(snapshot, f"/proc/irq/{number}/{name}")
            if pus:  # empty: the interrupt is not set up
                interrupts.append(PciInterrupt(number, pus))
                break
    return tuple(interrupts) or None
