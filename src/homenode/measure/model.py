"""Bench test: one command of the suite, with everything needed to run and read it; the options of
one run of the suite, and its outcome; results of a tool's output before a run has them."""

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import ParseError, UsageError
from homenode.findings import Finding, Gap
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Condition, Run, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.units import GIB
from homenode.vm.plan import Plan

PROBE = "homenode-probe"
PYTHON = "python"
"""In `installed`: the Python of SuiteOptions.python runs on the machine."""

TORCH = "torch"
"""In `installed`: the Python of SuiteOptions.python has PyTorch (measure.tool_setup looks)."""


class SuiteDepth(StrEnum):
    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


SECONDS = {SuiteDepth.QUICK: 0.5, SuiteDepth.NORMAL: 2.0, SuiteDepth.FULL: 8.0}
"""Approximate time for one result."""


class SuiteGroup(StrEnum):
    """Groups of tests by name; the study's names if it has the test."""

    CPU_SINGLE = "cpu-single"
    CPU_ALL = "cpu-all"
    MEMORY_BANDWIDTH = "stream"
    MEMORY_LATENCY = "mem-latency"
    CORE_TO_CORE = "core-to-core"
    SMT = "smt"
    PLACEMENT = "placement"
    GPU_COPY = "gpu-copy"
    MATMUL = "gpu-compute"
    GPU_BANDWIDTH = "gpu-bandwidth"
    GPU_SMALL = "gpu-small-copies"
    GPU_PEER = "gpu-peer"
    NCCL = "nccl"
    APP = "app"  # the user's own program (--app)


CONTROLS = frozenset({SuiteGroup.CPU_SINGLE, SuiteGroup.GPU_COPY, SuiteGroup.MATMUL})
"""Tests that no layout should change; if one changes, another cause changed the machine."""


class Reader(StrEnum):
    """Reader of a test's output. PROBE is read by the probe's own reader, APP by its metric, all
    others by measure.step_reading."""

    PROBE = "homenode-probe"
    NVBANDWIDTH = "nvbandwidth"
    NCCL_TESTS = "nccl-tests"  # rccl-tests too
    ROCM = "rocm-bandwidth-test"
    TORCH = "torch"  # homenode's program, measure/programs/torch_copies.py
    APP = "app"  # the user's own program


class BenchTest(Struct, frozen=True):
    id: str  # unique in the suite
    group: SuiteGroup
    argv: tuple[str, ...]
    seconds: float  # about how long it takes
    # then it is stopped, and that is its result: peer access of some virtual functions hangs
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()  # variables next to the usual
    reads: Reader = Reader.PROBE  # how its output is read
    # a program of measure/programs that it gets on standard input (its argv ends "python3 - ..."),
    # None if it gets nothing
    program: str | None = None
    # where its CPUs and host memory are bound; None if the tool binds as it likes
    node: NodeIndex | None = None
    # the binding of a collective, as text; None for other tests
    binding: str | None = None
    # variant of this test's results, to separate them from the main test of its metric ("P2P off");
    # None for the main test
    variant: str | None = None
    # alternative tests of the same quantity, tried in this order if it is missing, fails, times out
    # or cannot be read; each has an id of its own and none of these
    alternatives: "tuple[BenchTest, ...]" = ()
    # meaning of a timeout, or None
    if_stopped: str | None = None
    # the GPUs by the tools' numbers, if the driver lists them; () if it did not
    gpus: tuple[Bdf, ...] = ()

    @property
    def is_control(self) -> bool:
        return self.group in CONTROLS

    def or_else(self, *others: "BenchTest") -> "BenchTest":
        """Return the test with alternatives, each named after it and its tool."""
        named_tests = (replace(test, id=f"{self.id} ({test.reads})") for test in others)
        return replace(self, alternatives=tuple(named_tests))

    @property
    def attempts(self) -> "tuple[BenchTest, ...]":
        """The commands to try in order until one has results."""
        return (self, *self.alternatives)


