"""Several homenodes at once on one host: no core is given to two VMs, and none waits for ever."""

import fcntl
import io
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from homenode.change import journal
from homenode.change.apply.definition import forget_original, restore_definition
from homenode.change.apply.live_pins import apply_live_pins, restore_live_pins
from homenode.change.journal import (
    PIN,
    ChangeEntry,
    ChangeState,
    DomainStore,
    OpenChange,
    default_root,
    journals_of_domains,
    lock_host,
    lock_of_one_user,
    open_changes,
)
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, HostError, UsageError
from homenode.machine.description.parse import parse_description
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import MemoryBinding
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import apply, restore
from tests.processes import code_of, start_child, wait_for
from tests.rendered.machine import render
from tests.tree_writer import write_tree
from tests.virsh_stand_in import URI, UUID

VMS = 10
HOST = """
format = 1
name = "small"
about = "two nodes of 6 cores, five GPUs and five huge pages on each"
packages = 2
cores_per_package = 6
memory_per_node = "64GiB"
hugepages_per_node = { "1GiB" = 5 }
distances = { other_package = 20 }
[model.gpu]
class = "gpu"
bars = ["16MiB", "256MiB prefetchable"]
[[root]]
node = [0, 1]
bus = [0x10, 0x80]
ports = ["gpu", "gpu", "gpu", "gpu", "gpu"]
"""

_VIRSH = r"""#!/bin/sh
# virsh --connect URI --quiet COMMAND ARGUMENTS...: domains as files, which the host shows.
state=@STATE@; host=@HOST@
shift 3
command=$1; shift
find_argument() { argument= option=$1; shift
  while [ $# -gt 0 ]; do [ "$1" = "$option" ] && { argument=$2; return; }; shift; done; }
find_argument --domain "$@"; domain=$argument
case $command in
  domuuid) cat "$state/$domain.uuid" ;;
  dominfo)
    name=$(sed -n 's,.*<name>\(.*\)</name>.*,\1,p' "$state/$domain.xml")
    printf 'Id:             -\nName:           %s\nUUID:           %s\n' "$name" "$domain"
    [ -e "$state/$domain.saved" ] && saved=yes || saved=no
    printf 'State:          shut off\nPersistent:     yes\nManaged save:   %s\n' $saved ;;
  dumpxml) cat "$state/$domain.xml" && echo ;;
  snapshot-list) ;;
  define)
    find_argument --file "$@"; file=$argument
    [ -e "$state/slow" ] && { touch "$state/begun"; sleep "$(cat "$state/slow")"; }
    grep -q "<uuid>$(cat "$state/refuses" 2>/dev/null || echo none)" "$file" &&
      { echo 'error: Failed to define: refused' >&2; exit 1; }
    uuid=$(sed -n 's,.*<uuid>\(.*\)</uuid>.*,\1,p' "$file")
    sed '/<!--/d' "$file" >"$state/$uuid.new" && mv "$state/$uuid.new" "$state/$uuid.xml"
    { echo '<domains>'; cat "$state"/*.xml; echo '</domains>'; } >"$state/all.$$"
    mv "$state/all.$$" "$host/commands/virsh-domains" ;;
  *) echo "error: unknown command: '$command'" >&2; exit 1 ;;
esac
"""


def uuid_of(number: int) -> str:
    return f"{UUID[:-1]}{number}"


