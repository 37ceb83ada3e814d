"""Devices of an encrypted guest go through iommufd where libvirt can, and a finding says else."""

import os
import re
from pathlib import Path

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.check.domain.verification import check_versions
from homenode.cli.arguments.place import PlanArguments
from homenode.cli.plan import replace_versions
from homenode.errors import InputError, UsageError
from homenode.machine.topology import Host
from homenode.option import version
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.vm.domain.crosscheck import reject_unsafe
from homenode.vm.domain.iommu import can_accelerate, has_iommufd, list_smmu_buses
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.domain.schema import SCHEMA_PATH, validate
from homenode.vm.layout import PRESETS
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.domain_plans import hand_plan

VM = (Path(__file__).parents[2] / "demo" / "gpu-vm.xml").read_bytes()
ENCRYPTED = (
    VM.replace(b"</devices>", b"</devices><launchSecurity type='sev-snp'/>")
    .replace(b"<hugepages>", b"<!--")
    .replace(b"</hugepages>", b"-->")
    .replace(b"<page size='1' unit='GiB'/>", b"")
)


def on(libvirt: str | None, qemu: str | None, name: str = "hgx-h100") -> Host:
    asked = PlanArguments(
        libvirt=None if libvirt is None else version(libvirt, "--libvirt"),
        qemu=None if qemu is None else version(qemu, "--qemu"),
    )
    return replace_versions(load_host(name), asked)


def tuned(xml: bytes, libvirt: str | None, qemu: str | None = None) -> PlannedFile:
    options = PlanOptions(layout="pin", gpu_count=2, vcpus=8, memory_bytes=64 << 30)
    return plan_file(xml, "vm.xml", options, on(libvirt, qemu))


def missing(tuning: PlannedFile) -> bool:
    return any("(iommufd-missing)" in note for note in tuning.notes)


def test_a_new_libvirt_gives_each_device_iommufd_and_twice_is_once() -> None:
    once = tuned(ENCRYPTED, "12.1", "10.2")
    assert once.document.count(b"<driver iommufd='yes'/>") == 2
    assert not missing(once)
    again = plan_file(once.document, "vm.xml", PlanOptions(layout="pin"), on("12.1", "10.2"))
    assert again.document == once.document


def test_from_12_2_one_element_says_it_for_the_whole_vm_and_twice_is_once() -> None:
    once = tuned(ENCRYPTED, "12.2", "10.2")
    assert once.document.count(b"<iommufd enabled='yes'/>") == 1
    assert b"<driver iommufd" not in once.document
    assert not missing(once)
    assert has_iommufd(open_domain(once.document, "vm"))
    bare = re.sub(rb"<hostdev.*?</hostdev>", b"", once.document, flags=re.DOTALL)
    assert not has_iommufd(open_domain(bare, "vm"))
    again = plan_file(once.document, "vm.xml", PlanOptions(layout="pin"), on("12.2", "10.2"))
    assert again.document == once.document


@pytest.mark.parametrize("version", ["12.1", "12.2"])
def test_what_an_operator_said_stays_unless_it_says_no(version: str) -> None:
    whole = ENCRYPTED.replace(b"<devices>", b"<iommufd enabled='no' fdgroup='iommu'/><devices>")
    made = tuned(whole, version, "10.2").document
    assert made.count(b"<iommufd enabled='yes' fdgroup='iommu'/>") == 1
    assert b"<driver iommufd" not in made
    one = tuned(ENCRYPTED, "12.1", "10.2").document
    off = one.replace(b"<driver iommufd='yes'/>", b"<driver iommufd='no'/>", 1)
    back = plan_file(off, "vm.xml", PlanOptions(layout="pin"), on(version, "10.2")).document
    assert has_iommufd(open_domain(back, "vm")) and not has_iommufd(open_domain(off, "vm"))
    vfio = one.replace(b"<driver iommufd='yes'/>", b"<driver name='vfio'/>")
    made = plan_file(vfio, "vm.xml", PlanOptions(layout="pin"), on("12.2", "10.2")).document
    assert made.count(b"<driver name='vfio'/>") == 2


