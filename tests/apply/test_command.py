"""homenode apply and the way back, as commands, on a stand-in for virsh."""

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from homenode.change.journal import DomainStore, default_root
from homenode.check.verify.start import PausedStart, open_paused_journal
from homenode.cli.arguments.place import PlanArguments, RestoreArguments
from homenode.cli.plan import plan
from homenode.cli.restore import restore as work
from homenode.errors import InputError, UsageError
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.restore import write_tuned
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import apply, be_host, homenode, restore
from tests.virsh_stand_in import URI, UUID, StandIn

HOST = "small-2n8c-2gpu"


def test_apply_plans_defines_and_says_how_to_undo_it(
    daemon: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "p.json"
    apply([NAME], yes=True, layout="pin-numa", host=HOST, save_plan=plan)
    assert b"<vcpupin" in daemon.definition()
    assert json.loads(plan.read_text())["vm"]["name"] == NAME
    shown = capsys.readouterr().out
    assert shown.startswith(f"{NAME}: defined; its next start uses it\n") and "node 0" in shown
    assert shown.endswith(f"undo  homenode restore {UUID}\n")
    restore([NAME])
    assert daemon.definition() == ORIGINAL
    restore([UUID])
    assert "has its original definition already" in capsys.readouterr().out


def test_plan_takes_a_vm_of_libvirt_by_its_name_and_prints_how_to_define_it(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tmp_path / "tuned.xml"
    monkeypatch.setattr("homenode.cli.plan.load_host", lambda *_, **__: load_host(HOST))
    done = homenode("plan", "--", NAME, whole=True)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{NAME} fits ")
    plan(PlanArguments(document=NAME, output=tuned, quiet=True))
    assert tuned.with_name("tuned.xml.orig").read_bytes().rstrip() == ORIGINAL.rstrip()
    steps = {
        (): f"homenode apply {UUID} --domain {tuned}",
        ("--host", HOST): f"on {HOST}: virsh define {tuned}",
    }
    for words, step in steps.items():
        done = homenode("plan", *words, "-o", tuned, "--", NAME, whole=True)
        assert re.findall(r"^next +(.*)$", done.stdout, re.M) == [step]
    missing = homenode("plan", "gpu-mv", whole=True)
    assert f"no VM named gpu-mv; here: {NAME} (shut off)" in missing.stderr


SCREENS = """\
change: 228 lines added, 3 removed in the definition of gpu-vm (all: --diff)
  cputune       +92      88 vcpupin, emulatorpin, iothreadpin
  controllers   +57  -1  2 pcie-expander-bus, 8 pcie-root-port, pcihole64
  hostdevs      +48      8 GPUs
  cpu           +18  -1  2 guest nodes, topology, cache
  numatune       +5      strict, for each guest node
  other          +8  -1  metadata, qemu:commandline (libvirt marks it tainted)
dry run: nothing was changed
gpu-vm: defined; its next start uses it
next  virsh -c qemu:///system start gpu-vm, then homenode verify --live gpu-vm
undo  homenode restore gpu-vm
gpu-vm: has this definition already
dry run: nothing was changed
gpu-vm: homenode apply of TIME would be undone: 3 lines added, 228
  removed (all: --diff)
dry run: nothing was changed
gpu-vm was edited after homenode apply: vcpu 88, now 64
  hint: homenode restore gpu-vm --keep-edits
gpu-vm: restored, equal to its original; its next start uses it
"""


def test_apply_and_restore_answer_in_the_first_line_and_keep_the_change_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Path(__file__).parents[2] / "demo" / "gpu-vm.xml"
    xml = re.sub(rb"<uuid>.*</uuid>", f"<uuid>{UUID}</uuid>".encode(), document.read_bytes())
    daemon = StandIn(tmp_path, "gpu-vm", xml)
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "records"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    be_host(monkeypatch, "hgx-h100")
    words = ("apply", "gpu-vm", "--layout", "pin-numa-pci", "--quiet")
    shown = homenode(*words, "--gpus", "8", "--dry-run").stdout
    assert daemon.definition() == xml and not (tmp_path / "records").exists()
    diff = homenode(*words, "--gpus", "8", "--dry-run", "--diff").stdout
    assert len(diff.splitlines()) > 228 and "+    <vcpupin vcpu='0'" in diff
    shown += homenode(*words, "--gpus", "8", "--yes").stdout + homenode(*words, "--dry-run").stdout
    preview = homenode("restore", "gpu-vm", "--dry-run").stdout
    shown += re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", preview)
    tuned = daemon.definition()
    daemon.put_definition(tuned.replace(b"'static'>88<", b"'static'>64<"))
    shown += f"{homenode('restore', 'gpu-vm', '--yes').exception}\n"
    daemon.put_definition(tuned)
    shown += homenode("restore", "gpu-vm", "--yes").stdout
    assert shown == SCREENS
    assert daemon.definition() == xml


def test_a_second_apply_answers_first_that_nothing_changes_and_that_the_layout_is_kept(
    daemon: StandIn,
) -> None:
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)
    lines = homenode("apply", "--host", HOST, "--dry-run", "--", NAME).stdout.splitlines()
    assert lines[0] == f"{NAME}: has this definition already"
    kept = f"pin, kept from the metadata of {NAME}: planned for this host as it is"
    assert [line[6:].strip() for line in lines if line.startswith("layout ")] == [kept]


def test_a_dry_run_names_what_stands_against_it_and_exits_as_the_run_would(
    daemon: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.put("saved", "yes")
    for is_dry in (True, False):
        with pytest.raises(UsageError, match="managed-save"):
            apply([NAME], layout="pin", host=HOST, quiet=True, dry_run=is_dry, yes=not is_dry)
    assert "dry run" not in capsys.readouterr().out


def test_a_document_of_plan_can_be_applied(daemon: StandIn, tmp_path: Path) -> None:
    document = tmp_path / "out.xml"
    planned = plan_file(ORIGINAL, NAME, PlanOptions("pin-numa-pci"), load_host(HOST))
    document.write_bytes(planned.document)
    apply([NAME], yes=True, domain=document)
    assert b"<memnode" in daemon.definition()
    with pytest.raises(UsageError, match="--layout and --domain cannot be used together"):
        apply([NAME], yes=True, layout="pin", domain=document)
    with pytest.raises(InputError, match="no such file"):
        apply([NAME], yes=True, domain=tmp_path / "none.xml")


def test_without_a_layout_the_evidence_chooses_one(
    daemon: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    apply([NAME], yes=True, host=HOST)
    assert " (auto, " in capsys.readouterr().out
    assert b"<vcpupin" in daemon.definition()


def test_a_domain_that_is_gone_is_brought_back_by_what_is_said(daemon: StandIn) -> None:
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)
    daemon.put("undefined", "")
    for name in (NAME, UUID, f" {NAME}"):
        with pytest.raises(InputError, match="no VM named") as gone:
            restore([name])
        said = (gone.value.hint or "").partition("define ")[2]
        assert Path(said).read_bytes().rstrip() == ORIGINAL.rstrip()
    with pytest.raises(InputError) as gone:
        restore(["another"])
    assert "define" not in (gone.value.hint or "")


def test_restore_says_what_it_can_do_for_a_running_domain_and_quotes_a_snapshots_name(
    daemon: StandIn,
) -> None:
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    daemon.put("id", "3")
    daemon.put("snapshots/it's $(here)", "<domainsnapshot/>")
    with pytest.raises(UsageError, match=r"\(running\); .*\(snapshot\)") as refused:
        restore([NAME])
    assert refused.value.hint is not None and "--" not in refused.value.hint
    assert shlex.quote("it's $(here)") in refused.value.hint
    with pytest.raises(UsageError, match=r"--live-pins.*--name COPY"):
        apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)


def test_a_name_that_no_file_could_have_is_a_domains(daemon: StandIn) -> None:
    with pytest.raises(InputError, match="no VM named"):
        restore(["a" * 300])


def test_live_pins_tell_each_move_and_restore_takes_them_back(
    daemon: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.put("id", "9")
    for thread in ("vcpu.0", "vcpu.1", "vcpu.2", "vcpu.3", "emulator.0", "iothread.1"):
        daemon.put(f"pins/{thread}", "0-7")
    apply([NAME], layout="pin", host=HOST, quiet=True, live_pins=True, dry_run=True)
    assert "     4 vcpu      to CPUs 0-" in capsys.readouterr().out
    assert daemon.get("pins/vcpu.0") == "0-7"
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True, live_pins=True)
    assert daemon.get("pins/vcpu.0") != "0-7"
    assert "6 threads moved; its definition is as it was" in capsys.readouterr().out
    work(RestoreArguments(targets=(NAME,), dry_run=True))
    assert "6 threads would move back to CPUs 0-7" in capsys.readouterr().out
    assert daemon.get("pins/vcpu.0") != "0-7"
    restore([NAME])
    assert daemon.get("pins/vcpu.0") == "0-7"
    assert daemon.definition() == ORIGINAL
    assert DomainStore(Path("/nowhere"), URI, UUID).definition() is None


def test_a_running_vm_gets_its_pins_back_and_one_left_paused_its_end_not_its_original(
    daemon: StandIn,
) -> None:
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)
    tuned = daemon.definition()
    daemon.put("id", "9")
    daemon.put("pins/vcpu.0", "0-7")
    for thread in ("emulator.0", "iothread.1"):
        daemon.put(f"pins/{thread}", "0-7")
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True, live_pins=True)
    restore([NAME])
    assert daemon.get("pins/vcpu.0") == "0-7"
    (daemon.state / "id").unlink()
    step = PausedStart(virsh=Virsh(URI), uuid=UUID, name=NAME)
    step.do(open_paused_journal(default_root(), step.virsh, UUID, NAME).write)
    daemon.put("run-state", "paused")
    assert homenode("restore", "--list").stdout.count(f"  homenode restore {UUID}") == 2
    restore([NAME])
    assert not (daemon.state / "id").exists()
    assert daemon.definition() == tuned
    restore([NAME])
    assert daemon.definition() == ORIGINAL


