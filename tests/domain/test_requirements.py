"""Requirements and launch security: who is too old, and what encrypted guests cannot have."""

import pytest
from msgspec import structs

from homenode.errors import HostError, InputError
from homenode.machine.description.parse import load_shipped
from homenode.plan.pipeline import plan_file
from homenode.units import GIB
from homenode.vm.domain.codec import SINCE, list_required_versions, reject_older
from homenode.vm.domain.crosscheck import (
    check_launch_security,
    check_vcpus,
    find_max_vcpus,
    reject_unsafe,
)
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.layout import PRESETS
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan import Aperture, with_vm
from homenode.vm.plan_options import PlanOptions
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan

GUEST = read_vm(sample("study"), "study")
EXPANDER, SWITCH = PortModel.EXPANDER_BUS, PortModel.SWITCH_UPSTREAM


def protected(kind: str) -> Vm:
    return structs.replace(GUEST, launch_security=kind)


def test_each_layout_names_what_it_writes() -> None:
    def elements(layout: str) -> set[str]:
        return {need.element for need in list_required_versions(hand_plan(GUEST, layout))}

    assert elements("default") == set()
    assert "<vcpupin>" in elements("pin")
    assert "<cell><distances>" not in elements("pin-bound")
    assert {"<memnode>", "<cell><distances>"} <= elements("pin-numa")
    unbound = hand_plan(GUEST, "pin-numa")
    unbound = structs.replace(unbound, vm=structs.replace(unbound.vm, binding=None))
    assert "<memnode>" not in {need.element for need in list_required_versions(unbound)}
    assert "<controller model='pcie-expander-bus'>" in elements("pin-numa-pci")


def test_an_older_daemon_is_refused_by_the_name_of_the_element() -> None:
    plan = hand_plan(GUEST, "pin-numa-pci", aperture=Aperture(None, 46, None, 0, 0))
    with pytest.raises(HostError) as raised:
        reject_older(plan, (1, 2, 0), (6, 2, 0))  # the newest of all that are missing
    assert str(raised.value).startswith(
        "<maxphysaddr> (layout pin-numa-pci): expected libvirt 8.7.0 or newer, found 1.2.0"
    )
    existing = tuple(structs.replace(c, existing=True) for c in plan.vm.controllers)
    there = structs.replace(plan, vm=structs.replace(plan.vm, controllers=existing), aperture=None)
    named = {need.element for need in list_required_versions(there, is_virt=True)}
    assert not any("<controller" in element or "<model" in element for element in named)
    switch = {need.element for need in list_required_versions(plan) if "switch" in need.element}
    arm = {need.element for need in list_required_versions(plan) if "aarch64" in need.element}
    assert (switch, arm) == (set(), set())
    with pytest.raises(HostError, match=r"QEMU 6\.0\.0 or newer, found 5\.2\.0"):
        reject_older(hand_plan(GUEST, "pin-numa-pci"), None, (5, 2, 0), is_virt=True)


BARE = """<domain type='kvm'><name>d</name><memory unit='GiB'>2</memory><vcpu>2</vcpu>
<os><type arch='{}' machine='{}'>hvm</type></os>{}</domain>"""
CELL = "<cpu><numa><cell id='0' cpus='0-1' memory='2' unit='GiB'>{}</cell></numa></cpu>"
PCI = "<devices><controller type='pci' index='{}' model='{}'/></devices>"
IOMMU = "<devices><iommu model='{}'><driver {}='on'/></iommu></devices>"
X86, ARM = ("x86_64", "q35"), ("aarch64", "virt")


