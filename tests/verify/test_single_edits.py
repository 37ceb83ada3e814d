"""Every element of a tuned document is removed, doubled, moved and given other values. What could
change where the VM is, what it sees, or whether it starts, is named; the rest has a reason.
"""

import re
from collections.abc import Callable
from functools import cache

import pytest
from msgspec import structs
from msgspec.structs import fields

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import are_bad
from homenode.objective import Objective
from homenode.plan.pipeline import plan_file
from homenode.plan.shape.guest_numa import merge_devices
from homenode.units import GIB, MIB
from homenode.vm.domain.controllers import QEMU_NAMESPACE as QEMU
from homenode.vm.domain.read import keep_parts, open_domain, read_kept
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS, Siblings
from homenode.vm.model import (
    GuestAddress,
    GuestCache,
    GuestHostdev,
    GuestPciController,
    LayoutRecord,
    MediatedDevice,
    PortModel,
    Vm,
    VmCell,
)
from homenode.vm.plan import Aperture, Plan, with_vm
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.targets.libvirt import rewrite
from tests.seeds import THOROUGH
from tests.single_edits import Edit, edits, users_vm
from tests.verify_documents import DEVICES, PLAIN, changed, findings_of, small_host

WITH_OVMF = changed(
    PLAIN,
    (
        "machine='q35'>hvm</type>",
        "machine='q35'>hvm</type><loader readonly='yes' type='pflash'>/usr/share/OVMF.fd</loader>",
    ),
    ("<cpu mode='host-passthrough'/>", "<cpu mode='custom'><model>EPYC</model></cpu>"),
    ("<vcpu ", "<iothreads>1</iothreads><vcpu "),
)
NOT_IN_THE_DOCUMENT = (
    {
        "host_name": "a name; host_fingerprint says which host",
        "policy": "how the placement was chosen",
        "nodes": "vcpu_pins, binding and cells are made from it",
        "llcs": "vcpu_pins are made from it",
        "page_reservations": "of the host: its free pages are compared with the document's",
        "fallback": "how the placement was chosen",
        "relaxations": "how the placement was chosen",
        "cost": "how the placement was chosen",
        "optimal": "how the placement was chosen",
        "runners_up": "placements that were not chosen",
        "rejections": "placements that were not chosen",
        "findings": "text for the reader",
        "consequences": "text for the reader",
        "gaps": "text for the reader",
        "mediated_removed": "of the document before the plan",
        "kept_of": "kept is compared with a file of this target alone",
        "aperture.memlock_bytes": "of the host: <memtune> is compared with what VFIO locks",
        "aperture.dma_map_entries": "of the host: libvirt has no setting for it",
        "vm": "each of its fields is compared",
        "vm.name": "a plan also serves a copy of its domain",
        "vm.source": "text for the reader",
        "vm.architecture": "the machine type decides it",
        "vm.iothread_ids": "iothread_pins are compared by them",
        "vm.record": "each of its fields is compared",
        "record.host": "host_fingerprint is compared",
        "cells.host_nodes": "nodes and vcpu_pins are made from it",
        "hostdevs.host_node": "of the host: the device's address there decides it",
        "hostdevs.cell": "the controllers above the device decide it",
        "hostdevs.group": "the addresses of its functions are made from it",
        "hostdevs.local_memory_ratio": "text for the reader",
        "controllers.existing": "of the document before the plan",
        "controllers.bus_count": "busNr and the buses below it are compared",
    }
    | {
        f"vm.{name}": "a plan does not say it"
        for name in (
            *"uuid launch_security physical_address_bits max_memory_bytes hard_limit_bytes".split(),
            *"memory_access_shared bound_nodes has_dimms addresses pcihole64_bytes".split(),
            *"has_acpi iommu_model has_qemu_commandline".split(),
        )
    }
    | {
        "vm.emulator_threads": "a process alone says it",
        "cells.bytes_by_node": "a process alone says it",
        "hostdevs.alias": "a plan does not say it",
    }
)
"""Fields of a plan that no element holds, and why. Every other field has a check."""

ROOM = Aperture(2048 * GIB, 42, 2_097_152, 0, 0)


