"""What commands write: to standard output, and never over a file of somebody else's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.cli import terminal
from homenode.errors import HostError, UsageError
from homenode.package_data import list_package_names
from tests.command_line import NEEDS_CLUSTER, homenode

DOCUMENT = str(Path(__file__).parents[2] / "demo" / "gpu-vm.xml")
APPLY = "--host hgx-h100 --gpus 1 --layout pin --vcpus 4 --memory 8GiB".split()
PLAN = ("plan", DOCUMENT, *APPLY)


@pytest.mark.parametrize("option", ["-o", "--save-plan", "--svg"])
def test_a_plan_does_not_overwrite_a_file_that_homenode_did_not_write(
    option: str, tmp_path: Path
) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    done = homenode(*PLAN, option, str(path))
    assert isinstance(done.exception, UsageError)
    assert "--force" in str(done.exception.hint)
    assert path.read_text() == "mine"
    assert homenode(*PLAN, option, str(path), "--force").exit_code == 0
    assert path.read_text() != "mine"
    assert homenode(*PLAN, option, str(path)).exit_code == 0, "it is homenode's own now"


@pytest.mark.parametrize(
    ("option", "start"), [("-o", "<?xml"), ("--save-plan", "{"), ("--svg", "<svg")]
)
def test_a_dash_is_standard_output_and_nothing_else_goes_there(option: str, start: str) -> None:
    done = homenode(*PLAN, option, "-")
    assert done.exit_code == 0
    assert done.stdout.startswith(start) or (start == "<?xml" and done.stdout.startswith("<domain"))
    assert "fits hgx-h100" in done.stderr
    if start == "{":
        json.loads(done.stdout)
    assert not Path("-").exists()


def test_two_things_do_not_go_to_standard_output() -> None:
    assert isinstance(homenode(*PLAN, "-o", "-", "--json").exception, UsageError)


def test_several_files_do_not_go_to_standard_output() -> None:
    with pytest.raises(UsageError, match="need a directory,"):
        terminal.write_new_files(terminal.STANDARD_OUTPUT, {Path("-/a"): "a"})
    assert not Path("-").exists()


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_with_a_closed_standard_output_nothing_is_done(closed: str, tmp_path: Path) -> None:
    for words in (("capture", "-o", tmp_path / "out"), ("apply", "vm", "--yes"), ("list", "hosts")):
        argv = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "homenode", *words]
        done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
        assert done.returncode == HostError.exit_code
        assert done.stderr.startswith("homenode: standard output is closed\n") == (closed == ">&-")
    assert not list(tmp_path.iterdir())


def test_without_standard_error_an_error_is_not_an_answer() -> None:
    argv = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "homenode", "show", "--host"]
    done = subprocess.run([*argv, "none"], stdout=subprocess.PIPE, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (UsageError.exit_code, b"")


@NEEDS_CLUSTER
def test_what_is_piped_to_standard_error_is_neither_wrapped_nor_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.get_error_console.cache_clear()
    terminal.make_console.cache_clear()
    done = homenode("pool", "place", DOCUMENT, "--pool", "hgx-h100*2", "--gpus", "99")
    (refused,) = [line for line in done.stderr.splitlines() if "99 GPUs needed" in line]
    assert refused.endswith("8 of 8 free")


@pytest.mark.parametrize(("words", "most"), [(("hosts",), 25), (("findings", "plan"), 25)])
def test_a_list_of_names_stands_in_columns_and_has_them_all(
    words: tuple[str, ...], most: int
) -> None:
    shown = homenode("list", *words, env={"COLUMNS": "80"}).stdout
    rows = json.loads(homenode("list", *words, "--json").stdout)
    names = [row.get("name") or row["id"] for row in rows]
    title, _, *lines = shown.splitlines()
    assert sorted(" ".join(lines).split()) == sorted(names) and str(len(names)) in title
    assert len(lines) < most and max(map(len, lines)) <= 80


def test_findings_are_listed_by_the_groups_that_their_files_are() -> None:
    title, _, _, *lines = homenode("list", "findings", env={"COLUMNS": "80"}).stdout.splitlines()
    groups = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert set(groups) == {name.removesuffix(".toml") for name in list_package_names("findings")}
    assert int(title.split()[0]) == sum(groups.values()) and len(title) <= 80
    rows = json.loads(homenode("list", "findings", "--json").stdout)
    assert len(rows) == sum(groups.values())