@pytest.mark.parametrize(
    ("guest", "inside", "expected"),
    [
        (X86, "", set()),
        (X86, "<cputune><iothreadpin iothread='1' cpuset='0'/></cputune>", {"<iothreadpin>"}),
        (X86, CELL.format(""), {"<numa><cell>"}),
        (
            X86,
            CELL.format("<distances><sibling id='0' value='10'/></distances>"),
            {"<numa><cell>", "<cell><distances>"},
        ),
        (X86, "<cpu><topology sockets='1' dies='1' cores='2' threads='1'/></cpu>", set()),
        (
            X86,
            "<cpu><topology sockets='1' dies='2' cores='1' threads='1'/></cpu>",
            {"<topology dies=>"},
        ),
        (
            X86,
            "<cpu><feature policy='disable' name='topoext'/></cpu>",
            {"<feature name='topoext'>"},
        ),
        (X86, "<cpu><cache mode='disable'/></cpu>", {"<cpu><cache>"}),
        (X86, "<cpu><maxphysaddr mode='emulate' bits='46'/></cpu>", {"<maxphysaddr>"}),
        (
            X86,
            "<numatune><memnode cellid='0' mode='strict' nodeset='0'/></numatune>",
            {"<memnode>"},
        ),
        (X86, "<memoryBacking><hugepages/></memoryBacking>", set()),
        (
            X86,
            "<memoryBacking><hugepages><page size='2' unit='M'/></hugepages></memoryBacking>",
            {"<hugepages><page>"},
        ),
        (X86, PCI.format(1, "pcie-root-port"), set()),
        (X86, PCI.format(1, EXPANDER), {f"<controller model='{EXPANDER}'>"}),
        (ARM, PCI.format(1, EXPANDER), {f"<controller model='{EXPANDER}'> on aarch64 virt"}),
        (X86, PCI.format(1, SWITCH), {f"<controller model='{SWITCH}'>"}),
        (
            X86,
            PCI.format(0, "pcie-root").replace("/>", "><pcihole64>1</pcihole64></controller>", 1),
            {"<pcihole64>"},
        ),
        (X86, "<devices><iommu model='intel'/></devices>", set()),
        (X86, IOMMU.format("intel", "eim"), {"<iommu><driver eim=>"}),
        (ARM, IOMMU.format("smmuv3", "accel"), {"<iommu model='smmuv3'><driver accel=>"}),
    ],
)
def test_a_definition_needs_what_it_has_and_nothing_else(
    guest: tuple[str, str], inside: str, expected: set[str]
) -> None:
    document = open_domain(BARE.format(*guest, inside).encode(), "d.xml")
    vm = build_vm(document)
    assert {row.element for row in SINCE if row.is_in(document, vm)} == expected


def test_a_version_that_is_not_known_is_not_judged() -> None:
    for layout in PRESETS:
        reject_older(hand_plan(GUEST, layout), None, None)
        reject_older(hand_plan(GUEST, layout), (9, 0, 0), (7, 2, 0))


@pytest.mark.parametrize(
    ("machine", "qemu", "most"),
    [
        ("pc-q35-2.7", None, 255),
        ("pc-q35-7.2", (9, 2, 0), 288),
        ("pc-q35-8.1", None, 1024),
        ("pc-q35-9.0", None, 4096),
        ("pc-q35-10.0", None, 4096),
        ("q35", (7, 2, 0), 288),
        ("q35", (9, 1, 0), 4096),
        ("q35", None, None),
        ("pc", None, 255),
        ("pc-i440fx-9.0", None, 255),
        ("virt-2.12", None, 255),
        ("virt", (8, 0, 0), 512),
        ("pc-q35-rhel9.4.0", (9, 1, 0), None),
        (None, (9, 1, 0), None),
    ],
)
def test_a_machine_type_takes_so_many_vcpus(
    machine: str | None, qemu: tuple[int, int, int] | None, most: int | None
) -> None:
    assert find_max_vcpus(machine, qemu) == most