@cache
def with_room(layout: str) -> tuple[bytes, bytes, Plan]:
    """(the document before, with the plan in it, the plan) of a VM that needs all an aperture."""
    options = PlanOptions(layout=layout, policy=Policy.SPREAD)
    plan = plan_file(WITH_OVMF, "vm.xml", options, small_host()).plan
    plan = structs.replace(plan, aperture=ROOM)
    cells = tuple(structs.replace(cell, page_bytes=GIB) for cell in plan.vm.cells)
    plan = with_vm(plan, cpu_cache=GuestCache.EMULATED, topoext=True, page_bytes=GIB, cells=cells)
    after = rewrite(WITH_OVMF, plan)
    return WITH_OVMF, after, keep_parts(plan, open_domain(after, "vm.xml"))


USERS_OWN = {
    "name": "a plan also serves a copy of its domain",
    "uuid": "libvirt gives a domain without one a new one",
    "layout": "of two records libvirt keeps the first",
    "boot": "the order in which disks are tried",
    "clock": "how the guest keeps time",
    "on_poweroff": "what follows when the guest ends",
    "on_reboot": "what follows when the guest ends",
    "on_crash": "what follows when the guest ends",
    "disk": "the user's disk; which IOThread serves it is compared",
    "interface": "the user's network",
    "serial": "the user's console",
    "console": "the user's console",
    "memballoon": "how much of the memory is in the balloon is compared",
}
"""Elements that no layout places, with what is in them: the VM is where it was planned without."""

DEFAULTS: dict[tuple[str, str | None], str] = {
    ("currentMemory", None): "libvirt takes <memory>",
    ("memory", "mode"): "strict is libvirt's default",
    ("memnode", "mode"): "strict is libvirt's default",
    ("memory", "placement"): "static is libvirt's default with a nodeset",
    ("page", "nodeset"): "without it the page is for every cell",
    ("type", "arch"): "libvirt takes the host's",
    ("cpu", "mode"): "custom is libvirt's default with a model",
    ("cpu", "check"): "what libvirt compares at the start, never what the guest gets",
    ("cpu", "migratable"): "which features no migration takes: of no topology",
    ("feature", "policy"): "require is libvirt's default",
    ("topology", "threads"): "1 is libvirt's default, and where it is 2 the product differs",
    ("cell", "id"): "libvirt numbers the cells in order",
    ("sibling", None): "10 in the cell and 20 to others are libvirt's defaults",
    ("controller", None): "libvirt makes controller 0, the machine's root bus, by itself",
    ("controller", "index"): "libvirt gives the lowest free number, which is this one",
    ("controller", "model"): "libvirt makes controller 0 the machine's root bus",
    ("model", None): "libvirt's default for the controller's model",
    ("model", "name"): "libvirt's default for the controller's model",
    ("target", None): "chassis and port of a root port: libvirt chooses them as well",
    ("target", "chassis"): "libvirt chooses it as well",
    ("target", "port"): "libvirt chooses it as well",
    ("hostdev", "mode"): "subsystem is libvirt's default",
    ("address", "type"): "pci is what is read here",
    ("address", "domain"): "0 is libvirt's default",
    ("address", "bus"): "0 is libvirt's default, and others are checked by their change",
    ("address", "slot"): "0 is libvirt's default, and others are checked by their change",
    ("address", "function"): "0 is libvirt's default",
}
"""What a document need not say. Where the value is not the default its loss is named."""

ANY_VALUE: dict[tuple[str, str | None], str] = {
    ("target", "chassis"): "any number that no other port has, which the references check",
    ("target", "port"): "any number: the guest sees the slot",
    ("currentMemory", "text"): "libvirt takes <memory> for more than that",
    ("pcihole64", "text"): "more space than the plan asks for",
    ("maxphysaddr", "mode"): "the host's own bits are as many as there can be",
    ("maxphysaddr", "bits"): "more address bits than the plan asks for",
    ("cpu", "check"): "what libvirt compares at the start, never what the guest gets",
    ("cpu", "migratable"): "which features no migration takes: of no topology",
    ("type", "machine"): "the same machine, of the newest version",
}

ORDER = "libvirt reads elements by their names and numbers, whatever their order"


