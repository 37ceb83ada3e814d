"""Slow links are found by their whole path, and what only looks slow is not."""

import re
from functools import cache

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.doctor.links import check_links, link_health
from homenode.findings import Finding, Severity, are_bad
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.link_path import LinkRate, describe_paths, find_rates
from homenode.machine.pci import DeviceKind, PciErrors, PciLink
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.doctor_cases import PORT_4080, arc, changed, is_gpu, link_at, port
from tests.seeds import THOROUGH
from tests.shared_data import needs_shared, shared


@cache
def listing() -> str:
    return shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt").read_text()


def edited(bdf: str, old: str, new: str) -> Host:
    """The HGX H100 capture with a text of one function replaced."""
    text = listing()
    start = text.index(f"\n{bdf} ") + 1
    end = text.index("\n\n", start)
    block = text[start:end]
    assert old in block
    return host_from_lspci(text[:start] + block.replace(old, new, 1) + text[end:], "hgx")


def at_speed(bdf: str, speed: str) -> Host:
    """The HGX H100 capture with one function's link at another speed than 32 GT/s."""
    new = f"LnkSta:\tSpeed {speed}GT/s (downgraded)"
    return edited(bdf, "LnkSta:\tSpeed 32GT/s (ok)", new)


def with_link(host: Host, bdf: str, **fields: object) -> Host:
    """The host with some fields of one function's link changed."""
    device = host.device_at[Bdf.parse(bdf)]
    assert device.link is not None
    return changed(host, lambda d: d == device, link=replace(device.link, **fields))


def found(host: Host, is_loaded: bool = False, **known: int) -> list[Finding]:
    widths = {Bdf.parse(bdf.replace("_", ":")): width for bdf, width in known.items()}
    return list(check_links(host, is_loaded, widths))


@needs_shared
def test_downgraded_links_of_a_sound_machine_are_no_findings() -> None:
    assert listing().count("(downgraded)") >= 16
    assert found(host_from_lspci(listing(), "hgx")) == []


@needs_shared
def test_one_gpu_at_2_5_gt_with_unknown_load_is_inconclusive() -> None:
    host = at_speed("5d:00.0", "2.5")
    (finding,) = found(host)
    assert finding.severity is Severity.INCONCLUSIVE
    assert "under load" in (finding.fix or "")
    (busy,) = found(host, is_loaded=True)
    assert busy.severity is Severity.CRITICAL


@needs_shared
@pytest.mark.parametrize("state", ["P5", "P8"])
def test_a_gpu_that_nvidia_smi_calls_idle_is_inconclusive_at_any_speed(state: str) -> None:
    host = at_speed("5d:00.0", "8")
    idle = changed(host, is_gpu, performance_state=state)
    assert [finding.id for finding in found(host)] == ["pcie-link-slow"]
    assert [finding.id for finding in found(idle)] == ["pcie-link-idle"]


@needs_shared
def test_a_slow_uplink_is_one_finding_with_every_device_behind_it() -> None:
    (finding,) = found(at_speed("16:00.0", "8"))
    assert finding.severity is Severity.CRITICAL
    assert "0000:19:00.0" in finding.subject and "0000:15:01.0" in finding.subject
    assert "NIC 0000:1a:00.0" in finding.subject


@needs_shared
def test_a_low_target_speed_of_the_port_is_named_as_the_cause() -> None:
    host = at_speed("5d:00.0", "16")
    port = host.device_at[Bdf.parse("5d:00.0")].parent
    stated = changed(host, lambda d: d.bdf == port, target_gt_per_s=16.0)
    assert "LnkCtl2" not in (found(host)[0].fix or "")
    assert "set to train to 16 GT/s" in (found(stated)[0].fix or "")


