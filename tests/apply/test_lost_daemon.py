"""A libvirtd that is killed while a domain is defined: each message names commands that work."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.errors import HostError
from homenode.measure.trial import guest
from homenode.measure.trial.guest import retry_while_unavailable
from homenode.vm.hypervisor.virsh import Virsh
from tests.command_line import be_host, homenode
from tests.two_node_libvirt import TwoNodes, two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

NAME = "lost"
DOCUMENT = f"""<domain type='qemu'><name>{NAME}</name>
  <memory unit='MiB'>256</memory><vcpu>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/><apic/></features>
  <devices><controller type='usb' model='none'/><memballoon model='none'/></devices></domain>"""
KILLS = """#!/bin/sh
case "$*" in *" define "*) kill -9 "$(cat "$0.kill")" ;; esac
exec {virsh} "$@"
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    monkeypatch.setattr("homenode.change.journal.default_root", lambda: tmp_path / "state")
    with two_nodes() as found:
        document = found.directory / "vm.xml"
        document.write_text(DOCUMENT)
        defined = found.virsh("define", str(document))
        assert defined.returncode == 0, defined.stderr
        be_host(monkeypatch, str(found.host))
        yield found


def definition(daemon: TwoNodes) -> str:
    return daemon.virsh("dumpxml", "--inactive", NAME).stdout


@pytest.mark.nightly
def test_a_libvirtd_killed_under_a_change_is_named_with_commands_that_work(
    daemon: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "virsh").write_text(KILLS.format(virsh=shutil.which("virsh")))
    (programs / "virsh").chmod(0o755)
    before = definition(daemon)

    def while_killed(*words: str) -> str:
        """The hint of a command under which the daemon is killed; it runs again afterwards."""
        (programs / "virsh.kill").write_text(str(daemon.pid))
        with monkeypatch.context() as patched:
            patched.setenv("PATH", f"{programs}:{os.environ['PATH']}")
            done = homenode(*words)
        assert isinstance(done.exception, HostError), done.output
        daemon.kill()
        daemon.start()
        return str(done.exception.hint)

    connect = ("--connect", daemon.uri)
    apply = ("apply", NAME, "--layout", "pin", "--yes", "-q", *connect)
    restore = ("restore", NAME, *connect)
    assert shlex.join(("homenode", *restore)) in while_killed(*apply)
    assert definition(daemon) == before
    assert homenode(*apply).exit_code == 0
    assert definition(daemon) != before
    assert shlex.join(("homenode", *restore)) in while_killed(*restore, "--yes")
    assert homenode(*restore, "--yes").exit_code == 0
    assert definition(daemon) == before

    monkeypatch.setattr(guest, "DAEMON_S", 0.5)
    daemon.kill()
    said: list[str] = []
    with pytest.raises(HostError):
        retry_while_unavailable(lambda: Virsh(daemon.uri).find_domain(NAME), "t-1", said.append)
    (line,) = said
    assert "homenode trial resume t-1" in line and "homenode trial undo t-1" in line
    daemon.start()
