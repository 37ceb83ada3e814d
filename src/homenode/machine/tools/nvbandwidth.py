"""nvbandwidth: copies and latencies between host and GPUs, as matrices.

    nvbandwidth -j -t host_to_device_memcpy_ce device_to_host_memcpy_ce

    Running host_to_device_memcpy_ce.
    memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
               0         1
     0     55.31     55.29

    SUM host_to_device_memcpy_ce 110.60

    {"nvbandwidth" : {"testcases" : [ {"name" : ..., "status" : "Passed",
                                       "bandwidth_matrix" : [["55.31", "N/A"]]} ]

Seen of v0.5 to v0.10, text and JSON; JSON is there since v0.5. Source: nvbandwidth.cpp, output.cpp
and json_output.cpp of v0.8; public logs of v0.6 and v0.10.

* The exit status is 0 even when tests fail: look at each test's status.
* Rows are CPUs (one row: the CPU that the process runs on) or GPUs; columns are GPUs.
* A cell of the diagonal is N/A, absent here. Because of it the tool's own minimum is 0: not used.
* Cells of JSON are texts with six significant digits.
* Both ways at once between GPUs are three matrices (one direction, the other, both together). In
  JSON they are one matrix of three times the rows, whose description and sum are the total's.
* In text a waived test has no name.
* In JSON an error is a second entry of the same test, after one that says "Running".
* -h and -l ignore -j; a second document may follow the first; warnings of drivers surround them.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines, json_objects, record

SOURCE = "nvbandwidth"
MAX_DEVICES = 1024
MAX_TESTS = 2000

_TWO_WAYS = ("read1", "read2", "total")
"""Parts of a test that copies both ways between GPUs; write1 and write2 for writing."""


class Status(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    WAIVED = "waived"  # not possible here: no second GPU, no peer access
    FAILED = "failed"
    INCOMPLETE = "incomplete"  # began, and no result followed


class Unit(StrEnum):
    """Of the cells of a matrix, as stored here: GB/s of the tool are 10^9."""

    BYTES_PER_S = "bytes/s"
    NS = "ns"


class NvbandwidthDevice(Struct, frozen=True):
    """One GPU of the run's list. index: CUDA's number, its column. address: None in v0.5."""

    index: int
    name: str
    address: Bdf | None


class NvbandwidthMatrix(Struct, frozen=True):
    """cells: shape (rows, columns), [from or CPU][GPU]; None where N/A.

    part: which of a test's matrices, one of read1, read2, write1, write2 and total, or None where
    the test has one.
    """

    part: str | None
    unit: Unit
    cells: tuple[tuple[float | None, ...], ...]

    @property
    def columns(self) -> int:
        return len(self.cells[0])

    def values(self) -> tuple[float, ...]:
        """Those that are there, row by row."""
        return tuple(cell for row in self.cells for cell in row if cell is not None)


class NvbandwidthTest(Struct, frozen=True):
    """name: the tool's; None for a waived one of a text. threads: (GPU's number, NUMA node) of the
    thread that copied, where the log has lines about it."""

    name: str | None
    status: Status
    matrices: tuple[NvbandwidthMatrix, ...] = ()
    threads: tuple[tuple[int, int], ...] = ()


class NvbandwidthRun(Struct, frozen=True, kw_only=True):
    """One run. Versions as printed; None where not said. devices: v0.10 prints none.

    errors: what the tool said went wrong, at any place of its output.
    """

    version: str | None
    driver_version: str | None
    devices: tuple[NvbandwidthDevice, ...]
    tests: tuple[NvbandwidthTest, ...]
    errors: tuple[str, ...]
    gaps: tuple[Gap, ...]

    def test(self, name: str) -> NvbandwidthTest | None:
        """The test of that name; None where it was not run."""
        return next((test for test in self.tests if test.name == name), None)


def argv(tests: Iterable[str] = (), *, samples: int | None = None) -> tuple[str, ...]:
    """The command: all tests, or those named; JSON."""
    names = tuple(tests)
    chosen = ("-t", *names) if names else ()
    repeats = () if samples is None else ("-i", str(samples))
    return ("nvbandwidth", "-j", *repeats, *chosen)


def parse(text: str) -> NvbandwidthRun:
    """The one run of an output, text or JSON: its content decides. Raises ParseError.

    What stands before the version of a text is skipped; one without a version is read for its
    tables alone. JSON documents that follow each other are one run.
    """
    if any(line.strip() == "{" for line in text.split("\n")):
        return _parse_json(text)
    lines = text.split("\n")
    is_bare = not any(VERSION_LINE.fullmatch(line.rstrip()) for line in lines)
    is_bare = is_bare and any(TABLE_LINE.fullmatch(line.strip()) for line in lines)
    return _Text(text, is_bare).run()


def _unit_of(line: Line, description: str) -> Unit:
    """The unit that a matrix' description ends with. Raises ParseError."""
    for ending, unit in (("(GB/s)", Unit.BYTES_PER_S), ("(ns)", Unit.NS)):
        if description.rstrip().endswith(ending):
            return unit
    raise line.error("a description ending in (GB/s) or (ns)", description)


