"""Findings of a document: what neither the planner nor libvirt would say."""

from homenode.findings import Finding
from homenode.vm.domain.limits import document_findings
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.model import GuestAddress, GuestPciController, PortModel
from homenode.vm.plan import Aperture, Plan, with_vm
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan

DISK = b"""<disk type='file' device='disk'>
      <source file='/d.img'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <memballoon"""


def _findings(xml: bytes, plan: Plan) -> tuple[Finding, ...]:
    return document_findings(xml, rewrite(xml, plan), plan)


def test_spare_ports_that_libvirt_would_fill_are_reported() -> None:
    xml = sample("study").replace(b"<memballoon", DISK)
    plan = hand_plan(read_vm(xml, "x"), "pin-numa-pci")
    assert _findings(xml, plan) == ()
    spare = GuestPciController(9, PortModel.ROOT_PORT, GuestAddress(0, 1, 31, 0), existing=False)
    roomy = with_vm(plan, controllers=(*plan.vm.controllers, spare))
    (finding,) = _findings(xml, roomy)
    assert finding.id == "libvirt-fills-ports"
    assert finding.subject == "1 empty ports on expander buses"
    assert "<disk>" in finding.observed
    assert _findings(sample("study"), roomy) == ()


def test_a_command_line_of_ours_is_reported_and_one_that_was_there_is_not() -> None:
    space = Aperture(None, None, 262_144, 0, 0)
    xml = sample("study")
    (finding,) = _findings(xml, hand_plan(read_vm(xml, "x"), "pin", aperture=space))
    assert finding.id == "qemu-commandline"
    xml = sample("qemu-commandline")
    plan = hand_plan(read_vm(xml, "x"), "pin", aperture=space)
    assert _findings(xml, plan) == ()
