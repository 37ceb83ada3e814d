"""HostGroups: cores by package, node and LLC, the use of each CPU, and one-line summaries."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PackageIndex
from homenode.machine.pci import DeviceKind
from homenode.machine.settings import HostSettings
from homenode.machine.topology import (
    Core,
    CoreKind,
    Host,
    Llc,
    MemoryKind,
    NumaNode,
    RunningDomain,
    summarise,
)
from homenode.show.device_groups import NodeDevices
from homenode.text import number_list, plural
from homenode.units import format_bytes
from homenode.vm.plan import Plan

KIND_WORDS = {CoreKind.PERFORMANCE: "P cores", CoreKind.EFFICIENCY: "E cores"}


class CoreGroup(Struct, frozen=True):
    """Cores of one node, LLC and kind."""

    llc: Llc | None
    kind: CoreKind | None
    package: PackageIndex | None
    cores: tuple[Core, ...]
    cores_of_llc: int  # on all nodes

    @property
    def pus(self) -> CpuSet:
        return CpuSet(pu for core in self.cores for pu in core.pus)


class NodeBlock(Struct, frozen=True):
    """A node with CPUs, or the CPUs of unknown node (node None), and its devices."""

    node: NumaNode | None
    groups: tuple[CoreGroup, ...]
    pus: CpuSet
    devices: NodeDevices | None


class PackageFrame(Struct, frozen=True):
    """Nodes of one package; several packages if a node spans them, none if unknown."""

    packages: tuple[PackageIndex, ...]
    blocks: tuple[NodeBlock, ...]

    @property
    def name(self) -> str:
        if not self.packages:
            return "package unknown"
        return f"package{'s' * (len(self.packages) > 1)} {number_list(self.packages)}"


def list_core_groups(host: Host, pus: CpuSet) -> tuple[CoreGroup, ...]:
    """Group the cores of these CPUs by package, LLC and kind, ascending by CPU."""
    pu_of_index = {pu.index: pu for pu in host.pus}
    cores_of_llc: dict[int, int] = {}
    cores_by_key: dict[tuple[int | None, int | None, CoreKind | None], list[Core]] = {}
    for core in host.cores:
        first = core.pus.first()
        pu = None if first is None else pu_of_index.get(first)
        if pu is None:
            continue
        if pu.llc is not None:
            cores_of_llc[pu.llc] = cores_of_llc.get(pu.llc, 0) + 1
        if not core.pus.isdisjoint(pus):
            cores_by_key.setdefault((core.id.package, pu.llc, core.kind), []).append(core)
    return tuple(
        CoreGroup(
            None if llc is None else host.llcs[llc],
            kind,
            None if package is None else PackageIndex(package),
            tuple(cores),
            len(cores) if llc is None else cores_of_llc[llc],
        )
        for (package, llc, kind), cores in cores_by_key.items()
    )


def build_package_frames(host: Host, devices: Sequence[NodeDevices]) -> tuple[PackageFrame, ...]:
    """Return every node with CPUs, by package; CPUs of unknown node are a separate block."""
    devices_of_node = {group.node: group for group in devices}
    by_package: dict[tuple[PackageIndex, ...], list[NodeBlock]] = {}
    placed_pus = CpuSet()
    for node in host.nodes:
        if not node.pus:
            continue
        groups = list_core_groups(host, node.pus)
        packages = tuple(sorted({g.package for g in groups if g.package is not None}))
        block = NodeBlock(node, groups, node.pus, devices_of_node.get(node.index))
        by_package.setdefault(packages, []).append(block)
        placed_pus |= node.pus
    unplaced_pus = CpuSet(pu for core in host.cores for pu in core.pus) - placed_pus
    if unplaced_pus:
        groups = list_core_groups(host, unplaced_pus)
        packages = tuple(sorted({g.package for g in groups if g.package is not None}))
        by_package.setdefault(packages, []).append(NodeBlock(None, groups, unplaced_pus, None))
    return tuple(
        PackageFrame(packages, tuple(blocks)) for packages, blocks in sorted(by_package.items())
    )


class CpuUse(Struct, frozen=True):
    """The use of a CPU. An empty use is a free CPU. beside_cell: free, but a sibling of a CPU with
    vCPUs of that cell. taken_by: other domains that have the CPU or a sibling."""

    vcpus: tuple[int, ...] = ()  # vCPUs of the plan, in vCPU order
    cell: int | None = None  # guest cell of the first vCPU
    other_cell: int | None = None
    emulator: bool = False
    iothreads: tuple[int, ...] = ()  # their ids
    used_by: tuple[str, ...] = ()
    barred: bool = False  # the process that read the host may not use the CPU
    isolated: bool = False


FREE = CpuUse()


def uses_of_pus(host: Host, plan: Plan | None) -> Mapping[int, CpuUse]:
    """Return the use of every online CPU in use; other CPUs are free."""
    uses = defaultdict[int, CpuUse](lambda: FREE)
    for host_pu in host.pus:
        if host_pu.online and not host_pu.allowed:
            uses[host_pu.index] = CpuUse(barred=True)
        if host_pu.online and (host_pu.isolated or host_pu.nohz_full):
            uses[host_pu.index] = replace(uses[host_pu.index], isolated=True)
    vm_name = None if plan is None else plan.vm.name
    for domain in host.domains:
        if domain.name != vm_name and domain.has_claim:
            for pu in _find_used_cores(domain, host.core_at):
                uses[pu] = replace(uses[pu], used_by=(*uses[pu].used_by, domain.name))
    if plan is None:
        return uses
    cell_of_vcpu: dict[int, int] = {vcpu: cell.id for cell in plan.cells for vcpu in cell.vcpus}
    vcpus_of_pu = defaultdict[int, list[int]](list)
    for vcpu, pins in enumerate(plan.vcpu_pins):
        for pu in pins:
            vcpus_of_pu[pu].append(vcpu)
    for index, vcpus in vcpus_of_pu.items():
        home = cell_of_vcpu.get(vcpus[0], 0)
        uses[index] = replace(uses[index], vcpus=tuple(vcpus), cell=home)
        pus = host.core_at[index].pus if index in host.core_at else CpuSet()
        for sibling in pus - CpuSet(vcpus_of_pu):
            uses[sibling] = replace(uses[sibling], other_cell=home)
    for pu in plan.vm.emulator_pus or ():
        uses[pu] = replace(uses[pu], emulator=True)
    for number, threads in plan.vm.iothread_pins:
        for pu in threads:
            uses[pu] = replace(uses[pu], iothreads=(*uses[pu].iothreads, number))
    return uses


def _find_used_cores(domain: RunningDomain, core_at: Mapping[int, Core]) -> CpuSet:
    """Return the cores of a domain's vCPUs and the CPUs of its other threads. A thread that floats
    over the whole host holds no core."""
    bound = [pins for pins in domain.vcpu_pins if pins is not None and len(pins) < len(core_at)]
    other_pus = [pus for pus in (domain.emulator_pus, *domain.iothread_pus) if pus is not None]
    cores = (core_at[pu].pus for pins in bound for pu in pins if pu in core_at)
    return CpuSet.union((*cores, *(pus for pus in other_pus if len(pus) < len(core_at))))


def format_host_counts(host: Host) -> str:
    """Return the host's counts in one line."""
    summary = summarise(host)
    counts = (
        (summary.packages, "package"),
        (summary.numa_nodes, "node"),
        (summary.cores, "core"),
        (summary.pus, "CPU"),
    )
    parts = [plural(count, noun) if count else f"{noun}s unknown" for count, noun in counts]
    size = summary.memory_bytes
    parts.append("memory unknown" if size is None else format_bytes(size))
    for kind in (DeviceKind.GPU, DeviceKind.NIC):
        devices = host.devices_of_kind(kind)
        count = sum(device.physical_function is None for device in devices)
        parts += [plural(count, kind.upper())] if count else []
    return ", ".join(parts)


