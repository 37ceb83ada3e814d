"""ComparisonText: effects with their intervals on a terminal, and every doubt with its remedy."""

from collections.abc import Iterable, Iterator, Sequence

from homenode.analyse.comparison import (
    PRINTED,
    WEAKENING,
    Comparison,
    Doubt,
    Effect,
    EvidenceLevel,
    Outcome,
)
from homenode.analyse.outcomes import is_large
from homenode.analyse.words import figure_text, multiple_text, range_text
from homenode.doc import Doc, Part, Section, Table, Text
from homenode.metrics import metric_of
from homenode.units import format_bytes
from homenode.wording import plural

_HEADS = ("metric", "baseline", "value", "effect", "interval", "outcome")
_OUTCOMES = {
    Outcome.BETTER: "better",
    Outcome.WORSE: "worse",
    Outcome.NO_DIFFERENCE: "no difference that matters",
    Outcome.CANNOT_TELL: "cannot tell",
}


def comparison_text(comparison: Comparison, *, everything: bool = False) -> Doc:
    """A table for each alternative, primary metrics first, then doubts and what was skipped.

    everything: also series of single devices, nodes, sizes and pairs of PUs.
    """
    against = "bare metal" if comparison.bare else comparison.baseline
    parts: list[Part] = []
    for label in comparison.alternatives:
        effects = [one for one in comparison.effects if one.alternative == label]
        tables = tuple(_tables(comparison, effects, everything))
        parts.append(Section(f"{label} against {against}", tables))
    parts += (Section("", tuple(_doubts(comparison.doubts))), Text(""))
    parts += [Text(f"skipped: {one}", "warn") for one in comparison.skipped]
    about = (
        f"intervals: {comparison.confidence:.0%}, over boots (t, on logarithms of medians); "
        "primary metrics are corrected for their number"
    )
    return Doc("", (*parts, Text(about)))


def _doubts(doubts: Iterable[Doubt]) -> Iterator[Text]:
    """Each doubt with its likely cause and its remedy."""
    for doubt in doubts:
        head = "cannot tell" if doubt.blocks and doubt.id not in WEAKENING else "doubt"
        yield Text(f"{head}: {doubt.subject}: {doubt.detail}  ({doubt.id})")
        yield Text(f"likely cause  {doubt.cause}", indent=2)
        yield Text(f"remedy        {doubt.remedy}", indent=2)


def _tables(comparison: Comparison, effects: Sequence[Effect], everything: bool) -> Iterator[Part]:
    primary = [one for one in effects if one.primary]
    rest = [one for one in effects if not one.primary]
    shown = [one for one in rest if everything or _is_whole(one)]
    for title, of in (("primary", primary), ("for information only", shown)):
        if of:
            counts = sorted({one.boots for one in of})
            boots = ", ".join(f"{first} and {second}" for first, second in counts)
            rows = tuple(_row(comparison, one) for one in of)
            yield Text(f"{title}; boots: {boots}")
            yield Table(heads=_HEADS, rows=rows, folds=_HEADS[-1:])
    if hidden := len(rest) - len(shown):
        yield Text(f"{plural(hidden, 'more series', 'more series')} with --all")
    if not effects:
        yield Text("no series in common")


def _is_whole(effect: Effect) -> bool:
    if effect.metric == "core-to-core-latency":
        return False  # one pair of PUs: a large guest has thirty thousand
    return effect.slowest_device or (
        (effect.device, effect.peer, effect.node, effect.peer_node, effect.size_bytes)
        == (None,) * 5
    )


def _row(comparison: Comparison, effect: Effect) -> tuple[str, ...]:
    return (
        _name(effect),
        figure_text(effect.baseline_value, effect.unit),
        figure_text(effect.value, effect.unit),
        f"{effect.gain:.1%} of bare" if comparison.bare else multiple_text(effect.ratio),
        _interval(effect),
        _outcome(effect),
    )


def _interval(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return "-"
    return range_text(effect.low, effect.high)


def _outcome(effect: Effect) -> str:
    stated = _OUTCOMES[effect.outcome]
    if effect.outcome in (Outcome.BETTER, Outcome.WORSE) and not is_large(effect):
        stated += ", less than matters"
    if effect.outcome is not Outcome.CANNOT_TELL and effect.level is not EvidenceLevel.MEASURED:
        counts = "one figure" if PRINTED in effect.doubts else _boots(effect)
        return f"{stated} ({effect.level}, {counts} each)"
    if effect.doubts:
        return f"{stated}: {', '.join(effect.doubts)}"
    if effect.p_adjusted is not None:
        return f"{stated} (p {effect.p_adjusted:.2g})"
    return stated


def _boots(effect: Effect) -> str:
    low, high = sorted(effect.boots)
    return plural(low, "boot") if low == high else f"{low} to {high} boots"


def _name(effect: Effect) -> str:
    metric = metric_of(effect.metric)
    parts = [effect.metric if metric is None else metric.title]
    if effect.slowest_device:
        parts.append("slowest GPU")
    parts += [
        text
        for text in (
            effect.variant,
            None if effect.size_bytes is None else format_bytes(effect.size_bytes),
            None if effect.node is None else f"node {effect.node}",
            None if effect.peer_node is None else f"from node {effect.peer_node}",
            None if effect.device is None else str(effect.device),
            None if effect.peer is None else f"to {effect.peer}",
            None if effect.state is None else f"state {effect.state}",
        )
        if text is not None
    ]
    return ", ".join(parts)
