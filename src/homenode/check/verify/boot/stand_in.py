"""StandIn: a small guest with the vCPUs, cells and PCIe tree of a real one, and no backends.

Every passed-through device with a large BAR is replaced by QEMU's test device with a BAR of that
size; every other device that has a PCI address by a virtio-serial controller: endpoints that need
no backend and no driver.

Its CPU model is the definition's if TCG shows a guest the same topology. Seen with QEMU 7.2: under
TCG the models Skylake-Server and other Intel models show siblings, dies and one L3 per die as under
KVM; AMD models and `max` show no siblings.

"GPUs vanish with much memory" is a matter of addresses: memory, the 64-bit PCI window behind it and
the CPU's address bits. None of it needs real memory: QEMU's pci-testdev has a BAR of any size
without backing, and maxmem= moves the window behind memory that is not there. If the sizes exceed
the 40 address bits of TCG's CPUs, all are divided by the same power of two.
"""

import itertools
import re
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HostError
from homenode.machine.topology import Host
from homenode.plan.shape.aperture import DEFAULT_WINDOW_BYTES, compute_window_bytes
from homenode.plan.shape.guest_topology import INTEL_MODELS
from homenode.units import GIB, MIB
from homenode.vm.domain.controllers import QEMU_NAMESPACE, read_hole, read_window_mib
from homenode.vm.domain.document import Document
from homenode.vm.domain.hostdevs import list_addressed
from homenode.vm.model import GuestAddress, GuestPciController, Vm, VmCell
from homenode.vm.targets.qemu_command import list_shared_slots

SUBSTITUTE_CPU_MODEL = "Skylake-Server"
_L3 = ("emulate", "passthrough", "disable")
_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)


class CpuChoice(Struct, frozen=True):
    """A test guest's <cpu>."""

    mode: str  # "custom" with a model, "host-passthrough" or "maximum"
    model: str | None
    features: tuple[tuple[str, bool], ...]  # (name, on)
    l3: str | None  # None = the model's own; "emulate", "passthrough" or "disable"
    # why siblings and LLCs say nothing of the real guest; None if they do
    substituted: str | None


def choose_cpu(document: Document, facts: Vm, *, kvm: bool) -> CpuChoice:
    """Return the definition's <cpu> if this machine can run it, else an Intel model with SMT."""
    mode, model = facts.cpu_mode, facts.cpu_model
    l3 = facts.cpu_cache if facts.cpu_cache in _L3 else None
    features = tuple(
        (feature.get("name") or "", feature.get("policy") not in ("disable", "forbid"))
        for feature in document.root.all("cpu/feature")
        if _SAFE.match(feature.get("name") or "")
    )
    emulated = facts.domain_type == "qemu"
    if mode == "custom" and model is not None and _SAFE.match(model):
        if kvm or emulated or model.startswith(INTEL_MODELS):
            return CpuChoice(mode, model, features, _l3_of_model(l3), None)
        reason = f"its CPU model is {SUBSTITUTE_CPU_MODEL}: {model} shows no siblings without KVM"
        return _substitute_cpu(l3, reason)
    if kvm and mode in ("host-passthrough", "host-model", "maximum"):
        return CpuChoice("host-passthrough", None, features, l3, None)
    if emulated and mode == "maximum":
        return CpuChoice(mode, None, features, l3, None)
    name = mode or "the default model"
    reason = f"its CPU model is {SUBSTITUTE_CPU_MODEL}" + (
        f" for {name}" if kvm else " without KVM"
    )
    return _substitute_cpu(l3, reason)


def _substitute_cpu(l3: str | None, reason: str) -> CpuChoice:
    return CpuChoice("custom", SUBSTITUTE_CPU_MODEL, (), _l3_of_model(l3), reason)


def _l3_of_model(l3: str | None) -> str | None:
    """Return the L3 of a named model: caches are passed through with host-passthrough only."""
    return None if l3 == "passthrough" else l3


TCG_ADDRESS_BITS = 40
_MIN_BAR_BYTES = 64 * MIB
"""Smaller ones find room everywhere."""

_LOW_BYTES = 4 * GIB


class AddressMap(Struct, frozen=True):
    """Addresses that large BARs and the root bus need in a test guest."""

    bars: tuple[tuple[Bdf, int], ...]  # (function of the host, bytes) of each large BAR
    memory_bytes: int  # where memory ends
    hole_bytes: int | None  # 64-bit hole of the root bus and OVMF; None = default
    window_mib: int | None  # window of the root bus and OVMF; None = default
    shift: int  # bits by which memory is scaled down


