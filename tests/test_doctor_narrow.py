"""Narrow links: slots that are built so are no faults, one narrow card among wide ones is."""

import pytest

from homenode.bdf import Bdf
from homenode.discover.lspci import host_from_lspci
from homenode.doctor.links.slow import link_findings
from homenode.findings import Severity
from homenode.pci import DeviceKind
from homenode.sources import load_host
from homenode.topology import Host
from tests.doctor_listings import port
from tests.test_doctor_links import found, with_link


def narrow_4080() -> Host:
    host = load_host("rtx4080-i9-14900k")
    return with_link(host, "0000:01:00.0", current_width=8)


def test_a_narrow_gpu_without_peers_is_a_warning_unless_the_slot_is_known() -> None:
    (finding,) = found(narrow_4080())
    assert (finding.id, finding.severity) == ("pcie-link-narrow", Severity.WARNING)
    assert "--known-width" in (finding.fix or "")
    assert list(link_findings(narrow_4080(), known_widths={Bdf.parse("01:00.0"): 8})) == []
    assert list(link_findings(narrow_4080(), known_widths={Bdf.parse("01:00.0"): 16}))


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
