"""A virtual function is a part of its GPU: on its node, and shared with its siblings."""

import re
from importlib.resources import files
from typing import Any

import pytest
from lxml import etree
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.domain.devices import check_devices_on_host
from homenode.check.domain.verification import compare_with_plan
from homenode.errors import HomenodeError
from homenode.machine.description.parse import load_shipped, parse_description
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions
from tests.figures import numbers
from tests.rendered.machine import render
from tests.verify_documents import PLAIN

HOST = """
format = 1
name = "parts"
packages = 2
cores_per_package = 8
threads_per_core = 1
llc_size = "16MiB"
memory_per_node = "64GiB"
distances = { other_package = 20 }

[model.gpu]
class = "gpu"
bars = ["16MiB", "32GiB prefetchable"]
total_vfs = 4
vfs = 4

[[root]]
node = [0, 1]
bus = [0x10, 0x80]
ports = ["gpu"]
"""


def host() -> Host:
    return discover(render(parse_description(HOST, "parts")))


def planned(*devices: Bdf) -> Plan:
    start = PLAIN.index(b"    <hostdev")
    bare = PLAIN[:start] + b"  </devices>\n</domain>\n"
    options = PlanOptions(layout="pin-numa-pci", devices=devices, vcpus=4)
    machine = host()
    return plan(machine, request_for(read_vm(bare, "vm"), options, machine))


def ids(made: Plan) -> list[str]:
    return [f.id for f in made.findings if f.id.startswith("gpu-")]


def gpus(*, virtual: bool, node: int) -> list[Bdf]:
    return [
        gpu.bdf
        for gpu in host().devices_of_kind(DeviceKind.GPU)
        if (gpu.physical_function is not None) == virtual and gpu.node == node
    ]


def test_a_part_is_placed_on_its_gpus_node_and_the_finding_names_what_it_shares() -> None:
    part = gpus(virtual=True, node=1)[0]
    made = planned(part)
    assert made.nodes == (1,)
    assert made.vm.hostdevs[0].cell == 0
    (found,) = [f for f in made.findings if f.id == "gpu-shared"]
    assert str(gpus(virtual=False, node=1)[0]) in found.observed
    assert 3 in numbers(found.observed)


def test_all_parts_of_a_gpu_are_shared_with_no_other() -> None:
    parts = gpus(virtual=True, node=0)
    (found,) = [f for f in planned(*parts).findings if f.id == "gpu-shared"]
    assert "0 other" in found.observed


def test_a_whole_gpu_that_has_parts_is_a_warning_and_one_without_is_none() -> None:
    assert ids(planned(gpus(virtual=False, node=0)[0])) == ["gpu-and-its-parts"]
    assert ids(planned()) == []


DIVIDED = load_shipped("x86-2p2n8c8t-divided-gpus")
A40 = Bdf.parse("81:00.0")
UUIDS = tuple(p.uuid or "" for p in (discover(render(DIVIDED)).device_at[A40]).parts)


def divided(*vms: str) -> Host:
    toml = "".join(f'[[vm]]\nname = "o{i}"\nvcpus = 1\n{vm}\n' for i, vm in enumerate(vms))
    text = files("homenode.machine.hosts").joinpath("x86-2p2n8c8t-divided-gpus.toml").read_text()
    return parse_description(f"{text}\n{toml}", "divided").host


def tuned(host: Host, document: bytes = PLAIN, **options: Any) -> PlannedFile:
    given: dict[str, Any] = {"layout": "pin-numa-pci", "vcpus": 2, "memory_bytes": 4 << 30}
    if "gpu_count" not in options:
        start = document.index(b"    <hostdev")
        document = document[:start] + b"  </devices>\n</domain>\n"
    return plan_file(document, "vm", PlanOptions(**{**given, **options}), host)


def test_a_mediated_device_is_placed_on_its_gpus_node_and_written_as_one() -> None:
    made = tuned(divided(), devices=(UUIDS[2],))
    (device,) = made.plan.vm.hostdevs
    assert (made.plan.nodes, device.uuid, device.cell) == ((1,), UUIDS[2], 0)
    root = etree.fromstring(made.document)
    (hostdev,) = root.findall("devices/hostdev")
    assert (hostdev.get("type"), hostdev.get("model")) == ("mdev", "vfio-pci")
    source = hostdev.find("source/address")
    assert source is not None and source.get("uuid") == UUIDS[2]
    again = plan_file(made.document, "vm", PlanOptions(layout="pin-numa-pci"), divided())
    assert again.document == made.document
    unassigned = re.sub(
        rb"(</source>\s*)<address [^>]*>", rb"\1<address type='unassigned'/>", made.document
    )
    again = plan_file(unassigned, "vm", PlanOptions(layout="pin-numa-pci"), divided())
    assert again.document == made.document != unassigned
    document = open_domain(made.document, "vm")
    assert not list(compare_with_plan(document, build_vm(document), made.plan))


