"""Names that others chose, in everything that homenode writes for other programs: each is one name
to the program that reads it, or is refused."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.change.retrain.plan import render_libvirt_hook, render_systemd_unit
from homenode.errors import InputError, UsageError
from homenode.plan.pipeline import PlannedFile, make_vm
from homenode.text import command_line, operands
from homenode.vm.targets.registry import find_target
from homenode.vm.targets.target import Rendering
from tests.hostile_names import NAMES, SHELL_NAMES, run_shell, stub
from tests.processes import run_text
from tests.targets.written import host_named, options, written

GPU = Bdf.parse("0000:81:00.0")


def without_path(text: str) -> str:
    """A hook that finds the stand-ins."""
    line = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
    assert text.count(line) == 1
    return text.replace(line, "")


def parses(shell: str, text: str) -> bool:
    return subprocess.run([shell, "-n"], input=text.encode(), capture_output=True).returncode == 0


# What targets' files say


def rendered(target: str, name: str) -> Rendering:
    wanted = options("pin-numa")
    machine = host_named("small-2n8c-2gpu")
    guest = make_vm(wanted, machine.architecture).guest
    plan = _plan(target).plan
    return find_target(target).render(plan, structs.replace(guest, name=name), machine, None, "vm")


@cache
def _plan(target: str) -> PlannedFile:
    return written(target, "small-2n8c-2gpu", options("pin-numa"))


@pytest.mark.parametrize("target", ["qemu", "proxmox"])
def test_bash_reads_every_script_of_a_target(target: str) -> None:
    for name in NAMES:
        try:
            made = rendered(target, name)
        except InputError:
            assert not name.isprintable() or not name.strip(), name
            continue
        for text in (made.document, *(text for _, text in made.companions)):
            if text.startswith(b"#!"):
                assert parses("bash", text.decode()), name


# Hooks, units and scripts


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_starts_the_program_of_a_unit_whatever_its_directory_is_called(
    tmp_path: Path,
) -> None:
    units = {}
    for number, name in enumerate(SHELL_NAMES):
        if "/" in name or name in ("", ".", "..") or len(name) > 250:
            continue
        program = tmp_path / "programs" / name / "homenode"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        try:
            unit = render_systemd_unit([GPU], str(program))
        except UsageError:
            assert not name.isprintable() or set(name) & set("'\"\\"), name
            continue
        units[f"u{number}.service"] = name
        (tmp_path / f"u{number}.service").write_text(unit)
    assert len(units) > 30
    done = run_text(
        ["systemd-analyze", "verify", *(str(tmp_path / unit) for unit in units)], errors="replace"
    )
    about = [line for line in done.stderr.splitlines() if any(unit in line for unit in units)]
    assert about == []


def test_libvirts_hook_takes_no_vm_for_an_option(tmp_path: Path) -> None:
    stubs = stub(tmp_path / "bin", "homenode", "timeout", "logger")
    (stubs / "timeout").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (stubs / "logger").write_text("#!/bin/sh\nwhile read -r line; do :; done\n")
    hook = tmp_path / "hook"
    hook.write_text(without_path(render_libvirt_hook("homenode", 4)))
    for name in SHELL_NAMES:
        calls = run_shell(hook, name, "start", "begin", "-", shell="sh", stubs=stubs)
        asked = next(call for call in calls if call[0] == "homenode")
        assert asked == ["homenode", "doctor", "hook", "--target", "4", "--", name, "start"]


@pytest.mark.parametrize("word", SHELL_NAMES, ids=ascii)
def test_a_name_at_the_end_of_a_command_is_no_option(word: str) -> None:
    line = command_line("printf", "%s\\n", "x", *operands(word))
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    words = operands(word)
    assert words[-1] == word and (words[0] == "--") == word.startswith("-")
    assert said.split(b"\n", 2)[0] == b"x"
