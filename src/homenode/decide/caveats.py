"""Caveats: reasons that make two alternatives incomparable, or weaken a result."""

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, pairwise

from homenode.decide.alternative import Alternative
from homenode.decide.comparison import NO_ORDER, NODELESS, ORDER, SLOW_IN_ONE, make_caveat
from homenode.decide.health import find_slow_in_one
from homenode.decide.machine_facts import format_other_hardware
from homenode.decide.matrices import find_far_copies
from homenode.findings import Caveat
from homenode.measure.results.model import Origin, RunHead
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS
from homenode.vm.layout import GuestCells, GuestPcie, Siblings

_MUST_AGREE = frozenset("governor clock turbo throttling link driver tool microcode smt".split())
"""First words of conditions that change results; other conditions are only mentioned."""

_OF_COLLECTIVES = ("tool collective", "tool largest message", "tool nccl", "tool rccl")

_OF_SWEEPS = (
    "a sweep that stopped early, or ran with another -e: short messages never reach the peak",
    "measure both again to the same largest message (-e of nccl-tests)",
)
"""Cause and fix if sweeps end at different sizes."""

_GPU_METRICS = ("allreduce-", "h2d-", "d2h-", "p2p-")

Metrics = frozenset[str] | None


def find_caveats(
    first: Alternative, second: Alternative, metrics: Metrics = None
) -> tuple[Caveat, ...]:
    """Return caveats on comparing two alternatives on these metrics; None = on all."""
    subject = f"{first.label} and {second.label}"
    heads = [[run.head for run in alternative.runs] for alternative in (first, second)]
    all_caveats = chain(
        _check_slow_in_one(first, second, metrics),
        _check_slow_in_one(second, first, metrics),
        _check_machine(subject, *heads),
        _check_conditions(*heads),
        _check_vcpus(subject, first, second),
        _order(subject, *heads),
        *(find_own_caveats(alternative, metrics) for alternative in (first, second)),
    )
    return tuple(dict.fromkeys(all_caveats))


def is_about(caveat: Caveat, metric: str) -> bool:
    """Whether a caveat is about a metric: conditions of a collective change no other figure."""
    is_condition = caveat.id == "other-conditions" and caveat.subject.startswith(_OF_COLLECTIVES)
    return not is_condition or metric not in METRICS or metric.startswith("allreduce-")


def find_own_caveats(alternative: Alternative, metrics: Metrics = None) -> Iterator[Caveat]:
    """Yield caveats on an alternative's own results of these metrics; None = of all."""
    for run in alternative.runs:
        head = run.head
        for reason in head.unusable:
            yield make_caveat("unusable", f"{head.system}/{head.name}", reason)
        if head.origin in (Origin.EMULATED, Origin.SYNTHESISED):
            yield make_caveat(
                "no-real-machine", f"{head.system}/{head.name}", f"its results are {head.origin}"
            )
        impossible = sorted(
            _limit_to({sample.metric for sample in run.impossible_samples}, metrics)
        )
        if impossible:
            detail = f"zero, negative or impossible results of {', '.join(impossible)} were omitted"
            yield make_caveat("impossible-results", f"{head.system}/{head.name}", detail)
    yield from _check_gpu_nodes(alternative, metrics)
    yield from _check_far_copies(alternative, metrics)


def _check_far_copies(alternative: Alternative, metrics: Metrics) -> Iterator[Caveat]:
    """Yield the caveat on copies of one table that fall into two groups: some came from another
    node."""
    for metric, detail in find_far_copies(alternative):
        if metrics is None or metric in metrics:
            yield make_caveat("far-copies", alternative.label, detail)


def _check_slow_in_one(slow: Alternative, other: Alternative, metrics: Metrics) -> Iterator[Caveat]:
    """Yield caveats on GPU links that are slow in only one of two layouts."""
    if metrics is None or any(metric.startswith(_GPU_METRICS) for metric in metrics):
        for detail in find_slow_in_one(slow.links, other.links):
            detail += ": the link may have been slow, not the layout"
            yield make_caveat(SLOW_IN_ONE, slow.label, detail)


def _check_machine(subject: str, first: list[RunHead], second: list[RunHead]) -> Iterator[Caveat]:
    hosts = [{head.host for head in heads if head.host is not None} for heads in (first, second)]
    kinds = [{head.host_kind for head in heads if head.host_kind} for heads in (first, second)]
    systems = {head.system for head in (*first, *second)}
    if all(kinds) and kinds[0] != kinds[1]:
        detail = f"{_join_names(kinds[0])} against {_join_names(kinds[1])}"
    elif all(hosts) and hosts[0] != hosts[1]:
        detail = "the same kind of host, but not the same one"
    elif len(systems) > 1 and not all(hosts):
        detail = f"results of {_join_names(systems)}"
    elif unlike := format_other_hardware(first, second):
        detail = unlike
    elif any(len(names) > 1 for names in (*hosts, *kinds)):
        detail = "runs of one alternative come from several hosts"
    else:
        nameless = [head for head in (*first, *second) if head.host is None]
        if nameless and all(head.origin is not Origin.PUBLISHED for head in first + second):
            detail = "some runs have no host name"
            yield make_caveat("host-unknown", subject, detail)
        return
    yield make_caveat("other-host", subject, detail)


