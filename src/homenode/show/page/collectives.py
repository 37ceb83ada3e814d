"""Collectives: the chain from printed figures to a cause, each link with its ground.

What was printed, what is computed and not measured (derivations of the evidence), what memory
allows, what speaks against it, and the command that settles it. No claim is worded as more than its
ground.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from homenode.decide.collective_causes import diagnose
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.evidence.model import Publication
from homenode.objective import Objective
from homenode.show.page.machine import BARE, Machine

_COLLECTIVE, _STREAM = "allreduce-busbw-peak", "memory-bandwidth"
_FLAT, _CELLS = "pin", "pin-numa"


class ChainLink(NamedTuple):
    """ground: published, reasoned, arithmetic or unknown. method: how it is known."""

    ground: str
    statement: str
    method: str


class _Figures(Struct, frozen=True):
    """Of one machine, in bytes/s. nodes: of its host."""

    name: str
    is_published: bool
    gpus: int | None
    nodes: int | None
    flat: float
    cells: float
    stream: float | None


def collective_chain(
    machines: Sequence[Machine], publications: Sequence[Publication]
) -> tuple[ChainLink, ...]:
    """What the experiment found on these machines, then the chain of what is known besides.

    () where no machine has all-reduces of a pinned guest with cells and of one without.
    """
    figures = [one for machine in machines if (one := _figures(machine)) is not None]
    chain = tuple(_links(figures, publications)) if figures else ()
    return (*_found(machines), *chain)


def _found(machines: Sequence[Machine]) -> Iterator[ChainLink]:
    for machine in machines:
        bare = tuple(one for one in machine.rest if one.label == BARE)
        found = diagnose(machine.chosen, bare)
        if found is None:
            continue
        level = str(EvidenceLevel.PROVISIONAL if found.provisional else EvidenceLevel.MEASURED)
        for cause, because in ((found.cause, found.because), *found.also):
            yield ChainLink(level, f"{machine.name}: {cause}", f"the experiment: {because}")
        for line in found.controls():
            yield ChainLink(level, f"{machine.name}: {line}", "controls of the same trial")
        for one in found.excluded:
            yield ChainLink("unknown", f"{machine.name}: {one}", "channels in NCCL's log")


def _figures(machine: Machine) -> _Figures | None:
    flat, cells = (_value(machine, layout, _COLLECTIVE) for layout in (_FLAT, _CELLS))
    if flat is None or cells is None:
        return None
    return _Figures(
        machine.name,
        machine.is_published,
        None if machine.published is None else machine.published.gpus,
        None if machine.host is None else sum(bool(node.pus) for node in machine.host.nodes),
        flat,
        cells,
        _value(machine, _CELLS, _STREAM),
    )


def _value(machine: Machine, layout: str, metric: str) -> float | None:
    for one in machine.chosen:
        if one.switches.name != layout:
            continue
        for key, series in machine.series[one.label].items():
            if key.metric == metric and key.variant is None and key.size_bytes is None:
                return series.value
    return None


def _links(figures: Sequence[_Figures], publications: Sequence[Publication]) -> Iterator[ChainLink]:
    for one in figures:
        yield ChainLink(
            str(EvidenceLevel.PUBLISHED if one.is_published else EvidenceLevel.MEASURED),
            f"{one.name}: {_CELLS} {one.cells / 1e9:.1f} GB/s, {one.cells / one.flat:.2f} x "
            f"{_FLAT}. Guests with cells, whose GPUs have no node as far as the document shows",
            "all-reduce, peak bus bandwidth" + (", one run each" if one.is_published else ""),
        )
    reasoned = [one for publication in publications for one in publication.derivations]
    reasoned = [one for one in reasoned if one.objective is Objective.COLLECTIVE]
    for derived in (one for one in reasoned if not one.is_open):
        yield ChainLink(str(EvidenceLevel.REASONED), derived.text, derived.method)
    for one in figures:
        if one.gpus is None or one.stream is None or (one.nodes or 0) < 2:
            continue
        traffic = 2 * one.gpus * one.cells
        share = one.stream / (one.nodes or 1)
        yield ChainLink(
            "arithmetic",
            f"{one.name}: 2 x {one.gpus} GPUs x {one.cells / 1e9:.1f} GB/s = {traffic / 1e9:.0f} "
            f"GB/s of memory traffic; one of {one.nodes} nodes has about {share / 1e9:.0f} GB/s of "
            "STREAM",
            "each rank's buffer is written once and read once; nodes as the machine is described",
        )
    for derived in (one for one in reasoned if one.is_open):
        yield ChainLink("unknown", derived.text, derived.method)