class SmallHost:
    """One node of a few cores, and a daemon whose domains the host's directory shows at once."""

    connect = URI

    def __init__(self, directory: Path) -> None:
        self.directory, self.state, self.bin = (
            directory / "host",
            directory / "state",
            directory / "bin",
        )
        write_tree(render(parse_description(HOST, "small")), self.directory)
        (self.directory / "commands/virsh-domains").write_text("<domains></domains>")
        self.state.mkdir()
        self.bin.mkdir()
        script = _VIRSH.replace("@STATE@", shlex.quote(str(self.state)))
        virsh = self.bin / "virsh"
        virsh.write_text(script.replace("@HOST@", shlex.quote(str(self.directory))))
        virsh.chmod(0o755)
        for number in range(VMS):
            name, uuid = f"vm{number}", uuid_of(number)
            document = ORIGINAL.replace(NAME.encode(), name.encode())
            document = document.replace(UUID.encode(), uuid.encode())
            document = document.replace(b"'static'>4<", b"'static'>1<")
            (self.state / f"{uuid}.xml").write_bytes(document)
            (self.state / f"{name}.uuid").write_text(uuid)

    def apply(self, *numbers: int) -> None:
        with patch(
            "homenode.vm.host_sources._read_this_machine", lambda: load_host(str(self.directory))
        ):
            self._apply(numbers)

    def _apply(self, numbers: Sequence[int]) -> None:
        apply(
            [f"vm{number}" for number in numbers],
            options=PlanOptions(
                "pin",
                gpu_count=1,
                page_bytes=1 << 30,
                memory_binding=MemoryBinding.BOUND,
            ),
            yes=True,
            host=str(self.directory),
            quiet=True,
            connect=self.connect,
        )

    def definitions(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes().rstrip() for path in sorted(self.state.glob("*.xml"))}

    def check_alone(self, vms: int) -> None:
        """No core, GPU or page is given to two of so many VMs."""
        pins = self.pins()
        assert len(pins) == vms
        assert len(CpuSet.parse(",".join(pins))) == vms, pins
        text = b"".join(self.definitions().values()).decode()
        gpus = re.findall(r"<source>\s*<address [^>]*bus='(\w+)' slot='(\w+)'", text)
        assert len(gpus) == len(set(gpus)) == vms, gpus
        pages = Counter(re.findall(r"<memory mode='strict' nodeset='(\d)'", text))
        assert pages.total() == vms and max(pages.values()) <= 5, pages

    def pins(self) -> list[str]:
        """CPUs of the vCPUs of every domain that is pinned."""
        text = b"".join(self.definitions().values()).decode()
        return re.findall(r"<vcpupin vcpu='\d+' cpuset='([^']*)'", text)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallHost:
    found = SmallHost(tmp_path)
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "records"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return found


@contextmanager
def held_by_another(root: Path, connect: str) -> Iterator[int]:
    """A process of its own that holds the lock meanwhile; its number."""
    begun, ended = os.pipe(), os.pipe()

    def hold() -> None:
        os.close(ended[1])
        with lock_host(root, connect, "homenode apply other"):
            os.write(begun[1], b".")
            os.read(ended[0], 1)

    child = start_child(hold)
    assert os.read(begun[0], 1) == b"."
    try:
        yield child
    finally:
        for descriptor in (ended[1], ended[0], *begun):
            os.close(descriptor)
        assert code_of(child) == 0


def test_applies_at_once_give_each_vm_a_core_of_its_own(host: SmallHost) -> None:
    children = [start_child(partial(host.apply, number)) for number in range(6)]
    assert [code_of(child) for child in children] == [0] * 6
    host.check_alone(6)


def test_several_are_planned_together_and_undone_together(host: SmallHost) -> None:
    before = host.definitions()
    host.apply(*range(6))
    host.check_alone(6)
    host.apply(0, *range(5, VMS), 0)
    host.check_alone(VMS)
    restore([f"vm{number}" for number in range(VMS)])
    assert host.definitions() == before


def test_of_several_all_are_defined_or_none(host: SmallHost) -> None:
    host.apply(0)
    before = host.definitions()
    saved = host.state / f"{uuid_of(2)}.saved"
    saved.touch()
    with pytest.raises(UsageError, match=r"^vm2: .*managed-save"):
        host.apply(0, 1, 2)
    saved.unlink()
    assert host.definitions() == before
    (host.state / "refuses").write_text(uuid_of(3))
    with pytest.raises(HostError, match="refused"):
        host.apply(0, 1, 2, 3, 4)
    assert host.definitions() == before
    open_now = list(open_changes(journals_of_domains(default_root())))
    assert [one.subject for one in open_now if isinstance(one, OpenChange)] == ["vm0"]
    (host.state / "refuses").unlink()
    (host.state / "vm4.uuid").unlink()
    with pytest.raises(HomenodeError):
        restore(["vm0", "vm4"])
    assert host.definitions() == before, "what stands against one is said before another changes"
    restore(["vm0"])
    assert host.pins() == []
    killed = patch.object(Virsh, "define", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):  # at the first of them
        host.apply(0, 1)
    open_now = list(open_changes(journals_of_domains(default_root())))
    assert [one.subject for one in open_now if isinstance(one, OpenChange)] == ["vm0", "vm1"]


