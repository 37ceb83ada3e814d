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

* The exit status is 0 even if tests fail: only each test's status counts.
* Rows are CPUs (one row: the CPU that the process runs on) or GPUs; columns are GPUs.
* A cell of the diagonal is N/A, absent here. Because of it the tool's own minimum is 0: not used.
* Cells of JSON are texts with six significant digits.
* Both ways at once between GPUs are three matrices (one direction, the other, both together). In
  JSON they are one matrix of three times the rows, whose description and sum are the total's.
* In text a waived test has no name.
* In JSON an error is a second entry of the same test, after an entry with "Running".
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
from homenode.machine.tools.lines import Line, Lines, parse_json_objects, record
from homenode.text import plural

SOURCE = "nvbandwidth"
MAX_DEVICES = 1024
MAX_TESTS = 2000

_TWO_WAYS = ("read1", "read2", "total")
"""Parts of a test that copies both ways between GPUs; write1 and write2 for writing."""


class Status(StrEnum):
    PASSED = "passed"
    WAIVED = "waived"  # not possible here: no second GPU, no peer access
    FAILED = "failed"
    INCOMPLETE = "incomplete"  # began, and no result followed


class Unit(StrEnum):
    """Unit of the cells of a matrix, as stored here: GB/s of the tool are 10^9."""

    BYTES_PER_S = "bytes/s"
    NS = "ns"


class NvbandwidthDevice(Struct, frozen=True):
    """A GPU of the run's list."""

    index: int  # CUDA's number, its column
    name: str
    address: Bdf | None  # None in v0.5


class NvbandwidthMatrix(Struct, frozen=True):
    """Bandwidth of each pair of a test."""

    # which of a test's matrices, one of read1, read2, write1, write2 and total, or None if the
    # test has one
    part: str | None
    unit: Unit
    # shape (rows, columns), [from or CPU][GPU]; None if N/A
    cells: tuple[tuple[float | None, ...], ...]

    @property
    def columns(self) -> int:
        return len(self.cells[0])

    def list_values(self) -> tuple[float, ...]:
        """Return the values that exist, row by row."""
        return tuple(cell for row in self.cells for cell in row if cell is not None)


class NvbandwidthTest(Struct, frozen=True):
    name: str | None  # the tool's; None for a waived one of a text
    status: Status
    matrices: tuple[NvbandwidthMatrix, ...] = ()
    # (GPU's number, NUMA node) of the copying thread; () if the log has no lines about it
    threads: tuple[tuple[int, int], ...] = ()


class NvbandwidthRun(Struct, frozen=True, kw_only=True):
    """A run. Versions as printed; None if not reported."""

    version: str | None
    driver_version: str | None
    devices: tuple[NvbandwidthDevice, ...]  # v0.10 prints none
    tests: tuple[NvbandwidthTest, ...]
    errors: tuple[str, ...]  # error messages anywhere in the output
    gaps: tuple[Gap, ...]

    def test(self, name: str) -> NvbandwidthTest | None:
        """Return the test of that name; None if it was not run."""
        return next((test for test in self.tests if test.name == name), None)


def build_argv(tests: Iterable[str] = (), *, samples: int | None = None) -> tuple[str, ...]:
    """Return the command: all tests, or those named; JSON."""
    names = tuple(tests)
    test_words = ("-t", *names) if names else ()
    repeats = () if samples is None else ("-i", str(samples))
    return ("nvbandwidth", "-j", *repeats, *test_words)


def parse(text: str) -> NvbandwidthRun:
    """Return the one run of an output, text or JSON: its content decides. Raises ParseError.

    Text before the version is skipped; a text without a version is read only for its tables. JSON
    documents that follow each other are one run.
    """
    if any(line.strip() == "{" for line in text.split("\n")):
        return _parse_json(text)
    lines = text.split("\n")
    is_bare = not any(VERSION_LINE.fullmatch(line.rstrip()) for line in lines)
    is_bare = is_bare and any(TABLE_LINE.fullmatch(line.strip()) for line in lines)
    return _Text(text, is_bare).run()