class Suite(Struct, frozen=True):
    """Tests in a fixed order (the schedule mixes them), and tests that this machine cannot run."""

    tests: tuple[BenchTest, ...]
    omitted: tuple[Gap, ...]


class SuiteOptions(Struct, frozen=True):
    """Tests of the suite, and their durations."""

    groups: tuple[SuiteGroup, ...] = ()  # () = all that can be
    depth: SuiteDepth = SuiteDepth.NORMAL
    largest_message_bytes: int = GIB  # largest message of collectives
    python: str = "python3"  # the Python whose PyTorch measures if a tool is missing or fails
    # text of a topology file for NCCL; all-reduces are measured with and without it
    topology: str | None = None
    why_no_topology: str | None = None  # why one that should be there is not


APP_TIMEOUT_S = 3600.0
MAX_NAME = 120
"""Letters of a run's name."""


class AppCommand(Struct, frozen=True):
    """The user's own program as a test."""

    argv: tuple[str, ...]  # no shell sees it
    # a regular expression with one group, searched in each line of the output; the last match is
    # the result
    metric: str
    lower_is_better: bool = False  # it is a time, not a rate
    name: str = "app"  # name of the metric
    timeout_s: float = APP_TIMEOUT_S


class BenchOptions(Struct, frozen=True):
    """A run: results/<system>/<name>/."""

    name: str
    suite: SuiteOptions = field(default_factory=SuiteOptions)
    repeats: int = 3
    seed: int = 1
    # of the layout; from the plan, if one is given and these are unknown
    switches: Switches = UNKNOWN_SWITCHES
    vantage: Vantage = Vantage.GUEST
    plan: Plan | None = None  # plan of the measured guest, which is verified first
    domain_xml: bytes | None = None  # stored next to it
    # of libvirt, QEMU and the machine type, from the host that started the guest
    versions: tuple[Condition, ...] = ()
    boot: str | None = None  # identity of this boot; None = read from the machine
    app: AppCommand | None = None
    pus: CpuSet | None = None  # measure on these alone
    nodes: tuple[int, ...] | None = None  # measure on these alone
    system: str | None = None  # directory above the run; None = the GPU's name, or cpu-only
    host: str | None = None  # name of the machine below a guest, see RunHead
    host_kind: str | None = None  # hardware of the machine below a guest, see RunHead
    arrangement: str | None = None
    emulated: bool = False  # results are meaningless; the probe detects TCG itself
    force: bool = False  # measure a guest that is not as planned, and mark the run
    marks: tuple[str, ...] = ()  # why nothing must be concluded, known beforehand
    experiment: str | None = None  # see RunHead
    block: int | None = None  # see RunHead


class BenchOutcome(Struct, frozen=True):
    """The outcome of a run. directory (a path), run: None if the guest differs from its plan, so
    nothing was measured."""

    directory: str | None
    run: Run | None
    findings: tuple[Finding, ...]  # findings of verification, preflight and run
    gaps: tuple[Gap, ...]  # tests that this machine does not get, failed, or ran out of time
    unknown: tuple[str, ...] = ()  # unknown facts of the host, a line each


def check_name(name: str, option: str = "--name") -> None:
    """Raise UsageError for a name that cannot be a results directory."""
    sound = 0 < len(name) <= MAX_NAME and name.isprintable() and "/" not in name
    if not sound or name.startswith("."):
        raise UsageError(
            f"{option}: {name[:40]!r} cannot name a directory (1 to {MAX_NAME} characters, no /, "
            "no leading dot)"
        )


def choose_cpus(options: BenchOptions) -> CpuSet | None:
    """Return the CPUs of a run: the requested ones, else, on a host, the plan's."""
    if options.pus is not None or options.vantage is Vantage.GUEST or options.plan is None:
        return options.pus
    pinned_cpus = CpuSet.union(options.plan.vcpu_pins)
    if not pinned_cpus:
        raise UsageError(
            "--plan: this plan pins no vCPUs, so it names no CPUs to measure on",
            hint="--cpus LIST",
        )
    return pinned_cpus


T = TypeVar("T")


