"""Run: the samples of one suite on one machine under one layout, with its conditions.

A run is the unit of storage, a boot the unit of replication, a sample the smallest result.
Published results have the same form, marked by `origin` and `statistic`.

A sweep of rates over sizes has a start-up time, a rate and a knee, by least squares: a transfer of
s bytes takes the start-up time and s over the rate, so that its rate climbs to half at the knee,
start-up time times rate, whatever the sizes are. A fixed size in bytes cannot show that a curve is
flat: eight GPUs with 20 us and 8.4 GB/s are at 90 % of their rate from 1 MiB on, and healthy.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.measure.results.vantage import Vantage
from homenode.units import MIB, format_bytes
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
)


class Origin(StrEnum):
    """Origin of a run's results."""

    MEASURED = "measured"  # by homenode's own suite
    IMPORTED = "imported"  # read from another tool's output
    PUBLISHED = "published"  # printed in a document; samples are not available
    SYNTHESISED = "synthesised"  # made up in a tool's format, to show or to test something
    EMULATED = "emulated"  # measured on an emulated machine: results are meaningless


class Statistic(StrEnum):
    SAMPLE = "sample"
    MEAN = "mean"
    MEDIAN = "median"
    BEST = "best"
    LOW = "low"  # the lower end of a range that was printed without its samples
    HIGH = "high"  # the upper end
    UNKNOWN = "unknown"  # unknown in the source


class Switches(Struct, frozen=True):
    """A layout's five switches, None = unknown.

    >>> Switches.from_layout(PRESETS["pin-numa"]).name
    'pin-numa'
    >>> Switches(None, None, None, None, None).name
    'unknown'
    """

    pinning: Pinning | None
    siblings: Siblings | None
    cells: GuestCells | None
    pcie: GuestPcie | None
    memory: MemoryBinding | None

    @classmethod
    def from_layout(cls, layout: Layout) -> "Switches":
        return cls(layout.pinning, layout.siblings, layout.cells, layout.pcie, layout.memory)

    @property
    def name(self) -> str:
        """The preset's name; "unknown" if no switch is known, else the known switches."""
        for name, preset in PRESETS.items():
            if Switches.from_layout(preset) == self:
                return name
        words = [
            f"{switch} {value}"
            for switch, value in (
                ("pinning", self.pinning),
                ("siblings", self.siblings),
                ("cells", self.cells),
                ("pcie", self.pcie),
                ("memory", self.memory),
            )
            if value is not None
        ]
        return ", ".join(words) or "unknown"


UNKNOWN_SWITCHES = Switches(None, None, None, None, None)

CPU_ONLY, GPU_UNKNOWN = "cpu-only", "gpu-unknown"
"""Systems without a GPU, and with one of unknown name."""


def name_system(gpu_name: str | None) -> str:
    """Return the directory of a machine: its GPU's name, as a directory can have it.

    >>> name_system("NVIDIA GH200 480GB"), name_system(None)
    ('nvidia-gh200-480gb', 'gpu-unknown')
    """
    return re.sub(r"[^a-z0-9]+", "-", (gpu_name or "").lower()).strip("-")[:80] or GPU_UNKNOWN


COLLECTIVE_GPUS = "tool collective GPUs"
"""Condition: how many GPUs a collective of another tool had."""

UNSETTLED = "unsettled"
"""State of a sample during which a CPU was moved, or whose place is unknown: in no series."""

MOVING = "moving"
"""State of many CPUs that move all the time."""


class Condition(Struct, frozen=True):
    """A condition that must be equal in comparable runs."""

    # `governor`, `clock`, `microcode`, `kernel`, `driver`, `tool NAME`, `link BDF`, `others` and so
    # on
    name: str
    value: str  # as it was read, with its unit


class GpuPlace(Struct, frozen=True):
    """Place of a GPU as shown by the measured machine."""

    device: Bdf  # as in Sample
    node: int | None  # its numa_node there; None if the kernel reports -1


