"""The host as a value: packages, NUMA nodes, LLCs, cores, CPUs; its PCI tree is in pci.py.

A Host is immutable and complete: unknown facts are None, with the reason in `Host.gaps`. Names and
their meaning: docs/reference/glossary.md.

Source: the object types of hwloc (hwloc.h), Documentation/ABI/stable/sysfs-devices-system-cpu and
Documentation/admin-guide/cputopology.rst of the Linux kernel.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, NodeIndex, PackageIndex, PuIndex
from homenode.errors import NotKnownError
from homenode.findings import Gap
from homenode.machine.pci import DeviceKind, DeviceLink, PciDevice, PortType, RootComplex
from homenode.machine.settings import HostSettings


class HostReserve(Struct, frozen=True):
    """Resources that a placement leaves to the host unless nothing else fits."""

    cores: int = 1  # whole cores of the host without a vCPU of any VM
    # of each node; None = the larger of 2 GiB and 2 % of the node. What QEMU needs for the VM comes
    # on top.
    memory_bytes: int | None = None


DEFAULT_HOST_RESERVE = HostReserve()


LOCAL_DISTANCE, REMOTE_DISTANCE = 10, 20
"""Distance of a node to itself, and to other nodes if the firmware has no SLIT. Source: ACPI 6.5,
5.2.17; include/linux/topology.h."""


class CoreId(NamedTuple):
    """A core by the OS's numbers; `core` alone repeats from package to package.

    Old AMD modules and some guests repeat it within a package too: then it is a label only, and
    CoreIndex distinguishes the cores.
    """

    package: PackageIndex
    core: int


class CoreKind(StrEnum):
    """Kinds of core on a hybrid host. None on hosts whose cores are all equal."""

    PERFORMANCE = "performance"
    EFFICIENCY = "efficiency"


class MemoryKind(StrEnum):
    """Kind of a node's memory."""

    DRAM = "dram"
    GPU = "gpu"  # memory of a GPU that the driver put online as a node (GH200 and kin)
    OTHER = "other"  # CXL, persistent or high-bandwidth memory; known not to be plain DRAM


class Pu(Struct, frozen=True):
    """A logical CPU. core, node, llc, package, die are None if the source does not report it, as
    for offline CPUs."""

    index: PuIndex
    core: CoreIndex | None
    llc: LlcIndex | None
    node: NodeIndex | None
    package: PackageIndex | None
    die: int | None
    online: bool = True
    allowed: bool = True  # the cgroup of the reading process allows this CPU
    isolated: bool = False  # in isolcpus= (kept from the scheduler's load balancing)
    nohz_full: bool = False  # in nohz_full= (no tick while one task runs)


class Core(Struct, frozen=True):
    """The online CPUs that share execution resources (SMT siblings), ascending."""

    index: CoreIndex
    id: CoreId
    pus: CpuSet
    kind: CoreKind | None = None


class Llc(Struct, frozen=True):
    """A last-level cache and the online CPUs that share it, by shared_cpu_list, never by id."""

    index: LlcIndex
    pus: CpuSet
    level: int
    size_bytes: int | None


class Package(Struct, frozen=True):
    """A physical package (socket) and its online CPUs."""

    index: PackageIndex
    pus: CpuSet


class PagePool(Struct, frozen=True, order=True):
    """Huge pages of one size on one node. Counts are pages."""

    page_bytes: int
    total_pages: int
    free_pages: int


class NumaNode(Struct, frozen=True):
    """A host NUMA node; with no CPUs it is CPU-less, with 0 bytes it is memory-less."""

    index: NodeIndex
    pus: CpuSet
    # memory_bytes, memory_free_bytes: bytes; None if the source does not report it. Page cache and
    # reclaimable slabs count as free, huge pages in a pool do not.
    memory_bytes: int | None
    memory_free_bytes: int | None = None
    page_pools: tuple[PagePool, ...] = ()
    memory_kind: MemoryKind | None = MemoryKind.DRAM
    # the GPU whose memory this is, if memory_kind is GPU and the driver reports it
    gpu: Bdf | None = None
    # an ACPI initiator that is not a CPU (for example a GPU) belongs to the node
    generic_initiator: bool = False
    package: PackageIndex | None = None  # None on CPU-less nodes and if the node spans packages


