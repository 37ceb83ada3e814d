"""Every element that a plan sets is checked: without it, or with another value, none passes."""

import random
import re
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from functools import cache

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.domain.document import Element
from homenode.domain.read import open_domain
from homenode.domain.rewrite import rewrite
from homenode.errors import InputError
from homenode.findings import are_bad
from homenode.plan.guest import GuestAddress
from homenode.plan.layout import PRESETS, Siblings
from homenode.plan.model import (
    Aperture,
    GuestCache,
    Plan,
    PlannedCell,
    PlannedController,
    PlannedDevice,
    PortModel,
)
from homenode.plan.options import PlanOptions
from homenode.plan.request import MemoryMode, Policy
from homenode.sources import load_host
from homenode.tuning import tune
from homenode.units import GIB, MIB
from homenode.verify.document.plan_edits import NOT_IN_THE_DOCUMENT
from tests.verify_documents import PLAIN, changed, findings_of, small_host

WITH_OVMF = changed(
    PLAIN,
    (
        "machine='q35'>hvm</type>",
        "machine='q35'>hvm</type><loader readonly='yes' type='pflash'>/usr/share/OVMF.fd</loader>",
    ),
    ("<cpu mode='host-passthrough'/>", "<cpu mode='custom'><model>EPYC</model></cpu>"),
    ("<vcpu ", "<iothreads>1</iothreads><vcpu "),
)
ROOM = Aperture(2048 * GIB, 42, 2_097_152, 0, 0)

BENIGN = {
    ("hostdev", "managed"): "the user's: no plan says how the host driver is taken off",
    ("hostdev", "mode"): "libvirt's default",
    ("memory", "mode"): "strict is libvirt's default",
    ("memnode", "mode"): "strict is libvirt's default",
    ("memory", "placement"): "static is libvirt's default with a nodeset",
    ("page", "nodeset"): "without it the page is for every cell",
    ("cpu", "mode"): "custom is libvirt's default with a model",
    ("feature", "policy"): "require is libvirt's default",
    ("topology", "threads"): "1 is libvirt's default, and where it is 2 the product differs",
    ("cell", "id"): "libvirt numbers the cells in order",
    ("maxphysaddr", "mode"): "libvirt refuses the element without it",
    ("controller", "index"): "libvirt gives the lowest free number, which is this one",
    ("controller", "model"): "libvirt makes controller 0 the machine's root bus",
    ("model", None): "libvirt's default for the controller's model",
    ("model", "name"): "libvirt's default for the controller's model",
    ("target", None): "chassis and port of a root port: libvirt chooses them as well",
    ("target", "chassis"): "libvirt chooses it as well",
    ("target", "port"): "libvirt chooses it as well",
    ("address", "type"): "pci is what is read here",
    ("address", "domain"): "0 is libvirt's default",
    ("address", "bus"): "0 is libvirt's default, and others are checked by their change",
    ("address", "slot"): "0 is libvirt's default, and others are checked by their change",
    ("address", "function"): "0 is libvirt's default",
}
"""Elements and attributes that a document need not have, though a rewrite puts them there.

Where such a value is not the default, its loss is a finding: the tests try all that differ.
"""


@cache
def with_room(layout: str) -> tuple[bytes, bytes, Plan]:
    """(the document before, with the plan in it, the plan) of a VM that needs all an aperture."""
    options = PlanOptions(layout=layout, policy=Policy.SPREAD)
    plan = tune(WITH_OVMF, "vm.xml", options, small_host()).plan
    plan = replace(plan, aperture=ROOM, cache=GuestCache.EMULATED, topoext=True, page_bytes=GIB)
    return WITH_OVMF, rewrite(WITH_OVMF, plan), plan


def planned_elements(before: bytes, after: bytes) -> Iterator[Element]:
    """Elements of the tuned document that the plain one does not have, word for word."""

    def text(document: bytes, element: Element) -> bytes:
        return re.sub(rb"\s+", b" ", document[element.start : element.end])

    plain = open_domain(before, "before")
    there = {text(plain.text, element) for element in plain.root.walk()}
    tuned = open_domain(after, "after")
    for element in tuned.root.walk():
        if text(tuned.text, element) not in there and element.name != "domain":
            yield element


