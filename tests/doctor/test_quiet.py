"""Isolation, interrupts, idle states and governors are judged for the CPUs of the vCPUs alone."""

import pytest

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.domain.cores import read_rcu_nocbs
from homenode.cpuset import CpuSet
from homenode.findings import Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.vm.domain.read import open_domain
from tests.doctor_cases import HGX, ISOLATED, NIC, changed, interrupting, quiet, set_apart, settings
from tests.doctor_domains import NAME, binding, board, diagnosed, domain, gpus, host, ids, planned
from tests.doctor_guest_cases import H200, companion, snp

DESKTOP = "rtx4080-i9-14900k"


def idling(deep: CpuSet) -> Host:
    """The desktop with deep idle states on some CPUs and shallow ones on the others."""
    others = CpuSet(pu.index for pu in host(DESKTOP).pus) - deep
    return settings(host(DESKTOP), pus_of_idle_latency_us=((2, others), (890, deep)))


def test_idle_states_are_those_of_the_vcpus() -> None:
    xml = domain(2, pins=[0, 2])
    (finding,) = (f for f in diagnosed(xml, idling(CpuSet((2, 3)))) if f.id == "idle-deep")
    assert "CPU 2" in finding.subject and "cpupower -c 2 idle-set" in (finding.fix or "")
    assert "idle-deep" not in ids(diagnosed(xml, idling(CpuSet(range(4, 32)))))


@pytest.mark.parametrize(("slow", "found"), [((0, 2), True), ((16, 17), False)])
def test_a_governor_is_that_of_the_vcpus(slow: tuple[int, ...], found: bool) -> None:
    pus = CpuSet(slow)
    others = CpuSet(pu.index for pu in host(DESKTOP).pus) - pus
    there = settings(
        host(DESKTOP),
        scaling_drivers=("acpi-cpufreq",),
        pus_of_governor=(("performance", others), ("powersave", pus)),
    )
    names = ids(diagnosed(domain(2, pins=[0, 2]), there))
    assert ("governor-powersave" in names) is found


@pytest.mark.parametrize(
    ("line", "pus"),
    [
        ("ro quiet", ""),
        ("rcu_nocbs=4-7,12", "4-7,12"),
        ("rcu_nocbs", ""),
        ("rcu_nocbs=all", "0-31"),
        ("rcu_nocbs=16-N", "0-31"),
    ],
)
def test_rcu_nocbs_is_read_from_the_command_line(line: str, pus: str) -> None:
    there = settings(host(ISOLATED), kernel_command_line=line)
    assert read_rcu_nocbs(there) == CpuSet.parse(pus)


def test_an_unknown_command_line_is_not_judged() -> None:
    there = settings(set_apart(host(ISOLATED), range(4, 8), nohz=False), kernel_command_line=None)
    assert read_rcu_nocbs(there) is None
    assert "isolated-with-tick" not in ids(diagnosed(domain(2, pins=[4, 5]), there))


def test_a_tick_without_rcu_callbacks_is_distinguished() -> None:
    there = settings(
        set_apart(host(ISOLATED), [*range(4, 8), *range(20, 24)], nohz=False),
        kernel_command_line="isolcpus=4-7,20-23 rcu_nocbs=4-7,20-23",
    )
    (finding,) = (
        f for f in diagnosed(domain(2, pins=[4, 5]), there) if f.id == "isolated-with-tick"
    )
    assert finding.severity is Severity.INFO and "rcu_nocbs" not in finding.observed


@pytest.mark.parametrize("driver", [None, "vfio-pci", "mlx5_vfio_pci"])
def test_interrupts_of_devices_that_vms_have_are_not_the_hosts(driver: str | None) -> None:
    there = set_apart(host(HGX), range(8, 12))
    there = interrupting(there, NIC, ["9"], driver or "x")
    if driver is None:
        there = changed(there, lambda d: d.bdf == NIC, driver=None)
    assert "irq-on-isolated" not in ids(quiet(there))


def test_interrupts_of_ports_and_on_other_pus_are_nothing() -> None:
    apart = set_apart(host(HGX), range(8, 12))
    port = next(d.bdf for d in apart.pci_devices if d.kind is DeviceKind.BRIDGE)
    assert "irq-on-isolated" not in ids(quiet(interrupting(apart, port, ["9"], "pcieport")))
    assert "irq-on-isolated" not in ids(quiet(interrupting(apart, NIC, ["0", "1"])))
    # One that may go to many CPUs is not bound to the vCPU's.
    assert "irq-on-isolated" not in ids(quiet(interrupting(apart, NIC, ["0-55"])))


