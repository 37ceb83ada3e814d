"""Metric: what a figure measures, in which unit, and whether more of it is better.

Samples carry a metric's id and its unit; whatever is not listed here is not compared, but metrics
of the user's own program are: `app-rate:NAME` (more is better) and `app-time:NAME` (less is).
"""

from msgspec import Struct
from msgspec.structs import replace

from homenode.objective import Objective

CONTROL_MATTERS = 0.03
"""A control that moves by more than this says that something else than the layout changed."""


class Metric(Struct, frozen=True):
    """One thing that is measured.

    unit: of the samples: bytes_per_s, ns, events_per_s, flop_per_s, units_per_s. matters: the
    smallest relative difference that an operator would change a layout for. primary: objectives
    for which it decides; everything else is exploratory. stands_in: objectives for which it decides
    where no primary metric was measured. control: it should not depend on the layout. feels_pins:
    but on which cores the pins are. worst_device: with several devices, the slowest one counts, as
    every collective waits for it. headline: the variant that decides where there are several.
    about: what it measures. rise, fall: what to think of when it goes up or down. boot_variation:
    ratio that boots of one layout stay below, as far as anybody has seen; figures of fewer than
    three boots, and printed ones, are distinguished only beyond it.
    """

    id: str
    title: str
    unit: str
    lower_is_better: bool
    matters: float
    about: str
    rise: str
    fall: str
    primary: tuple[Objective, ...] = ()
    stands_in: tuple[Objective, ...] = ()
    control: bool = False
    feels_pins: bool = False
    worst_device: bool = False
    headline: str | None = None
    boot_variation: float = 1.10


_BANDWIDTH = "bytes_per_s"
TWO_STATES = 1.8
"""Memory bandwidth of one layout has been 47 GB/s in one boot and 79 in the next, 1.68 times, as
vCPUs came to stand on one cache domain or on two; with space for noise. Collectives that go through
host memory share it. Other metrics: the study's own pairs that differ by nothing but chance are up
to 6 % apart."""

_MORE_CONTROLLERS = "work and memory lie on the same nodes, and more memory controllers are used"

