"""A real libvirtd takes what the hook gives, and a booted guest sees its GPUs where they are."""

import os
from pathlib import Path

import pytest

from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.check.verify.expectation import build_expectation
from homenode.check.verify.guest_checks import compare_test_guest
from homenode.cluster.kubevirt.placing import place_devices
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import validate
from homenode.vm.model import expander_above
from homenode.vm.plan_options import PciGranularity
from tests.domain.test_libvirt import libvirt, virsh
from tests.kubevirt_documents import (
    IBM,
    IBM_GPUS,
    defined_again,
    document,
    ibm_document,
    shipped,
)
from tests.verify_guests import guest_files

NAME = f"homenode-test-kubevirt-{os.getpid()}"
PINS = ((4, 5), (64, 65))
"""A small VM on both nodes of IBM's host."""

__all__ = ["libvirt"]


def valid(xml: str) -> str:
    """KubeVirt gives a <source>'s address a type, which libvirt takes but its schema does not."""
    return xml.replace('<source><address type="pci" ', "<source><address ")


def placed(xml: str) -> bytes:
    return place_devices(xml.encode(), shipped(IBM)).document


def test_the_installed_schema_takes_what_the_hook_gives() -> None:
    for xml in (ibm_document(), document(IBM_GPUS[:3], pins=PINS)):
        errors, gap = validate(placed(valid(xml)))
        if gap is not None:
            pytest.skip(str(gap))
        assert not errors
        assert validate(placed(xml)) == validate(xml.encode()), "no new error"


@pytest.mark.libvirt
@pytest.mark.parametrize("vm", ["ibm", "small"])
def test_libvirt_and_the_hook_take_each_others(libvirt: None, tmp_path: Path, vm: str) -> None:
    given = {"kind": "qemu", "name": NAME}
    xml = ibm_document(**given) if vm == "ibm" else document(IBM_GPUS, pins=PINS, **given)  # type: ignore[arg-type]
    path = tmp_path / "placed.xml"
    path.write_bytes(placed(valid(xml)))
    defined = virsh("define", "--validate", str(path))
    assert defined.returncode == 0, defined.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    assert printed.count("<model name='pxb-pcie'/>") == 2
    assert placed(printed) == printed.encode()


@pytest.mark.libvirt
def test_a_second_definition_has_the_firsts_places(libvirt: None, tmp_path: Path) -> None:
    """It has what libvirt printed of the first, without <target>; libvirt's own ports with it."""
    nic = '<interface type="user"><model type="virtio-non-transitional"/></interface>'
    before = valid(document(IBM_GPUS, pins=PINS, kind="qemu", name=NAME, controllers=nic))
    path = tmp_path / "placed.xml"
    printed: list[str] = []
    for _ in range(2):
        xml = defined_again(before, printed[-1]) if printed else before
        path.write_bytes(placed(xml))
        defined = virsh("define", "--validate", str(path))
        assert defined.returncode == 0, defined.stderr
        printed.append(virsh("dumpxml", "--inactive", NAME).stdout)
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    first, second = (build_vm(open_domain(xml.encode(), "vm.xml")) for xml in printed)
    assert second.controllers == first.controllers
    assert second.hostdevs == first.hostdevs
    assert sorted(c.cell for c in second.controllers if c.cell is not None) == [0, 1]


@pytest.mark.libvirt
@pytest.mark.parametrize("granularity", PciGranularity)
def test_other_devices_stay_off(libvirt: None, tmp_path: Path, granularity: PciGranularity) -> None:
    """As KubeVirt has it: empty root ports for hot-plug, and devices that libvirt is to place."""
    loose = "".join(f'<controller type="pci" index="{i}" model="pcie-root-port"/>' for i in (1, 2))
    loose += (
        '<disk type="file" device="disk"><source file="/none"/><target dev="vda" bus="virtio"/>'
        '</disk><interface type="user"><model type="virtio-non-transitional"/></interface>'
    )
    text = document(IBM_GPUS[1:6], pins=PINS, kind="qemu", name=NAME, controllers=loose)
    written = place_devices(valid(text).encode(), shipped(IBM), granularity=granularity).document
    path = tmp_path / "placed.xml"
    path.write_bytes(written)
    defined = virsh("define", "--validate", str(path))
    assert defined.returncode == 0, defined.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    ours, theirs = (build_vm(open_domain(xml, "vm.xml")) for xml in (written, printed.encode()))
    places = {hostdev.bdf: hostdev.address for hostdev in ours.hostdevs}
    assert {hostdev.bdf: hostdev.address for hostdev in theirs.hostdevs} == places
    controllers = {controller.index: controller for controller in theirs.controllers}
    ports = {controller.address for controller in theirs.controllers}
    others = set(theirs.addresses) - set(places.values()) - ports
    assert others
    assert not [at for at in others if expander_above(controllers, at.bus) is not None]


@pytest.mark.nightly
@pytest.mark.qemu
def test_a_booted_guest_reports_the_node_of_each_of_ibms_eight_gpus() -> None:
    """The article's tree and devices; 4 vCPUs for its 200, which say nothing of where GPUs are."""
    guest_files()
    opened = open_domain(placed(document(IBM_GPUS, pins=PINS)), "vm.xml")
    facts = build_vm(opened)
    booted = boot_stand_in(opened, facts, BootOptions(connect="none", timeout_s=600))
    assert booted.guest is not None, booted.findings
    seen = compare_test_guest(build_expectation(facts), booted.stand_in, booted.guest)
    node_of_gpu = {
        line.subject.removeprefix("device 0000:"): line.observed.partition(",")[0]
        for line in seen.checks
        if line.subject.startswith("device ")
    }
    assert node_of_gpu == {bdf: f"numa_node {int(i >= 4)}" for i, bdf in enumerate(IBM_GPUS)}
