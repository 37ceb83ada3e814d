"""Answer: the first screen of a report, and the layout for each machine, from recommendations."""

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from homenode.decide.comparison import EvidenceLevel, Outcome
from homenode.decide.recommendation import ANY_MACHINE, MIN_GPUS, Recommendation
from homenode.decide.sentences import (
    STRENGTHS,
    format_basis,
    format_effect,
    format_layout_name,
    format_review,
    format_sentence,
    stop_text,
)
from homenode.decide.switch_effects import StudySwitch, SwitchEffect
from homenode.doc import Cell, Doc, Gallery, Items, Part, Picture, Section, Span, Table, Text, Words
from homenode.measure.results.model import UNKNOWN_SWITCHES
from homenode.metrics import Metric, format_bounds, format_change, format_titles, list_primaries
from homenode.objective import Objective
from homenode.show.bars import EffectDot, EffectGroup, EffectRow, draw_effect_dots, has_lines
from homenode.show.report.machine import ReportedMachine
from homenode.show.results_text import list_caveats
from homenode.show.svg_canvas import number_series
from homenode.text import plural
from homenode.vm.layout import PRESETS, SUMMARIES

MAX_ROWS = 14
"""Limit of rows in the first screen's picture; the evidence charts show all."""

MAX_LINES = 3
"""Limit of advice from several machines: a minute's reading."""

_NOTHING = "No result decides which layout to run: homenode trial VM measures it."


class AdviceLine(Struct, frozen=True, kw_only=True):
    """A line for an objective, or a machine under review: the action and its evidence."""

    subject: str
    action: str  # the layout to type, "pin, not pin-numa", "repair it first"
    ground: str
    machine: str | None = None  # None: several

    @property
    def is_review(self) -> bool:
        """Whether the line is about a machine whose results are not used."""
        return self.subject == self.machine


def list_advice(machines: Sequence[ReportedMachine]) -> tuple[AdviceLine, ...]:
    """Return at most MAX_LINES answers, those supported by most machines first, then up to
    MAX_LINES machines under review. A single machine has a line for each objective."""
    reviewed_machines = [machine for machine in machines if format_review(machine.recommendations)]
    if len(machines) == 1:
        (machine,) = machines
        answers = machine.recommendations
        is_sound = not reviewed_machines or any(answer.choice for answer in answers)
        return (
            tuple(_list_machine_advice(machine.name, answers))
            if is_sound
            else (_review_machine(machine),)
        )
    sound = [machine for machine in machines if not format_review(machine.recommendations)]
    lines = _join_advice(sound)
    if not lines:  # layouts that differ in several steps have no single effect
        for machine in sound:
            clear_answers = [a for a in machine.recommendations if a.tells and not a.also]
            for line in _list_machine_advice(machine.name, clear_answers):
                subject = f"{machine.name}, {line.subject}"
                lines.append(structs.replace(line, subject=subject))
    reviewed_machines.sort(key=lambda machine: not any(a.findings for a in machine.recommendations))
    return (*lines[:MAX_LINES], *map(_review_machine, reviewed_machines[:MAX_LINES]))


def _review_machine(machine: ReportedMachine) -> AdviceLine:
    answers, action, name = machine.recommendations, "review first", machine.name
    if any(answer.is_blocked for answer in answers):
        has_findings = any(answer.findings for answer in answers)
        action = "repair first" if has_findings else "measure again first"
    return AdviceLine(subject=name, action=action, ground=format_review(answers), machine=name)


def _join_advice(machines: Sequence[ReportedMachine]) -> list[AdviceLine]:
    """Return at most one line per objective: the switch with an effect on most machines, then the
    largest. If one machine alone decides an objective, that machine's answer."""
    effects = [effect for machine in machines for effect in machine.effects]
    weighted_lines: list[tuple[tuple[bool, int, float], AdviceLine]] = []
    decided_labels: set[frozenset[str]] = set()
    for objective in Objective:
        metrics = frozenset(metric.id for metric in list_primaries(objective))
        if metrics in decided_labels:
            continue  # density is decided by throughput
        decided_labels.add(metrics)
        lines: list[tuple[tuple[bool, int, float], AdviceLine]] = []
        deciding = [
            (m.name, [a])
            for m in machines
            for a in m.recommendations
            if a.objective is objective and a.tells
        ]
        for switch in StudySwitch:
            of_switch = [e for e in effects if e.switch is switch and e.effect.metric in metrics]
            if moved := [e for e in of_switch if e.outcome in (Outcome.BETTER, Outcome.WORSE)]:
                lines.append((_rank_effects(moved), _format_advice(objective, of_switch, moved)))
        if not lines:
            continue
        weight, line = max(lines, key=lambda one: one[0])
        if len(deciding) == 1 and (own := next(_list_machine_advice(*deciding[0]), None)):
            line = structs.replace(own, ground=f"{own.ground} on {deciding[0][0]}")
        weighted_lines.append((weight, line))
    return [advice for _, advice in sorted(weighted_lines, key=lambda one: one[0], reverse=True)]


