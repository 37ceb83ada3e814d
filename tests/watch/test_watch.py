"""Watching: each thing that drifts is one alert, which goes away when it is undone."""

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode import formats
from homenode.bdf import Bdf
from homenode.check.doctor.baseline import HOST, fact_drift, unread_facts
from homenode.check.doctor.diagnosis import host_findings
from homenode.check.doctor.expectation import (
    CertifiedHost,
    accepted_of,
    certify,
    device_drift,
)
from homenode.check.doctor.expectation_file import parse_expectation, render_expectation
from homenode.check.domain.diagnosis import definition_drift, domain_drift
from homenode.check.metrics import metrics
from homenode.check.verify.boot.boot_folder import domain_name as boot_domain_name
from homenode.check.verify.live.capture import ProcFiles, Watch, capture_running_vm
from homenode.check.verify.live.checks import verify_live
from homenode.check.watch.alert import KIND, Alert, WatchedDomain, WatchState, alerts, changes
from homenode.check.watch.claim import ClaimState, Sight, WatchClaim, unproved
from homenode.check.watch.observation import OWN_GUESTS, WatchPass, look
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.machine.description.parse import parse_description
from homenode.machine.description.render import render
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.hypervisor.domain_state import LivePin
from homenode.vm.model import Vm, VmCell
from tests.doctor.test_cli import run
from tests.proc_trees import MIB, UUID, ProcTree
from tests.sysfs_trees import cpu_files
from tests.tree_writer import write_tree

ROOT = Path(__file__).parents[2]
HGX = (ROOT / "src/homenode/machine/hosts/hgx-h100.toml").read_text()
PAGES = HGX.replace(
    'memory_per_node = "1TiB"', 'memory_per_node = "1TiB"\nhugepages_per_node = { "1GiB" = 512 }'
)
GPU = "0000:19:00.0"


@cache
def rendered(text: str) -> MemorySnapshot:
    return render(parse_description(text, "host.toml"))


def snapshot(
    text: str = HGX, files: Mapping[str, str] | None = None, domain: str | None = None
) -> MemorySnapshot:
    made = rendered(text)
    commands = {**made.commands, "virsh-domains": domain or ""}
    return MemorySnapshot(
        made.name, {**made.files, **(files or {})}, made.links, commands, made.folders
    )


def seen(
    machine: MemorySnapshot, expected: CertifiedHost | None, before: WatchState | None = None
) -> WatchPass:
    return look(machine, expected, None, before)


@cache
def certified(text: str = HGX) -> CertifiedHost:
    host = seen(snapshot(text), None).host
    return certify(host, accepted=accepted_of(host_findings(host)))


@cache
def tuned(text: str, layout: str = "pin-numa-pci") -> str:
    """The running domains of a host: one, with two GPUs, tuned for the host of the text."""
    folder = Path(tempfile.mkdtemp())
    (folder / "host.toml").write_text(text)
    document = folder / "tuned.xml"
    demo = str(ROOT / "demo/gpu-vm.xml")
    options = ("--gpus", "2", "--vcpus", "16", "--memory", "64GiB", "--layout", layout)
    run("plan", demo, "--host", str(folder / "host.toml"), *options, "-o", str(document))
    return (
        "<domains>" + document.read_text().replace("<domain ", "<domain id='3' ", 1) + "</domains>"
    )


def folder_of(bdf: str) -> str:
    """Of a function, in the tree of /sys/devices."""
    (path,) = [
        name.rpartition("/")[0] for name in rendered(HGX).files if name.endswith(f"/{bdf}/class")
    ]
    return path


def link_files(bdf: str, speed: str) -> dict[str, str]:
    return {f"{folder_of(bdf)}/current_link_speed": f"{speed} PCIe\n"}


def snc(text: str) -> str:
    """Firmware with sub-NUMA clustering on: two nodes for each package."""
    return text.replace("packages = 2", "packages = 2\nnodes_per_package = 2", 1)


def without(machine: MemorySnapshot, *folders: str) -> MemorySnapshot:
    """The machine as a container shows it that does not see these folders."""

    def is_seen(path: str) -> bool:
        return not any(path == one or path.startswith(f"{one}/") for one in folders)

    return MemorySnapshot(
        machine.name,
        {path: text for path, text in machine.files.items() if is_seen(path)},
        {path: target for path, target in machine.links.items() if is_seen(path)},
        machine.commands,
        tuple(path for path in machine.folders if is_seen(path)),
    )


def pages_gone(node: int = 1) -> dict[str, str]:
    """As after a reboot that reserves none."""
    folder = f"/sys/devices/system/node/node{node}/hugepages/hugepages-1048576kB"
    return {f"{folder}/nr_hugepages": "0\n", f"{folder}/free_hugepages": "0\n"}


def dimm_gone() -> MemorySnapshot:
    """One of 64 GiB, of node 1."""
    path = "/sys/devices/system/node/node1/meminfo"
    text = rendered(HGX).files[path]
    total = re.search(r"MemTotal: +(\d+)", text)
    assert total is not None
    return snapshot(files={path: text.replace(total[1], str(int(total[1]) - (64 << 20)))})


def of_another_host() -> str:
    return tuned((ROOT / "src/homenode/machine/hosts/h200-xeon8558.toml").read_text())


def moved_pin() -> str:
    moved = re.sub(r"(<vcpupin vcpu=.0. cpuset=.)\d+", r"\g<1>111", tuned(HGX), count=1)
    assert moved != tuned(HGX)
    return moved


