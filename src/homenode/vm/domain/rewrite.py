"""Rewrite: put a plan into a domain document and keep every other byte.

Each step edits one group of elements; none knows of another. A result with a broken reference that
the input did not have is rejected whole.
"""

from homenode.errors import InputError
from homenode.text import plural
from homenode.vm.domain.codec import STEPS, Step
from homenode.vm.domain.crosscheck import crosscheck
from homenode.vm.domain.limits import refuse_unsafe
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan import Plan

_SHARED_SLOT = (
    "a passed-through device leaves the slot that it shares: delete the <address> of what is left "
    "in it, so that libvirt finds it a slot of its own, or choose pin-numa, which moves no device"
)
_WAYS_OUT = {"function-without-0": _SHARED_SLOT, "multifunction-off": _SHARED_SLOT}


def rewrite(xml: bytes, plan: Plan, source: str = "domain") -> bytes:
    """The document with the plan applied. Applying it again changes nothing.

    What a layout owns and what stays: docs/reference/formats/domain-xml.md. Raises InputError (or
    ParseError) where the document cannot take the plan; there is no partial result.
    """
    return rewrite_by(STEPS, xml, plan, source)


def rewrite_by(steps: tuple[Step, ...], xml: bytes, plan: Plan, source: str) -> bytes:
    """Rewrite with some of STEPS."""
    document = open_domain(xml, source)
    guest = vm_of(document)
    _refuse_other_plans(guest, plan, source)
    refuse_unsafe(guest, plan, source)
    before = set(crosscheck(document))
    for step in steps:
        document = step(document, plan)
    broken = [
        contradiction for contradiction in crosscheck(document) if contradiction not in before
    ]
    if broken:
        suffix = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(
            f"{source}: expected a definition that holds together with the plan in it, found "
            f"{broken[0].fact}{suffix}",
            hint=_WAYS_OUT.get(
                broken[0].id,
                "plan again for this definition, or start from the original with homenode restore",
            ),
        )
    return document.to_bytes()


def _refuse_other_plans(guest: Vm, plan: Plan, source: str) -> None:
    """What no document can take, and PCIe layouts where the machine has no expander bus."""
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
            f"found {guest.machine or 'none, which libvirt takes for i440fx'}",
            hint="choose a layout without -pci"
            + (", or change the machine type to q35" if guest.architecture == "x86_64" else ""),
        )
