"""A VM with two GPUs on a simulated hypervisor, and its guests as their kernels show themselves.

A guest has the cells, ports and expander buses of the definition that it was booted with.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from homenode.decide.alternative import alternatives_of
from homenode.decide.collective_causes import Diagnosis, diagnose
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.snapshot.protocol import Snapshot
from homenode.measure.layouts.journal import JournalFile
from homenode.measure.layouts.prepare import preflight, prepare
from homenode.measure.layouts.runner import outcome_code, run_trial, steps_of
from homenode.measure.model import Depth, Group, SuiteOptions
from homenode.measure.results.model import Run
from homenode.measure.results.store import read_run
from homenode.process import Completed
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import load_host
from tests.measure.collective_guests import CollectiveGuest, Settings
from tests.simulated_trial import SimulatedGuest, SimulatedReach, guest_snapshot, trial_of, wanted
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
_EXPANDER_BUSES = 'node = [0, 1]\nbus = [0x80, 0xc0]\nports = ["gpu"]'


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
        return re.sub(r"0000:(80|c0):01\.0", r"0000:\1:00.0", text)

    return MemorySnapshot(
        "guest",
        {at_0(path): at_0(text) for path, text in made.files.items()},
        {at_0(path): at_0(target) for path, target in made.links.items()},
        made.commands,
        tuple(map(at_0, made.folders)),
    )


class GpuGuest(SimulatedGuest):
    """A boot with two GPUs; its all-reduces are those of CollectiveGuest."""

    collectives: CollectiveGuest

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        if argv[0] in ("cat", "true", "poweroff"):
            return super().run(argv, timeout_s, input, environment=environment)
        self._check()
        return self.collectives.run(argv, timeout_s, input, environment=environment)

    def installed(self, names: object) -> frozenset[str]:
        return self.collectives.installed(names)  # type: ignore[arg-type]

    def snapshot(self) -> Snapshot:
        self._check()
        return shown_by(self._daemon.definition())


class GpuReach(SimulatedReach):
    """Guests whose all-reduces have an effect by settings."""

    def __init__(self, daemon: StandIn, effect: Callable[[Settings], float]) -> None:
        super().__init__(daemon, {})
        self._effect = effect
        self.files: list[str] = []

    def machine(self, uuid: str) -> SimulatedGuest:
        definition = self._daemon.definition()
        found = GpuGuest(self._daemon, self._daemon.get("id"), 1.0, cells=False)
        layout = layout_of(definition)
        shown = (
            ("0000:81:00.0", "0000:c1:00.0")
            if layout == "pin-numa-pci"
            else ("0000:01:00.0", "0000:02:00.0")
        )
        found.collectives = CollectiveGuest(layout=layout, effect=self._effect, shown=shown)
        found.collectives.files = self.files
        return found


def concluded(
    daemon: StandIn, folder: Path, effect: Callable[[Settings], float], layouts: tuple[str, ...]
) -> tuple[Diagnosis, list[Run], list[str]]:
    """A whole trial of one boot each; also the NCCL files that its guests were given."""
    asked = wanted(folder / "results", boots=1, layouts=layouts)
    suite = SuiteOptions((Group.COLLECTIVES,), Depth.NORMAL, 65536)
    asked = replace(asked, measuring=replace(asked.measuring, suite=suite, repeats=3))
    host, root = load_host(HOST), folder / "state"
    checked = preflight(Virsh(URI), NAME, asked, host, root)
    assert not checked.obstacles, checked.obstacles
    assert not any(one.against for one in checked.fitted)
    journal = JournalFile(root, asked.id)
    prepare(checked, journal)
    reach = GpuReach(daemon, effect)
    with journal.held() as lock:
        run_trial(replace(trial_of(checked.head, journal, root, reach), host=host), lock)
    state = journal.known().state
    assert outcome_code(state) == 0, list(state.outcomes.values())
    runs = [
        read_run(next(Path(checked.head.results).glob(f"*/{state.outcomes[step.number].run}")))
        for step in steps_of(checked.head)
    ]
    found = diagnose(alternatives_of([("trial", runs)]))
    assert found is not None
    return found, runs, reach.files
