"""The doctor's command line: formats, exit codes, usage, files, and findings at 80 columns."""

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.change.retrain.config_registers import SysfsConfigSpace
from homenode.check.doctor.baseline import find_drift, record_of
from homenode.cli import retrain
from homenode.cli import retrain as retrain_command
from homenode.cli.arguments.check import RetrainArguments, RetrainHookArguments
from homenode.cli.command import CallError
from homenode.doc import Text, format_plain
from homenode.errors import HostError, InputError, UsageError
from homenode.findings import Findings, Gap, GapKind, Severity, add_gaps, finding
from homenode.formats import encode
from homenode.machine.pci import PciLink
from homenode.machine.topology import Host
from homenode.safe import record_directory
from homenode.show.findings_text import (
    format_findings,
    format_prometheus,
    format_subjects,
    group_findings,
)
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.doctor_cases import changed, settings
from tests.doctor_domains import diagnosed, domain, gpus, host
from tests.shared_data import needs_shared, shared

GPU = (Bdf.parse("41:00.0"),)
SICK, SOUND, H200 = "rtx5090-epyc7702", "rtx4080-i9-14900k", "h200-xeon8558"
HGX = record_of(host("hgx-h100"))


def found_by(*words: str, code: int = 1) -> list[dict[str, str]]:
    """The findings of a call with --json."""
    done = homenode("doctor", *words, "--json")
    assert done.exit_code == code
    return cast(list[dict[str, str]], json.loads(done.stdout)["findings"])


def test_json_is_the_documented_format() -> None:
    done = homenode("doctor", "--host", SICK, "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["format"]) == (1, "homenode.findings/1")
    first = document["findings"][0]
    assert (first["id"], first["severity"]) == ("pcie-link-slow", "critical")
    assert all(first[key] for key in ("subject", "expected", "observed", "cost", "fix", "source"))
    assert any("GPU 0000:41:00.0" in line for line in document["checked"])


def test_a_domain_comes_from_standard_input() -> None:
    xml = domain(2, pins=[0, 1], gib=2)
    assert homenode("doctor", "-", "--host", SOUND, input=xml).exit_code == 1  # siblings as cores


@pytest.mark.parametrize(
    "words",
    [
        *(f"--h2d,{value}" for value in ("fast", "-1", "99:00.0=25", "00:01.0=25")),
        *(f"--known-width,{value}" for value in ("41:00.0=3", "41:00.0", "99:00.0=8")),
        *("--under-load", "--under-load,--load-command,"),
        '--under-load,--load-command,"unclosed',
    ],
)
def test_contradicting_options_are_usage_errors(words: str) -> None:
    error = homenode("doctor", "--host", SOUND, *words.split(",")).exception
    assert isinstance(error, UsageError) and "--help" not in (error.hint or "")


def test_doctor_and_retrain_take_no_option_of_each_other() -> None:
    """With --apply it would write here what was meant for the host that was named."""
    calls = [("--host", SOUND, word) for word in ("--apply", "--print-unit")]
    for first in ("retrain", "hook"):
        for option in ("--host=h", "--expect=e", "--under-load", "--h2d=5", "--prometheus"):
            calls.append((first, "41:00.0", option))
    for call in calls:
        assert isinstance(homenode("doctor", *call).exception, CallError), call


def test_documents_that_cannot_be_read_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "net.xml").write_text("<network/>")
    for name in ("none.xml", "net.xml"):
        assert homenode("doctor", tmp_path / name, "--host", SOUND).exit_code == 2


def test_a_measured_rate_may_be_of_one_gpu() -> None:
    done = homenode("doctor", "--host", "rtx4090-epyc7702", "--h2d", "41:00.0=5.3")
    assert done.exit_code == 1
    assert done.stdout.count("h2d-low") == 1 and "0000:41:00.0" in done.stdout


