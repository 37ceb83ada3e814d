"""The libvirt hook and the systemd unit: GPUs only, drops are found, and no VM is stopped."""

import shutil
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.retrain.execution import LinkRecords
from homenode.change.retrain.plan import (
    UNIT_NAME,
    find_dropped_links,
    has_devices,
    list_domain_gpus,
    read_slot_links,
    render_libvirt_hook,
    render_systemd_unit,
)
from homenode.errors import HostError, InputError, UsageError
from homenode.findings import Severity
from homenode.machine.link_path import LinkRate, format_rate
from homenode.machine.pci import DeviceKind, PciLink
from tests.doctor.test_retrain import AUDIO, GPU, SICK, sick
from tests.doctor_cases import changed
from tests.doctor_domains import domain, gpus
from tests.doctor_domains import host as shipped
from tests.processes import run_text

SOUND = "rtx4090-epyc7702"


def test_a_unit_runs_before_libvirt_and_a_hook_never_stops_a_vm() -> None:
    unit = render_systemd_unit([GPU, Bdf.parse("10000:01:00.0")], "/opt/home node/bin/homenode")
    assert "Before=libvirtd.service" in unit and "[Install]" in unit and ".socket" not in unit
    assert f"ExecStart=-'/opt/home node/bin/homenode' doctor retrain {GPU} --apply" in unit
    assert "10000:01:00.0" in unit
    assert "ExecStart=-/opt/5%%/homenode doctor" in render_systemd_unit([GPU], "/opt/5%/homenode")
    for program in ("/a'b", '/a"b', "/a\\b", "/a\nb"):
        with pytest.raises(UsageError):
            render_systemd_unit([GPU], program)
    hook = render_libvirt_hook("/usr/bin/homenode")
    assert hook.startswith("#!/bin/sh\n") and hook.rstrip().endswith("exit 0")
    assert "virsh" not in hook and "timeout" in hook


