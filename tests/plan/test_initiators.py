"""Grace GPUs get the guest cells in which the guest's driver puts their own memory online."""

import pytest
from lxml import etree
from msgspec import structs
from msgspec.structs import replace

from homenode.check.domain.verification import as_planned
from homenode.check.verify.guest.expectation import expectation_of
from homenode.cpuset import CpuSet
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.show.explain import explain
from homenode.units import GIB
from homenode.vm.domain.codec import INITIATORS, required_versions
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.plan import Plan
from homenode.vm.sources import load_host
from tests.explained import explained
from tests.guest_shapes import placed
from tests.small_hosts import small_request

GH200 = load_host("gh200x4")
GPU = str(GH200.devices_of_kind(DeviceKind.GPU)[0].bdf)
DOCUMENT = b"""<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>4</memory>
  <vcpu>4</vcpu>
  <os><type arch='aarch64' machine='virt'>hvm</type></os>
  <cpu mode='host-passthrough'/>
  <devices/>
</domain>
"""


def host(libvirt: tuple[int, int, int] | None, qemu: tuple[int, int, int] | None = None) -> Host:
    settings = structs.replace(GH200.settings, libvirt_version=libvirt, qemu_version=qemu)
    return structs.replace(GH200, settings=settings)


NEW = host((11, 8, 0), (9, 2, 0))


def request(layout: str = "pin-numa-pci") -> GuestRequest:
    asked = small_request(4, 4 * GIB, layout=layout, devices=[GPU])
    return replace(
        asked, guest=structs.replace(asked.guest, architecture="aarch64", machine="virt")
    )


def plan_on(machine: Host, layout: str = "pin-numa-pci") -> Plan:
    return assemble(machine, request(layout), placed((4,), devices=[GPU]))


def nodesets(document: bytes) -> list[str | None]:
    found = etree.fromstring(document).iterfind(".//hostdev/acpi")
    return [acpi.get("nodeset") for acpi in found]


def test_eight_cells_without_vcpus_and_memory_follow_the_cells_of_the_vm() -> None:
    plan = plan_on(NEW)
    assert [len(cell.vcpus) for cell in plan.cells] == [4] + [0] * 8
    assert [cell.memory_bytes for cell in plan.cells] == [4 * GIB] + [0] * 8
    assert [cell.host_nodes for cell in plan.cells[1:]] == [(node,) for node in range(4, 12)]
    assert plan.cells[0].distances == (10, *[80] * 8)
    assert plan.vm.hostdevs[0].initiator_cells == CpuSet(range(1, 9))
    assert "initiators-missing" not in [finding.id for finding in plan.findings]
    assert INITIATORS in required_versions(plan, is_virt=True)
    assert domain_of_plan(plan).memory_by_node == ((0, 4 * GIB),)
    lines = [line for section in explained(explain(plan, NEW)) for line in section.lines]
    assert any(line.startswith("Guest nodes 1-8 are for the memory of GPU") for line in lines)


def test_the_document_names_them_and_a_flat_layout_takes_them_back() -> None:
    plan = plan_on(NEW)
    tuned = rewrite(DOCUMENT, plan)
    assert nodesets(tuned) == ["1-8"] and tuned.count(b"<cell ") == 9
    assert rewrite(tuned, plan) == tuned
    document = open_domain(tuned, "vm.xml")
    facts = vm_of(document)
    assert not list(as_planned(document, facts, plan))
    for expected in (expectation_of(plan.vm), expectation_of(facts)):
        assert [cell.id for cell in expected.cells] == [0]
        assert expected.distances in (None, ((10,),))
    assert nodesets(rewrite(tuned, plan_on(NEW, "pin"))) == []


@pytest.mark.parametrize(
    ("machine", "layout", "said"),
    [
        (host(None), "pin-numa-pci", "found libvirt unknown and QEMU unknown"),
        (host((10, 0, 0), (9, 0, 0)), "pin-numa-pci", "found libvirt 10.0.0 and QEMU 9.0.0"),
        (host((12, 0, 0), (8, 2, 0)), "pin-numa-pci", "found libvirt 12.0.0 and QEMU 8.2.0"),
        (NEW, "pin-numa", "this layout gives none"),
        (NEW, "default", "this layout gives none"),
        (
            structs.replace(
                NEW, nodes=tuple(structs.replace(n, generic_initiator=False) for n in NEW.nodes)
            ),
            "pin-numa-pci",
            "found none or an uneven number",
        ),
    ],
)
def test_where_they_cannot_be_given_a_finding_says_why(
    machine: Host, layout: str, said: str
) -> None:
    plan = plan_on(machine, layout)
    assert len(plan.cells) == 1 and not plan.vm.hostdevs[0].initiator_cells
    (finding,) = [finding for finding in plan.findings if finding.id == "initiators-missing"]
    assert finding.subject == GPU and said in finding.observed
    # Programs that are not known cannot be updated.
    asks_for_host = finding.fix is not None and finding.fix.startswith("plan on the host itself")
    assert asks_for_host is ("libvirt unknown" in said)
