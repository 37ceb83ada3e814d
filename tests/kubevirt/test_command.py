"""homenode kubevirt as a user runs it, apart from the program that it is a part of."""

import json
import sys
from pathlib import Path

import pytest

from homenode.errors import HostError, InputError, UsageError
from homenode.process import run as run_program
from tests.command_line import Result, homenode
from tests.kubevirt.test_check import vmi as checked_vmi
from tests.kubevirt_documents import document, vmi


def run(*arguments: str | Path) -> Result:
    return homenode("kubevirt", *arguments)


@pytest.mark.parametrize(
    ("end", "error"), [(">/dev/full", "No space left"), (">&-", "standard output is closed")]
)
def test_a_document_that_cannot_be_written_is_an_error(end: str, error: str) -> None:
    """Standard output is buffered: none of our variables of Python are passed on."""
    command = f'exec "$1" -m homenode kubevirt on-define-domain --vmi "$2" --domain "$3" {end}'
    argv = ("sh", "-c", command, "sh", sys.executable, vmi(), document([]))
    done = run_program(argv, 300)
    assert done.returncode == HostError.exit_code
    said = done.stderr.splitlines()
    assert len(said) == 2, said
    assert error in done.stderr


def test_the_hook_s_policy_is_an_option() -> None:
    arguments = ("on-define-domain", "--vmi", vmi(), "--domain", "<a")
    assert run(*arguments).exit_code == 2
    assert run(*arguments).stdout == ""
    passed = run(*arguments, "--on-error", "passthrough")
    assert (passed.exit_code, passed.stdout) == (0, "<a")


@pytest.mark.parametrize("option", ["--vmi", "--domain"])
def test_a_file_name_is_no_text_of_a_vm(option: str) -> None:
    texts = {"--vmi": vmi(), "--domain": "<a", option: "vm.file"}
    words = [word for pair in texts.items() for word in pair]
    done = run("on-define-domain", *words, "--on-error", "passthrough")
    assert isinstance(done.exception, UsageError) and done.stdout == ""
    assert option in str(done.exception) and "cat FILE" in str(done.exception)


@pytest.mark.parametrize(("file", "vm"), [("vmi.json", "NAME"), ("gpu-7.yaml", "gpu-7")])
def test_a_missing_file_is_written_by_the_hint(file: str, vm: str) -> None:
    error = run("check", file).exception
    assert isinstance(error, InputError) and error.hint == f"kubectl get vm {vm} -o yaml > {file}"


def test_the_check_reads_files_and_exits_by_what_it_finds(tmp_path: Path) -> None:
    vm, cluster = tmp_path / "vm.json", tmp_path / "kubevirt.json"
    vm.write_text(checked_vmi())
    cluster.write_text(json.dumps({"kind": "KubeVirt"}))
    assert run("check", vm).exit_code == 0
    done = run("check", vm, "--kubevirt", cluster, "--host", "gh200x4", "--json")
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert answer["format"] == "homenode.findings/1"
    assert {finding["id"] for finding in answer["findings"]} == {
        *("device-not-permitted", "gate-off", "gpus-short", "threads-not-siblings")
    }


def test_the_check_says_what_it_cannot_read(tmp_path: Path) -> None:
    absent = run("check", tmp_path / "none.json")
    assert isinstance(absent.exception, InputError)
    other = tmp_path / "vm.yaml"
    other.write_text("kind: Pod\n")
    refused = run("check", other)
    assert isinstance(refused.exception, InputError)
    assert "found 'Pod'" in str(refused.exception)


def test_manifests_are_written_once_and_never_over_what_is_there(tmp_path: Path) -> None:
    directory = tmp_path / "sidecar"
    assert run("manifest", "-o", directory, "--vm", "big").exit_code == 0
    assert len(list(directory.iterdir())) == 8
    assert "name: big" in (directory / "vm.yaml").read_text()
    (directory / "vm.yaml").write_text("mine\n")
    again = run("manifest", "-o", directory)
    assert isinstance(again.exception, UsageError)
    assert (directory / "vm.yaml").read_text() == "mine\n"
