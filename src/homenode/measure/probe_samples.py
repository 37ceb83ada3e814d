"""Probe: samples of homenode-probe, with the brackets that determine their states.

Raw samples only: medians are taken where runs are compared. Of a pair of nodes, `node` has the
threads and `peer_node` has the memory.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Gap, finding
from homenode.machine.tools.homenode_probe import SOURCE, Pages, ProbeDocument
from homenode.measure.model import sample
from homenode.measure.results.model import Condition, Sample
from homenode.measure.results.placement_states import Bracket, mark_passing

LEVEL_DRAM = "DRAM"
_HIDDEN_PLACES = ("llc-not-shared", "siblings-not-shown")
_CAVEATS_OF_RUN = ("busy-neighbour", "placement-moves")
_PLAIN_CURVE = ("auto", "local")
"""The curve that levels are read from: the largest pages allowed, no page walks."""


class BracketedSample(Struct, frozen=True):
    """A sample with the bracket around it; None if no brackets exist; then it has no state."""

    sample: Sample
    bracket: Bracket | None = None
    at_ns: int = 0  # when it was taken, within its document


class StepReading(Struct, frozen=True):
    """Samples of a step's output, each with its bracket."""

    placed: tuple[BracketedSample, ...]  # in the order of time where brackets are
    conditions: tuple[Condition, ...] = ()
    gaps: tuple[Gap, ...] = ()
    findings: tuple[Finding, ...] = ()  # the probe's own caveats among them
    busy: str | None = None  # other programs that ran; None = unknown, or not counted
    emulated: bool | None = None  # None if it was not requested, or is not available


def read_probe_results(document: ProbeDocument) -> StepReading:
    """Return the samples of a document. Raises ParseError for invalid CPU lists."""
    read_samples = {
        "bandwidth": _read_bandwidth,
        "latency": _read_latency,
        "core-to-core": _list_core_to_core,
        "throughput": _read_throughput,
        "smt": _read_smt,
        "loaded-latency": _read_loaded_latency,
        "placement": _read_placement,
    }[document.command](document)
    placed = tuple(sorted(read_samples, key=lambda placed: placed.at_ns))
    if not placed:
        raise ParseError(SOURCE, f"samples of {document.command}")
    busy = next(
        (caveat.detail for caveat in document.caveats if caveat.id == "busy-neighbour"), None
    )
    if busy is None and document.contention.busy_neighbour:
        busy = f"other processes ran on CPUs {document.pus}"
    return StepReading(
        placed,
        tuple(dict.fromkeys(_list_conditions(document))),
        (),
        tuple(_check_caveats(document)),
        busy,
        document.machine.emulated,
    )


def _check_caveats(document: ProbeDocument) -> Iterator[Finding]:
    """Yield the probe's caveats, except those that are judged over the whole run."""
    for caveat in document.caveats:
        if caveat.id in _CAVEATS_OF_RUN:
            continue
        bad = caveat.id in _HIDDEN_PLACES
        yield finding(
            "bench-hidden-place" if bad else "bench-caveat",
            f"{document.command}: {caveat.id}",
            expected="caches and siblings as the kernel shows them"
            if bad
            else "results without a caveat",
            observed=caveat.detail,
            fix=caveat.fix,
            source=SOURCE,
        )


def _list_conditions(document: ProbeDocument) -> Iterator[Condition]:
    yield Condition("tool homenode-probe", document.version)
    if document.instruction_set is not None:
        yield Condition("tool homenode-probe instructions", document.instruction_set)
    buffers = [run.pages for run in document.runs]
    buffers += [c.pages for c in document.curves if c.pages_wanted == _PLAIN_CURVE[0]]
    for pages in buffers:
        if pages.huge_bytes is not None:
            is_huge = pages.huge_bytes >= pages.bytes
            kind = "huge" if is_huge else "partly huge" if pages.huge_bytes else "ordinary"
            yield Condition("pages of buffers", kind)


def _sample_of(
    metric: str,
    unit: str,
    value: float,
    bracket: Bracket | None = None,
    at_ns: int = 0,
    **fields: Any,
) -> BracketedSample:
    return BracketedSample(sample(metric, unit, value, **fields), bracket, at_ns)


def _read_bandwidth(document: ProbeDocument) -> Iterator[BracketedSample]:
    """Yield the bytes as STREAM counts them; if more are moved, those as a metric of their own."""
    is_matrix = len(document.runs) > 1 or any(run.node is not None for run in document.runs)
    for run in document.runs:
        _check_pages(run.pages, run.node)
        node = _find_node(document, _parse_pus(run.pus)) if is_matrix else None
        peer = run.node if is_matrix else None
        for kernel in run.kernels:
            suffix = "" if kernel.stores == "regular" else " non-temporal"
            moved = kernel.moved_bytes_per_element / kernel.reported_bytes_per_element
            metrics = [("memory-bandwidth", 1.0)] + [("memory-traffic", moved)] * (moved != 1)
            for raw in kernel.raw:
                bracket = None
                if run.threads > 1:
                    bracket = Bracket(run.pus, raw.cas_before_ns, raw.cas_after_ns)
                for metric, ratio in metrics:
                    yield _sample_of(
                        metric,
                        "bytes_per_s",
                        raw.bytes_per_s * ratio,
                        bracket,
                        raw.at_ns,
                        node=node,
                        peer_node=peer,
                        variant=f"{kernel.kernel}{suffix}",
                        disturbed=raw.disturbed,
                    )