def _parse_unit(line: Line, description: str) -> Unit:
    """Return the unit that a matrix' description ends with. Raises ParseError."""
    for ending, unit in (("(GB/s)", Unit.BYTES_PER_S), ("(ns)", Unit.NS)):
        if description.rstrip().endswith(ending):
            return unit
    raise line.make_error("a description ending in (GB/s) or (ns)", description)


_SCALES = {Unit.BYTES_PER_S: 1e9, Unit.NS: 1.0}
"""Factors of printed numbers."""


def _parse_bdf(text: str, line: Line) -> Bdf:
    """Return a GPU's address, printed without its function: 00000009:01:00."""
    position = SOURCE if line.number is None else f"{SOURCE}:{line.number}"
    return Bdf.parse(text if "." in text else f"{text}.0", position)


def _merge_tests(tests: Iterable[NvbandwidthTest]) -> tuple[NvbandwidthTest, ...]:
    """Return each named test once: the entry of an error replaces the entry of its start. Readers
    reject two results with one name; unnamed tests all stay."""
    merged: list[NvbandwidthTest] = []
    for test in tests:
        if len(merged) == MAX_TESTS:
            raise ParseError(SOURCE, f"at most {MAX_TESTS} tests", "more")
        previous = next((n for n, t in enumerate(merged) if t.name == test.name is not None), None)
        if previous is None:
            merged.append(test)
        elif merged[previous].status is Status.INCOMPLETE:
            merged[previous] = test
        elif test.status is Status.FAILED:
            merged[previous] = replace(merged[previous], status=Status.FAILED)
        else:
            raise ParseError(SOURCE, "each test once", str(test.name))
    return tuple(merged)


VERSION_LINE = re.compile(r"nvbandwidth Version: (\S+)", re.ASCII)
"""Opens every run."""

TABLE_LINE = re.compile(r"memcpy [^\n]{0,60}\(row\)[^\n]{0,40}\(column\)[^\n]{0,40}\(GB/s\)")
"""Line above every table of bandwidths; a pasted table may have no other heading."""

_TESTS_OF_TABLES = {
    "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)": "host_to_device_memcpy_ce",
    "memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)": "device_to_host_memcpy_ce",
}
_THREAD = re.compile(
    r"Thread of device (\d{1,5}) running on CPU: \d{1,6}, NUMA node: (\d{1,5})", re.ASCII
)
"""Lines of patched builds that show the source of copies. Source: a KubeVirt
article of 2025."""

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
_WAIVED = re.compile(r"Waived:(.*)")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)
# Of sums printed with two decimals: half a unit in the last place for each cell and for the sum.
_ROUNDING = 0.005


