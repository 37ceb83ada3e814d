"""Records of nvbandwidth: one run, its tests and their matrices."""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap

SOURCE = "nvbandwidth"
MAX_DEVICES = 1024
MAX_TESTS = 2000

TWO_WAYS = ("read1", "read2", "total")
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

    part: which of a test's matrices, one of TWO_WAYS or None where the test has one.
    labels: of rows and columns; JSON has none, then they are "0", "1" and so on.
    """

    part: str | None
    description: str
    unit: Unit
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]

    def values(self) -> tuple[float, ...]:
        """Those that are there, row by row."""
        return tuple(cell for row in self.cells for cell in row if cell is not None)


class NvbandwidthTest(Struct, frozen=True):
    """name: the tool's; None for a waived one of a text. threads: (GPU's number, NUMA node) of the
    thread that copied, where the log has lines about it."""

    name: str | None
    status: Status
    matrices: tuple[NvbandwidthMatrix, ...]
    threads: tuple[tuple[int, int], ...] = ()


class NvbandwidthRun(Struct, frozen=True):
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


def unit_of(description: str, line: int | None = None) -> Unit:
    """The unit that a matrix' description ends with. Raises ParseError."""
    if description.rstrip().endswith("(GB/s)"):
        return Unit.BYTES_PER_S
    if description.rstrip().endswith("(ns)"):
        return Unit.NS
    raise ParseError(SOURCE, "a description ending in (GB/s) or (ns)", description, line=line)


SCALES = {Unit.BYTES_PER_S: 1e9, Unit.NS: 1.0}
"""What a printed number is multiplied with."""


def bdf_of(text: str, line: int | None = None) -> Bdf:
    """A GPU's address, printed without its function: 00000009:01:00."""
    where = SOURCE if line is None else f"{SOURCE}:{line}"
    return Bdf.parse(text if "." in text else f"{text}.0", where)


def merged(tests: Iterable[NvbandwidthTest]) -> tuple[NvbandwidthTest, ...]:
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