def format_memory_parts(node: NumaNode) -> list[str]:
    """Describe a node's memory: size, free memory, huge pages."""
    if not node.memory_bytes:
        return ["memory unknown" if node.memory_bytes is None else "no memory"]
    parts = [format_bytes(node.memory_bytes)]
    if node.memory_free_bytes is not None:
        parts.append(f"{format_bytes(node.memory_free_bytes)} free")
    for pool in node.page_pools:
        if pool.total_pages:
            size = format_bytes(pool.page_bytes)
            parts.append(f"{size} pages: {pool.free_pages} of {pool.total_pages} free")
    return parts


def format_llc_parts(group: CoreGroup) -> list[str]:
    """Describe a group's LLC: number, level and size."""
    if group.llc is None:
        return ["LLC unknown"]
    size = group.llc.size_bytes
    names = [f"LLC {group.llc.index}", f"L{group.llc.level}"]
    return names if size is None else [*names, format_bytes(size)]


def memory_nodes(host: Host) -> dict[Bdf, tuple[int, ...]]:
    """Return the nodes of each GPU's memory."""
    nodes_of_gpu: dict[Bdf, tuple[int, ...]] = {}
    for node in host.nodes:
        if node.gpu is not None and node.memory_bytes != 0:
            nodes_of_gpu[node.gpu] = (*nodes_of_gpu.get(node.gpu, ()), node.index)
    return nodes_of_gpu


def list_cpuless_nodes(host: Host) -> dict[str, list[int]]:
    """Group nodes without CPUs by their description."""
    nodes_by_text: dict[str, list[int]] = {}
    for node in host.nodes:
        if not node.pus:
            nodes_by_text.setdefault(_name_node(node), []).append(node.index)
    return nodes_by_text


def _name_node(node: NumaNode) -> str:
    text = ", ".join(format_memory_parts(node)[:2])
    if node.memory_kind is MemoryKind.GPU:
        text += f", memory of GPU {node.gpu}" if node.gpu is not None else ", GPU memory"
    elif node.memory_kind is MemoryKind.OTHER:
        text += ", not plain DRAM"
    if node.generic_initiator:
        text += ", generic initiator"
    return text


def format_settings(settings: HostSettings) -> tuple[str, ...]:
    """Return the known settings that placement depends on."""
    lines: list[str] = []
    for name, value in (
        ("kernel", settings.kernel_release),
        ("on the kernel command line", settings.placement_parameters),
        ("SMT control", settings.smt_control),
        (
            "CPU frequency governor",
            None if settings.governors is None else ", ".join(settings.governors) or "none",
        ),
        ("transparent huge pages", settings.transparent_hugepages),
        (
            "automatic NUMA balancing",
            {None: None, 0: "off", 1: "on"}.get(
                settings.numa_balancing, str(settings.numa_balancing)
            ),
        ),
        ("libvirt", _format_version(settings.libvirt_version)),
        ("QEMU", _format_version(settings.qemu_version)),
    ):
        if value:
            lines.append(f"{name}: {value}")
    return tuple(lines)


def _format_version(version: tuple[int, int, int] | None) -> str | None:
    return None if version is None else ".".join(str(part) for part in version)