def map_addresses(document: Document, guest: Vm, host: Host) -> AddressMap | None:
    """The address map of a guest's devices; None if none of them has a large BAR that is known."""
    devices = [
        device
        for hostdev in guest.hostdevs
        if (device := host.find_device(hostdev.bdf)) is not None
    ]
    sizes = {
        device.bdf: max(
            (
                bar.size_bytes
                for bar in device.bars
                if bar.is_memory and bar.is_64bit and bar.is_prefetchable
            ),
            default=0,
        )
        for device in devices
    }
    bars = {bdf: size for bdf, size in sizes.items() if size >= _MIN_BAR_BYTES}
    if not bars:
        return None
    memory = max(guest.memory_bytes + guest.memory_device_bytes, guest.max_memory_bytes or 0)
    hole, window = read_hole(document), read_window_mib(document)
    space = max(compute_window_bytes(devices), hole or 0, (window or 0) * MIB)
    # The firmware puts the window at a multiple of its size.
    needed_bytes = (-(-(memory + _LOW_BYTES) // space) + 1) * space
    shift = max(0, (needed_bytes - 1).bit_length() - TCG_ADDRESS_BITS)
    if shift:
        hole = hole or DEFAULT_WINDOW_BYTES
        window = window or DEFAULT_WINDOW_BYTES // MIB
    return AddressMap(
        tuple(sorted((bdf, _power_of_two(size >> shift)) for bdf, size in bars.items())),
        memory >> shift,
        None if hole is None else hole >> shift,
        None if window is None else max(1, window >> shift),
        shift,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


MIN_CELL_BYTES = 192 * MIB
"""The guest's kernel and files take about 100 MiB of the first node."""

MAX_BYTES = 4096 * MIB
MAX_VCPUS = 255
"""Limit without an IOMMU that remaps interrupts, which TCG's machine does not have."""

MAX_TOGETHER = 16
"""Limit without KVM: each write to a PCI function or to code costs time for every vCPU."""

TWO_GUESTS_TEXT = "the PCIe tree and all vCPUs in one guest: two are booted, as there is no KVM"

_FEATURES = ("acpi", "apic")
_SWITCHES = ("vmport", "smm", "pmu")
"""Children of <features> that the test guest copies; _SWITCHES are copied with state=."""

_BACKING = ("source", "access")

_LOCAL_MACHINE_TYPES = ("q35", "pc")
"""Names for the newest machine type that a QEMU has."""

_MODELS = (
    "pcie-expander-bus",
    "pcie-root-port",
    "pcie-switch-upstream-port",
    "pcie-switch-downstream-port",
    "pcie-to-pci-bridge",
    "dmi-to-pci-bridge",
    "pci-bridge",
)
_CHIPSET_SLOTS = {True: (0, 0x1F), False: (0, 1)}
"""Used slots of bus 0, by "is q35": host bridge; LPC, SATA and SMBus; i440fx: IDE, USB."""


class MinimalGuest(Struct, frozen=True, kw_only=True, gc=False):
    # what it is: its machine is "q35", "pc", or a version of these, its memory is scaled down, its
    # parent controllers before their children, the root omitted
    vm: Vm
    memory_ratio: tuple[int, int]  # (stand-in bytes, real bytes), for scaling expectations
    cpu: CpuChoice
    # (address, function of the host, None for other devices), ascending
    devices: tuple[tuple[GuestAddress, Bdf | None], ...]
    left_out: tuple[str, ...] = ()  # what of the document the test guest does not have
    is_split: bool = False  # all vCPUs and the PCIe tree are booted as two guests
    switches: tuple[tuple[str, bool], ...] = ()  # (feature, is on)
    is_shared: bool = False  # its memory is a shared memfd
    iommu: tuple[str, ...] | None = None  # the switches of an Intel IOMMU, None = no IOMMU
    uefi: bool = False  # OVMF is its firmware
    space: AddressMap | None = None  # None = no test devices for BARs

    @property
    def machine(self) -> str:
        return self.vm.machine or "pc"

    @property
    def first_vcpus(self) -> int:
        """Count the vCPUs before the first offline vCPU."""
        return min(self.vm.offline_vcpus, default=self.vm.vcpus)

    @property
    def needs_qemu(self) -> bool:
        """Whether it has parts that only QEMU's own command line can express."""
        return self.uefi or self.iommu is not None or self.space is not None or self.is_split

    @property
    def guests(self) -> tuple["MinimalGuest", ...]:
        """Return itself, or one guest with all vCPUs and one with the PCIe tree and firmware."""
        if not self.is_split:
            return (self,)
        number = itertools.count()
        cells = tuple(
            replace(cell, vcpus=CpuSet([next(number)])) if cell.vcpus else cell
            for cell in self.vm.cells
        )
        few = replace(
            self.vm,
            vcpus=max(1, next(number)),
            cells=cells,
            cpu_topology=None,
            offline_vcpus=CpuSet(),
        )
        bare = replace(self.vm, controllers=())
        vcpus = replace(self, vm=bare, devices=(), iommu=None, uefi=False, space=None)
        return (vcpus, replace(self, vm=few))

    def scale(self, memory_bytes: int) -> int:
        """Scale memory of the real guest to the test guest, in whole MiB."""
        small, real = self.memory_ratio
        return max(1, memory_bytes * small // real // MIB) * MIB

    def scaled_cell(self, cell: VmCell) -> VmCell:
        """Return the test guest's cell for a cell of the real guest."""
        return VmCell(
            id=cell.id,
            vcpus=cell.vcpus,
            memory_bytes=self.scale(cell.memory_bytes),
            distances=cell.distances,
        )

    @property
    def shared_slots(self) -> frozenset[tuple[int, int]]:
        """Return (bus, device) of slots with a function other than 0."""
        places = [address for address, _ in self.devices]
        places += [c.address for c in self.vm.controllers if c.address is not None]
        return list_shared_slots(places)


def build_test_guest(
    document: Document,
    facts: Vm,
    cpu: CpuChoice,
    machine: str,
    *,
    host: Host | None = None,
    has_ovmf: bool = False,
    through_libvirt: bool = False,
    kvm: bool = True,
) -> MinimalGuest:
    """Return the test guest of a definition. host: that of the devices, whose BARs are imitated.
    through_libvirt: omit parts that only QEMU's command line can express. Raises HostError for
    guests that have no test guest: other architectures, too many vCPUs."""
    if facts.architecture != "x86_64":
        raise HostError(
            f"{facts.source}: expected an x86_64 guest to boot a test guest for, found "
            f"{facts.architecture}",
            hint="verify the definition alone, without --boot, and the real guest with --guest",
        )
    if facts.vcpus > MAX_VCPUS:
        raise HostError(
            f"{facts.source}: expected at most {MAX_VCPUS} vCPUs to boot a test guest for, found "
            f"{facts.vcpus}",
            hint="verify the definition alone, and the real guest with --guest",
        )
    ratio = compute_memory_ratio([c.memory_bytes for c in facts.cells] or [facts.memory_bytes])
    controllers, devices = _build_tree(document, facts)
    direct = not through_libvirt
    wants_uefi = facts.firmware is not None and facts.firmware != "bios"
    space = map_addresses(document, facts, host) if direct and host is not None else None
    bare = MinimalGuest(
        vm=Vm(
            name=facts.name,
            source=facts.source,
            machine=machine,
            vcpus=facts.vcpus,
            offline_vcpus=facts.offline_vcpus,
            cpu_topology=facts.cpu_topology,
            memory_bytes=0,
            controllers=controllers,
            has_acpi=facts.has_acpi,
        ),
        memory_ratio=ratio,
        cpu=cpu,
        devices=devices,
        switches=_read_switches(document),
        is_shared=_is_shared(document),
        iommu=_read_iommu(document) if direct else None,
        uefi=wants_uefi and has_ovmf and direct,
        space=space,
    )
    omissions = tuple(_list_omissions(document, facts, bare, host, has_ovmf))
    is_split = direct and not kvm and facts.vcpus > MAX_TOGETHER and bool(controllers or devices)
    omissions += (TWO_GUESTS_TEXT,) if is_split else ()
    cells = tuple(map(bare.scaled_cell, facts.cells))
    total = sum(cell.memory_bytes for cell in cells) or bare.scale(facts.memory_bytes)
    vm = replace(bare.vm, memory_bytes=total, cells=cells)
    return replace(bare, vm=vm, left_out=omissions, is_split=is_split)


def compute_memory_ratio(sizes: list[int]) -> tuple[int, int]:
    """Return the ratio that scales the smallest cell to MIN_CELL_BYTES, if the total fits then."""
    sizes = [size for size in sizes if size] or [1]
    total, smallest = sum(sizes), min(sizes)
    if total <= MIN_CELL_BYTES * len(sizes):
        return 1, 1
    target_bytes = min(total * MIN_CELL_BYTES // smallest, MAX_BYTES)
    return min(max(target_bytes, 2 * MIN_CELL_BYTES), total), total


def _read_switches(document: Document) -> tuple[tuple[str, bool], ...]:
    features = document.root.all("features/*")
    return tuple((e.name, e.get("state") != "off") for e in features if e.name in _SWITCHES)


def _is_shared(document: Document) -> bool:
    """Return whether the memory is a memfd that other processes map, as vhost-user requires."""
    root = document.root
    is_memfd = root.value("memoryBacking/source/@type") == "memfd"
    return is_memfd or root.value("memoryBacking/access/@mode") == "shared"


def _read_iommu(document: Document) -> tuple[str, ...] | None:
    """Return the switches of an Intel IOMMU as QEMU spells them; eim needs KVM."""
    iommu = document.root.find("devices/iommu")
    if iommu is None or iommu.get("model") != "intel":
        return None
    driver = iommu.child("driver")
    names = {"intremap": "intremap", "caching_mode": "caching-mode", "iotlb": "device-iotlb"}
    return tuple(
        f"{qemu}={value}"
        for name, qemu in names.items()
        if driver is not None and (value := driver.get(name)) in ("on", "off")
    )


def _list_omissions(
    document: Document, facts: Vm, stand_in: MinimalGuest, host: Host | None, has_ovmf: bool
) -> Iterator[str]:
    root = document.root
    if facts.machine not in (None, stand_in.machine, *_LOCAL_MACHINE_TYPES):
        yield f"machine type {facts.machine}, which this QEMU lacks ({stand_in.machine} instead)"
    for feature in root.all("features/*"):
        if feature.name not in (*_FEATURES, *_SWITCHES):
            yield f"the feature {feature.tag}"
    if facts.firmware is not None and facts.firmware != "bios" and not stand_in.uefi:
        yield "UEFI firmware" + ("" if has_ovmf else " (no image here: apt-get install ovmf)")
    if facts.hostdevs and stand_in.space is None:
        reason = " (the devices' host is unknown)" if host is None else ""
        if host is None or map_addresses(document, facts, host) is not None:
            yield f"the devices' BARs and the address space for them{reason}"
    elif stand_in.space is not None and stand_in.space.shift:
        divisor = 1 << stand_in.space.shift
        yield f"the size of BARs, their window and memory, all divided by {divisor}"
    if root.find("cpu/maxphysaddr") is not None:
        yield "address bits (<maxphysaddr>)"
    if root.find("cpu/numa/interconnects") is not None:
        yield "latencies and bandwidths of cells (<interconnects>)"
    for element in root.all("memoryBacking/*"):
        if element.name not in _BACKING:
            yield f"memory backing {element.tag}"
    if facts.has_dimms:
        yield "memory devices"
    if facts.has_iommu and stand_in.iommu is None:
        yield "the vIOMMU"
    if facts.launch_security is not None:
        yield f"launch security {facts.launch_security}"
    commandline = root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    if commandline is not None and any(
        "opt/ovmf/X-PciMmio64Mb" not in (e.get("value") or "") and e.get("value") != "-fw_cfg"
        for e in commandline.children
    ):
        yield "<qemu:commandline>"


def _build_tree(
    document: Document, facts: Vm
) -> tuple[tuple[GuestPciController, ...], tuple[tuple[GuestAddress, Bdf | None], ...]]:
    """Return controllers and endpoints; those without an address get one on the root bus."""
    bridges = [c for c in facts.controllers if c.model in _MODELS]
    places = {c.address for c in bridges if c.address is not None}
    endpoints: dict[GuestAddress, Bdf | None] = {}
    buses = {0} | {c.index for c in bridges}
    for address, element in list_addressed(document):
        of_chipset = address.bus == 0 and address.device in _CHIPSET_SLOTS[facts.is_q35]
        is_bridge = element.name == "controller" and element.get("type") == "pci"
        if not (is_bridge or of_chipset or address in places) and address.bus in buses:
            endpoints[address] = None
    for hostdev in facts.hostdevs:
        if hostdev.address is not None and hostdev.address.bus in buses:
            endpoints[hostdev.address] = hostdev.bdf
    slots = _find_free_slots({a.device for a in (*places, *endpoints) if a.bus == 0})
    controllers = [
        c if c.address is not None else replace(c, address=GuestAddress(0, 0, next(slots), 0))
        for c in bridges
    ]
    next_index = max(buses) + 1
    for hostdev in facts.hostdevs:
        if hostdev.address is None:
            at = GuestAddress(0, 0, next(slots), 0)
            if facts.is_q35:
                controllers.append(GuestPciController(next_index, "pcie-root-port", at))
                at = GuestAddress(0, next_index, 0, 0)
                next_index += 1
            endpoints[at] = hostdev.bdf
    endpoint_items = sorted(endpoints.items(), key=lambda item: item[0])
    return _sort_parents_first(controllers), tuple(endpoint_items)


def _find_free_slots(in_use: set[int]) -> Iterator[int]:
    for slot in range(2, 31):
        if slot not in in_use:
            yield slot
    raise HostError("test guest: no free slot on the root bus for a device without an address")


def _sort_parents_first(
    controllers: Iterable[GuestPciController],
) -> tuple[GuestPciController, ...]:
    """Sort in the order in which QEMU can create them; loops come last, and QEMU rejects them."""
    waiting = sorted(controllers, key=lambda c: c.index)
    buses, ordered = {0}, []
    while waiting:
        ready = [c for c in waiting if c.address is not None and c.address.bus in buses] or waiting[
            :1
        ]
        for controller in ready:
            ordered.append(controller)
            buses.add(controller.index)
            waiting.remove(controller)
    return tuple(ordered)