def reason(edit: Edit) -> str | None:
    """Why it need not be named; None where it must be."""
    if edit.done == "moved":
        return ORDER
    own = next((USERS_OWN[name] for name in edit.path if name in USERS_OWN), None)
    if own is not None:
        return own
    key = (edit.path[-1], edit.attribute)
    return (ANY_VALUE if edit.done == "changed" else DEFAULTS).get(key)


def is_named(document: bytes, plan: Plan) -> bool:
    """A finding that fails the check, or a refusal of what no libvirt takes."""
    try:
        return are_bad(findings_of(document, plan)) or bool(validate(document)[0])
    except InputError:
        return True


def unnamed(tried: list[Edit], plan: Plan) -> list[str]:
    """Those that pass without a reason."""
    return [e.said for e in tried if reason(e) is None and not is_named(e.document, plan)]


def is_planned(before: bytes) -> Callable[[Edit], bool]:
    """Whether an edit is of an element that a layout sets."""
    there = {element.name for element in open_domain(before, "before").root.walk()}
    return lambda edit: edit.path[-1] not in there or "devices" in edit.path


@pytest.mark.parametrize("layout", [name for name in PRESETS if name != "default"])
def test_no_planned_element_can_be_lost_or_changed_unseen(layout: str) -> None:
    before, after, plan = with_room(layout)
    assert not [one for one in findings_of(after, plan) if one.id.startswith("plan-")]
    tried = [edit for edit in edits(after) if is_planned(before)(edit)]
    assert len(tried) > 60
    sample = tried if THOROUGH else tried[::8]
    assert not unnamed(sample, plan)


@pytest.mark.parametrize("name", ["2 GPUs", "8 GPUs"])
def test_every_edit_of_a_users_document_is_named_or_has_its_reason(name: str) -> None:
    tuning = users_vm(name)
    assert not are_bad(findings_of(tuning.document, tuning.plan))
    tried = list(edits(tuning.document))
    assert len(tried) > 500
    sample = tried if THOROUGH else tried[:: len(tried) // 80]
    assert not unnamed(sample, tuning.plan)


def test_each_reason_is_one_of_an_edit_that_passes() -> None:
    """A row of the tables that nothing needs would hide what it names."""
    tuning = users_vm("2 GPUs")
    passing = [e for e in edits(tuning.document) if reason(e) and e.done != "moved"]
    names = {name for e in passing for name in e.path if name in USERS_OWN}
    assert names == USERS_OWN.keys()
    assert {e.done for e in passing} == {"removed", "doubled", "changed"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<memory unit='GiB'>4<", "<memory unit='KiB'>4194304<"),
        ("<memory unit='GiB'>4<", "<memory>4194304<"),
        ("<vcpu placement='static'>4<", '<vcpu  placement = "static" >4<'),
        ("memory='2048' unit='MiB'", "memory='2' unit='GiB'"),
        ("cpus='0,1'", "cpus='0-1'"),
        ("cpus='0,1'", "cpus='0-3,^2,^3'"),
        ("nodeset='0,1'", 'nodeset="0-1"'),
        ("busNr='240'", "busNr='0xf0'"),
        ("bus='0x11' slot='0x00'", "bus='17' slot='0'"),
        ("bus='0x03' slot='0x00' function='0x0'/>", "function='0' slot='00' bus='03'></address>"),
        ("<sibling id='0' value='10'/>", "<!-- near --><sibling value='10' id='0'/>"),
        ("cpuset='4'/>", "cpuset='4-4'></vcpupin>"),
    ],
)
def test_other_spellings_of_the_same_are_nothing_wrong(before: str, after: str) -> None:
    tuning = users_vm("2 GPUs")
    document = changed(tuning.document, (before, after))
    assert not are_bad(findings_of(document, tuning.plan)), findings_of(document, tuning.plan)
    assert not validate(document)[0]


TB_CACHE = "<tcg><tb-cache unit='{}'>{}</tb-cache></tcg>"
SMM = "<smm state='on'><tseg unit='KiB'>49152</tseg></smm>"
HYPERV = "<hyperv{}><vapic state='on'/></hyperv>"
CACHE = "<cachetune vcpus='{}'><cache id='0' level='3' type='both' size='{}/></cachetune>"


