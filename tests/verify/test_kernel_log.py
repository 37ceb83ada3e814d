"""What a guest's kernel says of its nodes, PCI windows and BARs becomes findings."""

import pytest

from homenode.bdf import Bdf
from homenode.check.verify.boot.initramfs import kernel_findings
from homenode.findings import Severity

GPU, PORT = "0000:81:00.0", "0000:80:00.0"
NAMES = {Bdf.parse(GPU): "0000:19:00.0"}


def log(*lines: str, level: int = 6) -> str:
    return "".join(f"<{level}>[    1.{i:06}] {line}\n" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    "line",
    [
        f"pci {GPU}: BAR 2 [mem size 0x2000000000 64bit pref]: can't assign; no space",
        f"pci {GPU}: BAR 2: no space for [mem size 0x2000000000 64bit pref]",
        f"pci {GPU}: BAR 2: failed to assign [mem size 0x2000000000 64bit pref]",
    ],
)
def test_a_bar_without_room_is_a_finding_of_the_host_device(line: str) -> None:
    bridge = f"pci {PORT}: bridge window [mem size 0x3000000000 64bit pref]: failed to assign"
    (found,) = kernel_findings(log(bridge, line), NAMES, "vm.xml")
    assert (found.id, found.severity) == ("guest-bar-unplaced", Severity.CRITICAL)
    assert found.subject == "device 0000:19:00.0"
    assert "0x2000000000" in found.observed


def test_a_bridge_without_room_is_named_where_no_device_is() -> None:
    bridge = f"pci {PORT}: bridge window [mem size 0x3000000000 64bit pref]: failed to assign"
    (found,) = kernel_findings(log(bridge), NAMES, "vm.xml")
    assert PORT in found.subject


@pytest.mark.parametrize(
    ("topic", "line", "level"),
    [
        (
            "topology",
            "sched: CPU #1's llc-sibling CPU #0 is not on the same node! [node: 1 != 0]",
            4,
        ),
        ("topology", "BUG: arch topology borken", 3),
        ("NUMA nodes", "NUMA: Warning: node ids are out of bound, from=-1 to=-1 distance=10", 4),
        (
            "PCI",
            "acpi PNP0A08:00: host bridge window [mem 0x8000000000000-0x9] "
            "(ignored, not CPU addressable)",
            6,
        ),
        ("PCI", "pci_bus 0000:81: busn_res: can not insert [bus 81-ff] under [bus 80]", 6),
        ("NUMA nodes", "pci_bus 0000:80: Unknown NUMA node; performance will be reduced", 6 - 2),
    ],
)
def test_warnings_of_topology_nodes_and_windows_are_findings(
    topic: str, line: str, level: int
) -> None:
    (found,) = kernel_findings(log(line, level=level), NAMES, "vm.xml")
    assert found.severity is Severity.WARNING
    assert found.subject.startswith(topic) and line in found.observed


@pytest.mark.parametrize(
    "line",
    [
        f"pci {GPU}: BAR 1: no space for [io  size 0x0100]",
        "APIC calibration not consistent with PM-Timer: 105ms instead of 100ms",
        "pci_bus 0000:00: Unknown NUMA node; performance will be reduced",
        "mitigations disabled",
    ],
)
def test_what_the_emulated_machine_always_says_is_none(line: str) -> None:
    assert not list(kernel_findings(log(line, level=4), NAMES, "vm.xml"))


def test_several_warnings_of_a_topic_are_one_finding() -> None:
    lines = [f"NUMA: Warning: node {i}" for i in range(9)]
    (found,) = kernel_findings(log(*lines, level=4), NAMES, "vm.xml")
    assert "and 6 more" in found.observed


def test_a_log_of_anything_else_is_no_finding() -> None:
    assert not list(kernel_findings("\x00<9>[x] y\n<6>\n" + "<6>[ 1.0] z", NAMES, "vm.xml"))
