"""A certificate in the metadata of a VM that a real libvirtd runs: each claim is proved again."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from homenode.change.certificate_step import CertificateStep, certificate_journal
from homenode.change.journal import Journal, default_root
from homenode.check.verify.boot.libvirt import SYSTEM, answering
from homenode.check.watch.alert import WatchState, changes
from homenode.check.watch.observation import look
from homenode.errors import HostError
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.process import Completed, run
from homenode.vm.domain.merge import same_definition
from homenode.vm.hypervisor.virsh import Virsh
from tests.command_line import homenode

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

CERTIFICATE = "urn:homenode:certificate:1"
DOCUMENT = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  <memoryBacking><allocation mode='immediate'/></memoryBacking>
  <vcpu>2</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/></cputune>
  <numatune><memory mode='strict' nodeset='0'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices><controller type='usb' model='none'/><memballoon model='none'/></devices>
</domain>
"""


def virsh(*words: str, input: str | None = None) -> Completed:
    return run(("virsh", "-q", "-c", SYSTEM, *words), 120, input)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen here")
    path = tmp_path_factory.mktemp("key") / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ops", "-f", str(path)]
    subprocess.run(words, check=True)
    return path


@pytest.fixture
def certified(key: Path) -> Iterator[str]:
    """A paused VM with a certificate in its metadata."""
    if os.geteuid() != 0 or answering(None) is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip(f"needs root, 2 PUs and a libvirtd at {SYSTEM}")
    name = f"homenode-test-{uuid.uuid4().hex[:8]}"
    assert virsh("define", "/dev/stdin", input=DOCUMENT.format(name=name)).returncode == 0
    number = virsh("domuuid", name).stdout.strip()
    try:
        assert virsh("start", "--paused", name).returncode == 0
        homenode("verify", "--live", name, "--certify", str(key), "--in-domain")
        yield name
    finally:
        virsh("destroy", name)
        virsh("undefine", name)
        for folder in (
            default_root() / "certificates" / number,
            *default_root().glob(f"domains/{number}@*"),
        ):
            shutil.rmtree(folder, ignore_errors=True)


def certificate(name: str) -> str:
    return virsh("metadata", name, CERTIFICATE, "--config").stdout


def refuted(state: WatchState) -> list[tuple[str, str]]:
    return [
        (one.id, one.subject)
        for alert in state.alerts
        for one in alert.findings
        if one.id.startswith("certificate-")
    ]


def test_each_claim_is_proved_refuted_or_stale(
    certified: str, monkeypatch: pytest.MonkeyPatch, key: Path
) -> None:
    first = look(LiveSnapshot(), None, SYSTEM, signers=key.with_suffix(".pub")).state
    assert refuted(first) == []
    assert first.claims.proved >= 7, "VM, signature, host, document, two vCPUs, memory"
    assert virsh("vcpupin", certified, "0", "1", "--live").returncode == 0
    moved = look(LiveSnapshot(), None, SYSTEM, first).state
    assert refuted(moved) == [("certificate-refuted", "vCPU 0")]
    with monkeypatch.context() as patched:

        def unread(*words: object) -> None:
            raise HostError("/proc is gone")

        patched.setattr("homenode.check.verify.live.capture.capture_running_vm", unread)
        blind = look(LiveSnapshot(), None, SYSTEM, moved).state
    found = changes(moved, blind)
    assert (found.cleared, [one.about for one in found.stale]) == ((), ["vCPU 0"])
    assert virsh("vcpupin", certified, "0", "0", "--live").returncode == 0
    back = look(LiveSnapshot(), None, SYSTEM, blind).state
    assert [one.about for one in changes(blind, back).cleared] == ["vCPU 0"]


