"""SwitchEffects: the effect of each switch of a layout on each metric, machine by machine; effects,
recommendations and next steps of a trial."""

import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, structs

from homenode.decide.alternative import Alternative, group_by_argument, join_states
from homenode.decide.compare import compare, compare_series, make_series_key
from homenode.decide.comparison import Comparison, Effect, EvidenceLevel, Outcome, is_large
from homenode.decide.machine_facts import MachineFacts
from homenode.decide.recommendation import ReasonId, Recommendation, decide_all, rests_on_rule_alone
from homenode.decide.sentences import (
    STRENGTHS,
    format_boots,
    format_effect,
    format_layout_name,
    format_sentence,
)
from homenode.decide.summary import Series, SeriesKey
from homenode.measure.gpu_tests import TOPOLOGY_FILE
from homenode.measure.results.model import Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import TrialHead
from homenode.metrics import METRICS, format_change
from homenode.objective import Objective
from homenode.text import command_line
from homenode.vm.hypervisor.connection import DEFAULT


class StudySwitch(StrEnum):
    """The switches of the study, in the order in which layouts add them."""

    PINNING = "pinning"
    MEMORY = "bound memory"
    CELLS = "guest cells"
    PCIE = "guest PCIe"
    SIBLINGS = "siblings"


_STEPS: tuple[tuple[StudySwitch, tuple[tuple[str, str], ...]], ...] = (
    (StudySwitch.PINNING, (("default", "pin"),)),
    (StudySwitch.MEMORY, (("pin", "pin-bound"),)),
    (StudySwitch.CELLS, (("pin", "pin-numa"), ("default", "pin-numa"))),
    (StudySwitch.PCIE, (("pin-numa", "pin-numa-pci"), ("pin-numa-smt", "pin-numa-pci-smt"))),
    (
        StudySwitch.SIBLINGS,
        (
            ("pin-numa-pci", "pin-numa-pci-smt"),
            ("pin-numa", "pin-numa-smt"),
            ("pin", "pin-numa-smt"),
        ),
    ),
)
"""Pairs of layouts whose difference counts as a switch's, those that differ in the fewest switches
first; the first pair with results of a metric is used."""


class SwitchEffect(Struct, frozen=True, kw_only=True):
    switch: StudySwitch
    machine: str
    effect: Effect  # as compared

    @property
    def outcome(self) -> Outcome:
        """Better or worse by a relevant amount, no relevant difference, or unknown."""
        return judge_outcome(self.effect)


def switch_effects(machine: str, alternatives: Sequence[Alternative]) -> tuple[SwitchEffect, ...]:
    """The effects of every switch in which two of these layouts differ, on headline metrics."""
    by_label = {alternative.label: alternative for alternative in alternatives}
    changes: list[SwitchEffect] = []
    for switch, pairs in _STEPS:
        seen_names: set[str] = set()
        for first, second in pairs:
            if first not in by_label or second not in by_label:
                continue
            pair = join_states((by_label[first], by_label[second]))
            series_by_label = {layout.label: _select_totals(layout) for layout in pair}
            effects = compare_series(pair, series_by_label).effects
            for effect in sorted(filter(_is_headline, effects), key=lambda one: not one.primary):
                if effect.metric not in seen_names:
                    seen_names.add(effect.metric)
                    changes.append(SwitchEffect(switch=switch, machine=machine, effect=effect))
    return tuple(changes)


def _select_totals(alternative: Alternative) -> dict[SeriesKey, Series]:
    """Return the series without those of single sizes, nodes and pairs."""
    return {key: key_series for key, key_series in alternative.series.items() if _may_stand(key)}


def _may_stand(key: SeriesKey) -> bool:
    metric = METRICS.get(key.metric)
    return (
        metric is not None
        and key.size_bytes is None
        and key.node is None
        and (metric.control or metric.worst_device or key.variant in (None, metric.headline))
    )


def judge_outcome(effect: Effect) -> Outcome:
    """Return the effect's outcome by `compare`, if it is relevant."""
    is_stated = effect.outcome in (Outcome.BETTER, Outcome.WORSE)
    return Outcome.NO_DIFFERENCE if is_stated and not is_large(effect) else effect.outcome


def _is_headline(effect: Effect) -> bool:
    """Return whether the series represents its metric."""
    metric = METRICS.get(effect.metric)
    if metric is None or effect.state is not None:
        return False
    return make_series_key(effect).is_over_all and (
        effect.primary or effect.slowest_device or effect.variant in (None, metric.headline)
    )


def file_effects(alternatives: Sequence[Alternative]) -> tuple[Effect, ...]:
    """Compare all-reduce with and without NCCL's topology file, in layouts that have both."""
    effects: list[Effect] = []
    for alternative in alternatives:
        sides: dict[str | None, dict[SeriesKey, Series]] = {None: {}, TOPOLOGY_FILE: {}}
        for key, series in alternative.series.items():
            if key.metric.startswith("allreduce-busbw") and key.variant in sides:
                plain = structs.replace(key, variant=None)
                sides[key.variant][plain] = structs.replace(series, key=plain)
        other = structs.replace(alternative, label=f"{alternative.label}, {TOPOLOGY_FILE}")
        series_by_label = dict(zip((alternative.label, other.label), sides.values(), strict=True))
        if all(series_by_label.values()):
            effects += compare_series((alternative, other), series_by_label).effects
    return tuple(effects)