def test_a_host_differs_from_the_record_of_another_and_not_from_its_own(tmp_path: Path) -> None:
    record = tmp_path / "host.json"
    for name, code in ((SOUND, 0), (H200, 0), ("x86-2p2n8c16t-gpu-node-unknown", 1)):
        record.write_text(encode("host", host(name)))
        for source in (name, str(record)):
            found = found_by("--host", name, "--expect", source, code=code)
            assert [one for one in found if one["id"].startswith("drift")] == []
        out = " ".join(homenode("doctor", "--host", name, "--expect", source).stdout.split())
        assert "0 findings" not in out or f"differences from {source}" in out
    found = found_by("--host", SICK, "--expect", SOUND)
    assert {"drift-topology", "drift-device"} <= {one["id"] for one in found}
    done = homenode("doctor", "--host", "hgx-h200", "--expect", "hgx-h100")
    line, _, head, *_ = done.stdout.splitlines()
    assert line.endswith(": counts, memory or distances differ from the record")
    assert head.startswith("critical  cores, CPUs and NICs ")


def test_a_link_that_is_lost_since_is_not_mistaken_for_the_slot_above_it() -> None:
    """The GPU of an HGX host has no lanes any more; its switch's uplink is as fast as ever."""
    gpu = gpus("hgx-h100", 1)[0]
    lost = changed(host("hgx-h100"), lambda d: d.bdf == gpu, link=PciLink(None, None, 32.0, 16))
    (finding,) = find_drift(HGX, lost, "host.json")
    assert (finding.id, finding.severity) == ("drift-link", Severity.INCONCLUSIVE)
    slow = changed(host("hgx-h100"), lambda d: d.bdf == gpu, link=PciLink(8.0, 16, 32.0, 16))
    (finding,) = find_drift(HGX, slow, "host.json")
    assert finding.severity is Severity.CRITICAL


def test_an_idle_link_drifts_by_its_lanes_and_hides_no_slow_uplink() -> None:
    gpu = gpus("hgx-h100", 1)[0]

    def idle(width: int) -> Host:
        return changed(host("hgx-h100"), lambda d: d.bdf == gpu, link=PciLink(2.5, width, 32.0, 16))

    assert list(find_drift(HGX, idle(16), "host.json")) == []
    (narrow,) = find_drift(HGX, idle(8), "host.json")
    assert narrow.severity is Severity.INCONCLUSIVE
    assert "32 GT/s x8" in narrow.observed and "idles at 2.5 GT/s x8" in narrow.observed
    uplink = host("hgx-h100").switch_above(gpu)
    slow = changed(idle(16), lambda d: d.bdf == uplink, link=PciLink(8.0, 16, 32.0, 16))
    found = {f.subject: f for f in find_drift(HGX, slow, "host.json")}
    assert found[f"gpu {gpu}"].severity is Severity.CRITICAL
    assert found[f"gpu {gpu}"].observed == "8 GT/s x16 (15.8 GB/s)"


def test_a_redacted_value_of_the_kernel_command_line_stands_for_any() -> None:
    captured = settings(host("hgx-h100"), kernel_command_line="mitigations=auto,redacted mem=2")
    for now, count in (("mitigations=auto,x mem=2", 0), ("mitigations=off mem=2", 1), ("", 1)):
        live = settings(host("hgx-h100"), kernel_command_line=now)
        for was, there in ((captured, live), (live, captured)):
            assert len(list(find_drift(record_of(was), there, "host.tar.gz"))) == count