def test_a_table_says_of_each_layout_what_an_encrypted_guest_gets() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "formats" / "domain-xml.md"
    section = page.read_text().partition("## Encrypted guests")[2]
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    table = {row[0].strip("`"): row[1:3] for row in rows if row[0].strip("`") in PRESETS}
    assert set(table) == set(PRESETS)
    guest = read_vm(ENCRYPTED, "vm")
    for layout, (sev, private) in table.items():
        for kind, said in (("sev", sev), ("sev-snp", private), ("tdx", private)):
            encrypted = structs.replace(guest, launch_security=kind)
            try:
                reject_unsafe(encrypted, hand_plan(encrypted, layout), "vm")
            except InputError:
                assert said == "rejected", (layout, kind)
            else:
                assert said == "written", (layout, kind)


@pytest.mark.parametrize(("libvirt", "qemu"), [("12.0.9", "10.2"), ("12.1", "8.1"), (None, None)])
def test_an_older_one_gets_none_and_a_finding(libvirt: str | None, qemu: str | None) -> None:
    tuning = tuned(ENCRYPTED, libvirt, qemu)
    assert b"iommufd" not in tuning.document
    assert missing(tuning)


def test_a_guest_that_is_not_encrypted_keeps_what_it_has() -> None:
    tuning = tuned(VM.replace(b"<hugepages>", b"<hugepages><!--x-->"), "12.1", "10.2")
    assert b"iommufd" not in tuning.document
    assert not missing(tuning)


@pytest.mark.parametrize("text", ["", "12.x", "1.2.3.4", "-1", "12.", "99999"])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        version(text, "--libvirt")


GRACE = PlanOptions(layout="pin-numa-pci", gpu_count=2, vcpus=8, memory_bytes=16 << 30)


def grace(own: bytes, libvirt: str, qemu: str, options: PlanOptions = GRACE) -> PlannedFile:
    bare = (Path(__file__).parents[1] / "domains" / "aarch64-virt.xml").read_bytes()
    start, end = bare.index(b"    <hostdev"), bare.index(b"  </devices>")
    xml = bare[:start] + own + bare[end:]
    return plan_file(xml, "vm.xml", options, on(libvirt, qemu, "gh200x4"))


@pytest.mark.parametrize("own", [b"", b"<iommu model='smmuv3'/>"])
@pytest.mark.parametrize(("libvirt", "qemu"), [("12.6", "11.1"), ("12.7", "11.0")])
def test_grace_gpus_without_an_smmu_of_their_own_are_a_finding(
    own: bytes, libvirt: str, qemu: str
) -> None:
    made = grace(own, libvirt, qemu)
    assert made.document.count(b"<acpi nodeset='") == 2
    assert made.document.count(b"<iommu model=") == (1 if own else 0)
    assert any(f.id == "smmuv3-omitted" for f in made.findings) == (not own)
    assert not can_accelerate(None, (11, 1, 0))


def test_a_new_libvirt_gives_each_bus_of_a_grace_gpu_an_accelerated_smmu() -> None:
    once = grace(b"", "12.7", "11.1")
    buses = [c.index for c in once.plan.vm.controllers if c.model == "pcie-expander-bus"]
    for bus in buses:
        assert f"<driver pciBus='{bus}' accel='on'/>".encode() in once.document
    assert once.document.count(b"<iommu model='smmuv3'>") == len(buses) == 2
    assert has_iommufd(open_domain(once.document, "vm"))
    assert not any(f.id == "smmuv3-omitted" for f in once.findings)
    again = plan_file(
        once.document, "vm.xml", PlanOptions("pin-numa-pci"), on("12.7", "11.1", "gh200x4")
    )
    assert again.document == once.document
    bare = grace(b"", "12.6", "11.1").document
    assert bare.count(b"<iommu") == 0
    now = plan_file(bare, "vm.xml", PlanOptions("pin-numa-pci"), on("12.7", "11.1", "gh200x4"))
    assert now.document.count(b"<iommu model='smmuv3'>") == 2
    document, older = open_domain(once.document, "vm"), on("12.6", "11.1", "gh200x4")
    too_old = check_versions(document, build_vm(document), older)
    assert "<iommu model='smmuv3'><driver accel=>" in [finding.subject for finding in too_old]


