"""Bench test: one command of the suite, with everything needed to run and read it."""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.findings import Gap
from homenode.units import GIB

PROBE = "homenode-probe"
PYTHON = "python"
"""In `installed`: the Python of SuiteOptions.python runs on the machine."""

TORCH = "torch"
"""In `installed`: the Python of SuiteOptions.python has PyTorch (measure.tools_installed looks)."""


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