def _check_conditions(first: list[RunHead], second: list[RunHead]) -> Iterator[Caveat]:
    values: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
    for values_of, heads in zip(values, (first, second), strict=True):
        for condition in chain.from_iterable(head.conditions for head in heads):
            values_of.setdefault(condition.name, set()).add(condition.value)
    for name in sorted(values[0].keys() | values[1].keys()):
        a, b = (values_of.get(name, set()) for values_of in values)
        # Those of the guest follow from the layout.
        if name.startswith("guest ") or not (a and b) or (a == b and len(a) == 1):
            continue
        blocks = name.partition(" ")[0] in _MUST_AGREE
        detail = f"{_join_names(a)} against {_join_names(b)}"
        cause, fix = _OF_SWEEPS if name == "tool largest message" else (None, None)
        yield make_caveat("other-conditions", name, detail, blocks=blocks, cause=cause, fix=fix)


def _check_vcpus(subject: str, first: Alternative, second: Alternative) -> Iterator[Caveat]:
    counts = [
        {run.head.vcpus for run in alternative.runs if run.head.vcpus is not None}
        for alternative in (first, second)
    ]
    exposed = [alternative.switches.siblings is Siblings.EXPOSED for alternative in (first, second)]
    if not all(counts) or counts[0] == counts[1] or exposed[0] != exposed[1]:
        return
    if any(run.head.vantage is Vantage.HOST for run in (*first.runs, *second.runs)):
        return
    yield make_caveat(
        "other-vcpus",
        subject,
        f"{_join_names(map(str, counts[0]))} against {_join_names(map(str, counts[1]))} vCPUs",
    )


def _order(subject: str, first: list[RunHead], second: list[RunHead]) -> Iterator[Caveat]:
    """Yield the caveat on a blocked order: drift then looks like the layout. If the order of
    imported runs is unknown, it may have been blocked."""
    heads = (*first, *second)
    if sum(max(1, len(head.boots)) for head in heads) < 3 or any(
        head.origin is Origin.PUBLISHED for head in heads
    ):
        return
    places = [[head.place for head in heads] for heads in (first, second)]
    times = [[head.started_s for head in heads] for heads in (first, second)]
    positions = _collect_known(places) or _collect_known(times)
    of_files = any(head.of_files for head in heads) and not _collect_known(places)
    if positions is None or (of_files and _are_together(positions)):
        if any(head.origin is Origin.IMPORTED for head in heads):
            detail = "the order of the runs is unknown"
            yield make_caveat(NO_ORDER, subject, detail)
        return
    if max(positions[0]) < min(positions[1]) or max(positions[1]) < min(positions[0]):
        yield make_caveat(ORDER, subject, "one layout's boots were all measured before the other's")
    elif of_files:
        yield make_caveat(
            "order-of-files", subject, "the order of the runs is that of their files' times"
        )


_COPIED_TOGETHER_S = 1.0
"""Runs of a measuring program never end so close to each other; files of one copy do."""


def _collect_known(places: Sequence[Sequence[float | None]]) -> list[list[float]] | None:
    """Return the positions of both sides; None if one is unknown."""
    numbers = [[place for place in side if place is not None] for side in places]
    return numbers if numbers == places else None


def _are_together(places: Sequence[Sequence[float]]) -> bool:
    ordered_places = sorted(chain.from_iterable(places))
    return any(end - start < _COPIED_TOGETHER_S for start, end in pairwise(ordered_places))


def _check_gpu_nodes(alternative: Alternative, metrics: Metrics) -> Iterator[Caveat]:
    if alternative.switches.cells is not GuestCells.HOST:
        return
    nodeless = any(
        any(gpu.node is None for gpu in run.head.gpus)
        or (not run.head.gpus and alternative.switches.pcie is GuestPcie.KEEP)
        for run in alternative.runs
        if any(metric.startswith(_GPU_METRICS) for metric in _limit_to(run.metrics, metrics))
    )
    if not nodeless:
        return
    heads = [run.head for run in alternative.runs]
    guessed = all(head.origin is Origin.IMPORTED and not head.gpus for head in heads)
    have = "by this layout have" if guessed else "have"
    detail = f"the guest has nodes, its GPUs {have} numa_node -1"
    yield make_caveat(NODELESS, alternative.label, detail)


def _limit_to(metric_ids: Set[str], metrics: Metrics) -> Set[str]:
    return metric_ids if metrics is None else metric_ids & metrics


def _join_names(texts: Iterable[str | None]) -> str:
    return ", ".join(sorted(text for text in texts if text is not None))
