"""Statement: a verdict in sentences, for people. Nothing reads them back."""

from collections.abc import Iterator, Sequence

from homenode.decide.comparison import EvidenceLevel
from homenode.decide.ranking import Position, RankedResult
from homenode.decide.verdict import (
    Reason,
    ReasonId,
    Verdict,
    titles_of,
)
from homenode.decide.words import figure_text, multiple_text, range_text
from homenode.metrics import METRICS


def sentence_of(verdict: Verdict) -> str:
    """The verdict as a sentence, with its figures."""
    if verdict.choice is None:
        return "; ".join(_nothing(one, verdict) for one in verdict.reasons) or "no answer"
    parts = [_figures(verdict, metric) for metric in _metrics(verdict)]
    more = (_more(one, verdict) for one in verdict.reasons)
    return "; ".join([_answer(verdict), *parts, *filter(None, more)])


def stop_text(verdicts: Sequence[Verdict]) -> str:
    """The first of the findings that stop every recommendation, in a few words, and how many are
    like it; without findings why nothing is concluded; "" where nothing stops it."""
    findings = next((one.findings for one in verdicts if one.findings), ())
    if not findings:
        return next((sentence_of(one) for one in verdicts if one.stopped), "")
    first = findings[0]
    like = sum(one.id == first.id for one in findings)
    observed, expected = (
        text.partition(":")[0].partition(", ")[0] for text in (first.observed, first.expected)
    )
    subject = first.subject.partition(": ")[0]
    subject = first.subject if like == 1 else f"{subject} and {like - 1} like it"
    return f"{subject}: found {observed}, expected {expected}"


def runs_as(verdict: Verdict) -> str:
    """The layout to run where that is not the choice: "run as pin-bound"; else ""."""
    if verdict.floating:
        return "run with memory bound"
    if verdict.layout in (None, verdict.choice):
        return ""
    changed = verdict.why(ReasonId.BOUND) or verdict.why(ReasonId.RULE)
    if changed is not None and verdict.why(ReasonId.NO_LAYOUT) is None:
        return f"run as {verdict.layout}"
    return f"in a VM: {verdict.layout}"


def memory_text(verdict: Verdict) -> str:
    """Where memory is bound, and why it is where that was not measured."""
    said = verdict.memory_mode or "not known"
    bound = verdict.why(ReasonId.BOUND)
    if verdict.floating:
        said += f", and the vCPUs float over these: {' '.join(verdict.words)}"
    elif bound is not None:
        said += (
            f": the guest sees one node, as in {bound.alternative}, and does not see the binding"
        )
    return said


def effect_text(verdict: Verdict) -> str:
    """What the choice gives, in a few words: "561.2 GB/s, 7.3 x default"; "18.4 GB/s, like default
    (20.2 GB/s)" where it is no worse; "" where no figure is."""
    for metric in _metrics(verdict):
        results = verdict.on(metric)
        own = next((one for one in results if one.alternative == verdict.choice), None)
        if own is None:
            continue
        said = figure_text(own.value, own.unit)
        others = [one for one in results if one is not own]
        base = next((one for one in others if one.alternative == "default"), None)
        base = next(iter(others), None) if base is None else base
        if base is not None and base.alternative in verdict.also:
            said += f", like {base.alternative} ({figure_text(base.value, base.unit)})"
        elif base is not None and verdict.level is EvidenceLevel.PUBLISHED:  # a range stays one
            said += f", {_times(base, own, results[0])} {base.alternative}"
        elif base is not None:
            said += f", {multiple_text(own.value / base.value)} {base.alternative}"
        maybe = verdict.why(ReasonId.MAY_BE_BETTER)
        return said if maybe is None else f"{said}; {maybe.alternative} may be better"
    return ""


def ground_of(verdict: Verdict) -> str:
    """What the answer rests on, in a few words."""
    match verdict.level:
        case None:
            if verdict.why(ReasonId.NOT_REAL):
                return "not real"
            sick = verdict.stopped or verdict.why(ReasonId.REFUSED)
            return "not ready" if sick else "cannot tell"
        case EvidenceLevel.MEASURED:
            return f"measured {_where(verdict)}"
        case EvidenceLevel.PROVISIONAL:
            return f"provisional, {_boots(verdict)} each, {_where(verdict)}"
        case EvidenceLevel.PUBLISHED:
            return "published, one figure each"
        case EvidenceLevel.REASONED:
            return "by the table of layouts"


def _where(verdict: Verdict) -> str:
    """Runs that name no host are of the machine that they stand under, not of one that is known."""
    if any(doubt.id == "host-unknown" for doubt in verdict.doubts):
        return "on a host not named"
    return "here" if verdict.here else "on this kind of machine"


def _boots(verdict: Verdict) -> str:
    if verdict.boots is None:
        return "one figure"
    low, high = verdict.boots
    if low == high == 1:
        return "one boot"
    return f"{low} boots" if low == high else f"{low} to {high} boots"


def _metrics(verdict: Verdict) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.metric for one in verdict.results))


