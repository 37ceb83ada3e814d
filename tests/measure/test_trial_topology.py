"""A trial of a VM with two GPUs: each guest gets its own topology file, and runs with and without.

A guest has the cells, ports and expander buses of the definition that it was booted with.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.measure import runner as bench_runner
from homenode.measure.model import SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.results.store import read_run
from homenode.measure.trial import guest
from homenode.measure.trial.journal import TrialJournal
from homenode.measure.trial.prepare import preflight, prepare
from homenode.measure.trial.runner import get_outcome_code, run_trial, schedule_steps
from homenode.nccl.check import check_topology
from homenode.process import ProgramResult
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import load_host
from tests.simulated_trial import SimulatedGuest, SimulatedReach, guest_snapshot, trial_of, wanted
from tests.tools import test_nccl_tests as nccl
from tests.virsh_stand_in import URI, UUID, StandIn

HOST = "small-2n8c-2gpu"
NAME = "gpu-vm"
HOSTDEV = """    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source><address domain='0x0000' bus='0x{bus:02x}' slot='0x00' function='0x0'/></source>
      <address type='pci' domain='0x0000' bus='0x{port:02x}' slot='0x00' function='0x0'/>
    </hostdev>
"""
PORT = """    <controller type='pci' index='{index}' model='pcie-root-port'>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x{index:02x}' function='0x0'/>
    </controller>
"""
ORIGINAL = f"""<domain type='kvm'>
  <name>{NAME}</name>
  <uuid>{UUID}</uuid>
  <memory unit='KiB'>1048576</memory>
  <currentMemory unit='KiB'>1048576</currentMemory>
  <vcpu placement='static'>4</vcpu>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
  </os>
  <cpu mode='host-passthrough'/>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
{PORT.format(index=1)}{PORT.format(index=2)}{HOSTDEV.format(bus=0x11, port=1)}\
{HOSTDEV.format(bus=0x81, port=2)}  </devices>
</domain>
""".encode()

_GUEST = """
format = 1
name = "guest"
packages = {packages}
cores_per_package = {cores}
llc_size = "16MiB"
memory_per_node = "{memory}"
{distances}

[model.gpu]
class = "gpu"
vendor = 0x10de
bars = ["16MiB", "256MiB prefetchable"]

