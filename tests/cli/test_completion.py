"""bash, zsh and fish fill in commands, options and values as they do at a prompt."""

import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from homenode.cli import help as completion
from tests.command_line import has_cluster
from tests.processes import run_text
from tests.seeds import part

VMS = ("gpu-vm", "gpu-vm-2", "web")

LINES: dict[str, tuple[str, ...]] = {
    "homenode ver": ("verify",),
    "homenode trial sta": ("status",),
    "homenode plan --layout pin-": ("pin-numa", "pin-numa-pci"),
    "homenode plan --layout=pin-": ("pin-numa", "pin-numa-pci"),
    "homenode plan --host h2": ("h200-xeon8558",),
    "homenode plan --target pro": ("proxmox",),
    "homenode plan gp": ("gpu-vm", "gpu-vm-2"),
    "homenode verify --live w": ("web",),
    "homenode trial gp": ("gpu-vm", "gpu-vm-2"),
    "homenode list findings pcie-link-n": ("pcie-link-narrow",),
    "homenode doctor some": ("some-file.xml",),
    "homenode report some": ("some-file.xml",),
    **({"homenode kubevirt ": ("check", "manifest", "receive")} if has_cluster() else {}),
}
"""What is typed, and what must be filled in or listed."""

_START = {
    "bash": (
        ("bash", "--norc", "--noprofile", "-i"),
        "bind 'set show-all-if-ambiguous on'; bind 'set enable-bracketed-paste off'",
    ),
    "zsh": (("zsh", "-f", "-i"), "autoload -U compinit; compinit -u -D; unsetopt beep"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a shell starts: with a file, and a virsh that knows VMs."""
    path = tmp_path_factory.mktemp("prompt")
    (path / "some-file.xml").touch()
    virsh = path / "bin/virsh"
    virsh.parent.mkdir()
    virsh.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(VMS) + "\n")
    virsh.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        (path / f"script.{shell}").write_text(completion.read_script(shell) + "\n")
    return path


def _environment(directory: Path) -> dict[str, str]:
    path = f"{directory / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {
        **{"HOME": str(directory), "PATH": path, "TERM": "dumb", "LC_ALL": "C.UTF-8"},
        **{"COLUMNS": "200", "PS1": "> "},
    }


def _ask_fish(line: str, directory: Path) -> str:
    """What fish would list behind the line."""
    return run_text(
        ["fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'"],
        env=_environment(directory),
        cwd=directory,
        check=True,
    ).stdout


def _press_tab(shell: str, line: str, names: tuple[str, ...], directory: Path) -> str:
    """What the shell shows after two TABs behind the line, until all names are shown."""
    argv, start = _START[shell]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        os.execvpe(argv[0], argv, _environment(directory))
    try:
        os.write(terminal, f"{start}; source ./script.{shell}; echo rea''dy\n".encode())
        _read_until(terminal, ("ready\n",))
        os.write(terminal, f"{line}\t\t".encode())
        return _read_until(terminal, names)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _read_until(terminal: int, names: tuple[str, ...], timeout_s: float = 20) -> str:
    """What is printed until all names are there or the time is over."""
    printed, end = "", time.monotonic() + timeout_s
    text = ""
    while time.monotonic() < end and not all(name in text for name in names):
        if select.select([terminal], [], [], 1)[0]:
            printed += os.read(terminal, 65536).decode("utf-8", "replace")
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|[\r\x07]", "", printed)
    return text


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        *product(["bash"], part(list(LINES), 0, every=2)),
        *product(["zsh"], part(list(LINES), 1, every=4)),
        *product(["fish"], part(list(LINES), 3, every=4)),
    ],
)
def test_a_shell_fills_in(shell: str, line: str, directory: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    names = LINES[line]
    if shell == "fish":
        shown = _ask_fish(line, directory)
    else:
        shown = _press_tab(shell, line, names, directory)
    assert [name for name in names if name not in shown] == [], shown


def test_completion_knows_layouts_hosts_tests_and_findings() -> None:
    assert "pin-numa-pci" in dict(
        one for one in completion.complete_layouts("") if isinstance(one, tuple)
    )
    assert "default,pin" in completion.complete_layout_lists("default,p")
    assert "default,default" not in completion.complete_layout_lists("default,")
    assert "stream,nccl" in completion.complete_test_lists("stream,n")
    assert "hgx-h100" in completion.complete_host_sources("hgx")
    assert "pcie-link-slow" in completion.complete_finding_ids("")


def test_completion_without_a_daemon_names_no_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert completion.complete_domain_names("") == []
