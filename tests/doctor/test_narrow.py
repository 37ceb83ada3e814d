"""Narrow links: slots that are built so are no faults, one narrow card among wide ones is."""

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.links import check_links, copy_findings
from homenode.findings import Severity
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.doctor.test_links import found, with_link
from tests.doctor_cases import arc, port
from tests.doctor_domains import gpus as gpus_of


def narrow_4080() -> Host:
    host = load_host("rtx4080-i9-14900k")
    return with_link(host, "0000:01:00.0", current_width=8)


def test_a_narrow_gpu_without_peers_is_a_warning_unless_the_slot_is_known() -> None:
    (finding,) = found(narrow_4080())
    assert (finding.id, finding.severity) == ("pcie-link-narrow", Severity.WARNING)
    assert "--known-width" in (finding.fix or "")
    assert list(check_links(narrow_4080(), known_widths={Bdf.parse("01:00.0"): 8})) == []
    assert list(check_links(narrow_4080(), known_widths={Bdf.parse("01:00.0"): 16}))


def test_a_known_slot_is_what_its_link_and_copies_are_compared_with() -> None:
    gpu = Bdf.parse("01:00.0")
    slow = with_link(narrow_4080(), str(gpu), current_gt_per_s=5.0)
    (finding,) = check_links(slow, known_widths={gpu: 8})
    assert finding.expected.startswith("16 GT/s x8 (15.8 GB/s)") and "8 lanes" in finding.expected
    assert "11.8 of 15.8 GB/s" in (finding.cost or "")
    (unknown,) = copy_findings(narrow_4080(), {}, 12e9)
    assert unknown.id == "h2d-low"
    assert list(copy_findings(narrow_4080(), {}, 12e9, {gpu: 8})) == []


@pytest.mark.parametrize("rate", [411.6e9, 1e9])
def test_copies_over_c2c_are_not_compared_with_the_pcie_link_next_to_it(rate: float) -> None:
    """A GH200 copies at 400 GB/s; its one PCIe lane is for management."""
    host = load_host("gh200x4")
    assert list(copy_findings(host, {}, rate)) == []
    without = replace(host, links=())
    assert len(list(copy_findings(without, {}, rate))) == 4


def test_the_slot_of_a_gpu_behind_its_own_switch_may_be_named_by_the_gpu() -> None:
    host = host_from_lspci(arc().replace("16GT/s (ok), Width x8", "16GT/s (ok), Width x4"), "arc")
    assert found(host)
    for name in ("03:00.0", "01:00.0"):
        assert list(check_links(host, known_widths={Bdf.parse(name): 4})) == []


def idle_gpus(*widths: int) -> Host:
    """The 4090 host with all GPUs idle, and these widths of their links."""
    host = four_gpus(*widths)
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        host = with_link(host, str(gpu.bdf), current_gt_per_s=2.5)
    return host


def test_an_idle_gpu_that_lacks_lanes_next_to_idle_ones_with_all_is_found() -> None:
    findings = found(idle_gpus(16, 8, 16, 16))
    assert sorted(str(f.severity) for f in findings) == ["inconclusive"] * 3 + ["warning"]
    (narrow,) = (f for f in findings if f.id == "pcie-link-narrow")
    assert "next to it idle with all their lanes" in narrow.observed and "50 %" in (
        narrow.cost or ""
    )


def test_an_idle_gpu_that_lacks_lanes_alone_is_inconclusive_and_tells_of_them() -> None:
    (finding,) = found(with_link(narrow_4080(), "0000:01:00.0", current_gt_per_s=2.5))
    assert finding.id == "pcie-link-idle" and "8 of 16" in finding.observed
    busy_beside = with_link(
        four_gpus(8, 16, 16, 16), str(gpus_of("rtx4090-epyc7702", 1)[0]), current_gt_per_s=2.5
    )
    (finding,) = found(busy_beside)  # some drivers give lanes of idle cards back
    assert finding.id == "pcie-link-idle"
    assert {f.id for f in found(idle_gpus(8, 8, 8, 8))} == {"pcie-link-idle"}


def two_slots(first: int, second: int) -> Host:
    """A desktop CPU that splits 16 lanes over two slots; the first port says x16 all the same."""
    gpu = (
        "{}:00.0 VGA compatible controller [0300]: NVIDIA Corporation AD102 [10de:2684]\n"
        "\tCapabilities: [70] Express (v2) Legacy Endpoint, MSI 00\n"
        "\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16\n"
        "\t\tLnkSta:\tSpeed 16GT/s (ok), Width x{} (downgraded)"
    )
    root = "Root Port (Slot+)"
    parts = [port("00:01.0", "8086:a70d", root, "00", "01", "01", 16, 16, 16, first)]
    parts += [port("00:01.1", "8086:a72d", root, "00", "02", "02", 16, 8, 16, second or 8)]
    parts += [gpu.format("01", first)]
    parts += [gpu.format("02", second)] if second else []
    return host_from_lspci("\n\n".join(parts) + "\n", "desktop")


def test_a_slot_that_shares_its_lanes_with_another_is_no_fault() -> None:
    (shared_lanes,) = found(two_slots(8, 8))
    assert (shared_lanes.severity, shared_lanes.id) == (Severity.INFO, "pcie-link-narrow")
    assert "shares its lanes with 0000:00:01.1" in shared_lanes.observed
    (alone,) = found(two_slots(8, 0))
    assert alone.severity is Severity.WARNING
    (narrower,) = found(two_slots(4, 8))
    assert narrower.severity is Severity.WARNING


def four_gpus(*widths: int) -> Host:
    """The 4090 host with these widths of its GPUs' links."""
    host = load_host("rtx4090-epyc7702")
    for gpu, width in zip(host.devices_of_kind(DeviceKind.GPU), widths, strict=True):
        host = with_link(host, str(gpu.bdf), current_width=width)
    return host


@pytest.mark.parametrize(
    ("widths", "severities"),
    [
        ((8, 8, 8, 8), ["info"] * 4),
        ((8, 8, 8, 16), ["critical"] * 3),
        ((8, 8, 4, 8), ["warning"] * 4),
        ((16, 16, 16, 16), []),
    ],
)
def test_cards_that_are_all_as_narrow_sit_in_narrow_slots(
    widths: tuple[int, ...], severities: list[str]
) -> None:
    assert [str(finding.severity) for finding in found(four_gpus(*widths))] == severities
