"""The table of nccl-tests and rccl-tests: see nccl_tests for the tools.

#       size         count      type   redop    root     time   algbw   busbw  #wrong     time ...
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us) ...
  1073741824     268435456     float     sum      -1  4012.30  267.61  468.32       0  4009.80 ...
# Avg bus bandwidth    : 248.724
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.tools.figures import count, figure, figure_or_none
from homenode.machine.tools.nccl_tests_records import (
    MAX_ROWS,
    SOURCE,
    Family,
    NcclHalf,
    NcclRank,
    NcclRow,
    NcclTests,
)

PARAMETERS_LINE = re.compile(r"# nThread (\d+) nGpus (\d+) .*", re.ASCII)
"""Opens every run, but for lines with the version."""

_VERSION = re.compile(r"# nccl-tests version (\S+)(?: nccl-headers=\S+ nccl-library=(\S+))?")
_RCCL_VERSION = re.compile(r"(?:# )?rccl-tests: Version (\S+)", re.ASCII)
_STARTING = re.compile(r"# Collective test starting: (\w+?)(?:_perf)?", re.ASCII)
_RANK = re.compile(
    r"#\s+Rank\s+(\d+) (?:Group\s+\d+ )?Pid\s+\d+ on\s+(\S+) device\s+(\d+) \[([0-9a-fA-Fx:.]+)\] "
    r"(.+)",
    re.ASCII,
)
_PARAMETER = re.compile(r"(warmup iters|agg iters|iters): (\d+)", re.ASCII)
_OUT_OF_BOUNDS = re.compile(r"# Out of bounds values : (\d+) (OK|FAILED|.*)", re.ASCII)
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*+: (\S++).*", re.ASCII)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:\.\d+)?", re.ASCII)
_LIBRARY_LOG = re.compile(r".*\b(?:NCCL|RCCL) (?:INFO|WARN|TRACE|version)\b.*")
_LEFT = ("size", "count", "type", "redop")
_HALF = ("time", "algbw", "busbw")
_WRONG = ("#wrong", "error", "wrong")


class _Columns(Struct, frozen=True):
    """What the header promises. half: names of one half's columns; halves: 1 or 2."""

    has_root: bool
    half: tuple[str, ...]
    halves: int


def parse_text(text: str) -> NcclTests:
    """The one run of an output. Raises ParseError."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), start=1):
        reader.read(line.rstrip(), number)
    return reader.run()


class _Reader:
    """The run so far."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.family = Family.NCCL
        self.hosts: list[str] = []
        self.ranks: list[NcclRank] = []
        self.columns: _Columns | None = None
        self.rows: list[NcclRow] = []
        self.gaps: list[Gap] = []

    def read(self, line: str, number: int) -> None:
        if found := PARAMETERS_LINE.fullmatch(line):
            self._keep("gpus", str(int(found[1]) * int(found[2])) if _small(found) else "", number)
            for name, value in _PARAMETER.findall(line):
                self._keep(name, value, number)
        elif found := _RCCL_VERSION.fullmatch(line.strip()):
            self.family = Family.RCCL
            self._keep("version", found[1], number)
        elif found := _VERSION.fullmatch(line):
            self._keep("version", found[1], number)
            if found[2] is not None:
                self._keep("library", found[2], number)
        elif found := _STARTING.fullmatch(line):
            self._keep("collective", found[1], number)
        elif found := _RANK.fullmatch(line):
            self._rank(found, number)
        elif found := _OUT_OF_BOUNDS.fullmatch(line):
            self._keep("out of bounds", found[1], number)
        elif found := _AVERAGE.fullmatch(line):
            self._keep("average", found[1], number)
        elif line.startswith("#"):
            self._comment(line, number)
        elif line.strip() and not _LIBRARY_LOG.fullmatch(line):
            self._row(line, number)

    def _comment(self, line: str, number: int) -> None:
        words = line.lstrip("#").split()
        if tuple(words[:4]) == _LEFT:
            if self.columns is not None:
                raise ParseError(SOURCE, "one table", line, line=number)
            self.columns = _header(words[4:], line, number)
        # Everything else behind a "#" explains: units, titles, "# Using devices".

    def _row(self, line: str, number: int) -> None:
        words = line.split()
        is_row = len(words) > 4 and words[0].isdigit() and words[1].isdigit()
        if self.columns is None or not is_row:
            # Launchers, numactl and the library's last error write between the rows.
            self.gaps.append(Gap(f"{SOURCE} line {number}", f"not known: {line.strip()[:80]!r}"))
            return
        self.rows.append(_parse_row(words, self.columns, number))
        if len(self.rows) > MAX_ROWS:
            raise ParseError(SOURCE, f"at most {MAX_ROWS} rows", line, line=number)

    def _rank(self, found: "re.Match[str]", number: int) -> None:
        if found[2] not in self.hosts:
            self.hosts.append(found[2])
        self.ranks.append(
            NcclRank(
                count(found[1], SOURCE, "a rank", number),
                self.hosts.index(found[2]),
                count(found[3], SOURCE, "a device", number),
                address_of(found[4], number),
                found[5].strip(),
            )
        )
        if len(self.ranks) > MAX_ROWS:
            raise ParseError(SOURCE, f"at most {MAX_ROWS} ranks", found[0], line=number)

    def _keep(self, name: str, value: str, number: int) -> None:
        if self.facts.setdefault(name, value) != value or not value:
            raise ParseError(SOURCE, f"one value of {name!r}", value, line=number)

    def run(self) -> NcclTests:
        if not self.rows:
            raise ParseError(
                SOURCE,
                "a table of sizes",
                "none",
                hint=self.gaps[-1].reason if self.gaps else "the run ended before it measured",
            )
        average = self.facts.get("average")
        if average is None:
            self.gaps.append(Gap(SOURCE, "no average at the end: the run ended early"))
        return NcclTests(
            self.family,
            self.facts.get("version"),
            self.facts.get("library"),
            self.facts.get("collective"),
            _number(self.facts.get("gpus")),
            _number(self.facts.get("warmup iters")),
            _number(self.facts.get("iters")),
            tuple(self.ranks),
            tuple(self.rows),
            is_correct(self.rows, _number(self.facts.get("out of bounds"))),
            None if average is None else _rate(average, None),
            tuple(self.gaps),
        )