def _answer(verdict: Verdict) -> str:
    choice = verdict.choice or ""
    if verdict.level is EvidenceLevel.REASONED:
        return choice
    equals = f" (no worse: {', '.join(verdict.also)})" if verdict.also else ""
    if verdict.avoid:
        return f"{choice}{equals} rather than {', '.join(_avoided(verdict))}"
    if verdict.why(ReasonId.MAY_BE_BETTER) is not None:
        return f"{choice}; cannot tell which is best"
    unshown = [one for one in verdict.results if one.position is Position.UNSHOWN]
    if any(1 - min(one.ratio, 1 / one.ratio) >= METRICS[one.metric].matters for one in unshown):
        return f"{choice}; cannot tell which is best"
    best = verdict.results[0].alternative if verdict.results else choice
    small = [one.alternative for one in verdict.results if _excludes_one(one)]
    if choice == best and small:
        return f"{choice}; better than {', '.join(dict.fromkeys(small))}, by less than matters"
    if choice in small:
        return f"{choice}; {best} is better, by less than matters"
    if unshown:
        return f"{choice}; no difference is shown"
    return f"{choice}; no difference that matters"


def _avoided(verdict: Verdict) -> Iterator[str]:
    """Those that are worse, each with its own ground where that is not the verdict's."""
    worse = [one for one in verdict.results if one.position is Position.WORSE]
    levels = {one.alternative: one.level for one in worse}
    for name in verdict.avoid:
        own = levels.get(name, verdict.level)
        yield name if own is verdict.level else f"{name} ({own})"


def _excludes_one(one: RankedResult) -> bool:
    """Whether its interval shows a difference from the best, whatever its size."""
    if one.low is None or one.high is None or one.level is not EvidenceLevel.MEASURED:
        return False
    return one.low >= 1 or one.high <= 1


def _figures(verdict: Verdict, metric: str) -> str:
    """ "memory bandwidth: pin-numa 561.2 GB/s, 7.27 x default (77.24 GB/s)"."""
    results = verdict.on(metric)
    own = next((one for one in results if one.alternative == verdict.choice), results[0])
    slowest = ", slowest GPU" if own.slowest_device else ""
    figures = [f"{own.alternative} {figure_text(own.value, own.unit)}"]
    figures += [
        f"{_times(one, own, results[0])} {one.alternative} ({figure_text(one.value, one.unit)})"
        for one in results
        if one is not own
    ]
    return f"{METRICS[metric].title}{slowest}: {', '.join(figures)}"


def _times(one: RankedResult, own: RankedResult, best: RankedResult) -> str:
    """The choice's figure as a multiple of another's: a range where that is an interval, or was
    printed as a range."""
    if own is best and one.low is not None and one.high is not None:
        return range_text(1 / one.high, 1 / one.low)
    return multiple_text(own.value / one.value)


def _more(reason: Reason, verdict: Verdict) -> str | None:
    match reason.id:
        case ReasonId.CONSERVATIVE:
            return f"of these, {reason.alternative} has the least risk"
        case ReasonId.LEAST_CHANGE:
            return f"{reason.alternative} changes least"
        case ReasonId.DENSITY:
            return "exposed siblings cost nothing, and leave cores for more VMs"
        case ReasonId.RULE:
            return reason.detail
        case ReasonId.NO_LAYOUT:
            return f"that is no layout of a VM; {reason.alternative} is that of the table"
        case ReasonId.SIBLINGS:
            gain = "" if reason.ratio is None else multiple_text(reason.ratio)
            return f"exposed siblings give {gain} the throughput for twice the vCPUs"
        case ReasonId.PIN_REGRESSION:
            return f"check the pinning of {reason.alternative}"
        case ReasonId.MAY_BE_BETTER:
            least = METRICS[reason.metric or ""].boot_variation
            return (
                f"{reason.alternative} may be better ({multiple_text(reason.ratio or 1.0)}): boots "
                f"of one layout differ by up to {multiple_text(least)}, so boot both more often"
            )
        case ReasonId.UNDECIDED:
            return f"no result for {reason.alternative}"
    return None


def _nothing(reason: Reason, verdict: Verdict) -> str:
    match reason.id:
        case ReasonId.HEALTH:
            first = verdict.findings[0]
            more = f" (and {len(verdict.findings) - 1} more)" if len(verdict.findings) > 1 else ""
            fix = f": {first.fix}" if first.fix else ""
            return f"not ready: {first.subject}: {first.observed} ({first.id}){more}{fix}"
        case ReasonId.NOT_REAL:
            return f"its figures are {reason.detail}: they test the workflow, not a layout"
        case ReasonId.UNUSABLE:
            return f"not ready: {reason.detail}; fix the cause, then measure again"
        case ReasonId.REFUSED:
            title = METRICS[reason.metric or ""].title
            return f"not ready: every figure of {title} is zero or impossible: measure it again"
        case ReasonId.ONE_ALTERNATIVE:
            return f"{titles_of(verdict.objective)} is known of {reason.alternative} only"
        case ReasonId.NO_FIGURES:
            return f"no figure of {titles_of(verdict.objective)} by layout"
    blocking = dict.fromkeys(f"{d.detail}: {d.remedy}" for d in verdict.doubts if d.blocks)
    return "cannot tell: " + ("; ".join(blocking) or "the alternatives have no figures in common")