def test_what_is_changed_in_the_metadata_or_taken_out_is_named(certified: str) -> None:
    text = certificate(certified)
    for other in (text.replace('PU 0"', 'PU 1"'), text.replace('"', "'", 1)):
        assert other != text
        done = virsh(
            "metadata", certified, CERTIFICATE, "--live", "--key", "homenode", "--set", other
        )
        assert done.returncode == 0
        found = refuted(look(LiveSnapshot(), None, SYSTEM).state)
        assert [one for one, _ in found] == ["certificate-changed"]
    virsh("metadata", certified, CERTIFICATE, "--live", "--remove")
    assert [one for one, _ in refuted(look(LiveSnapshot(), None, SYSTEM).state)] == [
        "certificate-changed"
    ]


def test_apply_keeps_it_and_restore_gives_the_original_back(certified: str, key: Path) -> None:
    homenode("restore", certified)
    original = virsh("dumpxml", "--inactive", certified).stdout.encode()
    homenode("apply", certified, "-l", "pin", "--yes")
    homenode("verify", "--live", certified, "--certify", str(key), "--in-domain")
    homenode("apply", certified, "-l", "pin-numa", "--yes")
    assert "homenode.certificate/1" in certificate(certified)
    assert certified in homenode("restore", "--list").stdout
    homenode("restore", certified)
    now = virsh("dumpxml", "--inactive", certified).stdout.encode()
    assert same_definition(now, original) and certificate(certified) == ""


def live(name: str) -> str:
    return virsh("metadata", name, CERTIFICATE, "--live").stdout


def certifying(name: str) -> tuple[CertificateStep, Journal]:
    number = virsh("domuuid", name).stdout.strip()
    step = CertificateStep(virsh=Virsh(SYSTEM), uuid=number, name=name)
    return step, certificate_journal(default_root(), step.virsh, number, name)


def test_the_undo_that_is_printed_works_while_the_vm_runs_and_leaves_its_layout(
    certified: str, key: Path
) -> None:
    virsh("destroy", certified)
    homenode("apply", certified, "-l", "pin-bound", "--yes")
    assert certificate(certified) != "", "the original that is saved has it"
    virsh("start", "--paused", certified)
    said = homenode("verify", "--live", certified, "--certify", str(key), "--in-domain").stderr
    undo = said.rpartition("undo: homenode ")[2].split()
    assert homenode(*undo).exit_code == 0
    assert (certificate(certified), live(certified)) == ("", "")
    assert "urn:homenode:layout:1" in virsh("dumpxml", "--inactive", certified).stdout
    assert homenode(*undo).exit_code == 2
    virsh("destroy", certified)
    homenode("restore", certified)
    assert "homenode" not in virsh("dumpxml", "--inactive", certified).stdout.partition("<os>")[2]
    assert certificate(certified) == "", "the saved original had it, and it was taken out since"


@pytest.mark.parametrize("renewals", [1, 3])
def test_any_number_of_renewals_is_undone_to_what_was_there_before(
    certified: str, key: Path, renewals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, journal = certifying(certified)
    for number in range(renewals):
        structs.replace(step, text=f"renewed {number}").do(journal.write)
    written = Virsh.set_metadata

    def cut_short(self: Virsh, uuid: str, namespace: str, text: str, *, live: bool) -> None:
        if live or "early" in text:
            raise KeyboardInterrupt
        written(self, uuid, namespace, text, live=live)

    for text in ("early: libvirt did not hear of it", "the definition alone has it"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Virsh, "set_metadata", cut_short)
            structs.replace(step, text=text).do(journal.write)
    assert len({certificate(certified), live(certified)}) == 2, "one of the two was written"
    homenode("restore", certified)
    assert (certificate(certified), live(certified)) == ("", "")


def test_a_certificate_of_somebody_else_comes_back_after_renewals(certified: str) -> None:
    step, journal = certifying(certified)
    theirs = "<certificate>theirs</certificate>"
    for place in ("--config", "--live"):
        virsh("metadata", certified, CERTIFICATE, place, "--key", "homenode", "--set", theirs)
    for text in ("ours", "renewed"):
        structs.replace(step, text=text).do(journal.write)
    homenode("restore", certified)
    assert "theirs" in certificate(certified) and "theirs" in live(certified)