def _read_latency(document: ProbeDocument) -> Iterator[BracketedSample]:
    is_matrix = all(len(curve.points) == 1 for curve in document.curves)
    has_memory = any(level.level == LEVEL_DRAM for level in document.levels)
    metric = "memory-latency"
    for curve in document.curves:
        _check_pages(curve.pages, curve.node)
        is_plain = (curve.pages_wanted, curve.order) == _PLAIN_CURVE
        pages = "huge" if curve.pages.huge_bytes else "ordinary"
        variant = f"{curve.order}, {pages} pages"
        if is_matrix:
            cell = "dram" if is_plain else f"dram {variant}"
            node = _find_node(document, CpuSet((curve.pu,)))
            for value in curve.points[0].samples_ns:
                yield _sample_of(metric, "ns", value, node=node, peer_node=curve.node, variant=cell)
            continue
        for point in curve.points:
            for value in point.samples_ns:
                yield _sample_of(metric, "ns", value, size_bytes=point.bytes, variant=variant)
        # The level's own value is a median of medians, which the last point's samples contain.
        if is_plain and has_memory:
            for value in curve.points[-1].samples_ns:
                yield _sample_of(metric, "ns", value, variant="dram")
    for level in document.levels:
        if level.level != LEVEL_DRAM:
            name, capacity = level.level.lower(), level.capacity_bytes
            yield _sample_of(metric, "ns", level.latency_ns, variant=name)
            if capacity is not None:
                yield _sample_of("cache-capacity", "bytes", capacity, variant=name)


def _list_core_to_core(document: ProbeDocument) -> Iterator[BracketedSample]:
    """Read core-to-core samples; each is its own bracket: it shows where the two CPUs are."""
    for pair in document.handoffs:
        first, second = pair.pus
        team, name = str(CpuSet((first, second))), f"{first} to {second}"
        for number, (value, is_passing) in enumerate(mark_passing(pair.samples_ns)):
            end = (None if is_passing else value,)
            bracket = Bracket(team, end, end)
            yield _sample_of("core-to-core-latency", "ns", value, bracket, number, variant=name)


def _read_throughput(document: ProbeDocument) -> Iterator[BracketedSample]:
    """Read the throughput of one CPU, of all CPUs together, of each thread, and its evenness."""
    assert document.one is not None and document.all is not None, "parse requires both"
    if len(document.all.threads) == 1:
        for value in document.one.threads[0].samples_events_per_s:
            yield _sample_of("cpu-single", "events_per_s", value)
        return
    threads = document.all.threads
    for round_rates in zip(*(thread.samples_events_per_s for thread in threads), strict=False):
        yield _sample_of("cpu-throughput", "events_per_s", sum(round_rates))
        yield _sample_of("cpu-per-thread", "events_per_s", sum(round_rates) / len(round_rates))
    for thread in threads:
        name = f"CPU {thread.pu}"
        for value in thread.samples_events_per_s:
            yield _sample_of("cpu-per-thread", "events_per_s", value, variant=name)
        if thread.fairness_ratio is not None:
            yield _sample_of("cpu-fairness", "ratio", thread.fairness_ratio, variant=name)
    if document.all.fairness_index is not None:
        yield _sample_of(
            "cpu-fairness", "ratio", document.all.fairness_index, variant="Jain's index"
        )


def _read_smt(document: ProbeDocument) -> Iterator[BracketedSample]:
    for core in document.cores:
        yield _sample_of("smt-gain", "ratio", core.gain_ratio, variant=f"{core.work} {core.pus}")


def _read_loaded_latency(document: ProbeDocument) -> Iterator[BracketedSample]:
    for point in document.points:
        variant = "at rest" if point.delay_cycles is None else f"delay {point.delay_cycles} cycles"
        for value in point.samples_ns:
            yield _sample_of("loaded-latency", "ns", value, variant=variant)
        for rate in point.samples_injected_bytes_per_s:
            if rate > 0:
                yield _sample_of("loaded-bandwidth", "bytes_per_s", rate, variant=variant)


def _read_placement(document: ProbeDocument) -> Iterator[BracketedSample]:
    """Fill rate of both CPUs of a pair over that of one: 1 on one cache's link, 2 on two."""
    names = {pair.pair: f"{pair.pus[0]} and {pair.pus[1]}" for pair in document.looked_pairs}
    for look in document.series:
        if look.fill_ratio is None or look.pair not in names:
            continue
        bracket = Bracket(document.pus, look.cas_before_ns, look.cas_after_ns)
        yield _sample_of(
            "fill-ratio",
            "ratio",
            look.fill_ratio,
            bracket,
            look.at_ns,
            variant=names[look.pair],
            disturbed=look.disturbed,
        )


def _check_pages(pages: Pages, node: int | None) -> None:
    """Refuses memory that was bound to a node and is elsewhere. Raises ParseError."""
    other_nodes = sorted(set(pages.pages_of_node) - {str(node)})
    if node is not None and other_nodes:
        raise ParseError(
            SOURCE, f"all pages on node {node}", f"some on node {', '.join(other_nodes)}"
        )


def _find_node(document: ProbeDocument, pus: CpuSet) -> int | None:
    return next((node.node for node in document.machine.nodes if pus <= _parse_pus(node.pus)), None)


def _parse_pus(text: str) -> CpuSet:
    return CpuSet.parse(text, f"{SOURCE}: CPUs")