[[root]]
{roots}
"""
_FLAT = {"packages": 1, "cores": 4, "memory": "1000MiB", "distances": ""}
_DISTANCES = "distances = { other_package = 20 }"
_CELLS = {"packages": 2, "cores": 2, "memory": "500MiB", "distances": _DISTANCES}
_OWN_PORTS = 'node = "unknown"\nbus = 0\nports = ["gpu", "gpu"]'
_EXPANDER_BUSES = 'node = [0, 1]\nbus = [0xf0, 0xf8]\nports = ["gpu"]'


def layout_of(definition: bytes) -> str:
    if b"pcie-expander-bus" in definition:
        return "pin-numa-pci"
    if b"<cell" in definition:
        return "pin-numa"
    return "pin" if b"<vcpupin" in definition else "default"


def shown_by(definition: bytes) -> MemorySnapshot:
    """What the guest of a definition shows of itself."""
    layout = layout_of(definition)
    roots = _EXPANDER_BUSES if layout == "pin-numa-pci" else _OWN_PORTS
    shape = _CELLS if "numa" in layout else _FLAT
    made = guest_snapshot(_GUEST.format(roots=roots, **shape), definition)

    def at_0(text: str) -> str:
        """libvirt's first port on an expander bus is device 0; a described host's is device 1."""
        return re.sub(r"0000:(f0|f8):01\.0", r"0000:\1:00.0", text)

    return MemorySnapshot(
        "guest",
        {at_0(path): at_0(text) for path, text in made.files.items()},
        {at_0(path): at_0(target) for path, target in made.links.items()},
        made.commands,
        tuple(map(at_0, made.directories)),
    )


class GpuGuest(SimulatedGuest):
    """A boot with two GPUs."""

    files: list[str]  # the topology files that its all-reduces were given

    def run(self, argv: Sequence[str], *rest: Any, **named: Any) -> ProgramResult:
        words = tuple(argv)
        if "find_spec" in " ".join(words):
            return ProgramResult(words, 0, "False\n", "")
        if words[1:] == ("-", "cuda"):
            is_mirrored = layout_of(self._daemon.definition()) == "pin-numa-pci"
            buses = ("f1", "f9") if is_mirrored else ("01", "02")
            shown = [f"0000:{bus}:00.0" for bus in buses]
            answer = {"format": "homenode.gpus/1", "addresses": shown, "reason": None}
            return ProgramResult(words, 0, json.dumps(answer) + "\n", "")
        if "all_reduce_perf" not in words:
            return super().run(argv, *rest, **named)
        if words[0] == "sh":
            self.files.append(words[4])
        return ProgramResult(words, 0, sweep(20e9), "")

    def find_installed(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(names) & {"all_reduce_perf", "taskset"}

    def snapshot(self) -> Snapshot:
        self._check()
        return shown_by(self._daemon.definition())


class GpuReach(SimulatedReach):
    """Guests with two GPUs, and the topology files that they were given."""

    def __init__(self, daemon: StandIn) -> None:
        super().__init__(daemon, {})
        self.files: list[str] = []

    def machine(self, uuid: str) -> SimulatedGuest:
        guest = GpuGuest(self.daemon, self.daemon.get("id"), 1.0, cells=False)
        guest.files = self.files
        return guest


def sweep(rate: float) -> str:
    rows = []
    for size in (8, 1024, 65536):
        bus = rate * min(1.0, size / 32768) / 1e9
        half = f"{size / max(bus, 1e-6) / 1e3:.2f} {bus:.2f} {bus:.2f} 0"
        rows.append(f" {size} {size // 4} float sum -1 {half} {half}\n")
    return nccl.HEAD + nccl.COLUMNS + "".join(rows) + nccl.FOOT


def test_each_guest_with_its_topology_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are elsewhere in a guest with expander buses, and so they are in its file."""
    daemon = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    layouts = ("pin", "pin-numa", "pin-numa-pci")
    asked = wanted(tmp_path / "results", boots=1, layouts=layouts)
    suite = SuiteOptions((SuiteGroup.NCCL,), SuiteDepth.NORMAL, 65536)
    asked = replace(asked, measuring=replace(asked.measuring, suite=suite))
    host, root = load_host(HOST), tmp_path / "state"
    checked = preflight(Virsh(URI), NAME, asked, host, root)
    assert not checked.obstacles, checked.obstacles
    journal = TrialJournal(root, asked.id)
    prepare(checked, journal)
    reach = GpuReach(daemon)
    with journal.hold() as lock:
        run_trial(replace(trial_of(checked.head, journal, root, reach), host=host), lock)
    state = journal.load().state
    assert get_outcome_code(state) == 0, list(state.outcomes.values())
    files = dict.fromkeys(reach.files)
    assert len(reach.files) == 2 * len(layouts)  # with and without peer access
    for file in files:
        assert not any(finding.is_bad for finding in check_topology(file.encode(), "topo.xml"))
        addresses = {bus for bus in ("01:00.0", "02:00.0", "f1:00.0", "f9:00.0") if bus in file}
        assert addresses in ({"01:00.0", "02:00.0"}, {"f1:00.0", "f9:00.0"})
    assert sum("f1:00.0" in file for file in files) == 1
    for step in schedule_steps(checked.head):
        name = state.outcomes[step.number].run
        run = read_run(next(Path(checked.head.results).glob(f"*/{name}")))
        peaks = {s.variant for s in run.samples if s.metric == "allreduce-busbw-peak"}
        assert {None, "topology file", "P2P off", "P2P off, topology file"} <= peaks