_LIBVIRT = {
    "libvirtd.socket": "[Unit]\nBefore=libvirtd.service\n[Socket]\nListenStream=/run/l.sock\n",
    "libvirtd.service": "[Unit]\nRequires=libvirtd.socket\nAfter=libvirtd.socket\n"
    "[Service]\nExecStart=/bin/true\n",
}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_circle_in_the_unit_next_to_libvirts(tmp_path: Path) -> None:
    """A circle through sockets.target would be broken at boot, by leaving some unit out."""
    unit = render_systemd_unit([GPU], "/bin/true")
    for name, text in (*_LIBVIRT.items(), (UNIT_NAME, unit)):
        (tmp_path / name).write_text(text)
        wants = "sockets" if name.endswith("socket") else "multi-user"
        directory = tmp_path / f"{wants}.target.wants"
        directory.mkdir(exist_ok=True)
        (directory / name).symlink_to(tmp_path / name)
    said = run_text(
        ["systemd-analyze", "verify", str(tmp_path / UNIT_NAME), "multi-user.target"],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
    )
    assert "cycle" not in said.stderr and UNIT_NAME not in said.stderr, said.stderr


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            ("vm; rm -rf /", "start", "begin", "-"),
            ["doctor", "hook", "--", "vm; rm -rf /", "start"],
        ),
        (("vm", "started", "begin", "-"), ["doctor", "hook", "--", "vm", "started"]),
        (("vm", "prepare", "begin", "-"), None),
        (("vm", "release", "end", "-"), None),
        ((), None),
    ],
)
def test_the_hook_asks_with_the_domains_xml_and_always_succeeds(
    tmp_path: Path, words: tuple[str, ...], asked: list[str] | None, fails: bool
) -> None:
    program, logger = tmp_path / "home node", tmp_path / "logger"
    program.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{tmp_path}/asked'\ncat > '{tmp_path}/xml'\n"
        f"echo said; exit {3 if fails else 0}\n"
    )
    logger.write_text(f"#!/bin/sh\ncat > '{tmp_path}/logged'\n")
    hook = tmp_path / "hook"
    hook.write_text(render_libvirt_hook(str(program)).replace("\nPATH=", f"\nPATH={tmp_path}:"))
    planted = tmp_path / "planted"
    planted.mkdir()
    for name in ("timeout", "logger"):
        (planted / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
        (planted / name).chmod(0o755)
    for file in (program, logger, hook):
        file.chmod(0o755)
    done = run_text(
        [str(hook), *words], input="<domain/>", cwd=planted, env={"PATH": f".:{planted}"}
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert not (tmp_path / "ran").exists()
    if asked is None:
        assert not (tmp_path / "asked").exists()
    else:
        assert (tmp_path / "asked").read_text().splitlines() == asked
        assert (tmp_path / "xml").read_text() == "<domain/>"
        assert (tmp_path / "logged").read_text() == "said\n"


def test_a_hook_takes_the_domains_gpus_only() -> None:
    host = sick()
    audio_first = domain(8, [AUDIO, *gpus(SICK, 2)])
    assert list_domain_gpus(audio_first, host) == gpus(SICK, 2)
    assert list_domain_gpus(domain(8), host) == ()
    with_nic = changed(host, lambda d: d.bdf == gpus(SICK, 2)[1], kind=DeviceKind.NIC)
    assert list_domain_gpus(audio_first, with_nic) == gpus(SICK, 1)
    assert has_devices(audio_first) and not has_devices(domain(8))
    with pytest.raises(InputError):
        list_domain_gpus(b"<network/>", host)


def test_a_drop_at_vm_start_is_critical_and_only_for_the_domains_gpus() -> None:
    host = sick()
    (finding,) = find_dropped_links(host, (GPU,), "vm", {})
    assert (finding.id, finding.severity) == ("pcie-link-dropped", Severity.CRITICAL)
    assert list(find_dropped_links(shipped(SOUND), gpus(SOUND, 4), "vm", {})) == []


def test_a_link_that_was_narrow_before_the_start_has_not_dropped() -> None:
    host = sick()
    before = read_slot_links(host, (GPU,))
    assert before == {GPU: LinkRate(5.0, 16)}
    (gpu,) = gpus("hgx-h100", 1)
    switched = changed(shipped("hgx-h100"), lambda d: d.bdf == gpu, link=PciLink(8.0, 4, 32.0, 16))
    assert read_slot_links(switched, (gpu,)) == {gpu: LinkRate(8.0, 4)}
    assert list(find_dropped_links(host, (GPU,), "vm", before)) == []
    unknown = changed(host, lambda d: True, link=PciLink(None, None, 16.0, 16))
    assert read_slot_links(unknown, (GPU,)) == {}
    assert list(find_dropped_links(unknown, (GPU,), "vm", {})) == []
    # Without a record no one knows how wide the slot is: only the speed is judged.
    narrow = changed(
        shipped(SOUND), lambda d: d.bdf in gpus(SOUND, 1), link=PciLink(16.0, 8, 16.0, 16)
    )
    assert list(find_dropped_links(narrow, gpus(SOUND, 1), "vm", {})) == []
    (finding,) = find_dropped_links(host, (GPU,), "vm", {GPU: LinkRate(16.0, 16)})
    assert "at start/begin" in finding.expected
    (finding,) = find_dropped_links(host, (GPU,), "vm", {AUDIO: LinkRate(16.0, 16)})
    assert "what both ends can" in finding.expected
    device = host.find_device(GPU)
    assert device is not None and finding.subject.endswith(f" below port {device.parent}")
    assert finding.observed == before[GPU].format_with_rate()
    assert finding.cost == f"75 % of the link: {format_rate(before[GPU].bytes_per_s)}"


def test_links_at_the_start_are_kept_until_started(tmp_path: Path) -> None:
    records = LinkRecords(str(tmp_path / "links"))
    links = {GPU: LinkRate(2.5, 16), Bdf.parse("10000:41:00.0"): LinkRate(32.0, 8)}
    records.save(links)
    assert records.load(links) == links
    (tmp_path / "links" / f"{GPU}.json").write_text("[]")
    assert list(records.load(links)) == [Bdf.parse("10000:41:00.0")]
    with pytest.raises(HostError, match="hint: run as root"):
        LinkRecords(str(tmp_path / "links" / f"{GPU}.json")).save(links)
