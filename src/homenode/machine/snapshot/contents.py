"""Contents: the one table of every path and every command that homenode reads, and why.

The same table captures (gather.py, collector.py) and validates: malformed files are omitted from a
capture, so that no foreign data is included.

Source: Documentation/ABI/{stable,testing}/sysfs-* and Documentation/filesystems/proc.rst of the
Linux kernel 6.12; for each tool see tools/.
"""

import re
from collections.abc import Iterator
from enum import Enum, StrEnum
from functools import cache

from msgspec import Struct

from homenode.package_data import read_package_text


class PathKind(StrEnum):
    FILE = "file"
    LINK = "link"
    DIRECTORY = "directory"  # only that it is there
    CONFIG = "config"  # PCI configuration space, binary; of bridges only


_BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WAY = r"(?:[A-Za-z0-9_.:@-]{1,80}/){0,40}"  # pci0000:17/0000:17:01.0/, platform/.../


class TextForm(Enum):
    """Form of a file's text; the value is a regular expression."""

    NUMBER = r"-?\d{1,20}"
    HEX = r"(?:0x)?[0-9a-fA-F]{1,8}"
    # CPUs or nodes: "0-3,8"; nothing on a node without CPUs; "(null)" if nohz_full= is not set
    LIST = r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*|\(null\)|"
    MASK = r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8}){0,2047}"
    NUMBERS = r"\d{1,6}(?: +\d{1,6})*"
    WORD = r"[A-Za-z][A-Za-z0-9_-]{0,30}|\d{1,2}"  # "on", "Unified", "amd-pstate-epp"; SMT 4
    COUNTS = r"[A-Za-z_]{1,40} \d{1,20}"  # each line: "RxErr 0"
    CHOICE = r"\[?[a-z+]{2,15}\]?(?: \[?[a-z+]{2,15}\]?){1,6}"  # "always [madvise] never"
    SIZE = r"\d{1,12}[KMG]?"
    SPEED = r"(?:\d{1,3}(?:\.\d)? GT/s(?: PCIe)?|Unknown(?: speed)?)"
    NAME = r"[^\n]{0,400}"  # one line of free text
    COMMAND_LINE = r"[^\n]{0,16384}"
    RESOURCE = r"0x[0-9a-f]{16} 0x[0-9a-f]{16} 0x[0-9a-f]{16}"  # each line
    FIELDS = r"[A-Za-z0-9_()][A-Za-z0-9_() ]{0,60}\t*:[^\n]{0,8000}"  # each line: "key: value"
    NODE_MEMINFO = r"Node \d+ [A-Za-z0-9_()]{1,40}:\s+\d+(?: kB)?"  # each line

    # Targets of symbolic links: names that the kernel assigns
    TO_DAX = rf"(?:\.\./)+devices/{_WAY}dax\d{{1,4}}\.\d{{1,4}}"
    TO_MEDIATED = rf"(?:\.\./)+devices/{_WAY}{_UUID}"
    TO_MEDIATED_TYPE = r"(?:\.\./)+mdev_supported_types/[A-Za-z0-9_-]{1,60}"
    TO_POLICY = r"\.\./cpufreq/policy\d{1,6}"
    TO_DEVICE = rf"(?:\.\./)+(?:devices/{_WAY})?{_BDF}"
    TO_DRIVER = r"(?:\.\./)+bus/[a-z]{2,12}/drivers/[A-Za-z0-9_-]{1,40}"
    TO_GROUP = r"(?:\.\./)+kernel/iommu_groups/\d{1,8}"
    TO_BUS = rf"(?:\.\./)+devices/{_WAY}pci_bus/[0-9a-f]{{4,8}}:[0-9a-f]{{2}}"
    TO_IOMMU = rf"(?:\.\./)+devices/{_WAY}iommu/[a-z]{{2,8}}[a-z0-9._-]{{0,30}}"

    def matches(self, text: str) -> bool:
        """Return whether the whole text, but for white space around it, has the form. White space
        alone matches every form: a file may be empty."""
        # By line, because a pattern that repeats over lines takes 2^n steps to fail.
        parts = text.strip().split("\n") if self in _BY_LINE else (text.strip(),)
        pattern = _compiled(self)
        return all(not part or pattern.fullmatch(part.rstrip()) for part in parts)


