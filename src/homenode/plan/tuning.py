"""Tuning: a domain document, the plan for it on a host, and the tuned document that follows.

The whole main job as one pure step, for the command line and everything else that places VMs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct, structs

from homenode.errors import HomenodeError
from homenode.findings import Finding
from homenode.machine.tools.versions import Version
from homenode.machine.topology import Host
from homenode.plan.manual import manual_placement
from homenode.plan.planner import plan
from homenode.plan.request import request_for, resized
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.vm.domain.codec import refuse_older
from homenode.vm.domain.copy import copy_domain, shared_with_original
from homenode.vm.domain.crosscheck import crosscheck
from homenode.vm.domain.iommu import (
    can_accelerate,
    can_have_iommufd,
    edit_iommufd,
    edit_smmus,
    iommufd_missing,
    needs_iommufd,
    smmu_buses,
    smmu_left_out,
)
from homenode.vm.domain.limits import check_vcpus, document_findings
from homenode.vm.domain.memory import nodemask_not_strict
from homenode.vm.domain.read import open_domain, vm_of, with_kept
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.model import Vm
from homenode.vm.plan_model import Plan, Unplannable
from homenode.vm.plan_options import EmulatorPolicy, ManualRanges, PlanOptions

_MOST_ALIKE = 8


class Tuning(Struct, frozen=True):
    """A plan and the document that follows from it.

    original: the document as given, or its copy under another name. document: the tuned one.
    notes: what was wrong with the document before, what to know of the tuned one, and what a copy
    shares with its original; each opens with its severity. libvirt: of the host, None = unknown.
    host: on what it was planned; None where the plan was given.
    """

    original: bytes
    plan: Plan
    document: bytes
    notes: tuple[str, ...]
    libvirt: Version | None = None
    host: Host | None = None


def tune(
    original: bytes, source: str, options: PlanOptions, host: Host, *, copy_name: str | None = None
) -> Tuning:
    """Plan a document's VM on a host and rewrite the document.

    source: what to call the document in messages. copy_name: tune a copy with its own name, UUID,
    NVRAM and MACs. Raises InputError for a bad document, UsageError for contradicting options,
    Unplannable with every rejection, and HostError where the host's libvirt or QEMU is too old.
    More vCPUs than the machine type takes are a bad document.
    """
    before, notes = _given(original, source, copy_name)
    guest = vm_of(open_domain(before, source))
    made = plan(host, request_for(guest, options, host))
    return structs.replace(_on_host(before, source, guest, made, host, notes), host=host)


class TuningRequest(Struct, frozen=True, kw_only=True):
    """A VM that is planned with others. name: what to call its document in messages."""

    name: str
    original: bytes
    options: PlanOptions


def tune_together(requests: Sequence[TuningRequest], host: Host) -> tuple[Tuning, ...]:
    """Plan VMs for one host, none of which gets what another one has: in the order of `requests`.

    They are planned one after the other: as they are given, then the one with the most memory
    first, then that with the most vCPUs, each time with emulators on cores of their own and then on
    those of their VMs, until all fit. Raises what tune raises; Unplannable of the order in which
    the most VMs fit.
    """

    def size(request: TuningRequest) -> tuple[int, int]:
        guest = vm_of(open_domain(request.original, request.name))
        return -(guest.memory_bytes or 0), -(guest.vcpus or 0)

    sizes = {request.name: size(request) for request in requests}
    orders = (
        list(requests),
        sorted(requests, key=lambda one: sizes[one.name]),
        sorted(requests, key=lambda one: sizes[one.name][1]),
    )
    best: tuple[int, Unplannable] | None = None
    # One VM has one order, and the policy that was asked for.
    shared = (False, True) if len(requests) > 1 else (False,)
    for is_shared, order in product(shared, orders[: 1 if len(requests) == 1 else None]):
        made: dict[str, Tuning] = {}
        there = host
        for request in order:
            options = request.options
            if is_shared and options.emulator_policy is EmulatorPolicy.AUTO:
                options = structs.replace(options, emulator_policy=EmulatorPolicy.SHARE)
            try:
                made[request.name] = tune(request.original, request.name, options, there)
            except Unplannable as error:
                if best is None or best[0] < len(made):
                    best = len(made), error
                break
            taken = domain_of_plan(made[request.name].plan)
            there = structs.replace(there, domains=(*there.domains, taken))
        else:
            return tuple(made[request.name] for request in requests)
    assert best is not None, "an order that fits was returned"
    raise best[1]


def _on_host(
    before: bytes, source: str, guest: Vm, made: Plan, host: Host, notes: tuple[str, ...]
) -> Tuning:
    limits = check_vcpus(guest, made.vm.vcpus, host.settings.qemu_version, source)
    refuse_older(
        made,
        host.settings.libvirt_version,
        host.settings.qemu_version,
        is_virt=guest.is_virt,
        iommu_model=guest.iommu_model,
    )
    versions = host.settings.libvirt_version, host.settings.qemu_version
    buses = smmu_buses(guest, made, host)
    smmu = smmu_left_out(guest, made, buses, *versions)
    buses = buses if can_accelerate(*versions) else ()
    needs = needs_iommufd(guest, made)
    if needs and not can_have_iommufd(*versions):
        limits = (*limits, iommufd_missing(guest, *versions))
    mask = nodemask_not_strict(guest, made, versions[0])
    limits = (*limits, *(one for one in (smmu, mask) if one is not None))
    notes = (*notes, *map(_sentence, limits))
    libvirt = versions[0] if can_have_iommufd(*versions) and (needs or buses) else None
    tuning = _tuned(before, source, made, notes, libvirt, buses)
    return structs.replace(tuning, libvirt=versions[0])


def tune_manually(
    original: bytes,
    source: str,
    options: PlanOptions,
    ranges: ManualRanges,
    *,
    copy_name: str | None = None,
) -> Tuning:
    """The same with PU lists that the user gives, and no host: the study's listings.

    The vCPU count follows the lists. Raises as tune does.
    """
    before, notes = _given(original, source, copy_name)
    guest = vm_of(open_domain(before, source))
    request = request_for(guest, options, None)
    placement = manual_placement(request, ranges)
    made = assemble(None, resized(request, len(placement.vcpu_pins)), placement)
    limits = check_vcpus(guest, made.vm.vcpus, None, source)
    return _tuned(before, source, made, (*notes, *map(_sentence, limits)))


def _given(original: bytes, source: str, copy_name: str | None) -> tuple[bytes, tuple[str, ...]]:
    if copy_name is None:
        return original, ()
    shared = shared_with_original(original, source)
    return copy_domain(original, copy_name, source), tuple(map(_sentence, shared))


def _tuned(
    before: bytes,
    source: str,
    made: Plan,
    notes: tuple[str, ...],
    iommufd_of: Version | None = None,
    smmus: tuple[int, ...] = (),
) -> Tuning:
    """iommufd_of: the libvirt by whose means devices go through iommufd; None = they do not.
    smmus: buses with an accelerated SMMUv3."""
    after = rewrite(before, made, source)
    if smmus:
        after = edit_smmus(open_domain(after, source), smmus).to_bytes()
    if iommufd_of is not None:
        after = edit_iommufd(open_domain(after, source), iommufd_of).to_bytes()
    broken_before = crosscheck(open_domain(before, source))
    were_there = set(broken_before)
    new = [one for one in crosscheck(open_domain(after, source)) if one not in were_there]
    if new:
        raise HomenodeError(
            f"{source}: the tuned document would contradict itself: {new[0].fact}",
            hint="nothing was written; this is a defect of homenode: please send it the document",
        )
    known = document_findings(before, after, made, source)
    return Tuning(
        before,
        with_kept(made, open_domain(after, source)),
        after,
        (*_warnings(broken_before), *map(_sentence, known), *notes),
    )


def _warnings(broken: Sequence[Finding]) -> Iterator[str]:
    """A line for each, and one for what many more have."""
    counts = Counter(one.id for one in broken)
    seen: Counter[str] = Counter()
    for one in broken:
        seen[one.id] += 1
        if seen[one.id] <= _MOST_ALIKE:
            yield f"warning: {one.fact}"
        elif seen[one.id] == counts[one.id]:
            yield f"warning: {counts[one.id] - _MOST_ALIKE} more of this kind ({one.id})"


def _sentence(finding: Finding) -> str:
    fix = "" if finding.fix is None else f"; {finding.fix}"
    return f"{finding.severity}: {finding.subject}: {finding.compared}{fix} ({finding.id})"
