"""Answer: the first screen of a report: what to do in a few sentences, and the picture of it."""

from collections.abc import Iterator, Sequence

from homenode.decide.sentences import Advised, Sentence, advise
from homenode.doc import Doc, Gallery, Items, Part, Picture, Section, Span, Text, Words
from homenode.metrics import Metric, primaries
from homenode.objective import Objective
from homenode.show.effect_dots import EffectDot, EffectGroup, EffectRow, effect_dots
from homenode.show.page.machine import ReportedMachine
from homenode.show.page.pictures import better_text
from homenode.show.svg_canvas import series_number
from homenode.vm.layout import PRESETS, SUMMARIES

MOST_ROWS = 24
"""Of the picture; what has no place in it is in the charts below."""

_NOTHING = "No figure decides which layout to run: homenode trial VM measures it."


def advice_of(machines: Sequence[ReportedMachine]) -> tuple[Sentence, ...]:
    """What these machines' evidence says to do."""
    return advise([Advised(one.name, one.recommendations, one.effects) for one in machines])


def answer_section(machines: Sequence[ReportedMachine], anchors: Sequence[str]) -> Section:
    """The sentences, each a link to what it rests on, and one picture of what layouts change."""
    links = dict(zip((one.name for one in machines), anchors, strict=True))
    found = advice_of(machines)
    items = tuple(_said(one, links.get(one.machine or "", "effects")) for one in found)
    parts: list[Part] = [Items(items, "sentences") if items else Text(_NOTHING)]
    if names := _named_layouts(machines):
        meanings = ((Span(name, "bold"), f": {SUMMARIES[name]}") for name in names)
        parts.append(Items(tuple(meanings), "layouts small dim"))
    groups = tuple(_groups(machines))
    if groups:
        title = "What each layout changes"
        first = {one.comparison.baseline for one in machines if one.comparison is not None}
        first &= PRESETS.keys()
        of = first.pop() if len(first) == 1 else "first"
        note = [
            f"each dot: a layout's figure as a multiple of the same machine's {of} layout; at the "
            "right the one that is furthest from it"
        ]
        if any(dot.low is not None for group in groups for row in group.rows for dot in row.dots):
            note.append("lines: 95 % intervals")
        if any(one.is_published for one in machines):
            note.append("published figures are one run each, without an interval")
        parts.append(Gallery((Picture(title, effect_dots(title, groups, of), tuple(note)),)))
    return Section("What to run", tuple(parts), "answer", "What to run", look="screen")


def _named_layouts(machines: Sequence[ReportedMachine]) -> tuple[str, ...]:
    """Layouts that these machines have figures or verdicts of."""
    named = {one.label for machine in machines for one in machine.every}
    for verdict in (one for machine in machines for one in machine.recommendations):
        named |= {verdict.choice or "", verdict.layout or ""}
    return tuple(name for name in PRESETS if name in named)


def answer_text(machines: Sequence[ReportedMachine]) -> Doc:
    """The same sentences for a terminal."""
    items = tuple(_said(one, "") for one in advice_of(machines))
    return Doc("", (Items(items) if items else Text(_NOTHING),))


def _said(one: Sentence, link: str) -> Words:
    head = (Span(f"{one.use}: ", "dim"), Span(one.action, "bold"))
    return (*head, "; ", Span(one.figures, link=link), ".") if one.figures else (*head, ".")


def _groups(machines: Sequence[ReportedMachine]) -> Iterator[EffectGroup]:
    """Metrics that decide for something, those of most machines first."""
    metrics = dict.fromkeys(metric for one in Objective for metric in primaries(one))
    found = []
    for metric in metrics:
        rows = tuple(filter(None, (_row(machine, metric) for machine in machines)))
        if rows:
            found.append(EffectGroup(metric.title, better_text(metric), rows))
    left = MOST_ROWS
    for group in sorted(found, key=lambda one: -len(one.rows)):
        if len(group.rows) <= left:
            left -= len(group.rows)
            yield group


def _row(machine: ReportedMachine, metric: Metric) -> EffectRow | None:
    """None where the machine has no two layouts' figures, or has to be repaired first."""
    comparison = machine.comparison
    if comparison is None or any(one.is_blocked for one in machine.recommendations):
        return None
    if comparison.baseline not in PRESETS:
        return None  # queues and policies: of a chart of their own
    labels = [one.label for one in machine.chosen]
    dots = tuple(
        EffectDot(
            label=one.alternative,
            ratio=one.ratio,
            low=one.low,
            high=one.high,
            series=series_number(one.alternative, labels.index(one.alternative)),
        )
        for one in comparison.effects
        if one.metric == metric.id and one.primary and one.state is None and one.ratio > 0
    )
    return EffectRow(machine.name, dots) if dots else None