def sabotages(before: bytes, after: bytes) -> Iterator[tuple[Element, str | None, str, bytes]]:
    """(element, attribute or None, what was done, document): without each planned element, and
    without or with another value of each of its attributes and texts."""
    for element in planned_elements(before, after):
        where = f"line {element.line} <{element.tag}>"
        if element.name not in ("devices", "cpu", "os"):
            yield element, None, f"{where} gone", after[: element.start] + after[element.end :]
        start_tag = after[element.start : element.tag_end].decode()
        for name, value in element.attributes:
            if name.startswith("xmlns"):
                continue
            for other in (None, *other_values(value)):
                put = "" if other is None else f" {name}='{other}'"
                tag = re.sub(rf"\s{re.escape(name)}=(['\"])[^'\"]*\1", put, start_tag, count=1)
                yield (
                    element,
                    name,
                    f"{where} {name}={value} -> {other}",
                    after[: element.start] + tag.encode() + after[element.tag_end :],
                )
        for other in other_values(element.text.strip()):
            yield (
                element,
                "text",
                f"{where} {element.text} -> {other}",
                after[: element.tag_end] + other.encode() + after[element.content_end :],
            )


def other_values(text: str) -> Iterator[str]:
    """A smaller number where it is one: larger ones may be better."""
    base = 16 if text.startswith("0x") else 10
    digits = text.removeprefix("0x")
    if re.fullmatch(r"[0-9]+" if base == 10 else r"[0-9a-f]+", digits) and int(digits, base):
        less = int(digits, base) - 1
        yield f"0x{less:x}" if base == 16 else str(less)


def is_benign(element: Element, attribute: str | None, what: str) -> bool:
    if element.name == "target" and attribute in ("chassis", "port"):
        return True  # any number that no other port has, which the references check
    if (element.name, attribute) not in BENIGN:
        return False
    # Without busNr or a node an expander bus is another one.
    return what.endswith((" gone", "-> None")) and element.get("busNr") is None


def is_named(document: bytes, plan: Plan) -> bool:
    """A finding that fails the check, or a refusal of what no libvirt takes."""
    try:
        return are_bad(findings_of(document, plan))
    except InputError:
        return True


@pytest.mark.parametrize("layout", [name for name in PRESETS if name != "default"])
def test_no_planned_element_can_be_lost_or_changed_unseen(layout: str) -> None:
    before, after, plan = with_room(layout)
    assert not [one for one in findings_of(after, plan) if one.id.startswith("plan-")]
    tried = 0
    unseen = []
    for element, attribute, what, document in sabotages(before, after):
        tried += 1
        if not is_named(document, plan) and not is_benign(element, attribute, what):
            unseen.append(what)
    assert tried > 30
    assert not unseen, "\n".join(unseen)


def test_no_sampled_loss_or_change_on_an_8_gpu_host_passes() -> None:
    host = load_host("hgx-h100")
    before = changed(
        re.sub(rb" *<hostdev.*</hostdev>\n", b"", PLAIN, flags=re.DOTALL),
        ("<os>", "<os firmware='efi'>"),
        ("mode='host-passthrough'", "mode='host-model'"),
        (">4</memory>", ">768</memory>"),
        (">4</vcpu>", ">64</vcpu>"),
    )
    tuning = tune(before, "vm.xml", PlanOptions(layout="pin-numa-pci", gpu_count=8), host)
    assert tuning.plan.aperture is not None
    assert None not in astuple(tuning.plan.aperture)
    every = list(sabotages(before, tuning.document))
    assert len(every) > 500
    for element, attribute, what, document in random.Random(17).sample(every, 60):
        assert is_named(document, tuning.plan) or is_benign(element, attribute, what), what


