"""Joint states: one name for a placement state that several runs saw.

A run names its states by the hand-over latency that it measured, "27 ns", and the next boot says
"28 ns" of the same place. Names that lie within the span of one class are one state here; two
states of one run never become one.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from homenode.analyse.alternative import Alternative
from homenode.bench.placement_states import classes_of, latency_name
from homenode.results.model import UNSETTLED, Run, Sample

_NAME = re.compile(r"(\d{1,9}(?:\.\d)?) ns", re.ASCII)


class _Where(NamedTuple):
    """What samples of one place have in common, beside the state."""

    metric: str
    variant: str | None
    node: int | None
    peer_node: int | None


def with_joint_states(chosen: Sequence[Alternative]) -> tuple[Alternative, ...]:
    """The alternatives with states named alike over all their runs."""
    runs = [run for one in chosen for run in one.runs]
    names = _joint_names(runs)
    if not names:
        return tuple(chosen)
    renamed = iter([_renamed(run, place, names) for place, run in enumerate(runs)])
    return tuple(replace(one, runs=tuple(next(renamed) for _ in one.runs)) for one in chosen)


def _joint_names(runs: Sequence[Run]) -> dict[tuple[int, _Where, str], str]:
    """(place of the run, where, its name) -> the name for all."""
    seen: dict[_Where, dict[tuple[int, str], float]] = {}
    names: dict[tuple[int, _Where, str], str] = {}
    for place, run in enumerate(runs):
        for sample in run.samples:
            if sample.state is None or sample.state == UNSETTLED:
                continue
            matched = _NAME.fullmatch(sample.state)
            if matched is not None:
                seen.setdefault(_where(sample), {})[place, sample.state] = float(matched[1])
            elif " ns, " in sample.state:  # like another one by its latency: of this run alone
                key = (place, _where(sample), sample.state)
                names[key] = f"{sample.state} of {run.head.name}"
    for where, latencies in seen.items():
        keys = list(latencies)
        classes = classes_of([latencies[key] for key in keys])
        for number in set(classes):
            members = [key for key, at in zip(keys, classes, strict=True) if at == number]
            if len({place for place, _ in members}) < len(members):
                continue  # two states of one run: which of them another run saw is unknown
            name = latency_name(statistics.median(latencies[key] for key in members))
            names |= {(place, where, state): name for place, state in members}
    return names


def _renamed(run: Run, place: int, names: dict[tuple[int, _Where, str], str]) -> Run:
    samples = []
    for sample in run.samples:
        name = None if sample.state is None else names.get((place, _where(sample), sample.state))
        samples.append(sample if name is None else replace(sample, state=name))
    return replace(run, samples=tuple(samples))


def _where(sample: Sample) -> _Where:
    return _Where(sample.metric, sample.variant, sample.node, sample.peer_node)
