"""A virtual host with an IOMMU: real <hostdev>s, each on the guest cell of its host node."""

import pytest

from homenode.cpuset import CpuSet
from homenode.machine.tools.versions import Version
from homenode.vm.domain.merge import is_same_definition
from homenode.vm.domain.read import read_vm
from tests.lab.boot import BootOutcome, boot_with_iommu
from tests.lab.inside import without_iommufd


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> BootOutcome:
    return boot_with_iommu("program_passthrough", tmp_path_factory.mktemp("virtual-host"))


@pytest.mark.lab
def test_the_host_has_iommu_groups_and_vfio_drives_the_nics(booted: BootOutcome) -> None:
    assert int(booted.result("groups")) >= 4
    drivers = booted.report("vm")["drivers"]
    assert len(drivers) == 2
    assert set(drivers.values()) == {"vfio-pci"}


@pytest.mark.lab
def test_each_nic_hangs_on_the_expander_bus_of_the_cell_on_its_node(booted: BootOutcome) -> None:
    report = booted.report("vm")
    guest = read_vm(report["live"].encode(), "live")
    controllers = {c.index: c for c in guest.controllers}
    node_of_cell = {c["id"]: c["host_nodes"][0] for c in report["plan"]["vm"]["cells"]}
    assert len(guest.hostdevs) == 2
    for hostdev in guest.hostdevs:
        assert hostdev.address is not None
        port = controllers[hostdev.address.bus]
        assert port.address is not None
        expander = controllers[port.address.bus]
        assert expander.model == "pcie-expander-bus"
        assert expander.cell is not None
        assert node_of_cell[expander.cell] == report["nodes"][str(hostdev.bdf)]


@pytest.mark.lab
def test_vcpus_and_pages_are_where_they_were_planned(booted: BootOutcome) -> None:
    report = booted.report("vm")
    for i, pin in enumerate(report["plan"]["vm"]["vcpu_pins"]):
        assert CpuSet.parse(report["threads"][f"CPU {i}/TCG"]) == CpuSet.parse(pin)
    large = {
        (policy, node)
        for policy, _, by_node in report["memory"]
        for node, pages in by_node.items()
        if pages > 256
    }
    assert large == {("bind:0", "0"), ("bind:1", "1")}


@pytest.mark.lab
def test_verify_live_finds_nothing_wrong(booted: BootOutcome) -> None:
    found = booted.report("vm")["findings"]["findings"]
    bad = [f for f in found if f["severity"] in ("critical", "warning")]
    # No one balances interrupts in there: the kernel serves one wherever it has a vector left.
    assert not [f for f in bad if f["id"] != "live-interrupts"]


@pytest.mark.lab
def test_a_running_domain_is_not_redefined_but_its_threads_can_move(booted: BootOutcome) -> None:
    assert "(running)" in booted.report("refused")
    before, after = booted.report("moved")
    assert before and after


@pytest.mark.lab
def test_restore_gives_the_definition_back(booted: BootOutcome) -> None:
    before, after = booted.report("restored")
    assert is_same_definition(after.encode(), before.encode())


@pytest.mark.lab
def test_devices_go_through_iommufd_where_libvirt_qemu_and_the_kernel_have_it(
    booted: BootOutcome,
) -> None:
    found = booted.report("iommufd")
    if "not tried" in found:
        pytest.skip(f"iommufd was not tried: {found['not tried']}")
    opened = found["devices"]
    assert "/dev/iommu" in opened
    assert sum(name.startswith("/dev/vfio/devices/vfio") for name in opened) == 2


EVERY = (
    "libvirt 9.0.0 (iommufd is in 12.1.0), QEMU 7.2.22 (iommufd is in 8.2.0), "
    "a kernel without /dev/iommu"
)


@pytest.mark.parametrize(
    ("libvirt", "qemu", "has_device", "why"),
    [
        ((9, 0, 0), (7, 2, 22), False, EVERY),
        ((12, 0, 0), (8, 2, 0), True, "libvirt 12.0.0 (iommufd is in 12.1.0)"),
        ((12, 1, 0), (8, 1, 5), True, "QEMU 8.1.5 (iommufd is in 8.2.0)"),
        ((12, 1, 0), None, True, "QEMU of no known version (iommufd is in 8.2.0)"),
        ((12, 1, 0), (8, 2, 0), False, "a kernel without /dev/iommu"),
        ((12, 1, 0), (8, 2, 0), True, None),
        ((13, 0, 0), (11, 0, 0), True, None),
    ],
)
def test_the_lab_tries_iommufd_where_every_version_has_it(
    libvirt: Version, qemu: Version | None, has_device: bool, why: str | None
) -> None:
    assert without_iommufd(libvirt, qemu, has_device=has_device) == why
