"""Advice: what the evidence of one or several machines says to do, in at most three sentences."""

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, structs

from homenode.decide.comparison import EvidenceLevel, Outcome
from homenode.decide.statement import effect_text, stop_text
from homenode.decide.switch_effects import StudySwitch, SwitchEffect
from homenode.decide.verdict import Verdict, titles_of
from homenode.decide.words import multiple_text, range_text
from homenode.metrics import METRICS, primaries
from homenode.objective import Objective

MOST = 3
"""Sentences: what somebody reads in a minute."""

_DO = {
    StudySwitch.PINNING: "pin each vCPU to a core of its own",
    StudySwitch.MEMORY: "bind the memory to the VM's nodes",
    StudySwitch.CELLS: "show the guest its NUMA nodes",
    StudySwitch.PCIE: "show the guest the nodes of its GPUs",
    StudySwitch.SIBLINGS: "give it both threads of each core",
}
_DO_NOT = {
    **{switch: f"do not {action}" for switch, action in _DO.items()},
    StudySwitch.CELLS: "do not show the guest NUMA nodes unless its GPUs have theirs",
}
"""The step to guest cells is measured in guests whose GPUs have no node: theirs are another."""


class Sentence(Struct, frozen=True, kw_only=True):
    """One sentence. use: what for. action: what to do. figures: what that changed, and where.

    machine: the one that it is about; None = several.
    """

    use: str
    action: str
    figures: str
    machine: str | None = None

    @property
    def text(self) -> str:
        """The whole sentence."""
        figures = f"; {self.figures}" if self.figures else ""
        return f"{self.use}: {self.action}{figures}."


class Advised(Struct, frozen=True):
    """What is known of one machine."""

    name: str
    verdicts: tuple[Verdict, ...]
    effects: tuple[SwitchEffect, ...]


def advise(machines: Sequence[Advised]) -> tuple[Sentence, ...]:
    """At most MOST sentences, the one that most machines support first; none where no figure
    decides anything. What is to be repaired before anything else keeps a place."""
    stopped = [_repair(one) for one in machines if _is_stopped(one)]
    if len(machines) == 1:
        found = stopped or list(_of_one(machines[0]))
        return tuple(found[:MOST])
    healthy = [one for one in machines if not _is_stopped(one)]
    found = _of_several([effect for one in healthy for effect in one.effects])
    if not found:  # layouts that differ in several steps have no effect of one step
        for one in healthy:
            better = tuple(v for v in one.verdicts if _is_by_figures(v) and not v.also)
            for said in _of_one(structs.replace(one, verdicts=better)):
                use = f"{one.name}, {said.use[0].lower()}{said.use[1:]}"
                found.append(structs.replace(said, use=use))
    return (*found[: MOST - min(len(stopped), 1)], *stopped)[:MOST]


def _is_stopped(machine: Advised) -> bool:
    return any(one.stopped for one in machine.verdicts) and not any(
        one.choice for one in machine.verdicts
    )


def _repair(machine: Advised) -> Sentence:
    stop = stop_text(machine.verdicts)
    action = "repair it first" if any(v.findings for v in machine.verdicts) else "measure it first"
    return Sentence(use=machine.name, action=action, figures=stop, machine=machine.name)


def _of_several(effects: Sequence[SwitchEffect]) -> list[Sentence]:
    """One for each objective at most: the switch that moves it on most machines, and furthest."""
    found: list[tuple[tuple[bool, int, float], Sentence]] = []
    for objective in Objective:
        metrics = {metric.id for metric in primaries(objective)}
        if any(metrics == {m.id for m in primaries(o)} for o in _before(objective)):
            continue  # density is decided by the figures of throughput
        ranked = []
        for switch in StudySwitch:
            of_switch = [e for e in effects if e.switch is switch and e.effect.metric in metrics]
            if moved := [one for one in of_switch if _is_stated(one)]:
                ranked.append((_weight(moved), _sentence(objective, switch, of_switch, moved)))
        if ranked:
            found.append(max(ranked, key=lambda one: one[0]))
    return [advice for _, advice in sorted(found, key=lambda one: one[0], reverse=True)]


def _before(objective: Objective) -> Iterator[Objective]:
    for one in Objective:
        if one is objective:
            return
        yield one


