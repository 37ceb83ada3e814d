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
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure_or_none

COMMAND = ("TransferBench", "p2p")
MAX_DEVICES = 1024

_SOURCE = "TransferBench"
_VERSION = re.compile(r"TransferBench v(\S{1,20})", re.ASCII)
_TITLE = re.compile(
    r"(Uni|Bi)directional copy peak bandwidth GB/s \[(Local|Remote) read / (?:Local|Remote) write\]"
    r"(?: \(GPU-Executor: (\w+)\))?",
    re.ASCII,
)
_HEADER = re.compile(r"SRC(?:\+EXE)?\\(?:EXE\+)?DST((?:[ ,]+[CG]PU \d+)+),?", re.ASCII)
_DEVICE = re.compile(r"([CG]PU) (\d+)", re.ASCII)
_ROW = re.compile(r"([CG]PU) (\d+)\s+(->|<-|<->|min|max|sd)([ ,].*)", re.ASCII)
_ENDS = re.compile(r"[CG]PU->[CG]PU.*|Averages \(During .*")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A NUMA node's memory, or a GPU by HIP's number."""

    is_gpu: bool
    index: int


@dataclass(frozen=True, slots=True)
class TransferCell:
    """One copy. is_bidirectional: while the way back is busy too. bytes_per_s: one way's."""

    source: Place
    destination: Place
    is_bidirectional: bool
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TransferBench:
    """executor: "GFX" (threads of a GPU) or "DMA" (its engines); None where not said."""

    version: str | None
    executor: str | None
    reads_remotely: bool
    cells: tuple[TransferCell, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> TransferBench:
    """The p2p run of an output. Raises ParseError."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(line.strip(), number)
    return reader.run()


class _Reader:
    """The run so far. What stands outside matrices is settings, and is skipped."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.executor: str | None = None
        self.reads_remotely = False
        self.is_bidirectional: bool | None = None
        self.columns: tuple[Place, ...] = ()
        self.cells: dict[tuple[Place, Place, bool], TransferCell] = {}
        self.rows: list[Place] = []
        self.gaps: list[Gap] = []

    def read(self, line: str, number: int) -> None:
        if found := _VERSION.match(line):
            self.version = found[1]
        elif found := _TITLE.fullmatch(line):
            self._close(number)
            self.is_bidirectional = found[1] == "Bi"
            self.reads_remotely = found[2] == "Remote"
            self.executor = found[3]
        elif self.is_bidirectional is None or not line:
            return
        elif found := _HEADER.fullmatch(line):
            self._header(found[1], line, number)
        elif found := _ROW.fullmatch(line):
            self._row(found, number)
        elif not _ENDS.fullmatch(line):
            self.gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))

    def _header(self, text: str, line: str, number: int) -> None:
        columns = tuple(_place(kind, index, number) for kind, index in _DEVICE.findall(text))
        if self.columns or len(set(columns)) != len(columns) or len(columns) > MAX_DEVICES:
            raise ParseError(_SOURCE, "one row of devices, each once", line, line=number)
        self.columns = columns

    def _row(self, found: "re.Match[str]", number: int) -> None:
        source, way = _place(found[1], found[2], number), found[3]
        words = found[4].replace(",", " ").split()
        if len(words) != len(self.columns) or source not in self.columns:
            expected = f"a device of the header and {len(self.columns)} values"
            raise ParseError(_SOURCE, expected, found[0], line=number)
        if way not in ("->", "<-"):
            return
        if way == "->":
            self.rows.append(source)
        for place, word in zip(self.columns, words, strict=True):
            value = figure_or_none(word, _SOURCE, "a bandwidth or N/A", number)
            if value and way == "->":
                self._cell(source, place, value, number)
            # The way back of a pair is the way there of the pair turned round, measured again.

    def _cell(self, source: Place, place: Place, value: float, number: int) -> None:
        key = (source, place, bool(self.is_bidirectional))
        if key in self.cells:
            raise ParseError(_SOURCE, "each pair once", f"{source} to {place} twice", line=number)
        self.cells[key] = TransferCell(*key, value * 1e9)

    def _close(self, number: int | None = None) -> None:
        if self.columns and sorted(self.rows) != sorted(self.columns):
            raise ParseError(
                _SOURCE,
                f"{len(self.columns)} rows, each device once",
                f"{len(self.rows)} rows",
                line=number,
            )
        self.columns, self.rows = (), []

    def run(self) -> TransferBench:
        self._close()
        if not self.cells:
            expected = "a matrix 'Unidirectional copy peak bandwidth GB/s [...]'"
            raise ParseError(_SOURCE, expected, "none")
        return TransferBench(
            self.version,
            self.executor,
            self.reads_remotely,
            tuple(self.cells.values()),
            tuple(self.gaps),
        )


def _place(kind: str, number: str, line: int) -> Place:
    return Place(kind == "GPU", count(number, _SOURCE, "a device", line))
