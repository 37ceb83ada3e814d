"""Printed: what publications say of a machine, word for word, and what of it follows."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from homenode.analyse.words import figure_text, multiple_text
from homenode.evidence.model import Claim, FieldReport, Note, Publication, PublishedVerdict
from homenode.metrics import METRICS
from homenode.report.page.machine import Machine
from homenode.results.model import Run, Sample


@dataclass(frozen=True, slots=True)
class PrintedTable:
    """Figures as printed. columns: the source's choices; rows: (what, cells)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A ratio that a source states, word for word, and what its own figures come to."""

    quote: str
    of: str
    figures: str
    follows: bool | None
    why: str


@dataclass(frozen=True, slots=True)
class AuthorRow:
    """What the authors recommend for a use, and what ours is next to it."""

    use: str
    choice: str
    quote: str
    ours: str


@dataclass(frozen=True, slots=True)
class Printed:
    """Everything that publications say of one machine. Empty where none does."""

    verdicts: tuple[AuthorRow, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    table: PrintedTable | None = None
    claims: tuple[ClaimRow, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourcePart:
    """What a publication says of no machine in particular, or of several. advice: (quote, what
    homenode does)."""

    title: str
    advice: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def printed_part(machine: Machine) -> Printed:
    """What is printed of a machine."""
    parts = [_of(publication, machine) for publication in machine.sources]
    return parts[0] if parts else Printed()


def source_parts(publications: Sequence[Publication], drawn: Iterable[str]) -> list[SourcePart]:
    """The publications of these systems, and all that is about no machine."""
    names = set(drawn)
    found = []
    for one in publications:
        systems = {system.name for system in one.systems}
        if not (systems & names) and not _is_general(one):
            continue
        figures = [
            (
                _title(figure.metric, figure.variant),
                text if choice == "any" else f"{choice}: {text}",
            )
            for figure in one.figures
            if (found_system := one.system(figure.system)) is not None and found_system.host is None
            for choice, text in figure.texts
        ]
        found.append(
            SourcePart(
                f"{one.id}: {one.title}, {one.publisher}, {one.dated}",
                tuple((r.source, r.ours or "") for r in one.remarks if r.is_advice),
                tuple(
                    _of_several(r.systems, r.source)
                    for r in one.remarks
                    if not r.is_advice and _is_shared(r.systems, names)
                ),
                tuple(figures),
                tuple(
                    _of_several(note.systems, note_text(note))
                    for note in one.notes
                    if _is_shared(note.systems, names)
                ),
            )
        )
    return found


def field_reports(publications: Sequence[Publication]) -> tuple[tuple[FieldReport, str], ...]:
    """Figures that decide nothing, each with its change as a multiple."""
    return tuple(
        (report, _change(report))
        for publication in publications
        for report in publication.field_reports
    )


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


def _of(publication: Publication, machine: Machine) -> Printed:
    system = machine.published
    assert system is not None
    figures = [one for one in publication.figures if one.system == system.name]
    used = {choice for one in figures for choice, _ in one.texts}
    choices = [one.name for one in publication.choices if one.name in used]
    rows = [
        (_title(one.metric, one.variant), tuple(dict(one.texts).get(name, "") for name in choices))
        for one in figures
    ]
    counts = _counts(machine, choices, system.inferred_vcpus)
    if any(counts):
        rows.insert(0, ("vCPUs", counts))
    return Printed(
        tuple(_author_row(publication, one, machine) for one in _verdicts(publication, machine)),
        tuple(system.facts.items()),
        PrintedTable(tuple("every layout" if c == "any" else c for c in choices), tuple(rows))
        if rows
        else None,
        tuple(
            _claim_row(publication, claim)
            for claim in publication.claims
            if claim.against_system == system.name  # ratios to another machine: with the other
        ),
        tuple(note_text(one) for one in publication.notes if one.systems == (system.name,)),
        tuple(one.source for one in publication.remarks if one.systems == (system.name,)),
    )


def _counts(machine: Machine, choices: Sequence[str], inferred: Sequence[str]) -> tuple[str, ...]:
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


def _verdicts(publication: Publication, machine: Machine) -> list[PublishedVerdict]:
    system = machine.published
    assert system is not None
    return [one for one in publication.verdicts if one.system == system.name]


def _author_row(publication: Publication, theirs: PublishedVerdict, machine: Machine) -> AuthorRow:
    found = [publication.choice(name) for name in theirs.choices]
    labels = [one.arrangement or one.switches.name for one in found if one is not None]
    choice = " or ".join(labels) or "nothing before the machine is repaired"
    if theirs.grade is not None:
        choice = f"{theirs.grade}: {choice}"
    use = theirs.work or ("the whole machine" if theirs.objective is None else theirs.objective)
    return AuthorRow(str(use), choice, theirs.source, _ours(theirs, machine))


def _ours(theirs: PublishedVerdict, machine: Machine) -> str:
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


def _claim_row(publication: Publication, claim: Claim) -> ClaimRow:
    of = _figure(publication.runs, claim.system, claim.choice, claim.metric)
    against = _figure(publication.runs, claim.against_system, claim.against, claim.metric)
    names = [claim.choice, claim.against]
    if claim.system != claim.against_system:
        names = [claim.system, claim.against_system]
    what = f"{_title(claim.metric, None)}: {' over '.join(names)}"
    if of is None or against is None:
        return ClaimRow(claim.source, what, "no figures printed", None, "")
    unit = METRICS[claim.metric].unit
    figures = (
        f"{multiple_text(of / against)} ({figure_text(of, unit)} over {figure_text(against, unit)})"
    )
    note = next((one for one in publication.notes if one.id == claim.disputed_by), None)
    return ClaimRow(claim.source, what, figures, note is None, "" if note is None else note.text)


def _figure(runs: Sequence[Run], system: str, choice: str, metric: str) -> float | None:
    """The printed figure; the middle of a range."""
    for run in runs:
        if (run.head.system, run.head.name) != (system, choice):
            continue
        found = [one.value for one in run.samples if one.metric == metric and _is_whole(one)]
        return sum(found) / len(found) if found else None
    return None


def _is_whole(sample: Sample) -> bool:
    return sample.index is None and sample.variant in (None, "dram", "FP16 as printed")