class Sample(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A measured value, in its metric's own unit (homenode.metrics).

    A Struct, because a results directory has millions: read in a seventh of a dataclass's time.
    device, peer: the GPU, and the other one of a pair: host addresses where the run says
    `host_addresses`, else those that the suite saw. index: position in a tool's own order if
    nothing better is known; never used to pair. node, peer_node: where the memory or the thread
    was; of a GPU, `peer_node` alone is where the tool's thread was seen, which was not bound.
    size_bytes: of a message or working set. variant: what else distinguishes series (a kernel, a
    data type, a level). boot, number: counted from 0 within the run, and within boot and series.
    state: the placement state that the probe saw; states are never pooled. count: samples behind a
    figure that is not a sample, None if unknown in the source. disturbed: somebody else ran.
    """

    metric: str
    unit: str
    value: float
    boot: int = 0
    number: int = 0
    device: Bdf | None = None
    peer: Bdf | None = None
    index: int | None = None
    node: int | None = None
    peer_node: int | None = None
    size_bytes: int | None = None
    variant: str | None = None
    state: str | None = None
    statistic: Statistic = Statistic.SAMPLE
    count: int | None = 1
    disturbed: bool = False


class RunHead(Struct, frozen=True, omit_defaults=True):
    """All data of a run except its samples."""

    name: str  # the directory's
    system: str  # the directory above: the GPU, or `cpu-only`
    origin: Origin
    vantage: Vantage
    switches: Switches
    # machines of equal kind have equal texts ("2x Intel Xeon Platinum 8558, NVIDIA H200")
    host_kind: str | None = None
    host: str | None = None  # fingerprint of the host itself, not of its kind
    arrangement: str | None = None  # what else was chosen ("local", "memory-first")
    memory_mode: str | None = None  # strict, interleave or preferred, of bound memory
    page_bytes: int | None = None  # page size of the guest's backing
    vcpus: int | None = None
    # pus, nodes: of the host, that the plan pinned or the host run was confined to
    pus: CpuSet | None = None
    nodes: tuple[int, ...] | None = None
    plan_fingerprint: str | None = None
    # identity of each boot, in the order of Sample.boot; empty if unknown
    boots: tuple[str, ...] = ()
    gpus: tuple[GpuPlace, ...] = ()
    host_addresses: bool = False
    conditions: tuple[Condition, ...] = ()
    # why nothing must be concluded from this run, as the suite noted it
    unusable: tuple[str, ...] = ()
    source: str | None = None  # the document or directory
    # started_s, ended_s: of the first and the last step, in seconds since 1970 (UTC); None if
    # unknown
    started_s: float | None = None
    ended_s: float | None = None
    of_files: bool = False  # these are times of the files that an imported run was read from
    place: int | None = None  # position of an imported run in the user's order
    experiment: str | None = None  # id of the trial or study of which this run is a part
    # its round there, from 0: a block holds one run of each layout or binding, taken one after
    # another
    block: int | None = None
    hardware: tuple[str, ...] = ()  # processors and GPUs, as the machine or the tool names them


class SeriesId(Struct, frozen=True, gc=False):
    # metric, unit: see docs/reference/formats/comparison.md; the rest is what distinguishes
    # it from others of its metric, None if it is over all
    metric: str
    unit: str
    variant: str | None
    size_bytes: int | None
    node: int | None
    peer_node: int | None
    device: Bdf | None
    peer: Bdf | None
    state: str | None

    @property
    def is_over_all(self) -> bool:
        """Whether the series is over all sizes, nodes and devices."""
        places = (self.size_bytes, self.node, self.peer_node, self.device, self.peer)
        return places == (None,) * 5


class SampleKey(SeriesId, frozen=True, gc=False):
    """Key of samples that repeat one measurement in one boot."""

    position: int | None  # the index of a Sample
    boot: int


_FIELDS = attrgetter(*SeriesId.__struct_fields__, "index", "boot")


_LEAST, _MOST = 1e-12, 1e30
"""Limits of values, which no unit exceeds; arithmetic between them cannot overflow."""


class Run(Struct, frozen=True, dict=True):
    head: RunHead
    samples: tuple[Sample, ...]

    @cached_property
    def groups(self) -> Mapping[SampleKey, Sequence[Sample]]:
        """Accepted samples by key. Cached: readers by series then read only a fifth."""
        by_fields: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in self.samples:
            if _LEAST < sample.value < _MOST:
                fields = _FIELDS(sample)
                if (group := by_fields.get(fields)) is None:
                    group = by_fields[fields] = []
                group.append(sample)
        return {SampleKey(*fields): group for fields, group in by_fields.items()}

    @cached_property
    def impossible_samples(self) -> tuple[Sample, ...]:
        return tuple([sample for sample in self.samples if not _LEAST < sample.value < _MOST])

    @cached_property
    def metrics(self) -> frozenset[str]:
        """Metrics of the samples that are not rejected."""
        return frozenset({key.metric for key in self.groups})

    @cached_property
    def boots(self) -> frozenset[int]:
        """Numbers of the boots that samples are of."""
        return frozenset({key.boot for key in self.groups})

    @cached_property
    def has_states(self) -> bool:
        """Whether an accepted sample names a placement state."""
        return any(key.state is not None for key in self.groups)


def host_kind(host: Host) -> str:
    """Return the packages, processor, GPUs: "2x Intel(R) Xeon(R) ..., 8x NVIDIA H200"."""
    names = [
        gpu.name or (f"GPU {gpu.device_id}" if gpu.device_id is not None else "GPU")
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None
    ]
    cpu = host.cpu.name or host.architecture or "unknown processor"
    parts = [f"{len(host.packages) or 1}x {cpu}"]
    parts += [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]
    return ", ".join(parts)


def list_hardware(host: Host) -> tuple[str, ...]:
    """Return the names of a host's processor and of its GPUs, each once."""
    gpus = (gpu.name for gpu in host.devices_of_kind(DeviceKind.GPU))
    return tuple(dict.fromkeys(name for name in (host.cpu.name, *gpus) if name))


MIN_RATE_BYTES_PER_S = 1e9
"""A lane of PCIe 3.0. Rates of healthy collectives through host memory are 2 to 20 GB/s; eight
RTX 5090 behind Gen 2 links had 0.53 GB/s (the study)."""

MIN_RATE_PRINTED = 5e7
"""Two decimals of GB/s are off by a tenth and more below this."""

MIN_POINTS = 4
FLAT_WITHIN = 0.10
BEYOND_KNEE = 16  # times the knee: there the start-up time costs 6 % of the rate


class SweepFit(Struct, frozen=True, kw_only=True):
    """The curve time = start-up time + size over rate."""

    start_s: float
    rate_bytes_per_s: float
    knee_bytes: float
    spread: float  # root mean square of what it leaves, as a part of each rate

    @property
    def text(self) -> str:
        """ "20 us + 8.6 GB/s, knee at 180 KiB"."""
        start, rate = self.start_s * 1e6, self.rate_bytes_per_s / 1e9
        return f"{start:.3g} us + {rate:.3g} GB/s, knee at {_round_bytes(self.knee_bytes)}"


def fit_sweep(points: Sequence[tuple[int, float]], factor: float = 1.0) -> SweepFit | None:
    """The fit of (size, rate) in bytes and bytes/s; None for too few, or a rate never reached.

    factor: bytes on the bus for each byte of a message: 2 (n - 1) / n of an all-reduce of n GPUs.
    1 over the rate is linear in 1 over the size; each point weighs as much as its relative error.
    """
    clear = [(size, rate) for size, rate in points if rate >= MIN_RATE_PRINTED]
    if len(clear) < MIN_POINTS:
        return None
    top = max(rate for _, rate in clear)
    first = min(size for size, _ in clear)
    rates = [rate / top for _, rate in clear]
    parts = [rate / top * first / size for size, rate in clear]
    square, cross = math.fsum(u * u for u in rates), math.fsum(map(operator.mul, rates, parts))
    parts_square = math.fsum(v * v for v in parts)
    determinant = square * parts_square - cross * cross
    if determinant <= 1e-12 * square * parts_square:
        return None
    level = (math.fsum(rates) * parts_square - math.fsum(parts) * cross) / determinant
    slope = (math.fsum(parts) * square - math.fsum(rates) * cross) / determinant
    if slope < 0:
        level, slope = math.fsum(rates) / square, 0.0
    if level <= 0:
        return None
    residuals = [1 - level * u - slope * v for u, v in zip(rates, parts, strict=True)]
    knee, rate = first * slope / level, top / level
    return SweepFit(
        start_s=knee * factor / rate,
        rate_bytes_per_s=rate,
        knee_bytes=knee,
        spread=math.sqrt(math.fsum(residual * residual for residual in residuals) / len(residuals)),
    )


def fit_flat(points: Sequence[tuple[int, float]], factor: float = 1.0) -> SweepFit | None:
    """Return the fit of a curve that meets a ceiling no start-up time explains; None of any other.

    The largest size is far beyond the knee, no size is faster than the fitted rate, and one lane
    would carry more.
    """
    fit = fit_sweep(points, factor)
    if fit is None or fit.rate_bytes_per_s >= MIN_RATE_BYTES_PER_S:
        return None
    largest = max(size for size, _ in points)
    fastest = max(rate for _, rate in points)
    is_reached = largest >= max(MIB, BEYOND_KNEE * fit.knee_bytes)
    return fit if is_reached and fastest <= fit.rate_bytes_per_s * (1 + FLAT_WITHIN) else None


def _round_bytes(size: float) -> str:
    """Return the bytes with two digits, in a unit that divides them.

    >>> _round_bytes(184_320.0), _round_bytes(0.0)
    ('180 KiB', '0 B')
    """
    unit = 1024 ** min(3, max(0, int(math.log(size, 1024)))) if size >= 1 else 1
    value = size / unit
    digits = 10 ** max(0, int(math.log10(value)) - 1) if value >= 1 else 1
    return format_bytes(round(value / digits) * digits * unit)
