"""TransferBench: copies between nodes and AMD GPUs.

    TransferBench p2p

Seen of no real output: the format is that of PeerToPeer.hpp of the client, 1.5x to 1.6x.

    Unidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: GFX)
     SRC+EXE\\DST    CPU 00    CPU 01       GPU 00    GPU 01
      CPU 00  ->     24.37     24.62        22.34     22.25

* Rows are sources. "CPU" is a NUMA node, by its number; "GPU" is HIP's number: no address.
* Both ways has three rows of a source: -> the way there, <- the way back, <-> their sum.
* Where the source is a CPU its threads copy (4 of them), not the GPU's engine: slow, and so said.
* With SHOW_ITERATIONS there are rows min, max and sd; with OUTPUT_TO_CSV commas.
* GB/s are 10^9 bytes per second.
"""

import re

from msgspec import Struct

from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines

COMMAND = ("TransferBench", "p2p")
MAX_DEVICES = 1024

_SOURCE = "TransferBench"
_VERSION = re.compile(r"TransferBench v(\S{1,20}).*", re.ASCII)
_TITLE = re.compile(
    r"(Uni|Bi)directional copy peak bandwidth GB/s \[(Local|Remote) read / (?:Local|Remote) write\]"
    r"(?: \(GPU-Executor: (\w+)\))?",
    re.ASCII,
)
_HEADER = re.compile(r"SRC(?:\+EXE)?\\(?:EXE\+)?DST((?:[ ,]+[CG]PU \d+)+),?", re.ASCII)
_DEVICE = re.compile(r"([CG]PU) (\d+)", re.ASCII)
_ROW = re.compile(r"([CG]PU) (\d+)\s+(->|<-|<->|min|max|sd)([ ,].*)", re.ASCII)
_ANYTHING = re.compile(r".*")
_ENDS = re.compile(r"[CG]PU->[CG]PU.*|Averages \(During .*")


class TransferPlace(Struct, frozen=True, kw_only=True, order=True):
    """A NUMA node's memory, or a GPU by HIP's number."""

    is_gpu: bool
    index: int


class TransferCell(Struct, frozen=True, kw_only=True):
    """One copy."""

    source: TransferPlace
    destination: TransferPlace
    is_bidirectional: bool  # while the way back is busy too
    bytes_per_s: float  # one way's


class TransferBench(Struct, frozen=True, kw_only=True):
    """The output of TransferBench."""

    version: str | None
    executor: str | None  # "GFX" (threads of a GPU) or "DMA" (its engines); None where not said
    reads_remotely: bool
    cells: tuple[TransferCell, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> TransferBench:
    """The p2p run of an output. Raises ParseError."""
    return _Reader(text).run()


class _Reader:
    """The run so far. What stands outside matrices is settings, and is skipped."""

    def __init__(self, text: str) -> None:
        self.version: str | None = None
        self.executor: str | None = None
        self.reads_remotely = False
        self.is_bidirectional: bool | None = None
        self.columns: tuple[TransferPlace, ...] = ()
        self.cells: dict[tuple[TransferPlace, TransferPlace, bool], TransferCell] = {}
        self.rows: list[TransferPlace] = []
        self.lines = Lines(text, _SOURCE)
        self.lines.read(
            [
                (_VERSION, self._version),
                (_TITLE, self._title),
                (_ANYTHING, self._outside),
                (_HEADER, self._header),
                (_ROW, self._row),
                (_ENDS, None),
            ]
        )
        self._close_matrix()

    def _version(self, line: Line, match: "re.Match[str]") -> None:
        self.version = match[1]

    def _title(self, line: Line, match: "re.Match[str]") -> None:
        self._close_matrix()
        self.is_bidirectional = match[1] == "Bi"
        self.reads_remotely = match[2] == "Remote"
        self.executor = match[3]

    def _outside(self, line: Line, match: "re.Match[str]") -> bool:
        return self.is_bidirectional is None

    def _header(self, line: Line, match: "re.Match[str]") -> None:
        columns = tuple(_place(line, *device) for device in _DEVICE.findall(match[1]))
        if self.columns or len(set(columns)) != len(columns) or len(columns) > MAX_DEVICES:
            raise line.error("one row of devices, each once")
        self.columns = columns

    def _row(self, line: Line, match: "re.Match[str]") -> None:
        source, way = _place(line, match[1], match[2]), match[3]
        words = match[4].replace(",", " ").split()
        if len(words) != len(self.columns) or source not in self.columns:
            raise line.error(f"a device of the header and {len(self.columns)} values")
        if way == "->":
            self.rows.append(source)
        # The way back of a pair is the way there of the pair turned round, measured again.
        for place, word in zip(self.columns, words, strict=True):
            if way not in ("->", "<-"):
                break
            value = line.figure_or_none(word, "a bandwidth or N/A", 1e9)
            if value and way == "->":
                self._cell(line, source, place, value)

    def _cell(
        self, line: Line, source: TransferPlace, place: TransferPlace, bytes_per_s: float
    ) -> None:
        key = (source, place, bool(self.is_bidirectional))
        if key in self.cells:
            raise line.error("each pair once", f"{source} to {place} twice")
        self.cells[key] = TransferCell(
            source=source,
            destination=place,
            is_bidirectional=key[2],
            bytes_per_s=bytes_per_s,
        )

    def _close_matrix(self) -> None:
        if self.columns and sorted(self.rows) != sorted(self.columns):
            expected = f"{len(self.columns)} rows, each device once"
            raise self.lines.error(expected, f"{len(self.rows)} rows")
        self.columns, self.rows = (), []

    def run(self) -> TransferBench:
        if not self.cells:
            raise self.lines.error("a matrix 'Unidirectional copy peak bandwidth GB/s [...]'")
        return TransferBench(
            version=self.version,
            executor=self.executor,
            reads_remotely=self.reads_remotely,
            cells=tuple(self.cells.values()),
            gaps=tuple(self.lines.gaps),
        )


def _place(line: Line, kind: str, number: str) -> TransferPlace:
    return TransferPlace(is_gpu=kind == "GPU", index=line.read_count(number, "a device"))
