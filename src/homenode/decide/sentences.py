"""Sentences: recommendations as text for people; never parsed."""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from homenode.decide.comparison import FEW_BOOTS, PRINTED, EvidenceLevel
from homenode.decide.machine_facts import assign_runs, collect_host_facts
from homenode.decide.ranking import MetricRank, RankedResult
from homenode.decide.recommendation import Reason, ReasonId, Recommendation, decide
from homenode.machine.topology import Host
from homenode.measure.results.model import Run
from homenode.metrics import METRICS, format_bounds, format_change, format_titles
from homenode.objective import Objective
from homenode.plan.planner import UNMEASURED, Choose, LayoutChoice, LayoutInputs, choose_layout
from homenode.text import plural
from homenode.vm.layout import PRESETS

STRENGTHS: Mapping[EvidenceLevel, str] = {
    EvidenceLevel.MEASURED: "measured",
    EvidenceLevel.NO_DIFFERENCE: "no difference shown",
    EvidenceLevel.PROVISIONAL: "provisional",
    EvidenceLevel.RULE: "a rule",
}
"""Words for the level of evidence."""

MAX_LINE = 80
"""Characters of the first line."""


def format_layout_name(answer: Recommendation) -> str:
    """Return the compared layout of an answer, else the layout to run."""
    label = (answer.choice or "").partition(",")[0]
    return label if label in PRESETS else answer.layout or label


def format_answer(system: str, answers: Sequence[Recommendation]) -> str:
    """The recommendation for a machine: "H200: run pin-numa for memory-bandwidth (measured)"."""
    telling = [answer for answer in answers if answer.choice is not None and answer.tells]
    if pins := _format_slow_pins(answers):
        return f"{system}: review first: {pins}"
    if telling:
        return _run_line(system, telling)
    if stop := stop_text(answers):
        if any(answer.findings for answer in answers):
            return f"{system}: repair first: {stop}"
        return f"{system}: {stop.partition(';')[0]}"
    return f"{system}: cannot tell {_format_undecided(answers)}"


def _format_slow_pins(answers: Sequence[Recommendation]) -> str:
    """Return the pins to check because pinning lost throughput; "" if none did."""
    for answer in answers:
        if reason := answer.find_reason(ReasonId.PIN_REGRESSION):
            change = format_change(reason.ratio or 1.0, "default")
            return f"check the pins of {reason.alternative}: {change}"
    return ""


def format_review(answers: Sequence[Recommendation]) -> str:
    """Return why a machine's results must be checked first and are not used for other machines; ""
    if they need not."""
    blocked = any(answer.is_blocked for answer in answers)
    return stop_text(answers) if blocked else _format_slow_pins(answers)


def _run_line(system: str, answers: Sequence[Recommendation]) -> str:
    uses: dict[tuple[str, EvidenceLevel], list[str]] = {}
    for answer in answers:
        assert answer.level is not None
        uses.setdefault((format_layout_name(answer), answer.level), []).append(answer.objective)
    levels = {level for _, level in uses}

    def format_line(limit: int, count: int) -> str:
        parts = []
        for (layout, level), objectives in list(uses.items())[:count]:
            are_named = len(objectives) <= limit
            use = _join_texts(objectives) if are_named else f"{len(objectives)} objectives"
            strength = f" ({STRENGTHS[level]})" if len(levels) > 1 else ""
            parts.append(f"{layout} for {use}{strength}")
        remainder = [f"{len(uses) - count} more"] if count < len(uses) else []
        end = f" ({STRENGTHS[max(levels)]})" if len(levels) == 1 else ""
        return f"{system}: run {', '.join([*parts, *remainder])}{end}"

    total = len(uses)
    sizes = [*((limit, total) for limit in (6, 2)), *((1, n) for n in range(total, 0, -1))]
    lines = [format_line(*size) for size in sizes]
    return next((text for text in lines if len(text) <= MAX_LINE), lines[-1])


def _format_undecided(answers: Sequence[Recommendation]) -> str:
    """ "pin from default in 3 of 3 results: 1 boot each"."""
    open_answers = [answer for answer in answers if _list_labels(answer)]
    if not open_answers:
        passed_reasons = filter(None, (answer.find_reason(ReasonId.PASSED) for answer in answers))
        details = (reason.detail.partition(": ")[2].split("; ")[0] for reason in passed_reasons)
        obstacle = next(details, "") or "no results of two layouts"
        return f"which layout is best: {obstacle}"
    labels = dict.fromkeys(label for one in open_answers for label in _list_labels(one))
    metrics = {result.metric for answer in open_answers for result in answer.results}
    text = " from ".join(reversed(labels)) if len(labels) == 2 else f"{len(labels)} layouts apart"
    return f"{text} in {len(metrics)} of {len(metrics)} results: {_format_obstacle(open_answers)}"