class Conclusion(Struct, frozen=True, kw_only=True):
    """The result of a trial."""

    # each layout against the host itself, None if that was not measured
    of_bare: Comparison | None
    recommendations: tuple[Recommendation, ...]
    commands: Mapping[Objective, str]  # each makes the objective's layout permanent
    emulated: bool  # results are meaningless, and there are no recommendations


def conclude(
    runs: Sequence[Run],
    domain: str,
    connect: str,
    apply_words: Sequence[str],
    machine: MachineFacts,
) -> Conclusion:
    """Return the conclusion of a trial's runs; the first layout is the baseline. domain: its name
    on a command line. apply_words: options that the layouts were planned with."""
    guests = [run for run in runs if run.head.vantage is Vantage.GUEST]
    bare = [run for run in runs if run.head.vantage is not Vantage.GUEST]
    emulated = any(run.head.origin is Origin.EMULATED for run in runs)
    of_bare = None
    if bare and guests:
        groups = group_by_argument([("bare", bare), ("trial", guests)], first_alone=True)
        of_bare = compare(groups, bare=True)
    answers = () if emulated else decide_all(guests, machine)

    at = () if connect == DEFAULT else ("--connect", connect)
    words = ["homenode", "apply", domain, *at, *apply_words]
    commands = {
        answer.objective: shlex.join([*words, *answer.words])
        for answer in answers
        if answer.this_machine and answer.layout is not None
    }
    return Conclusion(
        of_bare=of_bare, recommendations=answers, commands=commands, emulated=emulated
    )


class TrialAnswer(Struct, frozen=True, kw_only=True):
    """The last line of a trial."""

    sentence: str  # the layout to run, or why none is named
    command: str | None = None  # makes it permanent, or measures more; None if neither helps
    is_open: bool = False  # boots were measured, and cannot tell the layouts apart


MORE_BOOTS = 2
"""Boots of each layout that the next trial should add."""


def answer_of(conclusion: Conclusion, head: TrialHead, boots: int) -> TrialAnswer:
    """Return the answer for the trial's objective; without results on it, for the first answered
    objective. boots: requested boots of each layout."""
    if conclusion.emulated:
        reason = "no conclusion: the VM is emulated, so its results are meaningless"
        return TrialAnswer(sentence=f"{head.source}: {reason}")
    commands = conclusion.commands
    answers = {answer.objective: answer for answer in conclusion.recommendations}
    answer = answers[head.objective]
    obstacle = _find_obstacle(answer)
    if commands and not (answer.this_machine or obstacle or answer.is_blocked):
        answer = answers[next(objective for objective in answers if objective in commands)]
        obstacle = _find_obstacle(answer)
    objective = answer.objective
    if answer.this_machine and answer.tells and answer.choice and objective in commands:
        assert answer.level is not None
        is_measured = answer.level is EvidenceLevel.MEASURED
        strength = "" if is_measured else f" ({STRENGTHS[answer.level]})"
        effect = f"{format_effect(answer)}{strength}{_share_of_bare(conclusion.of_bare, answer)}"
        sentence = f"{head.source}: run {format_layout_name(answer)} for {objective}: {effect}"
        return TrialAnswer(sentence=sentence, command=commands[objective])
    if answer.is_blocked:
        reason = f"no conclusion for {objective}: {obstacle or format_sentence(answer)}"
        return TrialAnswer(sentence=f"{head.source}: {reason}")
    undecided_text = "" if obstacle else _format_undecided_pair(answer)
    if not obstacle and rests_on_rule_alone(answer):
        obstacle = f"no result of it; the rule of auto chooses {format_layout_name(answer)}"
    undecided_text = undecided_text or f"for {objective}: {obstacle or format_sentence(answer)}"
    resume = command_line(
        "homenode", "trial", "resume", head.argument, "--boots", boots + MORE_BOOTS
    )
    sentence = f"{head.source}: cannot tell {undecided_text}"
    return TrialAnswer(sentence=sentence, command=resume, is_open=True)


def _format_undecided_pair(answer: Recommendation) -> str:
    """ "pin from default for multi-gpu: default is 9 % slower, 3 boots each", or ""."""
    if not answer.metrics or (results := answer.split_results(answer.metrics[0])) is None:
        return ""
    choice, rivals = results
    names = ", ".join(other.alternative for other in rivals)
    lower = METRICS[choice.metric].lower_is_better
    change = format_change(rivals[0].value / choice.value, lower_is_better=lower)
    boots = format_boots(*(answer.boots or (1, 1)))
    change = f"{rivals[0].alternative} is {change}"
    return f"{choice.alternative} from {names} for {answer.objective}: {change}, {boots}"


def _find_obstacle(answer: Recommendation) -> str:
    return "; ".join(reason.detail for reason in answer.reasons if reason.id is ReasonId.PASSED)


def _share_of_bare(bare_comparison: Comparison | None, recommendation: Recommendation) -> str:
    for effect in () if bare_comparison is None else bare_comparison.effects:
        is_chosen = effect.primary and effect.alternative == recommendation.choice
        if is_chosen and recommendation.metrics[:1] == (effect.metric,):
            return f"; {100 * effect.ratio:.0f} % of bare metal"
    return ""
