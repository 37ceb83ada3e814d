"""nccl-tests and rccl-tests: collectives over message sizes.

    all_reduce_perf -b 8 -e 8G -f 2 -g 8 -w 10 -n 100 [-J out.json]

#       size         count      type   redop    root     time   algbw   busbw  #wrong     time ...
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us) ...
  1073741824     268435456     float     sum      -1  4012.30  267.61  468.32       0  4009.80 ...
# Avg bus bandwidth    : 248.724

Seen of nccl-tests 2.0 to 2.19.6 and rccl-tests ae3e635; JSON of versions 1 to 3 (-J, since 2.17.3).
Source: src/common.cu and src/util.cu of both.

* The columns are time, algbw, busbw and #wrong, out of place and in place. Bus bandwidth is
comparable across numbers of GPUs; algorithm bandwidth precedes it.
* There was no root column before 2.11, and a column "error" in place of "#wrong".
* -O 0 of rccl-tests prints one half; newer nccl-tests leave a half blank.
* "Avg bus bandwidth" is over all sizes, small ones included.
* The JSON holds the whole environment, secrets included: `env` and `args` are not read. A number
  may be the text "nan", and version 1 spells "bandwidith".
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import product
from typing import Annotated, Any

from msgspec import Meta, Struct

from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools.lines import Figure, Line, Lines, Whole, find_value, json_object
from homenode.units import parse_whole

SOURCE = "nccl-tests"
MAX_ROWS = 4096


class CollectiveLibrary(StrEnum):
    """Whose library was measured."""

    NCCL = "nccl"
    RCCL = "rccl"


class NcclHalf(Struct, frozen=True, kw_only=True):
    """One half of a row."""

    time_ns: float
    bus_bytes_per_s: float
    wrong: int | None  # elements that came out wrong; None if not checked


class NcclRow(Struct, frozen=True, kw_only=True):
    """A message size. A half that was not run is None."""

    size_bytes: int
    out_of_place: NcclHalf | None
    in_place: NcclHalf | None

    def list_halves(self) -> tuple[NcclHalf, ...]:
        """Return the halves that were run."""
        return tuple(half for half in (self.out_of_place, self.in_place) if half is not None)


class NcclTests(Struct, frozen=True, kw_only=True):
    """A run. None if the tool does not report it."""

    family: CollectiveLibrary = CollectiveLibrary.NCCL
    version: str | None = None
    library_version: str | None = None  # as NCCL numbers it (22809)
    collective: str | None = None  # "all_reduce" and so on
    gpus: int | None = None  # of all processes
    warmups: int | None = None  # warm-up runs of each size
    iterations: int | None = None  # measured runs of each size
    gpu_names: tuple[str, ...] = ()  # GPUs of the ranks; in JSON, of each process's first rank
    rows: tuple[NcclRow, ...]
    # whether all checked data were correct; None if not checked
    is_correct: bool | None
    average_bus_bytes_per_s: float | None  # the tool's own, over all sizes and halves
    gaps: tuple[Gap, ...] = ()

    def peak_bus_bytes_per_s(self) -> float:
        """Return the greatest of all sizes and halves."""
        return max(half.bus_bytes_per_s for row in self.rows for half in row.list_halves())


def build_argv(
    gpus: int, *, largest_bytes: int, warmups: int = 10, iterations: int = 100
) -> tuple[str, ...]:
    """Return the command of an all-reduce from 8 bytes up, doubling; data are checked."""
    options = f"-b 8 -e {largest_bytes} -f 2 -g {gpus} -w {warmups} -n {iterations} -c 1"
    return ("all_reduce_perf", *options.split())


def parse(text: str) -> NcclTests:
    """Return the one run of an output, text or the file of -J. Raises ParseError."""
    return _parse_json(text) if text.lstrip().startswith("{") else _Table(text).run()


PARAMETERS_LINE = re.compile(r"# nThread (\d+) nGpus (\d+) .*", re.ASCII)
"""Opens every run, but for lines with the version."""

_VERSION = re.compile(r"# nccl-tests version (\S+)(?: nccl-headers=\S+ nccl-library=(\S+))?")
_RCCL_VERSION = re.compile(r"\s*(?:# )?rccl-tests: Version (\S+)", re.ASCII)
_STARTING = re.compile(r"# Collective test starting: (\w+?)(?:_perf)?", re.ASCII)
_RANK = re.compile(
    r"#\s+Rank\s+\d+ (?:Group\s+\d+ )?Pid\s+\d+ on\s+\S+ device\s+\d+ \[[0-9a-fA-Fx:.]+\] "
    r"(.+)",
    re.ASCII,
)
_PARAMETER = re.compile(r"(warmup iters|agg iters|iters): (\d+)", re.ASCII)
_OUT_OF_BOUNDS = re.compile(r"# Out of bounds values : (\d+) .*", re.ASCII)
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*+: (\S++).*", re.ASCII)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:\.\d+)?", re.ASCII)
_LIBRARY_LOG = re.compile(r".*\b(?:NCCL|RCCL) (?:INFO|WARN|TRACE|version)\b.*")
_COMMENT = re.compile(r"#.*")
_ROW = re.compile(r".*")
_LEFT = ["size", "count", "type", "redop"]
_HALF = ("time", "algbw", "busbw")
_WRONG = ("#wrong", "error", "wrong")


class _Table:
    """The text of a run so far. left: columns before the first half. half: names of one half's
    columns; halves: 1 or 2."""

    def __init__(self, text: str) -> None:
        self.family = CollectiveLibrary.NCCL
        self.gpu_names: list[str] = []
        self.left = self.halves = 0
        self.half: tuple[str, ...] = ()
        self.rows: list[NcclRow] = []
        self.lines = Lines(text, SOURCE, stripped=False)
        self.lines.read(
            [
                (PARAMETERS_LINE, self._parse_parameters),
                (_RCCL_VERSION, self._parse_rccl),
                (_VERSION, self._parse_version),
                (_STARTING, "collective"),
                (_RANK, self._rank),
                (_OUT_OF_BOUNDS, "out of bounds"),
                (_AVERAGE, "average"),
                (_COMMENT, self._parse_comment),
                (_LIBRARY_LOG, None),
                # Launchers, numactl and the library's last error write between the rows.
                (_ROW, self._parse_row),
            ]
        )

    def _parse_parameters(self, line: Line, match: "re.Match[str]") -> None:
        gpus = line.read_count(match[1], "threads") * line.read_count(match[2], "GPUs")
        self.lines.keep_same("gpus", str(gpus), line)
        for name, value in _PARAMETER.findall(line.text):
            self.lines.keep_same(name, value, line)

    def _parse_rccl(self, line: Line, match: "re.Match[str]") -> None:
        self.family = CollectiveLibrary.RCCL
        self.lines.keep_same("version", match[1], line)

    def _parse_version(self, line: Line, match: "re.Match[str]") -> None:
        self.lines.keep_same("version", match[1], line)
        if match[2] is not None:
            self.lines.keep_same("library", match[2], line)

    def _rank(self, line: Line, match: "re.Match[str]") -> None:
        self.gpu_names.append(match[1].strip())
        if len(self.gpu_names) > MAX_ROWS:
            raise line.make_error(f"at most {MAX_ROWS} ranks")

    def _parse_comment(self, line: Line, match: "re.Match[str]") -> None:
        """Read the header; all else behind a "#" explains: units, titles, "# Using devices"."""
        words = line.text.lstrip("#").split()
        if words[:4] != _LEFT:
            return
        if self.half:
            raise line.make_error("one table")
        self.left = 5 if words[4:5] == ["root"] else 4
        words = words[self.left :]
        self.halves = words.count("time")
        length = words.index("time", 1) if self.halves == 2 else len(words)
        half = tuple(words[:length])
        repeated = tuple(words[length : 2 * length]) == half
        if half[:3] != _HALF or self.halves > 2 or (self.halves == 2 and not repeated):
            raise line.make_error("columns time, algbw, busbw, once or twice")
        self.half = tuple(word for word in half if not word.startswith("timestamp"))

    def _parse_row(self, line: Line, match: "re.Match[str]") -> bool:
        words = line.text.split()
        if not self.half or len(words) < 5 or None in map(parse_whole, words[:2]):
            return False
        words = [word for word in words if not _TIMESTAMP.fullmatch(word)]
        width = len(self.half)
        figures = words[self.left :]
        # A half that was not run is blank: out of place if only in place was requested.
        if len(figures) not in (width, 2 * width if self.halves == 2 else width):
            expected = f"{self.left} and {self.halves} x {width} columns"
            raise line.make_error(expected, " ".join(words))
        first = self._parse_half(line, figures[:width]) if len(figures) > width else None
        second = self._parse_half(line, figures[-width:])
        size = line.read_count(words[0], "a size")
        self.rows.append(NcclRow(size_bytes=size, out_of_place=first, in_place=second))
        if len(self.rows) > MAX_ROWS:
            raise line.make_error(f"at most {MAX_ROWS} rows")
        return True

    def _parse_half(self, line: Line, words: Sequence[str]) -> NcclHalf:
        wrong = next((w for w, name in zip(words, self.half, strict=True) if name in _WRONG), "N/A")
        wrong_count = line.value_or_none(wrong.rstrip("*"), "a number of wrong values")
        _parse_rate(line, words[1])
        return NcclHalf(
            time_ns=line.parse_number(words[0].rstrip("*"), "a time in us") * 1e3,
            bus_bytes_per_s=_parse_rate(line, words[2]),
            wrong=None if wrong_count is None else int(wrong_count),
        )

    def run(self) -> NcclTests:
        lines = self.lines
        if not self.rows:
            hint = lines.gaps[-1].reason if lines.gaps else "the run ended before it measured"
            raise lines.make_error("a table of sizes", hint=hint)
        average = lines.take_optional("average", _parse_rate, "a bandwidth in GB/s")
        if average is None:
            lines.gaps.append(Gap(SOURCE, "no average at the end: the run ended early"))
        out_of_bounds = lines.take_optional("out of bounds", Line.read_count, "a whole number")
        gpus = lines.take_optional("gpus", Line.read_count, "a whole number")
        return NcclTests(
            family=self.family,
            version=lines.take_optional("version", Line.read_word, "a version"),
            library_version=lines.take_optional("library", Line.read_word, "a version"),
            collective=lines.take_optional("collective", Line.read_word, "a collective"),
            # The line with the parameters is about one process; the ranks are of all.
            gpus=gpus if gpus is None else max(gpus, len(self.gpu_names)),
            warmups=lines.take_optional("warmup iters", Line.read_count, "a whole number"),
            iterations=lines.take_optional("iters", Line.read_count, "a whole number"),
            gpu_names=tuple(self.gpu_names),
            rows=tuple(self.rows),
            is_correct=_is_correct(self.rows, out_of_bounds),
            average_bus_bytes_per_s=average,
            gaps=tuple(lines.gaps),
        )


def _parse_rate(line: Line, word: str, expected: str = "a bandwidth in GB/s") -> float:
    return line.parse_number(word.rstrip("*"), expected) * 1e9


def _is_correct(rows: Sequence[NcclRow], out_of_bounds: int | None) -> bool | None:
    """Return whether the data were checked and correct. "0 OK" is printed without a check too."""
    wrongs = [half.wrong for row in rows for half in row.list_halves() if half.wrong is not None]
    if any(wrongs) or out_of_bounds:
        return False
    return True if wrongs else None


_KEYS = frozenset(
    """
    average_bus_bandwidith average_bus_bandwidth config errors nccl_version out_of_bounds results
    version start_time args env end_time
    """.split()
)
"""Keys that are known; args and env are not read: they hold the user's environment."""