def _is_stated(one: SwitchEffect) -> bool:
    return one.judged in (Outcome.BETTER, Outcome.WORSE)


def _weight(moved: Sequence[SwitchEffect]) -> tuple[bool, int, float]:
    one_way = len({one.judged for one in moved}) == 1
    furthest = max(abs(math.log(one.effect.gain)) for one in moved)
    return one_way, len({one.machine for one in moved}), furthest


def _sentence(
    objective: Objective,
    switch: StudySwitch,
    every: Sequence[SwitchEffect],
    moved: Sequence[SwitchEffect],
) -> Sentence:
    use = objective.use[0].upper() + objective.use[1:]
    title = " or ".join(dict.fromkeys(METRICS[one.effect.metric].title for one in moved))
    ratios = sorted(one.effect.ratio for one in moved)
    ways = {one.judged for one in moved}
    layout, than = (
        " or ".join(dict.fromkeys(getattr(one.effect, of) for one in moved))
        for of in ("alternative", "baseline")
    )
    if len(ways) > 1:
        least, most = (pick(moved, key=lambda one: one.effect.ratio) for pick in (min, max))
        figures = (
            f"{title} {multiple_text(least.effect.ratio)} {least.effect.baseline} on "
            f"{least.machine}, {multiple_text(most.effect.ratio)} on {most.machine}"
        )
        return Sentence(
            use=use, action=f"measure {layout} before you {_DO[switch]}", figures=figures
        )
    if Outcome.BETTER in ways:
        action = f"run {layout} ({_DO[switch]})"
    else:
        action = f"run {than}, not {layout} ({_DO_NOT[switch]})"
    known = len({one.machine for one in every})
    named = len({one.machine for one in moved})
    count = f"all {named}" if named == known else f"{named} of the {known}"
    where = f"on {moved[0].machine}" if known == 1 else f"on {count} machines with figures"
    return Sentence(use=use, action=action, figures=f"{title} {_range(ratios)} {than} {where}")


def _range(ratios: Sequence[float]) -> str:
    low, high = multiple_text(ratios[0]), multiple_text(ratios[-1])
    return low if low == high else range_text(float(low[:-2]), float(high[:-2]))


def _is_by_figures(verdict: Verdict) -> bool:
    return verdict.level not in (None, EvidenceLevel.REASONED)


def _of_one(machine: Advised) -> Iterator[Sentence]:
    """A sentence for each layout that figures choose, first where it is better than others; of what
    is reasoned alone, one that says it."""
    chosen: dict[str, list[Verdict]] = {}
    for one in machine.verdicts:
        if one.choice is not None and _is_by_figures(one):
            chosen.setdefault(one.choice, []).append(one)
    decided = sorted(chosen.items(), key=lambda one: all(verdict.also for verdict in one[1]))
    for choice, verdicts in decided:
        uses = _joined(one.objective.use for one in verdicts)
        said = dict.fromkeys(f"{titles_of(v.objective)} {effect_text(v)}" for v in verdicts)
        levels = {str(one.level) for one in verdicts}
        yield Sentence(
            use=uses[0].upper() + uses[1:],
            action=f"run {_run(choice, verdicts)}",
            figures=f"{'; '.join(said)} ({' or '.join(sorted(levels))})",
            machine=machine.name,
        )
    reasoned = [one for one in machine.verdicts if one.choice is not None]
    if not chosen and reasoned:
        yield Sentence(
            use="No figure decides here",
            action=f"from its topology alone, {_joined(_reasoned(reasoned))}",
            figures="homenode trial measures it",
            machine=machine.name,
        )


def _run(choice: str, verdicts: Sequence[Verdict]) -> str:
    """The choice and, where it is another, the layout to run."""
    layouts = {one.layout for one in verdicts} - {None, choice}
    return choice if not layouts else f"{choice} (as {' or '.join(sorted(filter(None, layouts)))})"


def _reasoned(verdicts: Sequence[Verdict]) -> Iterator[str]:
    uses: dict[str, list[str]] = {}
    for one in verdicts:
        uses.setdefault(one.choice or "", []).append(str(one.objective))
    return (f"{choice} for {', '.join(those)}" for choice, those in uses.items())


def _joined(parts: Iterable[str]) -> str:
    every = list(parts)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} and {every[-1]}"
