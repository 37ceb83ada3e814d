"""Fitting: plan every layout of a trial, and report before the first boot which do not fit."""

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from homenode.check.domain.verification import verify_document
from homenode.cpuset import CpuSet
from homenode.findings import Severity
from homenode.machine.topology import Host, MemoryKind
from homenode.measure.model import SuiteGroup
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.units import MIB, format_bytes
from homenode.vm.domain.read import open_domain
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions

_STAND_AGAINST = frozenset(
    """
    memory-short huge-pages-short huge-page-size huge-pages-not-whole device-in-use
    device-not-on-host memory-unknown-node pin-unknown-cpu pin-offline-cpu pin-disallowed-cpu
""".split()
)
"""Findings with which a VM does not start, or takes resources of another VM."""

_STREAM_BYTES = 3 * (130 << 20)
"""Three arrays of 128 MiB, the least that the probe takes, and room to align each; more if the
guest shows large caches. Source: native/src/command_bandwidth.cpp, bandwidth_run.hpp."""

_SHARE_OF_STREAM = 0.9 * 0.8
"""Share of a small guest's memory for STREAM: its kernel keeps a tenth at least, and the probe
takes four fifths of what is available then."""

_MIN_GUEST_MIB = math.ceil(_STREAM_BYTES / _SHARE_OF_STREAM / MIB)


class PlannedLayout(Struct, frozen=True):
    layout: str
    tuning: PlannedFile | None  # None if no placement fits
    # why it cannot be booted; without tuning the planner's rejection
    against: tuple[str, ...]


def fit(
    original: bytes,
    name: str,
    options: PlanOptions,
    layouts: Sequence[str],
    host: Host,
) -> tuple[PlannedLayout, ...]:
    """Plan each layout for a domain that is shut off, with the obstacles to each.

    Memory and huge pages are compared with what is free on the host now. Raises like tune, except
    Unplannable, which becomes an obstacle.
    """
    # Pins of the domain's own definition do not count as used by others.
    alone = remove_domain(host, name)
    return tuple(
        _fit(original, name, structs.replace(options, layout=layout), alone) for layout in layouts
    )


def remove_domain(host: Host, name: str) -> Host:
    domains = tuple(domain for domain in host.domains if domain.name != name)
    return structs.replace(host, domains=domains)


def find_short_memory(
    fitted_layouts: Sequence[PlannedLayout], groups: Sequence[SuiteGroup]
) -> tuple[str, ...]:
    """Layouts whose guest has too little memory for STREAM, if STREAM is to be measured."""
    if groups and SuiteGroup.MEMORY_BANDWIDTH not in groups:
        return ()
    plans = [
        (candidate.layout, candidate.tuning.plan)
        for candidate in fitted_layouts
        if candidate.tuning is not None
    ]
    need, least = format_bytes(_STREAM_BYTES), f"{_MIN_GUEST_MIB} MiB"
    return tuple(
        f"{layout}: expected {need} of free memory for STREAM, found a guest of "
        f"{format_bytes(plan.vm.memory_bytes)}; give it {least} or more, or other --tests"
        for layout, plan in plans
        if plan.vm.memory_bytes * _SHARE_OF_STREAM < _STREAM_BYTES
    )


def _fit(original: bytes, name: str, options: PlanOptions, host: Host) -> PlannedLayout:
    try:
        tuning = plan_file(original, name, options, host)
    except Unplannable as error:
        return PlannedLayout(options.layout, None, (str(error),))
    obstacles = _find_obstacles(tuning.document, name, tuning.plan, host)
    return PlannedLayout(options.layout, tuning, tuple(obstacles))


def find_new_obstacles(document: bytes, name: str, plan: Plan, host: Host) -> tuple[str, ...]:
    """Return the obstacles to a layout that have arisen on its host since it was planned."""
    if host.fingerprint != plan.host_fingerprint:
        return (f"the topology of {host.name}, not of {plan.host_name}, which the plan is for",)
    alone = remove_domain(host, name)
    obstacles = _find_obstacles(document, name, plan, alone)
    pinned_cpus = CpuSet.union(plan.vcpu_pins)
    for vm in alone.domains:
        cpus = pinned_cpus & CpuSet.union(pins for pins in vm.vcpu_pins if pins is not None)
        if vm.has_claim and cpus:
            obstacles.append(f"CPUs {cpus}: expected no other VM's, found {vm.name} pinned to them")
    return tuple(obstacles)


def _find_obstacles(document: bytes, name: str, plan: Plan, host: Host) -> list[str]:
    findings = verify_document(open_domain(document, name), plan=plan, host=host).findings
    obstacles = [
        f"{finding.fact}"
        for finding in findings
        if finding.id in _STAND_AGAINST and finding.severity is Severity.CRITICAL
    ]
    return obstacles + ([] if plan.memory_nodes else _list_unbound_shortage(plan, host))


def _list_unbound_shortage(plan: Plan, host: Host) -> list[str]:
    """Return the shortage for unbound memory, which may come from each node except a GPU's."""
    nodes = [node for node in host.nodes if node.memory_kind is not MemoryKind.GPU]
    if plan.vm.page_bytes:
        pools = [
            pool
            for node in nodes
            for pool in node.page_pools
            if pool.page_bytes == plan.vm.page_bytes
        ]
        free: int | None = sum(pool.page_bytes * pool.free_pages for pool in pools)
        resource, name = "free huge pages", "huge-pages-short"
        if not any(node.page_pools for node in nodes):
            free = None  # the source lists no pools
    else:
        sizes = [
            node.memory_bytes if node.memory_free_bytes is None else node.memory_free_bytes
            for node in nodes
        ]
        known_sizes = [size for size in sizes if size is not None]
        free = sum(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None
        resource, name = "free memory", "memory-short"
    if free is None or free >= plan.vm.memory_bytes:
        return []
    return [
        f"all nodes: expected {format_bytes(plan.vm.memory_bytes)} of {resource}, found "
        f"{format_bytes(free)} ({name})"
    ]