@needs_shared
@pytest.mark.parametrize("at_port", [True, False])
def test_a_link_as_slow_as_its_ports_target_is_critical_whatever_the_load(at_port: bool) -> None:
    """No load raises the link above its target: the study's README names it, at 2.5 GT/s. A card's
    own register may follow its driver's idling."""
    idle = at_speed("5d:00.0", "2.5")
    gpu = idle.device_at[Bdf.parse("5d:00.0")]
    end, name = (gpu.parent, "port") if at_port else (gpu.bdf, "GPU")
    stated = changed(idle, lambda d: d.bdf == end, target_gt_per_s=2.5)
    (finding,) = found(stated)
    severity = Severity.CRITICAL if at_port else Severity.WARNING
    assert (finding.id, finding.severity) == ("pcie-target-low", severity)
    assert link_health(stated) == ((finding,) if at_port else ())
    assert f"Link Control 2 of the {name} has 2.5 GT/s" in finding.observed
    assert are_bad([finding])
    assert "homenode doctor retrain 0000:5d:00.0" in (finding.fix or "")
    (free,) = found(idle)
    assert "LnkCtl2" not in free.observed and "retrain" not in (free.fix or "")


def test_a_slow_link_that_lacks_lanes_names_both() -> None:
    assert "lanes" not in (found(link_at(5.0, 16))[0].fix or "")
    (finding,) = found(link_at(5.0, 8))
    assert finding.id == "pcie-link-slow" and "lacks lanes as well" in (finding.fix or "")


@pytest.mark.parametrize(
    "name",
    """
        h200-xeon8558 mi350x-epyc9575f rtxpro6000-xeon8468v rtx4090-epyc7702 rtx4080-i9-14900k
        hgx-h100 hgx-a100-ibm gh200x4 epyc-nps4-gpu-nic
    """.split(),
)
def test_sound_hosts_have_no_link_findings(name: str) -> None:
    assert found(load_host(name)) == []


def test_a_newer_card_on_an_older_port_is_no_fault_and_is_said() -> None:
    older = with_link(link_at(8.0, 16), str(PORT_4080), max_gt_per_s=8.0, current_gt_per_s=8.0)
    assert found(older) == []
    assert any("the card could 16 GT/s" in line for line in describe_paths(older))


def test_a_sleeping_gpu_is_inconclusive() -> None:
    asleep = changed(link_at(5.0, 16), lambda d: True, power_state="D3hot")
    assert are_bad(found(link_at(5.0, 16))) and not are_bad(found(asleep))


def test_links_without_known_ends_are_not_judged() -> None:
    assert (
        found(with_link(link_at(5.0, 16), str(PORT_4080), max_gt_per_s=None, max_width=None)) == []
    )


def test_links_inside_a_card_are_not_judged_but_the_slots_are() -> None:
    """Intel's Arc: its GPU says 2.5 GT/s x1 behind a switch of its own, whose uplink is real."""
    text = arc()
    assert found(host_from_lspci(text, "arc")) == []
    slow = text.replace("Speed 16GT/s (ok)", "Speed 8GT/s (downgraded)")
    (finding,) = found(host_from_lspci(slow, "arc"))
    assert finding.severity is Severity.CRITICAL and "to 0000:01:00.0" in finding.subject
    idle = text.replace("Speed 16GT/s (ok)", "Speed 2.5GT/s (downgraded)")
    assert [f.id for f in found(host_from_lspci(idle, "arc"))] == ["pcie-link-idle"]


def test_qemus_own_ports_limit_nothing() -> None:
    """A guest's root port reports what its machine type likes."""
    text = "\n\n".join(
        (
            port("00:01.0", "1b36:000c", "Root Port (Slot+)", "00", "01", "01", 16, 32, 2.5, 1),
            "01:00.0 3D controller [0302]: NVIDIA Corporation GH100 [10de:2335]\n"
            "\tCapabilities: [70] Express (v2) Endpoint, MSI 00\n"
            "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16\n"
            "\t\tLnkSta:\tSpeed 5GT/s (downgraded), Width x16 (ok)",
        )
    )
    assert found(host_from_lspci(text, "guest")) == []


def test_a_measured_rate_tells_which_links_it_may_have_been() -> None:
    fits = {str(rate) for rate in find_rates(5.3e9, LinkRate(32.0, 16))}
    assert {"5 GT/s x16", "8 GT/s x8", "16 GT/s x4"} <= fits
    assert "2.5 GT/s x16" not in fits and "8 GT/s x16" not in fits
    for rate, link in ((25e9, "16 GT/s x16"), (55.3e9, "32 GT/s x16"), (12.6e9, "8 GT/s x16")):
        assert link in {str(r) for r in find_rates(rate, LinkRate(32.0, 16))}