_SCALES = {Unit.BYTES_PER_S: 1e9, Unit.NS: 1.0}
"""What a printed number is multiplied with."""


def _bdf_of(text: str, line: Line) -> Bdf:
    """A GPU's address, printed without its function: 00000009:01:00."""
    where = SOURCE if line.number is None else f"{SOURCE}:{line.number}"
    return Bdf.parse(text if "." in text else f"{text}.0", where)


def _merged(tests: Iterable[NvbandwidthTest]) -> tuple[NvbandwidthTest, ...]:
    """Each named test once: the entry of an error replaces the one that says it began.

    Two results of one name are refused by the readers; unnamed tests all stay.
    """
    kept: list[NvbandwidthTest] = []
    for test in tests:
        if len(kept) == MAX_TESTS:
            raise ParseError(SOURCE, f"at most {MAX_TESTS} tests", "more")
        same = next((n for n, t in enumerate(kept) if t.name == test.name is not None), None)
        if same is None:
            kept.append(test)
        elif kept[same].status is Status.INCOMPLETE:
            kept[same] = test
        elif test.status is Status.FAILED:
            kept[same] = replace(kept[same], status=Status.FAILED)
        else:
            raise ParseError(SOURCE, "each test once", str(test.name))
    return tuple(kept)


VERSION_LINE = re.compile(r"nvbandwidth Version: (\S+)", re.ASCII)
"""Opens every run."""

TABLE_LINE = re.compile(r"memcpy [^\n]{0,60}\(row\)[^\n]{0,40}\(column\)[^\n]{0,40}\(GB/s\)")
"""Above every table of bandwidths; all that is left where somebody pasted a table alone."""

_TESTS_OF_TABLES = {
    "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)": "host_to_device_memcpy_ce",
    "memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)": "device_to_host_memcpy_ce",
}
_THREAD = re.compile(
    r"Thread of device (\d{1,5}) running on CPU: \d{1,6}, NUMA node: (\d{1,5})", re.ASCII
)
"""Added to the tool by those who look where it copies from. Source: a KubeVirt article of 2025."""

_RUNNING = re.compile(r"Running (\w{1,80})\.", re.ASCII)
_DESCRIPTION = re.compile(r".* (?:\(GB/s\)|\(ns\))")
_SUM = re.compile(r"([A-Z][A-Z_]*) (\w{1,100}) (\S+)", re.ASCII)
_PERF = re.compile(r"&&&& PERF (\w{1,100}) (\S+) (\S+)", re.ASCII)
_SAMPLE = re.compile(r"\s*Sample \d+: .*", re.ASCII)
_DEVICE = re.compile(r"Device (\d+): (.+?)(?: \(([0-9a-fA-F:.]+)\))?(?::.*)?", re.ASCII | re.DOTALL)
_DRIVER = re.compile(r"Driver Version: (\S+)", re.ASCII)
_PART = re.compile(r"\b(Read1|Read2|Write1|Write2|Total) bandwidth", re.ASCII)
_ERROR = re.compile(r"(?:ERROR|Error|\[?CUDA_ERROR|\[?NVML_ERROR|.*\bfailed\b).*")
_SAYS_NOTHING = re.compile(
    r"(?:Built from Git version:|CUDA Runtime Version:|CUDA Driver Version|Process |"
    r"NOTE: The reported results|Performance can vary with|NOTE: This tool).*"
)
_ANYTHING = re.compile(r".*")
_WAIVED = re.compile(r"Waived:(.*)")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)
# Of sums printed with two decimals: half a unit in the last place for each cell and for the sum.
_ROUNDING = 0.005


