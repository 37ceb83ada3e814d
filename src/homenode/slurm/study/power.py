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
_DRAW = re.compile(r"(\d+\.\d+), ([0-9A-Fa-f:.]{7,16}), (\d+(?:\.\d+)?)", re.ASCII)
_TIME = re.compile(r"(\w{1,80}) (\d+\.\d+) (\d+\.\d+) (-|\d+) (-|\d+)", re.ASCII)
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
        if "-" not in (found[4], found[5]) and rates and end > begin:
            joules = (int(found[5]) - int(found[4])) / 1e6
            mean = sum(rates.values()) / len(rates)
            # A counter that wrapped around tells nothing.
            if joules > 0 and mean > 0:
                watts = joules / (end - begin)
                yield Power(metric, None, watts, watts / (mean / 1e9))


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