def fewer_links(cell: str) -> MemorySnapshot:
    """Between GPU0 and GPU1, which are next to each other in nvidia-smi topo -m."""
    made = snapshot()
    topo = made.commands["nvidia-smi-topo"].replace("\t X \tNV18", f"\t X \t{cell}", 1)
    topo = topo.replace("GPU1\tNV18", f"GPU1\t{cell}", 1)
    commands = {**made.commands, "nvidia-smi-topo": topo}
    return MemorySnapshot(made.name, made.files, made.links, commands, made.folders)


@dataclass(frozen=True)
class Drift:
    """id: of each alert that it makes, alerts of them. healthy: before and after."""

    id: str
    drifted: Callable[[], MemorySnapshot]
    healthy: Callable[[], MemorySnapshot] = snapshot
    certified_as: str = HGX
    alerts: int = 1


DRIFTS: Mapping[str, Drift] = {
    "a link trained down": Drift("drift-link", lambda: snapshot(files=link_files(GPU, "8.0 GT/s"))),
    "a link lost half of its lanes": Drift(
        "drift-link",
        lambda: snapshot(files={f"{folder_of(GPU)}/current_link_width": "8\n"}),
    ),
    "SNC was turned on": Drift("drift-topology", lambda: snapshot(snc(HGX))),
    "SNC was turned on below a tuned VM": Drift(
        "drift-topology",
        lambda: snapshot(snc(HGX), domain=tuned(HGX)),
        lambda: snapshot(domain=tuned(HGX)),
    ),
    "a DIMM is gone": Drift("drift-topology", dimm_gone),
    "a GPU was swapped for another model": Drift(
        "drift-device",
        lambda: snapshot(files={f"{folder_of(GPU)}/device": "0x2331\n"}),
    ),
    "all GPUs were swapped for another model": Drift(
        "drift-device",
        lambda: snapshot(HGX.replace("device = 0x2330", "device = 0x2331", 1)),
        alerts=8,
    ),
    "a GPU is gone": Drift(
        "drift-device",
        lambda: without(snapshot(), folder_of(GPU), f"/sys/bus/pci/devices/{GPU}"),
    ),
    "a GPU is on another node than its switch": Drift(
        "drift-device", lambda: snapshot(files={f"{folder_of(GPU)}/numa_node": "1\n"})
    ),
    "a pair of GPUs has fewer NVLinks": Drift("device-odd", lambda: fewer_links("NV16")),
    "huge pages are gone": Drift(
        "drift-huge-pages",
        lambda: snapshot(PAGES, pages_gone()),
        lambda: snapshot(PAGES),
        certified_as=PAGES,
    ),
    "a VM has the plan of another host": Drift(
        "plan-of-other-host",
        lambda: snapshot(domain=of_another_host()),
        lambda: snapshot(domain=tuned(HGX)),
    ),
    "a pin was moved": Drift(
        "pin-off-node",
        lambda: snapshot(domain=moved_pin()),
        lambda: snapshot(domain=tuned(HGX)),
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_drift_is_one_alert_for_each_part_that_drifted_and_is_cleared(name: str) -> None:
    drift = DRIFTS[name]
    expected = certified(drift.certified_as)
    healthy = seen(drift.healthy(), expected).state
    assert healthy.alerts == ()
    drifted = seen(drift.drifted(), expected).state
    assert [alert.id for alert in drifted.alerts] == [drift.id] * drift.alerts, drifted.alerts
    again = seen(drift.healthy(), expected, drifted).state
    assert changes(healthy, drifted).raised == drifted.alerts
    assert not changes(drifted, drifted)
    assert {one.id for one in changes(drifted, again).cleared} >= {drift.id}
    assert again.alerts == ()


UPLINK = "0000:16:00.0"
"""The upstream port of the switch above the first GPU."""


STALE: Mapping[str, tuple[Callable[[], MemorySnapshot], Callable[[], MemorySnapshot]]] = {
    # a drift, and a look that cannot tell whether it is repaired
    "a slow link idles": (
        lambda: snapshot(files=link_files(GPU, "8.0 GT/s")),
        lambda: snapshot(files=link_files(GPU, "2.5 GT/s")),
    ),
    "a slow link says nothing": (
        lambda: snapshot(files=link_files(GPU, "8.0 GT/s")),
        lambda: snapshot(files=link_files(GPU, "Unknown")),
    ),
    "no PCI function is read": (
        lambda: snapshot(files=link_files(GPU, "8.0 GT/s")),
        lambda: without(snapshot(), "/sys/bus/pci"),
    ),
    "a device that was swapped is not read": (
        lambda: snapshot(files={f"{folder_of(GPU)}/device": "0x2331\n"}),
        lambda: without(snapshot(), "/sys/bus/pci"),
    ),
    "nodes that had changed are not read": (
        lambda: snapshot(snc(HGX)),
        lambda: without(snapshot(), "/sys/devices/system/node"),
    ),
    "pages that were lost are not read": (
        lambda: snapshot(PAGES, pages_gone()),
        lambda: without(snapshot(PAGES), "/sys/devices/system/node"),
    ),
    "counters that had errors are not read": (
        lambda: snapshot(files={f"{folder_of(GPU)}/aer_dev_fatal": "DLP 4\n"}),
        snapshot,
    ),
    "a clock that was capped is not read": (
        lambda: snapshot(
            files={
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "2000000\n",
                "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n",
            }
        ),
        snapshot,
    ),
    "VMs are not listed": (
        lambda: snapshot(domain=moved_pin()),
        lambda: MemorySnapshot(
            "hgx-h100", rendered(HGX).files, rendered(HGX).links, {}, rendered(HGX).folders
        ),
    ),
}


@pytest.mark.parametrize("name", STALE)
def test_what_cannot_be_judged_stays_an_alert_as_stale_and_is_raised_and_cleared_once(
    name: str,
) -> None:
    drift, blind = STALE[name]
    expected = certified(PAGES if "pages" in name else HGX)
    drifted = seen(drift(), expected).state
    (alert,) = drifted.alerts
    assert alert.state is ClaimState.REFUTED
    unknown = seen(blind(), expected, drifted).state
    (kept,) = unknown.alerts
    assert (kept.id, kept.state) == (alert.id, ClaimState.STALE)
    said = changes(drifted, unknown)
    assert not said.raised
    # The sum of the memory is in /proc/meminfo as well.
    assert {one.aspect for one in said.cleared} <= {"memory"}
    known = {one.key for one in (*said.stale, *said.cleared)}
    assert known == {one.key for one in alert.claims} and said.stale
    assert all(one.reason for one in said.stale)
    assert not changes(unknown, seen(blind(), expected, unknown).state)
    if not said.cleared:
        assert not changes(unknown, seen(drift(), expected, unknown).state).raised


def listed(*said: str) -> MemorySnapshot:
    """With these lines of lspci -vvv about the GPU, which its driver has."""
    made = snapshot()
    links = {**made.links, f"{folder_of(GPU)}/driver": "../../bus/pci/drivers/nvidia"}
    (line,) = (one for one in made.commands["lspci"].splitlines() if one.startswith(GPU))
    text = made.commands["lspci"].replace(line, "\n\t".join((line, *said)))
    commands = {**made.commands, "lspci": text}
    return MemorySnapshot(made.name, made.files, links, commands, made.folders)


@pytest.mark.parametrize(
    "id, sick, sound",
    [
        ("device-switched-off", "Control: Mem+ BusMaster-", "Control: Mem+ BusMaster+"),
        ("pcie-errors-seen", "UESta: DLP- MalfTLP+", "UESta: DLP- MalfTLP-"),
    ],
)
def test_a_register_clears_its_alert_only_where_it_is_read(id: str, sick: str, sound: str) -> None:
    drifted = seen(listed(sick), None).state
    assert [(one.id, one.state) for one in drifted.alerts] == [(id, ClaimState.REFUTED)]
    unread = seen(listed(), None, drifted).state
    assert [(one.id, one.state) for one in unread.alerts] == [(id, ClaimState.STALE)]
    repaired = seen(listed(sound), None, unread).state
    assert repaired.alerts == () and changes(unread, repaired).cleared


BOOT = "[    0.000000] Linux version 6.12.0 (user@builder)\n"
XID = f"[   99.000000] NVRM: Xid (PCI:{GPU[:-2]}): 79, pid=1, GPU has fallen off the bus.\n"


def with_log(text: str | None) -> MemorySnapshot:
    """None: the kernel's log is not read."""
    made = snapshot()
    commands = made.commands if text is None else {**made.commands, "dmesg": text}
    return MemorySnapshot(made.name, made.files, made.links, commands, made.folders)


def test_a_line_of_the_kernel_is_cleared_by_the_log_of_another_boot_or_accepted() -> None:
    expected = certified()
    drifted = seen(with_log(BOOT + XID), expected).state
    assert [one.id for one in drifted.alerts] == ["kernel-error"]
    for log in (None, "", "[ 9000.000000] usb 1-1: new device\n"):  # the last has lost its start
        unread = seen(with_log(log), expected, drifted).state
        assert [(one.id, one.state) for one in unread.alerts] == [
            ("kernel-error", ClaimState.STALE)
        ]
    assert seen(with_log(BOOT), expected, drifted).state.alerts == ()
    accepted = replace(expected, accepted=accepted_of(drifted.alerts[0].findings))
    assert seen(with_log(None), accepted, drifted).state.alerts == ()


def test_without_its_recorded_state_a_drift_stands() -> None:
    drifted = seen(snapshot(PAGES, pages_gone()), certified(PAGES)).state
    for files in (pages_gone(), {}):
        (alert,) = seen(snapshot(PAGES, files), None, drifted).state.alerts
        assert alert.state is ClaimState.STALE and alert.claims[0].reason is not None
    assert seen(snapshot(PAGES), certified(PAGES), drifted).state.alerts == ()


def test_what_is_not_read_is_no_difference() -> None:
    expected = certified()
    topology = [f"{CPU}/cpu{number}/topology" for number in range(256)]
    gpu = folder_of(GPU)
    host = seen(snapshot(), None).host
    nowhere = tuple(replace(one, node=None) for one in host.pci_devices)
    assert not tuple(device_drift(expected, replace(host, pci_devices=nowhere)))
    nameless = without(snapshot(), *(f"{gpu}/{name}" for name in ("vendor", "device", "uevent")))
    nameless = MemorySnapshot(
        nameless.name, nameless.files, nameless.links, {"virsh-domains": ""}, nameless.folders
    )
    for machine in (without(snapshot(), *topology), nameless):
        found = seen(machine, expected).state
        assert [one for one in found.alerts if one.id.startswith("drift-")] == []
        assert not {"board-incomplete", "devices-uneven"} & {one.id for one in found.alerts}
        assert found.claims.stale


def test_a_fact_of_a_device_is_stale_without_the_functions() -> None:
    bars = {f"{folder_of(GPU)}/subsystem_device": "0x1234\n"}
    drifted = seen(snapshot(files=bars), certified()).state
    assert [one.id for one in drifted.alerts] == ["drift-baseline"]
    unread = seen(without(snapshot(), "/sys/bus/pci"), certified(), drifted).state
    assert [one.state for one in unread.alerts] == [ClaimState.STALE]


def test_an_entry_of_a_list_that_is_given_is_gone_where_it_is_not_there() -> None:
    host = seen(snapshot(), None).host
    (gpu,) = (one for one in host.pci_devices if str(one.bdf) == GPU)
    for name in ("device-odd", "memory-failed"):
        claim = WatchClaim(id=name, about=GPU, aspect=f"GPU {GPU}: amd-smi/retired/0/status")
        for state, is_proved in (("amd-smi/retired", True), ("amd-smi/other", False)):
            device = replace(gpu, states=((state, "0"),))
            sight = Sight(host=replace(host, pci_devices=(device,)))
            assert (unproved(claim, sight) is None) == is_proved


def test_half_of_a_partition_mode_is_not_another_one() -> None:
    was = {GPU: {"partition": "SPX NPS1"}}
    for now in ("NPS1", "SPX"):
        assert unread_facts(was, {GPU: {"partition": now}}) == {(GPU, "partition")}
    assert not unread_facts(was, {GPU: {"partition": "CPX NPS1"}})


CPU, NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"
DMI = "/sys/devices/virtual/dmi/id"


def node_memory(node: int, factor: float, less_kib: int = 0) -> dict[str, str]:
    path = f"{NODES}/node{node}/meminfo"
    text = rendered(HGX).files[path]
    total = re.search(r"MemTotal: +(\d+)", text)
    assert total is not None
    return {path: text.replace(total[1], str(int(int(total[1]) * factor) - less_kib))}


def renumbered() -> dict[str, str]:
    """Siblings next to each other, where PUs of a core were 112 apart."""
    files: dict[str, str] = {}
    for pu in range(224):
        pair = f"{pu & ~1}-{pu | 1}\n"
        folder = f"{CPU}/cpu{pu}/topology"
        files |= {f"{folder}/core_cpus_list": pair, f"{folder}/thread_siblings_list": pair}
        files[f"{folder}/core_id"] = f"{pu // 2}\n"
    return files


def policies(limit: int, governor: str = "performance") -> dict[str, str]:
    files = {}
    for pu in range(4):
        folder = f"{CPU}/cpu{pu}/cpufreq"
        files[f"{folder}/scaling_max_freq"] = f"{limit}\n"
        files[f"{folder}/cpuinfo_max_freq"] = "3800000\n"
        files[f"{folder}/scaling_governor"] = f"{governor}\n"
        files[f"{folder}/scaling_driver"] = "acpi-cpufreq\n"
    return files


def with_word(word: str) -> dict[str, str]:
    return {"/proc/cmdline": f"BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro {word}\n"}


def bar_of(size: int) -> dict[str, str]:
    path = f"{folder_of(GPU)}/resource"
    lines = rendered(HGX).files[path].splitlines(keepends=True)
    lines[2] = f"0x{1 << 44:016x} 0x{(1 << 44) + size - 1:016x} 0x000000000014220c\n"
    return {path: "".join(lines)}


def kernel(release: str) -> dict[str, str]:
    return {"/proc/sys/kernel/osrelease": f"{release}\n"}


BASELINES: Mapping[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    # files when it was recorded, files now, the name of the fact; None = no alert
    "30 GiB of one node are gone": ({}, node_memory(1, 1, 30 << 20), "memory"),
    "half of node 0 is on node 1": ({}, node_memory(0, 0.5) | node_memory(1, 1.5), "memory"),
    "20 MiB of a node are gone": ({}, node_memory(0, 1, 20 << 10), "memory"),
    "4 MiB of a node are gone": ({}, node_memory(0, 1, 4 << 10), None),
    "another kernel keeps 100 MiB": (
        kernel("6.8.0-45"),
        kernel("6.11.0-9") | node_memory(0, 1, 100 << 10),
        "kernel",
    ),
    "another kernel": (kernel("6.8.0-45"), kernel("6.11.0-9"), "kernel"),
    "huge pages are given no more": (
        {"/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"},
        {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        "thp",
    ),
    "turbo is off": (
        {"/sys/devices/system/cpu/intel_pstate/no_turbo": "0\n"},
        {"/sys/devices/system/cpu/intel_pstate/no_turbo": "1\n"},
        "turbo",
    ),
    "siblings have other numbers": ({}, renumbered(), "siblings"),
    "isolcpus is lost": (with_word("isolcpus=2-31"), with_word("quiet"), "command-line"),
    "iommu=off": (with_word("iommu=pt"), with_word("iommu=off"), "command-line"),
    "huge pages at boot": (with_word("hugepages=512"), with_word(""), "command-line"),
    "swiotlb is lost": (with_word("swiotlb=65536"), with_word(""), "parameters"),
    "a word that does not matter": (with_word("quiet"), with_word("splash"), None),
    "another firmware": (
        {f"{DMI}/bios_version": "2.1\n"},
        {f"{DMI}/bios_version": "2.2\n"},
        "firmware",
    ),
    "another governor": (
        policies(3_800_000),
        policies(3_800_000, "schedutil"),
        "governor",
    ),
    "another governor of one PU": (
        policies(3_800_000),
        {f"{CPU}/cpu1/cpufreq/scaling_governor": "ondemand\n"},
        "governor",
    ),
    "a clock is capped": (policies(3_800_000), policies(2_000_000), "frequencies"),
    "a BAR is small": ({}, bar_of(256 << 20), "bars"),
    "another board": ({}, {f"{folder_of(GPU)}/subsystem_device": "0x1234\n"}, "subsystem"),
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_changed_fact_is_one_alert_if_it_matters_until_it_is_undone(name: str) -> None:
    good, bad, fact = BASELINES[name]
    there = seen(snapshot(files=good), None).host
    text = render_expectation(certify(there, accepted=accepted_of(host_findings(there))))
    expected = parse_expectation(text, "site.toml")
    before = seen(snapshot(files=good), expected).state
    assert before.alerts == ()
    drifted = seen(snapshot(files={**good, **bad}), expected, before).state
    if fact is None:
        assert drifted.alerts == ()
        return
    (alert,) = drifted.alerts
    assert fact in {claim.aspect for claim in alert.claims}
    assert changes(before, drifted).raised == drifted.alerts
    assert changes(drifted, seen(snapshot(files=good), expected, drifted).state).cleared


def test_a_state_that_was_recorded_without_other_parameters_knows_no_change_of_them() -> None:
    """Earlier versions recorded those of "command-line" alone."""
    there = seen(snapshot(files=with_word("isolcpus=2-3 swiotlb=65536")), None).host
    facts = certify(there).facts[HOST]
    assert (facts["command-line"], facts["parameters"]) == ("isolcpus=2-3", "swiotlb=65536")
    earlier = {name: value for name, value in facts.items() if name != "parameters"}
    assert list(fact_drift({HOST: earlier}, there, "site.toml")) == []


def booted(words: str, pages: int, groups: str) -> dict[str, str]:
    """As after a boot with that command line: pages that it reserves, how devices are mapped."""
    links = rendered(PAGES).links
    found = {
        f"/sys/kernel/iommu_groups/{target.rpartition('/')[2]}/type": f"{groups}\n"
        for path, target in links.items()
        if path.endswith("/iommu_group")
    }
    for node in (0, 1):
        found |= dict.fromkeys(pages_gone(node), f"{pages}\n")
    return found | with_word(words)


@pytest.mark.parametrize("pages, groups", [(0, "identity"), (512, "DMA-FQ")])
def test_what_follows_from_the_kernels_command_line_is_in_its_alert(
    pages: int, groups: str
) -> None:
    good = booted("iommu=pt hugepages=1024", 512, "identity")
    lost = "hugepages=1024" if pages else "iommu=pt"
    expected = certify(seen(snapshot(PAGES, good), None).host)
    before = seen(snapshot(PAGES, good), expected).state
    bad = booted(lost, pages, groups)
    (alert,) = seen(snapshot(PAGES, bad), expected, before).state.alerts
    assert alert.claims[0].aspect == "command-line" and len(alert.claims) > 1
    assert seen(snapshot(PAGES, good), expected, before).state.alerts == ()


def states(of: Mapping[str, str]) -> Callable[[], MemorySnapshot]:
    nic = "0000:1b:00.0"
    return lambda: snapshot(files={f"{folder_of(nic)}/{name}": text for name, text in of.items()})


def test_several_facts_of_one_device_are_one_alert() -> None:
    up = states({"net/eth0/carrier": "1\n", "net/eth0/speed": "400000\n", "net/eth0/mtu": "9000\n"})
    down = states({"net/eth0/carrier": "0\n", "net/eth0/speed": "-1\n", "net/eth0/mtu": "9000\n"})
    expected = certify(seen(up(), None).host)
    (alert,) = seen(down(), expected).state.alerts
    assert {one.aspect for one in alert.claims} == {"net/carrier", "net/speed"}


def linked(machine: MemorySnapshot) -> MemorySnapshot:
    """With NVIDIA's driver on its GPUs, which answers."""
    gpus = [str(one.bdf) for one in seen(machine, None).host.devices_of_kind(DeviceKind.GPU)]
    answers = (f'<gpu id="{bdf}"><vbios_version>1</vbios_version></gpu>' for bdf in gpus)
    answer = f"<nvidia_smi_log>{''.join(answers)}</nvidia_smi_log>"
    drivers = {f"{folder_of(bdf)}/driver": "../bus/pci/drivers/nvidia" for bdf in gpus}
    return MemorySnapshot(
        machine.name,
        machine.files,
        {**machine.links, **drivers},
        {**machine.commands, "nvidia-smi-query": answer},
        machine.folders,
    )


def test_nvlinks_that_are_all_gone_are_one_alert() -> None:
    good = linked(snapshot())
    topo = re.sub(r"NV\d+", "SYS", good.commands["nvidia-smi-topo"])
    bad = MemorySnapshot(
        good.name, good.files, good.links, {**good.commands, "nvidia-smi-topo": topo}, good.folders
    )
    (alert,) = seen(bad, certify(seen(good, None).host)).state.alerts
    assert {one.aspect for one in alert.claims} == {"nvlinks"} and len(alert.claims) == 8
    assert (alert.findings[0].expected, alert.findings[0].observed) == ("18", "0")


def test_a_certified_fact_of_a_device_and_what_is_odd_about_it_are_one_alert() -> None:
    good = linked(snapshot())

    def with_mig(*divided: str) -> MemorySnapshot:
        text = good.commands["nvidia-smi-query"]
        for bdf in re.findall(r'<gpu id="([^"]+)">', text):
            word = "Enabled" if bdf in divided else "Disabled"
            mode = f"<current_mig>{word}</current_mig><pending_mig>{word}</pending_mig>"
            head = f'<gpu id="{bdf}">'
            text = text.replace(head, f"{head}<mig_mode>{mode}</mig_mode>")
        commands = {**good.commands, "nvidia-smi-query": text}
        return MemorySnapshot(good.name, good.files, good.links, commands, good.folders)

    before = seen(with_mig(), certify(seen(with_mig(), None).host))
    assert before.state.alerts == ()
    expected = certify(before.host)
    (alert,) = seen(with_mig(GPU), expected).state.alerts
    assert {one.id for one in alert.claims} == {"drift-baseline", "device-odd"}
    assert seen(with_mig(), expected).state.alerts == ()


def test_a_driver_and_the_firmware_that_changed_are_two_alerts() -> None:
    good = {f"{DMI}/bios_version": "2.1\n", f"{folder_of(GPU)}/vbios_version": "1\n"}
    bad = {f"{DMI}/bios_version": "2.2\n", f"{folder_of(GPU)}/vbios_version": "2\n"}
    expected = certify(seen(snapshot(files=good), None).host)
    assert len(seen(snapshot(files=bad), expected).state.alerts) == 2


@pytest.mark.parametrize(
    "was, now, expected, observed",
    [
        ("quiet isolcpus=2-31", "isolcpus=2-15", "isolcpus=2-31", "isolcpus=2-15"),
        ("iommu=pt mitigations=off", "iommu=pt", "mitigations=off", "not given"),
    ],
)
def test_of_the_command_line_the_words_that_differ_are_shown(
    was: str, now: str, expected: str, observed: str
) -> None:
    good = certify(seen(snapshot(files=with_word(was)), None).host)
    (alert,) = seen(snapshot(files=with_word(now)), good).state.alerts
    (found,) = alert.findings
    assert (found.expected, found.observed) == (expected, observed)


def test_looks_at_the_same_time_say_an_alert_once(tmp_path: Path) -> None:
    host = ROOT / "src/homenode/machine/hosts/x86-1p1n4c4t.toml"
    state, site = tmp_path / "state", tmp_path / "site.toml"
    site.write_text(render_expectation(certify(seen(rendered(host.read_text()), None).host)))
    text = site.read_text()
    assert "\npus = 4\n" in text
    site.write_text(text.replace("\npus = 4\n", "\npus = 8\n"))
    words = ("watch", "--host", str(host), "--expect", str(site), "--state", str(state))
    command = [sys.executable, "-m", "homenode", *words]
    looks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [look.communicate(timeout=120)[0] for look in looks]
    assert "".join(said).count("drift-topology") == 1


@pytest.mark.parametrize("name", ["model", "board"])
def test_a_card_of_another_model_or_board_is_cleared_without_a_certified_state(name: str) -> None:
    file = {"model": "device", "board": "subsystem_device"}[name]
    swapped = snapshot(files={f"{folder_of(GPU)}/{file}": "0x2331\n"})
    drifted = seen(swapped, None).state
    assert f"GPU {GPU}: {name}" in {one.subject for one in drifted.alerts}
    assert seen(snapshot(), None, drifted).state.alerts == ()


def test_a_vm_that_no_longer_runs_is_where_it_was_planned() -> None:
    drifted = seen(snapshot(domain=moved_pin()), certified()).state
    ended = seen(snapshot(domain=""), certified(), drifted).state
    assert ended.alerts == () and changes(drifted, ended).cleared


def test_a_switchs_uplink_is_one_alert_for_all_devices_below() -> None:
    slow = snapshot(files={f"{folder_of(UPLINK)}/current_link_width": "4\n"})
    (alert,) = seen(slow, certified()).state.alerts
    assert alert.id == "drift-link" and len(alert.devices) > 1


@pytest.mark.parametrize("name", ["hgx-h100", "h200-xeon8558", "rtx4090-epyc7702"])
def test_a_lost_node_is_one_alert(name: str) -> None:
    text = (ROOT / f"src/homenode/machine/hosts/{name}.toml").read_text()
    host = seen(snapshot(text), None).host
    expected = certify(host, accepted=accepted_of(host_findings(host)))
    last = int(host.nodes[-1].index)
    less = without(snapshot(text), f"{NODES}/node{last}")
    files = dict(less.files)
    for file in ("online", "has_cpu", "has_memory", "has_normal_memory"):
        if f"{NODES}/{file}" in files:
            files[f"{NODES}/{file}"] = f"0-{last - 1}\n" if last > 1 else "0\n"
    for path, row in less.files.items():
        if path.startswith(NODES) and path.endswith("/distance"):
            files[path] = row.strip().rpartition(" ")[0] + "\n"
    lost = MemorySnapshot(less.name, files, less.links, less.commands, less.folders)
    (alert,) = seen(lost, expected).state.alerts
    assert (alert.id, alert.subject) == ("drift-topology", "topology")


def test_a_slow_link_hides_no_other_and_more_errors_than_accepted_are_an_alert() -> None:
    def with_errors(first: int, second: int) -> MemorySnapshot:
        files = {f"{folder_of(GPU)}/aer_dev_fatal": f"DLP {first}\n"}
        return snapshot(files={**files, f"{folder_of(OTHER)}/aer_dev_fatal": f"DLP {second}\n"})

    host = seen(with_errors(1, 0), None).host
    expected = certify(host, accepted=accepted_of(host_findings(host)))
    read = parse_expectation(render_expectation(expected), "site.toml")
    assert seen(with_errors(1, 0), read).state.alerts == ()
    for first, second, sick in ((1, 99, OTHER), (5, 0, GPU)):
        (alert,) = seen(with_errors(first, second), read).state.alerts
        assert [str(bdf) for bdf in alert.devices] == [sick]


OTHER = "0000:3b:00.0"


def test_an_expectation_of_version_1_is_refused_with_what_to_do() -> None:
    old = render_expectation(certified()).replace("format = 2", "format = 1", 1)
    with pytest.raises(InputError, match="format: expected 2"):
        parse_expectation(old, "site.toml")


def test_a_vms_second_drift_is_raised_and_the_first_stays_known() -> None:
    one = seen(snapshot(domain=moved_pin()), certified()).state
    both = moved_pin()
    two = re.sub(r"(<vcpupin vcpu=.1. cpuset=.)\d+", r"\g<1>110", both, count=1)
    assert two != both
    after = seen(snapshot(domain=two), certified(), one).state
    said = changes(one, after)
    assert said.raised == after.alerts and len(after.alerts) == 1
    assert not said.cleared and not said.stale


@pytest.mark.parametrize("layout", ["pin", "pin-bound", "pin-numa", "pin-numa-pci"])
def test_a_tuned_vm_on_its_own_host_is_no_alert_and_counts_as_planned(layout: str) -> None:
    found = seen(snapshot(domain=tuned(HGX, layout)), certified())
    assert found.state.alerts == ()
    assert found.state.domains == ("gpu-vm",)
    assert 'homenode_domain_as_planned{domain="gpu-vm"} 1' in metrics(found.state, found.host, 0.1)


@pytest.mark.parametrize("folder", ["/sys/devices/system/node", "/sys/bus/pci"])
def test_what_a_container_does_not_see_is_not_read_and_no_alert(folder: str) -> None:
    tuned_vm = tuned(PAGES)
    assert seen(snapshot(PAGES, domain=tuned_vm), certified(PAGES)).state.not_read == ()
    state = seen(without(snapshot(PAGES, domain=tuned_vm), folder), certified(PAGES)).state
    assert state.alerts == ()
    subjects = [gap.subject for gap in state.not_read]
    assert "VM gpu-vm: whether it was planned for this host" in subjects
    if folder.endswith("node"):
        assert "numa nodes, distances, huge pages" in subjects


def test_a_host_whose_nodes_are_hidden_is_certified_as_one_node_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path: text for path, text in cpu_files().items() if "/node/" not in path}
    write_tree(MemorySnapshot("tree", files), tmp_path / "tree")
    site = tmp_path / "site.toml"
    assert run("expect", "--host", str(tmp_path / "tree"), "-o", str(site)) == 0
    assert "its NUMA nodes cannot be read" in capsys.readouterr().err
    assert "numa_nodes = 1" in site.read_text()


def test_vms_that_suffer_from_a_changed_topology_are_in_its_alert() -> None:
    (alert,) = seen(snapshot(snc(HGX), domain=tuned(HGX)), certified()).state.alerts
    assert (alert.id, alert.domains) == ("drift-topology", ("gpu-vm",))


def facts(text: str) -> Vm:
    document = text.removeprefix("<domains>").removesuffix("</domains>")
    return vm_of(open_domain(document.encode(), "vm"))


@pytest.mark.parametrize(
    ("was", "is_now", "what"),
    [
        (r"(<vcpupin vcpu=.3. cpuset=.)\d+", r"\g<1>0-1", "pins of vCPU 3"),
        (r"<emulatorpin [^>]*/>", "", "<emulatorpin>"),
        (r"(<memnode cellid=.0. mode=.)strict", r"\g<1>preferred", "memory of cell 0"),
        (r"(<memnode cellid=.0. [^>]*nodeset=.)\d", r"\g<1>0-1", "memory of cell 0"),
        (r"(<memory mode=.)strict", r"\g<1>preferred", "<numatune><memory>"),
        (r"(<memory mode=.strict. nodeset=.)[\d-]+", r"\g<1>1", "<numatune><memory>"),
        (r"<memory mode=[^>]*/>", "", "<numatune><memory>"),
        (r"(?s)<hostdev.*?</hostdev>", "", "0000:19:00.0"),
    ],
)
def test_each_part_of_a_domain_that_differs_from_its_plan_is_a_finding(
    was: str, is_now: str, what: str
) -> None:
    planned = tuned(HGX)
    changed = re.sub(was, is_now, planned, count=1)
    assert changed != planned
    assert list(domain_drift(facts(planned), facts(planned))) == []
    (finding,) = domain_drift(facts(planned), facts(changed))
    assert finding.subject == f"gpu-vm: {what}"
    (edited,) = definition_drift(facts(planned), facts(changed))
    assert (edited.id, edited.severity) == ("drift-definition", Severity.WARNING)


def test_test_guests_of_verify_have_the_name_by_which_the_watch_leaves_them_out() -> None:
    assert boot_domain_name(Path("/tmp/homenode-boot-x1")).startswith(OWN_GUESTS)
    own = tuned(HGX).replace("<name>gpu-vm<", f"<name>{OWN_GUESTS}x1<")
    assert seen(snapshot(domain=own), certified()).state.domains == ()


def test_threads_that_homenode_moved_itself_are_no_drift_until_someone_else_moves_them() -> None:
    planned = tuned(HGX)
    moved = re.sub(r"(<vcpupin vcpu=.3. cpuset=.)\d+", r"\g<1>5", planned, count=1)
    moved = re.sub(r"(<emulatorpin cpuset=.)[\d,-]+", r"\g<1>7", moved, count=1)
    ours = (LivePin("vcpu", 3, CpuSet([5])), LivePin("emulator", 0, CpuSet([7])))
    assert list(domain_drift(facts(planned), facts(moved), ours)) == []
    assert len(list(domain_drift(facts(planned), facts(planned), ours))) == 2


def test_memory_that_lies_elsewhere_than_planned_is_one_alert_until_it_is_back(
    tmp_path: Path,
) -> None:
    """By numa_maps of the VM's process: as after migratepages, or with a node that was full."""
    host = seen(snapshot(), None).host
    tree = ProcTree(tmp_path)
    tree.qemu({}, ((256, "0"), (256, "1")))
    cells = tuple(
        VmCell(
            id=cell,
            vcpus=CpuSet((cell,)),
            memory_bytes=256 * MIB,
            nodes=CpuSet((cell,)),
            mode="strict",
        )
        for cell in (0, 1)
    )
    expected = Vm(name="gpu-vm", vcpus=2, memory_bytes=512 * MIB, cells=cells)

    def found(policy: str, pages: str) -> list[tuple[str, tuple[str, ...]]]:
        near = (256, "bind:0 anon=65536 N0=65536 kernelpagesize_kB=4")
        tree.memory((near, (256, f"{policy} anon=65536 {pages} kernelpagesize_kB=4")))
        what = Watch(CpuSet(), (), (256 * MIB, 256 * MIB), 0)
        running = capture_running_vm(UUID, what, ProcFiles(str(tree.root)))
        state = WatchedDomain(
            name="gpu-vm",
            devices=(),
            is_foreign=False,
            findings=verify_live(expected, running).findings,
        )
        return [(alert.id, alert.domains) for alert in alerts(certified(), host, [state])]

    assert found("bind:1", "N1=65536") == []
    for policy, pages in (
        ("bind:1", "N0=16384 N1=49152"),
        ("bind:0", "N0=65536"),
        ("default", "N0=65536"),
    ):
        assert found(policy, pages) == [("live-memory", ("gpu-vm",))]
        assert found("bind:1", "N1=65536") == []


def noise(rng: random.Random) -> dict[str, str]:
    """Files of a healthy host that say something else at every look."""
    made = rendered(PAGES).files
    files: dict[str, str] = {}
    for name, text in made.items():
        if name.endswith("/meminfo"):
            used = re.sub(r"(MemFree: +)\d+", rf"\g<1>{rng.randrange(10**6, 10**9)}", text)
            # What a kernel keeps for itself.
            total = re.search(r"MemTotal: +(\d+)", text)
            assert total is not None
            files[name] = used.replace(total[1], str(int(total[1]) - rng.randrange(4000)))
        elif name.endswith("/free_hugepages"):
            files[name] = f"{rng.randrange(512)}\n"
    for gpu in (GPU, "0000:3b:00.0"):
        # An idle link; one in a sleep state has no speed.
        files |= link_files(gpu, rng.choice(("32.0 GT/s", "2.5 GT/s", "Unknown")))
    return files


def test_a_fleet_of_forty_healthy_hosts_with_noise_raises_nothing() -> None:
    rng = random.Random(40)
    for _ in range(40):
        assert seen(snapshot(PAGES, noise(rng)), certified(PAGES)).state.alerts == ()


def test_virtual_functions_that_are_made_are_no_drift() -> None:
    text = (ROOT / "src/homenode/machine/hosts/x86-2p2n8c16t-sriov-nic.toml").read_text()
    without = re.sub(r"(?m)^vf.*\n", "", text)
    assert seen(snapshot(text), certified(without)).state.alerts == ()


def test_cards_that_were_moved_are_one_alert() -> None:
    host = seen(snapshot(), None).host
    moved = [one for one in certified().devices if one.kind is DeviceKind.GPU][:2]
    other = {one.bdf: Bdf(1, one.bdf.bus, 0, 0) for one in moved}
    devices = tuple(replace(one, bdf=other.get(one.bdf, one.bdf)) for one in certified().devices)
    (alert,) = alerts(replace(certified(), devices=devices), host)
    assert (alert.id, alert.subject, len(alert.findings)) == ("drift-device", "addresses", 4)


def test_without_a_certificate_only_what_is_wrong_on_any_host_is_an_alert() -> None:
    state = seen(snapshot(files=link_files(GPU, "8.0 GT/s")), None).state
    assert "pcie-link-slow" in {alert.id for alert in state.alerts}
    assert any(gap.subject == "recorded state" for gap in state.not_read)


def test_what_was_wrong_when_certified_is_accepted_and_kept_in_the_file() -> None:
    slow = seen(snapshot(files=link_files(GPU, "8.0 GT/s")), None).host
    expected = certify(slow, accepted=accepted_of(host_findings(slow)))
    read = parse_expectation(render_expectation(expected), "site.toml")
    assert read == replace(expected, floors={})
    assert seen(snapshot(files=link_files(GPU, "8.0 GT/s")), read).state.alerts == ()


def test_a_state_is_stored_and_read_back() -> None:
    state = seen(snapshot(snc(HGX)), certified()).state
    assert state.alerts
    assert formats.decode(formats.encode(KIND, state), KIND, WatchState, "x") == state


def test_metrics_have_help_type_and_escaped_labels() -> None:
    state = WatchState(
        host="h",
        time_s=1.5,
        alerts=(
            Alert(
                id="x",
                severity=seen(snapshot(snc(HGX)), certified()).state.alerts[0].severity,
                subject='a "b"\n',
                findings=(),
            ),
        ),
    )
    text = metrics(state, seen(snapshot(), None).host, 0.25)
    assert 'homenode_alert{id="x",severity="critical",subject="a \\"b\\"\\n"} 1' in text
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"[a-z_]+(\{.*\})? \S+", line), line
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    used = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert used == named


@pytest.mark.root
def test_a_run_without_privileges_and_tools_says_what_it_could_not_read(tmp_path: Path) -> None:
    """As in a container: nobody in a user namespace, without capabilities outside of it, without
    libvirt, and with metrics into a folder that it may not write to."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    metrics_folder = tmp_path / "metrics"
    metrics_folder.mkdir(mode=0o500)
    hidden = 'mount -t tmpfs none /run/libvirt 2>/dev/null || true; exec "$@"'
    argv = [
        *("unshare", "--mount", "--propagation", "private", "sh", "-ec", hidden, "sh"),
        *("unshare", "--user"),
        sys.executable,
        "-m",
        "homenode.cli.main",
        "watch",
        "--state",
        str(tmp_path / "state"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    unread = [line for line in done.stdout.splitlines() if line.startswith("not read: ")]
    assert any(line.startswith("not read: running VMs: ") for line in unread)
    assert any(line.startswith("not read: recorded state: ") for line in unread)
    textfile = metrics_folder / "homenode.prom"
    again = subprocess.run(
        [*argv, "--textfile", str(textfile)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JOURNAL_STREAM": "8:1"},
    )
    assert again.returncode == 3
    assert again.stderr.startswith(f"homenode: {textfile}: expected a file to write metrics to")
    assert "not read: running VMs" not in again.stdout, "the journal has it of the run before"
