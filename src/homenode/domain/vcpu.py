"""vCPU count: <vcpu> and <vcpus>."""

from homenode.cpuset import CpuSet
from homenode.domain.document import Document
from homenode.domain.edits import Edit, apply, remove, set_attributes, set_text
from homenode.domain.fields import decimal, needed
from homenode.errors import InputError
from homenode.plan.model import Plan

MAX_VCPUS = 4096
"""More than any machine type takes (QEMU 9: 4096 on q35), so that a hostile count costs nothing."""


def read_vcpus(document: Document) -> tuple[int, int]:
    """(maximum, online at boot). Raises ParseError, InputError."""
    element = document.root.child("vcpu")
    if element is None:
        raise InputError(
            f"{document.source}: expected <vcpu> with the number of vCPUs, found none",
            hint="libvirt would take 1; say how many the VM has: <vcpu>8</vcpu>",
        )
    vcpus = decimal(document, element, element.text, "the number of vCPUs")
    current = element.get("current")
    online = vcpus if current is None else decimal(document, element, current, "current vCPUs")
    if not 1 <= vcpus <= MAX_VCPUS or not 1 <= online <= vcpus:
        raise InputError(
            f"{document.source}:{element.line}: expected 1 to {MAX_VCPUS} vCPUs and no more "
            f"current ones than these, found {vcpus}, current {online}"
        )
    return vcpus, online


def read_offline_vcpus(document: Document) -> CpuSet:
    """Those not there at the start: as <vcpus> gives them one by one, else all from the `current`
    one on. Raises ParseError, InputError."""
    vcpus, online = read_vcpus(document)
    states = document.root.child("vcpus")
    if states is None:
        return CpuSet(range(online, vcpus))
    stated = {
        decimal(document, state, needed(document, state, "id"), "a vCPU"): state.get("enabled")
        for state in states.all("vcpu")
    }
    return CpuSet(i for i in range(vcpus) if stated.get(i) == "no")


def edit_vcpus(document: Document, plan: Plan) -> Document:
    """The count of the plan, and no PU set next to the pins.

    cpuset goes under every layout: pins replace it, and a layout without pins has none. `current`
    and <vcpus>, the state of single vCPUs, speak of the old count: they go when it changes.
    """
    element = document.root.child("vcpu")
    assert element is not None, "read_guest refuses a domain without <vcpu>"
    vcpus, _ = read_vcpus(document)
    edits: list[Edit] = []
    values: dict[str, str | None] = {"cpuset": None}
    if plan.vcpu_pins:
        values["placement"] = "static"
    if vcpus != plan.vcpus:
        values["current"] = None
        edits += set_text(document, element, str(plan.vcpus))
        for states in document.root.all("vcpus"):
            edits += remove(document, states)
    return apply(document, edits + set_attributes(document, element, values))
