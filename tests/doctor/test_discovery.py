"""What the doctor needs of a host is discovered from sysfs and tools, and absent where unknown."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.doctor.host_settings import check_layout
from homenode.cpuset import CpuSet
from homenode.machine.description.parse import load_shipped
from homenode.machine.discover.host import discover
from homenode.machine.discover.lspci import add_lspci, host_from_lspci
from homenode.machine.discover.pci_tree import parse_config
from homenode.machine.pci import PciErrors, PciInterrupt
from homenode.machine.snapshot.collector import parse_collected
from homenode.machine.snapshot.contents import COMMAND_OF_NAME
from homenode.machine.snapshot.gather import gather
from homenode.machine.snapshot.live import QuietSnapshot
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.tools.nvidia_smi import parse_query
from tests.doctor_cases import changed
from tests.doctor_domains import host
from tests.rendered.machine import render
from tests.shared_data import needs_shared, shared
from tests.sysfs_trees import CPU, NODE, cpu_files, snapshot

GPU = Bdf.parse("01:00.0")
OF_GPU = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


def desktop(files: Mapping[str, str] = {}, directories: tuple[str, ...] = ()) -> MemorySnapshot:
    """The desktop's tree, with more files."""
    below = render(load_shipped("rtx4080-i9-14900k"))
    return MemorySnapshot(
        below.name, {**below.files, **files}, below.links, below.commands, directories
    )


def overlaid(**files: str) -> MemorySnapshot:
    """The desktop's tree; keywords: files of the GPU's directory."""
    return desktop({f"{OF_GPU}/{name}": text for name, text in files.items()})


def test_errors_power_and_domains_are_read() -> None:
    tree = overlaid(
        power_state="D3hot\n",
        aer_dev_correctable="RxErr 0\nBadTLP 1200\nTOTAL_ERR_COR 1200\n",
        aer_dev_nonfatal="Undefined 0\nTOTAL_ERR_NONFATAL 0\n",
    )
    device = discover(tree).device_at[GPU]
    assert device.power_state == "D3hot"
    assert device.errors == PciErrors((("BadTLP", 1200),))
    assert "pcie-errors-corrected" in {f.id for f in diagnose(discover(tree)).findings}
    replaying = changed(discover(tree), lambda one: one.bdf == GPU, link_replays=5000)
    (found,) = (f for f in diagnose(replaying).findings if f.id == "pcie-errors-corrected")
    assert (found.observed, found.count) == ("BadTLP 1200, replays 5000", 5000)


def test_a_device_that_sysfs_lists_and_lspci_cannot_read_is_silent() -> None:
    """The kernel keeps the ids of a GPU that has fallen off the bus."""
    there = discover(desktop())
    listing = "0000:01:00.0 VGA compatible controller [0300]: NVIDIA AD103 [10de:2704] (rev ff)\n"
    silent, gaps = add_lspci(there.pci_devices, listing + "\t!!! Unknown header type 7f\n", "lspci")
    found = diagnose(replace(there, pci_devices=silent, gaps=gaps)).findings
    assert [(f.id, f.subject) for f in found] == [("device-silent", "GPU 0000:01:00.0")]
    sound, gaps = add_lspci(there.pci_devices, listing, "lspci")
    assert diagnose(replace(there, pci_devices=sound, gaps=gaps)).findings == ()


def test_what_no_file_tells_is_unknown() -> None:
    device = discover(desktop()).device_at[GPU]
    unknown = (device.errors, device.power_state, device.iommu_domain, device.acs)
    assert unknown == (None, None, None, None)
    assert discover(overlaid(power_state="unknown\n")).device_at[GPU] == device
    settings = host("rtx4080-i9-14900k").settings
    assert (settings.ksm_run, settings.pus_of_idle_latency_us) == (None, None)


def test_settings_of_idle_states_ksm_and_iommus_are_read() -> None:
    files = {"/sys/kernel/mm/ksm/run": "1\n", f"{CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate"}
    for state, (latency_us, disable) in enumerate(((0, 0), (127, 0), (1034, 1))):
        files[f"{CPU}/cpu0/cpuidle/state{state}/latency"] = f"{latency_us}\n"
        files[f"{CPU}/cpu0/cpuidle/state{state}/disable"] = f"{disable}\n"
    settings = discover(desktop(files, ("/sys/class/iommu/dmar0",))).settings
    assert settings.pus_of_idle_latency_us == ((127, CpuSet((0,))),)
    assert (settings.ksm_run, settings.iommus) == (1, ("dmar0",))
    assert settings.scaling_drivers == ("intel_pstate",)


@pytest.mark.parametrize("text", ["RxErr\n", "RxErr many\n", "3\n"])
def test_counts_that_are_none_are_a_gap(text: str) -> None:
    found = discover(overlaid(aer_dev_correctable=text))
    assert found.device_at[GPU].errors is None
    assert any("aer_dev_correctable" in gap.reason for gap in found.gaps)


