"""libvirt: a domain document as the file that a plan is written into; it is edited, never made
anew.
"""

from collections import Counter
from collections.abc import Iterator

from homenode.errors import HomenodeError
from homenode.machine.topology import Host
from homenode.vm.domain.codec import refuse_older
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
from homenode.vm.domain.read import open_domain
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from homenode.vm.targets.target import Rendering

_MOST_ALIKE = 8


def recognises(content: bytes) -> bool:
    """Whether a file is XML, with or without a byte order mark."""
    start = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] == b"<" or content[:2] in (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def render(plan: Plan, guest: Vm, host: Host | None, original: bytes, source: str) -> Rendering:
    """Rewrite the document by the plan. host: None = unknown versions.

    Raises InputError for more vCPUs than the machine type takes, HostError if the host's libvirt or
    QEMU is too old.
    """
    qemu = None if host is None else host.settings.qemu_version
    limits = check_vcpus(guest, plan.vm.vcpus, qemu, source)
    after = rewrite(original, plan, source)
    if host is not None:
        versions = host.settings.libvirt_version, host.settings.qemu_version
        refuse_older(plan, *versions, is_virt=guest.is_virt, iommu_model=guest.iommu_model)
        buses = smmu_buses(guest, plan, host)
        smmu = smmu_left_out(guest, plan, buses, *versions)
        buses = buses if can_accelerate(*versions) else ()
        needs = needs_iommufd(guest, plan)
        can = can_have_iommufd(*versions)
        if needs and not can:
            limits = (*limits, iommufd_missing(guest, *versions))
        mask = nodemask_not_strict(guest, plan, versions[0])
        limits = (
            *limits,
            *(contradiction for contradiction in (smmu, mask) if contradiction is not None),
        )
        if buses:
            after = edit_smmus(open_domain(after, source), buses).to_bytes()
        if can and (needs or buses) and versions[0] is not None:
            after = edit_iommufd(open_domain(after, source), versions[0]).to_bytes()
    earlier = set(crosscheck(open_domain(original, source)))
    new = [
        contradiction
        for contradiction in crosscheck(open_domain(after, source))
        if contradiction not in earlier
    ]
    if new:
        raise HomenodeError(
            f"{source}: the tuned definition would contradict itself: {new[0].fact}",
            hint="nothing was written; this is a defect of homenode: please send it the definition",
        )
    return Rendering(after, (), (*document_findings(original, after, plan, source), *limits))


def contradictions(original: bytes, source: str) -> Iterator[str]:
    """Yield the faults of the input, and the number of those that are not listed."""
    broken = crosscheck(open_domain(original, source))
    counts = Counter(contradiction.id for contradiction in broken)
    seen: Counter[str] = Counter()
    for contradiction in broken:
        seen[contradiction.id] += 1
        if seen[contradiction.id] <= _MOST_ALIKE:
            yield f"warning: {contradiction.fact}"
        elif seen[contradiction.id] == counts[contradiction.id]:
            count = counts[contradiction.id] - _MOST_ALIKE
            yield f"warning: {count} more of this kind ({contradiction.id})"
