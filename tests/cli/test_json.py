"""Every command answers as JSON, but those that write a file or run for hours."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Struct

from homenode.cli.apply import ApplyAnswer
from homenode.cli.import_results import ImportedRuns
from homenode.cli.main import PROGRAM
from homenode.cli.trial import TrialStatus
from homenode.errors import UsageError
from homenode.findings import Finding, Gap
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import be_host, every_command, has_cluster, has_room, homenode
from tests.doc_pages import read_page
from tests.measure.test_import import STUDY
from tests.virsh_stand_in import UUID, StandIn

HOST = ("--host", "small-2n8c-2gpu")
WITHOUT = {
    "bench setup": "prints commands, or runs them",
    "capture": "writes an archive, which has a manifest",
    "kubevirt manifest": "writes YAML",
    "kubevirt on-define-domain": "prints a domain XML",
    "kubevirt receive": "stores a run",
    "pool capture": "writes captures",
    "restore": "gives a document back",
    "slurm study": "hours; slurm report --json says how far it is",
    "trial": "hours; trial status --json says how far it is",
    "trial resume": "likewise",
    "trial undo": "likewise",
}


def test_every_command_has_json_or_a_reason() -> None:
    without = {
        " ".join(words[1:])
        for words, one in every_command()
        if one.record and "--json" not in {name for p in one.parameters for name in p.opt.names}
    }
    rooms = {command.name for command in PROGRAM.commands if has_room(command)}
    assert without == {name for name in WITHOUT if name.partition(" ")[0] in rooms}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{stand_in.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    be_host(monkeypatch, HOST[1])
    return stand_in


def _json(kind: str, *words: str | Path) -> dict[str, Any]:
    done = homenode(*words, "--json")
    assert done.exception is None, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["format"] == f"homenode.{kind}/1"
    return found


VM = "demo/gpu-vm.xml"
RUNS = "demo/published/h200"
PRINTED = {
    "show --host hgx-h100": 0,
    f"plan {VM} --host hgx-h100 --gpus 1 --vcpus 4 --memory 8GiB": 0,
    f"plan {VM} --host hgx-h100 --vcpus 9999": 4,
    f"apply {UUID} --host {HOST[1]} --vcpus 9999 --dry-run": 4,
    f"verify {VM} --host hgx-h100": 1,
    "doctor --host hgx-h100": 0,
    "doctor --host rtx5090-epyc7702": 1,
    "doctor --pool small-2n8c-2gpu": 5,
    "trial status": 0,
    f"compare {RUNS}/default {RUNS}/pin-numa": 0,
    f"report {RUNS}": 0,
    "pool show --pool hgx-h100*2": 0,
    f"pool place {VM} --pool hgx-h100*2 --gpus 1": 0,
    f"pool place {VM} --pool hgx-h100*2 --gpus 99": 4,
    "list hosts": 0,
    "list layouts": 0,
    "list findings": 0,
}
"""What answers, with its exit code. The tests of slurm, kubevirt, nccl-topo, bench, import and
doctor retrain read their JSON where their input is made."""


@pytest.mark.parametrize("line", PRINTED)
def test_json_is_alone_on_standard_output(line: str, daemon: StandIn) -> None:
    if line.startswith("pool") and not has_cluster():
        pytest.skip("homenode.cluster is not there")
    answer = homenode(*line.split(), "--json", env={"FORCE_COLOR": "1"}, whole=True)
    assert answer.exit_code == PRINTED[line], answer.output
    json.loads(answer.stdout)
    assert "\x1b" not in answer.stdout and answer.stdout.endswith("\n")


def test_no_color_on_a_terminal_prints_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.command_line._Stream.isatty", lambda self: True)
    words = ("doctor", "--host", "rtx5090-epyc7702")
    styles = [
        set(re.findall(r"\x1b\[([0-9;]+)m", homenode(*words, env=environment).stdout))
        for environment in ({"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"})
    ]
    coloured = [{style for style in found if re.search("[3-49][0-7]", style)} for found in styles]
    assert coloured[0] and not coloured[1]


def test_an_error_wraps_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    words, env = ("doctor", "/etc/os-release", "--host", "hgx-h100"), {"COLUMNS": "80"}
    piped = homenode(*words, env=env, whole=True).stderr.splitlines()
    monkeypatch.setattr("tests.command_line._Stream.isatty", lambda self: True)
    shown = homenode(*words, env=env, whole=True).stderr.splitlines()
    assert len(piped) == 2 and len(shown) > 3 and max(map(len, shown)) <= 80
    assert shown[1].startswith("  qm or xl, ") and shown[-1] == piped[-1]


def test_apply_says_what_it_would_do_and_what_it_did(daemon: StandIn) -> None:
    words = ("apply", UUID, "--layout", "pin-numa", *HOST)
    would = _json("applied", *words, "--dry-run")
    assert would["dry_run"] and would["domains"][0]["changed"]
    assert daemon.definition() == ORIGINAL
    (done,) = _json("applied", *words, "--yes")["domains"]
    assert (done["name"], done["uuid"], done["changed"]) == (NAME, UUID, True)
    assert done["plan"]["format"] == "homenode.plan/1"
    assert done["plan"]["vm"]["name"] == NAME
    assert Path(done["original"]).read_bytes().strip() == ORIGINAL.strip()
    assert not _json("applied", *words, "--yes")["domains"][0]["changed"]
    (again,) = _json("applied", "apply", UUID, *HOST, "--dry-run")["domains"]
    assert not again["changed"]
    assert isinstance(homenode(*words, "--json").exception, UsageError), "it would ask"


def test_apply_names_what_stands_against_it(daemon: StandIn) -> None:
    daemon.put("saved", "yes")
    done = homenode("apply", UUID, "--layout", "pin", *HOST, "--dry-run", "--json")
    assert done.exit_code == 2
    (domain,) = json.loads(done.stdout)["domains"]
    assert [one["constraint"] for one in domain["obstacles"]] == ["managed-save"]


def test_imported_runs_name_what_was_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "h200" / "default"
    directory.mkdir(parents=True)
    for file, text in STUDY.items():
        (directory / file).write_text(text)
    (tmp_path / "other").write_text("nothing that is known")
    words = ("import", tmp_path, "-o", tmp_path / "out", "--dry-run")
    found = _json("imported-runs", *words)
    assert not found["written"] and not (tmp_path / "out").exists()
    assert [run["name"] for run in found["runs"]] == ["default"]
    assert found["omitted"]


@pytest.mark.parametrize("record", [ApplyAnswer, ImportedRuns, TrialStatus])
def test_every_field_of_an_answer_is_documented(record: type[Struct]) -> None:
    words = read_page("docs/reference/formats/answers.md").words_in_code()
    fields = [name for one in _records(record) for name in one.__struct_fields__]
    assert not set(fields) - words


def _records(of: type[Struct]) -> Iterator[type[Struct]]:
    """The record, and those of this program's answers below it."""
    yield of
    for field in msgspec.structs.fields(of):
        for one in (field.type, *get_args(field.type)):
            if isinstance(one, type) and issubclass(one, Struct) and one not in (Gap, Finding):
                yield from _records(one)
