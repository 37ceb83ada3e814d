"""The tutorial, run from its first command to its last on a libvirtd with two NUMA nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_pages import missing_output, read_page
from tests.two_node_libvirt import two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

# The daemon is not the system's, which homenode asks for.
_VIRSH = """#!/bin/bash
exec /usr/bin/virsh -c '{uri}' "${{@//qemu:\\/\\/\\/system/{uri}}}"
"""


def _on_any_machine(text: str) -> str:
    """Without what the CPU decides: the size of its L3, a feature of AMD's, widths of columns."""
    text = re.sub(r"\d+ MiB +(?=4 GiB)", "L3  ", re.sub(" {2,}", "  ", text))
    return re.sub(r"\d+(?= lines added|  topology)|feature, ", "", text)


def test_the_commands_of_the_tutorial_print_what_it_shows() -> None:
    tutorial = read_page("docs/tutorial.md")
    with two_nodes() as daemon:
        directory = daemon.directory / "tutorial"
        directory.mkdir()
        emulator = f"<devices><emulator>{daemon.emulator}</emulator></devices>"
        for name, text in tutorial.files():
            text = text.replace("'kvm'", "'qemu'").replace("<devices/>", emulator)
            (directory / name).write_text(text)
        virsh = directory / "virsh"
        virsh.write_text(_VIRSH.format(uri=daemon.uri))
        virsh.chmod(0o755)
        programs = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = (f"PATH={programs}", f"XDG_STATE_HOME={directory}", "COLUMNS=100")
        inside = ("nsenter", "-m", "-t", str(daemon.pid), "env", "-C", str(directory), *settings)
        for command in tutorial.commands():
            finished = subprocess.run(
                [*inside, *command.arguments],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            printed = _on_any_machine(finished.stdout + finished.stderr)
            if command.redirected:
                (directory / command.redirected).write_text(finished.stdout)
                continue
            if not command.checked:
                assert "memory of cell 0 (node 0)" in printed
                continue
            lacking = missing_output(tuple(map(_on_any_machine, command.shown)), printed)
            assert lacking is None, f"line {command.line} shows {lacking!r}, printed:\n{printed}"