def test_who_waits_names_the_holder_and_gives_up(
    host: SmallHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "WAIT_S", 0.2)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with held_by_another(default_root(), URI) as holder:
        changes: tuple[Callable[[], object], ...] = (
            lambda: host.apply(0),
            lambda: restore(["vm0"]),
        )
        for change in changes:
            with pytest.raises(HostError, match=r"homenode apply other.*0\.2 s") as refused:
                change()
            assert f"process {holder}" in refused.value.message
            waits = f"process {holder} (homenode apply other) to finish changing this host"
            assert waits in terminal.getvalue()
            terminal.truncate(0)
        assert host.pins() == []
        store = DomainStore(default_root(), URI, uuid_of(0))
        store.journal.write(ChangeEntry(what=ChangeState.DONE, kind=PIN, subject=uuid_of(0)))
        for work in (
            forget_original,
            restore_live_pins,
            lambda virsh, name, root: apply_live_pins(virsh, name, ORIGINAL, root),
        ):
            with pytest.raises(HostError, match=r"homenode apply other.*0\.2 s"):
                work(Virsh(URI), "vm0", default_root())
        next(default_root().rglob(".host.lock")).write_bytes(b"")  # its name was not written yet
        with pytest.raises(HostError, match="by another homenode or"):
            restore(["vm0"])
        # A dry run does not wait.
        with patch(
            "homenode.vm.host_sources._read_this_machine", lambda: load_host(str(host.directory))
        ):
            apply(["vm0"], dry_run=True, layout="pin", quiet=True)
    host.apply(0)
    assert len(host.pins()) == 1


def test_daemons_of_one_machine_share_the_lock_and_other_machines_have_their_own(
    tmp_path: Path,
) -> None:
    def is_free(connect: str) -> bool:
        try:
            with lock_host(tmp_path, connect, "homenode apply b", wait_s=0):
                return True
        except HostError:
            return False

    with held_by_another(tmp_path, "qemu:///system"):
        assert not is_free("qemu:///session")
        assert is_free("qemu+ssh://gpu7/system")
    with held_by_another(tmp_path, "qemu+ssh://gpu7/system"):
        assert not is_free("qemu+ssh://root@gpu7:22/system")
        assert is_free("qemu+ssh://gpu8/system")
        assert is_free("qemu:///system")


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_users_have_one_lock_where_both_can_reach_libvirts_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    run = tmp_path / "run"
    if is_shared:
        run.mkdir(mode=0o755)
    monkeypatch.setattr(journal, "SHARED", run)
    monkeypatch.setattr(journal, "WAIT_S", 0.1)
    assert (lock_of_one_user(URI) is None) == is_shared
    with held_by_another(tmp_path / "root", URI) as holder:
        if not is_shared:
            with lock_host(tmp_path / "user", URI, "homenode apply b", wait_s=0):
                return
        holders: list[str] = []
        again = lock_host(tmp_path / "user", URI, "homenode apply b", holders.append)
        found = f"process {holder} of user {os.getuid()}"
        with pytest.raises(HostError, match=rf"{found} or its virsh, for 0\.1 s"), again:
            pytest.fail("it was held")
        assert holders == [found]
        ended = tmp_path / "locks"
        ended.write_text(f"1: FLOCK ADVISORY WRITE 4194305 00:1:{run.stat().st_ino} 0 EOF\n")
        monkeypatch.setattr(journal, "_LOCKS", str(ended))
        with (
            pytest.raises(HostError, match="by another homenode or"),
            lock_host(tmp_path / "user", URI, "homenode apply b", wait_s=0),
        ):
            pytest.fail("it was held")
        with lock_host(tmp_path / "user", "qemu+ssh://gpu7/system", "it", wait_s=0):
            assert "gpu7" in (lock_of_one_user("qemu+ssh://gpu7/system") or "")
    with lock_host(tmp_path / "user", URI, "homenode apply b", wait_s=0) as locks:
        assert len(locks) == 2
        with lock_host(tmp_path / "user", "qemu:///session", "it", wait_s=0) as inside:
            assert inside == locks, "who holds it goes on"
    assert list(run.iterdir()) == []


def test_a_killed_holder_frees_the_host_when_the_virsh_that_it_started_has_ended(
    host: SmallHost,
) -> None:
    (host.state / "slow").write_text("1")
    child = start_child(lambda: host.apply(0))
    wait_for(lambda: (host.state / "begun").exists())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (host.state / "slow").unlink()
    assert host.pins() == []
    (lock,) = default_root().rglob(".host.lock")
    with lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    host.apply(1)
    pins = host.pins()
    assert len(pins) == 2
    assert len(CpuSet.parse(",".join(pins))) == 2
    with patch.object(Virsh, "define") as define:
        restore_definition(Virsh(URI), "vm1", default_root())
    assert define.call_args.args[1], "the virsh of a restore holds the lock too"