def test_a_ports_target_speed_is_in_its_config_space() -> None:
    config = bytearray(256)
    config[0x06], config[0x0E], config[0x34] = 0x10, 1, 0x40
    config[0x40:0x44] = bytes((0x10, 0, 0x42, 0))
    config[0x70] = 0x45
    header = parse_config(bytes(config))
    assert header is not None and header.target_gt_per_s == 32.0
    config[0x42] = 0x41  # version 1 has no such register
    old = parse_config(bytes(config))
    assert old is not None and (old.target_gt_per_s, old.port_type) == (None, header.port_type)
    config[0x42], config[0x70] = 0x42, 0x60  # the published unit's write: target 0
    none = parse_config(bytes(config))
    assert none is not None and none.target_gt_per_s is None


def test_no_tool_is_asked_in_quiet() -> None:
    quiet = QuietSnapshot()
    assert all(quiet.command_output(command) is None for command in COMMAND_OF_NAME)


@needs_shared
def test_acs_target_speeds_and_replays_come_from_tools() -> None:
    listing = shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt").read_text()
    hgx = host_from_lspci(listing, "hgx")
    port = hgx.device_at[Bdf.parse("17:01.0")]
    assert port.acs == () and port.target_gt_per_s == 32.0
    redirecting = hgx.device_at[Bdf.parse("82:00.0")]
    assert {"ReqRedir", "CmpltRedir"} <= set(redirecting.acs or ())
    query = parse_query(shared("machines/nvidia-smi/qx-h100.xml").read_text())
    assert all(gpu.replays is not None and gpu.replays < 1000 for gpu in query.gpus)


def test_interrupts_idle_states_and_governors_are_read_pu_by_pu() -> None:
    files = {
        "/proc/irq/99/effective_affinity_list": "3\n",
        "/proc/irq/100/effective_affinity_list": "\n",  # not set up
        "/proc/irq/101/effective_affinity_list": "0-1\n",
        **{f"{OF_GPU}/msi_irqs/{number}": "msix\n" for number in (101, 99, 100)},
        **{f"{CPU}/cpu{pu}/cpuidle/state1/latency": "127\n" for pu in range(32)},
        **{f"{CPU}/cpu{pu}/cpuidle/state2/latency": "1034\n" for pu in range(32)},
        **{f"{CPU}/cpu{pu}/cpuidle/state2/disable": "1\n" for pu in range(8)},
    }
    tree = desktop(files, ("/sys/fs/cgroup/system.slice/irqbalance.service",))
    for source in (tree, gather(tree).snapshot):
        found = discover(source)
        assert found.device_at[GPU].interrupts == (
            PciInterrupt(99, CpuSet((3,))),
            PciInterrupt(101, CpuSet((0, 1))),
        )
        assert found.settings.pus_of_idle_latency_us == (
            (127, CpuSet(range(8))),
            (1034, CpuSet(range(8, 32))),
        )
        assert found.settings.irqbalance is True
    assert discover(desktop()).settings.irqbalance is None


def test_a_host_without_an_iommu_has_none_in_its_capture_too() -> None:
    without = desktop(directories=("/sys/class/iommu", "/sys/bus/pci/devices"))
    for tree, iommus in ((without, ()), (desktop(), None)):
        assert discover(gather(tree).snapshot).settings.iommus == iommus


def test_kernels_without_effective_affinities_tell_where_interrupts_may_go() -> None:
    files = {f"{OF_GPU}/msi_irqs/7": "msi\n", "/proc/irq/7/smp_affinity_list": "0-3\n"}
    device = discover(gather(desktop(files)).snapshot).device_at[GPU]
    assert device.interrupts == (PciInterrupt(7, CpuSet(range(4))),)


def test_a_number_may_stand_last_in_what_a_collector_reads() -> None:
    text = (
        "homenode-collector 1\nG sys/bus/pci/devices/*/msi_irqs/[0-9]*\n"
        "sys/bus/pci/devices/0000:01:00.0/msi_irqs/99:msix\nZ\n"
    )
    read = parse_collected(text, "h")
    assert read.read_text("/sys/bus/pci/devices/0000:01:00.0/msi_irqs/99") == "msix\n"


@pytest.mark.parametrize(("cores", "ids"), [(1, []), (2, ["node-spans-packages"])])
def test_a_node_over_packages_that_are_cores_is_no_fault(cores: int, ids: list[str]) -> None:
    files = cpu_files(packages=4, cores=cores, threads=2)
    every = f"0-{8 * cores - 1}\n"
    files |= {f"{NODE}/online": "0\n", f"{NODE}/node0/cpulist": every}
    files |= {f"{NODE}/node0/distance": "10\n"}
    found = check_layout(discover(snapshot(files)))
    assert [finding.id for finding in found] == ids