class _Text:
    """The text of a run so far. name, unit: of the open test and matrix; None if none is open."""

    def __init__(self, text: str, is_bare: bool) -> None:
        self.is_bare = is_bare
        self.version: str | None = None
        self.driver: str | None = None
        self.devices: list[NvbandwidthDevice] = []
        self.tests: list[NvbandwidthTest] = []
        self.errors: list[str] = []
        self.name: str | None = None
        self.unit: Unit | None = None
        self.has_failed = False
        self._open(None)
        self.lines = Lines(text, SOURCE, stripped=False, blank=True)

    def _open(self, name: str | None) -> None:
        """End the open test, and open one of this name."""
        if self.name is not None:
            self._end_matrix()
            status = Status.PASSED if self.matrices else Status.INCOMPLETE
            status = Status.FAILED if self.has_failed else status
            matrices, threads = tuple(self.matrices), tuple(self.threads)
            self.tests.append(NvbandwidthTest(self.name, status, matrices, threads))
        self.name, self.has_failed = name, False
        self.matrices: list[NvbandwidthMatrix] = []
        self.threads: list[tuple[int, int]] = []
        self._open_matrix(None, None)

    def _open_matrix(self, part: str | None, unit: Unit | None) -> None:
        self.part, self.unit, self.columns = part, unit, 0
        self.rows: list[tuple[float | None, ...]] = []

    def _end_matrix(self) -> None:
        if self.unit is None:
            return
        if not self.rows:
            raise ParseError(SOURCE, f"rows of {self.name}")
        self.matrices.append(NvbandwidthMatrix(self.part, self.unit, tuple(self.rows)))
        self._open_matrix(None, None)

    def _read_run_line(self, line: Line) -> bool:
        """Read a line between tests: the version, blank lines and the lines before it, names."""
        if match := VERSION_LINE.fullmatch(line.text):
            if self.version is not None:
                raise line.make_error("one run")
            self.version = match[1]
        elif not line.text or (self.version is None and not self.is_bare):
            if self.rows:  # another matrix may follow within the test
                self._end_matrix()
        elif match := _RUNNING.fullmatch(line.text):
            self._open(match[1])
        elif match := _WAIVED.fullmatch(line.text):
            self._open(None)
            self.tests.append(NvbandwidthTest(match[1].strip() or None, Status.WAIVED))
        elif self.is_bare and self.name is None and _DESCRIPTION.fullmatch(line.text):
            self._open(_TESTS_OF_TABLES.get(line.text.strip()))
            return False
        else:
            return False
        return True

    def _took_of_test(self, line: Line) -> bool:
        """Read a line of a test: samples, threads, sums, descriptions and rows."""
        if match := _THREAD.fullmatch(line.text):
            self.threads.append((int(match[1]), int(match[2])))
        elif match := _SUM.fullmatch(line.text) or _PERF.fullmatch(line.text):
            self._end_matrix()
            if match[1] == "SUM":
                self._check_sum(match, line)
        elif _DESCRIPTION.fullmatch(line.text):
            self._end_matrix()
            part = _PART.search(line.text)
            self._open_matrix(part[1].lower() if part else None, _parse_unit(line, line.text))
        elif not _SAMPLE.fullmatch(line.text):
            return self.unit is not None and self._parse_row(line, self.unit)
        return True

    def _take_other(self, line: Line) -> None:
        """Read a line at any place. In a text of tables only, other lines are ignored."""
        if self.is_bare:
            return
        if match := _DEVICE.fullmatch(line.text):
            index = line.read_count(match[1], "a device")
            address = None if match[3] is None else _parse_bdf(match[3], line)
            self.devices.append(NvbandwidthDevice(index, match[2].strip(), address))
        elif match := _DRIVER.fullmatch(line.text):
            self.driver = match[1]
        elif _ERROR.fullmatch(line.text):
            self.errors.append(line.text.strip()[:400])
            self.has_failed = True
        # v0.8 prints the host's name before the devices; it is not kept.
        elif not _SAYS_NOTHING.fullmatch(line.text) and (
            self.name or self.tests or self.devices or not _HOST_NAME.fullmatch(line.text)
        ):
            self.lines.add_unknown(line)

    def _check_sum(self, match: "re.Match[str]", line: Line) -> None:
        """Check the sum of the cells: a different sum means a damaged or misread text."""
        total = line.value_or_none(match[3], "a sum")
        if total is None or not self.matrices:
            return
        matrix = self.matrices[-1]
        values = matrix.list_values()
        cell_sum = sum(values) / _SCALES[matrix.unit]
        if abs(cell_sum - total) > _ROUNDING * (len(values) + 1) + 1e-9 * cell_sum:
            reason = f"the tool prints {match[3]}, its cells add up to {cell_sum:.2f}"
            self.lines.gaps.append(Gap(f"sum of {match[2]}", reason))

    def _parse_row(self, line: Line, unit: Unit) -> bool:
        words = line.text.split()
        if not self.columns:
            # Forums and chats drop the blanks in front.
            is_header = line.text[:1].isspace() or words == [*map(str, range(len(words)))]
            if not 0 < len(words) <= MAX_DEVICES or not is_header:
                raise line.make_error("a row of GPU numbers")
            self.columns = len(words)
            return True
        # A number, or a host and a number, precedes the cells.
        if len(words) <= self.columns:
            raise line.make_error(f"a row number and {plural(self.columns, 'cell')}")
        self.rows.append(
            tuple(
                line.value_or_none(word, "a number or N/A", _SCALES[unit])
                for word in words[-self.columns :]
            )
        )
        if len(self.rows) > MAX_DEVICES:
            raise line.make_error(f"at most {MAX_DEVICES} rows")
        return True

    def run(self) -> NvbandwidthRun:
        """Read all lines. Raises ParseError."""
        for line in self.lines:
            if not self._read_run_line(line) and not (self.name and self._took_of_test(line)):
                self._take_other(line)
        self._open(None)
        if self.version is None and not self.is_bare:
            raise self.lines.make_error("a line 'nvbandwidth Version: v0.8'")
        if not self.tests and not self.errors:
            raise self.lines.make_error("tests")
        unnamed_count = sum(test.name is None for test in self.tests)
        if unnamed_count:
            reason = f"the text names none of {unnamed_count}; -j does"
            self.lines.gaps.append(Gap("waived tests", reason))
        return NvbandwidthRun(
            version=self.version,
            driver_version=self.driver,
            devices=tuple(self.devices),
            tests=_merge_tests(self.tests),
            errors=tuple(self.errors),
            gaps=tuple(self.lines.gaps),
        )