def _rank_effects(moved_effects: Sequence[SwitchEffect]) -> tuple[bool, int, float]:
    one_way = len({effect.outcome for effect in moved_effects}) == 1
    furthest = max(abs(math.log(effect.effect.gain)) for effect in moved_effects)
    return one_way, len({effect.machine for effect in moved_effects}), furthest


def _format_advice(
    objective: Objective, all_effects: Sequence[SwitchEffect], moved: Sequence[SwitchEffect]
) -> AdviceLine:
    """The effect of a step from one layout to another, and the number of machines with it."""
    ways = {effect.outcome for effect in moved}
    layout, than = (
        " or ".join(dict.fromkeys(getattr(effect.effect, side) for effect in moved))
        for side in ("alternative", "baseline")
    )
    if len(ways) > 1:
        worst, best = (pick(moved, key=lambda one: one.effect.gain) for pick in (min, max))
        changes = (
            f"{_format_change(effect, than)} on {effect.machine}" for effect in (worst, best)
        )
        ground = f"{layout} is {', '.join(changes)}"
        return AdviceLine(subject=objective, action=f"measure {layout}", ground=ground)
    order = sorted(moved, key=lambda one: abs(math.log(one.effect.gain)))
    is_better = Outcome.BETTER in ways
    name = than if is_better else ""
    ratios = (order[0].effect.ratio, order[-1].effect.ratio)
    lower = order[0].effect.lower_is_better
    change = format_bounds(min(ratios), max(ratios), name, lower_is_better=lower)
    count, named = (len({effect.machine for effect in group}) for group in (all_effects, moved))
    place = f"on {named} of {count} machines" if count > 1 else f"on {moved[0].machine}"
    if is_better:
        return AdviceLine(subject=objective, action=layout, ground=f"{change} {place}")
    ground = f"{layout} is {change} {place}"
    return AdviceLine(subject=objective, action=f"{than}, not {layout}", ground=ground)


def _format_change(effect: SwitchEffect, name: str) -> str:
    compared = effect.effect
    return format_change(compared.ratio, name, lower_is_better=compared.lower_is_better)


def _list_machine_advice(machine: str, answers: Sequence[Recommendation]) -> Iterator[AdviceLine]:
    """Yield a line for each objective that results decide; without results the rule's layout."""
    decided_answers = [answer for answer in answers if answer.choice is not None and answer.tells]
    ruled_answers = [answer for answer in answers if answer.layout is not None]
    for answer in decided_answers or ruled_answers:
        assert answer.level is not None
        ground = f"{format_effect(answer)} ({STRENGTHS[answer.level]})".lstrip()
        yield AdviceLine(
            subject=answer.objective,
            action=format_layout_name(answer) if decided_answers else answer.layout or "",
            ground=ground if decided_answers else "no result decides: the rule of auto",
            machine=machine,
        )


def answer_section(machines: Sequence[ReportedMachine], anchors: Sequence[str]) -> Section:
    """Return a line for each answer, with a link to its evidence, and one picture."""
    links = dict(zip((machine.name for machine in machines), anchors, strict=True))
    lines = list_advice(machines)
    items = tuple(_format_line(line, links.get(line.machine or "", "evidence")) for line in lines)
    parts: list[Part] = [Items(items, "sentences") if items else Text(_NOTHING)]
    parts.append(
        Text((format_strength(machines), ": ", Span("caveats", link="caveats")), "small dim")
    )
    if names := _list_layouts(machines):
        meanings = ((Span(name, "bold"), f": {SUMMARIES[name]}") for name in names)
        parts.append(Items(tuple(meanings), "layouts small dim"))
    groups = tuple(_group_metrics(machines, [line.subject for line in lines]))
    if groups:
        title = "What each layout changes"
        comparisons = filter(None, (machine.comparison for machine in machines))
        baselines = {comparison.baseline for comparison in comparisons} & PRESETS.keys()
        baseline = baselines.pop() if len(baselines) == 1 else "first"
        note = f"against the same machine's {baseline} layout"
        if has_lines(groups):
            note += "; lines: 95 % intervals"
        parts.append(Gallery((Picture(title, draw_effect_dots(title, groups, baseline), (note,)),)))
    return Section("What to run", tuple(parts), "answers", "Answers", look="screen")