def changed_plans(plan: Plan) -> dict[str, Plan]:
    """By field, the plan with another value of it, for each field that a document holds."""
    assert plan.aperture is not None and plan.topology is not None
    aperture, cells, devices = plan.aperture, plan.cells, plan.devices
    expander = next(c for c in plan.controllers if c.bus_nr is not None)
    others = tuple(c for c in plan.controllers if c is not expander)

    def cell(**values: object) -> Plan:
        return replace(plan, cells=(replace(cells[0], **values), *cells[1:]))  # type: ignore[arg-type]

    def controller(**values: object) -> Plan:
        return replace(plan, controllers=(replace(expander, **values), *others))  # type: ignore[arg-type]

    def device(**values: object) -> Plan:
        return replace(plan, devices=(replace(devices[0], **values), *devices[1:]))  # type: ignore[arg-type]

    def space(**values: int) -> Plan:
        return replace(plan, aperture=replace(aperture, **values))

    at = expander.address
    far = GuestAddress(at.domain, at.bus, 30, 0)
    return {
        "host_fingerprint": replace(plan, host_fingerprint="f" * 64),
        "layout": replace(plan, layout=replace(plan.layout, siblings=Siblings.AS_THEY_WERE)),
        "vcpus": replace(plan, vcpus=plan.vcpus + 2),
        "memory_bytes": replace(plan, memory_bytes=plan.memory_bytes + GIB),
        "page_bytes": replace(plan, page_bytes=2 * MIB),
        "vcpu_pins": replace(plan, vcpu_pins=(CpuSet([7]), *plan.vcpu_pins[1:])),
        "emulator_pus": replace(plan, emulator_pus=CpuSet([7])),
        "iothread_pus": replace(plan, iothread_pus=(CpuSet([7]),)),
        "cells": replace(plan, cells=cells[:1]),
        "cells.id": replace(plan, cells=cells[::-1]),
        "cells.vcpus": cell(vcpus=CpuSet([0])),
        "cells.memory_bytes": cell(memory_bytes=GIB),
        "cells.host_nodes": cell(host_nodes=cells[1].host_nodes),
        "cells.distances": cell(distances=(10, 32)),
        "topology": replace(plan, topology=plan.topology._replace(sockets=plan.vcpus, cores=1)),
        "cache": replace(plan, cache=GuestCache.PASSTHROUGH),
        "topoext": replace(plan, topoext=True),
        "memory_mode": replace(plan, memory_mode=MemoryMode.PREFERRED),
        "memory_nodes": replace(plan, memory_nodes=plan.memory_nodes[:1]),
        "devices": replace(plan, devices=devices[:1]),
        "devices.bdf": device(bdf=Bdf(0, 0x99, 0, 0)),
        "devices.address": device(address=devices[1].address),
        "devices.initiator_cells": device(initiator_cells=(cells[1].id,)),
        "controllers": replace(plan, controllers=(*plan.controllers, replace(expander, index=99))),
        "controllers.index": controller(index=99),
        "controllers.model": controller(model=PortModel.ROOT_PORT),
        "controllers.address": controller(address=far),
        "controllers.bus_nr": controller(bus_nr=expander.bus_nr + 1 if expander.bus_nr else 1),
        "controllers.cell": controller(cell=cells[1].id if expander.cell == 0 else cells[0].id),
        "aperture": replace(plan, aperture=replace(ROOM, pcihole64_bytes=4096 * GIB)),
        "aperture.pcihole64_bytes": space(pcihole64_bytes=4096 * GIB),
        "aperture.physical_address_bits": space(physical_address_bits=48),
        "aperture.firmware_mmio64_mib": space(firmware_mmio64_mib=4_194_304),
        "iommu_needed": replace(plan, iommu_needed=True, vcpus=256),
        "memory_device_bytes": replace(plan, memory_device_bytes=GIB),
    }


def test_each_field_of_a_plan_is_checked_or_says_why_not() -> None:
    _, after, plan = with_room("pin-numa-pci")
    plan = replace(plan, topoext=False)
    after = after.replace(b"<feature policy='require' name='topoext'/>", b"")
    plans = changed_plans(plan)
    parts = {"cells": PlannedCell, "devices": PlannedDevice, "controllers": PlannedController,
             "aperture": Aperture}  # fmt: skip
    every = {field.name for field in fields(Plan)}
    every |= {f"{name}.{field.name}" for name, part in parts.items() for field in fields(part)}
    assert every == plans.keys() | NOT_IN_THE_DOCUMENT.keys()
    assert not plans.keys() & NOT_IN_THE_DOCUMENT.keys()
    assert not are_bad(findings_of(after, plan))
    assert not [name for name, other in plans.items() if not is_named(after, other)]


@pytest.mark.parametrize(
    ("lost", "element"),
    [
        (rb"<pcihole64[^>]*>[^<]*</pcihole64>", "pcihole64"),
        (rb"<maxphysaddr[^>]*/>", "maxphysaddr"),
        (rb"<qemu:commandline>.*</qemu:commandline>", "qemu:commandline"),
    ],
)
def test_a_lost_aperture_is_named_with_what_the_plan_asks_for(lost: bytes, element: str) -> None:
    _, after, plan = with_room("pin-numa-pci")
    document, times = re.subn(lost, b"", after, flags=re.DOTALL)
    assert times == 1
    (found,) = findings_of(document, plan)
    assert f"<{element}>" in found.subject
    assert found.observed == "none"


def test_more_room_than_the_plan_asks_for_is_nothing_wrong() -> None:
    _, after, plan = with_room("pin-numa-pci")
    more = changed(after, (">2048</pcihole64>", ">4096</pcihole64>"), ("bits='42'", "bits='46'"))
    assert not are_bad(findings_of(more, plan))


def test_what_one_check_names_is_not_named_twice() -> None:
    _, after, plan = with_room("pin-numa-pci")
    without = re.sub(rb"<vcpupin vcpu='3'[^>]*/>", b"", after)
    assert [one.id for one in findings_of(without, plan) if one.id.startswith("plan-")] == [
        "plan-pins"
    ]