class MeasuredSamples(Struct, frozen=True):
    """Samples of one or more outputs."""

    samples: tuple[Sample, ...] = ()
    conditions: tuple[Condition, ...] = ()  # what must be equal for these samples to be comparable
    gpu_names: tuple[str, ...] = ()  # as printed; gpus decide under which system
    gaps: tuple[Gap, ...] = ()
    findings: tuple[Finding, ...] = ()  # faults of the machine that the results show


def _reject_log(text: str, name: str) -> MeasuredSamples:
    raise ParseError(name, "a tool's output", "what the suite alone prints")


def _reject_step(test: BenchTest, text: str, host: Host) -> MeasuredSamples:
    raise ParseError(test.id, "a tool of the suite", test.reads)


class ToolOutput(Struct, frozen=True):
    name: str  # the tool's, for people
    # text that only this tool prints; None: files are not searched
    sign: re.Pattern[str] | None = None
    of_log: Callable[[str, str], MeasuredSamples] = (
        _reject_log  # the results of a file and its name
    )
    # of a test of the suite, which also knows its GPUs, its binding and the machine
    of_step: Callable[[BenchTest, str, Host], MeasuredSamples] = _reject_step


def read_from_text(
    parse: Callable[[str], T], results: Callable[[T], MeasuredSamples]
) -> Callable[[str, str], MeasuredSamples]:
    """Return the results of a file without information in its name."""
    return lambda text, name: results(parse(text))


class SampleBuilder:
    """The results of one output. tool: its name and version, which comparable runs share."""

    def __init__(self, tool: str, version: str | None, gaps: Iterable[Gap] = ()) -> None:
        self._samples: list[Sample] = []
        self._conditions = [Condition(f"tool {tool}", version or "unknown version")]
        self._gaps = list(gaps)

    def add(self, metric: str, unit: str, value: float, **fields: Any) -> None:
        self._samples.append(sample(metric, unit, value, **fields))

    def add_condition(self, name: str, value: object) -> None:
        """Add a condition, unless its value is None."""
        if value is not None:
            self._conditions.append(Condition(name, str(value)))

    def add_gap(self, subject: str, reason: str) -> None:
        self._gaps.append(Gap(subject, reason))

    def build_samples(self, gpu_names: Iterable[str] = ()) -> MeasuredSamples:
        names = tuple(dict.fromkeys(gpu_names))
        return MeasuredSamples(
            tuple(self._samples), tuple(self._conditions), names, tuple(self._gaps)
        )


def join_samples(parts: Iterable[MeasuredSamples]) -> MeasuredSamples:
    """Join results in order; samples are numbered within their series."""
    parts = tuple(parts)
    return MeasuredSamples(
        number_samples(sample for part in parts for sample in part.samples),
        tuple(dict.fromkeys(condition for part in parts for condition in part.conditions)),
        tuple(dict.fromkeys(name for part in parts for name in part.gpu_names)),
        tuple(dict.fromkeys(gap for part in parts for gap in part.gaps)),
        tuple(dict.fromkeys(finding for part in parts for finding in part.findings)),
    )


def number_samples(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return the samples with `number` counted from 0 within boot and series.

    >>> [s.number for s in number_samples([Sample("x", "ns", 1.0), Sample("x", "ns", 2.0)])]
    [0, 1]
    """
    sample_counts: dict[tuple[Any, ...], int] = {}
    numbered_samples = []
    for sample in samples:
        series = (
            sample.boot,
            sample.metric,
            sample.variant,
            sample.size_bytes,
            sample.device,
            sample.peer,
            sample.index,
            sample.node,
            sample.peer_node,
            sample.state,
        )
        number = sample_counts.get(series, 0)
        sample_counts[series] = number + 1
        numbered_samples.append(replace(sample, number=number))
    return tuple(numbered_samples)


def sample(metric: str, unit: str, value: float, **fields: Any) -> Sample:
    """Return a value, without the noise in its last digits that a change of unit leaves.

    >>> sample("x", "bytes_per_s", 135653799999.99998).value
    135653800000.0
    """
    return Sample(metric, unit, float(f"{value:.12g}"), **fields)
