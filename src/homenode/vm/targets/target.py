"""Target: what a hypervisor can say of a plan, what is lost by it, and how a file is written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.vm.layout import GuestCells
from homenode.vm.model import GuestAddress, GuestHostdev, GuestMediated, PortModel, Vm
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding
from homenode.vm.plan_options import MemoryMode


class Feature(StrEnum):
    """What a plan may ask of a hypervisor."""

    VCPU_PINS = "vcpu-pins"
    EMULATOR_PINS = "emulator-pins"
    IOTHREAD_PINS = "iothread-pins"
    TOPOLOGY = "topology"
    THREADS = "threads"
    DIES = "dies"
    CACHE = "cache"
    CELLS = "cells"
    UNEQUAL_CELLS = "unequal-cells"
    DISTANCES = "distances"
    MEMORY_NODES = "memory-nodes"
    MEMORY_MODE = "memory-mode"
    HUGE_PAGES = "huge-pages"
    DEVICES = "devices"
    DEVICE_CELLS = "device-cells"
    DEVICE_TREE = "device-tree"
    INITIATORS = "initiators"
    WINDOW = "window"
    IOMMU = "iommu"
    VGPUS = "vgpus"


FEATURE_WORDS: Mapping[Feature, str] = {
    Feature.VCPU_PINS: "each vCPU on its own PUs",
    Feature.EMULATOR_PINS: "the emulator's threads on their PUs",
    Feature.IOTHREAD_PINS: "IOThreads on their PUs",
    Feature.TOPOLOGY: "sockets and cores of the guest",
    Feature.THREADS: "hyper-threads of the guest",
    Feature.DIES: "dies of the guest",
    Feature.CACHE: "shared caches of the guest",
    Feature.CELLS: "guest cells",
    Feature.UNEQUAL_CELLS: "cells of unequal size",
    Feature.DISTANCES: "distances between cells",
    Feature.MEMORY_NODES: "memory on the planned host nodes",
    Feature.MEMORY_MODE: "memory mode interleave or preferred",
    Feature.HUGE_PAGES: "huge pages",
    Feature.DEVICES: "passed-through devices",
    Feature.DEVICE_CELLS: "each device on its guest cell",
    Feature.DEVICE_TREE: "PCIe switches of the host in the guest",
    Feature.INITIATORS: "cells for a Grace GPU's own memory",
    Feature.WINDOW: "address space for large BARs",
    Feature.IOMMU: "a guest IOMMU that remaps interrupts",
    Feature.VGPUS: "vGPUs: mediated devices, and virtual functions with a vGPU type",
}


FACTS_OF: Mapping[Feature, tuple[str, ...]] = {
    Feature.VCPU_PINS: ("pins",),
    Feature.EMULATOR_PINS: ("emulator",),
    Feature.IOTHREAD_PINS: ("iothreads",),
    Feature.TOPOLOGY: ("topology",),
    Feature.CELLS: ("cells", "cell-vcpus", "cell-memory", "distances", "cell-binding"),
    Feature.DISTANCES: ("distances",),
    Feature.MEMORY_NODES: ("binding", "cell-binding"),
    Feature.HUGE_PAGES: ("pages", "cell-pages"),
    Feature.DEVICES: ("device",),
    Feature.DEVICE_CELLS: ("device-cell",),
    Feature.INITIATORS: ("initiators",),
    Feature.IOMMU: ("iommu",),
}
"""The facts of vm/facts.py that a target which lacks a feature cannot say."""


class Level(StrEnum):
    """How far a target goes for a feature."""

    NATIVE = "native"  # an option of its own
    INDIRECT = "indirect"  # by raw arguments or a script, at a price
    LOST = "lost"  # not at all


@dataclass(frozen=True, slots=True)
class Support:
    """One feature on one target. how: by which option, or why not. loses: what the guest or the
    host then lacks; None for NATIVE."""

    level: Level
    how: str
    loses: str | None = None


def native(how: str) -> Support:
    return Support(Level.NATIVE, how)


def indirect(how: str, loses: str) -> Support:
    return Support(Level.INDIRECT, how, loses)


def lost(how: str, loses: str) -> Support:
    return Support(Level.LOST, how, loses)


@dataclass(frozen=True, slots=True)
class Rendering:
    """What is written for a target. document: the file of -o. companions: (suffix, content) of
    files next to it, such as a hook script. findings: what only this plan or this file has; what a
    target cannot say is added by `target_findings`."""

    document: bytes
    companions: tuple[tuple[str, bytes], ...] = ()
    findings: tuple[PlanFinding, ...] = ()


def _as_read(vm: Vm, content: bytes, source: str, host: Host) -> Vm:
    return vm


def _never(content: bytes) -> bool:
    return False


class Target(Struct, frozen=True, kw_only=True):
    """A hypervisor that a plan is written for: what a module of this package, or of another
    distribution, registers. Its name is the one it is registered by.

    render raises InputError where the target cannot take the plan safely; of plan, VM, host, the
    target's own file that is edited (None = a new one) and that file's name. read_vm raises
    ParseError or InputError. The defaults are those of a target whose file says all by itself.
    """

    title: str
    """For people."""
    source: str
    """The documentation, with its version."""
    support: Mapping[Feature, Support]
    render: Callable[[Plan, Vm, Host | None, bytes | None, str], Rendering]
    read_vm: Callable[[bytes, str], Vm]
    recognises: Callable[[bytes], bool]
    """Whether a file is one of this target, by its content."""
    may_be: Callable[[bytes], bool] = _never
    """Whether a file can be one of this target, for who has named the target."""
    unread: frozenset[str] = frozenset()
    """Facts of vm/facts.py that its file does not say, though the target may give them."""
    one_socket: bool = False
    """vCPUs are cores of one socket unless the file says otherwise; libvirt makes each a socket."""
    runs_qemu: bool = False
    """The limits of the host's QEMU hold."""
    keeps_addresses: bool = False
    """A VM of another hypervisor keeps its PCI addresses."""
    own_slots: tuple[GuestAddress, ...] = ()
    """Those that it occupies itself."""
    architecture_of_host: bool = False
    """A file that does not name x86_64 leaves the architecture to the host."""
    on_host: Callable[[Vm, bytes, str, Host], Vm] = _as_read
    """The VM with the devices that the file names by something that is on the host."""
    as_started: Callable[[Vm, Host], Vm] | None = None
    """The VM with cells, pins and shape that the target itself derives from PUs of the host."""
    needs_host: bool = False
    """What is written depends on the host, too."""
    says_emulator: bool = False
    """A file without PUs for the emulator says that it is not pinned."""
    hook_suffix: str | None = None
    """Of the script with the pins that is written next to the file."""
    words_of: Callable[[bytes, str], Sequence[str]] | None = None
    """The command of QEMU that the file starts; None where no test guest can be made of it."""


