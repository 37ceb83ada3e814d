"""sysbench: prime numbers per second, and a memory loop.

    sysbench cpu --threads=2 --time=30 run
    sysbench memory --threads=2 --memory-block-size=1M --memory-total-size=8G run

Seen of 1.0.20. Source: its outputs. What they do not say:

* Fairness is a mean and a deviation over threads. How many events each thread had is not printed.
* The memory test's defaults (1 KiB blocks, one buffer that all threads write) measure a first-level
  cache and the cost of an event, not memory: see `SysbenchMemory.shares_one_buffer`.
* "MiB/sec" is 2^20; latencies are in ms with two decimals, so that 0.00 is "below 5 us".
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.tools.figures import count, figure, figure_or_none, positive
from homenode.units import KIB, MIB

_SOURCE = "sysbench"
_VERSION = re.compile(r"sysbench (\d+)\.(\d++)(\S*+)(?: \(.*\))?", re.ASCII)
_INTERVAL = re.compile(r"\[ (\d+)s \] thds: (\d+) eps: (\S+) lat \(ms,(\d+)%\): (\S+)", re.ASCII)
_MEMORY_INTERVAL = re.compile(r"\[ (\d+)s \] (\S+) MiB/sec", re.ASCII)
_OPERATIONS = re.compile(r"Total operations: (\S+) \(\s*(\S+) per second\)", re.ASCII)
_TRANSFERRED = re.compile(r"(\S+) MiB transferred \((\S+) MiB/sec\)", re.ASCII)
_PERCENTILE = re.compile(r"(\d{1,3})th percentile", re.ASCII)
_PAIR = re.compile(r"([^\s/]+)/(\S+)", re.ASCII)
_SECONDS = re.compile(r"(\S+?)s", re.ASCII)
_TITLES = {
    "CPU speed:",
    "General statistics:",
    "Latency (ms):",
    "Threads fairness:",
    "Throughput:",
}
_SAYS_NOTHING = (
    "Running the test with following options:",
    "Running memory speed test with the following options:",
    "Initializing random number generator from",
    "Initializing worker threads...",
    "Threads started!",
    "Report intermediate results every",
    "Additional request validation enabled",
    "Target transaction rate:",
    "WARNING:",
)


@dataclass(frozen=True, slots=True)
class SysbenchInterval:
    """One line of --report-interval. at_ns: since the start."""

    at_ns: float
    threads: int | None
    events_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class SysbenchMemory:
    """What the memory test did. operation: "write", "read" or "none". scope: "global", "local"."""

    block_bytes: int
    total_bytes: int
    operation: str
    scope: str
    transferred_bytes: float
    bytes_per_s: float

    @property
    def shares_one_buffer(self) -> bool:
        """True where all threads used the same block: nothing of it says how fast memory is."""
        return self.scope == "global"


@dataclass(frozen=True, slots=True)
class SysbenchRun:
    """One run. None where the tool does not say.

    prime_limit: of the cpu test, None for others. events: in all threads together.
    events_per_thread, busy_ns: (mean, deviation) over threads.
    latency_ns: of one event, by name ("min", "avg", "max", "95"); memory: of the memory test.
    """

    version: str
    threads: int
    prime_limit: int | None
    events: int
    elapsed_ns: float
    events_per_s: float
    latency_ns: tuple[tuple[str, float], ...]
    events_per_thread: tuple[float, float] | None
    busy_ns: tuple[float, float] | None
    memory: SysbenchMemory | None
    intervals: tuple[SysbenchInterval, ...]
    gaps: tuple[Gap, ...]


def parse(text: str) -> SysbenchRun:
    """The one run of an output. Raises ParseError, also for one that was cut short."""
    return _Reader().read(text)


class _Reader:
    """Values by their titles and names; filled line by line."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, int]] = {}
        self.intervals: list[SysbenchInterval] = []
        self.gaps: list[Gap] = []
        self.version: str | None = None

    def read(self, text: str) -> SysbenchRun:
        title = ""
        for number, line in _after_version(text):
            version = _VERSION.fullmatch(line)
            if version is not None:
                if self.version is not None:
                    raise ParseError(_SOURCE, "one run", line, line=number)
                if version[1] != "1":
                    raise ParseError(_SOURCE, "sysbench 1.x", line, line=number)
                self.version = f"{version[1]}.{version[2]}{version[3]}"
            elif line in _TITLES:
                title = line
            else:
                self._value(line, title, number)
        return self._run()

    def _value(self, line: str, title: str, number: int) -> None:
        if self._interval(line, number):
            return
        operations = _OPERATIONS.fullmatch(line)
        transferred = _TRANSFERRED.fullmatch(line)
        if operations is not None:
            self._keep("operations", operations[1], number)
            self._keep("operations per second", operations[2], number)
            return
        if transferred is not None:
            self._keep("transferred", transferred[1], number)
            self._keep("transferred per second", transferred[2], number)
            return
        name, colon, value = line.partition(":")
        if line.startswith(_SAYS_NOTHING):
            return
        if not colon or not value.strip():
            self.gaps.append(Gap(f"{_SOURCE} line {number}", f"not known: {line[:80]!r}"))
            return
        self._keep(f"{title}{name.strip()}", value.strip(), number)

    def _keep(self, name: str, value: str, number: int) -> None:
        if name in self.found:
            raise ParseError(_SOURCE, f"one value of {name!r}", value, line=number)
        self.found[name] = (value, number)

    def _interval(self, line: str, number: int) -> bool:
        cpu = _INTERVAL.fullmatch(line)
        memory = _MEMORY_INTERVAL.fullmatch(line)
        if cpu is not None:
            self.intervals.append(
                SysbenchInterval(
                    count(cpu[1], _SOURCE, "seconds", number) * 1e9,
                    count(cpu[2], _SOURCE, "threads", number),
                    figure(cpu[3], _SOURCE, "events per second", number),
                    None,
                )
            )
        elif memory is not None:
            self.intervals.append(
                SysbenchInterval(
                    count(memory[1], _SOURCE, "seconds", number) * 1e9,
                    None,
                    None,
                    figure(memory[2], _SOURCE, "a rate", number) * MIB,
                )
            )
        return cpu is not None or memory is not None

    def _run(self) -> SysbenchRun:
        if self.version is None:
            raise ParseError(
                _SOURCE, "a line 'sysbench 1.0.20'", "none", hint="sysbench 0.4 is not read"
            )
        memory = self._memory()
        rate = "CPU speed:events per second" if memory is None else "operations per second"
        limit = self.found.pop("Prime numbers limit", None)
        run = SysbenchRun(
            self.version,
            self._count("Number of threads"),
            None if limit is None else count(limit[0], _SOURCE, "a prime limit", limit[1]),
            self._count("General statistics:total number of events"),
            self._seconds("General statistics:total time"),
            self._positive(rate),
            tuple(self._latencies()),
            self._pair("Threads fairness:events (avg/stddev)", 1),
            self._pair("Threads fairness:execution time (avg/stddev)", 1e9),
            memory,
            tuple(self.intervals),
            tuple(self.gaps) + tuple(self._unread()),
        )
        if run.threads == 0:
            raise ParseError(_SOURCE, "at least one thread", "0")
        return run

    def _memory(self) -> SysbenchMemory | None:
        if "transferred" not in self.found:
            return None
        self._take("operations")
        return SysbenchMemory(
            self._size("block size", "KiB", KIB),
            self._size("total size", "MiB", MIB),
            self._take("operation")[0],
            self._take("scope")[0],
            self._positive("transferred") * MIB,
            self._positive("transferred per second") * MIB,
        )

    def _latencies(self) -> Iterator[tuple[str, float]]:
        for name in [name for name in self.found if name.startswith("Latency (ms):")]:
            value, number = self._take(name)
            short = name.removeprefix("Latency (ms):")
            if short == "sum":
                continue
            percentile = _PERCENTILE.fullmatch(short)
            latency = figure_or_none(value, _SOURCE, "a latency in ms", number)
            if latency is not None:
                yield (percentile[1] if percentile else short), latency * 1e6

    def _unread(self) -> Iterator[Gap]:
        for name, (value, number) in self.found.items():
            yield Gap(f"{_SOURCE} line {number}", f"not known: {f'{name}: {value}'[:80]!r}")

    def _take(self, name: str) -> tuple[str, int]:
        if name not in self.found:
            raise ParseError(
                _SOURCE,
                f"a line {name.rpartition(':')[2]!r}",
                "none",
                hint="the run ended early, or its output was cut",
            )
        return self.found.pop(name)

    def _count(self, name: str) -> int:
        value, number = self._take(name)
        return count(value, _SOURCE, name, number)

    def _positive(self, name: str) -> float:
        value, number = self._take(name)
        return positive(value, _SOURCE, name, number)

    def _seconds(self, name: str) -> float:
        value, number = self._take(name)
        matched = _SECONDS.fullmatch(value)
        if matched is None:
            raise ParseError(_SOURCE, "a time in seconds such as 2.0720s", value, line=number)
        return positive(matched[1], _SOURCE, "a time in seconds", number) * 1e9

    def _size(self, name: str, unit: str, unit_bytes: int) -> int:
        value, number = self._take(name)
        if not value.endswith(unit):
            raise ParseError(_SOURCE, f"{name} in {unit}", value, line=number)
        return count(value.removesuffix(unit), _SOURCE, name, number) * unit_bytes

    def _pair(self, name: str, scale: float) -> tuple[float, float] | None:
        if name not in self.found:
            return None
        value, number = self._take(name)
        pair = _PAIR.fullmatch(value)
        if pair is None:
            raise ParseError(_SOURCE, "a mean and a deviation", value, line=number)
        mean = figure_or_none(pair[1], _SOURCE, "a mean", number)
        deviation = figure_or_none(pair[2], _SOURCE, "a deviation", number)
        return None if mean is None or deviation is None else (mean * scale, deviation * scale)


def _after_version(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines from the version on: a shell's prompt or warnings may stand before it."""
    begun = False
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        begun = begun or _VERSION.fullmatch(line) is not None
        if begun and line:
            yield number, line
