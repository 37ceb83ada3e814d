"""From the text of a host.toml to a HostDescription. Pure; format: docs/formats/host-toml.md."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import fields, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.errors import InputError
from homenode.findings import NO_VMS, Gap
from homenode.indices import CoreIndex, LlcIndex, NodeIndex, PackageIndex
from homenode.machine.description.buses import DescribedPci, address, parse_links
from homenode.machine.description.devices import parse_models, parse_roots
from homenode.machine.description.document import (
    VERSION,
    CacheSizes,
    Fact,
    HostDescription,
    HostDocument,
)
from homenode.machine.description.system import (
    CoreSlot,
    NodeSlot,
    parse_cores,
    parse_distances,
    parse_nodes,
    tables_of_nodes,
)
from homenode.machine.description.vms import parse_housekeeping, parse_reserve, parse_vms
from homenode.machine.discover.pci_nodes import NAMED_KINDS, Locality
from homenode.machine.topology import (
    Core,
    CoreId,
    CpuModel,
    Host,
    HostSettings,
    HostSummary,
    Llc,
    MemoryKind,
    NumaNode,
    Package,
    assemble_pus,
)
from homenode.toml_text import decode_toml
from homenode.wording import plural


class PuSettings(Struct, frozen=True):
    """PUs out of the cgroup of whoever looked, in isolcpus=, and in nohz_full=."""

    disallowed: CpuSet
    isolated: CpuSet
    nohz_full: CpuSet


def parse_pu_settings(file: HostDocument, online: CpuSet) -> PuSettings:
    table = file.settings
    for where, key, pus in (
        (file, "disallowed_pus", file.disallowed_pus),
        (table, "isolated", table.isolated),
        (table, "nohz_full", table.nohz_full),
    ):
        if not pus <= online:
            raise where.refusal(key, f"some of the online PUs {online}", str(pus))
    if file.disallowed_pus == online:
        raise file.refusal("disallowed_pus", f"some of the PUs {online}, not all", str(online))
    return PuSettings(file.disallowed_pus, table.isolated, table.nohz_full)


def parse_settings(file: HostDocument, online: CpuSet, *, smt: bool) -> HostSettings:
    """The settings; SMT's and the kernel's command line follow from the rest where not given.

    online: the PUs that have the governor. smt: whether some core has online siblings.
    """
    table = file.settings
    governor = table.governor
    words = [
        f"{word}={pus}"
        for pus, word in ((table.isolated, "isolcpus"), (table.nohz_full, "nohz_full"))
        if pus
    ]
    return HostSettings(
        kernel_release=table.kernel_release,
        kernel_command_line=table.kernel_command_line
        or " ".join(["BOOT_IMAGE=/boot/vmlinuz", "ro", *words]),
        smt_control=table.smt_control or ("on" if smt else "notsupported"),
        governors=None if governor is None else (governor,),
        pus_of_governor=None if governor is None else ((governor, online),),
        transparent_hugepages=table.transparent_hugepages,
        numa_balancing=table.numa_balancing,
        libvirt_version=None if table.libvirt is None else table.libvirt.numbers,
        qemu_version=None if table.qemu is None else table.qemu.numbers,
    )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def parse_description(text: str, source: str) -> HostDescription:
    """The machine that a host.toml describes. source: the file's name, for messages.

    Raises InputError, with the file, the key, what was expected and what was found.
    """
    file = decode_toml(text, HostDocument, source)
    if file.format > VERSION:
        raise InputError(
            f"{source}: format: expected a host.toml up to version {VERSION}, found {file.format}",
            hint="it was written for a newer homenode: update this one",
        )
    if not _NAME.match(file.name):
        raise file.refusal("name", "a name of letters, digits, dots, dashes", file.name)
    cpu = CpuModel(file.cpu.vendor, file.cpu.name, file.cpu.family, file.cpu.model)
    node_tables = tables_of_nodes(file)
    slots = parse_cores(file, node_tables)
    nodes = parse_nodes(file, node_tables, slots)
    online = online_pus(file, slots)
    local = pus_of_node(slots, online)
    tree = _tree(file, cpu.vendor, nodes, local)
    cores = cores_of(slots, online)
    caches, level = file.caches, file.llc_level
    sizes = CacheSizes(
        *(_bytes(size) for size in (caches.l1_data, caches.l1_instruction, caches.l2))
    )
    without = any(slot.llc is None for slot in slots)
    if (sizes != CacheSizes() and without) or (caches.l2 is not None and level <= 2):
        # The largest of them would pass for the last level.
        found = "no last-level cache" if without else f"llc_level = {level}"
        raise file.refusal("caches", "a last-level cache above them", found)
    llcs = llcs_of(slots, online, level, _llc_sizes(file))
    packages = packages_of(slots, online)
    host_nodes = numa_nodes(source, nodes, local, tree.bdf_of_name)
    settings = parse_pu_settings(file, online)
    host = Host(
        name=file.name,
        architecture=file.architecture,
        cpu=cpu,
        packages=packages,
        nodes=host_nodes,
        distances=parse_distances(file, nodes),
        llcs=llcs,
        cores=cores,
        pus=assemble_pus(
            CpuSet(pu for slot in slots for pu in slot.pus),
            online,
            cores=cores,
            llcs=llcs,
            nodes=host_nodes,
            packages=packages,
            die_of_pu={PuIndex(pu): slot.die for slot in slots for pu in slot.pus if pu in online},
            disallowed=settings.disallowed,
            isolated=settings.isolated,
            nohz_full=settings.nohz_full,
        ),
        root_complexes=tree.root_complexes,
        pci_devices=tree.devices,
        links=parse_links(file, tree),
        settings=parse_settings(file, online, smt=any(len(core.pus) > 1 for core in cores)),
        domains=parse_vms(file, nodes, online, local, tree),
        reserve=parse_reserve(file),
        housekeeping_pus=parse_housekeeping(file, online),
        assumed=tuple(file.facts.assumed),
    )
    host = _at_cpus(host, online)
    host = replace(host, gaps=tuple(_gaps(host, online)))
    return HostDescription(
        source=source,
        about=file.about,
        host=host,
        caches=sizes,
        facts=(
            *(Fact(statement, source) for statement, source in file.facts.published.items()),
            *(Fact(statement, None) for statement in file.facts.assumed),
        ),
        expect=tuple(
            (one.name, int(count))
            for one in fields(HostSummary)
            if (count := getattr(file.expect, one.name)) is not None
        ),
    )


def _at_cpus(host: Host, online: CpuSet) -> Host:
    """The host with devices of a GPU's node (GB200) on the CPUs' node next to it, as discovery puts
    them."""
    of_gpus = [node.index for node in host.nodes if node.gpu is not None]
    near = Locality.of(host.nodes, online, host.distances, of_gpus).cpu_node
    if all(node == cpus for node, cpus in near.items()):
        return host
    return replace(
        host,
        root_complexes=tuple(
            root if root.node is None else replace(root, node=near[root.node])
            for root in host.root_complexes
        ),
        pci_devices=tuple(
            device
            if device.node is None or near[device.node] == device.node
            else replace(device, node=near[device.node], firmware_node=device.node)
            for device in host.pci_devices
        ),
        links=tuple(
            link if link.b_node is None else replace(link, b_node=near[link.b_node])
            for link in host.links
        ),
    )


def _gaps(host: Host, online: CpuSet) -> Iterator[Gap]:
    """What the description leaves out."""
    if not host.domains:
        yield Gap(NO_VMS, _LEFT_OUT)
    if without := online - CpuSet.union(llc.pus for llc in host.llcs):
        yield Gap(f"last-level cache of PUs {without}", _LEFT_OUT)
    if host.distances is None:
        yield Gap("distances", _LEFT_OUT)
    for device in host.pci_devices:
        if device.node is None and device.kind in NAMED_KINDS:
            yield Gap(f"node of {device.bdf}", _LEFT_OUT)


_LEFT_OUT = "the description has none"


def _bytes(size: int | None) -> int | None:
    return None if size is None else int(size)


def _tree(
    file: HostDocument,
    cpu_vendor: str | None,
    nodes: Sequence[NodeSlot],
    local: Mapping[int | None, CpuSet],
) -> DescribedPci:
    models = parse_models(file, cpu_vendor)
    indices = [node.index for node in nodes]
    roots = parse_roots(file, models, indices)
    # A node without cores has no local PUs, and says so.
    everywhere: dict[int | None, CpuSet] = {index: CpuSet() for index in indices}
    everywhere |= local
    return address(file.source, roots, models, everywhere, iommu=file.iommu)


def online_pus(file: HostDocument, cores: Sequence[CoreSlot]) -> CpuSet:
    """All PUs but `offline_pus`. Raises InputError where none is left or one does not exist."""
    every = CpuSet(pu for core in cores for pu in core.pus)
    offline = file.offline_pus
    if not offline <= every or offline == every:
        raise file.refusal("offline_pus", f"some of the PUs {every}, not all", str(offline))
    return every - offline


def pus_of_node(cores: Sequence[CoreSlot], online: CpuSet) -> dict[int | None, CpuSet]:
    """Online PUs of each node that has cores; of None, which is no node, all of them."""
    pus: dict[int | None, list[int]] = {}
    for core in cores:
        pus.setdefault(core.node, []).extend(core.pus)
    return {None: online, **{node: CpuSet(found) & online for node, found in pus.items()}}


def numa_nodes(
    source: str,
    nodes: Sequence[NodeSlot],
    local: Mapping[int | None, CpuSet],
    bdf_of_name: Mapping[str, Bdf],
) -> tuple[NumaNode, ...]:
    found = []
    for node in nodes:
        gpu = None
        if node.gpu is not None:
            gpu = bdf_of_name.get(node.gpu)
            if gpu is None:
                known = ", ".join(sorted(bdf_of_name)[:20]) or "none"
                raise InputError(
                    f"{source}: node {node.index}.gpu: expected the name of a device, one of "
                    f"{known}, found {node.gpu!r}"
                )
        pus = local.get(node.index, CpuSet())
        found.append(
            NumaNode(
                index=NodeIndex(node.index),
                pus=pus,
                memory_bytes=node.memory_bytes,
                memory_free_bytes=node.free_bytes,
                page_pools=node.page_pools,
                memory_kind=_memory_kind(node, pus),
                gpu=gpu,
                generic_initiator=node.generic_initiator,
                package=PackageIndex(node.package) if pus and node.package is not None else None,
            )
        )
    return tuple(found)


def cores_of(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Core, ...]:
    """Cores that have an online PU, by their lowest one."""
    alive = [(CpuSet(slot.pus) & online, slot) for slot in slots if CpuSet(slot.pus) & online]
    alive.sort(key=lambda pair: _lowest(pair[0]))
    return tuple(
        Core(CoreIndex(i), CoreId(PackageIndex(slot.package), slot.id), pus, slot.kind)
        for i, (pus, slot) in enumerate(alive)
    )


def _llc_sizes(file: HostDocument) -> tuple[int | None, ...]:
    """In bytes, of the caches of a package in order; one for all where they are alike."""
    if not file.llc_sizes:
        return (_bytes(file.llc_size),)
    count, others = len(file.llc_sizes), [one.llcs for one in file.package if one.llcs is not None]
    if file.llc_size is not None or count != file.llcs_per_package or others:
        wanted = f"one for each of the {file.llcs_per_package} caches of every package, or llc_size"
        raise file.refusal("llc_sizes", wanted, plural(count, "size"))
    return tuple(map(_bytes, file.llc_sizes))


def llcs_of(
    slots: Sequence[CoreSlot], online: CpuSet, level: int, sizes: Sequence[int | None]
) -> tuple[Llc, ...]:
    """Last-level caches that an online PU uses, by their lowest one. sizes: in turn."""
    sharers = _united((slot.llc, slot.pus) for slot in slots if slot.llc is not None)
    alive = [(pus & online, sizes[llc % len(sizes)]) for llc, pus in sorted(sharers.items())]
    shown = sorted((one for one in alive if one[0]), key=lambda one: _lowest(one[0]))
    return tuple(Llc(LlcIndex(i), pus, level, size) for i, (pus, size) in enumerate(shown))


def packages_of(slots: Sequence[CoreSlot], online: CpuSet) -> tuple[Package, ...]:
    members = _united((slot.package, slot.pus) for slot in slots)
    return tuple(
        Package(PackageIndex(index), pus & online)
        for index, pus in sorted(members.items())
        if pus & online
    )


def _memory_kind(node: NodeSlot, pus: CpuSet) -> MemoryKind | None:
    """What the kernel shows a node's memory: of a CPU-less node, nothing by itself."""
    if node.gpu is not None:
        return MemoryKind.GPU
    if node.is_device_memory:
        return MemoryKind.OTHER
    return MemoryKind.DRAM if pus else None


def _united(pairs: Iterable[tuple[int, tuple[int, ...]]]) -> dict[int, CpuSet]:
    members: dict[int, list[int]] = {}
    for key, pus in pairs:
        members.setdefault(key, []).extend(pus)
    return {key: CpuSet(pus) for key, pus in members.items()}


def _lowest(pus: CpuSet) -> int:
    first = pus.first()
    return -1 if first is None else first
