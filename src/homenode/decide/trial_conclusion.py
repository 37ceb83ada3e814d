"""Conclusion: what a trial's boots show: effects, recommendations, and what to do."""

import shlex
from collections.abc import Sequence

from msgspec import Struct

from homenode.decide.alternative import alternatives_of
from homenode.decide.compare import compare
from homenode.decide.comparison import Comparison, EvidenceLevel
from homenode.decide.machine_facts import MachineFacts
from homenode.decide.recommendation import ReasonId, Recommendation, decide_all
from homenode.decide.sentences import STRENGTHS, effect_text, sentence_of
from homenode.decide.words import change_text
from homenode.measure.results.model import Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import TrialHead
from homenode.metrics import METRICS
from homenode.objective import Objective
from homenode.text import command_line, plural


class Advice(Struct, frozen=True, kw_only=True):
    """For an objective: the layout to make permanent, and the command."""

    objective: Objective
    layout: str
    command: str


class Conclusion(Struct, frozen=True, kw_only=True):
    """What a trial comes to."""

    # each layout against the host itself, None where that was not measured
    of_bare: Comparison | None
    recommendations: tuple[Recommendation, ...]
    advice: tuple[Advice, ...]
    emulated: bool  # no figure means anything, and there are no answers


def conclude(
    runs: Sequence[Run],
    domain: str,
    connect: str,
    apply_words: Sequence[str],
    machine: MachineFacts,
    plan_words: Sequence[str] = (),
) -> Conclusion:
    """The conclusion of a trial's runs, in the order of its layouts: the first is the baseline.

    domain: what names it on a command line. apply_words: options that the layouts were planned
    with; plan_words: of `homenode plan` instead, where the user gave the PUs. machine: what they
    were measured on.
    """
    guests = [run for run in runs if run.head.vantage is Vantage.GUEST]
    bare = [run for run in runs if run.head.vantage is not Vantage.GUEST]
    emulated = any(run.head.origin is Origin.EMULATED for run in runs)
    of_bare = None
    if bare and guests:
        against = alternatives_of([("bare", bare), ("trial", guests)], first_alone=True)
        of_bare = compare(against, bare=True)
    recommendations = () if emulated else decide_all(guests, machine)

    def command(recommendations: Recommendation) -> str:
        if not plan_words:
            words = ["homenode", "apply", domain, "--connect", connect, *apply_words]
            return shlex.join([*words, *recommendations.words])
        virsh, output = ["virsh", "-c", connect], f"vm-{recommendations.layout}.xml"
        dump = [*virsh, "dumpxml", "--inactive", domain]
        plan_command = [
            "homenode",
            "plan",
            "vm.xml",
            *plan_words,
            *recommendations.words,
            "-o",
            output,
        ]
        return " && ".join(
            (
                f"{shlex.join(dump)} > vm.xml",
                shlex.join(plan_command),
                shlex.join([*virsh, "define", output]),
            )
        )

    advice = tuple(
        Advice(objective=answer.objective, layout=answer.layout, command=command(answer))
        for answer in recommendations
        if answer.this_machine and answer.layout is not None
    )
    return Conclusion(
        of_bare=of_bare,
        recommendations=recommendations,
        advice=advice,
        emulated=emulated,
    )


class TrialAnswer(Struct, frozen=True, kw_only=True):
    """The last line of a trial."""

    sentence: str  # the layout to run, or why none is named
    command: str | None = None  # makes it permanent, or measures more; None where neither helps
    is_open: bool = False  # boots were measured, and cannot tell the layouts apart


MORE_BOOTS = 2
"""Of each layout, next time."""


def answer_of(conclusion: Conclusion, head: TrialHead, boots: int) -> TrialAnswer:
    """The answer for what the trial is to decide; where it has no figures of that, for the first
    objective that it answers. boots: of each layout, as they were ordered."""
    about = f"{head.source}: "
    if conclusion.emulated:
        nothing = "nothing is decided: it is emulated, and its figures mean nothing"
        return TrialAnswer(sentence=about + nothing)
    commands = {advice.objective: advice.command for advice in conclusion.advice}
    recommendation = next(
        recommendation
        for recommendation in conclusion.recommendations
        if recommendation.objective is head.objective
    )
    if (
        not recommendation.this_machine
        and not _passed_details(recommendation)
        and not recommendation.is_blocked
        and commands
    ):
        recommendation = next(
            recommendation
            for recommendation in conclusion.recommendations
            if recommendation.objective in commands
        )
    objective = recommendation.objective
    if (
        recommendation.this_machine
        and recommendation.tells
        and recommendation.choice is not None
        and objective in commands
    ):
        assert recommendation.level is not None
        is_measured = recommendation.level is EvidenceLevel.MEASURED
        level = "" if is_measured else f" ({STRENGTHS[recommendation.level]})"
        layout = recommendation.choice.partition(",")[
            0
        ]  # of several memory modes the label names it too
        chosen = f"run {layout} for {objective}: {effect_text(recommendation)}{level}"
        bare = _share_of_bare(conclusion.of_bare, recommendation)
        return TrialAnswer(sentence=about + chosen + bare, command=commands[objective])
    obstacle = "; ".join(_passed_details(recommendation))
    undecided = _cannot_tell(recommendation)
    is_compared = bool(undecided and not obstacle)
    obstacle = obstacle or sentence_of(recommendation)
    if recommendation.is_blocked:
        return TrialAnswer(sentence=f"{about}nothing is decided for {objective}: {obstacle}")
    resume_words = ("homenode", "trial", "resume", head.id, "--boots", boots + MORE_BOOTS)
    sentence = about + (
        f"cannot tell {undecided}" if is_compared else f"cannot tell for {objective}: {obstacle}"
    )
    return TrialAnswer(sentence=sentence, command=command_line(*resume_words), is_open=True)


def _cannot_tell(answer: Recommendation) -> str:
    """ "pin from default for multi-gpu: 9 % slower, 3 boots each"; "" without two results."""
    results = answer.results_on(answer.results[0].metric) if answer.results else ()
    chosen_result = next(
        (result for result in results if result.alternative == answer.choice), None
    )
    if chosen_result is None or len(results) < 2:
        return ""
    other_results = [result for result in results if result is not chosen_result]
    names = ", ".join(result.alternative for result in other_results)
    lower = METRICS[chosen_result.metric].lower_is_better
    change = change_text(other_results[0].value / chosen_result.value, lower_is_better=lower)
    low, high = answer.boots or (1, 1)
    boots = plural(low, "boot") if low == high else f"{low} to {high} boots"
    return (
        f"{chosen_result.alternative} from {names} for {answer.objective}: {change}, {boots} each"
    )


def _passed_details(answer: Recommendation) -> tuple[str, ...]:
    return tuple(reason.detail for reason in answer.reasons if reason.id is ReasonId.PASSED)


def _share_of_bare(of_bare: Comparison | None, recommendation: Recommendation) -> str:
    if of_bare is None or not recommendation.results:
        return ""
    metric = recommendation.results[0].metric
    shares = (
        effect.ratio
        for effect in of_bare.effects
        if effect.metric == metric and effect.alternative.endswith(recommendation.choice or "")
    )
    share = next(shares, None)
    return "" if share is None else f"; {100 * share:.0f} % of bare metal"
