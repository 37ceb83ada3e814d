"""libvirt: a domain document as the file that a plan is written into; it is edited, never made
anew, and every other byte of it stays.

Each step edits one group of elements, independently of the others. A result with a broken reference
that the input did not have is rejected whole.
"""

from collections import Counter
from collections.abc import Iterator

from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.text import plural
from homenode.vm.domain.codec import STEPS, Step, reject_older
from homenode.vm.domain.crosscheck import (
    check_document,
    check_references,
    check_vcpus,
    reject_unsafe,
)
from homenode.vm.domain.hostdevs import is_pci_function
from homenode.vm.domain.iommu import (
    can_accelerate,
    can_have_iommufd,
    edit_iommufd,
    edit_smmus,
    list_smmu_buses,
    needs_iommufd,
    report_missing_iommufd,
    report_omitted_smmu,
)
from homenode.vm.domain.memory import check_nodemask
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan import Plan
from homenode.vm.targets.target import Rendering

_MAX_ALIKE = 8
_PLACED = frozenset(
    "name uuid memory currentMemory maxMemory vcpu vcpus iothreads iothreadids numatune metadata"
    " title description on_poweroff on_reboot on_crash resource seclabel launchSecurity".split()
)
_PLACED_BELOW = {
    "os": "type loader nvram firmware",
    "cpu": "topology numa cache maxphysaddr model",
    "features": "acpi apic pae gic",
    "cputune": "vcpupin emulatorpin iothreadpin",
    "memoryBacking": "hugepages",
    "devices": "emulator controller memballoon iommu",
}
"""Elements that a plan has, that describe the definition itself, or that follow from others."""


def recognizes(content: bytes) -> bool:
    """Return whether a file is XML, with or without a byte order mark."""
    start = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] == b"<" or content[:2] in (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def list_other_parts(content: bytes, source: str) -> Iterator[str]:
    """Yield the elements of a definition that a plan does not have. Raises ParseError or
    InputError."""
    for element in open_domain(content, source).root.children:
        placed = _PLACED_BELOW.get(element.name)
        if placed is None and element.name not in _PLACED:
            yield f"<{element.tag}>"
        for child in element.children if placed is not None else ():
            is_carried = is_pci_function(child) or child.get("type") == "mdev"
            if child.name not in (placed or "").split() and not is_carried:
                yield f"<{child.tag}>"


def render(plan: Plan, guest: Vm, host: Host | None, original: bytes, source: str) -> Rendering:
    """Rewrite the document by the plan. host: None = unknown versions. Raises InputError for more
    vCPUs than the machine type takes, HostError if the host's libvirt or QEMU is too old."""
    qemu = None if host is None else host.settings.qemu_version
    limits = check_vcpus(guest, plan.vm.vcpus, qemu, source)
    steps: list[Step] = []
    if host is not None:
        libvirt = host.settings.libvirt_version
        versions = libvirt, qemu
        reject_older(plan, *versions, is_virt=guest.is_virt, iommu_model=guest.iommu_model)
        buses = list_smmu_buses(guest, plan, host)
        smmu = report_omitted_smmu(guest, plan, buses, *versions)
        mask = check_nodemask(guest, plan, libvirt)
        needs, can = needs_iommufd(guest, plan), can_have_iommufd(*versions)
        if needs and not can:
            limits = (*limits, report_missing_iommufd(guest, *versions))
        limits = (*limits, *(finding for finding in (smmu, mask) if finding is not None))
        if buses and can_accelerate(*versions):
            steps.append(lambda document, _: edit_smmus(document, buses))
            needs = True
        if can and needs and libvirt is not None:
            steps.append(lambda document, _: edit_iommufd(document, libvirt))
    after = rewrite_by((*STEPS, *steps), original, plan, source)
    return Rendering(after, (), (*check_document(original, after, plan, source), *limits))


_SHARED_SLOT = (
    "a passed-through device leaves the slot that it shares: delete the <address> of the remaining "
    "function, so that libvirt assigns another slot, or choose pin-numa, which moves no device"
)
_WAYS_OUT = {"function-without-0": _SHARED_SLOT, "multifunction-off": _SHARED_SLOT}


def rewrite(xml: bytes, plan: Plan, source: str = "domain") -> bytes:
    """Return the document with the plan applied. Applying it again changes nothing.

    What a layout owns and what stays: docs/reference/formats/domain-xml.md. Raises InputError (or
    ParseError) if the document cannot take the plan; there is no partial result.
    """
    return rewrite_by(STEPS, xml, plan, source)


def rewrite_by(steps: tuple[Step, ...], xml: bytes, plan: Plan, source: str) -> bytes:
    """Rewrite with a subset of STEPS."""
    document = open_domain(xml, source)
    guest = build_vm(document)
    _reject_other_plans(guest, plan, source)
    reject_unsafe(guest, plan, source)
    before = set(check_references(document))
    for step in steps:
        document = step(document, plan)
    contradictions = [
        contradiction for contradiction in check_references(document) if contradiction not in before
    ]
    if contradictions:
        suffix = f" (and {len(contradictions) - 1} more)" if len(contradictions) > 1 else ""
        raise InputError(
            f"{source}: expected a definition that holds together with the plan in it, found "
            f"{contradictions[0].fact}{suffix}",
            hint=_WAYS_OUT.get(
                contradictions[0].id,
                "plan again for this definition, or start from the original with homenode restore",
            ),
        )
    return document.to_bytes()


def _reject_other_plans(guest: Vm, plan: Plan, source: str) -> None:
    """Reject plans that no document can have, and expander buses for other machine types."""
    if plan.vcpu_pins and len(plan.vcpu_pins) != plan.vm.vcpus:
        raise InputError(
            f"{source}: the plan has {plural(plan.vm.vcpus, 'vCPU')}, and pins for "
            f"{len(plan.vcpu_pins)}"
        )
    if plan.vm.cpu_topology is not None and plan.vm.cpu_topology.vcpus != plan.vm.vcpus:
        raise InputError(
            f"{source}: the plan has {plural(plan.vm.vcpus, 'vCPU')}, and a topology of "
            f"{plan.vm.cpu_topology.vcpus}"
        )
    expanders = [c for c in plan.vm.controllers if c.model == PortModel.EXPANDER_BUS]
    if expanders and not (guest.is_q35 or guest.is_virt):
        raise InputError(
            f"{source}: expected machine type q35 (x86-64) or virt (aarch64) for expander buses, "
            f"found {guest.machine or 'no machine type, which libvirt treats as i440fx'}",
            hint="choose a layout without -pci"
            + (", or change the machine type to q35" if guest.architecture == "x86_64" else ""),
        )


def find_contradictions(original: bytes, source: str) -> Iterator[str]:
    """Yield the faults of the input, and the number of omitted faults."""
    contradictions = check_references(open_domain(original, source))
    counts = Counter(contradiction.id for contradiction in contradictions)
    seen_counts: Counter[str] = Counter()
    for contradiction in contradictions:
        seen_counts[contradiction.id] += 1
        if seen_counts[contradiction.id] <= _MAX_ALIKE:
            yield f"warning: {contradiction.fact}"
        elif seen_counts[contradiction.id] == counts[contradiction.id]:
            count = counts[contradiction.id] - _MAX_ALIKE
            yield f"warning: {count} more of this kind ({contradiction.id})"
