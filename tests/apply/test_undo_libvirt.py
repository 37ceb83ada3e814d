"""Apply and restore on a real libvirtd, which adds addresses, ports and units of its own.

The judge is libvirt: what it prints after `restore` is what it printed before `apply`.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.errors import HomenodeError
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import PRESETS
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.two_node_libvirt import TwoNodes, two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

SEED = 20261128
NAME = "undo"

DEFINITION = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='GiB'>16</memory>
  <vcpu placement='static'>8</vcpu>
  <os><type arch='x86_64' machine='{machine}'>hvm</type></os>
  <cpu mode='custom'><model>Skylake-Server</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    {devices}
  </devices>
</domain>
"""
GPU = """<hostdev mode='subsystem' type='pci' managed='yes'>
  <source><address domain='0x0000' bus='0x19' slot='0' function='0'/></source>{address}
</hostdev>"""
PORT = "<controller type='pci' index='{index}' model='pcie-root-port'/>"
NETWORK = "<interface type='user'><model type='virtio'/></interface>"
DISK = """<disk type='file' device='disk'>
  <source file='/x.qcow2'/><target dev='vda' bus='virtio'/>
</disk>"""
DEVICES = {
    "no device": ("q35", ""),
    "disk and network": ("q35", DISK + NETWORK),
    "free root ports": ("q35", "".join(PORT.format(index=i) for i in range(1, 9)) + NETWORK),
    "i440fx": ("pc", "<controller type='scsi' model='virtio-scsi'/>" + NETWORK),
    "GPU without address": ("q35", GPU.format(address="")),
    "GPU with address": (
        "q35",
        PORT.format(index=1)
        + PORT.format(index=2)
        + GPU.format(address="<address type='pci' bus='2' slot='0' function='0'/>"),
    ),
    "display and channel": (
        "q35",
        "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
        "<graphics type='vnc'/><video><model type='virtio'/></video><memballoon model='virtio'/>",
    ),
    "USB controllers": (
        "q35",
        "<controller type='usb' model='ich9-ehci1'/><controller type='sata'/>"
        "<input type='tablet' bus='usb'/>" + NETWORK,
    ),
    "pcie-to-pci bridge": (
        "q35",
        PORT.format(index=1) + "<controller type='pci' index='2' model='pcie-to-pci-bridge'/>"
        "<interface type='user'><model type='e1000'/></interface>",
    ),
    "hidden balloon, pinned emulator": (
        "q35",
        "<memballoon model='none'/></devices><cputune><emulatorpin cpuset='0'/></cputune><devices>",
    ),
}
"""By name: machine type and devices of a definition."""

CHOICE = random.Random(SEED)
EACH_LAYOUT = tuple((layout, CHOICE.randint(1, 8)) for layout in sorted(PRESETS))
CHOSEN = CHOICE.choice(EACH_LAYOUT)


class Domain:
    """A domain of the daemon, and homenode's record of it."""

    def __init__(self, daemon: TwoNodes, directory: Path, machine: str, devices: str) -> None:
        self.daemon, self.virsh, self.root = daemon, Virsh(daemon.uri), directory / "records"
        self._file = directory / "domain.xml"
        text = DEFINITION.format(name=NAME, machine=machine, devices=devices)
        self.define(text.encode())
        # Again from its own print: only then are the controllers that libvirt added in its order.
        self.define(self.definition())

    def define(self, text: bytes) -> None:
        self._file.write_bytes(text)
        defined = self.daemon.virsh("define", str(self._file))
        assert defined.returncode == 0, defined.stderr

    def definition(self) -> bytes:
        return self.virsh.read_definition(self.virsh.find_domain(NAME).uuid)

    def apply(self, layout: str, gpus: int, host: Host) -> bool:
        """Apply a layout; False where the definition cannot have it."""
        before = self.definition()
        try:
            tuning = plan_file(before, NAME, PlanOptions(layout, gpu_count=gpus), host)
        except HomenodeError:
            return False
        applied = apply_definition(self.virsh, NAME, tuning.document, before, self.root)
        assert not applied.edited, "libvirt's own additions were taken for an edit"
        return True

    def restore(self, *, keep_edits: bool = False) -> None:
        restore_definition(self.virsh, NAME, self.root, keep_edits=keep_edits)


FIRST = {"GPU with address"}
"""What make test restores."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[TwoNodes]:
    with two_nodes() as started:
        yield started


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] * (name not in FIRST)) for name in DEVICES
    ]
)
def domain(daemon: TwoNodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Domain]:
    yield Domain(daemon, tmp_path, *DEVICES[request.param])
    daemon.virsh("undefine", NAME, "--nvram")


@pytest.fixture(scope="module")
def host() -> Host:
    return load_host("hgx-h100")


def check_undo(domain: Domain, cases: tuple[tuple[str, int], ...], host: Host) -> None:
    original = domain.definition()
    applied = 0
    for layout, gpus in cases:
        for _ in range(2):  # a second apply in a row keeps the first original
            applied += domain.apply(layout, gpus, host)
        if domain.definition() != original:
            domain.restore()
        assert domain.definition() == original, (layout, gpus)
    assert applied or "machine='pc-i440fx" in original.decode(), "no layout was applied"


def test_restore_gives_back_what_libvirt_printed_before(domain: Domain, host: Host) -> None:
    check_undo(domain, (("pin", 2), CHOSEN), host)


@pytest.mark.lab
def test_restore_gives_back_what_libvirt_printed_before_in_each_layout(
    domain: Domain, host: Host
) -> None:
    check_undo(domain, EACH_LAYOUT, host)
