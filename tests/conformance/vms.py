"""Random VMs on random hosts, planned and written for a target as `homenode plan` does."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from msgspec import structs

from homenode.bdf import Bdf
from homenode.errors import InputError, UsageError
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, make_vm, plan_for_target
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, GuestCells
from homenode.vm.model import Vm, VmCell
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import MemoryMode, PciGranularity, PlanOptions, Policy, make_cell
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import VmFile, read_vm
from tests.small_hosts import DeviceSpec, even_host

MAX_VCPUS = 64
LARGE = {"x86-2p8n128c256t-64gpu"}
"""Hosts whose plans take seconds."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case: its name, what is asked for, on which host, and what homenode wrote."""

    case: str
    wanted: PlanOptions
    host: Host
    target_plan: PlannedFile

    @property
    def plan(self) -> Plan:
        return self.target_plan.plan

    @property
    def document(self) -> bytes:
        return self.target_plan.rendering.document

    @property
    def about(self) -> str:
        return f"{self.host.name}, {self.wanted.layout}, {self.plan.vm.vcpus} vCPUs"


@cache
def _shipped(architecture: str) -> tuple[Host, ...]:
    hosts = (load_host(name) for name in list_shipped_hosts() if name not in LARGE)
    return tuple(host for host in hosts if host.architecture == architecture)


def random_host(draw: random.Random) -> Host:
    """A shipped host, or a regular one with GPUs at random places."""
    if draw.random() < 0.5:
        return draw.choice(_shipped("x86_64"))
    packages, per_package = draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2, 4))
    gpus = [
        DeviceSpec(f"0000:{0x10 + 4 * i:02x}:00.0", draw.randrange(packages * per_package), root=i)
        for i in range(draw.choice((0, 1, 2, 4, 8)))
    ]
    made = even_host(
        packages,
        per_package,
        draw.choice((1, 1, 2)),
        draw.choice((2, 3, 4, 8)),
        draw.choice((1, 2)),
        memory_bytes=draw.choice((8, 16, 64)) * GIB,
        devices=gpus,
        vendor=draw.choice(("AuthenticAMD", "GenuineIntel")),
        name=f"random-{packages}p{packages * per_package}n-{len(gpus)}gpu",
    )
    vfs = draw.choice((None, 16))
    named = (
        d
        if d.bridge
        else structs.replace(d, device_id=0x2330, sriov_total_vfs=vfs, sriov_num_vfs=vfs and 0)
        for d in made.pci_devices
    )
    return structs.replace(made, pci_devices=tuple(named))


def random_options(draw: random.Random, host: Host) -> PlanOptions:
    """What a user may ask of this host; some of it is more than the host has."""
    gpus = len(host.devices_of_kind(DeviceKind.GPU))
    pus = sum(pu.online for pu in host.pus)
    options = PlanOptions(
        layout=draw.choice((*PRESETS, *(name for name in PRESETS if "numa" in name))),
        vcpus=draw.choice((1, 2, 4, *(draw.randint(1, min(MAX_VCPUS, pus)) for _ in range(4)))),
        memory_bytes=draw.choice((1, 2, 4, draw.randint(1, 16))) * GIB
        + draw.choice((0, 0, 0, 256)) * MIB,
        gpu_count=draw.choice((None, *range(1, min(gpus, 8) + 1))) if gpus else None,
        page_bytes=draw.choice((None, None, None, 2 * MIB)),
        max_nodes=draw.choice((None, None, None, 1, 2)),
        policy=draw.choice((Policy.CORES_FIRST, Policy.CORES_FIRST, Policy.SPREAD)),
        unequal_cells=draw.random() < 0.3,
        memory_mode=draw.choice((*(MemoryMode.STRICT for _ in range(6)), *MemoryMode)),
        spare_ports=draw.choice((0, 0, 0, 1)),
        pci_granularity=draw.choice(list(PciGranularity)),
        without_nvlink=True,
    )
    if draw.random() < 0.15:
        cells = tuple(
            make_cell(draw.randint(1, 4), draw.choice((1, 2, 3)) * GIB)
            for _ in range(draw.choice((2, 2, 3)))
        )
        layout = draw.choice(("pin-numa", "pin-numa-pci"))
        options = structs.replace(
            options, layout=layout, explicit_cells=cells, vcpus=None, memory_bytes=None
        )
    return options


def planned_cases(
    names: Sequence[str],
    target: str,
    files: Sequence[bytes] = (),
    varied: Callable[[random.Random, Vm], Vm] = lambda _, guest: guest,
) -> Iterator[Planned]:
    """The cases that homenode plans. files: VMs of the target, one of which is edited instead of a
    new one written in a third of the cases; their GPUs are the H100 host's. varied: a new VM as
    options cannot ask for it."""
    for name in names:
        draw = random.Random(f"{target} {name}")
        if files and draw.random() < 0.33:
            host, vm = load_host("hgx-h100"), read_vm(draw.choice(files), "vm", target)
            drawn = random_options(draw, host)
            wanted = PlanOptions(
                layout=drawn.layout,
                vcpus=draw.choice((None, drawn.vcpus)),
                memory_bytes=draw.choice((None, drawn.memory_bytes)),
                unequal_cells=drawn.unequal_cells,
            )
        else:
            host = random_host(draw)
            wanted = random_options(draw, host)
            vm = make_vm(wanted, host.architecture)
            vm = structs.replace(vm, guest=varied(draw, vm.guest))
        made = _planned(vm, wanted, host, target)
        if made is not None:
            yield Planned(case=name, wanted=wanted, host=host, target_plan=made)


def _planned(vm: VmFile, wanted: PlanOptions, host: Host, target: str) -> PlannedFile | None:
    try:
        return plan_for_target(vm, wanted, host, target)
    except (Unplannable, InputError, UsageError):
        return None


def cells_of(plan: Plan) -> tuple[VmCell, ...]:
    """The cells that a guest without memory of GPUs is shown; () for a flat guest."""
    if plan.layout.cells is GuestCells.SINGLE:
        return ()
    return tuple(cell for cell in plan.cells if cell.vcpus)


def bdfs_of(plan: Plan) -> list[Bdf]:
    return sorted(device.bdf for device in plan.vm.hostdevs)