def test_mappings_are_compared_with_the_limit_that_the_host_has() -> None:
    assert "dma-map-limit" in ids(snp(256))
    assert "dma-map-limit" not in ids(snp(256, settings(host(H200), dma_entry_limit=1 << 20)))
    assert "dma-map-limit" not in ids(snp(256, iommufd=True))


@pytest.mark.parametrize(
    ("gib", "bits"), [(64, 43), (2048, 43), (4092, 43), (4093, 44), (8188, 44), (12285, 45)]
)
def test_what_a_vm_needs_is_reckoned_and_never_short(gib: int, bits: int) -> None:
    """The window of 4 TiB lies at the next multiple of itself above the memory and 4 GiB."""
    there = host(H200)
    found = diagnose(there, open_domain(domain(8, gpus(H200, 7), gib=gib), NAME))
    (line,) = (each for each in found.checked if "64-bit window" in each)
    assert f"{gib + 1} GiB locked" in line
    assert f"4 TiB of 64-bit window, {bits} address bits" in line


def test_each_device_locks_the_memory_anew_behind_a_viommu() -> None:
    xml = domain(8, gpus(H200, 7), gib=64)
    iommu = xml.replace(b"</devices>", b"<iommu model='intel'/></devices>")
    (line,) = (
        each for each in diagnose(host(H200), open_domain(iommu, NAME)).checked if "locked" in each
    )
    assert f"{7 * 65} GiB locked" in line


def test_bridges_of_any_kind_in_a_devices_group_are_no_companions() -> None:
    """No one misses an ISA bridge, or the DMA engine of a switch that calls itself a bridge."""
    xml = domain(2, gpus(DESKTOP, 1))
    assert "iommu-group-companions" in ids(diagnosed(xml, companion(9)))
    bridge = changed(
        companion(9),
        lambda d: d.kind is DeviceKind.NVME,
        class_code=0x068000,
        kind=DeviceKind.OTHER,
    )
    assert "iommu-group-companions" not in ids(diagnosed(xml, bridge))


def test_without_irqbalance_ordinary_pus_may_handle_interrupts() -> None:
    there = interrupting(host(HGX), NIC, ["9"])
    assert not {"irqbalance-on-vcpus", "irq-on-isolated"} & set(ids(quiet(there)))


def test_vcpus_that_float_over_a_node_are_not_judged() -> None:
    there = interrupting(set_apart(host(HGX), range(8, 12)), NIC, ["9"])
    xml = domain(4, gpus(HGX, 1), gib=8, pins=["0-55"] * 4)
    assert "irq-on-isolated" not in ids(diagnosed(xml, there))


def test_a_well_placed_vm_on_a_well_kept_host_gets_nothing() -> None:
    """One interrupt a CPU for drives, the NIC's on the host's own CPUs, and idle states of 2 µs."""
    xml = planned(domain(88, board(HGX), gib=1024), HGX, "pin-numa-pci")
    everywhere = [str(pu.index) for pu in host(HGX).pus]
    drive = host(HGX).devices_of_kind(DeviceKind.NVME)
    there = settings(
        host(HGX),
        irqbalance=True,
        scaling_drivers=("intel_pstate",),
        pus_of_idle_latency_us=((2, CpuSet(pu.index for pu in host(HGX).pus)),),
    )
    there = interrupting(there, NIC, ["50", "51"])
    for bdf in [each.bdf for each in drive[:1]] or [Bdf.parse("1a:00.0")]:
        there = interrupting(there, bdf, everywhere, "nvme")
    assert diagnosed(xml, there) == ()


def test_an_emulator_on_every_node_of_huge_pages_may_be_on_siblings() -> None:
    """QEMU would not start with its threads on another node's free cores."""
    there = host("rtx4090-epyc7702")
    pages = "<memoryBacking><hugepages/></memoryBacking>"
    xml = domain(48, pins=range(48), cputune="<emulatorpin cpuset='64,80,96'/>", more=pages)
    bound = xml.replace(b"</memoryBacking>", b"</memoryBacking>" + binding([0, 1, 2]).encode())
    assert "emulator-on-sibling" in ids(diagnosed(xml, there))
    assert "emulator-on-sibling" not in ids(diagnosed(bound, there))
    near = bound.replace(b"<vcpupin vcpu='15' cpuset='15'/>", b"<vcpupin vcpu='15' cpuset='14'/>")
    assert "emulator-on-sibling" in ids(diagnosed(near, there))