_BY_LINE = frozenset({TextForm.RESOURCE, TextForm.FIELDS, TextForm.NODE_MEMINFO, TextForm.COUNTS})
_compiled = cache(lambda form: re.compile(form.value, re.ASCII))


class PathRule(Struct, frozen=True):
    """Paths that are read: a glob of the shell, one component at a time."""

    glob: str
    kind: PathKind
    form: TextForm
    purpose: str
    # if set, only lines that begin with it are captured (for example, the rest of /proc/self/status
    # is private)
    keep: tuple[str, ...] = ()
    # a better glob of the same content: this glob is only read if that one matches nothing, as in
    # trees of /sys from old kernels or packed by other programs
    unless: str | None = None


class ToolCommand(Struct, frozen=True):
    """A tool whose output is read."""

    name: str
    # the argv, and alternatives if the first program is missing
    spellings: tuple[tuple[str, ...], ...]
    purpose: str
    timeout_s: int = 30
    # if set, its output is a list of words, and the tool runs once for each word as its last
    # argument; the outputs follow one another in <wrapped> tags
    list_argv: tuple[str, ...] = ()
    wrapped: str = ""


BRIDGE_CLASS = "0x0604"
"""Beginning of `class` of a PCI-to-PCI bridge; every PCIe port is one."""

_LINES = re.compile(r'"([^"]+)"')


def read_table(name: str) -> list[str]:
    """Return the rows of one of this directory's tables."""
    lines = read_package_text("machine", "snapshot", name).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def read_words(section: str) -> frozenset[str]:
    _, _, tail = "\n".join(read_table("words.txt")).partition(f"[{section}]\n")
    return frozenset(tail.partition("[")[0].split())


def _expand_braces(names: str) -> list[str]:
    before, _, tail = names.partition("{")
    several, _, after = tail.partition("}")
    return [f"{before}{name}{after}" for name in several.split(",")]


def _read_paths() -> Iterator[PathRule]:
    """Yield one rule for each row, or for each name in its braces."""
    rows = read_table("paths.txt")
    for row, next_row in zip(rows, (*rows[1:], ""), strict=True):
        if row.startswith(" "):
            continue
        head, _, purpose = row.partition(" | ")
        kind, form, path, *options = head.split()
        directory, option = path.rpartition("/")[0], options[1] if options else None
        unless = option and (option if option.startswith("/") else f"{directory}/{option}")
        keep = tuple(_LINES.findall(next_row.replace("\\t", "\t"))) if next_row[:1] == " " else ()
        for glob in _expand_braces(path):
            yield PathRule(glob, PathKind(kind), TextForm[form], purpose, keep, unless)


PATHS = tuple(_read_paths())


def _read_commands() -> Iterator[ToolCommand]:
    blocks = "\n".join(read_table("commands.txt")).replace("\n  ", "\t").splitlines()
    for head, *rows in (block.split("\t") for block in blocks):
        named, _, purpose = head.partition(" | ")
        name, timeout = named.split()
        wrapped, _, list_argv = rows[-1].removeprefix("each ").partition(": ")
        spellings = tuple(tuple(row.split()) for row in rows if not row.startswith("each "))
        wrapped = wrapped if list_argv else ""
        yield ToolCommand(name, spellings, purpose, int(timeout), tuple(list_argv.split()), wrapped)


COMMANDS = tuple(_read_commands())
COMMAND_OF_NAME = {command.name: command for command in COMMANDS}

IDENTITY_PATHS = (
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
    "/etc/hostname",
    "/etc/machine-id",
)
"""Read so that their words can be found and redacted elsewhere. Never stored."""

SERIAL_PATHS = tuple(
    f"/sys/devices/virtual/dmi/id/{name}"
    for name in ("product_serial", "board_serial", "chassis_serial", "chassis_asset_tag")
)
"""Paths like IDENTITY_PATHS; each holds one text that only root can read."""

IDENTITY_COMMANDS = (ToolCommand("user", (("id", "-un"),), "whose name to redact", 10),)
"""Commands that identify a machine or user, like IDENTITY_PATHS."""