def test_unknown_current_links_are_not_judged() -> None:
    host = load_host("rtx4080-i9-14900k")
    blind = changed(host, lambda d: d.link is not None, link=PciLink(None, None, 16.0, 16))
    assert found(blind) == []
    assert any(re.search("now unknown", line) for line in describe_paths(blind))


@needs_shared
@pytest.mark.parametrize(
    ("where", "old", "new", "severity"),
    [
        ("17:01.0", "LnkSta:\tSpeed 32GT/s (ok)", "LnkSta:\tSpeed 8GT/s (downgraded)", "critical"),
        ("19:00.0", "LnkSta:\tSpeed 32GT/s (ok)", "LnkSta:\tSpeed 16GT/s", "critical"),
        ("19:00.0", "Width x16 (ok)", "Width x1 (downgraded)", "critical"),
        ("1a:00.0", "LnkSta:\tSpeed 32GT/s (ok)", "LnkSta:\tSpeed 2.5GT/s (downgraded)", "warning"),
        ("1a:00.0", "Width x16 (ok)", "Width x8 (downgraded)", "warning"),
        ("83:00.0", "LnkSta:\tSpeed 16GT/s (ok)", "LnkSta:\tSpeed 2.5GT/s (downgraded)", "warning"),
        ("18:00.0", "LnkSta:\tSpeed 16GT/s (ok)", "LnkSta:\tSpeed 8GT/s (downgraded)", "info"),
        ("19:00.0", "LnkCap:\tPort #0, Speed 32GT/s", "LnkCap:\tPort #0, Speed 16GT/s", None),
        ("18:00.0", "Width x4 (ok)", "Width x0", None),
        ("19:00.0", "LnkSta:\tSpeed 32GT/s (ok)", "LnkSta:\tSpeed unknown (ok)", None),
        ("17:00.0", "LnkSta:\tSpeed 16GT/s", "LnkSta:\tSpeed 2.5GT/s", None),
    ],
)
def test_other_edits_are_one_finding_each_or_no_fault(
    where: str, old: str, new: str, severity: str | None
) -> None:
    findings = found(edited(where, old, new))
    if severity is None:
        assert {finding.severity for finding in findings} <= {Severity.INFO}
    else:
        assert [finding.severity for finding in findings] == [severity]


@needs_shared
def test_a_listing_that_lacks_a_port_has_no_link_across_the_hole() -> None:
    """Without its upstream port a switch's downstream ports hang below the root port."""
    blocks = listing().strip("\n").split("\n\n")
    ports = [number for number, block in enumerate(blocks) if "secondary=" in block]
    for number in range(len(blocks)) if THOROUGH else ports[::5]:
        left = "\n\n".join(blocks[:number] + blocks[number + 1 :]) + "\n"
        assert found(host_from_lspci(left, "hgx")) == []
    text = "\n".join(
        line for line in listing().splitlines() if "secondary=99" not in line
    )  # the upstream port of a GPU's switch has lost its buses
    assert found(host_from_lspci(text + "\n", "hgx")) == []


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_a_load_on_the_host_says_nothing_of_gpus_that_vms_have(driver: str | None) -> None:
    (unreached,) = found(link_at(2.5, 16, driver=driver), is_loaded=True)
    assert unreached.severity is Severity.INCONCLUSIVE and "under load" in (unreached.fix or "")
    (reached,) = found(link_at(2.5, 16, driver="nvidia"), is_loaded=True)
    assert reached.severity is Severity.CRITICAL


def test_redirects_cost_a_device_nothing_that_has_no_peer_below_its_switch() -> None:
    host = load_host("h200-xeon8558")
    redirecting = tuple(
        replace(d, acs=("CmpltRedir", "ReqRedir")) if d.bridge else d for d in host.pci_devices
    )
    alone = {host.switch_above(gpu.bdf): gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
    left = tuple(
        d
        for d in redirecting
        if d.kind not in (DeviceKind.GPU, DeviceKind.NIC) or d.bdf in alone.values()
    )
    found = [
        [f.id for f in diagnose(replace(host, pci_devices=devices)).findings]
        for devices in (redirecting, left)
    ]
    assert set(found[0]) == {"p2p-redirected"} and found[1] == []


@needs_shared
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Width x16 (ok)", "Width x0 (downgraded)"),
        ("LnkCap:\tPort #0, Speed 32GT/s", "LnkCap:\tPort #0, Speed unknown"),
    ],
)
def test_a_gpu_that_says_nothing_of_its_link_is_not_mistaken_for_sound(old: str, new: str) -> None:
    host = edited("5d:00.0", old, new)
    assert found(host) == []
    (unknown,) = diagnose(host).findings
    assert unknown.id == "pcie-link-unknown" and unknown.subject == "GPU 0000:5d:00.0"


