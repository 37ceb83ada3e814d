"""Readings: single values of sysfs files, checked; None if a file is absent or empty. Files in
trees gathered by other programs may end with NULs. PCI functions: link, BARs, errors, interrupts.

Source: Documentation/ABI/testing/sysfs-bus-pci.
"""

import re

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HostError, ParseError
from homenode.machine.pci import PciBar, PciErrors, PciInterrupt, PciRegisters
from homenode.machine.snapshot.protocol import Snapshot
from homenode.units import parse_whole

PADDING = " \t\r\n\0"
"""Padding around the content of a file."""


def read_lines(snapshot: Snapshot, path: str) -> list[str]:
    """Return the lines of a file without padding at its end; empty if it is absent."""
    return (snapshot.read_text(path) or "").rstrip(PADDING).splitlines()


def read_word(snapshot: Snapshot, path: str) -> str | None:
    """Return the stripped text of a file; None if it is absent, empty or "(null)". Kernels before
    6.2 print an empty nohz_full as "(null)"."""
    text = snapshot.read_text(path)
    word = None if text is None else text.strip(PADDING)
    return None if word in (None, "", "(null)") else word


def read_number(snapshot: Snapshot, path: str, radix: int = 10) -> int | None:
    """Return the whole number in a file; with radix 16 also after "0x". Raises ParseError."""
    word = read_word(snapshot, path)
    if word is None:
        return None
    try:
        if len(word) > 20:
            raise ValueError
        return int(word, radix)
    except ValueError:
        raise ParseError(f"{snapshot.name}: {path}", "a whole number", word) from None


def read_pus(snapshot: Snapshot, list_path: str, mask_path: str | None = None) -> CpuSet | None:
    """Return the CPUs of a list file such as "0-3,8", else of its mask file; None if both are
    absent. An empty list file is the empty set: a node without CPUs has one. Raises ParseError."""
    text = snapshot.read_text(list_path)
    if text is not None:
        stripped_text = text.strip(PADDING)
        if stripped_text == "(null)":
            return CpuSet()
        return CpuSet.parse(stripped_text, f"{snapshot.name}: {list_path}")
    return None if mask_path is None else read_mask(snapshot, mask_path)


def read_mask(snapshot: Snapshot, path: str) -> CpuSet | None:
    """Return the CPUs of a mask such as "00000000,ff"; None if absent. Raises ParseError."""
    mask = snapshot.read_text(path)
    if mask is None:
        return None
    return CpuSet.parse_mask(mask.strip(PADDING), f"{snapshot.name}: {path}")


def link_name(snapshot: Snapshot, path: str) -> str | None:
    """Return the last name of a symbolic link's target: a driver, a group, a function."""
    target = snapshot.read_link(path)
    return None if target is None else target.rstrip("/").rpartition("/")[2] or None


def list_readable(snapshot: Snapshot, directory: str) -> tuple[str, ...] | None:
    """Return the names in a directory, else None. Raises HostError if there is or may be an
    unreadable one: hidden names must not count as absent."""
    names = snapshot.list(directory)
    if names is None and is_hidden(snapshot, directory):
        raise HostError(
            f"{snapshot.name}: {directory}: permission denied",
            hint="run as root, or as the owner of the directory",
        )
    return names


def is_hidden(snapshot: Snapshot, directory: str) -> bool:
    """Return whether a snapshot cannot list the names of a directory with content."""
    return snapshot.list(directory) is None and snapshot.real_path(directory) is not None


def list_numbers(names: tuple[str, ...] | None, prefix: str) -> tuple[int, ...]:
    """Return the numbers N of the names prefixN, ascending; other names are passed over.

    >>> list_numbers(("cpu10", "cpu2", "cpufreq", "cpuidle"), "cpu")
    (2, 10)
    """
    suffixes = (name.removeprefix(prefix) for name in names or () if name.startswith(prefix))
    numbers = (parse_whole(suffix, digits=6) for suffix in suffixes)
    return tuple(sorted(number for number in numbers if number is not None))


