"""Parse: published evidence, one document in one or more TOML files, to Publication.

The files are described in docs/formats/published.md. Unknown keys, units and names are errors: a
figure must never be dropped because of a spelling.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from homenode.decide.evidence.model import (
    Claim,
    Derivation,
    FieldReport,
    Note,
    PrintedEffect,
    PrintedFigure,
    Publication,
    PublishedChoice,
    PublishedVerdict,
    Remark,
    System,
)
from homenode.errors import InputError
from homenode.measure.results.model import Origin, Run, RunHead, Sample, Statistic, Switches
from homenode.metrics import METRICS
from homenode.toml_text import decode_toml
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
)

FORMAT = 4

_UNITS = {
    "MB/s": ("bytes_per_s", 1e6),
    "GB/s": ("bytes_per_s", 1e9),
    "ns": ("ns", 1.0),
    "ms": ("ns", 1e6),
    "events/s": ("events_per_s", 1.0),
    "ratio": ("ratio", 1.0),
}
"""What a unit is in results. A ratio is relative to the choice that has 1."""


class _Choice(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    layout: str | None = None
    pinning: Pinning | None = None
    siblings: Siblings | None = None
    cells: GuestCells | None = None
    pcie: GuestPcie | None = None
    memory: MemoryBinding | None = None
    arrangement: str | None = None


class _Figure(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    system: str
    metric: str
    unit: str
    source: str
    variant: str | None = None
    statistic: Statistic = Statistic.UNKNOWN
    count: int | None = None
    counts: dict[str, int] = {}
    about: bool = False  # printed with "~"
    printed: dict[str, str] = {}  # where the text is no value with a unit
    values: dict[str, Decimal] = {}
    ranges: dict[str, tuple[Decimal, Decimal]] = {}
    by_device: dict[str, tuple[tuple[Decimal, ...], ...]] = {}
    near: dict[str, tuple[int, ...]] = {}


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: int
    id: str
    title: str | None = None
    publisher: str | None = None
    published: str | None = None
    date_inferred: bool = False
    choice: dict[str, _Choice] = {}
    system: tuple[System, ...] = ()
    figure: tuple[_Figure, ...] = ()
    claim: tuple[Claim, ...] = ()
    verdict: tuple[PublishedVerdict, ...] = ()
    note: tuple[Note, ...] = ()
    remark: tuple[Remark, ...] = ()
    effect: tuple[PrintedEffect, ...] = ()
    field: tuple[FieldReport, ...] = ()
    derivation: tuple[Derivation, ...] = ()


def parse_publications(texts: Mapping[str, str]) -> tuple[Publication, ...]:
    """Publication of these files, {name: text}; files of the same id are one document.

    Raises InputError that names the file.
    """
    documents: dict[str, list[_Document]] = {}
    for name, text in texts.items():
        document = _document(text, name)
        documents.setdefault(document.id, []).append(document)
    return tuple(_evidence(name, parts) for name, parts in documents.items())


def _document(text: str, source: str) -> _Document:
    document = decode_toml(text, _Document, source, parse_float=Decimal)
    if document.format != FORMAT:
        raise InputError(f"{source}: expected format = {FORMAT}, found {document.format}")
    return document


def _evidence(id: str, parts: Sequence[_Document]) -> Publication:
    head = next((part for part in parts if part.title is not None), None)
    if head is None or head.publisher is None or head.published is None:
        raise InputError(f"published {id}: expected title, publisher and published, found none")
    choices = {name: _choice(name, raw, id) for part in parts for name, raw in part.choice.items()}
    systems = {raw.name: raw for part in parts for raw in part.system}
    figures = [raw for part in parts for raw in part.figure]
    for figure in figures:
        _check_figure(figure, choices, systems, id)
    runs = []
    for system in systems.values():
        for choice in choices.values():
            found = tuple(_samples(figures, system.name, choice.name))
            if found:
                runs.append(Run(_head(system, choice, head), found))
    evidence = Publication(
        id=id,
        title=head.title or id,
        publisher=head.publisher,
        published=head.published,
        is_date_inferred=head.date_inferred,
        choices=tuple(choices.values()),
        systems=tuple(systems.values()),
        runs=tuple(runs),
        figures=tuple(map(_printed, figures)),
        effects=tuple(one for part in parts for one in part.effect),
        claims=tuple(one for part in parts for one in part.claim),
        verdicts=tuple(one for part in parts for one in part.verdict),
        notes=tuple(one for part in parts for one in part.note),
        remarks=tuple(one for part in parts for one in part.remark),
        field_reports=tuple(one for part in parts for one in part.field),
        derivations=tuple(one for part in parts for one in part.derivation),
    )
    _check_names(evidence)
    return evidence


def _choice(name: str, raw: _Choice, id: str) -> PublishedChoice:
    switches = Switches(raw.pinning, raw.siblings, raw.cells, raw.pcie, raw.memory)
    if raw.layout is not None:
        if raw.layout not in PRESETS:
            raise InputError(
                f"published {id}: choice {name}: expected a preset, found {raw.layout}"
            )
        switches = Switches.of(PRESETS[raw.layout])
    return PublishedChoice(name, switches, raw.arrangement)


def _head(system: System, choice: PublishedChoice, document: _Document) -> RunHead:
    kind = ", ".join(part for part in (system.cpu, system.gpu) if part is not None)
    return RunHead(
        choice.name,
        system.name,
        Origin.PUBLISHED,
        system.vantage,
        choice.switches,
        host_kind=kind or system.name,
        arrangement=choice.arrangement,
        vcpus=system.vcpus.get(choice.name),
        unusable=() if system.unusable is None else (system.unusable,),
        source=f"{document.id}: {document.title}, {document.publisher}, {document.published}"
        + (" (inferred)" if document.date_inferred else ""),
    )


def _samples(figures: Sequence[_Figure], system: str, choice: str) -> Iterator[Sample]:
    """Samples of one system and choice."""
    for figure in figures:
        if figure.system != system:
            continue
        unit, factor = _UNITS[figure.unit]
        fixed: dict[str, Any] = {"variant": figure.variant, "count": figure.count}
        if choice in figure.counts:
            fixed["count"] = figure.counts[choice]
        if choice in figure.values:
            value = float(figure.values[choice]) * factor
            yield Sample(figure.metric, unit, value, statistic=figure.statistic, **fixed)
        ends = zip((Statistic.LOW, Statistic.HIGH), figure.ranges.get(choice, ()), strict=False)
        for statistic, end in ends:
            yield Sample(figure.metric, unit, float(end) * factor, statistic=statistic, **fixed)
        for number, row in enumerate(figure.by_device.get(choice, ())):
            for index, one in enumerate(row):
                yield Sample(
                    figure.metric,
                    unit,
                    float(one) * factor,
                    number=number,
                    index=index,
                    statistic=figure.statistic,
                    **fixed,
                )


def _printed(figure: _Figure) -> PrintedFigure:
    """With the digits that were printed: 5.0 stays 5.0, and a range a range."""
    unit = "x" if figure.unit == "ratio" else figure.unit
    sign = "~" if figure.about else ""
    texts = {choice: f"{sign}{value:,} {unit}" for choice, value in figure.values.items()}
    texts |= {c: f"{sign}{low:,}–{high:,} {unit}" for c, (low, high) in figure.ranges.items()}
    texts |= {
        choice: "; ".join(" ".join(map(str, row)) for row in rows) + f" {unit}"
        for choice, rows in figure.by_device.items()
    }
    texts |= figure.printed
    return PrintedFigure(
        figure.system,
        figure.metric,
        figure.variant,
        tuple(texts.items()),
        figure.source,
        tuple(figure.near.items()),
    )


def _check_figure(
    figure: _Figure, choices: Mapping[str, PublishedChoice], systems: Mapping[str, System], id: str
) -> None:
    where = f"published {id}: {figure.metric} of {figure.system}"
    if figure.system not in systems:
        raise InputError(f"{where}: expected one of {', '.join(systems)}, found {figure.system}")
    if figure.metric not in METRICS:
        raise InputError(f"{where}: expected a known metric, found {figure.metric}")
    if figure.unit not in _UNITS:
        raise InputError(f"{where}: expected a unit of {', '.join(_UNITS)}, found {figure.unit}")
    if _UNITS[figure.unit][0] not in (METRICS[figure.metric].unit, "ratio"):
        raise InputError(f"{where}: expected {METRICS[figure.metric].unit}, found {figure.unit}")
    named = {*figure.values, *figure.ranges, *figure.by_device}
    if not named or (named | figure.printed.keys() | figure.near.keys()) - choices.keys():
        found = (
            ", ".join(sorted((named | figure.printed.keys() | figure.near.keys()) - choices.keys()))
            or "no figure"
        )
        raise InputError(f"{where}: expected figures of known choices, found {found}")


def _check_names(evidence: Publication) -> None:
    """Systems, choices and notes that are named must be there."""
    systems = {one.name for one in evidence.systems}
    choices = {one.name for one in evidence.choices}
    notes = {one.id for one in evidence.notes}
    for claim in evidence.claims:
        known = {claim.system, claim.against_system} <= systems
        if not known or not {claim.choice, claim.against} <= choices:
            raise InputError(
                f"published {evidence.id}: claim {claim.id}: expected a known system and choices, "
                f"found {claim.system}, {claim.choice}, {claim.against}"
            )
        if claim.disputed_by is not None and claim.disputed_by not in notes:
            raise InputError(
                f"published {evidence.id}: claim {claim.id}: expected a note, "
                f"found {claim.disputed_by}"
            )
    for one in evidence.derivations:
        pair = (one.favours, one.over)
        if pair != (None, None) and (not {*pair} <= PRESETS.keys() or one.is_open):
            raise InputError(
                f"published {evidence.id}: derivation {one.id}: expected two presets, and none of "
                f"an open question, found {one.favours}, {one.over}"
            )
    named = {name for note in evidence.notes for name in note.systems}
    named |= {one.system for one in evidence.verdicts if one.system is not None}
    named |= {name for remark in evidence.remarks for name in remark.systems}
    named |= {name for effect in evidence.effects for name in effect.systems}
    chosen = {name for one in evidence.verdicts for name in one.choices}
    if named - systems or chosen - choices:
        found = ", ".join(sorted((named - systems) | (chosen - choices)))
        raise InputError(
            f"published {evidence.id}: expected notes and advice on what is there, found {found}"
        )
