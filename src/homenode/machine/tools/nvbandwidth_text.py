"""nvbandwidth's text: see nvbandwidth for the tool.

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.31     55.29

SUM host_to_device_memcpy_ce 110.60

Waived:
"""

import re
from collections.abc import Sequence

from msgspec import Struct, field

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.tools.figures import count, figure_or_none
from homenode.machine.tools.nvbandwidth_records import (
    MAX_DEVICES,
    SCALES,
    SOURCE,
    NvbandwidthDevice,
    NvbandwidthMatrix,
    NvbandwidthRun,
    NvbandwidthTest,
    Status,
    bdf_of,
    merged,
    unit_of,
)

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
_SAYS_NOTHING = (
    "Built from Git version:",
    "CUDA Runtime Version:",
    "CUDA Driver Version",
    "NOTE: The reported results",
    "Performance can vary with",
    "Process ",
    "NOTE: This tool",
)
# Of sums printed with two decimals: half a unit in the last place for each cell and for the sum.
_ROUNDING = 0.005


class _Open(Struct):
    """The test that is being read."""

    name: str
    matrices: list[NvbandwidthMatrix] = field(default_factory=list)
    description: str | None = None
    columns: tuple[str, ...] = ()
    labels: list[str] = field(default_factory=list)
    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    has_failed: bool = False
    threads: list[tuple[int, int]] = field(default_factory=list)

    def end_matrix(self) -> None:
        if self.description is None:
            return
        if not self.rows:
            raise ParseError(SOURCE, f"rows of {self.name}", "none")
        part = _PART.search(self.description)
        self.matrices.append(
            NvbandwidthMatrix(
                None if part is None else part[1].lower(),
                self.description,
                unit_of(self.description),
                tuple(self.labels),
                self.columns,
                tuple(self.rows),
            )
        )
        self.description, self.columns, self.labels, self.rows = None, (), [], []

    def test(self) -> NvbandwidthTest:
        self.end_matrix()
        status = Status.PASSED if self.matrices else Status.INCOMPLETE
        return NvbandwidthTest(
            self.name,
            Status.FAILED if self.has_failed else status,
            tuple(self.matrices),
            tuple(self.threads),
        )


def parse_text(text: str) -> NvbandwidthRun:
    """The one run of an output; what stands before its version is skipped. Raises ParseError.

    A text without a version is read for its tables alone.
    """
    lines = text.split("\n")
    is_bare = not any(VERSION_LINE.fullmatch(line.rstrip()) for line in lines)
    reader = _Reader(is_bare and any(TABLE_LINE.fullmatch(line.strip()) for line in lines))
    for number, line in enumerate(lines, start=1):
        reader.read(line.rstrip(), number)
    return reader.run()