def parse_address(name: str) -> Bdf | None:
    """Return the PCI address that a file name is; None for other names, such as control files."""
    try:
        return Bdf.parse(name)
    except ParseError:
        return None


_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s(?: PCIe)?", re.ASCII)
_REGION = re.compile(r"(0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16}) (0x[0-9a-f]{1,16})", re.ASCII)

# Bits of a resource's flags. Source: include/linux/ioport.h.
_IO, _MEMORY, _PREFETCH, _MEMORY_64 = 0x100, 0x200, 0x2000, 0x100000

_LAST_BAR = 12  # 0-5 BARs, 6 ROM, 7-12 SR-IOV; what follows are a bridge's windows
_ROM = 6


def parse_link_speed(text: str | None) -> float | None:
    """Return GT/s of "32.0 GT/s PCIe" or "8 GT/s"; None of "Unknown" and "Unknown speed".

    >>> parse_link_speed("32.0 GT/s PCIe"), parse_link_speed("Unknown")
    (32.0, None)
    """
    match = None if text is None else _SPEED.fullmatch(text)
    return None if match is None else float(match[1])


def read_link_width(snapshot: Snapshot, path: str) -> int | None:
    """Return the lanes; None if the file says 0 (no link) or 255 (old kernels: not known)."""
    width = read_number(snapshot, path)
    return None if width in (None, 0, 255) else width


def read_resource(snapshot: Snapshot, path: str, *, is_bridge: bool) -> tuple[PciBar, ...]:
    """Return the regions of a `resource` file, unused ones omitted. Lines "0x<first> 0x<last>
    0x<flags>", by index. Raises ParseError. Source: Documentation/PCI/sysfs-pci.rst."""
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
    unplaced_bars: list[int] = []
    for index, line in enumerate(read_lines(snapshot, f"{directory}/resource")[:_ROM]):
        match = _REGION.fullmatch(line.strip())
        first, last, flags = (
            (0, 0, 0) if match is None else (int(number, 16) for number in match.groups())
        )
        if flags & _MEMORY and last > first and (flags & _UNSET or not first):
            unplaced_bars.append(index)
    return PciRegisters(unplaced_bars=tuple(unplaced_bars)) if unplaced_bars else None


def read_errors(snapshot: Snapshot, directory: str) -> PciErrors | None:
    """Return the error counts of a function; None without AER. Totals of the kernel are omitted.
    Raises ParseError. Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats."""
    paths = [f"{directory}/aer_dev_{name}" for name in ("correctable", "nonfatal", "fatal")]
    texts = [snapshot.read_text(path) for path in paths]
    if all(text is None for text in texts):
        return None
    return PciErrors(*(_read_counts(snapshot, path) for path in paths))


def _read_counts(snapshot: Snapshot, path: str) -> tuple[tuple[str, int], ...]:
    """Return the nonzero lines such as "RxErr 3"."""
    counts: list[tuple[str, int]] = []
    for number, line in enumerate(read_lines(snapshot, path), start=1):
        name, _, word = line.strip().rpartition(" ")
        count = parse_whole(word)
        if not name or count is None:
            raise ParseError(f"{snapshot.name}: {path}", "a name and a count", line, line=number)
        if count and not name.startswith("TOTAL_"):
            counts.append((name, count))
    return tuple(counts)


def read_interrupts(snapshot: Snapshot, directory: str) -> tuple[PciInterrupt, ...] | None:
    """Return the function's message-signalled interrupts, ascending; None if the source has none.
    The CPUs are the effective ones, else the allowed ones. Raises ParseError."""
    numbers = list_numbers(snapshot.list(f"{directory}/msi_irqs"), "")
    interrupts: list[PciInterrupt] = []
    for number in numbers:
        for name in ("effective_affinity_list", "smp_affinity_list"):
            pus = read_pus(snapshot, f"/proc/irq/{number}/{name}")
            if pus:  # empty: the interrupt is not set up
                interrupts.append(PciInterrupt(number, pus))
                break
    return tuple(interrupts) or None