@pytest.mark.parametrize(
    ("place", "written", "printed"),
    [
        ("features", "<pvspinlock/>", "<pvspinlock state='on'/>"),
        ("features", "<vmcoreinfo/>", "<vmcoreinfo state='on'/>"),
        ("features", "<ioapic/><tcg/>", ""),
        ("features", TB_CACHE.format("MiB", 8), TB_CACHE.format("KiB", 8192)),
        ("features", "<smm><tseg>48</tseg></smm>", SMM),
        ("features", HYPERV.format(""), HYPERV.format(" mode='custom'")),
        ("cpu", "<feature name='x2apic'/>", "<feature policy='require' name='x2apic'/>"),
        ("cputune", CACHE.format("0,1", "3072'"), CACHE.format("0-1", "3' unit='MiB'")),
    ],
)
def test_settings_are_the_same_as_libvirt_prints(place: str, written: str, printed: str) -> None:
    document, end = users_vm("2 GPUs").document, f"</{place}>"
    one, other = (
        read_kept(open_domain(changed(document, (end, text + end)), "vm.xml"))
        for text in (written, printed)
    )
    assert one == other


COMMANDLINE = f"<commandline xmlns='{QEMU}'><arg value='-S'/></commandline></domain>"
OVERRIDE = f"<override xmlns='{QEMU}'><device alias='hostdev0'/></override></domain>"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("<cpu mode='host-passthrough'", "<cpu mode='maximum'", "plan-cpu"),
        ("<cpu mode='host-passthrough' check='none' migratable='on'>", "<cpu>", "plan-cpu"),
        ("<topology", "<feature policy='disable' name='ht'/><topology", "plan-setting"),
        ("<topology", "<maxphysaddr mode='emulate' bits='36'/><topology", "plan-setting"),
        ("type='kvm'", "type='qemu'", "plan-domain-type"),
        ("machine='pc-q35-7.2'", "machine='pc-q35-4.0'", "plan-machine"),
        ("<os firmware='efi'>", "<os>", "plan-firmware"),
        (">4</currentMemory>", ">3</currentMemory>", "plan-current-memory"),
        ("<currentMemory unit='GiB'>", "<currentMemory>", "plan-current-memory"),
        ("<vcpu placement='static'>", "<vcpu current='2'>", "plan-vcpus-online"),
        ("managed='yes'", "managed='no'", "plan-setting"),
        (" managed='yes'", "", "plan-setting"),
        ("iothread='1'/>", "/>", "plan-setting"),
        ("type='qcow2' iothread='1'", "type='qcow2' iothread='2'", "iothread-unknown"),
        ("<cell id='0'", "<cell id='0' memAccess='shared'", "plan-setting"),
        ("<cputune>", "<cputune><quota>1000</quota>", "plan-setting"),
        ("</cputune>", "<vcpusched vcpus='0' scheduler='idle'/></cputune>", "plan-setting"),
        ("<vcpu ", "<memoryBacking><locked/></memoryBacking><vcpu ", "plan-setting"),
        ("<vcpu ", "<memoryBacking><hugepages/></memoryBacking><vcpu ", "plan-setting"),
        ("<vcpu ", "<memtune><soft_limit>9</soft_limit></memtune><vcpu ", "plan-setting"),
        ("<vcpu ", "<resource><partition>/vms</partition></resource><vcpu ", "plan-setting"),
        ("<memballoon", "<iommu model='intel'/><memballoon", "plan-setting"),
        ("</domain>", COMMANDLINE, "plan-setting"),
        ("</domain>", OVERRIDE, "plan-setting"),
    ],
)
def test_what_a_plan_relies_on_is_compared_with_it(before: str, after: str, named: str) -> None:
    tuning = users_vm("2 GPUs")
    document = changed(tuning.document, (before, after))
    found = {one.id for one in findings_of(document, tuning.plan) if are_bad([one])}
    assert named in found


def test_a_device_that_no_one_gives_to_vfio_does_not_start() -> None:
    tuning = users_vm("2 GPUs")
    document = changed(tuning.document, (" managed='yes'", ""))
    device = small_host().find_device(Bdf.parse(DEVICES[0]))
    assert device is not None and device.driver is None
    found = {one.id: one.severity for one in findings_of(document, host=small_host())}
    assert found["not-bound-to-vfio"] == "inconclusive"