def test_an_arm_guest_keeps_its_smmu_with_over_255_vcpus_or_grace_gpus() -> None:
    own = b"<iommu model='smmuv3'/>"
    made = grace(own, "12.6", "11.1", structs.replace(GRACE, layout="pin-numa", vcpus=280))
    assert own in made.document and b"intremap" not in made.document
    assert grace(own, "12.7", "11.1").document.count(b"<iommu model=") == 1


def test_a_bus_of_two_root_complexes_gets_no_smmu_and_a_finding() -> None:
    both = (Bdf.parse("0006:01:00.0", "nic"), Bdf.parse("0009:01:00.0", "gpu"))
    options = structs.replace(GRACE, max_nodes=1, vcpus=4, devices=both, gpu_count=None)
    made = grace(b"", "12.7", "11.1", options)
    assert b"<iommu" not in made.document
    assert any(f.id == "smmuv3-omitted" for f in made.findings)


def test_a_bus_with_another_device_of_the_guest_gets_no_smmu() -> None:
    host = on("12.7", "11.1", "gh200x4")
    made = grace(b"", "12.7", "11.1")
    guest = build_vm(open_domain(made.document, "vm"))
    shared, other = list_smmu_buses(guest, made.plan, host)
    address = next(c.address for c in guest.controllers if c.address and c.address.bus == shared)
    disk = type(address)(address.domain, shared, address.device, 7)
    guest = structs.replace(guest, addresses=(*guest.addresses, disk))
    assert list_smmu_buses(guest, made.plan, host) == (other,)
    assert list_smmu_buses(guest, made.plan, structs.replace(host, pci_devices=())) == ()


def test_an_smmu_of_a_bus_that_is_no_more_is_removed() -> None:
    stale = b"<iommu model='smmuv3'><driver pciBus='77' accel='on'/></iommu>"
    assert b"pciBus='77'" not in grace(stale, "12.7", "11.1").document
    assert b"pciBus='77'" not in grace(stale, "12.2", "11.1").document


@pytest.mark.lab
def test_the_newest_schema_takes_what_is_written_for_new_versions() -> None:
    """HOMENODE_LIBVIRT_SCHEMA: domain.rng of libvirt 12.7 or newer, of its libvirt-common."""
    schema = Path(os.environ.get("HOMENODE_LIBVIRT_SCHEMA", SCHEMA_PATH))
    common = schema.with_name("domaincommon.rng")
    if not common.is_file() or b'name="cmdqv"' not in common.read_bytes():
        pytest.skip("no schema of libvirt 12.7 or newer: set HOMENODE_LIBVIRT_SCHEMA")
    amd = VM.replace(b"</devices>", b"<iommu model='amd'/></devices>")
    policy = b"<launchSecurity type='sev-snp'><policy>0x30000</policy></launchSecurity>"
    encrypted = ENCRYPTED.replace(b"<launchSecurity type='sev-snp'/>", policy)
    wide = PlanOptions("pin-numa-smt", vcpus=300, memory_bytes=64 << 30)
    for made in (
        grace(b"", "12.8", "11.1"),
        tuned(encrypted, "12.1", "10.2"),
        tuned(encrypted, "12.2", "10.2"),
        plan_file(amd, "vm.xml", wide, on("12.8", "11.1", "epyc9654-2p-1node")),
    ):
        assert validate(made.document, str(schema)) == ((), None)