class _Open(Struct):
    """The test that is being read. unit: of its open matrix, None where none is."""

    name: str
    matrices: list[NvbandwidthMatrix] = field(default_factory=list)
    unit: Unit | None = None
    part: str | None = None
    columns: int = 0
    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    has_failed: bool = False
    threads: list[tuple[int, int]] = field(default_factory=list)

    def end_matrix(self) -> None:
        if self.unit is None:
            return
        if not self.rows:
            raise ParseError(SOURCE, f"rows of {self.name}", "none")
        self.matrices.append(NvbandwidthMatrix(self.part, self.unit, tuple(self.rows)))
        self.unit, self.columns, self.rows = None, 0, []

    def test(self) -> NvbandwidthTest:
        self.end_matrix()
        status = Status.PASSED if self.matrices else Status.INCOMPLETE
        status = Status.FAILED if self.has_failed else status
        return NvbandwidthTest(self.name, status, tuple(self.matrices), tuple(self.threads))


class _Text:
    """The text of a run so far, and the test that is open."""

    def __init__(self, text: str, is_bare: bool) -> None:
        self.is_bare = is_bare
        self.version: str | None = None
        self.driver: str | None = None
        self.devices: list[NvbandwidthDevice] = []
        self.tests: list[NvbandwidthTest] = []
        self.errors: list[str] = []
        self.open: _Open | None = None
        self.lines = Lines(text, SOURCE, stripped=False, blank=True)
        self.lines.read(
            [
                (VERSION_LINE, self._version),
                (_ANYTHING, self._before),
                (_RUNNING, self._running),
                (_WAIVED, self._waived),
                (_SAMPLE, self._inside),
                (_THREAD, self._thread),
                (_SUM, self._sum),
                (_PERF, self._sum),
                (_DESCRIPTION, self._description),
                (_ANYTHING, self._row),
                (_ANYTHING, self._other),
                (_DEVICE, self._device),
                (_DRIVER, self._driver),
                (_ERROR, self._error),
                (_HOST_NAME, self._host_name),
                (_SAYS_NOTHING, None),
            ]
        )

    def _version(self, line: Line, found: "re.Match[str]") -> None:
        if self.version is not None:
            raise line.error("one run")
        self.version = found[1]

    def _before(self, line: Line, found: "re.Match[str]") -> bool:
        """Whether a line is blank, or stands before the version: it ends the rows of a matrix;
        another one may follow within the test."""
        is_before = self.version is None and not self.is_bare
        if is_before or not line.text:
            if self.open is not None and self.open.rows:
                self.open.end_matrix()
            return True
        return False

    def _running(self, line: Line, found: "re.Match[str]") -> None:
        self._close()
        self.open = _Open(found[1])

    def _waived(self, line: Line, found: "re.Match[str]") -> None:
        self._close()
        self.tests.append(NvbandwidthTest(found[1].strip() or None, Status.WAIVED))

    def _inside(self, line: Line, found: "re.Match[str]") -> bool:
        return self.open is not None

    def _thread(self, line: Line, found: "re.Match[str]") -> bool:
        if self.open is not None:
            self.open.threads.append((int(found[1]), int(found[2])))
        return self.open is not None

    def _sum(self, line: Line, found: "re.Match[str]") -> bool:
        if self.open is None:
            return False
        self.open.end_matrix()
        if found[1] == "SUM":
            self._check_sum(self.open, found, line)
        return True

    def _check_sum(self, test: _Open, found: "re.Match[str]", line: Line) -> None:
        """A sum that is not that of the cells: the text was damaged, or means something else."""
        total = line.figure_or_none(found[3], "a sum")
        if total is None or not test.matrices:
            return
        matrix = test.matrices[-1]
        values = matrix.values()
        own = sum(values) / _SCALES[matrix.unit]
        if abs(own - total) > _ROUNDING * (len(values) + 1) + 1e-9 * own:
            reason = f"the tool says {found[3]}, its cells add up to {own:.2f}"
            self.lines.gaps.append(Gap(f"sum of {found[2]}", reason))

    def _description(self, line: Line, found: "re.Match[str]") -> bool:
        if self.open is None and self.is_bare:
            name = _TESTS_OF_TABLES.get(line.text.strip())
            self.open = None if name is None else _Open(name)
        if self.open is None:
            return False
        self.open.end_matrix()
        part = _PART.search(line.text)
        self.open.part = None if part is None else part[1].lower()
        self.open.unit = _unit_of(line, line.text)
        return True

    def _row(self, line: Line, found: "re.Match[str]") -> bool:
        test, words = self.open, line.text.split()
        if test is None or test.unit is None:
            return False
        if not test.columns:
            # Forums and chats drop the blanks in front.
            is_header = line.text[:1].isspace() or words == [*map(str, range(len(words)))]
            if not 0 < len(words) <= MAX_DEVICES or not is_header:
                raise line.error("a row of GPU numbers")
            test.columns = len(words)
            return True
        # Before the cells stands a number, or a host and a number.
        if len(words) <= test.columns:
            raise line.error(f"a row number and {test.columns} cells")
        scale = _SCALES[test.unit]
        cells = words[-test.columns :]
        test.rows.append(
            tuple(line.figure_or_none(word, "a number or N/A", scale) for word in cells)
        )
        if len(test.rows) > MAX_DEVICES:
            raise line.error(f"at most {MAX_DEVICES} rows")
        return True

    def _other(self, line: Line, found: "re.Match[str]") -> bool:
        """Whether a line says nothing: around tables that stand alone, all that is none of them."""
        return self.is_bare

    def _device(self, line: Line, found: "re.Match[str]") -> None:
        index = line.whole(found[1], "a device")
        address = None if found[3] is None else _bdf_of(found[3], line)
        self.devices.append(NvbandwidthDevice(index, found[2].strip(), address))

    def _driver(self, line: Line, found: "re.Match[str]") -> None:
        self.driver = found[1]

    def _error(self, line: Line, found: "re.Match[str]") -> None:
        self.errors.append(line.text.strip()[:400])
        if self.open is not None:
            self.open.has_failed = True

    def _host_name(self, line: Line, found: "re.Match[str]") -> bool:
        """Whether it is the host's name: v0.8 prints it before the devices; it is not kept."""
        return self.open is None and not self.tests and not self.devices

    def _close(self) -> None:
        if self.open is not None:
            self.tests.append(self.open.test())
            self.open = None

    def run(self) -> NvbandwidthRun:
        self._close()
        if self.version is None and not self.is_bare:
            raise self.lines.error("a line 'nvbandwidth Version: v0.8'")
        if not self.tests and not self.errors:
            raise self.lines.error("tests")
        unnamed = sum(test.name is None for test in self.tests)
        if unnamed:
            reason = f"the text names none of {unnamed}; -j does"
            self.lines.gaps.append(Gap("waived tests", reason))
        return NvbandwidthRun(
            version=self.version,
            driver_version=self.driver,
            devices=tuple(self.devices),
            tests=_merged(self.tests),
            errors=tuple(self.errors),
            gaps=tuple(self.lines.gaps),
        )


