"""Collective log: figures of an all-reduce, its curve, and NCCL's log where one was kept.

A run whose log contradicts what was intended is no run of its settings: it raises, and the step
that it was of fails by name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Severity
from homenode.gap import Gap
from homenode.machine.tools import lines
from homenode.machine.tools.nccl_tests import NcclRow, NcclTests
from homenode.machine.topology import Host
from homenode.measure.figures.sample import Figures, sample
from homenode.measure.model import CollectiveSettings
from homenode.measure.results.flat_curve import FLAT_FROM_BYTES, flat_from
from homenode.measure.results.model import Condition, Sample
from homenode.nccl.log_facts import LogFacts, facts_of_log
from homenode.units import format_bytes

_SOURCE = "NCCL's log"
_LINE = re.compile(r"^# homenode collective: (\{.*\})$", re.M)
_HOST = re.compile(r"^# homenode host: (\{.*\})$", re.M)
_NUMA_ID = re.compile(r'numaid="(\d{1,4})"')
_IS_GPU = re.compile(r'class="0x(?:03|12)')
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MOST_NODES = 4096
_LEAST_BYTES = 64 << 20
"""Less than this gives no share of a node."""


class WatchedMachine(Struct, frozen=True):
    """Of one machine meanwhile. allocated: bytes more than before, the most, by node. busy: PUs on
    which threads ran. guest: bytes of the guest's memory by node of its host. interrupts: of the
    GPUs, by PU. reclaimed: pages; numa_balancing: the kernel's setting. None where unknown."""

    allocated: tuple[tuple[int, int], ...]
    busy: tuple[int, ...]
    guest: tuple[tuple[int, int], ...] = ()
    interrupts: tuple[tuple[int, int], ...] = ()
    reclaimed: int | None = None
    numa_balancing: int | None = None


class Watched(Struct, frozen=True):
    """What happened meanwhile. host: of a guest's host, None where it was not seen."""

    facts: LogFacts
    own: WatchedMachine
    host_numa_ids: tuple[int, ...] | None
    host: WatchedMachine | None = None


def split(output: str) -> tuple[str, Watched]:
    """The tool's own output, and what was watched. Raises ParseError."""
    found = _LINE.search(output)
    if found is None:
        raise ParseError(_SOURCE, "a line of collective_watch", "none")
    document = lines.json_object(found[1], _SOURCE)
    log = document.get("log")
    if not isinstance(log, str):
        raise ParseError(_SOURCE, "the log as text", type(log).__name__)
    ids = document.get("host_numa_ids")
    given = isinstance(ids, list) and all(isinstance(one, int) for one in ids)
    host = _HOST.search(output)
    watched = Watched(
        facts_of_log(log),
        _looks(document),
        tuple(ids) if given and isinstance(ids, list) else None,
        None if host is None else _looks(lines.json_object(host[1], "the host")),
    )
    return _HOST.sub("", output[: found.start()] + output[found.end() :]), watched


