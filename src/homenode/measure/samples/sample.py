"""Sample: results of a tool's output, before they are assigned to a run."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import ParseError
from homenode.findings import Finding, Gap
from homenode.machine.topology import Host
from homenode.measure.model import BenchTest
from homenode.measure.results.model import Condition, Sample

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