def test_more_vcpus_than_the_machine_type_takes_are_refused_by_its_name() -> None:
    guest = structs.replace(GUEST, machine="pc-q35-7.2")
    assert check_vcpus(guest, 288, None) == ()
    with pytest.raises(InputError, match=r"at most 288 vCPUs.*pc-q35-7\.2 takes, found 320"):
        check_vcpus(guest, 320, (9, 2, 0))
    with pytest.raises(InputError, match=r"q35 of QEMU 7\.2\.0 takes, found 289"):
        check_vcpus(structs.replace(GUEST, machine="q35"), 289, (7, 2, 0))
    arm = structs.replace(GUEST, architecture="aarch64", machine="virt")
    with pytest.raises(InputError) as error:
        check_vcpus(arm, 513, (8, 0, 0))
    assert error.value.hint is not None and "q35" not in error.value.hint


def test_a_limit_that_is_not_known_is_a_finding_where_it_may_matter() -> None:
    guest = structs.replace(GUEST, machine="pc-q35-rhel9.4.0")
    assert check_vcpus(guest, 255, None) == ()
    assert [finding.id for finding in check_vcpus(guest, 256, None)] == ["vcpu-limit-unknown"]


def test_siblings_that_double_the_vcpus_count_against_the_machine_type() -> None:
    host = load_shipped("x86-2p8n128c256t-64gpu").host
    xml = (
        b"<domain type='kvm'><name>d</name><memory unit='GiB'>8</memory><vcpu>128</vcpu>"
        b"<os><type arch='x86_64' machine='pc-q35-2.7'>hvm</type></os>"
        b"<cpu mode='host-passthrough'/></domain>"
    )
    with pytest.raises(InputError, match=r"at most 255 vCPUs.*found 256"):
        plan_file(xml, "vm.xml", PlanOptions("pin-numa-smt"), host)


@pytest.mark.parametrize("kind", ["sev-snp", "tdx"])
def test_private_memory_has_no_huge_pages_and_no_binding_per_cell(kind: str) -> None:
    guest = protected(kind)
    with pytest.raises(InputError, match="has no huge pages"):
        reject_unsafe(guest, hand_plan(guest, "pin", page_bytes=GIB), "vm.xml")
    has_pages = structs.replace(guest, page_bytes=GIB)  # for its shared memory
    reject_unsafe(has_pages, hand_plan(has_pages, "pin", page_bytes=GIB), "vm.xml")
    with pytest.raises(InputError, match="the bindings of 2 cells"):
        reject_unsafe(guest, hand_plan(guest, "pin-numa"), "vm.xml")
    reject_unsafe(guest, hand_plan(guest, "pin"), "vm.xml")
    reject_unsafe(guest, hand_plan(guest, "pin-bound"), "vm.xml")
    plan = hand_plan(guest, "pin-numa")
    reject_unsafe(guest, with_vm(plan, cells=plan.vm.cells[:1]), "vm.xml")


def test_an_encrypted_guest_gets_no_iommu() -> None:
    with pytest.raises(InputError, match="cannot read the encrypted memory"):
        reject_unsafe(protected("sev"), hand_plan(GUEST, "pin", iommu_needed=True), "vm.xml")
    reject_unsafe(protected("sev"), hand_plan(GUEST, "pin-numa", page_bytes=GIB), "vm.xml")


def test_rewriting_refuses_what_is_unsafe() -> None:
    xml = sample("study").replace(b"</devices>\n", b"</devices>\n  <launchSecurity type='tdx'/>\n")
    guest = read_vm(xml, "vm.xml")
    with pytest.raises(InputError, match="--layout pin or pin-bound"):
        rewrite(xml, hand_plan(guest, "pin-numa"))
    assert b"<launchSecurity type='tdx'/>" in rewrite(xml, hand_plan(guest, "pin"))


def test_a_plan_that_changes_the_measurement_says_so() -> None:
    (finding,) = check_launch_security(protected("sev-snp"), hand_plan(GUEST, "pin-numa-pci-smt"))
    assert finding.severity == "warning"
    for part in ("vCPUs 56 to 112", "CPU topology", "PCI roots", "cells"):
        assert part in finding.observed
    assert not [*check_launch_security(protected("sev-snp"), hand_plan(GUEST, "pin"))]
    assert not [*check_launch_security(GUEST, hand_plan(GUEST, "pin-numa-pci"))]
