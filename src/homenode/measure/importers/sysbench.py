"""sysbench: prime numbers per second, and a memory loop.

    sysbench cpu --threads=2 --time=30 run
    sysbench memory --threads=2 --memory-block-size=1M --memory-total-size=8G run

Seen with 1.0.20. Source: its outputs. Missing in the outputs:

* Fairness is a mean and a deviation over threads. How many events each thread had is not printed.
* The memory test's defaults (1 KiB blocks, one buffer that all threads write) measure a first-level
  cache and the cost of an event, not memory: see `SysbenchMemory.shares_one_buffer`.
* "MiB/sec" is 2^20; latencies are in ms with two decimals, so that 0.00 is "below 5 us".
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.measure.model import (
    MeasuredSamples,
    SampleBuilder,
    ToolOutput,
    read_from_text,
)
from homenode.units import KIB, MIB

_SOURCE = "sysbench"
_VERSION = re.compile(r"sysbench (\d+)\.(\d++)(\S*+)(?: \(.*\))?", re.ASCII)
_INTERVAL = re.compile(r"\[ \d+s \] .*", re.ASCII)
_OPERATIONS = re.compile(r"Total operations: (\S+) \(\s*(\S+) per second\)", re.ASCII)
_TRANSFERRED = re.compile(r"(\S+) MiB transferred \((\S+) MiB/sec\)", re.ASCII)
_PAIR = re.compile(r"([^\s/]+)/(\S+)", re.ASCII)
_SECONDS = re.compile(r"(\S+?)s", re.ASCII)
_TITLE = re.compile(r"(?:CPU speed|General statistics|Latency \(ms\)|Threads fairness|Throughput):")
_SAYS_NOTHING = re.compile(
    r"(?:Running the test with following options:|Initializing random number generator from|"
    r"Running memory speed test with the following options:|Initializing worker threads\.\.\.|"
    r"Threads started!|Report intermediate results every|Additional request validation enabled|"
    r"Target transaction rate:|WARNING:).*"
)
_NOT_READ = re.compile(
    r"Latency \(ms\):(?:min|avg|max|sum)|Threads fairness:execution time \(avg/stddev\)|"
    r"total size|operations(?: per second)?|.*th percentile"
)


class SysbenchMemory(Struct, frozen=True, kw_only=True):
    """The parameters of the memory test."""

    block_bytes: int
    operation: str  # "write", "read" or "none"
    scope: str  # "global", "local"
    bytes_per_s: float

    @property
    def shares_one_buffer(self) -> bool:
        """Return whether all threads used one block: the rate is then not the memory's."""
        return self.scope == "global"


class SysbenchRun(Struct, frozen=True, kw_only=True):
    """A run. None if the tool does not report it."""

    version: str
    threads: int
    prime_limit: int | None  # prime limit of the cpu test; None for other tests
    events_per_s: float
    events_per_thread: tuple[float, float] | None  # (mean, deviation) over threads
    memory: SysbenchMemory | None  # result of the memory test
    gaps: tuple[Gap, ...]


def parse(text: str) -> SysbenchRun:
    """Return the one run of an output. Raises ParseError, also for one that was cut short."""
    lines = Lines(text, _SOURCE)
    version: str | None = None
    title = ""
    for line in lines:
        if match := _VERSION.fullmatch(line.text):
            if version is not None:
                raise line.make_error("one run")
            if match[1] != "1":
                raise line.make_error("sysbench 1.x")
            version = f"{match[1]}.{match[2]}{match[3]}"
        elif version is None:
            continue  # a shell's prompt or warnings may precede it
        elif _TITLE.fullmatch(line.text):
            title = line.text
        else:
            _parse_value(line, title, lines)
    if version is None:
        raise lines.make_error("a line 'sysbench 1.0.20'", hint="sysbench 0.4 is not read")
    return _run(version, lines)


def _parse_value(line: Line, title: str, lines: Lines) -> None:
    if match := _OPERATIONS.fullmatch(line.text):
        lines.keep("operations", match[1], line)
        lines.keep("operations per second", match[2], line)
    elif match := _TRANSFERRED.fullmatch(line.text):
        line.parse_positive(match[1], "MiB transferred")
        lines.keep("transferred per second", match[2], line)
    elif not _INTERVAL.fullmatch(line.text) and not _SAYS_NOTHING.fullmatch(line.text):
        name, _, value = line.text.partition(":")
        if value.strip():
            lines.keep(f"{title}{name.strip()}", value.strip(), line)
        else:
            lines.add_unknown(line)


