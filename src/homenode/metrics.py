"""Metric: id, unit and direction (whether higher is better) of a measured quantity, and results and
differences as text.

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


_SCALES = {
    "bytes_per_s": (1e9, "GB/s"),
    "events_per_s": (1.0, "events/s"),
    "flop_per_s": (1e12, "TFLOP/s"),
    "units_per_s": (1.0, "units/s"),
    "bytes": (1 << 20, "MiB"),
}


def format_value(value: float, unit: str, *, digits: int = 3) -> str:
    """A value with the unit that people use for it; `digits` significant ones, four from 100 on.

    >>> format_value(561.17e9, "bytes_per_s"), format_value(101.0, "ns"), format_value(21.1e6, "ns")
    ('561.2 GB/s', '101 ns', '21.1 ms')
    >>> format_value(100.0, "ns", digits=2), format_value(-1000.0, "ns")
    ('100 ns', '-1,000 ns')
    >>> format_value(740449, "events_per_s"), format_value(0.425, "ratio")
    ('740.4 kevents/s', '0.425 of the reference')
    >>> format_value(102.0, "units_per_s"), format_value(32 << 20, "bytes")
    ('102 units/s', '32 MiB')
    """
    if unit == "ns":
        for scale, name in ((1e9, "s"), (1e6, "ms"), (1e4, "us")):
            if abs(value) >= scale:
                return f"{_format_digits(value / (1e3 if name == 'us' else scale), digits)} {name}"
        return f"{_format_digits(value, digits)} ns"
    if unit == "ratio":
        return f"{_format_digits(value, digits)} of the reference"
    if unit == "events_per_s" and value >= 1e5:
        return f"{_format_digits(value / 1e3, digits)} kevents/s"
    scale, name = _SCALES.get(unit, (1.0, unit))
    return f"{_format_digits(value / scale, digits)} {name}"


def format_multiple(ratio: float) -> str:
    """Return a ratio as a multiple of two digits; near 1 of three.

    >>> format_multiple(1.026), format_multiple(7.265), format_multiple(1.0), format_multiple(1.31)
    ('1.03x', '7.3x', '1x', '1.3x')
    >>> format_multiple(38.1), format_multiple(240.0), format_multiple(2e130)
    ('38x', '240x', '2e+130x')
    """
    if ratio >= 10:
        return f"{ratio:.0f}x" if ratio < 1e6 else f"{ratio:.0e}x"
    return f"{ratio:.3g}x" if 0.95 < ratio < MIN_MULTIPLE else f"{ratio:.2g}x"


def format_bounds(low: float, high: float, name: str = "", *, lower_is_better: bool = False) -> str:
    """Return the changes between two ratios, the smaller one first.

    >>> format_bounds(0.83, 0.88), format_bounds(2.6, 7.54, "pin"), format_bounds(0.95, 1.2)
    ('12 to 17 % slower', '2.6x to 7.5x pin', '5 % slower to 1.2x')
    """
    ratios = (high, low) if high <= 1 else (low, high)
    first, last = (format_change(ratio, name, lower_is_better=lower_is_better) for ratio in ratios)
    number, _, unit = first.partition(" ")
    if first == last:
        return last
    return f"{number if unit == last.partition(' ')[2] else first} to {last}"


def format_change(ratio: float, name: str = "", *, lower_is_better: bool = False) -> str:
    """Return a value relative to another value: a gain as a multiple, a loss in per cent.

    >>> format_change(7.27, "default"), format_change(1.023, "pin"), format_change(0.43, "pin")
    ('7.3x default', '2 % faster than pin', '57 % slower than pin')
    >>> format_change(0.72, "default", lower_is_better=True), format_change(1.0, "pin")
    ('28 % lower than default', 'the same as pin')
    >>> format_change(1.002, "pin")
    '0.2 % faster than pin'
    """
    percent = abs(ratio - 1) * 100
    if ratio >= MIN_MULTIPLE and not lower_is_better:
        return f"{format_multiple(ratio)} {name}".rstrip()
    if percent < 0.05:
        return f"the same as {name}" if name else "the same"
    up, down = ("higher", "lower") if lower_is_better else ("faster", "slower")
    amount = f"{percent:.0f} %" if percent >= 0.95 else f"{percent:.1f} %"
    return f"{amount} {up if ratio > 1 else down}" + (f" than {name}" if name else "")


MIN_MULTIPLE = 1.1
"""Smaller gains are in per cent."""


def _format_digits(value: float, digits: int) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.{digits}g}"
