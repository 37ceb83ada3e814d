"""STREAM: bandwidth of four loops over three arrays.

    OMP_NUM_THREADS=8 ./stream

Seen with 5.9 and 5.10; the array size is compiled in. Source: stream.c 5.10.

    Function    Best Rate MB/s  Avg time     Min time     Max time
    Copy:          342008.3     0.018755     0.018713     0.018895

* The rate is the best of all passes but the first, in 10^6 bytes per second, or in the unit that
  the table's head has in other people's builds. The median is not printed; from the mean time
  follows a mean rate.
* Bytes are counted once per array. With ordinary stores the processor also reads each line that it
  writes: copy and scale then move 3/2 of what is reported, add and triad 4/3. Which stores the
  compiler chose cannot be seen.
* Times are in us at best; arrays below four times the last-level caches measure caches.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.gpu_tool_samples import parse_binding, parse_command
from homenode.measure.model import MeasuredSamples, SampleBuilder, ToolOutput
from homenode.units import GIB, MIB

KERNELS = ("Copy", "Scale", "Add", "Triad")

_SOURCE = "STREAM"
_HEADER = re.compile(
    r"Function\s+(?:Best )?Rate \(?([A-Za-z]+)/s\)?\s+Avg time\s+Min time\s+Max time", re.ASCII
)
_UNITS = {"MB": 1e6, "GB": 1e9, "MiB": float(MIB), "GiB": float(GIB)}
_KERNEL = re.compile(r"(Copy|Scale|Add|Triad):\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)", re.ASCII)
_VALUES = {
    "version": re.compile(r"STREAM version \$Revision: (\S+) \$", re.ASCII),
    "bytes per element": re.compile(
        r"This system uses (\d+) bytes per (?:array element|DOUBLE PRECISION word)\.", re.ASCII
    ),
    "array size": re.compile(
        r"Array size = (\d+)(?: \(elements\))?, Offset = (?:\d+)(?: \(elements\))?", re.ASCII
    ),
    "threads requested": re.compile(r"Number of Threads requested = (\d+)", re.ASCII),
    "threads counted": re.compile(r"Number of Threads counted = (\d+)", re.ASCII),
}
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
    "Your clock granularity",
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


class StreamKernel(Struct, frozen=True, kw_only=True):
    name: str  # one of KERNELS. Bytes as reported: each array once.
    best_bytes_per_s: float


class StreamRun(Struct, frozen=True, kw_only=True):
    version: str | None
    # all three together; None if the log has only the table
    arrays_bytes: int | None
    threads: int | None  # as counted, None if built without OpenMP (then it is one)
    kernels: tuple[StreamKernel, ...]
    is_valid: bool | None  # whether STREAM found its own arrays right; None if it is not printed
    gaps: tuple[Gap, ...]


def parse(text: str) -> StreamRun:
    """The one run of an output. Raises ParseError: a missing kernel, a rate of zero, two runs."""
    lines = Lines(text, _SOURCE)
    kernels: list[StreamKernel] = []
    validities: set[bool] = set()
    begun = False
    unit = "MB"
    for line in lines:
        if row := _KERNEL.fullmatch(line.text):
            kernels.append(_parse_kernel(row, len(kernels), line, unit))
        elif head := _HEADER.fullmatch(line.text):
            if kernels:
                raise line.make_error("one run")
            if head[1] not in _UNITS:
                raise line.make_error(f"rates in {', '.join(_UNITS)} per second", head[1])
            unit = head[1]
        elif line.text.startswith("Failed Validation"):
            validities.add(False)
        elif line.text.startswith("Solution Validates"):
            validities.add(True)
        elif _is_value(line, lines) or line.text.startswith(_SAYS_NOTHING):
            begun = True
        elif begun:
            lines.add_unknown(line)
    if len(kernels) != len(KERNELS):
        raise lines.make_error(
            f"rows of {', '.join(KERNELS)}",
            f"{len(kernels)} rows",
            "the run ended early, or its output was cut",
        )
    return StreamRun(
        version=lines.take_optional("version", Line.read_word, "a version"),
        arrays_bytes=_sum_arrays(lines),
        threads=_parse_threads(lines),
        kernels=tuple(kernels),
        is_valid=None if not validities else validities == {True},
        gaps=tuple(lines.gaps),
    )


def _is_value(line: Line, lines: Lines) -> bool:
    for name, pattern in _VALUES.items():
        if match := pattern.fullmatch(line.text):
            lines.keep_same(name, match[1], line)
            return True
    return False


def _parse_kernel(row: "re.Match[str]", position: int, line: Line, unit: str) -> StreamKernel:
    if position >= len(KERNELS) or row[1] != KERNELS[position]:
        raise line.make_error(f"one row of each of {', '.join(KERNELS)}", " ".join(row[0].split()))
    for word in row.groups()[2:]:
        line.parse_number(word, "a time in s")
    rate = line.parse_positive(row[2], f"a rate in {unit}/s") * _UNITS[unit]
    return StreamKernel(name=row[1], best_bytes_per_s=rate)


def _sum_arrays(lines: Lines) -> int | None:
    elements = lines.take_optional("array size", Line.read_count, "an array size")
    element_bytes = lines.take_optional("bytes per element", Line.read_count, "bytes per element")
    if 0 in (elements, element_bytes):
        raise lines.make_error("arrays of some size", f"{elements} x {element_bytes} bytes")
    if elements is None or element_bytes is None:
        reason = "the output has no array size; small arrays fit into caches"
        lines.gaps.append(Gap("STREAM arrays", reason))
        return None
    return 3 * elements * element_bytes


def _parse_threads(lines: Lines) -> int | None:
    requested_threads = lines.take_optional("threads requested", Line.read_count, "threads")
    counted_threads = lines.take_optional("threads counted", Line.read_count, "threads")
    if requested_threads and counted_threads and requested_threads != counted_threads:
        reason = f"{requested_threads} requested, {counted_threads} counted"
        lines.gaps.append(Gap("STREAM threads", reason))
    return counted_threads or requested_threads


MIN_ARRAY_BYTES = 32 * MIB
"""The minimum size of an array: STREAM's rule is four times the last-level cache, and 8 MiB of that
are few. With less, what was measured is a cache, whatever the machine."""


def read_stream_results(run: StreamRun, node: int | None = None) -> MeasuredSamples:
    """Return the best rate of each kernel. node: the node of its memory."""
    if run.is_valid is False:
        reason = "its own check failed: its results are omitted"
        return MeasuredSamples(gaps=(*run.gaps, Gap("STREAM", reason)))
    if run.arrays_bytes is not None and run.arrays_bytes < 3 * MIN_ARRAY_BYTES:
        reason = f"arrays of {run.arrays_bytes // 3} bytes fit into caches: not a result of memory"
        return MeasuredSamples(gaps=(*run.gaps, Gap("STREAM", reason)))
    is_known = run.arrays_bytes is not None
    size = f"{run.arrays_bytes} bytes in three arrays" if is_known else "arrays of unknown size"
    version = run.version or "unknown version"
    results = SampleBuilder("STREAM", f"{version}, best pass, {size}", run.gaps)
    for kernel in run.kernels:
        name, rate = kernel.name.lower(), kernel.best_bytes_per_s
        results.add("memory-bandwidth", "bytes_per_s", rate, variant=name, node=node)
    return results.build_samples()


_SIGN = re.compile(r"^STREAM version |^Function +(?:Best )?Rate ", re.M)
_PLACED = ("policy: interleave", "policy: weighted", "policy: preferred")


def _read_stream_log(text: str, name: str) -> MeasuredSamples:
    """Return a log's run with the process's binding, if numactl shows or sets it before."""
    run = parse(text)
    head = text[: match.start()] if (match := _SIGN.search(text)) else ""
    policy_text = head[head.rfind("policy:") :] if "policy:" in head else ""
    command = parse_command(head)
    if not policy_text and command is None:
        return read_stream_results(run)
    binding, gaps = parse_binding(head)
    # Without a policy all memory of one node can be all that the machine has; else the threads
    # place it on their own node, unless it is interleaved or preferred elsewhere.
    is_bound = binding is not None and (
        command is not None
        or policy_text.startswith("policy: bind")
        or (
            not policy_text.startswith(_PLACED)
            and len(binding.memory_nodes) > len(binding.cpu_nodes)
        )
    )
    results = read_stream_results(run, binding.node if binding is not None and is_bound else None)
    conditions = binding.conditions() if binding is not None and is_bound else ()
    return replace(
        results, conditions=(*results.conditions, *conditions), gaps=(*results.gaps, *gaps)
    )


OUTPUT = ToolOutput("STREAM", _SIGN, _read_stream_log)