def format_strength(machines: Sequence[ReportedMachine]) -> str:
    """Describe the strength of the answers in a few words."""
    answers = [a for machine in machines for a in machine.recommendations if a.tells]
    levels = {answer.level for answer in answers}
    strengths = [text for level, text in STRENGTHS.items() if level in levels]
    strengths = strengths or ["nothing is decided"]
    if machines and all(machine.is_published for machine in machines):
        strengths.append("one printed value each")
    return ", ".join(strengths)


def answer_text(machines: Sequence[ReportedMachine]) -> Doc:
    """Return the answer's lines for a terminal."""
    lines = [
        (line.subject, line.action.split(",")[0].removesuffix(" first"), line.ground)
        for line in list_advice(machines)
    ]
    widths = [max((len(line[column]) for line in lines), default=0) + 2 for column in (0, 1)]
    texts = (f"  {line[0]:<{widths[0]}}{line[1]:<{widths[1]}}{line[2]}" for line in lines)
    shown_texts = tuple(Text(text, hang=sum(widths) + 2) for text in texts)
    return Doc("", shown_texts or (Text(_NOTHING),))


def format_counts(machines: Sequence[ReportedMachine]) -> str:
    """Summarise a report in a line: "9 machines; 2 answers, 1 machine to repair first"."""
    lines = list_advice(machines)
    answers = [machine.recommendations for machine in machines]
    reviewed_groups = [group for group in answers if format_review(group)]
    blocked_count = sum(any(answer.is_blocked for answer in group) for group in reviewed_groups)
    parts = [plural(sum(not line.is_review for line in lines), "answer")]
    counts = {"repair": blocked_count, "review": len(reviewed_groups) - blocked_count}
    parts += [f"{count} to {action} first" for action, count in counts.items() if count]
    return f"{format_machines(machines)}; {', '.join(parts)}"


def format_machines(machines: Sequence[ReportedMachine]) -> str:
    """Count the machines with results: "9 machines"."""
    return plural(sum(machine.name != ANY_MACHINE for machine in machines), "machine")


def _format_line(line: AdviceLine, link: str) -> Words:
    subject = line.subject if line.is_review else _format_title(line.subject)
    suffix = "; not used for other machines" if line.is_review else ""
    ground = (Span(line.ground + suffix, "dim small", link),) if line.ground else ()
    return (Span(f"{subject}: {line.action}. ", "bold"), *ground)


def _format_title(subject: str) -> str:
    """Format an objective as a heading: "Multi GPU"."""
    words = subject.replace("-", " ").replace("gpu", "GPU")
    return words[:1].upper() + words[1:]


def _list_layouts(machines: Sequence[ReportedMachine]) -> tuple[str, ...]:
    """Return layouts for which these machines have results or recommendations."""
    names = {alternative.label for machine in machines for alternative in machine.alternatives}
    for machine in machines:
        for answer in machine.recommendations:
            names |= {answer.choice or "", answer.layout or ""}
    return tuple(name for name in PRESETS if name in names)


def _group_metrics(
    machines: Sequence[ReportedMachine], decided_metrics: Sequence[str]
) -> Iterator[EffectGroup]:
    """Order metrics: those of decided objectives first, then those of most machines."""
    groups = {}
    for objective in Objective:
        for metric in list_primaries(objective):
            rows = tuple(filter(None, (_build_row(machine, metric) for machine in machines)))
            if rows and metric.id not in groups:
                place = objective not in decided_metrics, -len(rows)
                groups[metric.id] = place, EffectGroup(metric.title, metric.better, rows)
    rows_left = MAX_ROWS
    for _, group in sorted(groups.values(), key=lambda item: item[0]):
        if len(group.rows) <= rows_left:
            rows_left -= len(group.rows)
            yield group


def _build_row(machine: ReportedMachine, metric: Metric) -> EffectRow | None:
    """Return the machine's row; None without results of two layouts, or if they need review."""
    comparison = machine.comparison
    if comparison is None or format_review(machine.recommendations):
        return None
    if comparison.baseline not in PRESETS:
        return None  # queues and policies have a separate chart
    labels = [alternative.label for alternative in machine.chosen]
    dots = tuple(
        EffectDot(
            label=effect.alternative,
            ratio=effect.ratio,
            low=effect.low,
            high=effect.high,
            series=number_series(effect.alternative, labels.index(effect.alternative)),
            text=format_change(effect.ratio, lower_is_better=effect.lower_is_better),
        )
        for effect in comparison.effects
        if effect.metric == metric.id
        and effect.primary
        and effect.state is None
        and effect.ratio > 0
    )
    return EffectRow(machine.name, dots) if dots else None


