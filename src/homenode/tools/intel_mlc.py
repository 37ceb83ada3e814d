"""Intel Memory Latency Checker: latency and bandwidth between nodes, and latency under load.

    mlc [--latency_matrix | --bandwidth_matrix | --peak_injection_bandwidth | --loaded_latency]

Seen of v3.4 to v3.12; closed source, the format is that of published outputs.

                    Numa node
    Numa node            0       1
           0          82.2   129.6

* Rows are the nodes of the PUs, columns those of the memory. The words before them were "Memory
  node" and "Socket" before v3.5. A node without PUs (CXL, HBM) has a column and no row.
* "MB/sec" is 10^6 bytes per second, as it says.
* It switches prefetchers off through an MSR, as root, which a guest cannot do. Where it could not
  (`prefetchers_were_on`), a sequential idle latency is too low.
"""

import re
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.tools.figures import count, figure_or_none, positive

COMMAND = ("mlc",)
MAX_NODES = 1024

_SOURCE = "Intel MLC"
_VERSION = re.compile(r"Intel\(R\) Memory Latency Checker(?: \(.*\))? - v(\S+)")
_IDLE = re.compile(r"Measuring idle latencies(?: for (\w+) access)? \((?:in )?ns\)\.\.\.")
_PEAK = "Measuring Peak Injection Memory Bandwidths for the system"
_NODES = "Measuring Memory Bandwidths between nodes within system"
_LOADED = "Measuring Loaded Latencies for the system"
_CACHES = "Measuring cache-to-cache transfer latency"
_HEADER = re.compile(r"(?:Numa node|Memory node|Socket)((?:\s+\d+)+)", re.ASCII)
_ROW = re.compile(r"(\d+)((?:\s+\S+)+)", re.ASCII)
_LOADED_ROW = re.compile(r"(\d{1,9})\s+(\S+)\s+(\S+)", re.ASCII)
_ITERATION = re.compile(r"Each iteration took (\S+) (?:base frequency )?.*clocks \(\s*(\S+)\s+ns\)")
_TITLES = re.compile(
    r"(?:Numa|Memory) node|Inject\s+Latency\s+Bandwidth|Delay\s+\(ns\)\s+MB/sec|=+"
)
_PREFETCHERS = re.compile(
    r".*(?:Unable to modify prefetchers|prefetchers? (?:is|are) (?:not|on)).*"
)
_SAYS_NOTHING = re.compile(
    r"Command line parameters:.*|Using buffer size of .*|Using all the threads .*|"
    r"Using (?:Read-only|traffic) .*|Bandwidths are in .*|\*\*\*.*|tried to open .*|.*modprobe.*"
)