_STATUSES = {
    "Passed": Status.PASSED,
    "Waived": Status.WAIVED,
    "Running": Status.INCOMPLETE,
    "Error": Status.FAILED,
    "Failed": Status.FAILED,
    "Not Found": Status.FAILED,  # a name that this version does not have
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
    for document in parse_json_objects(text, SOURCE):
        root = document.get("nvbandwidth")
        if not isinstance(root, dict):
            gaps.append(Gap(SOURCE, f"a document without nvbandwidth: {sorted(document)[:5]}"))
            continue
        runs.append(record(root, _JsonRun, SOURCE))
        unknown = set(root) - {*_JsonRun.__struct_encode_fields__} - _NOT_READ
        gaps += [Gap(SOURCE, f"key not known: {key[:80]!r}") for key in unknown]
    if not runs:
        raise ParseError(SOURCE, 'a JSON object with "nvbandwidth"')
    version = next((run.version for run in runs if run.version is not None), None)
    if version is None:
        raise ParseError(SOURCE, "a version")
    messages = [message for run in runs for message in (run.error, run.warning)]
    errors = tuple(message[:400] for message in messages if isinstance(message, str) and message)
    tests = [_test(case) for run in runs for case in run.testcases]
    if not tests and not errors:
        raise ParseError(SOURCE, "tests")
    devices = next((run.devices for run in reversed(runs) if run.devices), ())
    return NvbandwidthRun(
        version=version,
        driver_version=next((run.driver for run in runs if run.driver is not None), None),
        devices=tuple(map(_parse_device, devices)),
        tests=_merge_tests(tests),
        errors=errors,
        gaps=tuple(sorted(gaps)),
    )


def _test(case: _JsonTest) -> NvbandwidthTest:
    status = _STATUSES[case.status]
    if status is not Status.PASSED:
        return NvbandwidthTest(case.name, status)
    unit = _parse_unit(_JSON, case.bandwidth_description or "")
    expected = f"{case.name}: a number or N/A"
    rows = tuple(
        tuple(_JSON.value_or_none(cell, expected, _SCALES[unit]) for cell in row)
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


def _parse_device(entry: str) -> NvbandwidthDevice:
    match = _LISTED.fullmatch(entry)
    if match is None:
        raise ParseError(SOURCE, "'0: NAME (00000000:19:00)'", entry[:80])
    return NvbandwidthDevice(int(match[1]), match[2], _parse_bdf(match[3], _JSON))
