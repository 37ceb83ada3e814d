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
    smallest relative difference that an operator would change a layout for. primary: objectives for
    which it decides; everything else is exploratory. stands_in: objectives for which it decides
    where no primary metric was measured. control: it should not depend on the layout. feels_pins:
    but on which cores the pins are. worst_device: with several devices, the slowest one counts, as
    every collective waits for it. headline: the variant that decides where there are several.
    about: what it measures. rise, fall: what to think of when it goes up or down. boot_variation:
    ratio that runs of one layout stay below, as far as anybody has seen or published; figures of
    fewer than three boots, and printed ones, are distinguished only beyond it.
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
host memory share it. Copies: 22.6 to 25.7 GB/s to an RTX 4090, 41.5 to 55.3 from an H200 over runs
that nothing but chance tells apart. Other metrics: the study's own such pairs are up to 6 %
apart."""

_MORE_CONTROLLERS = "work and memory lie on the same nodes, and more memory controllers are used"

_METRICS = (
    Metric(
        id="memory-bandwidth",
        title="memory bandwidth",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.05,
        about="what all vCPUs together read and write from memory (STREAM, homenode-probe)",
        rise=_MORE_CONTROLLERS,
        fall="threads and memory are on different nodes, or all memory is on one",
        primary=(Objective.HOST_BANDWIDTH,),
        headline="triad",
        boot_variation=TWO_STATES,
    ),
    Metric(
        id="memory-latency",
        title="memory latency",
        unit="ns",
        lower_is_better=True,
        matters=0.05,
        about="time of one dependent load from memory, beyond every cache",
        rise="memory is on another node, or pages are small and their walks are in the figure",
        fall="memory is on the node of the thread that loads",
        primary=(Objective.LATENCY,),
        headline="dram",
    ),
    Metric(
        id="allreduce-busbw-peak",
        title="all-reduce, peak bus bandwidth",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.10,
        about="highest bus bandwidth of an all-reduce over message sizes (nccl-tests, rccl-tests)",
        rise="transport through memory stays on the GPUs' nodes",
        fall="transport crosses nodes: GPUs without a node, or ranks bound to the wrong one",
        primary=(Objective.COLLECTIVE,),
        boot_variation=TWO_STATES,
    ),
    Metric(
        id="allreduce-busbw-mean",
        title="all-reduce, mean bus bandwidth",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.10,
        about="mean bus bandwidth of an all-reduce over message sizes; small messages weigh as "
        "much as large ones",
        rise="small messages became faster, or transport through memory stays on the GPUs' nodes",
        fall="small messages became slower, or transport crosses nodes",
        boot_variation=TWO_STATES,
    ),
    Metric(
        id="allreduce-busbw",
        title="all-reduce, bus bandwidth of a size",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.10,
        about="bus bandwidth of an all-reduce at one message size",
        rise="transport through memory stays on the GPUs' nodes",
        fall="transport crosses nodes: GPUs without a node, or ranks bound to the wrong one",
        boot_variation=TWO_STATES,
    ),
    Metric(
        id="allreduce-latency",
        title="all-reduce, small messages",
        unit="ns",
        lower_is_better=True,
        matters=0.10,
        about="time of an all-reduce of a few bytes",
        rise="more coordination between vCPUs and GPUs",
        fall="less coordination",
    ),
    Metric(
        id="h2d-bandwidth",
        title="host to device",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.05,
        about="copies from pinned host memory to a GPU",
        rise="the buffer is on the GPU's node",
        fall="the buffer is on another node, or the link is slow",
        primary=(Objective.DEVICE_TRANSFER,),
        worst_device=True,
        boot_variation=1.15,
    ),
    Metric(
        id="d2h-bandwidth",
        title="device to host",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.05,
        about="copies from a GPU to pinned host memory",
        rise="the buffer is on the GPU's node",
        fall="the buffer is on another node, or the link is slow",
        primary=(Objective.DEVICE_TRANSFER,),
        worst_device=True,
        boot_variation=1.35,
    ),
    Metric(
        id="h2d-latency",
        title="host to device latency",
        unit="ns",
        lower_is_better=True,
        matters=0.05,
        about="time of one access between a GPU and host memory",
        rise="the memory is on another node than the GPU",
        fall="the memory is on the GPU's node",
        worst_device=True,
    ),
    Metric(
        id="h2d-copy-time",
        title="small copies to a device",
        unit="ns",
        lower_is_better=True,
        matters=0.05,
        about="from the call to the arrival of a few bytes, as the thread that waits sees it",
        rise="the thread or its memory is on another node than the GPU, or the vCPU is not its own",
        fall="both are on the GPU's node",
        worst_device=True,
    ),
    Metric(
        id="d2h-copy-time",
        title="small copies from a device",
        unit="ns",
        lower_is_better=True,
        matters=0.05,
        about="from the call until a few bytes have arrived, as the thread that waits sees it",
        rise="the thread or its memory is on another node than the GPU, or the vCPU is not its own",
        fall="both are on the GPU's node",
        worst_device=True,
    ),
    Metric(
        id="p2p-bandwidth",
        title="GPU to GPU",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=0.05,
        about="copies between two GPUs",
        rise="peer access works",
        fall="copies go through host memory",
        stands_in=(Objective.COLLECTIVE,),
        worst_device=True,
    ),
    Metric(
        id="d2d-bandwidth",
        title="within a GPU",
        unit=_BANDWIDTH,
        lower_is_better=False,
        matters=CONTROL_MATTERS,
        about="copies within a GPU's own memory: no layout changes it",
        rise="clocks rose",
        fall="clocks fell, or somebody else uses the GPU",
        control=True,
        worst_device=True,
    ),
    Metric(
        id="matmul-time",
        title="matrix product",
        unit="ns",
        lower_is_better=True,
        matters=CONTROL_MATTERS,
        about="time of one large matrix product on a GPU: no layout changes it",
        rise="clocks fell, heat, or launches wait for the CPU",
        fall="clocks rose",
        control=True,
        worst_device=True,
    ),
    Metric(
        id="matmul-rate",
        title="matrix product, rate",
        unit="flop_per_s",
        lower_is_better=False,
        matters=CONTROL_MATTERS,
        about="large matrix products on a GPU, by data type: no layout changes it",
        rise="clocks rose",
        fall="clocks fell, heat, or launches wait for the CPU",
        control=True,
        worst_device=True,
        headline="bf16",
    ),
    Metric(
        id="cpu-single",
        title="one thread",
        unit="events_per_s",
        lower_is_better=False,
        matters=CONTROL_MATTERS,
        about="prime numbers on one vCPU (sysbench): the core's own speed",
        rise="unpinned vCPUs had been moved about",
        fall="slower cores, a busy sibling, or lower clocks",
        control=True,
        feels_pins=True,
    ),
    Metric(
        id="cpu-throughput",
        title="all threads",
        unit="events_per_s",
        lower_is_better=False,
        matters=0.05,
        about="prime numbers on all vCPUs together (sysbench)",
        rise="more cores, or siblings fill idle slots of them",
        fall="vCPUs share cores, or run on slower ones",
        primary=(Objective.THROUGHPUT, Objective.DENSITY),
    ),
    Metric(
        id="program-throughput",
        title="programs on all threads",
        unit="units_per_s",
        lower_is_better=False,
        matters=0.05,
        about="whole programs on all vCPUs together (OpenSSL, POV-Ray, OpenVINO)",
        rise="more cores, or siblings fill idle slots of them",
        fall="vCPUs share cores, or run on slower ones",
        stands_in=(Objective.THROUGHPUT, Objective.DENSITY),
    ),
    Metric(
        id="cpu-per-thread",
        title="all threads, each",
        unit="events_per_s",
        lower_is_better=False,
        matters=0.05,
        about="all-thread throughput for one vCPU",
        rise="fewer vCPUs share a core",
        fall="more of them do",
    ),
    Metric(
        id="core-to-core-latency",
        title="core to core",
        unit="ns",
        lower_is_better=True,
        matters=0.05,
        about="hand-over of a cache line between two vCPUs",
        rise="they are in different LLCs or packages",
        fall="they share an LLC",
    ),
)

METRICS: dict[str, Metric] = {metric.id: metric for metric in _METRICS}
"""Every metric, by id, in the order in which reports show them."""

UNCOMPARED = frozenset(
    """
    allreduce-half-peak cache-capacity collective-bound-gpus collective-channels
    collective-fullest-node collective-interrupt-nodes cpu-fairness fill-ratio
    loaded-bandwidth loaded-latency memory-traffic smt-gain sysbench-memory
""".split()
)
"""What else the suite and other tools print: it explains figures, and nothing is decided by it.
"""

POWER = "gpu-power"
"""Shown next to each other, by test; more of it is neither better nor worse."""

MOST_PRIMARY = 6
"""Primary metrics of an objective, at most."""

_OWN_RATE = Metric(
    id="app-rate",
    title="own program",
    unit="units_per_s",
    lower_is_better=False,
    matters=0.05,
    about="the user's own program",
    rise="it does more",
    fall="it does less",
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
