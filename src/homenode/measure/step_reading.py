"""Step reading: what the output of one step comes to, whoever printed it."""

import re
from dataclasses import dataclass, replace

from homenode.findings import Finding
from homenode.gap import Gap
from homenode.measure.figures.probe import BracketedSample, probe_figures
from homenode.measure.figures.sample import sample
from homenode.measure.model import BenchTest, Reader
from homenode.measure.orders import AppOrder
from homenode.measure.step_figures import figures_of_step
from homenode.results.model import Condition
from homenode.tools.homenode_probe import parse
from homenode.topology import Host

REPLAYED = "replayed"
"""Condition of a run whose figures a test guest for a tool printed: what it says of them."""

REPLAYED_LINE = re.compile(r"(?m)^replayed: (.{1,200})$")


@dataclass(frozen=True, slots=True)
class StepReading:
    """Samples of a step, each with its bracket. busy, emulated: as the probe saw it meanwhile;
    emulated: None where it was not asked, or nothing gives it."""

    placed: tuple[BracketedSample, ...]
    conditions: tuple[Condition, ...] = ()
    gaps: tuple[Gap, ...] = ()
    findings: tuple[Finding, ...] = ()
    busy: str | None = None
    emulated: bool | None = None


def read_step(test: BenchTest, output: str, host: Host) -> StepReading:
    """Figures of a test's output; host: the machine that ran it. Raises ParseError."""
    if test.reads is Reader.PROBE:
        found = probe_figures(parse(output))
        return StepReading(
            tuple(_varied(one, test.variant) for one in found.placed),
            found.conditions,
            (),
            found.findings,
            found.busy,
            found.emulated,
        )
    figures = figures_of_step(test, output, host)
    replayed = REPLAYED_LINE.search(output)
    conditions = (Condition(REPLAYED, replayed[1].strip()),) if replayed else ()
    return StepReading(
        tuple(BracketedSample(one) for one in figures.samples),
        (*figures.conditions, *conditions),
        figures.gaps,
        figures.findings,
    )


def _varied(placed: BracketedSample, variant: str | None) -> BracketedSample:
    if variant is None:
        return placed
    words = ", ".join(word for word in (placed.sample.variant, variant) if word)
    return replace(placed, sample=replace(placed.sample, variant=words))


def read_app(order: AppOrder, figure: float) -> StepReading:
    """The user's own figure: a rate in units of its own, or a time that it prints in seconds."""
    if order.lower_is_better:
        found = sample(f"app-time:{order.name}", "ns", figure * 1e9)
    else:
        found = sample(f"app-rate:{order.name}", "units_per_s", figure)
    return StepReading((BracketedSample(found),), (Condition("tool app", " ".join(order.argv)),))


def disturbed(reading: StepReading) -> StepReading:
    """The same, each sample marked: somebody else ran."""
    return replace(
        reading,
        placed=tuple(
            replace(one, sample=replace(one.sample, disturbed=True)) for one in reading.placed
        ),
    )
