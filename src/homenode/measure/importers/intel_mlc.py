"""Intel Memory Latency Checker: latency and bandwidth between nodes, and latency under load.

    mlc [--latency_matrix | --bandwidth_matrix | --peak_injection_bandwidth | --loaded_latency]

Seen with v3.4 to v3.12; closed source, the format is that of published outputs.

                    Numa node
    Numa node            0       1
           0          82.2   129.6

* Rows are the nodes of the CPUs, columns those of the memory. The words before them were "Memory
  node" and "Socket" before v3.5. A node without CPUs (CXL, HBM) has a column and no row.
* "MB/sec" is 10^6 bytes per second, as documented.
* It switches prefetchers off through an MSR, as root, which a guest cannot do. If MLC could not
switch them off (`prefetchers_were_on`), its sequential idle latency is too low.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from homenode.cpuset import NodeIndex
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.model import (
    MeasuredSamples,
    SampleBuilder,
    ToolOutput,
    read_from_text,
)
from homenode.text import plural

COMMAND = ("mlc",)
MAX_NODES = 1024

_SOURCE = "Intel MLC"
_VERSION = re.compile(r"Intel\(R\) Memory Latency Checker(?: \(.*\))? - v(\S+)")
_IDLE = re.compile(r"Measuring idle latencies(?: for (\w+) access)? \((?:in )?ns\)\.\.\.")
_PEAK = "Measuring Peak Injection Memory Bandwidths for the system"
_NODES = "Measuring Memory Bandwidths between nodes within system"
_LOADED = "Measuring Loaded Latencies for the system"
_CACHES = "Measuring cache-to-cache transfer latency"
_SECTION = re.compile(f"({_PEAK}|{_NODES}|{_LOADED}|{_CACHES}).*")
_ANYTHING = re.compile(r".*")
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


class MlcMatrix(Struct, frozen=True, kw_only=True):
    rows: tuple[NodeIndex, ...]
    columns: tuple[NodeIndex, ...]
    # shape (rows, columns), [node of the CPUs][node of the memory]; None if absent
    cells: tuple[tuple[float | None, ...], ...]


class MlcLoad(Struct, frozen=True, kw_only=True):
    """A row of latency under load."""

    delay: int  # delay of the injecting threads, in the tool's unit
    latency_ns: float
    bytes_per_s: float


class MlcRun(Struct, frozen=True, kw_only=True):
    """The results of a run; None or empty if not requested."""

    version: str | None
    access: str | None  # "random", "sequential" or not given
    prefetchers_were_on: bool
    latency_ns: float | None  # the only result of --idle_latency
    idle_ns: MlcMatrix | None  # between nodes
    peaks: tuple[tuple[str, float], ...]  # (mix of reads and writes, bytes/s)
    bandwidth_bytes_per_s: MlcMatrix | None  # between nodes
    loaded: tuple[MlcLoad, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> MlcRun:
    """Return the one run of an output. Raises ParseError."""
    return _Reader(text).run()


class _Reader:
    """The run so far. section: the title above the line."""

    def __init__(self, text: str) -> None:
        self.section = ""
        self.version: str | None = None
        self.access: str | None = None
        self.prefetchers_were_on = False
        self.latency_ns: float | None = None
        self.columns: dict[str, tuple[NodeIndex, ...]] = {}
        self.rows: dict[str, dict[NodeIndex, tuple[float | None, ...]]] = {}
        self.peaks: dict[str, float] = {}
        self.loaded: dict[int, MlcLoad] = {}
        self.lines = Lines(text, _SOURCE)
        self.lines.read(
            [
                (_VERSION, self._parse_version),
                (_IDLE, self._parse_idle),
                (_SECTION, self._start_section),
                (_PREFETCHERS, self._parse_prefetchers),
                (_ITERATION, self._parse_latency),
                (_ANYTHING, self._skip_row),
                (_SAYS_NOTHING, None),
                (_TITLES, None),
                (_ANYTHING, self._parse_cells),
                (_ANYTHING, self._parse_peak),
                (_LOADED_ROW, self._load),
            ]
        )

    def _parse_version(self, line: Line, match: "re.Match[str]") -> None:
        if self.version not in (None, match[1]):
            raise line.make_error("one run")
        self.version = match[1]

    def _parse_idle(self, line: Line, match: "re.Match[str]") -> None:
        self.section, self.access = _IDLE.pattern, match[1]

    def _start_section(self, line: Line, match: "re.Match[str]") -> None:
        self.section = match[1]

    def _parse_prefetchers(self, line: Line, match: "re.Match[str]") -> None:
        self.prefetchers_were_on = True

    def _parse_latency(self, line: Line, match: "re.Match[str]") -> None:
        if self.latency_ns is not None:
            raise line.make_error("one latency")
        self.latency_ns = line.parse_positive(match[2], "a latency in ns")

    def _skip_row(self, line: Line, match: "re.Match[str]") -> bool:
        """Cache-to-cache latencies are between unnamed cores: nothing to compare."""
        return self.section == _CACHES

    def _parse_peak(self, line: Line, match: "re.Match[str]") -> bool:
        row = _find_peak_row(line.text) if self.section == _PEAK else None
        if row is None:
            return False
        name, rate = row
        if name in self.peaks:
            raise line.make_error(f"one row {name!r}")
        self.peaks[name] = line.parse_positive(rate, "MB/sec") * 1e6
        return True

    def _parse_cells(self, line: Line, _: "re.Match[str]") -> bool:
        if self.section not in (_IDLE.pattern, _NODES):
            return False
        if match := _HEADER.fullmatch(line.text):
            if self.section in self.columns:
                raise line.make_error("one matrix of each kind")
            nodes = tuple(_parse_node(line, word) for word in match[1].split())
            if len(set(nodes)) != len(nodes) or len(nodes) > MAX_NODES:
                raise line.make_error(f"at most {MAX_NODES} nodes, each once")
            self.columns[self.section] = nodes
            return True
        columns = self.columns.get(self.section, ())
        match = _ROW.fullmatch(line.text)
        words = match[2].split() if match else []
        rows = self.rows.setdefault(self.section, {})
        if match is None or not columns or len(words) != len(columns):
            raise line.make_error(f"a node and {plural(len(columns), 'value')}")
        node = _parse_node(line, match[1])
        if node in rows:
            raise line.make_error(f"one row of node {node}")
        scale = 1e6 if self.section == _NODES else 1.0
        rows[node] = tuple(line.value_or_none(word, "a number", scale) for word in words)
        return True

    def _load(self, line: Line, match: "re.Match[str]") -> bool:
        if self.section != _LOADED:
            return False
        if len(self.loaded) == MAX_NODES:
            raise line.make_error(f"at most {MAX_NODES} rows")
        delay = line.read_count(match[1], "a delay")
        if delay in self.loaded:
            raise line.make_error(f"one row of delay {delay}")
        self.loaded[delay] = MlcLoad(
            delay=delay,
            latency_ns=line.parse_positive(match[2], "a latency in ns"),
            bytes_per_s=line.parse_positive(match[3], "MB/sec") * 1e6,
        )
        return True

    def run(self) -> MlcRun:
        idle, bandwidth = self._build_matrix(_IDLE.pattern), self._build_matrix(_NODES)
        if not (idle or bandwidth or self.latency_ns or self.peaks or self.loaded):
            raise self.lines.make_error("a matrix, peak bandwidths or loaded latencies")
        return MlcRun(
            version=self.version,
            access=self.access,
            prefetchers_were_on=self.prefetchers_were_on,
            latency_ns=self.latency_ns,
            idle_ns=idle,
            peaks=tuple(self.peaks.items()),
            bandwidth_bytes_per_s=bandwidth,
            loaded=tuple(self.loaded.values()),
            gaps=tuple(self.lines.gaps),
        )

    def _build_matrix(self, section: str) -> MlcMatrix | None:
        rows = self.rows.get(section)
        if section not in self.columns:
            return None
        if not rows:
            raise self.lines.make_error("rows of a matrix", hint="its output was cut")
        columns = self.columns[section]
        return MlcMatrix(rows=tuple(rows), columns=columns, cells=tuple(rows.values()))


def _parse_node(line: Line, word: str) -> NodeIndex:
    return NodeIndex(line.read_count(word, "a node", limit=MAX_NODES - 1))


def _find_peak_row(text: str) -> tuple[str, str] | None:
    """Name and rate of a peak; None for another line.

    >>> _find_peak_row("3:1 Reads-Writes :\t250000.5"), _find_peak_row("Using traffic with:")
    (('3:1 Reads-Writes', '250000.5'), None)
    """
    name, _, rate = text.rpartition(":")
    words = rate.split()
    return (name.strip(), words[0]) if name.strip() and len(words) == 1 else None


_VARIANTS = {"ALL Reads": "read", "Stream-triad like": "triad"}


def read_mlc_results(run: MlcRun) -> MeasuredSamples:
    """Return the matrices by node, peak bandwidths by mix, latency and bandwidth under load."""
    results = SampleBuilder("Intel MLC", run.version, run.gaps)
    if run.latency_ns is not None:
        results.add("memory-latency", "ns", run.latency_ns, variant="dram")
    for matrix, metric, unit, variant in (
        (run.idle_ns, "memory-latency", "ns", "dram"),
        (run.bandwidth_bytes_per_s, "memory-bandwidth", "bytes_per_s", "read"),
    ):
        for node, peer, value in () if matrix is None else _list_values(matrix):
            results.add(metric, unit, value, node=node, peer_node=peer, variant=variant)
    for mix, rate in run.peaks:
        variant = _VARIANTS.get(mix, mix.lower())
        results.add("memory-bandwidth", "bytes_per_s", rate, variant=variant)
    for load in run.loaded:
        variant = f"delay {load.delay}"
        results.add("loaded-latency", "ns", load.latency_ns, variant=variant)
        results.add("loaded-bandwidth", "bytes_per_s", load.bytes_per_s, variant=variant)
    results.add_condition("tool Intel MLC access", run.access)
    if run.prefetchers_were_on:
        results.add_condition("tool Intel MLC prefetchers", "could not be switched off")
    return results.build_samples()


def _list_values(matrix: MlcMatrix) -> Iterator[tuple[int, int, float]]:
    for node, row in zip(matrix.rows, matrix.cells, strict=True):
        for peer, value in zip(matrix.columns, row, strict=True):
            if value is not None:
                yield node, peer, value


OUTPUT = ToolOutput(
    "Intel MLC",
    re.compile(r"^Intel\(R\) Memory Latency Checker|^Measuring idle lat", re.M),
    read_from_text(parse, read_mlc_results),
)