def _looks(document: Mapping[str, Any]) -> WatchedMachine:
    before, during = (_numbers(document.get(name)) for name in ("before", "during"))
    return WatchedMachine(
        tuple((node, used - before[node]) for node, used in during.items() if node in before),
        tuple(_numbers(document.get("threads"))),
        tuple(_numbers(document.get("guest")).items()),
        tuple(_numbers(document.get("interrupts")).items()),
        _count(document.get("reclaimed")),
        _count(document.get("numa_balancing")),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _numbers(value: Any) -> dict[int, int]:
    if not isinstance(value, Mapping):
        return {}
    return {
        int(key): count
        for key, count in list(value.items())[:_MOST_NODES]
        if _NUMBER.fullmatch(key) and isinstance(count, int)
    }


def contradictions(
    settings: CollectiveSettings, facts: LogFacts, file: str | None = None
) -> tuple[str, ...]:
    """Why a log is not of these settings; () where nothing speaks against it. file: the text of the
    topology file that NCCL was given."""
    return tuple(_contradictions(settings, facts, file))


def _contradictions(
    settings: CollectiveSettings, facts: LogFacts, file: str | None
) -> Iterator[str]:
    if not facts.has_graph:
        yield "the log shows no graph: nothing says what was measured"
        return
    if settings.file and not facts.files:
        yield "the topology file was not used"
    if not settings.file and facts.files:
        yield f"a topology file was used: {next(iter(facts.files))}"
    lacking = _nodes_of_gpus(file or "", facts.rank_count) - {*facts.cpu_nodes}
    if settings.file and lacking:
        seen = ", ".join(map(str, facts.cpu_nodes))
        yield f"the file has GPUs on node {min(lacking)}, and the log's graph has nodes {seen}"
    if not settings.peers and "P2P" in facts.transport_names():
        yield "P2P was used"
    if settings.ring != (facts.variables.get("NCCL_ALGO", "").lower() == "ring"):
        yield f"NCCL_ALGO is {facts.variables.get('NCCL_ALGO', 'not set')}"


def _nodes_of_gpus(file: str, ranks: int | None) -> set[int]:
    """Nodes that a graph with a file of our own making must have: those of its GPUs, where the job
    uses them all. Nodes with NICs alone need not be there."""
    cpus = file.split("<cpu ")[1:]
    if (ranks or 0) < sum(len(_IS_GPU.findall(cpu)) for cpu in cpus):
        return set()
    found = (_NUMA_ID.search(cpu) for cpu in cpus if _IS_GPU.search(cpu))
    return {int(one[1]) for one in found if one is not None}


def of_watched(settings: CollectiveSettings, watched: Watched, host: Host) -> Figures:
    """What explains the figures: counts as samples, the rest in words as conditions."""
    facts = watched.facts
    name = settings.name
    gaps = [*facts.gaps]
    if watched.host_numa_ids is None:
        gaps.append(Gap("HOST_NUMA_ID", "the driver could not be asked, or does not have it"))
    return Figures(
        tuple(_samples(watched, host)),
        (
            *(
                Condition(f"nccl {what}, {name}", words)
                for what, words in _words(watched, host)
                if words
            ),
            *_of_host(watched),
        ),
        gaps=tuple(gaps),
    )


def _of_host(watched: Watched) -> Iterator[Condition]:
    if watched.host is not None and watched.host.numa_balancing is not None:
        yield Condition("numa balancing on the host", str(watched.host.numa_balancing))


_LEAST_INTERRUPTS = 100
"""Fewer say nothing of where they are handled."""

_A_PART = 0.05
"""Of all interrupts: a node with fewer does not count."""


def _interrupt_nodes(watched: Watched, host: Host) -> int | None:
    node_of_pu = {int(pu.index): pu.node for pu in host.pus}
    by_node: Counter[int | None] = Counter()
    for pu, count in watched.own.interrupts:
        by_node[node_of_pu.get(pu)] += count
    total = by_node.total()
    if total < _LEAST_INTERRUPTS or None in by_node:
        return None
    return sum(count > _A_PART * total for count in by_node.values())


def _samples(watched: Watched, host: Host) -> Iterator[Sample]:
    facts = watched.facts
    channels = facts.channels if facts.channels is not None else len(facts.rings) or None
    if channels is not None:
        yield sample("collective-channels", "count", float(channels))
    bound = sum(map(bool, facts.affinities.values()))
    if bound:  # a figure of 0 is refused everywhere; none next to the channels is none bound
        yield sample("collective-bound-gpus", "count", float(bound))
    nodes = _interrupt_nodes(watched, host)
    if nodes is not None:
        yield sample("collective-interrupt-nodes", "count", float(nodes))
    allocated = [max(more, 0) for _, more in watched.own.allocated]
    if sum(allocated) >= _LEAST_BYTES:
        yield sample("collective-fullest-node", "ratio", max(allocated) / sum(allocated))


def _words(watched: Watched, host: Host) -> Iterator[tuple[str, str]]:
    facts = watched.facts
    yield "version", facts.version or ""
    nodes = " ".join(map(str, sorted(facts.cpu_nodes)))
    rings = {" ".join(map(str, ring)) for ring in facts.rings.values()}
    yield "graph", f"nodes {nodes}; rings {', '.join(sorted(rings)) or 'not given'}"
    yield (
        "search",
        "; ".join(
            f"pattern {one.pattern}: {one.channels} x {one.gb_per_s:g} GB/s, {one.path}"
            for _, one in sorted(facts.graphs.items())
        ),
    )
    yield "proxy threads", "; ".join(f"GPU {d} on CPU {cpu}" for d, cpu in facts.threads)
    yield "threads", "; ".join(f"GPU {d} on {c or 'any CPU'}" for d, c in facts.affinities.items())
    yield "transport", ", ".join(facts.transport_names())
    yield (
        "buffers",
        ", ".join(
            f"{count} {kind}" + ("" if node is None else f" on node {node}")
            for (kind, node, _), count in sorted(facts.buffers.items(), key=str)
        ),
    )
    yield "memory allocated", _sizes(watched.own.allocated)
    node_of_pu = {int(pu.index): pu.node for pu in host.pus}
    busy = {node_of_pu.get(pu) for pu in watched.own.busy} - {None}
    yield "busy threads", f"nodes {CpuSet(node for node in busy if node is not None)}"
    if watched.own.reclaimed is not None:
        yield "pages reclaimed", str(watched.own.reclaimed)
    if watched.host is not None:
        if watched.host.reclaimed is not None:
            yield "pages reclaimed on the host", str(watched.host.reclaimed)
        yield "memory allocated on the host", _sizes(watched.host.allocated)
        yield "guest's memory on the host", _sizes(watched.host.guest)
        yield "guest's busy threads on the host", str(CpuSet(watched.host.busy))
    if watched.host_numa_ids is not None:
        yield "HOST_NUMA_ID", " ".join(map(str, watched.host_numa_ids))


def _sizes(by_node: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"node {node} {size >> 20} MiB" for node, size in sorted(by_node))


class CollectiveCurve(Struct, frozen=True):
    """half_peak_bytes: the first size with half of the peak. flat_from_bytes: where a plateau
    begins that begins too early, None where none does."""

    peak_bytes_per_s: float
    half_peak_bytes: int
    flat_from_bytes: int | None


def curve_of(run: NcclTests) -> CollectiveCurve | None:
    """The curve of a run, of the better half at each size; None where nothing was moved."""
    points = _points(run.rows)
    if not points:
        return None
    peak = max(rate for _, rate in points)
    half = next(size for size, rate in points if rate >= peak / 2)
    return CollectiveCurve(peak, half, flat_from(points, peak))


def flat_curve(run: NcclTests, subject: str) -> Finding | None:
    """The finding of a curve that meets a hard ceiling. subject: the run, in the user's words."""
    curve = curve_of(run)
    if curve is None or curve.flat_from_bytes is None:
        return None
    return finding(
        "collective-flat-curve",
        subject,
        expected=f"a bus bandwidth that climbs beyond {format_bytes(FLAT_FROM_BYTES)}",
        observed=f"{curve.peak_bytes_per_s / 1e9:.2f} GB/s from "
        f"{format_bytes(curve.flat_from_bytes)} on",
        severity=Severity.WARNING,
        source="sweep over message sizes",
    )


def _points(rows: Sequence[NcclRow]) -> list[tuple[int, float]]:
    """(size, bus bandwidth), ascending, without rates that two decimals cut to zero."""
    found: dict[int, float] = {}
    for row in rows:
        for half in row.halves():
            if half.bus_bytes_per_s > 0 and row.size_bytes > 0:
                best = max(found.get(row.size_bytes, 0.0), half.bus_bytes_per_s)
                found[row.size_bytes] = best
    return sorted(found.items())
