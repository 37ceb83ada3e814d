"""Readings: single values of sysfs files, checked; None if a file is absent or empty. Files in
trees gathered by other programs may end with NULs.
"""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HostError, ParseError
from homenode.machine.snapshot.protocol import Snapshot
from homenode.units import whole_number

PADDING = " \t\r\n\0"
"""What may stand around the content of a file."""


def read_lines(snapshot: Snapshot, path: str) -> list[str]:
    """Return the lines of a file without padding at its end; empty if it is absent."""
    return (snapshot.read_text(path) or "").rstrip(PADDING).splitlines()


def read_word(snapshot: Snapshot, path: str) -> str | None:
    """The stripped text of a file; None if it is absent, empty or "(null)".

    Kernels before 6.2 print an empty nohz_full as "(null)".
    """
    text = snapshot.read_text(path)
    word = None if text is None else text.strip(PADDING)
    return None if word in (None, "", "(null)") else word


def read_number(snapshot: Snapshot, path: str, radix: int = 10) -> int | None:
    """The whole number in a file; with radix 16 an "0x" before it is fine. Raises ParseError."""
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
    """The CPUs of a list file such as "0-3,8", else of its mask file; None if both are absent.

    An empty list file is the empty set: a node without CPUs has one. Raises ParseError.
    """
    text = snapshot.read_text(list_path)
    if text is not None:
        stripped = text.strip(PADDING)
        if stripped == "(null)":
            return CpuSet()
        return CpuSet.parse(stripped, f"{snapshot.name}: {list_path}")
    return None if mask_path is None else read_mask(snapshot, mask_path)


def read_mask(snapshot: Snapshot, path: str) -> CpuSet | None:
    """The CPUs of a mask file such as "00000000,ff"; None if it is absent. Raises ParseError."""
    mask = snapshot.read_text(path)
    if mask is None:
        return None
    return CpuSet.parse_mask(mask.strip(PADDING), f"{snapshot.name}: {path}")


def link_name(snapshot: Snapshot, path: str) -> str | None:
    """Return the last name of a symbolic link's target: a driver, a group, a function."""
    target = snapshot.read_link(path)
    return None if target is None else target.rstrip("/").rpartition("/")[2] or None


def list_readable(snapshot: Snapshot, directory: str) -> tuple[str, ...] | None:
    """The names in a directory, else None. Raises HostError if there is or may be an
    unreadable one: hidden names must not count as absent."""
    names = snapshot.list(directory)
    if names is None and is_hidden(snapshot, directory):
        raise HostError(
            f"{snapshot.name}: {directory}: permission denied",
            hint="run as root, or as the owner of the directory",
        )
    return names


def is_hidden(snapshot: Snapshot, directory: str) -> bool:
    """True of a directory whose names a snapshot cannot give although something is there."""
    return snapshot.list(directory) is None and snapshot.real_path(directory) is not None


def list_numbers(names: tuple[str, ...] | None, prefix: str) -> tuple[int, ...]:
    """The numbers N of the names prefixN, ascending; other names are passed over.

    >>> list_numbers(("cpu10", "cpu2", "cpufreq", "cpuidle"), "cpu")
    (2, 10)
    """
    suffixes = (name.removeprefix(prefix) for name in names or () if name.startswith(prefix))
    numbers = (whole_number(suffix, digits=6) for suffix in suffixes)
    return tuple(sorted(number for number in numbers if number is not None))


def address_of(name: str) -> Bdf | None:
    """Return the PCI address that a file name is; None for other names, such as control files."""
    try:
        return Bdf.parse(name)
    except ParseError:
        return None
