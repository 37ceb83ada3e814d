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

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.figures.sample import FigureList, Figures, ToolOutput, of_text

_SOURCE = "likwid-bench"
_TEST = re.compile(r"Test: (\S+)", re.ASCII)
_THREADS = re.compile(r"Using (\d+) threads", re.ASCII)
_THREAD = re.compile(
    r"Group: \d+ Thread \d+ Global Thread \d+ running on (?:hwthread|core) (\d+) - .*", re.ASCII
)
_VALUE = re.compile(r"([A-Z][A-Za-z/ .()-]*?):\s+(\S+)(?: sec)?", re.ASCII)
_KEYS = set(
    """
Cycles:CPU Clock:Cycle Clock:Time:Iterations:Iterations per thread:Inner loop executions:
Size (Byte):Size per thread:Number of Flops:MFlops/s:Data volume (Byte):MByte/s:Cycles per update:
Cycles per cacheline:Loads per update:Stores per update:Load bytes per element:
Store bytes per elem.:Load/store ratio:Instructions:UOPs:Number of micro-operations
""".replace("\n", "").split(":")
)
_SAYS_NOTHING = re.compile(
    r"-+|Running without Marker API\..*|Allocate: .*|Initialization: .*|LIKWID MICRO BENCHMARK|"
    r"Using \d+ work groups|Activate Marker API.*|INFO.*|WARN.*"
)
_AGREEMENT = 0.01  # "MByte/s" against volume and time


class LikwidBench(Struct, frozen=True, kw_only=True):
    """One run. pus: where its threads ran. size_bytes: of all buffers together."""

    test: str
    threads: int
    pus: CpuSet
    size_bytes: int
    bytes_per_s: float
    gaps: tuple[Gap, ...]


def argv(test: str, domain: str, size_bytes: int, threads: int) -> tuple[str, ...]:
    """The command. -W: each thread writes its own part first, so that pages are where it runs."""
    return ("likwid-bench", "-t", test, "-W", f"{domain}:{size_bytes}B:{threads}")


def parse(text: str) -> LikwidBench:
    """The one run of an output. Raises ParseError."""
    lines = Lines(text, _SOURCE)
    pus: list[int] = []
    for line in lines:
        if found := _THREAD.fullmatch(line.text):
            pus.append(line.whole(found[1], "a PU"))
        elif found := _TEST.fullmatch(line.text):
            lines.keep("Test", found[1], line)
        elif found := _THREADS.fullmatch(line.text):
            lines.keep("Threads", found[1], line)
        elif (found := _VALUE.fullmatch(line.text)) and found[1] in _KEYS:
            lines.keep(found[1], found[2], line)
        elif not _SAYS_NOTHING.fullmatch(line.text):
            lines.unknown(line)
    test = lines.take("Test", Line.named, "a loop")
    threads = lines.take("Threads", Line.whole, "threads")
    time_s = lines.take("Time", Line.positive, "a time in s")
    size = lines.take("Size (Byte)", Line.whole, "bytes")
    volume = lines.take("Data volume (Byte)", Line.whole, "bytes")
    rate = lines.take("MByte/s", Line.positive, "a bandwidth") * 1e6
    if abs(volume / time_s - rate) > _AGREEMENT * rate:
        reason = f"{rate:g} bytes/s printed, {volume / time_s:g} from volume and time"
        lines.gaps.append(Gap("likwid-bench bandwidth", reason))
    return LikwidBench(
        test=test,
        threads=threads,
        pus=CpuSet(pus),
        size_bytes=size,
        bytes_per_s=rate,
        gaps=tuple(lines.gaps),
    )


def of_likwid(run: LikwidBench) -> Figures:
    """The bandwidth of one loop, under the loop's name."""
    found = FigureList("likwid-bench", f"{run.size_bytes} bytes, {run.threads} threads", run.gaps)
    found.add("memory-bandwidth", "bytes_per_s", run.bytes_per_s, variant=f"likwid {run.test}")
    return found.figures()


OUTPUT = ToolOutput(
    "likwid-bench", re.compile(r"^LIKWID MICRO BENCHMARK", re.M), of_text(parse, of_likwid)
)