LAYOUT_NAMESPACE = "urn:homenode:layout:1"
"""XML namespace of homenode's mark, <layout> in a domain's <metadata>."""


class DomainMark(StrEnum):
    """Owner of the UUID in homenode's mark in a domain's metadata."""

    OWN = "own"  # the domain's: homenode placed it; a mark without a UUID counts as its own
    COPY = "copy"  # another domain's: virt-clone keeps metadata


class RunningDomain(Struct, frozen=True):
    """Resources that a libvirt domain on this host uses."""

    name: str  # as in libvirt, or a pseudonym in a redacted capture (see has_pseudonym)
    running: bool
    # CPUs of each vCPU in vCPU order; None for a vCPU that floats
    vcpu_pins: tuple[CpuSet | None, ...]
    emulator_pus: CpuSet | None
    iothread_pus: tuple[CpuSet | None, ...]
    memory_bytes: int
    memory_bound: bool
    # (node, bytes); empty with memory_bound False means on any node
    memory_by_node: tuple[tuple[NodeIndex, int], ...]
    page_bytes: int | None  # the page size that backs it; None for ordinary pages
    devices: tuple[Bdf, ...]
    # a VM that is to run here (a saved plan, or [[vm]] of a host.toml): it counts as if it ran,
    # although the kernel's counters of free memory and pages do not include it
    planned: bool = False
    mediated: tuple[str, ...] = ()  # UUIDs of the mediated devices that it has
    # libvirt's, in lower case; None if it is missing, or a pseudonym
    uuid: str | None = None
    mark: DomainMark | None = None  # homenode's, in its metadata; None = homenode has not placed it

    @property
    def has_claim(self) -> bool:
        """Whether its CPUs, memory and devices count as used when another VM is planned."""
        return self.running or self.planned or self.is_kept

    @property
    def is_kept(self) -> bool:
        """True if it is shut off and homenode has placed it."""
        return not (self.running or self.planned) and self.mark is DomainMark.OWN

    @property
    def pins(self) -> tuple[CpuSet | None, ...]:
        """All of them: of vCPUs, of the emulator, of IOThreads."""
        return *self.vcpu_pins, self.emulator_pus, *self.iothread_pus

    @property
    def has_pseudonym(self) -> bool:
        """Whether the name is not from libvirt, whose names have no "/": its owner is unknown."""
        return "/" in self.name


class CpuModel(Struct, frozen=True):
    """The CPUs' own identification. family and model are x86 CPUID values; None elsewhere."""

    vendor: str | None
    name: str | None
    family: int | None = None
    model: int | None = None


def find_nearest_cpu_nodes(
    nodes: Sequence[NumaNode], distances: Sequence[Sequence[int]] | None
) -> dict[NodeIndex, tuple[NodeIndex, ...]]:
    """Return the nearest nodes with CPUs, ascending, of each node without CPUs.

    distances: as in Host; a pair counts with the worse of its two directions. Without distances all
    nodes are as near. Empty if no node has CPUs.
    """
    homes = [(position, node.index) for position, node in enumerate(nodes) if node.pus]
    nearest: dict[NodeIndex, tuple[NodeIndex, ...]] = {}
    for position, node in enumerate(nodes):
        if node.pus or not homes:
            continue
        row = {
            index: 0
            if distances is None
            else max(distances[position][home], distances[home][position])
            for home, index in homes
        }
        least = min(row.values())
        nearest[node.index] = tuple(index for index, distance in row.items() if distance == least)
    return nearest