def is_correct(rows: Sequence[NcclRow], out_of_bounds: int | None) -> bool | None:
    """Whether the data were checked and right. "0 OK" stands there without a check too."""
    wrongs = [half.wrong for row in rows for half in row.halves() if half.wrong is not None]
    if any(wrongs) or out_of_bounds:
        return False
    return True if wrongs else None


def address_of(text: str, number: int | None = None) -> Bdf | None:
    """0000:19:00 or 0000:11:00.0; None for the number of old versions, 0x19."""
    if text.startswith("0x"):
        return None
    where = SOURCE if number is None else f"{SOURCE}:{number}"
    return Bdf.parse(text if "." in text else f"{text}.0", where)


def _small(found: "re.Match[str]") -> bool:
    return len(found[1]) < 6 and len(found[2]) < 6


def _number(text: str | None) -> int | None:
    return None if text is None else count(text, SOURCE, "a whole number")


def _header(words: list[str], line: str, number: int) -> _Columns:
    has_root = words[:1] == ["root"]
    words = words[1:] if has_root else words
    halves = words.count("time")
    length = words.index("time", 1) if halves == 2 else len(words)
    half = tuple(words[:length])
    repeated = tuple(words[length : 2 * length]) == half
    if half[:3] != _HALF or halves > 2 or (halves == 2 and not repeated):
        raise ParseError(SOURCE, "columns time, algbw, busbw, once or twice", line, line=number)
    half = tuple(word for word in half if not word.startswith("timestamp"))
    return _Columns(has_root, half, halves)


def _parse_row(words: list[str], columns: _Columns, number: int) -> NcclRow:
    words = [word for word in words if not _TIMESTAMP.fullmatch(word)]
    left = 5 if columns.has_root else 4
    width = len(columns.half)
    figures = words[left:]
    # A half that was not run is blank: out of place when in place alone was asked for.
    if len(figures) == width:
        halves = [None, _half(figures, columns.half, number)]
    elif len(figures) == 2 * width and columns.halves == 2:
        halves = [
            _half(figures[:width], columns.half, number),
            _half(figures[width:], columns.half, number),
        ]
    else:
        expected = f"{left} and {columns.halves} x {width} columns"
        raise ParseError(SOURCE, expected, " ".join(words), line=number)
    root = words[4] if columns.has_root else "-1"
    return NcclRow(
        count(words[0], SOURCE, "a size", number),
        count(words[1], SOURCE, "a count", number),
        words[2],
        words[3],
        None if root == "-1" else count(root, SOURCE, "a root", number),
        halves[0],
        halves[1],
    )


def _half(words: Sequence[str], names: Sequence[str], number: int) -> NcclHalf:
    wrong = next((w for w, name in zip(words, names, strict=True) if name in _WRONG), "N/A")
    found = figure_or_none(wrong.rstrip("*"), SOURCE, "a number of wrong values", number)
    return NcclHalf(
        figure(words[0].rstrip("*"), SOURCE, "a time in us", number) * 1e3,
        _rate(words[1], number),
        _rate(words[2], number),
        None if found is None else int(found),
    )


def _rate(word: str, number: int | None) -> float:
    return figure(word.rstrip("*"), SOURCE, "a bandwidth in GB/s", number) * 1e9