class _Reader:
    """The run so far, and the test that is open."""

    def __init__(self, is_bare: bool) -> None:
        self.is_bare = is_bare
        self.version: str | None = None
        self.driver: str | None = None
        self.devices: list[NvbandwidthDevice] = []
        self.tests: list[NvbandwidthTest] = []
        self.errors: list[str] = []
        self.gaps: list[Gap] = []
        self.open: _Open | None = None
        self.devices_may_follow = True

    def read(self, line: str, number: int) -> None:
        if found := VERSION_LINE.fullmatch(line):
            if self.version is not None:
                raise ParseError(SOURCE, "one run", line, line=number)
            self.version = found[1]
        elif (self.version is None and not self.is_bare) or not line.strip():
            # A blank line ends the rows of a matrix; another one may follow within the test.
            if self.open is not None and self.open.rows:
                self.open.end_matrix()
        elif found := _RUNNING.fullmatch(line):
            self._close()
            self.open = _Open(found[1])
        elif line.startswith("Waived:"):
            self._close()
            self.tests.append(NvbandwidthTest(line[7:].strip() or None, Status.WAIVED, ()))
        elif self.open is not None and self._of_test(self.open, line, number):
            return
        elif self.is_bare:
            name = _TESTS_OF_TABLES.get(line.strip())
            if name is not None and self.open is None:
                self.open = _Open(name)
                self._of_test(self.open, line, number)
        else:
            self._of_run(line, number)

    def run(self) -> NvbandwidthRun:
        self._close()
        if self.version is None and not self.is_bare:
            raise ParseError(SOURCE, "a line 'nvbandwidth Version: v0.8'", "none")
        if not self.tests and not self.errors:
            raise ParseError(SOURCE, "tests", "none")
        unnamed = sum(test.name is None for test in self.tests)
        if unnamed:
            self.gaps.append(Gap("waived tests", f"the text names none of {unnamed}; -j does"))
        return NvbandwidthRun(
            self.version,
            self.driver,
            tuple(self.devices),
            merged(self.tests),
            tuple(self.errors),
            tuple(self.gaps),
        )

    def _close(self) -> None:
        if self.open is not None:
            self.tests.append(self.open.test())
            self.open = None

    def _of_run(self, line: str, number: int) -> None:
        if found := _DEVICE.fullmatch(line):
            index = count(found[1], SOURCE, "a device", number)
            address = None if found[3] is None else bdf_of(found[3], number)
            self.devices.append(NvbandwidthDevice(index, found[2].strip(), address))
        elif found := _DRIVER.fullmatch(line):
            self.driver = found[1]
        elif _ERROR.match(line):
            self.errors.append(line.strip()[:400])
            if self.open is not None:
                self.open.has_failed = True
        elif self._is_host_name(line):
            return  # v0.8 prints it before the devices; it is not kept
        elif not line.startswith(_SAYS_NOTHING):
            self.gaps.append(Gap(f"{SOURCE} line {number}", f"not known: {line[:80]!r}"))

    def _is_host_name(self, line: str) -> bool:
        before_tests = self.open is None and not self.tests and not self.devices
        return before_tests and re.fullmatch(r"[A-Za-z0-9._-]{1,253}", line, re.ASCII) is not None

    def _of_test(self, test: _Open, line: str, number: int) -> bool:
        """Whether the line belongs to the open test's results."""
        if _SAMPLE.fullmatch(line):
            return True
        if found := _THREAD.fullmatch(line):
            test.threads.append((int(found[1]), int(found[2])))
            return True
        if found := _SUM.fullmatch(line) or _PERF.fullmatch(line):
            test.end_matrix()
            if found[1] == "SUM":
                self._check_sum(test, found[2], found[3], number)
            return True
        if _DESCRIPTION.fullmatch(line):
            test.end_matrix()
            unit_of(line, number)
            test.description = line.strip()
            return True
        if test.description is None:
            return False
        words = line.split()
        if not test.columns:
            if not 0 < len(words) <= MAX_DEVICES or not line.startswith(" "):
                raise ParseError(SOURCE, "a row of GPU numbers", line, line=number)
            test.columns = tuple(words)
            return True
        test.labels.append(_label(words, len(test.columns), line, number))
        scale = SCALES[unit_of(test.description)]
        test.rows.append(_cells(words[-len(test.columns) :], scale, number))
        if len(test.rows) > MAX_DEVICES:
            raise ParseError(SOURCE, f"at most {MAX_DEVICES} rows", line, line=number)
        return True

    def _check_sum(self, test: _Open, key: str, said: str, number: int) -> None:
        """A sum that is not that of the cells: the text was damaged, or means something else."""
        total = figure_or_none(said, SOURCE, "a sum", number)
        if total is None or not test.matrices:
            return
        matrix = test.matrices[-1]
        values = matrix.values()
        found = sum(values) / SCALES[matrix.unit]
        if abs(found - total) > _ROUNDING * (len(values) + 1) + 1e-9 * found:
            reason = f"the tool says {said}, its cells add up to {found:.2f}"
            self.gaps.append(Gap(f"sum of {key}", reason))


def _label(words: Sequence[str], columns: int, line: str, number: int) -> str:
    """What stands before the cells: a number, or a host and a number."""
    if len(words) <= columns:
        raise ParseError(SOURCE, f"a row number and {columns} cells", line, line=number)
    return words[-columns - 1].rstrip(":")


def _cells(words: Sequence[str], scale: float, number: int) -> tuple[float | None, ...]:
    values = (figure_or_none(word, SOURCE, "a number or N/A", number) for word in words)
    return tuple(None if value is None else value * scale for value in values)
