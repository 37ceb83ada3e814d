"""lscpu -e: the logical CPUs, each with its node, socket, core, caches and state.

    CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE    MAXMHZ   MINMHZ
      0    0      0    0 0:0:0:0          yes 3500.0000 800.0000
      1    0      0    1 1:1:1:0          yes 3500.0000 800.0000
      2    -      -    - -                 no         -        -

Only the columns that the machine and the version have are printed; "-" means unknown. A CORE may
repeat from socket to socket. Source: lscpu(1) of util-linux 2.38.
"""

from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, PuIndex
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.machine.tools.numactl import MAX_NODES
from homenode.text import plural
from homenode.units import parse_whole

_SOURCE = "lscpu -e"
_HEAD_LINES = 8

MAX_CPUS = 8192
"""Source: NR_CPUS_RANGE_END of arch/x86/Kconfig."""


class LscpuCpu(Struct, frozen=True, kw_only=True):
    """A logical CPU. None: unknown."""

    index: PuIndex
    node: int | None
    socket: int | None
    core: int | None
    llc: int | None  # the last-level cache
    is_online: bool


class LscpuTable(Struct, frozen=True, kw_only=True):
    """The CPUs, and the columns that the tool printed."""

    cpus: tuple[LscpuCpu, ...]
    columns: tuple[str, ...]
    llc_level: int | None
    gaps: tuple[Gap, ...]


def looks_like_lscpu(text: str) -> bool:
    """Return whether a header of `lscpu -e` is among the first lines."""
    return any(_is_header(line) for line in text.split("\n", _HEAD_LINES)[:_HEAD_LINES])


def parse(text: str) -> LscpuTable:
    """Parse the table. Lines before its header are gaps. Raises ParseError."""
    lines = Lines(text, _SOURCE)
    columns: tuple[str, ...] = ()
    caches = ""
    cpus: dict[int, LscpuCpu] = {}
    for line in lines:
        words = tuple(line.text.split())
        if not columns:
            if _is_header(line.text):
                columns = words
                caches = next((column for column in columns if ":" in column), "")
            else:
                lines.add_unknown(line)
            continue
        if len(words) != len(columns):
            raise line.make_error(plural(len(columns), "column"), plural(len(words), "column"))
        cell_of = dict(zip(columns, words, strict=True))
        index = line.read_count(cell_of["CPU"], "a CPU", MAX_PU_INDEX)
        if index in cpus or len(cpus) == MAX_CPUS:
            raise line.make_error(f"each CPU once, {MAX_CPUS} at most", str(index))
        cpus[index] = LscpuCpu(
            index=PuIndex(index),
            node=_number(line, cell_of.get("NODE"), MAX_NODES - 1),
            socket=_number(line, cell_of.get("SOCKET")),
            core=_number(line, cell_of.get("CORE")),
            llc=_number(line, cell_of.get(caches, "-").rpartition(":")[2]),
            is_online=cell_of.get("ONLINE", "yes") != "no",
        )
    if not cpus:
        raise ParseError(_SOURCE, "a header CPU NODE SOCKET CORE, and a row for each CPU")
    level = caches.rpartition(":")[2][1:2]
    return LscpuTable(
        cpus=tuple(cpus[index] for index in sorted(cpus)),
        columns=columns,
        llc_level=parse_whole(level),
        gaps=tuple(lines.gaps),
    )


def _is_header(text: str) -> bool:
    words = text.split()
    return words[:1] == ["CPU"] and not {"NODE", "SOCKET", "CORE"}.isdisjoint(words)


def _number(line: Line, word: str | None, limit: int = MAX_PU_INDEX) -> int | None:
    return None if word in (None, "-", "") else line.read_count(word, "a number or -", limit)
