"""PlanEdits: what writing the plan into its document once more would change.

A document that has its plan in it is left alone by every step of domain/rewrite.py. So whatever
the program can write is checked here, elements that no other check names included.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from homenode.domain.aperture import edit_aperture
from homenode.domain.controllers import edit_controllers
from homenode.domain.cpu import edit_cpu
from homenode.domain.document import Document, Element
from homenode.domain.iommu import edit_iommu
from homenode.domain.kept import read_kept
from homenode.domain.metadata import edit_metadata
from homenode.domain.rewrite import STEPS
from homenode.errors import InputError
from homenode.findings import Finding, Severity
from homenode.plan.model import Plan

NOT_IN_THE_DOCUMENT = {
    "domain_name": "a plan also serves a copy of its domain",
    "host_name": "a name; host_fingerprint says which host",
    "policy": "how the placement was chosen",
    "nodes": "vcpu_pins, memory_nodes and cells are made from it",
    "llcs": "vcpu_pins are made from it",
    "page_reservations": "of the host: its free pages are compared with the document's",
    "fallback": "how the placement was chosen",
    "cost": "how the placement was chosen",
    "optimal": "how the placement was chosen",
    "runners_up": "placements that were not chosen",
    "rejections": "placements that were not chosen",
    "findings": "text for the reader",
    "consequences": "text for the reader",
    "gaps": "text for the reader",
    "aperture.memlock_bytes": "of the host: <memtune> is compared with what VFIO locks",
    "aperture.dma_map_entries": "of the host: libvirt has no setting for it",
    "devices.host_node": "of the host: the device's address there decides it",
    "devices.cell": "the controllers above the device decide it",
    "devices.group": "the addresses of its functions are made from it",
    "devices.local_memory_ratio": "text for the reader",
    "controllers.existing": "of the document before the plan",
    "mediated_removed": "of the document before the plan",
    "iothread_ids": "iothread_pus are compared by them",
    "controllers.bus_count": "busNr and the buses below it are compared",
}
"""Fields of a plan that no element holds, and why. Every other field has a check."""

_COSTS: dict[Callable[[Document, Plan], Document], str] = {
    edit_aperture: "firmware finds no space for large BARs: the guest comes up without its GPUs",
    edit_cpu: "the guest's CPUs are not those that the plan describes",
    edit_iommu: "vCPUs above 255 take no interrupts, and the VM does not start",
}
_RECORD_COST = "a later plan takes homenode's elements for the user's own"
_REWRITE = "write the document again: homenode plan -o, or homenode restore and plan"
_NAMED_BY = {
    "vcpus": {"vcpu", "vcpus"},
    "memory": {"memory", "currentMemory", "maxMemory"},
    "pages": {"memoryBacking", "hugepages", "page"},
    "topology": {"topology"},
    "pins": {"cputune", "vcpupin"},
    "emulator": {"cputune", "emulatorpin"},
    "iothreads": {"cputune", "iothreadpin"},
    "cells": {"numa", "cell", "distances", "sibling", "memnode", "page", "node"},
    "cell-vcpus": {"cell"},
    "cell-memory": {"cell"},
    "distances": {"distances", "sibling"},
    "binding": {"numatune", "memory", "memnode"},
    "cell-binding": {"memnode"},
    "controller": {"controller", "model", "target", "node", "address"},
    "expander-cell": {"target", "node"},
    "bus-nr": {"target"},
    "device": {"hostdev", "interface", "source", "address", "driver", "acpi"},
    "device-address": {"address"},
    "acpi-missing": {"features", "acpi"},
}
"""Findings of other checks, those of as_planned.py without "plan-", and the elements whose
difference each of them already reports."""

_SHOWN = 4


def plan_edits(document: Document, plan: Plan, found: list[Finding]) -> Iterator[Finding]:
    """A finding for each group of elements that the plan would change. found: of other checks,
    whose elements are not named again."""
    named = {one.id.removeprefix("plan-") for one in found}
    known = {name for one in named for name in _NAMED_BY.get(one, ())}
    reported: set[str] = set()
    for step in STEPS:
        wanted, there = _difference(document, plan, step)
        names = {name for name, _ in (*wanted, *there)}
        if names <= known:
            continue
        reported |= names
        subject = ", ".join(f"<{name}>" for name in sorted(names - known))
        recorded = step is edit_metadata
        yield Finding(
            id="plan-record" if recorded else "plan-element",
            severity=Severity.WARNING if recorded else Severity.CRITICAL,
            subject=subject,
            expected=_texts(wanted),
            observed=_texts(there),
            cost=_RECORD_COST if recorded else _COSTS.get(step),
            fix=_REWRITE,
            source=document.source,
        )
    yield from _settings(document, plan, known | reported)


def _settings(document: Document, plan: Plan, known: set[str]) -> Iterator[Finding]:
    """A finding for what is not as it was when the plan was made, though no layout sets it.

    known: elements that other findings name.
    """
    if plan.kept is None:
        return
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        known = known | {"maxphysaddr"}  # at least those of the plan, which its step checks
    before, now = Counter(plan.kept.settings), Counter(read_kept(document).settings)
    gone, new = (
        sorted(one for one in lines.elements() if one.partition(" ")[0] not in known)
        for lines in (before - now, now - before)
    )
    if gone or new:
        names = dict.fromkeys(one.partition(" ")[0] for one in (*gone, *new))
        yield Finding(
            id="plan-setting",
            severity=Severity.WARNING,
            subject=", ".join(f"<{name}>" for name in names),
            expected=_some(gone),
            observed=_some(new),
            cost="the plan was made for a document without this change",
            fix="plan again for this document, or take the change back",
            source=document.source,
        )


_Parts = list[tuple[str, str]]


def _difference(
    document: Document, plan: Plan, step: Callable[[Document, Plan], Document]
) -> tuple[_Parts, _Parts]:
    """(element's name, its text) that the step would put in, and that it would take out."""
    try:
        after = step(document, plan)
    except InputError as error:
        # as_planned names every controller, this only the first one in the way.
        name = "controller" if step is edit_controllers else "domain"
        return [(name, "a document that takes the plan")], [(name, error.message)]
    if after.text == document.text:
        return [], []
    before, later = Counter(_parts(document.root)), Counter(_parts(after.root))
    return list((later - before).elements()), list((before - later).elements())


def _parts(element: Element) -> Iterator[tuple[str, str]]:
    """Each element of a tree by itself, without those in it."""
    attributes = "".join(f" {name}='{value}'" for name, value in sorted(element.attributes))
    text = element.text.strip()
    name = element.tag
    yield name, f"<{name}{attributes}>{text}</{name}>" if text else f"<{name}{attributes}/>"
    for child in element.children:
        yield from _parts(child)


def _texts(parts: _Parts) -> str:
    return _some([text for _, text in parts])


def _some(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return (", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")) or "none"