def _run(version: str, lines: Lines) -> SysbenchRun:
    memory = _parse_memory(lines) if lines.has("transferred per second") else None
    rate = "CPU speed:events per second" if memory is None else "operations per second"
    limit = lines.take_optional("Prime numbers limit", Line.read_count, "a prime limit")
    threads = lines.take("Number of threads", Line.read_count, "threads")
    if threads == 0:
        raise lines.make_error("at least one thread", "0")
    # What was cut lacks these.
    lines.take("General statistics:total number of events", Line.read_count, "events")
    lines.take("General statistics:total time", _parse_seconds, "a time in seconds such as 2.0720s")
    return SysbenchRun(
        version=version,
        threads=threads,
        prime_limit=limit,
        events_per_s=lines.take(rate, Line.parse_positive, "events per second"),
        events_per_thread=lines.take_optional(
            "Threads fairness:events (avg/stddev)", _pair, "a mean and a deviation"
        ),
        memory=memory,
        gaps=(*lines.gaps, *_list_unread_gaps(lines)),
    )


def _parse_memory(lines: Lines) -> SysbenchMemory:
    return SysbenchMemory(
        block_bytes=lines.take("block size", _parse_kib, "block size in KiB"),
        operation=lines.take("operation", Line.read_word, "an operation"),
        scope=lines.take("scope", Line.read_word, "a scope"),
        bytes_per_s=lines.take("transferred per second", Line.parse_positive, "MiB/sec") * MIB,
    )


def _list_unread_gaps(lines: Lines) -> Iterator[Gap]:
    for name, word, line in lines.list_untaken():
        if not _NOT_READ.fullmatch(name):
            text = f"{name}: {word}"
            yield Gap(f"{_SOURCE} line {line.number}", f"not known: {text[:80]!r}")


def _parse_seconds(line: Line, word: str, expected: str) -> float:
    match = _SECONDS.fullmatch(word)
    if match is None:
        raise line.make_error(expected, word)
    return line.parse_positive(match[1], expected)


def _parse_kib(line: Line, word: str, expected: str) -> int:
    if not word.endswith("KiB"):
        raise line.make_error(expected, word)
    return line.read_count(word.removesuffix("KiB"), expected) * KIB


def _pair(line: Line, word: str, expected: str) -> tuple[float, float] | None:
    pair = _PAIR.fullmatch(word)
    if pair is None:
        raise line.make_error(expected, word)
    mean, deviation = (line.value_or_none(part, expected) for part in pair.groups())
    return None if mean is None or deviation is None else (mean, deviation)


DEVIATION = "deviation over threads"
"""Variant of cpu-fairness: standard deviation over mean of the threads' events."""


def read_sysbench_results(run: SysbenchRun) -> MeasuredSamples:
    """Return the events per second, on one thread or on all; the memory test under its own name."""
    results = SampleBuilder("sysbench", run.version, run.gaps)
    if run.memory is not None:
        memory = run.memory
        variant = f"{memory.operation} {memory.block_bytes} bytes {memory.scope}"
        results.add("sysbench-memory", "bytes_per_s", memory.bytes_per_s, variant=variant)
        if memory.shares_one_buffer:
            results.add_gap("memory bandwidth", "sysbench's threads shared one buffer in a cache")
    elif run.threads == 1:
        results.add("cpu-single", "events_per_s", run.events_per_s)
    else:
        results.add("cpu-throughput", "events_per_s", run.events_per_s)
        results.add("cpu-per-thread", "events_per_s", run.events_per_s / run.threads)
        if run.events_per_thread is not None and run.events_per_thread[0] > 0:
            mean, deviation = run.events_per_thread
            results.add("cpu-fairness", "ratio", deviation / mean, variant=DEVIATION)
    results.add_condition("tool sysbench primes", run.prime_limit)
    return results.build_samples()


OUTPUT = ToolOutput(
    "sysbench",
    re.compile(r"^sysbench \d+\.\d+", re.M),
    read_from_text(parse, read_sysbench_results),
)