def test_errors_that_resets_leave_are_no_alarm() -> None:
    def with_errors(errors: PciErrors) -> list[Finding]:
        host = changed(load_host("rtx4080-i9-14900k"), is_gpu, errors=errors)
        return list(diagnose(host).findings)

    (harmless,) = with_errors(PciErrors((), (("UnsupReq", 3), ("CmpltTO", 1))))
    assert harmless.severity is Severity.INFO
    for lost in (
        PciErrors((), (("UnsupReq", 3), ("MalfTLP", 1))),
        PciErrors((), (), (("UnsupReq", 1),)),
    ):
        (bad,) = with_errors(lost)
        assert bad.severity is Severity.WARNING


@needs_shared
def test_a_gpu_that_no_longer_answers_is_critical() -> None:
    text = listing()
    start = text.index("\n5d:00.0 ") + 1
    head, _, _ = text[start:].partition("\n")
    end = text.index("\n\n", start)
    silent = head.replace("(rev a1)", "(rev ff) (prog-if ff)") + "\n\t!!! Unknown header type 7f"
    host = host_from_lspci(text[:start] + silent + text[end:], "hgx")
    (lost,) = diagnose(host).findings
    assert (lost.id, lost.severity) == ("device-silent", Severity.CRITICAL)
    assert lost.subject == "GPU 0000:5d:00.0"
    asleep = changed(host, lambda d: True, power_state="D3cold")
    assert [f.id for f in diagnose(asleep).findings] == ["pcie-link-unknown"]


ALONE = """0a:00.0 VGA compatible controller [0300]: NVIDIA Corporation Device [10de:2204]
\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM L0s L1
\t\tLnkSta:\tSpeed {}, Width {}
"""


@pytest.mark.parametrize(
    ("speed", "width", "id"),
    [
        ("16GT/s", "x16", None),  # as fast as the card can
        ("2.5GT/s (downgraded)", "x16", "pcie-link-idle"),
        ("2.5GT/s (downgraded)", "x8 (downgraded)", "pcie-link-idle"),
        ("8GT/s (downgraded)", "x16", "pcie-link-unknown"),  # the port may not be able to do more
        ("16GT/s", "x8 (downgraded)", "pcie-link-unknown"),
    ],
)
def test_a_gpu_that_is_listed_without_its_port_is_judged_by_its_own_end(
    speed: str, width: str, id: str | None
) -> None:
    alone = ALONE.format(speed, width)
    for text in (alone, alone.replace("\t", "")):  # as a forum may have it
        findings = diagnose(host_from_lspci(text, "gpu")).findings
        found_ids = {(f.id, f.severity) for f in findings}
        assert ("lanes are lost" in f"{findings}") is ("2.5" in speed and width != "x16")
        assert found_ids == ({(id, Severity.INCONCLUSIVE)} if id else set())
    # On a guest's first bus it has no port above.
    guest = alone.replace("0a:00.0", "00:05.0", 1)
    assert diagnose(host_from_lspci(guest, "guest")).findings == ()


@needs_shared
def test_a_listing_without_root_says_nothing() -> None:
    lines = [line for line in listing().splitlines() if "Lnk" not in line]
    host = host_from_lspci("\n".join(lines) + "\n", "hgx")
    assert diagnose(host).checked[0] == "devices of one model, peer-to-peer"
    assert found(host) == []
    (unknown,) = diagnose(host).findings
    assert (unknown.id, unknown.severity) == ("pcie-link-unknown", Severity.INCONCLUSIVE)
    assert "as root" in (unknown.fix or "") and "0000:19:00.0" in unknown.subject