_METRICS = (
    Metric(
        "memory-bandwidth",
        "memory bandwidth",
        _BANDWIDTH,
        False,
        0.05,
        "what all vCPUs together read and write from memory (STREAM, homenode-probe)",
        _MORE_CONTROLLERS,
        "threads and memory are on different nodes, or all memory is on one",
        primary=(Objective.HOST_BANDWIDTH,),
        headline="triad",
        boot_variation=TWO_STATES,
    ),
    Metric(
        "memory-latency",
        "memory latency",
        "ns",
        True,
        0.05,
        "time of one dependent load from memory, beyond every cache",
        "memory is on another node, or pages are small and their walks are in the figure",
        "memory is on the node of the thread that loads",
        primary=(Objective.LATENCY,),
        headline="dram",
    ),
    Metric(
        "allreduce-busbw-peak",
        "all-reduce, peak bus bandwidth",
        _BANDWIDTH,
        False,
        0.10,
        "highest bus bandwidth of an all-reduce over message sizes (nccl-tests, rccl-tests)",
        "transport through memory stays on the GPUs' nodes",
        "transport crosses nodes: GPUs without a node, or ranks bound to the wrong one",
        primary=(Objective.COLLECTIVE,),
        boot_variation=TWO_STATES,
    ),
    Metric(
        "allreduce-busbw-mean",
        "all-reduce, mean bus bandwidth",
        _BANDWIDTH,
        False,
        0.10,
        "mean bus bandwidth of an all-reduce over message sizes; small messages weigh as much as "
        "large ones",
        "small messages became faster, or transport through memory stays on the GPUs' nodes",
        "small messages became slower, or transport crosses nodes",
        boot_variation=TWO_STATES,
    ),
    Metric(
        "allreduce-busbw",
        "all-reduce, bus bandwidth of a size",
        _BANDWIDTH,
        False,
        0.10,
        "bus bandwidth of an all-reduce at one message size",
        "transport through memory stays on the GPUs' nodes",
        "transport crosses nodes: GPUs without a node, or ranks bound to the wrong one",
        boot_variation=TWO_STATES,
    ),
    Metric(
        "allreduce-latency",
        "all-reduce, small messages",
        "ns",
        True,
        0.10,
        "time of an all-reduce of a few bytes",
        "more coordination between vCPUs and GPUs",
        "less coordination",
    ),
    Metric(
        "h2d-bandwidth",
        "host to device",
        _BANDWIDTH,
        False,
        0.05,
        "copies from pinned host memory to a GPU",
        "the buffer is on the GPU's node",
        "the buffer is on another node, or the link is slow",
        primary=(Objective.DEVICE_TRANSFER,),
        worst_device=True,
    ),
    Metric(
        "d2h-bandwidth",
        "device to host",
        _BANDWIDTH,
        False,
        0.05,
        "copies from a GPU to pinned host memory",
        "the buffer is on the GPU's node",
        "the buffer is on another node, or the link is slow",
        primary=(Objective.DEVICE_TRANSFER,),
        worst_device=True,
    ),
    Metric(
        "h2d-latency",
        "host to device latency",
        "ns",
        True,
        0.05,
        "time of one access between a GPU and host memory",
        "the memory is on another node than the GPU",
        "the memory is on the GPU's node",
        worst_device=True,
    ),
    Metric(
        "h2d-copy-time",
        "small copies to a device",
        "ns",
        True,
        0.05,
        "from the call to the arrival of a few bytes, as the thread that waits sees it",
        "the thread or its memory is on another node than the GPU, or the vCPU is not its own",
        "both are on the GPU's node",
        worst_device=True,
    ),
    Metric(
        "d2h-copy-time",
        "small copies from a device",
        "ns",
        True,
        0.05,
        "from the call until a few bytes have arrived, as the thread that waits sees it",
        "the thread or its memory is on another node than the GPU, or the vCPU is not its own",
        "both are on the GPU's node",
        worst_device=True,
    ),
    Metric(
        "p2p-bandwidth",
        "GPU to GPU",
        _BANDWIDTH,
        False,
        0.05,
        "copies between two GPUs",
        "peer access works",
        "copies go through host memory",
        stands_in=(Objective.COLLECTIVE,),
        worst_device=True,
    ),
    Metric(
        "d2d-bandwidth",
        "within a GPU",
        _BANDWIDTH,
        False,
        CONTROL_MATTERS,
        "copies within a GPU's own memory: no layout changes it",
        "clocks rose",
        "clocks fell, or somebody else uses the GPU",
        control=True,
        worst_device=True,
    ),
    Metric(
        "matmul-time",
        "matrix product",
        "ns",
        True,
        CONTROL_MATTERS,
        "time of one large matrix product on a GPU: no layout changes it",
        "clocks fell, heat, or launches wait for the CPU",
        "clocks rose",
        control=True,
        worst_device=True,
    ),
    Metric(
        "matmul-rate",
        "matrix product, rate",
        "flop_per_s",
        False,
        CONTROL_MATTERS,
        "large matrix products on a GPU, by data type: no layout changes it",
        "clocks rose",
        "clocks fell, heat, or launches wait for the CPU",
        control=True,
        worst_device=True,
        headline="bf16",
    ),
    Metric(
        "cpu-single",
        "one thread",
        "events_per_s",
        False,
        CONTROL_MATTERS,
        "prime numbers on one vCPU (sysbench): the core's own speed",
        "unpinned vCPUs had been moved about",
        "slower cores, a busy sibling, or lower clocks",
        control=True,
        feels_pins=True,
    ),
    Metric(
        "cpu-throughput",
        "all threads",
        "events_per_s",
        False,
        0.05,
        "prime numbers on all vCPUs together (sysbench)",
        "more cores, or siblings fill idle slots of them",
        "vCPUs share cores, or run on slower ones",
        primary=(Objective.THROUGHPUT, Objective.DENSITY),
    ),
    Metric(
        "program-throughput",
        "programs on all threads",
        "units_per_s",
        False,
        0.05,
        "whole programs on all vCPUs together (OpenSSL, POV-Ray, OpenVINO)",
        "more cores, or siblings fill idle slots of them",
        "vCPUs share cores, or run on slower ones",
        stands_in=(Objective.THROUGHPUT, Objective.DENSITY),
    ),
    Metric(
        "cpu-per-thread",
        "all threads, each",
        "events_per_s",
        False,
        0.05,
        "all-thread throughput for one vCPU",
        "fewer vCPUs share a core",
        "more of them do",
    ),
    Metric(
        "core-to-core-latency",
        "core to core",
        "ns",
        True,
        0.05,
        "hand-over of a cache line between two vCPUs",
        "they are in different LLCs or packages",
        "they share an LLC",
    ),
)

METRICS: dict[str, Metric] = {metric.id: metric for metric in _METRICS}
"""Every metric, by id, in the order in which reports show them."""

UNCOMPARED = frozenset(
    """
    allreduce-half-peak cache-capacity collective-bound-gpus collective-channels
    collective-fullest-node cpu-fairness fill-ratio loaded-bandwidth
    loaded-latency memory-traffic smt-gain sysbench-memory
""".split()
)
"""What else the suite and other tools print: it explains figures, and nothing is decided by it.
"""

MOST_PRIMARY = 6
"""Primary metrics of an objective, at most."""

_OWN_RATE = Metric(
    "app-rate",
    "own program",
    "units_per_s",
    False,
    0.05,
    "the user's own program",
    "it does more",
    "it does less",
)
_OWN_TIME = replace(_OWN_RATE, id="app-time", unit="ns", lower_is_better=True)


def metric_of(id: str) -> Metric | None:
    """The metric of an id; None for one whose direction is unknown.

    >>> metric_of("app-time:epoch").lower_is_better, metric_of("frobs") is None
    (True, True)
    """
    for own in (_OWN_RATE, _OWN_TIME):
        if id.startswith(f"{own.id}:"):
            name = id.partition(":")[2]
            return replace(own, id=id, title=f"own program: {name}")
    return METRICS.get(id)


def primaries(objective: Objective) -> tuple[Metric, ...]:
    """The metrics that decide for an objective."""
    return tuple(metric for metric in _METRICS if objective in metric.primary)
