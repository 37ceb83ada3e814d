"""Printed: what publications say, word for word, and what follows from it of collectives."""

from collections.abc import Iterable, Iterator, Sequence, Set

from msgspec import Struct

from homenode.decide.evidence.model import (
    Claim,
    FieldReport,
    Note,
    Publication,
    PublishedVerdict,
    System,
)
from homenode.decide.words import figure_text, multiple_text
from homenode.doc import Cell, Items, Part, Section, Table
from homenode.measure.results.model import Sample
from homenode.metrics import METRICS
from homenode.show.page.machine import ReportedMachine

_WHOLE = (None, "dram", "FP16 as printed")
"""Variants of a metric's figure of the whole machine."""


class Printed(Struct, frozen=True, kw_only=True):
    """What publications say of one machine. Empty where none does. tables: their figures, word for
    word, and their recommendations; claims: ratios that they state. notes: errors and open
    questions."""

    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def printed_part(machine: ReportedMachine) -> Printed:
    """What is printed of a machine."""
    parts = [_of(publication, machine) for publication in machine.sources]
    return parts[0] if parts else Printed()


def as_printed(machine: ReportedMachine, metric: str) -> str:
    """A metric's figures in the source's own words, and the ratios that it states; "" of none."""
    system = machine.runs[0].head.system
    said: list[str] = []
    for one in machine.sources:
        printed = dict.fromkeys(
            text
            for figure in one.figures
            if (figure.system, figure.metric) == (system, metric) and figure.variant in _WHOLE
            for _, text in figure.texts
        )
        stated = [
            f'"{claim.source}"'
            for claim in one.claims
            if (claim.system, claim.against_system, claim.metric) == (system, system, metric)
            and "|" not in claim.source  # a row of its table: its figures say it
        ]
        if printed:
            said.append(f"{one.id}: {'; '.join((*printed, *stated[:1]))}")
    return ". ".join(said)


def source_sections(publications: Sequence[Publication], drawn: Iterable[str]) -> Iterator[Section]:
    """The publications of these systems, and what each says of no machine in particular, or of
    several."""
    names = set(drawn)
    for one in publications:
        systems = {system.name for system in one.systems}
        if not (systems & names) and not _is_general(one):
            continue
        title = f"{one.id}: {one.title}, {one.publisher}, {one.dated}"
        advice = tuple((f'"{r.source}"', r.ours or "") for r in one.remarks if r.is_advice)
        figures = tuple(
            (
                _title(figure.metric, figure.variant),
                text if choice == "any" else f"{choice}: {text}",
            )
            for figure in one.figures
            if (found_system := one.system(figure.system)) is not None and found_system.host is None
            for choice, text in figure.texts
        )
        remarks = tuple(
            _of_several(r.systems, r.source)
            for r in one.remarks
            if not r.is_advice and _is_shared(r.systems, names)
        )
        notes = tuple(
            _of_several(note.systems, note_text(note))
            for note in one.notes
            if _is_shared(note.systems, names)
        )
        parts: list[Part] = []
        if advice:
            heads = ("general advice, word for word", "what homenode does about it")
            parts.append(Table(heads=heads, rows=advice, name=f"Advice of {title}", look="quotes"))
        if figures:
            heads = ("rule of thumb, for any machine", "as printed")
            parts.append(Table(heads=heads, rows=figures, name=f"Rules of thumb of {title}"))
        for name, items in (("Remarks", remarks), ("Errors in it, and open questions", notes)):
            if items:
                folded = (Items(items),)
                parts.append(Section(f"{name} ({len(items)})", folded, is_open=False))
        yield Section(title, tuple(parts))


def field_section(publications: Sequence[Publication]) -> Section:
    """Figures that decide nothing, each with its change as a multiple."""
    rows = tuple(
        (one.source, one.of, one.figures, _change(one), "; ".join(one.confounders))
        for publication in publications
        for one in publication.field_reports
    )
    table = Table(
        heads=("source", "compared", "figures", "change", "confounders"),
        rows=rows,
        numeric=("change",),
        name="Further published figures with their confounders",
        caption="As quoted in issues, blogs and submissions, the adverse ones too. More than the "
        "layout changed, or the source does not say what changed.",
    )
    return Section("Further figures, which decide nothing", (table,) if rows else ())


def note_text(note: Note) -> str:
    """A note with its arithmetic."""
    return f"{note.certainty}: {note.text}" + "".join(f" [{line}]" for line in note.arithmetic)


def _is_shared(systems: Sequence[str], drawn: Set[str]) -> bool:
    """What is about no machine in particular, or about several, is said once for all."""
    return not systems or (len(systems) > 1 and not drawn.isdisjoint(systems))


def _of_several(systems: Sequence[str], text: str) -> str:
    return f"{', '.join(systems)}: {text}" if systems else text


def _is_general(one: Publication) -> bool:
    return all(system.host is None for system in one.systems) and bool(one.systems)


def _change(report: FieldReport) -> str:
    if report.change is None:
        return ""
    low, high = report.change
    return multiple_text(low) if low == high else f"{multiple_text(low)} to {multiple_text(high)}"