def test_a_daemon_elsewhere_needs_its_host_named(daemon: StandIn) -> None:
    with pytest.raises(UsageError, match="requires --host"):
        apply([NAME], yes=True, layout="pin", connect="qemu+ssh://gpu7/system")


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["vm", "./vm.xml"], {}),
        (["vm", "other"], {"live_pins": True}),
        (["vm", "other"], {"domain": Path("vm.xml")}),
        (["vm", "other"], {"save_plan": Path("plan.json")}),
    ],
)
def test_what_is_for_one_domain_is_refused_for_several(
    daemon: StandIn, names: list[str], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        apply(names, yes=True, host=HOST, **options)
    with pytest.raises(UsageError):
        restore([*names, "third"], forget=True)
    assert daemon.definition() == ORIGINAL


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_restore_asks_and_changes_nothing_without_a_yes(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)
    tuned = daemon.definition()
    with pytest.raises(UsageError, match="not a terminal"):
        work(RestoreArguments(targets=(NAME,)))
    monkeypatch.setattr("homenode.cli.terminal.is_interactive", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(SystemExit) as ended:
        work(RestoreArguments(targets=(NAME,)))
    assert ended.value.code == 1
    assert daemon.definition() == tuned
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    work(RestoreArguments(targets=(NAME,)))
    assert daemon.definition() == ORIGINAL


def test_restore_of_a_file_asks_too(tmp_path: Path) -> None:
    output = tmp_path / "tuned.xml"
    write_tuned(output, b"<original/>\n", b"<tuned/>\n")
    with pytest.raises(UsageError, match="not a terminal"):
        work(RestoreArguments(targets=(str(output),)))
    work(RestoreArguments(targets=(str(output),), dry_run=True))
    assert output.read_bytes() == b"<tuned/>\n"
    work(RestoreArguments(targets=(str(output),), yes=True))
    assert output.read_bytes() == b"<original/>\n"


def test_restore_closes_the_record_of_a_domain_that_has_its_original(daemon: StandIn) -> None:
    for _ in range(2):  # the original is defined by hand: it is no edit
        apply([NAME], yes=True, layout="pin", host=HOST, quiet=True)
        daemon.put_definition(ORIGINAL)
    store = DomainStore(default_root(), URI, UUID)
    assert store.journal.to_undo()
    restore([NAME])
    assert not store.journal.to_undo()
    assert daemon.definition() == ORIGINAL