class Host(Struct, frozen=True, dict=True):
    """A machine. Its parts ascend by index, PCI devices by address."""

    name: str
    architecture: str | None
    cpu: CpuModel
    packages: tuple[Package, ...]
    nodes: tuple[NumaNode, ...]
    # shape (nodes, nodes), [from][to] in the order of `nodes`; SLIT, 10 = local; None if missing
    distances: tuple[tuple[int, ...], ...] | None
    llcs: tuple[Llc, ...]  # of online CPUs
    cores: tuple[Core, ...]  # of online CPUs
    pus: tuple[Pu, ...]
    root_complexes: tuple[RootComplex, ...] = ()
    pci_devices: tuple[PciDevice, ...] = ()
    links: tuple[DeviceLink, ...] = ()
    domains: tuple[RunningDomain, ...] = ()
    settings: HostSettings = HostSettings()
    gaps: tuple[Gap, ...] = ()
    # reserve, housekeeping_pus: what its operator keeps for the host, and the CPUs for the
    # emulators of several VMs, if the host description has them
    reserve: HostReserve | None = None
    housekeeping_pus: CpuSet = CpuSet()
    assumed: tuple[str, ...] = ()  # values of a description without a source
    # the source shows no NUMA nodes, and the host counts as one: a kernel without NUMA, or a
    # container that does not see them
    nodes_assumed: bool = False

    def find_node(self, index: int) -> NumaNode | None:
        return self.node_at.get(index)

    @cached_property
    def node_at(self) -> dict[int, NumaNode]:
        return {node.index: node for node in self.nodes}

    @cached_property
    def row_of_node(self) -> dict[NodeIndex, int]:
        """The place of each node in `distances`."""
        return {node.index: row for row, node in enumerate(self.nodes)}

    @cached_property
    def online_pus(self) -> CpuSet:
        return CpuSet(pu.index for pu in self.pus if pu.online)

    @cached_property
    def offline_pus(self) -> CpuSet:
        return CpuSet(pu.index for pu in self.pus if not pu.online)

    @cached_property
    def usable_pus(self) -> CpuSet:
        """Online CPUs that homenode's process may use."""
        return CpuSet(pu.index for pu in self.pus if pu.online and pu.allowed)

    @cached_property
    def isolated_pus(self) -> CpuSet:
        """CPUs in isolcpus= or nohz_full=, usable or not."""
        return CpuSet(pu.index for pu in self.pus if pu.isolated or pu.nohz_full)

    @cached_property
    def nearest_cpu_nodes(self) -> dict[NodeIndex, tuple[NodeIndex, ...]]:
        """Return the nearest nodes with CPUs, ascending, of each node without CPUs."""
        return find_nearest_cpu_nodes(self.nodes, self.distances)

    @cached_property
    def mutual_distances(self) -> tuple[tuple[int, ...], ...]:
        """Return the larger distance of both directions; assumed if the source has none."""
        between = self.distances
        if between is None:
            row = (REMOTE_DISTANCE,) * len(self.nodes)
            between = tuple((*row[:i], LOCAL_DISTANCE, *row[i + 1 :]) for i in range(len(row)))
        columns = tuple(zip(*between, strict=True))
        if between == columns:
            return between
        return tuple(tuple(map(max, *pair)) for pair in zip(between, columns, strict=True))

    @cached_property
    def device_at(self) -> dict[Bdf, PciDevice]:
        return {device.bdf: device for device in self.pci_devices}

    @cached_property
    def pu_at(self) -> dict[int, Pu]:
        return {pu.index: pu for pu in self.pus}

    @cached_property
    def core_at(self) -> dict[int, Core]:
        """The cores by CPU."""
        return {pu: core for core in self.cores for pu in core.pus}

    @cached_property
    def core_places(self) -> tuple[tuple[int, NodeIndex | None, LlcIndex | None, int], ...]:
        """(CPUs as bits, node, LLC, bytes of the LLC or 0) of each core; the last three of its
        first CPU."""
        sizes = {llc.index: llc.size_bytes or 0 for llc in self.llcs}
        firsts = [(core.pus.bits, self.pu_at[next(iter(core.pus))]) for core in self.cores]
        return tuple(
            (bits, pu.node, pu.llc, 0 if pu.llc is None else sizes.get(pu.llc, 0))
            for bits, pu in firsts
        )

    def whole_cores(self, pus: CpuSet) -> CpuSet:
        """Return these CPUs and their siblings, of CPUs in cores."""
        return CpuSet(pu for core in self.cores if not core.pus.isdisjoint(pus) for pu in core.pus)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over CPUs, nodes, LLCs, cores, distances and PCI functions with their nodes;
        equal topologies have equal fingerprints. Facts that change from boot to boot or while the
        host runs are not included: free memory, pages, domains, drivers, link states, names."""
        host = complete_nodes(self)
        lines = [f"architecture {host.architecture}"]
        lines += [f"package {package.index} {package.pus.bits:x}" for package in host.packages]
        lines += [
            f"node {node.index} {node.pus.bits:x} {node.memory_kind} {bool(node.memory_bytes)}"
            for node in host.nodes
        ]
        lines += [f"llc {llc.level} {llc.pus.bits:x}" for llc in host.llcs]
        lines += [f"core {core.pus.bits:x} {core.kind}" for core in host.cores]
        lines += [f"distances {row}" for row in host.distances or ()]
        # Virtual functions come and go with a setting of the driver.
        lines += [
            f"pci {device.bdf} {device.class_code:x} {device.node}"
            for device in host.pci_devices
            if device.physical_function is None
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def has_fingerprint(self, fingerprint: str) -> bool | None:
        """Return whether a fingerprint, or the start of one, is that of the host. None = unknown:
        it differs, and the host's source shows no NUMA nodes or PCI functions, as in a container.
        """
        if fingerprint and self.fingerprint.startswith(fingerprint):
            return True
        return None if self.nodes_assumed or not self.pci_devices else False

    def find_device(self, bdf: Bdf) -> PciDevice | None:
        return self.device_at.get(bdf)

    def find_distance(self, a: NodeIndex, b: NodeIndex) -> int | None:
        """Return SLIT distance from node a to node b, or None if the host reports no distances.
        Raises KeyError for a node that the host does not have."""
        row, column = self.row_of_node[a], self.row_of_node[b]
        return None if self.distances is None else self.distances[row][column]

    def without_domains(self, names: Collection[str]) -> "Host":
        domains = tuple(domain for domain in self.domains if domain.name not in names)
        return replace(self, domains=domains)

    def devices_of_kind(self, kind: DeviceKind) -> tuple[PciDevice, ...]:
        return tuple(device for device in self.pci_devices if device.kind is kind)

    @property
    def whole_gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs by address, as drivers number them, without virtual functions."""
        gpus = self.devices_of_kind(DeviceKind.GPU)
        return tuple(gpu for gpu in gpus if gpu.physical_function is None)

    def bridges_above(self, bdf: Bdf) -> tuple[PciDevice, ...]:
        """Return the bridges above a function, from the nearest up to its root port. Raises
        KeyError for a function that the host does not have."""
        path: list[PciDevice] = []
        parent = self.device_at[bdf].parent
        while parent is not None and parent in self.device_at and len(path) < 32:
            path.append(self.device_at[parent])
            parent = path[-1].parent
        return tuple(path)

    def ports_above(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """Return bridges_above; for a virtual function those of its physical function, if known."""
        physical = device.physical_function
        is_known = physical is not None and physical in self.device_at
        return self.bridges_above(physical if physical is not None and is_known else device.bdf)

    def switch_above(self, bdf: Bdf) -> Bdf | None:
        """Return the upstream port of the lowest PCIe switch above a function, else None. Functions
        with the same answer talk to each other without passing a root complex."""
        for bridge in self.ports_above(self.device_at[bdf]):
            if bridge.bridge and bridge.bridge.port_type is PortType.SWITCH_UPSTREAM:
                return bridge.bdf
        return None


def assemble_pus(
    numbers: CpuSet,
    online: CpuSet,
    *,
    nodes: Sequence[NumaNode],
    cores: Sequence[Core] = (),
    llcs: Sequence[Llc] = (),
    packages: Sequence[Package] = (),
    die_of_pu: Mapping[PuIndex, int] = MappingProxyType({}),
    disallowed_pus: CpuSet = CpuSet(),
    isolated_pus: CpuSet = CpuSet(),
    nohz_full: CpuSet = CpuSet(),
) -> tuple[Pu, ...]:
    """Return every CPU, ascending, with the core, LLC, node, package and die it is in."""
    core_of = {pu: core.index for core in cores for pu in core.pus}
    llc_of = {pu: llc.index for llc in llcs for pu in llc.pus}
    node_of = {pu: node.index for node in nodes for pu in node.pus}
    package_of = {pu: package.index for package in packages for pu in package.pus}
    return tuple(
        Pu(
            index=pu,
            core=core_of.get(pu),
            llc=llc_of.get(pu),
            node=node_of.get(pu),
            package=package_of.get(pu),
            die=die_of_pu.get(pu),
            online=pu in online,
            allowed=pu not in disallowed_pus,
            isolated=pu in isolated_pus,
            nohz_full=pu in nohz_full,
        )
        for pu in numbers
    )


class HostSummary(Struct, frozen=True):
    """Counts of a host, as the `host` format opens with. Online CPUs only, unless named otherwise.
    gpus, nics and nvswitches do not count SR-IOV virtual functions; pci_functions does."""

    packages: int
    cores: int
    pus: int
    pus_offline: int
    pus_disallowed: int
    llcs: int
    numa_nodes: int
    cpuless_nodes: int
    memory_bytes: int | None
    pci_functions: int
    gpus: int
    nics: int
    nvswitches: int


def summarise(host: Host) -> HostSummary:
    """Return counts of a host. memory_bytes is None if a node's is unknown, or without nodes."""
    sizes = [node.memory_bytes for node in host.nodes]
    known_sizes = [size for size in sizes if size is not None]
    kinds = [device.kind for device in host.pci_devices if device.physical_function is None]
    return HostSummary(
        packages=len(host.packages),
        cores=len(host.cores),
        pus=sum(pu.online for pu in host.pus),
        pus_offline=sum(not pu.online for pu in host.pus),
        pus_disallowed=sum(pu.online and not pu.allowed for pu in host.pus),
        llcs=len(host.llcs),
        numa_nodes=len(host.nodes),
        cpuless_nodes=sum(not node.pus for node in host.nodes),
        memory_bytes=sum(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None,
        pci_functions=len(host.pci_devices),
        gpus=kinds.count(DeviceKind.GPU),
        nics=kinds.count(DeviceKind.NIC),
        nvswitches=kinds.count(DeviceKind.NVSWITCH),
    )


def complete_nodes(host: Host) -> Host:
    """Return the host with every device of a one-node host on that node.

    Firmware of one-node hosts often reports none (numa_node is -1), although there is no other
    node. The Host keeps the read value; planning uses this one.
    """
    if len(host.nodes) != 1 or all(device.node is not None for device in host.pci_devices):
        return host
    single_node = host.nodes[0].index
    return replace(
        host, pci_devices=tuple(replace(device, node=single_node) for device in host.pci_devices)
    )


def make_empty_host(name: str, gaps: tuple[Gap, ...]) -> Host:
    """Return a host with a name and gaps only."""
    return Host(
        name=name,
        architecture=None,
        cpu=CpuModel(None, None),
        packages=(),
        nodes=(),
        distances=None,
        llcs=(),
        cores=(),
        pus=(),
        gaps=gaps,
    )


HostPart = Literal["CPUs", "cores", "memory", "PCI"]


def reject_unshown(host: Host, *parts: HostPart) -> None:
    """Raise NotKnownError if a host's source shows none of a part: that is unknown, not 0."""
    shown_parts: dict[str, object] = {
        "CPUs": host.pus,
        "cores": host.cores,
        "memory": host.nodes and all(node.memory_bytes is not None for node in host.nodes),
        # a list of addresses and nodes, as from Xen, does not have the kinds of devices
        "PCI": any(device.kind is not DeviceKind.OTHER for device in host.pci_devices),
    }
    for part in parts:
        words = ("CPUs", "cores") if part in ("CPUs", "cores") else (part,)
        gaps = (gap for gap in host.gaps if any(word in gap.subject for word in words))
        if not shown_parts[part] and (gap := next(gaps, None)) is not None:
            hint = "homenode capture, on the host, reads all of it"
            if part == "PCI":
                hint += "; or --lspci FILE with the output of lspci -D -nn -vvv"
            raise NotKnownError(f"{host.name}: {gap}", hint=hint)
