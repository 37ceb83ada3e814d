"""Agreement: whether two runs on the same GPUs with different tools have the same figures."""

from collections.abc import Iterator
from statistics import median

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.measure.results.model import Run

TOLERANCE_RATIO = 0.05
"""Copies by PyTorch and by nvbandwidth with pinned buffers of the same size."""

_Key = tuple[str, str | None, Bdf | None, int | None]


def agreed(first: Run, second: Run) -> tuple[str, ...]:
    """One line for each figure that both runs have: metric, GPU, node and the two medians."""
    return tuple(
        f"{_subject(key)}: {_rate(median(one))} and {_rate(median(other))} "
        f"({median(other) / median(one):.3f} x)"
        for key, one, other in _pairs(first, second)
    )


def agreement_findings(
    first: Run, second: Run, tools: tuple[str, str], tolerance_ratio: float = TOLERANCE_RATIO
) -> tuple[Finding, ...]:
    """A warning for each figure whose medians differ by more, and whose samples lie apart. tools:
    what each of the runs used."""
    return tuple(
        finding(
            "bench-tools-differ",
            _subject(key),
            expected=f"{tools[1]} within {tolerance_ratio:.0%} of {tools[0]}: {_rate(median(one))}",
            observed=f"{_rate(median(other))} ({median(other) / median(one):.2f} x)",
            source=f"{tools[0]} and {tools[1]}, one after the other",
        )
        for key, one, other in _pairs(first, second)
        if abs(median(other) / median(one) - 1) > tolerance_ratio
        and (max(one) < min(other) or max(other) < min(one))
    )


def _pairs(first: Run, second: Run) -> Iterator[tuple[_Key, list[float], list[float]]]:
    one, other = _values(first), _values(second)
    for key in one:
        if key in other and median(one[key]) > 0:
            yield key, one[key], other[key]


def _values(run: Run) -> dict[_Key, list[float]]:
    """Of copies between one GPU and the host, or inside a GPU: two tools make those alone."""
    values: dict[_Key, list[float]] = {}
    for one in run.samples:
        if one.device is not None and one.peer is None and one.unit == "bytes_per_s":
            values.setdefault((one.metric, one.variant, one.device, one.node), []).append(one.value)
    return values


def _subject(key: _Key) -> str:
    metric, variant, device, node = key
    place = "" if node is None else f" from node {node}"
    return f"{metric}{'' if variant is None else f' {variant}'} of GPU {device}{place}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
