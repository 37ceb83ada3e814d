"""STREAM: bandwidth of four loops over three arrays.

    OMP_NUM_THREADS=8 ./stream

Seen of 5.9 and 5.10; the array size is compiled in. Source: stream.c 5.10.

    Function    Best Rate MB/s  Avg time     Min time     Max time
    Copy:          342008.3     0.018755     0.018713     0.018895

* The rate is the best of all passes but the first, in 10^6 bytes per second. The median is not
  printed; from the mean time follows a mean rate.
* Bytes are counted once per array. With ordinary stores the processor also reads each line that it
  writes: copy and scale then move 3/2 of what is reported, add and triad 4/3. Which stores the
  compiler chose cannot be seen.
* Times are in us at best; arrays below four times the last-level caches measure caches.
"""

import re
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure, positive

KERNELS = ("Copy", "Scale", "Add", "Triad")

_SOURCE = "STREAM"
_HEADER = re.compile(r"Function\s+(?:Best )?Rate \(?MB/s\)?\s+Avg time\s+Min time\s+Max time")
_KERNEL = re.compile(r"(Copy|Scale|Add|Triad):\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)", re.ASCII)
_VERSION = re.compile(r"STREAM version \$Revision: (\S+) \$", re.ASCII)
_ELEMENT = re.compile(
    r"This system uses (\d+) bytes per (?:array element|DOUBLE PRECISION word)\.", re.ASCII
)
_ARRAY = re.compile(r"Array size = (\d+)(?: \(elements\))?, Offset = (\d+)(?: \(elements\))?")
_REQUESTED = re.compile(r"Number of Threads requested = (\d+)", re.ASCII)
_COUNTED = re.compile(r"Number of Threads counted = (\d+)", re.ASCII)
_TICK = re.compile(r"Your clock granularity(?:/precision)? appears to be (\d+) microseconds\.")
_SAYS_NOTHING = (
    "---",
    "Memory per array =",
    "Total memory required =",
    "Each kernel will be executed",
    "Each test is run",
    "The *best* time",
    "the *best* time",
    "will be used to compute",
    "Each test below will take",
    "(=",
    "Increase the size of the arrays",
    "you are not getting",
    "WARNING -- The above",
    "For best results",
    "precision of your system timer",
    "Your clock granularity appears to be less than one",
    "Expected Value:",
    "Expected  :",
    "Observed  :",
    "For array",
    "Results Validation",
    "Results Comparison",
    "Expected a(1)",
    "Observed a(1)",
    "Rel Errors on",
    "AvgRelAbsErr",
)


@dataclass(frozen=True, slots=True)
class StreamKernel:
    """name: one of KERNELS. Bytes as reported: each array once.

    best_bytes_per_s belongs to min_ns; avg_ns and max_ns are over all passes but the first.
    """

    name: str
    best_bytes_per_s: float
    avg_ns: float
    min_ns: float
    max_ns: float


@dataclass(frozen=True, slots=True)
class StreamRun:
    """One run. threads: as counted, None where built without OpenMP (then it is one).

    array_elements, element_bytes: None where the table stands alone, without what is above it.

    is_valid: whether STREAM found its own arrays right; None where it does not say.
    clock_ns: of the timer; a kernel that takes fewer than 20 of them is not measured well.
    """

    version: str | None
    array_elements: int | None
    element_bytes: int | None
    threads: int | None
    clock_ns: float | None
    kernels: tuple[StreamKernel, ...]
    is_valid: bool | None
    gaps: tuple[Gap, ...]

    @property
    def arrays_bytes(self) -> int | None:
        """All three arrays together."""
        if self.array_elements is None or self.element_bytes is None:
            return None
        return 3 * self.array_elements * self.element_bytes


def parse(text: str) -> StreamRun:
    """The one run of an output. Raises ParseError: a missing kernel, a rate of zero, two runs."""
    facts: dict[str, str] = {}
    kernels: list[StreamKernel] = []
    gaps: list[Gap] = []
    verdicts: set[bool] = set()
    begun = False
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        kernel = _KERNEL.fullmatch(line)
        if kernel is not None:
            kernels.append(_kernel(kernel, len(kernels), number))
        elif _HEADER.fullmatch(line):
            if kernels:
                raise ParseError(_SOURCE, "one run", line, line=number)
        elif line.startswith("Failed Validation"):
            verdicts.add(False)
        elif line.startswith("Solution Validates"):
            verdicts.add(True)
        elif not _fact(line, facts, number) and begun and not _is_known(line):
            gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))
        begun = begun or "version" in facts or "element" in facts
    if len(kernels) != len(KERNELS):
        raise ParseError(
            _SOURCE,
            f"rows of {', '.join(KERNELS)}",
            f"{len(kernels)} rows",
            hint="the run ended early, or its output was cut",
        )
    return _run(facts, tuple(kernels), verdicts, gaps)


def _run(
    facts: dict[str, str], kernels: tuple[StreamKernel, ...], verdicts: set[bool], gaps: list[Gap]
) -> StreamRun:
    elements = count(facts["array"], _SOURCE, "an array size") if "array" in facts else None
    element_bytes = None
    if "element" in facts:
        element_bytes = count(facts["element"], _SOURCE, "bytes per element")
    if 0 in (elements, element_bytes):
        raise ParseError(_SOURCE, "arrays of some size", f"{elements} x {element_bytes} bytes")
    if None in (elements, element_bytes):
        gaps.append(
            Gap("STREAM arrays", "it is not given how large they are; small ones fit into caches")
        )
    requested, counted = facts.get("requested"), facts.get("counted")
    if requested and counted and requested != counted:
        gaps.append(Gap("STREAM threads", f"{requested} requested, {counted} counted"))
    threads = counted or requested
    return StreamRun(
        facts.get("version"),
        elements,
        element_bytes,
        None if threads is None else count(threads, _SOURCE, "threads"),
        count(facts["tick"], _SOURCE, "us") * 1e3 if "tick" in facts else None,
        kernels,
        None if not verdicts else verdicts == {True},
        tuple(gaps),
    )


def _fact(line: str, facts: dict[str, str], number: int) -> bool:
    patterns = {
        "version": _VERSION,
        "element": _ELEMENT,
        "array": _ARRAY,
        "requested": _REQUESTED,
        "counted": _COUNTED,
        "tick": _TICK,
    }
    for name, pattern in patterns.items():
        matched = pattern.fullmatch(line)
        if matched is not None:
            if facts.setdefault(name, matched[1]) != matched[1]:
                raise ParseError(_SOURCE, f"one value of {name}", line, line=number)
            return True
    return False


def _is_known(line: str) -> bool:
    return not line or line.startswith(_SAYS_NOTHING)


def _kernel(row: "re.Match[str]", position: int, number: int) -> StreamKernel:
    if position >= len(KERNELS) or row[1] != KERNELS[position]:
        found = " ".join(row[0].split())
        raise ParseError(_SOURCE, f"one row of each of {', '.join(KERNELS)}", found, line=number)
    return StreamKernel(
        row[1],
        positive(row[2], _SOURCE, "a rate in MB/s", number) * 1e6,
        figure(row[3], _SOURCE, "an average time in s", number) * 1e9,
        figure(row[4], _SOURCE, "a least time in s", number) * 1e9,
        figure(row[5], _SOURCE, "a greatest time in s", number) * 1e9,
    )
