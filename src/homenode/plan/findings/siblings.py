"""Findings on siblings: what whole cores and siblings cost a VM whose document shows siblings."""

from collections.abc import Iterator, Sequence

from homenode.cpuset import CpuSet
from homenode.machine.topology import CoreKind, Host
from homenode.plan.allocations import allocations
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Concession
from homenode.vm.plan_model import PlanFinding, plan_finding
from homenode.wording import plural

_COSTS_OF_CORES = {
    Concession.SHARED_CORES: "not suffice",
    Concession.HOST_CORE: "take the host's last core",
    Concession.MIXED_KINDS: "mix performance and efficiency cores",
}


def whole_core_costs(host: Host, request: GuestRequest, placement: Placement) -> Iterator[str]:
    """What a whole core for each vCPU costs that siblings would not, in words: "whole cores would
    ...". placement: that of whole cores."""
    wanted = {Concession.MIXED_KINDS} if request.options.mixed_kinds else set()
    for given, words in _COSTS_OF_CORES.items():
        if given in placement.concessions and given not in wanted:
            yield words
            if given is Concession.SHARED_CORES:
                return
    others = allocations(host, request).vcpu_cores
    used = CpuSet.union(placement.vcpu_pins) | others
    left = sum(core.pus.isdisjoint(used) for core in host.cores)
    if left <= request.host_reserve.cores and Concession.HOST_CORE not in placement.concessions:
        yield f"leave the host no more than the {plural(left, 'core')} that it keeps"


def document_siblings(
    host: Host,
    request: GuestRequest,
    placement: Placement,
    other: Placement | None,
    costs: Sequence[str],
) -> Iterator[PlanFinding]:
    """Which of the two a document that shows siblings got, and what the other would have cost.
    other: the placement of the other choice; None = it has none."""
    cores = len(_cores_of(host, placement))
    threads = request.guest.threads_per_core
    slower = "40 to 75 % slower under full load"
    if placement.threads_per_core > 1:
        spans = _more_spans(host, other, placement)
        detail = (
            f"{request.vcpus} vCPUs run on {placement.threads_per_core} hyper-threads of each of "
            f"{plural(cores, 'core')}, as the document shows them, {slower} than on a whole core "
            f"each; whole cores would {' and '.join(costs)}{f', {spans}' if spans else ''}"
        )
        fix: str | None = "--siblings hidden gives each vCPU a whole core"
        if other is None or Concession.SHARED_CORES in other.concessions:
            most = _most_with_whole_cores(host, request)
            fix = f"at most {plural(most, 'vCPU')} can have a whole core each" if most else None
    elif not costs and other is not None:
        fewer = len(_cores_of(host, other))
        detail = (
            f"each vCPU gets a whole core, {cores} in all, though the document shows "
            f"{plural(fewer, 'core')} of {threads} threads: on those they would be {slower}"
        )
        spans = _more_spans(host, placement, other)
        fix = (
            f"--siblings as-document takes {plural(fewer, 'core')} and leaves {cores - fewer} more"
            f"{f'; whole cores lie {spans}' if spans else ''}"
        )
    else:
        return
    yield plan_finding("document-siblings", "<topology>", detail, fix=fix)


def _cores_of(host: Host, placement: Placement) -> list[CpuSet]:
    used = CpuSet.union(placement.vcpu_pins)
    return [core.pus for core in host.cores if not core.pus.isdisjoint(used)]


def _more_spans(host: Host, wide: Placement | None, narrow: Placement | None) -> str:
    """What the first spans more of than the second: "on 2 nodes instead of 1"."""
    if wide is None or narrow is None:
        return ""

    def llcs(placement: Placement) -> int:
        used = CpuSet.union(placement.vcpu_pins)
        return sum(not llc.pus.isdisjoint(used) for llc in host.llcs)

    counts = (
        ("last-level cache", llcs(wide), llcs(narrow)),
        ("node", len(set(wide.nodes)), len(set(narrow.nodes))),
    )
    return " and ".join(
        f"on {plural(more, noun)} instead of {fewer}"
        for noun, more, fewer in counts
        if more > fewer
    )


def _most_with_whole_cores(host: Host, request: GuestRequest) -> int:
    """vCPUs that could have a whole core each, and leave the host more than it keeps."""
    others = allocations(host, request).vcpu_cores
    free = [core for core in host.cores if core.pus.isdisjoint(others)]
    fast = [core for core in free if core.kind is not CoreKind.EFFICIENCY]
    kept = request.host_reserve.cores + 1
    return max(0, min(len(free) - kept, len(free if request.options.mixed_kinds else fast)))
