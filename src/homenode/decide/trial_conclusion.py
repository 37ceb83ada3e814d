"""Conclusion: effects, recommendations and next steps from a trial's boots."""

import shlex
from collections.abc import Mapping, Sequence

from msgspec import Struct

from homenode.decide.alternative import group_by_argument
from homenode.decide.compare import compare
from homenode.decide.comparison import Comparison, EvidenceLevel
from homenode.decide.machine_facts import MachineFacts
from homenode.decide.recommendation import (
    ReasonId,
    Recommendation,
    decide_all,
    rests_on_rule_alone,
)
from homenode.decide.sentences import (
    STRENGTHS,
    format_boots,
    format_effect,
    format_layout_name,
    format_sentence,
)
from homenode.measure.results.model import Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import TrialHead
from homenode.metrics import METRICS, format_change
from homenode.objective import Objective
from homenode.text import command_line
from homenode.vm.hypervisor.connection import DEFAULT


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