def test_gpus_of_a_profile_are_free_parts_of_it() -> None:
    made = tuned(divided(), gpu_count=2, gpu_profile="a40-12q")
    assert [device.uuid for device in made.plan.vm.hostdevs] == list(UUIDS[:2])
    made = tuned(divided(f'devices = ["{UUIDS[0]}"]'), gpu_count=1, gpu_profile="NVIDIA_A40-12Q")
    assert [device.uuid for device in made.plan.vm.hostdevs] == [UUIDS[1]]
    made = tuned(divided(), gpu_count=2, gpu_profile="H200X-1-18C")
    assert {(device.managed, device.uuid) for device in made.plan.vm.hostdevs} == {(False, None)}
    alarms = diagnose(divided(), open_domain(made.document, "vm")).findings
    assert "not-bound-to-vfio" not in {finding.id for finding in alarms}
    assert made.document.count(b'managed="no"') + made.document.count(b"managed='no'") == 2
    with pytest.raises(Unplannable, match=r"2 .*A40-12Q needed, 1 "):
        tuned(divided(f'devices = ["{UUIDS[0]}"]'), gpu_count=2, gpu_profile="A40-12Q")


def test_a_part_that_another_vm_has_and_a_whole_divided_gpu_are_said() -> None:
    host = divided(f'devices = ["{UUIDS[0]}"]')
    group = {A40, Bdf.parse("82:00.0"), tuned(host, devices=(UUIDS[1],)).plan.vm.hostdevs[0].bdf}
    grouped = tuple(
        replace(d, iommu_group=7, driver="nvidia") if d.bdf in group else d
        for d in host.pci_devices
    )
    for device, is_found in ((UUIDS[1], False), (A40, True)):
        made = tuned(replace(host, pci_devices=grouped), devices=(device,)).plan
        assert ("iommu-group-incomplete" in {f.id for f in made.findings}) is is_found
    held = tuned(host, devices=(UUIDS[0],)).plan
    assert "device-in-use" in {f.id for f in held.findings}
    sibling = tuned(host, devices=(UUIDS[1],)).plan
    assert "device-in-use" not in {f.id for f in sibling.findings}
    (shared,) = [f for f in sibling.findings if f.id == "gpu-shared"]
    assert 2 in numbers(shared.observed) and "o0" in shared.observed
    for gpu, what in (("11:00.0", "4 MIG"), ("81:00.0", "3 mediated"), ("82:00.0", "8 partitions")):
        whole = tuned(host, devices=(Bdf.parse(gpu),)).plan
        (found,) = [f for f in whole.findings if f.id == "gpu-and-its-parts"]
        assert what in found.observed


def test_a_function_of_a_gpu_with_vgpus_that_is_none_itself_is_critical() -> None:
    for bdf, fix in (("81:00.1", UUIDS[0]), ("81:00.4", "current_vgpu_type"), ("12:00.4", "type")):
        made = tuned(divided(), devices=(Bdf.parse(bdf),)).plan
        (found,) = [f for f in made.findings if f.id == "vgpu-missing"]
        assert found.severity == "critical" and fix in str(found.fix)
    fine = tuned(divided(), devices=(Bdf.parse("12:00.1"), UUIDS[0])).plan
    assert "vgpu-missing" not in {f.id for f in fine.findings}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpu_count": 3}, "--gpus 2"),
        ({"gpu_count": 1, "gpu_profile": "1g.10gb"}, "only serve processes of the host"),
        ({"gpu_count": 1, "gpu_profile": "none"}, "no such part"),
        ({"gpu_profile": "A40-12Q"}, "requires --gpus N"),
        ({"devices": ("00000000-0000-4000-8000-000000000000",)}, "the host, which has 3"),
    ],
)
def test_what_no_vm_can_have_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(HomenodeError) as caught:
        tuned(divided(), **options)
    assert expected in str(caught.value) + str(caught.value.hint)


def test_a_document_loses_a_vgpu_to_others_and_an_unknown_one_is_a_gap() -> None:
    host = divided()
    first = tuned(host, devices=(UUIDS[0],)).document
    other = plan_file(
        first,
        "vm",
        PlanOptions(layout="pin-numa-pci", gpu_count=1, gpu_profile="A40-24C"),
        host,
    )
    assert other.plan.mediated_removed == (UUIDS[0],)
    assert UUIDS[0].encode() not in other.document and UUIDS[2].encode() in other.document
    unknown = first.replace(UUIDS[0].encode(), b"11111111-2222-4333-8444-555555555555")
    kept = plan_file(unknown, "vm", PlanOptions(layout="pin-numa-pci"), host)
    assert b"11111111-2222-4333-8444-555555555555" in kept.document
    (gap,) = [gap for gap in kept.plan.gaps if gap.subject.startswith("mediated device")]
    assert "11111111-2222-4333-8444-555555555555" in gap.subject
    facts = build_vm(open_domain(unknown, "vm"))
    assert "device-not-on-host" in {finding.id for finding in check_devices_on_host(facts, host)}
    bare = replace(host, pci_devices=())
    assert "device-not-on-host" not in {
        finding.id for finding in check_devices_on_host(facts, bare)
    }