@dataclass(frozen=True, slots=True)
class MlcMatrix:
    """cells: shape (rows, columns), [node of the PUs][node of the memory]; None where absent."""

    rows: tuple[NodeIndex, ...]
    columns: tuple[NodeIndex, ...]
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class MlcLoad:
    """One row of latency under load. delay: of the injecting threads, in the tool's own unit."""

    delay: int
    latency_ns: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MlcRun:
    """What was measured; None or empty where it was not asked for.

    idle_ns, bandwidth_bytes_per_s: between nodes. peaks: (mix of reads and writes, bytes/s).
    latency_ns: the one figure of --idle_latency. access: "random", "sequential" or not said.
    """

    version: str | None
    access: str | None
    prefetchers_were_on: bool
    latency_ns: float | None
    idle_ns: MlcMatrix | None
    peaks: tuple[tuple[str, float], ...]
    bandwidth_bytes_per_s: MlcMatrix | None
    loaded: tuple[MlcLoad, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> MlcRun:
    """The one run of an output. Raises ParseError."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(line.strip(), number)
    return reader.run()


class _Reader:
    """The run so far. section: the title that the line stands under."""

    def __init__(self) -> None:
        self.section = ""
        self.version: str | None = None
        self.access: str | None = None
        self.prefetchers_were_on = False
        self.latency_ns: float | None = None
        self.columns: dict[str, tuple[NodeIndex, ...]] = {}
        self.rows: dict[str, dict[NodeIndex, tuple[float | None, ...]]] = {}
        self.peaks: dict[str, float] = {}
        self.loaded: list[MlcLoad] = []
        self.gaps: list[Gap] = []

    def read(self, line: str, number: int) -> None:
        if not line or self._title(line, number):
            return
        if _PREFETCHERS.fullmatch(line):
            self.prefetchers_were_on = True
        elif found := _ITERATION.fullmatch(line):
            self.latency_ns = positive(found[2], _SOURCE, "a latency in ns", number)
        elif self.section == _CACHES or _SAYS_NOTHING.fullmatch(line) or _TITLES.fullmatch(line):
            return  # cache-to-cache latencies are between unnamed cores: nothing to compare
        elif self.section in (_IDLE.pattern, _NODES):
            self._cells(line, number)
        elif self.section == _PEAK and (row := _peak_row(line)) is not None:
            name, rate = row
            if name in self.peaks:
                raise ParseError(_SOURCE, f"one row {name!r}", line, line=number)
            self.peaks[name] = positive(rate, _SOURCE, "MB/sec", number) * 1e6
        elif self.section == _LOADED and (found := _LOADED_ROW.fullmatch(line)):
            self._load(found, number)
        else:
            self.gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))

    def _title(self, line: str, number: int) -> bool:
        """Whether the line opens a section. A section of the same kind twice is two runs."""
        if found := _VERSION.fullmatch(line):
            if self.version not in (None, found[1]):
                raise ParseError(_SOURCE, "one run", line, line=number)
            self.version = found[1]
            return True
        if found := _IDLE.fullmatch(line):
            self.section, self.access = _IDLE.pattern, found[1]
            return True
        for title in (_PEAK, _NODES, _LOADED, _CACHES):
            if line.startswith(title):
                self.section = title
                return True
        return False

    def _cells(self, line: str, number: int) -> None:
        if found := _HEADER.fullmatch(line):
            if self.section in self.columns:
                raise ParseError(_SOURCE, "one matrix of each kind", line, line=number)
            nodes = tuple(_node(word, number) for word in found[1].split())
            if len(set(nodes)) != len(nodes) or len(nodes) > MAX_NODES:
                raise ParseError(
                    _SOURCE, f"at most {MAX_NODES} nodes, each once", line, line=number
                )
            self.columns[self.section] = nodes
            return
        columns = self.columns.get(self.section, ())
        found = _ROW.fullmatch(line)
        words = found[2].split() if found else []
        rows = self.rows.setdefault(self.section, {})
        if found is None or not columns or len(words) != len(columns):
            raise ParseError(_SOURCE, f"a node and {len(columns)} values", line, line=number)
        node = _node(found[1], number)
        if node in rows:
            raise ParseError(_SOURCE, f"one row of node {node}", line, line=number)
        scale = 1e6 if self.section == _NODES else 1.0
        values = (figure_or_none(word, _SOURCE, "a number", number) for word in words)
        rows[node] = tuple(None if value is None else value * scale for value in values)

    def _load(self, found: "re.Match[str]", number: int) -> None:
        self.loaded.append(
            MlcLoad(
                count(found[1], _SOURCE, "a delay", number),
                positive(found[2], _SOURCE, "a latency in ns", number),
                positive(found[3], _SOURCE, "MB/sec", number) * 1e6,
            )
        )
        if len(self.loaded) > MAX_NODES:
            raise ParseError(_SOURCE, f"at most {MAX_NODES} rows", found[0], line=number)

    def run(self) -> MlcRun:
        idle, bandwidth = self._matrix(_IDLE.pattern), self._matrix(_NODES)
        measured = (idle, bandwidth, self.latency_ns, self.peaks or None, self.loaded or None)
        if all(part is None for part in measured):
            raise ParseError(_SOURCE, "a matrix, peak bandwidths or loaded latencies", "none")
        return MlcRun(
            self.version,
            self.access,
            self.prefetchers_were_on,
            self.latency_ns,
            idle,
            tuple(self.peaks.items()),
            bandwidth,
            tuple(self.loaded),
            tuple(self.gaps),
        )

    def _matrix(self, section: str) -> MlcMatrix | None:
        rows = self.rows.get(section)
        if section not in self.columns:
            return None
        if not rows:
            raise ParseError(_SOURCE, "rows of a matrix", "none", hint="its output was cut")
        return MlcMatrix(tuple(rows), self.columns[section], tuple(rows.values()))


def _node(word: str, number: int) -> NodeIndex:
    node = count(word, _SOURCE, "a node", number)
    if node >= MAX_NODES:
        raise ParseError(_SOURCE, f"nodes below {MAX_NODES}", word, line=number)
    return NodeIndex(node)


def _peak_row(line: str) -> tuple[str, str] | None:
    """Name and rate of a peak; None for another line.

    >>> _peak_row("3:1 Reads-Writes :\t250000.5"), _peak_row("Using traffic with:")
    (('3:1 Reads-Writes', '250000.5'), None)
    """
    name, _, rate = line.rpartition(":")
    words = rate.split()
    return (name.strip(), words[0]) if name.strip() and len(words) == 1 else None