def _list_labels(answer: Recommendation) -> tuple[str, ...]:
    labels = tuple(dict.fromkeys(result.alternative for result in answer.results))
    return labels if len(labels) > 1 else ()


def _format_obstacle(answers: Sequence[Recommendation]) -> str:
    caveats = {
        caveat.id: caveat for answer in answers for caveat in answer.caveats if caveat.blocks
    }
    all_caveats = (caveat for answer in answers for caveat in answer.caveats)
    few = {caveat.detail.partition(":")[0] for caveat in all_caveats if caveat.id == FEW_BOOTS}
    if len(few) == 1:
        return few.pop()
    if FEW_BOOTS in caveats or PRINTED in caveats:
        counts = [count for answer in answers for count in answer.boots or ()] or [1]
        return format_boots(min(counts), max(counts))
    return next(
        (caveat.detail for caveat in caveats.values()), "they are within noise of each other"
    )


def format_sentence(answer: Recommendation, *, brief: bool = False) -> str:
    """Return an answer as a sentence, with its multiples. brief: without those of equal layouts."""
    if answer.choice is None:
        return (
            "; ".join(_format_no_answer(reason, answer) for reason in answer.reasons) or "no answer"
        )
    texts = (_compare(answer, metric, brief=brief) for metric in answer.metrics)
    parts = list(filter(None, texts))
    rule = [reason for reason in answer.reasons if reason.id is ReasonId.RULE]
    if rule and not answer.find_reason(ReasonId.NO_LAYOUT):
        if answer.also or not parts:
            parts.append(f"the rule of auto chooses {format_layout_name(answer)}")
        elif not answer.tells:
            parts.append(f"the values favour {format_layout_name(answer)}")
    parts += [reason.detail for reason in rule if reason.detail and not answer.results]
    parts += filter(None, (_format_rest(reason) for reason in answer.reasons))
    return "; ".join(parts)


def _compare(answer: Recommendation, metric: str, *, brief: bool) -> str:
    """Compare the choice with each other alternative on a metric; "" if it has no value."""
    if (results := answer.split_results(metric)) is None:
        return ""
    choice, rivals = results
    losers = [other for other in rivals if other.position is MetricRank.WORSE]
    if choice.position is MetricRank.WORSE:  # it is best on another metric
        losers = []
    peers = [other for other in rivals if other not in losers]
    parts = []
    if losers:
        changes = ", ".join(_format_change(choice, other, metric) for other in losers)
        parts.append(f"{answer.choice} is {changes}")
    if peers:
        names = ", ".join(
            other.alternative
            if brief
            else f"{other.alternative} ({answer.choice} is "
            f"{_format_change(choice, other, metric, bare=True)})"
            for other in peers
        )
        is_same = answer.level is EvidenceLevel.NO_DIFFERENCE
        it = "it" if losers else answer.choice
        word = "no difference that matters of" if is_same else "cannot tell"
        parts.append(f"{word} {it} from {names}")
    title = f"{METRICS[metric].title}: " if len(answer.metrics) > 1 else ""
    return title + "; ".join(parts)


def _format_change(
    choice: RankedResult, other: RankedResult, metric: str, *, bare: bool = False
) -> str:
    """ "2.1x pin-numa (2.0x to 2.2x)". bare: without the other's name."""
    lower = METRICS[metric].lower_is_better
    name = "" if bare else other.alternative
    is_best = choice.position is MetricRank.BEST  # the ratio of others is to it, without a drift
    ratio = 1 / other.ratio if is_best else choice.value / other.value
    text = format_change(ratio, name, lower_is_better=lower)
    is_interval = other.low is not None and other.high is not None and not bare
    if not is_interval or not is_best or lower:
        return text
    return f"{text} ({format_bounds(1 / (other.high or 1.0), 1 / (other.low or 1.0))})"


LIKE = 0.95  # and its inverse: values between them are called equal


def format_effect(answer: Recommendation) -> str:
    """Return the gain of the choice over `default`, else over the next: "7.3x default (6.9x to
    7.7x)"; "" if nothing was compared."""
    for metric in answer.metrics:
        if (results := answer.split_results(metric)) is None:
            continue
        choice, rivals = results
        other = next((rival for rival in rivals if rival.alternative == "default"), rivals[0])
        text = _format_change(choice, other, metric)
        if other.alternative not in answer.also:
            return text
        is_like = LIKE < choice.value / other.value < 1 / LIKE
        text = f"{'like' if is_like else 'cannot tell it from'} {other.alternative}"
        losers = (rival for rival in rivals if rival.position is MetricRank.WORSE)
        loser = next((rival for rival in losers if rival is not other), None)
        return text if loser is None else f"{_format_change(choice, loser, metric)}, {text}"
    return ""


