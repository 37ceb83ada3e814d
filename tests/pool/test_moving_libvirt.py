"""Moves between two real libvirtds, killed at random moments: the VM runs on one host, and is lost
on none. Its guest is a boot sector that powers off when it is asked to."""

import multiprocessing
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from msgspec import structs

from homenode.change.journal import default_root
from homenode.change.vm_move import PowerOff, VmMove, carry_out, move_journals, planned_move
from homenode.cluster.pool.ledger import Ledger
from homenode.cluster.pool.moving import reservation_step
from homenode.errors import UNPLANNABLE, HostError, InputError
from homenode.machine.description.parse import parse_description
from homenode.machine.description.render import render
from homenode.vm.hypervisor.virsh import Virsh
from tests.command_line import Result, homenode, restore
from tests.kills import in_child
from tests.tree_writer import write_tree
from tests.two_node_libvirt import HOST, TwoNodes, two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

KILLS = int(os.environ.get("HOMENODE_KILLS", "3"))
MOVES = int(os.environ.get("HOMENODE_MOVES", "6"))
"""At once."""

SEED = 20261124
UUID = "6a1d2c50-0b9f-4a6e-8a67-3c1f0c7a5d{:02x}"

# Enables the power button of the ACPI PM block that SeaBIOS puts at 0x600, waits for it, and
# enters soft-off: mov ax, 0x100; mov dx, 0x602; out dx, ax; mov dx, 0x600; in ax, dx;
# test ah, 1; jz -5; mov ax, 0x2000; mov dx, 0x604; out dx, ax; hlt.
_GUEST = bytes.fromhex(
    "b80001 ba0206 ef ba0006 ed f6c401 74fa b80020 ba0406 ef f4".replace(" ", "")
)
BOOT_SECTOR = (_GUEST.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0")

DOCUMENT = """<domain type='qemu'>
  <name>{name}</name><uuid>{uuid}</uuid>
  <memory unit='MiB'>64</memory><vcpu>1</vcpu>
  <cputune><vcpupin vcpu='0' cpuset='1'/></cputune>
  <numatune><memory mode='strict' nodeset='1'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type>{firmware}</os>
  <features><acpi/></features>
  <devices><emulator>{emulator}</emulator>
    <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{disk}'/>
      <target dev='vda' bus='virtio'/><readonly/></disk>
    <controller type='usb' model='none'/><memballoon model='none'/></devices>
</domain>
"""

FIRMWARE = """<loader readonly='yes' type='pflash'>{code}</loader>
  <nvram template='{code}'>{path}</nvram>"""
CODE = "/usr/share/seabios/bios-256k.bin"
"""SeaBIOS as flash: it starts the boot sector, and leaves the variables to the test."""

HALTED = bytes.fromhex("fa f4 eb fd").ljust(16, b"\0").rjust(1 << 16, b"\0")
"""Firmware that costs nothing: at the reset vector cli; hlt; jmp -3."""

NAMES = (
    "-x",
    "--pool",
    "a b  c ",
    " lead",
    "\u00f6",
    "\u65e5\u672c",
    "e\u0301",
    "q'\"<&>",
    ".hidden",
    "a=b",
    "%s\\n",
    "tab\there",
    "new\nline",
    "x" * 250,
    "\u202ertl",
    "a\x85b",
    "a,b;c|d",
    "#",
)
"""Of files of variables."""


class Hosts:
    """Two daemons as the hosts `a` and `b` of a pool, with their disks in one folder."""

    def __init__(self, folder: Path, a: TwoNodes, b: TwoNodes) -> None:
        self.folder, self.a, self.b = folder, a, b
        self.daemons = {"a": a, "b": b}
        self.pool, self.disks = folder / "pool", a.folder / "disks"
        for name in self.daemons:
            write_tree(render(parse_description(HOST, name)), folder / "hosts" / name)
        self.disks.mkdir(exist_ok=True)
        (self.disks / "disk").write_bytes(BOOT_SECTOR)
        self.nvram = {name: daemon.folder / "nvram" for name, daemon in self.daemons.items()}
        for folder in self.nvram.values():
            folder.mkdir(exist_ok=True)
            shutil.chown(folder, "nobody")
        if not self.mounted():
            self.on_b("mount", "--bind", str(self.nvram["b"]), str(self.nvram["a"]))

    def mounted(self) -> bool:
        return str(self.nvram["a"]) in self.on_b("cat", "/proc/mounts")

    def on_b(self, *words: str) -> str:
        """What a command says in the file systems of `b`."""
        there = ["nsenter", "-m", "-t", str(self.b.pid)]
        return subprocess.run([*there, *words], check=True, capture_output=True, text=True).stdout

    def variables(self) -> tuple[bytes | None, ...]:
        """What each host has as the variables of the VM: the end of its file."""
        files = [folder / "vm_VARS.fd" for folder in self.nvram.values()]
        return tuple(file.read_bytes()[-8:] if file.exists() else None for file in files)

    def write_variables(self, name: str, content: bytes) -> None:
        """As the guest does while it runs."""
        with (self.nvram[name] / "vm_VARS.fd").open("r+b") as file:
            file.seek(-len(content), os.SEEK_END)
            file.write(content)

    def run(
        self, vm: str, number: int = 0, how: str = "define", *, has_nvram: bool = False
    ) -> None:
        """Have a VM run on `a`."""
        document = self.a.folder / "vm.xml"
        document.write_text(self.document(vm, number, f"{vm}_VARS.fd" if has_nvram else None))
        for words in ((how, str(document)), *((("start", vm),) if how == "define" else ())):
            done = self.a.virsh(*words)
            assert done.returncode == 0, done.stderr

    def document(self, vm: str, number: int, nvram: str | None = None, code: str = CODE) -> str:
        path = "" if nvram is None else escape(str(self.nvram["a"] / nvram))
        firmware = "" if nvram is None else FIRMWARE.format(code=code, path=path)
        named = {"name": vm, "uuid": UUID.format(number), "firmware": firmware}
        return DOCUMENT.format(**named, emulator=self.a.emulator, disk=self.disks / "disk")

    def moves(self, names: Sequence[str]) -> list[VmMove]:
        """Of halted VMs with these names of their variables, all with the same core."""
        code = self.disks / "halted"
        code.write_bytes(HALTED)
        here, there = Virsh(self.a.uri), Virsh(self.b.uri)
        found = []
        for number, name in enumerate(names):
            document = self.a.folder / "vm.xml"
            document.write_text(self.document(f"vm{number}", number, name, str(code)))
            here.define(str(document))
            here.start_paused(uuid := UUID.format(number))
            own = here.definition(uuid)
            off = PowerOff(timeout_s=0, ends=True)
            everyone = frozenset(UUID.format(one) for one in range(len(names)))
            found.append(planned_move(default_root(), here, there, uuid, (own, own), off, everyone))
        return found

    def capture(self) -> None:
        for name, daemon in self.daemons.items():
            uuids = daemon.virsh("list", "--all", "--uuid").stdout.split()
            listed = "".join(daemon.virsh("dumpxml", uuid).stdout for uuid in uuids)
            output = self.folder / "hosts" / name / "commands/virsh-domains"
            output.write_text(f"<domains>{listed}</domains>")
        done = homenode("pool", "capture", self.folder / "hosts", "-o", self.pool)
        assert done.exit_code == 0, done.stderr

    def drain(self, *words: str) -> Result:
        uris = [f"--connect={name}={daemon.uri}" for name, daemon in self.daemons.items()]
        return homenode("pool", "drain", "a", "--pool", self.pool, "--apply", *uris, *words)

    def states(self, vm: str) -> tuple[str, str]:
        """What each host has of it: its state, or "" where it is not defined."""
        here, there = (one.virsh("domstate", vm).stdout.strip() for one in (self.a, self.b))
        return here, there

    def reserved(self) -> list[tuple[str, str]]:
        with Ledger(self.pool) as ledger:
            return [(one.vm.name, one.host) for one in ledger.reservations()]


@pytest.fixture(scope="module")
def daemons() -> Iterator[tuple[TwoNodes, TwoNodes]]:
    with two_nodes() as a, two_nodes() as b:
        yield a, b


@pytest.fixture
def hosts(
    daemons: tuple[TwoNodes, TwoNodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hosts]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "records"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    yield Hosts(tmp_path, *daemons)
    for daemon in daemons:
        for uuid in daemon.virsh("list", "--all", "--uuid").stdout.split():
            daemon.virsh("destroy", uuid)
            daemon.virsh("undefine", "--nvram", uuid)
        for file in (daemon.folder / "nvram").iterdir():
            file.unlink()


def test_a_drained_hosts_vms_run_on_the_other_and_those_that_cannot_are_named(hosts: Hosts) -> None:
    hosts.run("vm")
    hosts.run("transient", 1, "create")
    hosts.a.virsh("autostart", "vm")
    hosts.capture()
    done = hosts.drain("--dry-run")
    assert done.exit_code == UNPLANNABLE, done.output
    assert "transient stays on a: it is transient" in done.stdout
    assert hosts.states("vm") == ("running", "")
    assert hosts.reserved() == []
    done = hosts.drain("--yes")
    assert done.exit_code == UNPLANNABLE, done.output
    assert hosts.states("vm") == ("", "running")
    assert "Autostart:      enable" in hosts.b.virsh("dominfo", "vm").stdout
    assert hosts.states("transient") == ("running", "")
    assert hosts.reserved() == [("vm", "b")]
    counted = {name: homenode("pool", "vms", "--pool", hosts.pool, "--on", name) for name in "ab"}
    assert [name for name, done in counted.items() if " vm " in f" {done.stdout} "] == ["b"]
    again = hosts.drain("--yes")
    assert again.exit_code == InputError.exit_code, "the capture is from before"
    hosts.capture()
    assert "vm" in homenode("pool", "vms", "--pool", hosts.pool, "--on", "b").stdout
    assert open_moves() == []


def open_moves() -> list[object]:
    return [entry for journal in move_journals(default_root()) for entry in journal.to_undo()]


def test_a_vm_that_does_not_start_there_runs_here_again(hosts: Hosts) -> None:
    hosts.run("vm")
    hosts.capture()
    before = hosts.a.virsh("dumpxml", "--inactive", "vm").stdout
    hosts.on_b("mount", "-t", "tmpfs", "-o", "mode=755", "none", str(hosts.disks))
    run = hosts.a.virsh("domid", "vm").stdout
    done = hosts.drain("--yes")
    assert done.exit_code == HostError.exit_code, done.output
    assert hosts.a.virsh("domid", "vm").stdout == run, "it was not stopped for a disk that is away"
    hosts.on_b("truncate", "--size", str(len(BOOT_SECTOR)), str(hosts.disks / "disk"))
    done = hosts.drain("--yes")
    hosts.on_b("umount", str(hosts.disks))
    assert done.exit_code == HostError.exit_code, done.output
    assert hosts.states("vm") == ("running", "")
    assert hosts.a.virsh("dumpxml", "--inactive", "vm").stdout == before
    assert hosts.reserved() == []
    assert open_moves() == []


@pytest.mark.parametrize("after", [False, True])
def test_a_move_killed_at_any_call_is_undone_or_whole(hosts: Hosts, after: bool) -> None:
    hosts.run("vm")
    hosts.capture()
    before = hosts.a.virsh("dumpxml", "--inactive", "vm").stdout
    choose, cut = random.Random(f"{SEED} {after}"), 0
    for _ in range(KILLS):
        in_child(lambda: hosts.drain("--yes"), choose.randint(20, 140), after=after)
        a, b = hosts.states("vm")
        assert a or b, "it is lost"
        assert (a, b) != ("running", "running"), "it runs twice"
        cut += bool(open_moves())
        if open_moves():
            restore(["vm"], connect=hosts.a.uri)
        assert open_moves() == []
        a, b = hosts.states("vm")
        assert (a, b) in (("running", ""), ("", "running"))
        assert hosts.reserved() == [("vm", "b")] * bool(b)
        if not b:
            assert hosts.a.virsh("dumpxml", "--inactive", "vm").stdout == before
            continue
        hosts.b.virsh("destroy", "vm")
        hosts.b.virsh("undefine", "vm")
        homenode("pool", "remove", "vm", "--pool", hosts.pool)
        homenode("pool", "host", "a", "--state", "open", "--pool", hosts.pool)
        hosts.run("vm")
        before = hosts.a.virsh("dumpxml", "--inactive", "vm").stdout
    assert cut


def test_uefi_variables_are_on_the_new_host_before_the_vm_starts_there(hosts: Hosts) -> None:
    hosts.run("vm", has_nvram=True)
    hosts.write_variables("a", b"boot0001")
    hosts.capture()
    (hosts.nvram["b"] / "vm_VARS.fd").write_bytes(b"of an earlier VM")
    run = hosts.a.virsh("domid", "vm").stdout
    assert hosts.drain("--yes").exit_code == InputError.exit_code
    assert hosts.a.virsh("domid", "vm").stdout == run, "it was not stopped for it"
    assert hosts.variables() == (b"boot0001", b"arlier VM"[-8:]), "a file of another is left"
    (hosts.nvram["b"] / "vm_VARS.fd").unlink()
    homenode("pool", "host", "a", "--state", "open", "--pool", hosts.pool)
    done = hosts.drain("--yes")
    assert done.exit_code == 0, done.output
    assert hosts.states("vm") == ("", "running")
    assert hosts.variables() == (None, b"boot0001")
    assert open_moves() == [] and left_pools(hosts) == []


def test_moves_at_once_through_one_folder_lose_nothing(hosts: Hosts) -> None:
    moves = hosts.moves([f"vm{number}_VARS.fd" for number in range(MOVES)])
    content = {number: random.Random(number).randbytes(1 << 16) for number in range(MOVES)}
    for number, one in content.items():
        (hosts.nvram["a"] / f"vm{number}_VARS.fd").write_bytes(one)
    own_pool = hosts.a.virsh("pool-create-as", "own", "dir", "--target", str(hosts.nvram["a"]))
    assert own_pool.returncode == 0, own_pool.stderr
    with ProcessPoolExecutor(MOVES, multiprocessing.get_context("fork")) as children:
        list(children.map(carry_out, moves, repeat(reservation_step)))
    assert hosts.a.virsh("pool-destroy", "own").returncode == 0
    assert hosts.a.virsh("list", "--all", "--name").stdout.split() == []
    assert sorted(hosts.b.virsh("list", "--name").stdout.split()) == sorted(
        one.name for one in moves
    )
    for number, one in content.items():
        assert (hosts.nvram["b"] / f"vm{number}_VARS.fd").read_bytes() == one
    assert list(hosts.nvram["a"].iterdir()) == []
    assert open_moves() == [] and left_pools(hosts) == []


def left_pools(hosts: Hosts) -> list[str]:
    lists = (one.virsh("pool-list", "--all", "--name").stdout.split() for one in (hosts.a, hosts.b))
    return [name for names in lists for name in names]


@pytest.mark.parametrize("after", [False, True])
def test_the_variables_survive_a_kill_at_any_call(hosts: Hosts, after: bool) -> None:
    choose, cut, fresh = random.Random(f"{SEED} {after} nvram"), 0, True
    for number in range(KILLS):
        if fresh:
            hosts.run("vm", has_nvram=True)
            hosts.capture()
        content = f"{number:08}".encode()
        hosts.write_variables("a", content)
        in_child(lambda: hosts.drain("--yes"), choose.randint(20, 260), after=after)
        a, b = hosts.states("vm")
        assert a or b, "it is lost"
        assert (a, b) != ("running", "running"), "it runs twice"
        if b == "running":
            content = content[::-1]
            hosts.write_variables("b", content)
        cut += bool(open_moves())
        if open_moves():
            restore(["vm"], connect=hosts.a.uri)
        a, b = hosts.states("vm")
        assert (a, b) in (("running", ""), ("", "running"))
        assert hosts.variables() == ((content, None) if a else (None, content))
        assert open_moves() == [] and left_pools(hosts) == []
        fresh = bool(b)
        if fresh:
            hosts.b.virsh("destroy", "vm")
            hosts.b.virsh("undefine", "--nvram", "vm")
            homenode("pool", "remove", "vm", "--pool", hosts.pool)
        homenode("pool", "host", "a", "--state", "open", "--pool", hosts.pool)
    assert cut


def test_variables_move_whatever_the_name_of_their_file(hosts: Hosts) -> None:
    folder = hosts.nvram["b"]
    with Virsh(hosts.b.uri).folder(folder, "odd") as there:
        for name in NAMES:
            content = name.encode() * 9
            assert not there.has(name)
            there.create(name, content)
            assert there.has(name) and (folder / name).read_bytes() == content
            assert there.read(name) == content
            there.remove(name)
            assert not there.has(name) and not (folder / name).exists()
    name = " \u00f6 q'\"<&>\n "
    (move,) = hosts.moves([name])
    (hosts.nvram["a"] / name).write_bytes(content := bytes(range(256)) * 16)
    carry_out(move, reservation_step)
    assert (folder / name).read_bytes() == content
    assert not (hosts.nvram["a"] / name).exists()
    assert open_moves() == [] and left_pools(hosts) == []


def test_who_comes_second_reads_again_and_leaves_the_cores_of_the_first(hosts: Hosts) -> None:
    one, other = (structs.replace(move, neighbours=frozenset()) for move in hosts.moves("ab"))
    run = hosts.a.virsh("domid", other.name).stdout
    carry_out(one, reservation_step)
    with pytest.raises(HostError, match="taken by"):
        carry_out(other, reservation_step)
    assert hosts.a.virsh("domid", other.name).stdout == run, "it was not stopped for it"
    assert hosts.states(one.name) == ("", "running")
    assert hosts.states(other.name) == ("paused", "")
    assert open_moves() == []
