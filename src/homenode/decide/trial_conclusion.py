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
    found = () if emulated else decide_all(guests, machine)

    def command(found: Recommendation) -> str:
        if not plan_words:
            words = ["homenode", "apply", domain, "--connect", connect, *apply_words]
            return shlex.join([*words, *found.words])
        virsh, output = ["virsh", "-c", connect], f"vm-{found.layout}.xml"
        dump = [*virsh, "dumpxml", "--inactive", domain]
        made = ["homenode", "plan", "vm.xml", *plan_words, *found.words, "-o", output]
        return " && ".join(
            (
                f"{shlex.join(dump)} > vm.xml",
                shlex.join(made),
                shlex.join([*virsh, "define", output]),
            )
        )

    advice = tuple(
        Advice(objective=one.objective, layout=one.layout, command=command(one))
        for one in found
        if one.here and one.layout is not None
    )
    return Conclusion(
        of_bare=of_bare,
        recommendations=found,
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


def answer_of(found: Conclusion, head: TrialHead, boots: int) -> TrialAnswer:
    """The answer for what the trial is to decide; where it has no figures of that, for the first
    objective that it answers. boots: of each layout, as they were ordered."""
    about = f"{head.source}: "
    if found.emulated:
        nothing = "nothing is decided: it is emulated, and its figures mean nothing"
        return TrialAnswer(sentence=about + nothing)
    commands = {one.objective: one.command for one in found.advice}
    recommendation = next(one for one in found.recommendations if one.objective is head.objective)
    if (
        not recommendation.here
        and not _passed(recommendation)
        and not recommendation.is_blocked
        and commands
    ):
        recommendation = next(one for one in found.recommendations if one.objective in commands)
    objective = recommendation.objective
    if (
        recommendation.here
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
        bare = _share_of_bare(found.of_bare, recommendation)
        return TrialAnswer(sentence=about + chosen + bare, command=commands[objective])
    why = "; ".join(_passed(recommendation))
    told = _cannot_tell(recommendation)
    is_compared = bool(told and not why)
    why = why or sentence_of(recommendation)
    if recommendation.is_blocked:
        return TrialAnswer(sentence=f"{about}nothing is decided for {objective}: {why}")
    more = ("homenode", "trial", "resume", head.id, "--boots", boots + MORE_BOOTS)
    sentence = about + (
        f"cannot tell {told}" if is_compared else f"cannot tell for {objective}: {why}"
    )
    return TrialAnswer(sentence=sentence, command=command_line(*more), is_open=True)


def _cannot_tell(answer: Recommendation) -> str:
    """ "pin from default for multi-gpu: 9 % slower, 3 boots each"; "" without two results."""
    results = answer.on(answer.results[0].metric) if answer.results else ()
    own = next((one for one in results if one.alternative == answer.choice), None)
    if own is None or len(results) < 2:
        return ""
    others = [one for one in results if one is not own]
    names = ", ".join(one.alternative for one in others)
    lower = METRICS[own.metric].lower_is_better
    change = change_text(others[0].value / own.value, lower_is_better=lower)
    low, high = answer.boots or (1, 1)
    boots = plural(low, "boot") if low == high else f"{low} to {high} boots"
    return f"{own.alternative} from {names} for {answer.objective}: {change}, {boots} each"


def _passed(answer: Recommendation) -> tuple[str, ...]:
    return tuple(one.detail for one in answer.reasons if one.id is ReasonId.PASSED)


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
