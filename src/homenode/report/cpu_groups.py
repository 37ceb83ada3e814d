"""CpuGroups: cores by package, node, LLC and kind, as tree and picture show them."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.indices import PackageIndex
from homenode.report.device_groups import NodeDevices
from homenode.topology import Core, CoreKind, Host, Llc, NumaNode

KIND_WORDS = {CoreKind.PERFORMANCE: "P cores", CoreKind.EFFICIENCY: "E cores"}


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """Cores of one node that share an LLC and a kind. cores_of_llc: on all nodes together."""

    llc: Llc | None
    kind: CoreKind | None
    package: PackageIndex | None
    cores: tuple[Core, ...]
    cores_of_llc: int

    @property
    def pus(self) -> CpuSet:
        return CpuSet(pu for core in self.cores for pu in core.pus)


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """A node with PUs, or the PUs whose node is unknown (node None), and what hangs on it."""

    node: NumaNode | None
    groups: tuple[CoreGroup, ...]
    pus: CpuSet
    devices: NodeDevices | None


@dataclass(frozen=True, slots=True)
class PackageFrame:
    """Nodes of one package; packages has several where one node spans them, none if unknown."""

    packages: tuple[PackageIndex, ...]
    blocks: tuple[NodeBlock, ...]


def core_groups(host: Host, pus: CpuSet) -> tuple[CoreGroup, ...]:
    """The cores with any of these PUs by package, LLC and kind, ascending by PU."""
    pu_of_index = {pu.index: pu for pu in host.pus}
    cores_of_llc: dict[int, int] = {}
    grouped: dict[tuple[int | None, int | None, CoreKind | None], list[Core]] = {}
    for core in host.cores:
        first = core.pus.first()
        pu = None if first is None else pu_of_index.get(first)
        if pu is None:
            continue
        if pu.llc is not None:
            cores_of_llc[pu.llc] = cores_of_llc.get(pu.llc, 0) + 1
        if not core.pus.isdisjoint(pus):
            grouped.setdefault((core.id.package, pu.llc, core.kind), []).append(core)
    return tuple(
        CoreGroup(
            None if llc is None else host.llcs[llc],
            kind,
            None if package is None else PackageIndex(package),
            tuple(cores),
            len(cores) if llc is None else cores_of_llc[llc],
        )
        for (package, llc, kind), cores in grouped.items()
    )


def package_frames(host: Host, devices: Sequence[NodeDevices]) -> tuple[PackageFrame, ...]:
    """Every node that has PUs, by package; PUs of no known node in a block of their own."""
    devices_of_node = {group.node: group for group in devices}
    by_package: dict[tuple[PackageIndex, ...], list[NodeBlock]] = {}
    placed = CpuSet()
    for node in host.nodes:
        if not node.pus:
            continue
        groups = core_groups(host, node.pus)
        packages = tuple(sorted({g.package for g in groups if g.package is not None}))
        block = NodeBlock(node, groups, node.pus, devices_of_node.get(node.index))
        by_package.setdefault(packages, []).append(block)
        placed |= node.pus
    rest = CpuSet(pu for core in host.cores for pu in core.pus) - placed
    if rest:
        groups = core_groups(host, rest)
        packages = tuple(sorted({g.package for g in groups if g.package is not None}))
        by_package.setdefault(packages, []).append(NodeBlock(None, groups, rest, None))
    return tuple(
        PackageFrame(packages, tuple(blocks)) for packages, blocks in sorted(by_package.items())
    )