@needs_shared
def test_what_a_source_does_not_tell_is_neither_recorded_nor_drift() -> None:
    path = str(shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt"))
    listed = load_host(path)
    assert list(find_drift(record_of(listed), listed, path)) == []
    found = {one.subject: one for one in find_drift(HGX, listed, "host.json")}
    (untold,) = (one for one in found.values() if one.id == "drift-topology" and not one.is_bad)
    assert "packages" in untold.subject and untold.severity is Severity.INCONCLUSIVE
    sized = host(SOUND)
    unsized = structs.replace(
        sized, nodes=tuple(structs.replace(n, memory_bytes=None) for n in sized.nodes)
    )
    (memory,) = find_drift(record_of(sized), unsized, "host.json")
    assert (memory.subject, memory.severity) == ("memory", Severity.INCONCLUSIVE)
    bare = structs.replace(host(SOUND), pci_devices=())
    found_bare = tuple(find_drift(record_of(host(SOUND)), bare, "host.json"))
    assert {one.severity for one in found_bare} == {Severity.INCONCLUSIVE}


def test_findings_about_a_document_name_the_line() -> None:
    lines = [
        "<domain type='kvm'><name>vm</name><memory unit='GiB'>4</memory>",
        "<vcpu>4</vcpu>",
        "<cputune><vcpupin vcpu='0' cpuset='0'/>",
        "<vcpupin vcpu='1' cpuset='1'/>",
        "<vcpupin vcpu='2' cpuset='2'/>",
        "<vcpupin vcpu='3' cpuset='99'/>",
        "<emulatorpin cpuset='0'/></cputune>",
        "<os><type arch='x86_64' machine='q35'>hvm</type></os>",
        "<devices><hostdev mode='subsystem' type='pci' managed='yes'>",
        "<source><address domain='0' bus='0x77' slot='0' function='0'/></source></hostdev>",
        "</devices></domain>",
    ]
    found = diagnosed("\n".join(lines).encode(), SOUND)
    line_of = {finding.id: finding.source for finding in found}
    assert line_of["pin-unknown-cpu"] == "vm.xml:6"
    assert line_of["core-shared"] == "vm.xml:3"
    assert line_of["emulator-on-vcpu"] == "vm.xml:7"
    assert line_of["device-not-on-host"] == "vm.xml:9"
    assert line_of["sockets-implicit"] == "vm.xml"  # there is no <topology> to point at


def test_metrics_escape_what_comes_from_outside() -> None:
    odd = finding("cpu-shared", 'a "b"\n\\c', severity=Severity.WARNING)
    text = format_prometheus(Findings(checked=(), findings=(odd, odd)), {"host": "h"})
    assert 'subject="a \\"b\\"\\n\\\\c"' in text
    assert 'severity="warning"} 2' in text and 'severity="critical"} 0' in text
    assert len([line for line in text.splitlines() if line.startswith("homenode_finding{")]) == 1


@pytest.fixture
def installed_by_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an installation below /opt; the tests run wherever a developer has the tree."""
    monkeypatch.setattr(retrain, "find_other_writer", lambda paths: None)


@pytest.mark.usefixtures("installed_by_root")
def test_units_and_hooks_are_printed_for_the_devices() -> None:
    unit = homenode("doctor", "retrain", "41:00.0", "--print-unit").stdout
    assert "/homenode doctor retrain 0000:41:00.0 --apply" in unit
    assert homenode("doctor", "retrain", "--print-hook").stdout.startswith("#!/bin/sh")
    with pytest.raises(UsageError, match="BDF"):
        retrain_command.retrain(RetrainArguments())


@pytest.mark.usefixtures("installed_by_root")
@pytest.mark.parametrize("option", ["--print-unit", "--print-hook"])
def test_a_target_goes_into_what_is_printed(option: str) -> None:
    done = homenode("doctor", "retrain", "41:00.0", "--target", "3", option)
    assert done.exit_code == 0 and " --target 3 " in done.stdout


def _for_a_group(path: Path) -> None:
    os.chown(path, 0, 65534)
    path.chmod(0o775)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a path that no one else can change")
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("opt/homenode", lambda path: path.chmod(0o777)),
        ("opt", lambda path: path.chmod(0o777)),
        ("opt", lambda path: os.chown(path, 65534, 0)),
        ("opt/homenode", lambda path: os.chown(path, 65534, 0)),
        ("opt", _for_a_group),
        ("elsewhere", lambda path: path.chmod(0o777)),
        ("opt/link", lambda path: os.lchown(path, 65534, 65534)),
    ],
)
def test_a_program_that_somebody_else_can_change_gets_no_unit_and_no_hook(
    part: str, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/root") as text:
        directory = Path(text)
        (directory / "opt").mkdir()
        (directory / "elsewhere").mkdir()
        (directory / "elsewhere" / "homenode").write_text("#!/bin/sh\n")
        (directory / "opt" / "homenode").write_text("#!/bin/sh\n")
        (directory / "opt" / "link").symlink_to("../elsewhere/homenode")
        named = [directory / "opt" / "homenode", directory / "opt" / "link"]
        assert record_directory.find_other_writer(named) is None
        change(directory / part)
        why = record_directory.find_other_writer(named)
        assert why is not None and str(directory / part) in why
        (directory / "opt" / "homenode").chmod(0o777)
        monkeypatch.setattr(sys, "argv", [str(directory / "opt" / "homenode")])
        for option in ("--print-unit", "--print-hook"):
            error = homenode("doctor", "retrain", "41:00.0", option).exception
            assert isinstance(error, InputError) and "only root can change" in str(error)


def test_a_hook_never_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, xml in (((), b""), (("vm", "start"), b"<network/>"), (("vm", "stopped"), b"")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(xml)))
        retrain_command.hook(RetrainHookArguments(words=words))
    assert "expected <domain>" in capsys.readouterr().out


def test_config_space_is_read_and_written_one_register_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bdf = Bdf.parse("41:00.0")
    (tmp_path / str(bdf)).mkdir()
    file = tmp_path / str(bdf) / "config"
    file.write_bytes(bytes(range(256)))
    space = SysfsConfigSpace(str(tmp_path))
    descriptors = Path("/proc/self/fd")
    open_before = sorted(descriptors.iterdir())
    assert space.read(bdf, 0x10, 2) == 0x1110
    space.write(bdf, 0x10, 2, 0xABCD)
    assert sorted(descriptors.iterdir()) == open_before
    assert file.read_bytes()[0x0E:0x14] == bytes((0x0E, 0x0F, 0xCD, 0xAB, 0x12, 0x13))
    file.write_bytes(bytes(64))
    with pytest.raises(HostError, match="root"):
        space.read(bdf, 0x50, 2)
    with pytest.raises(HostError, match=r"42:00\.0"):
        space.read(Bdf.parse("42:00.0"), 0, 2)
    with pytest.raises(HostError, match=r"42:00\.0.* to write"):
        space.write(Bdf.parse("42:00.0"), 0, 2, 0)
    monkeypatch.setattr("os.pwrite", lambda *_: 1)
    with pytest.raises(HostError, match="0x10"):
        space.write(bdf, 0x10, 2, 0)


def test_a_vm_of_another_hypervisor_is_judged_as_a_domain_is(tmp_path: Path) -> None:
    path = tmp_path / "vm"
    path.write_text("cores: 8\nmemory: 32768\nhostpci0: 0000:19:00,pcie=1\nname: a\nsockets: 1\n")
    result = homenode("doctor", path, "--host", "hgx-h100", "--json")
    (finding, *_) = json.loads(result.stdout)["findings"]
    assert (finding["id"], finding["command"]) == (
        "unpinned",
        f"homenode plan {path} --host hgx-h100",
    )


def test_a_name_that_is_no_file_is_a_domain_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def domain(self: object, name: str) -> None:
        asked.append(name)
        raise InputError(f"domain {name!r}: none of that name")

    monkeypatch.setattr("homenode.vm.hypervisor.virsh.Virsh.find_domain", domain)
    assert homenode("doctor", "gpu-vm").exit_code == 2
    assert homenode("doctor", "none.conf").exit_code == 2
    assert asked == ["gpu-vm"]


SICK_SCREEN = """\
rtx5090-epyc7702: 8 critical: the links of 8 GPUs run at 25 % of their rate

critical  8 GPUs: 0000:41:00.0 and 7 more                         pcie-link-slow
  expected  16 GT/s x16 (31.5 GB/s): the port has 16 GT/s, the GPU 32 GT/s
  found     5 GT/s x16 (8.0 GB/s), at the port and at the GPU
  cost      75 % of the bandwidth of each GPU: 23.5 of 31.5 GB/s
  fix       homenode doctor retrain 0000:41:00.0, then the 7 others; if it stays
            slow: slot speed in the firmware setup, riser, seating

unknown  VMs: the description has none
"""
SOUND_SCREEN = """\
hgx-h100: 0 findings
checked  links, devices of one model, nodes, settings
unknown  VMs: the description has none
"""


@pytest.mark.parametrize(
    ("host", "code", "screen"), [(SICK, 1, SICK_SCREEN), ("hgx-h100", 0, SOUND_SCREEN)]
)
def test_a_host_is_judged_on_one_screen(
    host: str, code: int, screen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = homenode("doctor", "--host", host, whole=True)
    assert (done.exit_code, done.stdout) == (code, screen)


def test_an_unread_area_is_in_the_first_line() -> None:
    found = Findings(checked=("nodes",), findings=())
    unread = add_gaps(
        found, [Gap("VMs, pins and allocations", "no daemon", GapKind.VMS)], asks_vms=True
    )
    first, *labels = lines(unread)
    assert first == "h: 0 findings, but VMs were not checked"
    assert labels == ["not read  VMs, pins and allocations: no daemon", "checked   nodes"]


def test_what_could_not_be_judged_is_counted_and_has_the_next_command() -> None:
    idle = finding("pcie-link-idle", "GPU 0000:41:00.0", "16 GT/s x16", "2.5 GT/s x16")
    assert lines(Findings(checked=("links",), findings=(idle,))) == [
        "h: 0 findings, 1 unknown",
        "checked  links",
        "unknown  GPU 0000:41:00.0: 2.5 GT/s x16",
        "next     homenode doctor --under-load",
    ]


def test_the_first_line_keeps_the_letters_of_a_setting() -> None:
    select = finding("slurm-select-type", "the cluster", "SelectType=select/cons_tres", "not set")
    first = lines(Findings(checked=("files",), findings=(select,)))[0]
    assert first == "h: 1 critical: SelectType is not select/cons_tres"


def test_an_answer_of_its_own_counts_what_is_unknown() -> None:
    memory = finding("huge-pages-short", "node 0", "2", "1", severity=Severity.INCONCLUSIVE)
    findings = Findings(checked=("memory",), findings=(memory,))
    assert lines(findings, answer="h matches the plan")[0] == "h matches the plan, 1 unknown"


def lines(findings: Findings, *, explain: bool = False, answer: str | None = None) -> list[str]:
    parts = format_findings(findings, "h", answer=answer, explain=explain).parts
    return [format_plain(part.words) for part in parts if isinstance(part, Text)]


@pytest.mark.parametrize(
    ("id", "subject", "answer"),
    [
        ("unpinned", "vm", "h: 0 findings"),
        (
            "live-busy-neighbour",
            "'a' (process 1)",
            "h: 1 warning: other processes run on the VM's CPUs",
        ),
    ],
)
def test_line_1_is_the_fact_of_a_finding_not_its_id(id: str, subject: str, answer: str) -> None:
    severity = Severity.INFO if "0 findings" in answer else Severity.WARNING
    findings = (finding(id, subject, "a", "b", severity=severity),)
    assert lines(Findings(checked=("pins",), findings=findings))[0] == answer


def test_a_screen_of_many_findings_counts_what_does_not_fit() -> None:
    ids = ("core-shared", "cpu-shared", "memory-unbound", "pin-off-node", "ksm-on", "llc-straddled")
    many = tuple(
        finding(name, f"vCPU {number}", f"e {name}", str(number), severity=Severity.WARNING)
        for name in ids
        for number in range(40)
    )
    text = lines(
        Findings(checked=("pins",), findings=(*many, finding("node-spans-llcs", "node 0")))
    )
    assert len(text) <= 25 and text[0].startswith("h: 240 warnings: ")
    assert text[2].startswith("warning   40 vCPUs: 0-39") and text[2].endswith("core-shared")
    assert "(vCPU 0; each: --explain)" in text[4]
    assert text[-2].startswith("warning  ") and "more: " in text[-2] and "llc-strad" in text[-2]
    assert text[-1] == "info     1: node-spans-llcs (--explain)"
    assert len(format_findings(Findings(checked=(), findings=many), "h", explain=True).parts) > 900


@pytest.mark.parametrize(
    ("subjects", "text"),
    [
        (["vm.xml"], "vm.xml"),
        (["GPU a", "GPU b"], "2 GPUs: a and b"),
        (["GPU a", "GPU b", "GPU c", "GPU d"], "4 GPUs: a and 3 more"),
        (["vCPU 3", "vCPU 4", "vCPU 9"], "3 vCPUs: 3-4,9"),
        (["vCPUs 0,55", "vCPUs 1,56", "vCPUs 2,57", "vCPUs 3,58"], "vCPUs 0,55 and 3 more"),
        (["f:4, GPU 1 (b, node 0)", "c", "d", "e"], "f:4, GPU 1 (b, node 0) and 3 more"),
        (["<hostdev>", "cell 1"], "<hostdev> and cell 1"),
    ],
)
def test_subjects_are_named_or_counted(subjects: list[str], text: str) -> None:
    group = [finding("cpu-shared", subject, "e", "o") for subject in subjects]
    assert group_findings(group) == [group]
    assert format_subjects(group) == text
    block = lines(Findings(checked=(), findings=tuple(group)), explain=True)
    assert text in block[2] and sum(line.startswith("  found  ") for line in block) == 1
    assert (f"  subjects  {', '.join(subjects)}" in block) is (len(subjects) > 3)