_STATUSES = {
    "Passed": Status.PASSED,
    "Waived": Status.WAIVED,
    "Running": Status.INCOMPLETE,
    "Error": Status.FAILED,
    "Failed": Status.FAILED,
    "Not Found": Status.FAILED,  # a name that this version does not know
}
# "0: NVIDIA H200 (00000000:19:00): (node01)": the host's name is not kept.
_LISTED = re.compile(r"(\d{1,4}): (.+?) \(([0-9a-fA-F:.]+)\)(?::.*)?", re.ASCII)
_NOT_READ = {
    "CUDA Runtime Version",
    "CUDA Driver Version",
    "git_version",
    "bufferSize",
    "testSamples",
    "useMean",
}
_JSON = Line("", None, SOURCE)


class _JsonTest(Struct):
    name: str
    status: Literal["Passed", "Waived", "Running", "Error", "Failed", "Not Found"]
    bandwidth_description: str | None = None
    bandwidth_matrix: tuple[tuple[str, ...], ...] = ()


class _JsonRun(Struct):
    version: str | None = None
    driver: str | None = field(name="Driver Version", default=None)
    devices: tuple[str, ...] = field(name="GPU Device list", default=())
    testcases: tuple[_JsonTest, ...] = ()
    error: Any = None
    warning: Any = None