def changed_plans(plan: Plan) -> dict[str, Plan]:
    """By field, the plan with another value of it, for each field that a document holds."""
    assert plan.aperture is not None and plan.vm.cpu_topology is not None
    vm, aperture, cells, devices = plan.vm, plan.aperture, plan.vm.cells, plan.vm.hostdevs
    expander = next(c for c in vm.controllers if c.bus_nr is not None)
    others = tuple(c for c in vm.controllers if c is not expander)

    def cell(**values: object) -> Plan:
        return with_vm(plan, cells=(structs.replace(cells[0], **values), *cells[1:]))

    def controller(**values: object) -> Plan:
        return with_vm(plan, controllers=(structs.replace(expander, **values), *others))

    def device(**values: object) -> Plan:
        return with_vm(plan, hostdevs=(structs.replace(devices[0], **values), *devices[1:]))

    def record(**values: object) -> Plan:
        assert vm.record is not None
        return with_vm(plan, record=structs.replace(vm.record, **values))

    def space(**values: int) -> Plan:
        return structs.replace(plan, aperture=structs.replace(aperture, **values))

    at = expander.address
    assert at is not None
    far = GuestAddress(at.domain, at.bus, 30, 0)
    of_vm = {
        "domain_type": "qemu",
        "machine": "pc",
        "firmware": "bios",
        "loader": "/usr/share/other.fd",
        "emulator": "/usr/bin/other",
        "vcpus": vm.vcpus + 2,
        "offline_vcpus": CpuSet([3]),
        "cpu_mode": "maximum",
        "cpu_model": "Other",
        "cpu_topology": plan.vm.cpu_topology._replace(sockets=vm.vcpus, cores=1),
        "cpu_cache": GuestCache.PASSTHROUGH,
        "topoext": True,
        "vcpu_pins": (CpuSet([7]), *vm.vcpu_pins[1:]),
        "emulator_pus": CpuSet([7]),
        "iothread_pins": ((1, CpuSet([7])),),
        "memory_bytes": vm.memory_bytes + GIB,
        "page_bytes": 2 * MIB,
        "ballooned_bytes": GIB,
        "binding": ("preferred", CpuSet(plan.memory_nodes)),
        "memory_devices": merge_devices(GIB),
        "cells": cells[:1],
        "hostdevs": devices[:1],
        "mediated": (MediatedDevice("0" * 32, None),),
        "controllers": (*vm.controllers, structs.replace(expander, index=99)),
    }
    return {f"vm.{name}": with_vm(plan, **{name: value}) for name, value in of_vm.items()} | {
        "vm.has_iommu": with_vm(plan, has_iommu=True, vcpus=256),
        "host_fingerprint": structs.replace(plan, host_fingerprint="f" * 64),
        "record.layout": record(layout=structs.replace(plan.layout, siblings=Siblings.KEEP)),
        "kept": structs.replace(plan, kept=()),
        "record.objective": record(objective=Objective.LATENCY),
        "record.multiplied": record(multiplied=False),
        "cells.id": with_vm(plan, cells=cells[::-1]),
        "cells.vcpus": cell(vcpus=CpuSet([0])),
        "cells.memory_bytes": cell(memory_bytes=GIB),
        "cells.nodes": cell(nodes=cells[1].nodes),
        "cells.mode": cell(mode="preferred"),
        "cells.page_bytes": cell(page_bytes=2 * MIB),
        "cells.distances": cell(distances=(10, 32)),
        "hostdevs.bdf": device(bdf=Bdf(0, 0x99, 0, 0)),
        "hostdevs.address": device(address=devices[1].address),
        "hostdevs.uuid": device(uuid="0" * 32),
        "hostdevs.managed": device(managed=False),
        "hostdevs.initiator_cells": device(initiator_cells=CpuSet([cells[1].id])),
        "controllers.index": controller(index=99),
        "controllers.model": controller(model=PortModel.ROOT_PORT),
        "controllers.address": controller(address=far),
        "controllers.bus_nr": controller(bus_nr=expander.bus_nr + 1 if expander.bus_nr else 1),
        "controllers.cell": controller(cell=cells[1].id if expander.cell == 0 else cells[0].id),
        "aperture": structs.replace(
            plan, aperture=structs.replace(ROOM, pcihole64_bytes=4096 * GIB)
        ),
        "aperture.pcihole64_bytes": space(pcihole64_bytes=4096 * GIB),
        "aperture.physical_address_bits": space(physical_address_bits=48),
        "aperture.firmware_mmio64_mib": space(firmware_mmio64_mib=4_194_304),
    }


