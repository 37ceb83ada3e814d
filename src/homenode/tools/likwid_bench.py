"""likwid-bench: bandwidth of one hand-written loop.

    likwid-bench -t triad_avx -W S0:1GB:4

Seen of 5.2. Source: outputs of Debian's 5.2.2.

    Time:\t\t\t1.053892e-02 sec
    Data volume (Byte):\t\t192000000
    MByte/s:\t\t18218.18

* "MByte/s" is 10^6 bytes per second, and sizes in -w and -W are decimal too.
* Bytes are those that the loop names. The read of a line that an ordinary store changes is not
  among them; loops with "mem" in their names use non-temporal stores, and have none.
* Buffers are of 4 KiB pages.
"""

import re
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure, positive

_SOURCE = "likwid-bench"
_TEST = re.compile(r"Test: (\S+)", re.ASCII)
_THREADS = re.compile(r"Using (\d+) threads", re.ASCII)
_THREAD = re.compile(
    r"Group: \d+ Thread \d+ Global Thread \d+ running on (?:hwthread|core) (\d+) - .*", re.ASCII
)
_VALUE = re.compile(r"([A-Z][A-Za-z/ .()-]*?):\s+(\S+)(?: sec)?", re.ASCII)
_KEYS = {
    "Cycles",
    "CPU Clock",
    "Cycle Clock",
    "Time",
    "Iterations",
    "Iterations per thread",
    "Inner loop executions",
    "Size (Byte)",
    "Size per thread",
    "Number of Flops",
    "MFlops/s",
    "Data volume (Byte)",
    "MByte/s",
    "Cycles per update",
    "Cycles per cacheline",
    "Loads per update",
    "Stores per update",
    "Load bytes per element",
    "Store bytes per elem.",
    "Load/store ratio",
    "Instructions",
    "UOPs",
    "Number of micro-operations",
}
_SAYS_NOTHING = re.compile(
    r"-+|Running without Marker API\..*|Allocate: .*|Initialization: .*|LIKWID MICRO BENCHMARK|"
    r"Using \d+ work groups|Activate Marker API.*|INFO.*|WARN.*"
)
_AGREEMENT = 0.01  # "MByte/s" against volume and time


@dataclass(frozen=True, slots=True)
class LikwidBench:
    """One run. pus: where its threads ran. size_bytes: of all buffers together."""

    test: str
    threads: int
    pus: CpuSet
    size_bytes: int
    volume_bytes: int
    time_ns: float
    bytes_per_s: float
    cycles_per_cacheline: float | None
    gaps: tuple[Gap, ...]


def argv(test: str, domain: str, size_bytes: int, threads: int) -> tuple[str, ...]:
    """The command. -W: each thread writes its own part first, so that pages are where it runs."""
    return ("likwid-bench", "-t", test, "-W", f"{domain}:{size_bytes}B:{threads}")


def parse(text: str) -> LikwidBench:
    """The one run of an output. Raises ParseError."""
    values: dict[str, tuple[str, int]] = {}
    pus: list[int] = []
    gaps: list[Gap] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if found := _THREAD.fullmatch(line):
            pus.append(count(found[1], _SOURCE, "a PU", number))
        elif found := _TEST.fullmatch(line) or _THREADS.fullmatch(line):
            name = "Test" if line.startswith("Test") else "Threads"
            _keep(values, name, found[1], number)
        elif (found := _VALUE.fullmatch(line)) and found[1] in _KEYS:
            _keep(values, found[1], found[2], number)
        elif line and not _SAYS_NOTHING.fullmatch(line):
            gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))
    needed = ("Test", "Threads", "Time", "Size (Byte)", "Data volume (Byte)", "MByte/s")
    missing = [name for name in needed if name not in values]
    if missing:
        hint = gaps[0].reason if gaps else None
        raise ParseError(_SOURCE, f"a line {missing[0]!r}", "none", hint=hint)
    time_ns = positive(*_of(values, "Time", "a time in s")) * 1e9
    volume = count(*_of(values, "Data volume (Byte)", "bytes"))
    rate = positive(*_of(values, "MByte/s", "a bandwidth")) * 1e6
    if abs(volume / time_ns * 1e9 - rate) > _AGREEMENT * rate:
        reason = f"{rate:g} bytes/s printed, {volume / time_ns * 1e9:g} from volume and time"
        gaps.append(Gap("likwid-bench bandwidth", reason))
    per_line = "Cycles per cacheline"
    return LikwidBench(
        values["Test"][0],
        count(*_of(values, "Threads", "threads")),
        CpuSet(pus),
        count(*_of(values, "Size (Byte)", "bytes")),
        volume,
        time_ns,
        rate,
        figure(*_of(values, per_line, "cycles")) if per_line in values else None,
        tuple(gaps),
    )


def _keep(values: dict[str, tuple[str, int]], name: str, value: str, number: int) -> None:
    if name in values:
        raise ParseError(_SOURCE, f"one line {name!r}", value, line=number)
    values[name] = (value, number)


def _of(values: dict[str, tuple[str, int]], name: str, expected: str) -> tuple[str, str, str, int]:
    value, number = values[name]
    return value, _SOURCE, expected, number
