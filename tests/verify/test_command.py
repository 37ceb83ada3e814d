"""homenode verify: what it reads, what it prints, and with which exit code it ends."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from homenode import formats
from homenode.errors import HomenodeError
from homenode.findings import Findings
from homenode.plan.stored import encode_plan
from tests.command_line import homenode
from tests.verify_documents import SMALL, changed, swapped, tuned
from tests.verify_guests import guest_host


@dataclass(frozen=True)
class Files:
    """A tuned document, its plan, and a guest as planned, on disk."""

    directory: Path
    document: str
    plan: str
    guest: str

    def write(self, name: str, content: bytes) -> str:
        path = self.directory / name
        path.write_bytes(content)
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    tuning = tuned("pin-numa-pci")
    empty = Files(tmp_path, "", "", "")
    return Files(
        tmp_path,
        empty.write("vm.xml", tuning.document),
        empty.write("plan.json", encode_plan(tuning.plan).encode()),
        empty.write("guest.json", formats.encode("host", guest_host()).encode()),
    )


def ends(*words: str) -> tuple[int, str]:
    """(exit code, what it says) of the command."""
    result = homenode("verify", *words)
    if isinstance(result.exception, HomenodeError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_document_as_planned_ends_with_0(files: Files) -> None:
    code, said = ends(files.document, "--plan", files.plan, "--host", SMALL)
    assert code == 0, said
    assert said.startswith("vm.xml matches the plan: layout pin-numa-pci on small-2n8c-2gpu, 0")


def test_findings_end_with_1_and_say_expected_found_and_fix(files: Files) -> None:
    edited = changed(tuned("pin-numa-pci").document, ("busNr='248'", "busNr='241'"))
    wrong = files.write("wrong.xml", edited)
    code, said = ends(wrong, "--host", SMALL)
    assert code == 1
    assert said.startswith("wrong.xml: 1 critical: ") and "bus-window\n" in said
    for part in ("critical  expander bus 1 at busNr 240", "  expected  ", "  found     ", "  fix "):
        assert part in said


def test_json_is_the_documented_format(files: Files) -> None:
    moved = swapped(tuned("pin-numa-pci").document, "bus='0x03' slot", "bus='0x04' slot")
    wrong = files.write("wrong.xml", moved)
    code, said = ends(wrong, "--host", SMALL, "--plan", files.plan, "--json")
    assert code == 1
    stored = formats.decode(said, "findings", Findings, "stdout")
    assert {"device-on-other-cell", "plan-device-address"} <= {f.id for f in stored.findings}
    first = json.loads(said)["findings"][0]
    assert list(first) == [
        *"id severity subject expected observed cost fix".split(),
        *"source devices count headline command element".split(),
    ]


def test_a_guests_own_view_stands_next_to_its_plan(files: Files) -> None:
    words = ("--plan", files.plan, "--guest", files.guest, "--host", SMALL)
    code, said = ends(*words)
    assert code == 0, said
    assert "matches the plan by its guest's own view: 15 facts equal" in said
    wrong = files.write("slow.json", formats.encode("host", guest_host(distance=42)).encode())
    code, said = ends("--plan", files.plan, "--guest", wrong, "--host", SMALL)
    assert code == 1 and "guest-distances" in said


def test_a_start_without_a_terminal_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homenode.cli.verify.names_domain", lambda name: True)
    result = homenode("verify", "gpu-vm", "--start")
    assert isinstance(result.exception, HomenodeError)
    assert result.exception.hint == "homenode verify gpu-vm --start --yes"


def test_a_plan_for_another_host_is_refused_where_the_host_is_named(files: Files) -> None:
    code, said = ends(files.document, "--plan", files.plan, "--host", "x86-1p1n4c4t")
    assert code == 2 and "a plan for host small-2n8c-2gpu" in said


def test_without_a_host_a_plan_for_another_machine_is_compared_with_none(files: Files) -> None:
    code, said = ends(files.document, "--plan", files.plan)
    assert code == 0, said
    assert "not checked  the host: the plan is for" in said and "--host SOURCE" in said


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--guest @guest", 2, "--guest requires VM or --plan"),
        ("--plan @plan --guest @guest --boot", 2, "--boot requires VM"),
        ("/nowhere/vm.xml @host", 2, "no such file"),
        ("@plan @host", 2, "not a VM: expected libvirt"),
        ("@document @host --plan @document", 2, "expected a homenode.plan document"),
        ("@document @host --guest ssh:-oProxyCommand=x", 2, "is not a host name"),
        ("@document @host --boot --connect qemu+unix:///session?socket=/no", 3, "does not answer"),
        ("@document @host --boot --kernel /nowhere", 3, "cannot be read"),
        ("@document @host --keep d --timeout 9", 2, "--timeout requires --boot"),
        ("@document @host --connect qemu:///system", 2, "--connect: missing the name"),
        ("@document @host --boot --keep /proc/kept", 3, "/proc/kept: cannot write"),
        ("--live vm --plan /dev/zero", 2, "a device, not"),
        ("--live vm --lspci @plan", 2, "--live and --lspci cannot be used together"),
    ],
)
def test_what_cannot_be_is_said(files: Files, words: str, code: int, part: str) -> None:
    names = {"@guest": files.guest, "@plan": files.plan, "@document": files.document}
    names["@host"] = f"--host={SMALL}"
    ended, said = ends(*(names.get(word, word) for word in words.split()))
    assert ended == code and part in said, said