def test_each_field_of_a_plan_is_checked_or_says_why_not() -> None:
    _, after, plan = with_room("pin-numa-pci")
    plan = with_vm(plan, topoext=None)
    after = after.replace(b"<feature policy='require' name='topoext'/>", b"")
    plan = keep_parts(plan, open_domain(after, "vm.xml"))
    plans = changed_plans(plan)
    every = {field.name for field in fields(Plan)}
    records = {"vm": Vm, "cells": VmCell, "record": LayoutRecord, "hostdevs": GuestHostdev}
    records |= {"controllers": GuestPciController, "aperture": Aperture}
    for name, record in records.items():
        every |= {f"{name}.{field}" for field in record.__struct_fields__}
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
    found = [one.id for one in findings_of(without, plan)]
    assert [name for name in found if name.startswith("plan-")] == ["plan-pins"]


OTHER_EDITS = (
    (r"(<vcpupin vcpu=')0'", r"\g<1>1'"),  # another vCPU's
    (r"(<vcpupin vcpu='0' cpuset=')[^']*", r"\g<1>0-7"),
    (r"<vcpupin vcpu='0' (cpuset='[^']*'/>)", r"<emulatorpin \1"),
    (r"<vcpupin (vcpu='0') cpuset=", r"<vcpupin \1 CpuSet="),
    (r"(<memnode cellid=')0'", r"\g<1>1'"),
    (r"(<memnode cellid='0'[^>]*nodeset=')[^']*", r"\g<1>0-1"),
    (r"(<memnode cellid='0'[^>]*/>)(.*?</numatune>)", r"\2\1"),  # out of its parent
    (r"(<cell id='0'[^>]*unit=')\w+'", r"\g<1>MB'"),
    (r"(<cell id='1' cpus=')", r"\g<1>0,"),
    (r"(<cell id=')0(' .*?<cell id=')1'", r"\g<1>1\g<2>0'"),
    (r"<distances>.*?</distances>", ""),
    (r"(<numa>.*?</numa>)(.*?</cpu>)", r"\2\1"),
    (r"sockets='2' cores='(\d+)' threads='1'", r"sockets='1' cores='\1' threads='2'"),
    (r"<node>0</node>", "<node>1</node>"),
    (r"(<target busNr='\d+'>)\s*(<node>\d</node>)\s*</target>", r"\1</target>\2"),
    (r"busNr='\d+'", "busNr='0'"),
    (r"model='pcie-root-port'", "model='pcie-switch-downstream-port'"),
    (r"<hostdev(.*?)</hostdev>", r"<!-- <hostdev\1</hostdev> -->"),
    (r"(<hostdev.*?</hostdev>)(.*</devices>)", r"\2\1"),
    (r"mode='subsystem' type='pci'", "mode='subsystem' type='usb'"),
    (r"<memory unit='GiB'>", "<memory unit='GB'>"),
    (r"<memory unit='GiB'>", "<memory>"),
    (r"(<numatune>)", r"<numatune><memory mode='strict' nodeset='0'/></numatune>\1"),
    (r"(<cputune>)", r"\1<quota>5000</quota>"),
    (r"(</vcpu>)", r"\1<memtune><hard_limit unit='MiB'>512</hard_limit></memtune>"),
)


@pytest.mark.parametrize("name", ["2 GPUs", "8 GPUs"])
def test_swapped_ids_moved_elements_and_wrong_units_are_named(name: str) -> None:
    right = users_vm(name)
    text = right.document.decode()
    passed = []
    for pattern, put in OTHER_EDITS:
        edited, times = re.subn(pattern, put, text, count=1, flags=re.DOTALL)
        assert times == 1, pattern
        if not is_named(edited.encode(), right.plan):
            passed.append((pattern, put))
    assert not passed