_Nan = Annotated[str, Meta(pattern=r"^\s*-?[nN][aA][nN]\s*$")]
_FigureOrNan = Figure | _Nan | None


class _JsonHalf(Struct):
    alg_bw: Figure
    bus_bw: Figure
    time: Figure | None = None
    cpu_time: Figure | None = None
    nwrong: _FigureOrNan = None

    def half(self) -> NcclHalf:
        time_us = self.cpu_time if self.time is None else self.time
        if time_us is None:
            raise ParseError(SOURCE, "a time")
        wrong = int(self.nwrong) if isinstance(self.nwrong, float) else None
        return NcclHalf(time_ns=time_us * 1e3, bus_bytes_per_s=self.bus_bw * 1e9, wrong=wrong)


class _JsonRow(Struct):
    size: Whole
    out_of_place: _JsonHalf | None = None
    in_place: _JsonHalf | None = None
    experiment_name: str | None = None


def _parse_json(text: str) -> NcclTests:
    document = json_object(text, SOURCE, parse_constant=str)

    def read(path: str, kind: Any = Whole) -> Any:
        return find_value(document, path, kind, SOURCE)

    results: tuple[_JsonRow, ...] = read("results", tuple[_JsonRow, ...]) or ()
    if not 0 < len(results) <= MAX_ROWS:
        raise ParseError(SOURCE, f"1 to {MAX_ROWS} results", str(len(results)))
    rows = tuple(_convert_row(row) for row in results)
    threads, gpus, version = read("config/nthreads"), read("config/ngpus"), read("nccl_version")
    devices = read("config/devices", tuple[dict[str, Any], ...]) or ()
    errors = read("errors", tuple[Any, ...]) or ()
    name = results[0].experiment_name
    return NcclTests(
        library_version=None if version is None else str(version),
        collective=None if name is None else _COLLECTIVES.get(name, name.lower()[:40]),
        gpus=None if threads is None or gpus is None else threads * gpus * max(1, len(devices)),
        warmups=read("config/warmup_iters"),
        iterations=read("config/iterations"),
        gpu_names=tuple(str(device.get("device_info", ""))[:200].strip() for device in devices),
        rows=rows,
        is_correct=_is_correct(rows, read("out_of_bounds/count")),
        average_bus_bytes_per_s=_compute_average(document),
        gaps=(
            *(Gap(SOURCE, f"key not known: {key[:80]!r}") for key in sorted({*document} - _KEYS)),
            *(Gap(SOURCE, f"error: {str(error)[:200]}") for error in errors[:16]),
        ),
    )


def _convert_row(row: _JsonRow) -> NcclRow:
    if row.out_of_place is None and row.in_place is None:
        raise ParseError(SOURCE, "a result out of place or in place")
    first, second = (
        None if half is None else half.half() for half in (row.out_of_place, row.in_place)
    )
    return NcclRow(size_bytes=row.size, out_of_place=first, in_place=second)


def _compute_average(document: dict[str, Any]) -> float | None:
    for key, name in product(("average_bus_bandwidth", "average_bus_bandwidith"), _SPELLINGS):
        value = find_value(document, f"{key}/{name}", _FigureOrNan, SOURCE)
        if value is not None:
            return value * 1e9 if isinstance(value, float) else None
    return None


_SPELLINGS = ("bandwidth", "bandwidith")
_COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AlltoAll": "alltoall",
    "AlltoAllv": "alltoallv",
    "SendRecv": "sendrecv",
    "HyperCube": "hypercube",
}
