"""Metric: id, unit and direction (whether higher is better) of a measured quantity.

Samples carry a metric's id and its unit; whatever is not listed here is not compared, but metrics
of the user's own program are: `app-rate:NAME` (more is better) and `app-time:NAME` (less is).
"""

from msgspec import Struct, toml
from msgspec.structs import replace

from homenode.objective import Objective
from homenode.package_data import read_package_text


class Metric(Struct, frozen=True, forbid_unknown_fields=True):
    """A measured quantity."""

    id: str
    title: str
    unit: str  # unit of the samples: bytes_per_s, ns, events_per_s, flop_per_s, units_per_s
    lower_is_better: bool
    matters: float  # the smallest relative difference that an operator would change a layout for
    about: str  # what it measures
    rise: str  # possible causes if it goes up or down
    fall: str  # possible causes if it goes up or down
    # objectives for which it decides; everything else is exploratory
    primary: tuple[Objective, ...] = ()
    # objectives for which it decides if no primary metric was measured
    stands_in: tuple[Objective, ...] = ()
    control: bool = False  # it should not depend on the layout
    # with several devices, the slowest one counts, as every collective waits for it
    worst_device: bool = False
    headline: str | None = None  # the variant that decides if there are several
    # ratio that runs of one layout stay below in all known and published results; results of fewer
    # than three boots, and printed results, are distinguished only beyond it
    boot_variation: float = 1.30

    @property
    def better(self) -> str:
        return "less is better" if self.lower_is_better else "more is better"


TWO_STATES = 1.8
"""Memory bandwidth of one layout was 47 GB/s in one boot and 79 in the next (1.68x), because vCPUs
were on one cache domain or on two; a margin for noise is added. Collectives that go through host
memory share it. Copies: 22.6 to 25.7 GB/s to an RTX 4090, 41.5 to 55.3 from an H200 over runs that
nothing but chance tells apart. Other metrics: the study's own such pairs are up to 6 % apart; the
greatest of four boots that vary by 7 % is more than 1.3 times the least in one of twenty."""


class _Table(Struct, forbid_unknown_fields=True):
    metric: tuple[Metric, ...]


_METRICS = toml.decode(read_package_text("metrics.toml"), type=_Table).metric

METRICS: dict[str, Metric] = {metric.id: metric for metric in _METRICS}
"""Every metric, by id, in the order in which reports show them."""

UNCOMPARED = frozenset(
    """
    allreduce-half-peak cache-capacity cpu-fairness fill-ratio loaded-bandwidth
    loaded-latency memory-traffic smt-gain sysbench-memory
""".split()
)
"""Other metrics of the suite and of tools: they explain results and decide nothing.
"""

POWER = "gpu-power"
"""Shown next to each other, by test; more of it is neither better nor worse."""

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


def find_metric(id: str) -> Metric | None:
    """Return the metric of an id; None for one whose direction is unknown.

    >>> find_metric("app-time:epoch").lower_is_better, find_metric("frobs") is None
    (True, True)
    """
    for template in (_OWN_RATE, _OWN_TIME):
        if id.startswith(f"{template.id}:"):
            name = id.partition(":")[2]
            return replace(template, id=id, title=f"own program: {name}")
    return METRICS.get(id)


def list_primaries(objective: Objective) -> tuple[Metric, ...]:
    return tuple(metric for metric in _METRICS if objective in metric.primary)


def format_titles(objective: Objective) -> str:
    """Return the metrics that decide for an objective, in words."""
    return " or ".join(metric.title for metric in list_primaries(objective))