def is_vgpu(device: GuestHostdev) -> bool:
    """A device that binding to vfio-pci would end."""
    return device.uuid is not None or not device.managed


def features_of(plan: Plan) -> frozenset[Feature]:
    """What this plan asks of a hypervisor."""
    mirrored = plan.layout.cells is GuestCells.MIRRORED
    sized = [cell for cell in plan.cells if cell.vcpus or cell.memory_bytes]
    models = {controller.model for controller in plan.vm.controllers}
    window = plan.aperture
    asked = {
        Feature.VCPU_PINS: bool(plan.vcpu_pins),
        Feature.EMULATOR_PINS: plan.emulator_pus is not None,
        Feature.IOTHREAD_PINS: any(plan.iothread_pus),
        Feature.TOPOLOGY: plan.topology is not None,
        Feature.THREADS: plan.topology is not None and plan.topology.threads > 1,
        Feature.DIES: plan.topology is not None and plan.topology.dies > 1,
        Feature.CACHE: plan.cache is not None,
        Feature.CELLS: mirrored,
        Feature.UNEQUAL_CELLS: mirrored
        and len({(len(cell.vcpus), cell.memory_bytes) for cell in sized}) > 1,
        Feature.DISTANCES: mirrored and len(plan.cells) > 1 and bool(plan.cells[0].distances),
        Feature.MEMORY_NODES: plan.memory_mode is not None,
        Feature.MEMORY_MODE: plan.memory_mode not in (None, MemoryMode.STRICT),
        Feature.HUGE_PAGES: plan.page_bytes is not None,
        Feature.DEVICES: bool(plan.devices),
        Feature.DEVICE_CELLS: any(device.cell is not None for device in plan.devices),
        Feature.DEVICE_TREE: PortModel.SWITCH_UPSTREAM in models,
        Feature.INITIATORS: any(device.initiator_cells for device in plan.devices),
        Feature.WINDOW: window is not None
        and (
            window.pcihole64_bytes,
            window.physical_address_bits,
            window.firmware_mmio64_mib,
        )
        != (None, None, None),
        Feature.IOMMU: plan.vm.has_iommu,
        Feature.VGPUS: any(map(is_vgpu, plan.devices)),
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


def lost_features(target: Target, plan: Plan) -> frozenset[Feature]:
    """What the plan asks for and the target cannot give at all."""
    return frozenset(f for f in features_of(plan) if target.support[f].level is Level.LOST)


def target_findings(target: Target, plan: Plan) -> tuple[PlanFinding, ...]:
    """What the target cannot express of this plan, or only at a price, in the order of Feature."""
    asked = features_of(plan)
    found = []
    for feature in Feature:
        support = target.support[feature]
        if feature not in asked or support.level is Level.NATIVE:
            continue
        is_lost = support.level is Level.LOST
        found.append(
            plan_finding(
                "target-lost" if is_lost else "target-indirect",
                f"{target.title}: {FEATURE_WORDS[feature]}",
                f"{support.how}; {support.loses}",
            )
        )
    return tuple(found)


def default_machine(architecture: str) -> str:
    """The machine type that has a PCIe tree."""
    return "virt" if architecture == "aarch64" else "q35"


def passed_through(
    devices: Iterable[tuple[Bdf | str, int | None]],
    initiators: Mapping[Bdf, CpuSet] = MappingProxyType({}),
) -> tuple[tuple[GuestHostdev, ...], tuple[GuestMediated, ...]]:
    """Functions and mediated devices of a file that names them with their guest cells."""
    functions, mediated = [], []
    for name, cell in devices:
        if isinstance(name, str):
            mediated.append(GuestMediated(name, None, cell))
        else:
            more = initiators.get(name, CpuSet())
            functions.append(GuestHostdev(name, None, cell=cell, initiator_cells=more))
    return tuple(functions), tuple(mediated)


def refuse_arm(guest: Vm, target: str, what: str) -> None:
    """Raises InputError for a guest that is no x86_64 one."""
    if guest.architecture != "x86_64":
        raise InputError(
            f"{target}: expected a guest of x86_64 for {what}, found {guest.architecture}",
            hint="choose the target qemu, which takes aarch64",
        )


def refuse_many_vcpus(plan: Plan, target: str, most: int) -> None:
    """Raises InputError for more vCPUs than come up without an IOMMU that remaps interrupts."""
    if plan.vcpus > most:
        raise InputError(
            f"{target}: expected at most {most} vCPUs, found {plan.vcpus}",
            hint=f"choose --vcpus {most} or fewer, or the target qemu",
        )


def shows_siblings(plan: Plan) -> bool:
    """The guest's vCPUs are sibling pairs."""
    return plan.topology is not None and plan.topology.threads > 1


def shape_of_siblings(vcpus: int) -> tuple[int, int, int, int]:
    """Of a guest whose file records that a layout showed it siblings, without their topology."""
    return (1, 1, max(1, vcpus // 2), 2)


def refuse_unsafe_name(name: str, source: str) -> str:
    """The name as it is. Raises InputError where it holds what no file or command line should."""
    if not name.isprintable() or not name.strip():
        raise InputError(
            f"{source}: expected a VM name of printable characters, found {name!r}",
            hint="rename the VM; nothing was written",
        )
    return name


def whole_units(size_bytes: int, unit: int, what: str, target: str) -> int:
    """A size in a unit that the target counts in. Raises InputError where it is not whole."""
    count, rest = divmod(size_bytes, unit)
    if rest:
        raise InputError(
            f"{target}: expected {what} in whole units of {unit} bytes, found {size_bytes} bytes",
            hint="choose a memory size that divides into them",
        )
    return count


def one_node_each(plan: Plan, target: str) -> tuple[int, ...]:
    """The one host node of each cell. Raises InputError where a cell's memory spans several."""
    for cell in plan.cells:
        if len(cell.host_nodes) > 1 and cell.memory_bytes:
            raise InputError(
                f"{target}: expected one host node for each guest cell, found cell {cell.id} on "
                f"nodes {', '.join(map(str, cell.host_nodes))}",
                hint="choose a layout with a cell per node, or --max-nodes 1",
            )
    return tuple(cell.host_nodes[0] if cell.host_nodes else -1 for cell in plan.cells)


def pus_of(pins: tuple[CpuSet, ...]) -> CpuSet:
    """All PUs of some pins."""
    bits = 0
    for pin in pins:
        bits |= pin.bits
    return CpuSet.from_bits(bits)