def stop_text(answers: Sequence[Recommendation]) -> str:
    """Return the first blocking finding in a few words, with the number of its kind; else the
    reason for no conclusion; "" if nothing blocks."""
    findings = next((answer.findings for answer in answers if answer.findings), ())
    if not findings:
        return next((format_sentence(answer) for answer in answers if answer.is_blocked), "")
    first = findings[0]
    observed, expected = (re.split(":| [(]|, ", t)[0] for t in (first.observed, first.expected))
    subject = first.subject.rpartition(", ")[2].partition(": ")[0].rpartition("/")[2]
    like = sum(finding.id == first.id for finding in findings) - 1
    addition = f" and {like} more" if like else ""
    return f"{subject}{addition}: {observed}, expected {expected.removesuffix(' at least')}"


def format_basis(answer: Recommendation) -> str:
    """Return the basis of the answer in a few words."""
    if answer.level is None:
        is_blocked = answer.is_blocked or answer.find_reason(ReasonId.IMPOSSIBLE)
        return "not ready" if is_blocked else "cannot tell"
    if answer.level is EvidenceLevel.RULE:
        return "cannot tell" if answer.results else "a rule"
    boots = "one printed value each" if answer.boots is None else format_boots(*answer.boots)
    return f"{STRENGTHS[answer.level]}, {boots}, {_format_place(answer)}"


def _format_place(answer: Recommendation) -> str:
    """Return the machine of an answer: runs without a host name belong to the machine of their
    directory."""
    if any(caveat.id == "host-unknown" for caveat in answer.caveats):
        return "on an unnamed host"
    return "here" if answer.this_machine else "on this kind of machine"


def format_boots(low: int, high: int) -> str:
    """Return the fewest and most boots of a layout.

    >>> format_boots(1, 1), format_boots(1, 3)
    ('1 boot each', '1 to 3 boots')
    """
    return f"{plural(low, 'boot')} each" if low == high else f"{low} to {high} boots"


def _format_rest(reason: Reason) -> str | None:
    match reason.id:
        case ReasonId.NO_LAYOUT:
            return f"it is not a VM layout; the rule of auto chooses {reason.alternative}"
        case ReasonId.PIN_REGRESSION:
            return f"check the pins of {reason.alternative}"
    return None


def _format_no_answer(reason: Reason, answer: Recommendation) -> str:
    match reason.id:
        case ReasonId.HEALTH:
            first = answer.findings[0]
            addition = f" (and {len(answer.findings) - 1} more)" if len(answer.findings) > 1 else ""
            fix = f": {first.fix}" if first.fix else ""
            return f"not ready: {first.subject}: {first.observed} ({first.id}){addition}{fix}"
        case ReasonId.UNUSABLE:
            return f"not ready: {reason.detail}; fix the cause, then measure again"
        case ReasonId.IMPOSSIBLE:
            title = METRICS[reason.metric or ""].title
            return f"not ready: results of {title} are zero or impossible: measure it again"
        case ReasonId.NO_RESULTS if reason.detail:
            return reason.detail
        case ReasonId.NO_RESULTS:
            subject = "no layout" if reason.alternative is None else f"only {reason.alternative}"
            return f"{subject} has results of {format_titles(answer.objective)}"
    blocking = dict.fromkeys(f"{d.detail}: {d.fix}" for d in answer.caveats if d.blocks)
    return "cannot tell: " + ("; ".join(blocking) or "the layouts have no results in common")


def choose_by_results(runs: Sequence[Run]) -> Choose:
    """Return the function that chooses a layout by results of the host, or by the rule if they do
    not decide."""

    def choose(host: Host, objective: Objective, inputs: LayoutInputs) -> LayoutChoice:
        answer = decide(assign_runs(runs, host), collect_host_facts(host), objective, inputs)
        caveats = tuple(f"{caveat.detail}; {caveat.fix}." for caveat in answer.caveats)
        if answer.layout is None or not answer.tells:
            silent = [reason.detail for reason in answer.reasons if reason.id is ReasonId.PASSED]
            if answer.results or answer.layout is None:
                silent.append(format_sentence(answer))
            lines = tuple(f"The results do not decide: {line}." for line in silent)
            rule = choose_layout(objective, inputs)
            if answer.layout in (None, rule.layout):
                reason = f"{rule.reason}{UNMEASURED}"
                return structs.replace(rule, reason=reason, caveats=(*lines, *caveats))
            caveats = (*lines, *caveats)
        return LayoutChoice(
            layout=answer.layout,
            reason=f"{format_basis(answer)}: {format_sentence(answer)}",
            keep_vcpus=answer.keeps_vcpus,
            floating=answer.floats,
            caveats=caveats,
        )

    return choose


def _join_texts(parts: Iterable[str]) -> str:
    texts = list(parts)
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