def _parse_json(text: str) -> NvbandwidthRun:
    runs: list[_JsonRun] = []
    gaps: list[Gap] = []
    for document in json_objects(text, SOURCE):
        root = document.get("nvbandwidth")
        if not isinstance(root, dict):
            gaps.append(Gap(SOURCE, f"a document without nvbandwidth: {sorted(document)[:5]}"))
            continue
        runs.append(record(root, _JsonRun, SOURCE))
        unknown = set(root) - {*_JsonRun.__struct_encode_fields__} - _NOT_READ
        gaps += [Gap(SOURCE, f"key not known: {key[:80]!r}") for key in unknown]
    if not runs:
        raise ParseError(SOURCE, 'a JSON object with "nvbandwidth"', "none")
    version = next((run.version for run in runs if run.version is not None), None)
    if version is None:
        raise ParseError(SOURCE, "a version", "none")
    said = [one for run in runs for one in (run.error, run.warning)]
    errors = tuple(one[:400] for one in said if isinstance(one, str) and one)
    tests = [_test(case) for run in runs for case in run.testcases]
    if not tests and not errors:
        raise ParseError(SOURCE, "tests", "none")
    listed = next((run.devices for run in reversed(runs) if run.devices), ())
    return NvbandwidthRun(
        version=version,
        driver_version=next((run.driver for run in runs if run.driver is not None), None),
        devices=tuple(map(_listed_device, listed)),
        tests=_merged(tests),
        errors=errors,
        gaps=tuple(sorted(gaps)),
    )


def _test(case: _JsonTest) -> NvbandwidthTest:
    status = _STATUSES[case.status]
    if status is not Status.PASSED:
        return NvbandwidthTest(case.name, status)
    unit = _unit_of(_JSON, case.bandwidth_description or "")
    expected = f"{case.name}: a number or N/A"
    rows = tuple(
        tuple(_JSON.figure_or_none(cell, expected, _SCALES[unit]) for cell in row)
        for row in case.bandwidth_matrix
    )
    columns = len(rows[0]) if rows else 0
    if not 0 < columns <= MAX_DEVICES or not all(len(row) == columns for row in rows):
        lengths = f"{[len(row) for row in rows][:9]}"
        raise ParseError(SOURCE, f"{case.name}: rows of equal length", lengths)
    parts: tuple[str | None, ...] = (None,)
    # Rows and columns are the same GPUs; three times as many rows are three matrices.
    if "device_to_device_bidirectional" in case.name and len(rows) == 3 * columns:
        way = "write" if "_write_" in case.name else "read"
        parts = tuple(part.replace("read", way) for part in _TWO_WAYS)
    height = len(rows) // len(parts)
    matrices = (
        NvbandwidthMatrix(part, unit, rows[at * height : (at + 1) * height])
        for at, part in enumerate(parts)
    )
    return NvbandwidthTest(case.name, status, tuple(matrices))


def _listed_device(entry: str) -> NvbandwidthDevice:
    found = _LISTED.fullmatch(entry)
    if found is None:
        raise ParseError(SOURCE, "'0: NAME (00000000:19:00)'", entry[:80])
    return NvbandwidthDevice(int(found[1]), found[2], _bdf_of(found[3], _JSON))
