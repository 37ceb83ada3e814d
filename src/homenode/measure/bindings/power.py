"""Study power: what a GPU and the packages draw while copies run, as joules for each GB moved.

The draw while copying is the 90th percentile of a GPU's samples during the test: the tool copies
for a part of the time, sets up for the rest, and measures one GPU after the other. The packages'
is a mean over the whole test, from their energy counters: it holds what they draw idle.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.results.model import Sample

_TESTS = {
    "host_to_device_memcpy_ce": "h2d-bandwidth",
    "device_to_host_memcpy_ce": "d2h-bandwidth",
}
_DRAW = re.compile(r"(\d{1,12}\.\d+), ([0-9A-Fa-f:.]{7,16}), (\d+(?:\.\d+)?)", re.ASCII)
_TIME = re.compile(
    r"(\w{1,80}) (\d{1,12}\.\d+) (\d{1,12}\.\d+) (\S{1,2000}) (\S{1,2000})", re.ASCII
)
_COUNTER = re.compile(r"(\d{1,19})/(\d{1,19})", re.ASCII)
_PERCENTILE = 0.9


@dataclass(frozen=True, slots=True)
class Power:
    """metric: of the copies. device: None = the packages together. watts: see the head.

    joules_per_gb: for each 10^9 bytes that the copies moved.
    """

    metric: str
    device: Bdf | None
    watts: float
    joules_per_gb: float


def power_of(texts: Mapping[str, str], samples: tuple[Sample, ...]) -> Iterator[Power]:
    """The power of each test that moved bytes; nothing where nobody told of power."""
    draws = tuple(_draws(texts.get("power.csv", "")))
    for line in texts.get("times.txt", "").splitlines()[:1000]:
        found = _TIME.fullmatch(line.strip())
        if found is None or found[1] not in _TESTS:
            continue
        begin, end = float(found[2]), float(found[3])
        metric = _TESTS[found[1]]
        rates = {s.device: s.value for s in samples if s.metric == metric and s.variant is None}
        for device, rate in rates.items():
            seen = sorted(w for t, gpu, w in draws if gpu == device and begin <= t <= end)
            if seen and rate > 0:
                watts = seen[min(len(seen) - 1, int(len(seen) * _PERCENTILE))]
                yield Power(metric, device, watts, watts / (rate / 1e9))
        joules = _joules(found[4], found[5])
        if joules is not None and rates and end > begin:
            mean = sum(rates.values()) / len(rates)
            if joules > 0 and mean > 0:
                watts = joules / (end - begin)
                yield Power(metric, None, watts, watts / (mean / 1e9))


def _joules(before: str, after: str) -> float | None:
    """Of all packages; None where a counter was not read. One that wrapped around is set right.

    >>> _joules("262000000/262143328,5/262143328", "856672/262143328,2000005/262143328")
    3.0
    """
    ends = [one.split(",") for one in (before, after)]
    if len(ends[0]) != len(ends[1]):
        return None
    total = 0
    for a, b in zip(*ends, strict=True):
        first, last = _COUNTER.fullmatch(a), _COUNTER.fullmatch(b)
        if first is None or last is None or first[2] != last[2]:
            return None
        moved = int(last[1]) - int(first[1])
        # A counter wraps after a quarter of an hour at full load, a test ends within a minute.
        total += moved if moved >= 0 else moved + int(first[2])
    return total / 1e6


def _draws(text: str) -> Iterator[tuple[float, Bdf, float]]:
    for line in text.splitlines():
        found = _DRAW.fullmatch(line.strip())
        if found is None:
            continue
        try:
            # nvidia-smi prints eight digits of the domain.
            yield float(found[1]), Bdf.parse(found[2]), float(found[3])
        except ParseError:
            continue