def _of(publication: Publication, machine: ReportedMachine) -> Printed:
    system = machine.published
    assert system is not None
    claims = tuple(
        _claim_row(publication, claim)
        for claim in publication.claims
        if claim.against_system == system.name  # ratios to another machine: with the other
    )
    parts: list[Part] = []
    if table := _figures(publication, machine, system):
        parts.append(Section("As printed", (table,)))
    verdicts = tuple(
        _author_row(publication, one, machine)
        for one in publication.verdicts
        if one.system == system.name
    )
    if verdicts:
        table = Table(heads=("for", "they say", "word for word", "ours"), rows=verdicts)
        parts.append(Section("What its authors recommend", (table,)))
    if claims:
        title = f"Ratios that they state, against their own figures ({len(claims)})"
        table = Table(
            heads=("word for word", "by their figures", "follows"), rows=claims, look="quotes"
        )
        parts.append(Section(title, (table,), is_open=True))
    return Printed(
        parts=tuple(parts),
        notes=tuple(note_text(one) for one in publication.notes if one.systems == (system.name,)),
        remarks=tuple(one.source for one in publication.remarks if one.systems == (system.name,)),
    )


def _figures(publication: Publication, machine: ReportedMachine, system: System) -> Table | None:
    """Figures as printed, the source's choices in columns, and what it says of the machine."""
    figures = [one for one in publication.figures if one.system == system.name]
    used = {choice for one in figures for choice, _ in one.texts}
    choices = [one.name for one in publication.choices if one.name in used]
    rows: list[tuple[str | Cell, ...]] = [
        (_title(one.metric, one.variant), *(dict(one.texts).get(name, "") for name in choices))
        for one in figures
    ]
    counts = _counts(machine, choices, system.inferred_vcpus)
    if any(counts):
        rows.insert(0, ("vCPUs", *counts))
    if not rows:
        return None
    rows += [(name, Cell((text,), across=len(choices))) for name, text in system.facts.items()]
    heads = tuple("every layout" if one == "any" else one for one in choices)
    return Table(heads=("", *heads), rows=tuple(rows), numeric=heads, look="printed")


def _counts(
    machine: ReportedMachine, choices: Sequence[str], inferred: Sequence[str]
) -> tuple[str, ...]:
    known = {run.head.name: run.head.vcpus for run in machine.runs}
    return tuple(
        ""
        if known.get(name) is None
        else f"{known[name]} (inferred)"
        if name in inferred
        else str(known[name])
        for name in choices
    )


def _title(metric: str, variant: str | None) -> str:
    known = METRICS.get(metric)
    return ", ".join(filter(None, (metric if known is None else known.title, variant)))


def _author_row(
    publication: Publication, theirs: PublishedVerdict, machine: ReportedMachine
) -> tuple[str, ...]:
    """What the authors recommend for a use, and what ours is next to it."""
    found = [publication.choice(name) for name in theirs.choices]
    labels = [one.arrangement or one.switches.name for one in found if one is not None]
    choice = " or ".join(labels) or "nothing before the machine is repaired"
    if theirs.grade is not None:
        choice = f"{theirs.grade}: {choice}"
    use = theirs.work or ("the whole machine" if theirs.objective is None else theirs.objective)
    return (str(use), choice, f'"{theirs.source}"', _ours(theirs, machine))


def _ours(theirs: PublishedVerdict, machine: ReportedMachine) -> str:
    if theirs.work is not None:
        return "no objective of a VM: it changes no answer above"
    agree: list[str] = []
    differ: list[str] = []
    for verdict in machine.verdicts:
        for source in verdict.published:
            if (source.quote, len(source.choices)) == (theirs.source, len(theirs.choices)) and (
                theirs.objective in (None, verdict.objective)
            ):
                (agree if source.agrees else differ).append(str(verdict.objective))
    said = [f"the same for {', '.join(agree)}"] if agree else []
    return "; ".join([*said, f"another for {', '.join(differ)}: why, above"] if differ else said)


def _claim_row(publication: Publication, claim: Claim) -> tuple[str, ...]:
    """A ratio that a source states, word for word, what its own figures come to, and whether it
    follows."""
    of = _figure(publication, claim.system, claim.choice, claim.metric)
    against = _figure(publication, claim.against_system, claim.against, claim.metric)
    names = [claim.choice, claim.against]
    if claim.system != claim.against_system:
        names = [claim.system, claim.against_system]
    what = f"{_title(claim.metric, None)}: {' over '.join(names)}"
    quote = f'"{claim.source}"'
    if of is None or against is None:
        return (quote, f"{what}: no figures printed", "cannot be checked")
    unit = METRICS[claim.metric].unit
    figures = (
        f"{multiple_text(of / against)} ({figure_text(of, unit)} over {figure_text(against, unit)})"
    )
    note = next((one for one in publication.notes if one.id == claim.disputed_by), None)
    return (quote, f"{what}: {figures}", "yes" if note is None else f"no: {note.text}")


def _figure(publication: Publication, system: str, choice: str, metric: str) -> float | None:
    """The printed figure; the middle of a range; of "near" and "far" the mean over the devices of
    every table that says which of them were near."""
    near_by_run = {
        name: devices
        for one in publication.figures
        if (one.system, one.metric, bool(one.near)) == (system, metric, True)
        for name, devices in one.near
    }
    found = []
    for run in publication.runs:
        of_metric = [one for one in run.samples if one.metric == metric]
        near = near_by_run.get(run.head.name, ())
        if run.head.system != system:
            continue
        if run.head.name == choice:
            found = [one for one in of_metric if _is_whole(one)]
        elif choice in ("near", "far") and any(one.index not in near for one in of_metric) and near:
            found += [one for one in of_metric if (one.index in near) is (choice == "near")]
    return sum(one.value for one in found) / len(found) if found else None


def _is_whole(sample: Sample) -> bool:
    return sample.index is None and sample.variant in _WHOLE