def build_machines_table(machines: Sequence[ReportedMachine], anchors: Sequence[str]) -> Table:
    """Return a row for each machine, a column for each objective: layout, gain, strength."""
    heads = (
        Cell((str(objective), Span(format_titles(objective), "dim small")))
        for objective in Objective
    )
    return Table(
        heads=(Cell(("machine",), "of-machine"), *heads),
        rows=tuple(_machine_row(*pair) for pair in zip(machines, anchors, strict=True)),
        name="What to run by machine and objective",
        look="decisions",
    )


def _machine_row(machine: ReportedMachine, anchor: str) -> tuple[Cell, ...]:
    lines: list[Words] = [Span(machine.name, "name", anchor)]
    lines.append(Span(format_machine(machine), "dim small"))
    if review := format_review(machine.recommendations):
        lines.append(Span(f"review first: {review}", "bold small"))
    stop = stop_of(machine)
    if stop:
        return Cell(tuple(lines[:2])), Cell(stop, across=len(Objective))
    answers = {answer.objective: answer for answer in machine.recommendations}
    cells = (_objective_cell(machine, answers.get(objective)) for objective in Objective)
    return (Cell(tuple(lines)), *cells)


def _objective_cell(machine: ReportedMachine, answer: Recommendation | None) -> Cell:
    if answer is not None and not _has_enough_gpus(machine, answer):
        return Cell((Span("-", "dim"),), "none")
    if answer is None or answer.choice is None or answer.level is None:
        return Cell((Span("no result" if answer is None else "cannot tell", "dim"),), "none")
    lines: list[Words] = [Span(format_layout_name(answer), "bold" if answer.tells else "")]
    if effect := format_effect(answer):
        lines.append(Span(effect, "small"))
    lines.append(Span(STRENGTHS[answer.level], "small dim"))
    return Cell(tuple(lines), "answer")


def build_answers_table(machine: ReportedMachine) -> Table:
    """Return a row for each objective: layout, reason, strength, and open questions."""
    rows = []
    for answer in machine.recommendations:
        if _has_enough_gpus(machine, answer):
            caveats = dict.fromkeys(list_caveats(answer, machine.caveats))
            if answer.measure_next is not None:
                caveats = {f"measure next: {answer.measure_next}": None, **caveats}
            layout = format_layout_name(answer) if answer.choice else "no answer"
            cells = (format_sentence(answer), format_basis(answer), "; ".join(caveats))
            rows.append((answer.objective, Cell((Span(layout, "bold"),), "run"), *cells))
    return Table(
        heads=("objective", "run", "why", "evidence", "caveats, and what to measure next"),
        rows=tuple(rows),
        name=f"What to run on {machine.name}",
        look="recommendations",
    )


def stop_of(machine: ReportedMachine) -> tuple[Words, ...]:
    """Return why no layout is recommended, and the next step; () if a layout is."""
    answers = machine.recommendations
    heads = [run.head for run in machine.runs]
    if not answers and all(
        head.switches == UNKNOWN_SWITCHES and head.arrangement == head.name for head in heads
    ):
        return (
            "the logs do not name the layout of each run: "
            "homenode import --layout RUN=LAYOUT adds it; the results are below",
        )
    if not answers:
        return ("no result decides for any objective",)
    if any(answer.choice is not None and answer.tells for answer in answers) or not (
        all(answer.choice is None for answer in answers)
        or any(answer.is_blocked for answer in answers)
    ):
        return ()
    first = next((answer.findings[0] for answer in answers if answer.findings), None)
    if first is None and not any(answer.is_blocked for answer in answers):
        return (format_sentence(answers[0]),)
    fix = f". Fix: {first.fix}" if first is not None and first.fix else "."
    action = "repair first" if first is not None else "measure again first"
    return Span(action, "bold"), Span(stop_text(answers) + fix, "small")


def format_machine(machine: ReportedMachine) -> str:
    """Return the known facts of the machine in a line."""
    kinds = dict.fromkeys(run.head.host_kind for run in machine.runs if run.head.host_kind)
    part_names = dict.fromkeys(name for run in machine.runs for name in run.head.hardware)
    return "; ".join(kinds or part_names) or "the results do not name its processor and GPUs"


def _has_enough_gpus(machine: ReportedMachine, answer: Recommendation) -> bool:
    """Return False if the machine is known to have too few GPUs for the objective."""
    if machine.host is None or answer.level is not EvidenceLevel.RULE:
        return True
    return len(machine.host.whole_gpus) >= MIN_GPUS.get(answer.objective, 0)
