"""The VM part of a host.toml: resources of VMs, and the host's reserve."""

from collections.abc import Mapping, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.machine.description.buses import DescribedPci
from homenode.machine.description.tables import HostDocument, Size, TomlTable, VmTable, decode_value
from homenode.machine.pci import is_uuid
from homenode.machine.topology import DEFAULT_HOST_RESERVE, HostReserve, RunningDomain
from homenode.text import plural
from homenode.units import whole_number


def parse_reserve(file: HostDocument) -> HostReserve | None:
    """Return the reserve of [reserve]; None for the default."""
    cores, memory = file.reserve.cores, file.reserve.memory
    if cores is None and memory is None:
        return None
    return HostReserve(
        DEFAULT_HOST_RESERVE.cores if cores is None else cores,
        None if memory is None else int(memory),
    )


def parse_housekeeping(file: HostDocument, online: CpuSet) -> CpuSet:
    """CPUs for the emulators of several VMs."""
    return _online_pus(file.reserve, "housekeeping_pus", file.reserve.housekeeping_pus, online)


def parse_vms(
    file: HostDocument,
    nodes: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
    tree: DescribedPci,
) -> tuple[RunningDomain, ...]:
    """Return the [[vm]] tables in order. Raises InputError for a repeated name or device."""
    vms: dict[str, RunningDomain] = {}
    owner_of: dict[Bdf | str, str] = {}
    for table in file.vm:
        vm = _vm(table, nodes, online, pus_of_node, tree)
        if vms.setdefault(vm.name, vm) is not vm:
            raise table.refusal("name", "a name that no other [[vm]] has", vm.name)
        devices: tuple[Bdf | str, ...] = (*vm.devices, *vm.mediated)
        for device in devices if vm.planned or vm.running else ():
            owner = owner_of.setdefault(device, vm.name)
            if owner != vm.name:
                expected = f"devices that [[vm]] {owner} does not have"
                raise table.refusal("devices", expected, str(device))
    return tuple(vms.values())


def _vm(
    table: VmTable,
    host_nodes: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
    tree: DescribedPci,
) -> RunningDomain:
    if not table.name or "/" in table.name:
        raise table.refusal("name", "the VM's name, without /", table.name)
    nodes = table.nodes if isinstance(table.nodes, tuple) else (table.nodes,)
    for node in nodes:
        if node not in host_nodes:
            raise table.refusal("nodes", f"nodes of the host ({CpuSet(host_nodes)})", node)
    pins = _pins(table, nodes, online, pus_of_node)
    total, sizes = _memory(table, host_nodes, nodes or _nodes_of(pins, pus_of_node))
    emulator = _online_pus(table, "emulator", table.emulator, online)
    return RunningDomain(
        name=table.name,
        running=table.state == "running",
        vcpu_pins=pins,
        emulator_pus=emulator or None,
        iothread_pus=_pu_lists(table, "iothreads", table.iothreads, online),
        memory_bytes=total,
        memory_bound=bool(sizes),
        memory_by_node=tuple((NodeIndex(node), sizes[node]) for node in sorted(sizes)),
        page_bytes=None if table.page_size is None else int(table.page_size),
        devices=_devices(table, tree),
        planned=table.state == "planned",
        mediated=_find_mediated(table, tree),
    )


def _pins(
    table: VmTable,
    nodes: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
) -> tuple[CpuSet | None, ...]:
    """Return CPUs of each vCPU: its pins, else the VM's nodes, else None (any CPU)."""
    count, pins = table.vcpus, table.pins
    if pins is not None:
        if isinstance(pins, str):
            pus = CpuSet.parse(pins, f"{table.source}: {table.name_of('pins')}")
            listed = tuple(CpuSet([pu]) for pu in _online_pus(table, "pins", pus, online))
        else:
            listed = _pu_lists(table, "pins", pins, online)
        if not listed or (count is not None and count != len(listed)):
            shown = pins if isinstance(pins, str) else list(map(str, pins))
            raise table.refusal("pins", f"the CPUs of each of {count or 'its'} vCPUs", shown)
        return listed
    if count is None:
        raise table.refusal("vcpus", "a number of vCPUs, or pins", None)
    pus = CpuSet(pu for node in nodes for pu in pus_of_node.get(node, CpuSet()))
    if nodes and not pus:
        raise table.refusal("nodes", "a node with CPUs among them", list(nodes))
    return (pus or None,) * count


def _nodes_of(
    pins: Sequence[CpuSet | None], pus_of_node: Mapping[int | None, CpuSet]
) -> tuple[int, ...]:
    used = CpuSet(pu for pin in pins if pin is not None for pu in pin)
    return tuple(
        sorted(
            node
            for node, pus in pus_of_node.items()
            if node is not None and not pus.isdisjoint(used)
        )
    )


def _memory(
    table: VmTable, host_nodes: Sequence[int], nodes: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """Bytes in all, and on each node: as listed, or the whole in equal parts on the VM's nodes."""
    value, key_name = table.memory, table.name_of("memory")
    if isinstance(value, dict):
        sizes: dict[int, int] = {}
        for key, size in value.items():
            node = whole_number(key)
            if node is None or node not in host_nodes:
                raise table.refusal("memory", f"nodes of the host ({CpuSet(host_nodes)})", key)
            sizes[node] = int(decode_value(size, Size, table.source, f"{key_name}.{key}"))
        return sum(sizes.values()), {node: size for node, size in sizes.items() if size}
    total = 0 if value is None else int(decode_value(value, Size, table.source, key_name))
    if not nodes or not total:
        return total, {}
    share, remainder = divmod(total, len(nodes))
    return total, {node: share + (i < remainder) for i, node in enumerate(sorted(nodes))}


def _pu_lists(
    table: VmTable, key: str, listed: Sequence[CpuSet], online: CpuSet
) -> tuple[CpuSet, ...]:
    for pus in listed:
        if not _online_pus(table, key, pus, online):
            raise table.refusal(key, "a list of CPU lists, none of them empty", "")
    return tuple(listed)


def _online_pus(table: TomlTable, key: str, pus: CpuSet, online: CpuSet) -> CpuSet:
    if not pus <= online:
        raise table.refusal(key, f"some of the online CPUs {online}", str(pus))
    return pus


def _devices(table: VmTable, tree: DescribedPci) -> tuple[Bdf, ...]:
    """Functions by the name of the device or by address."""
    bdfs: set[Bdf] = set()
    for name in table.devices:
        if is_uuid(name):
            continue
        bdf = tree.bdf_of_name.get(name)
        if bdf is None:
            try:
                bdf = Bdf.parse(name)
            except InputError:
                bdf = None
        if bdf is None or bdf not in tree.device_at:
            names = ", ".join(sorted(tree.bdf_of_name)[:20]) or "none"
            raise table.refusal("devices", f"addresses or names of devices ({names})", name)
        bdfs.add(bdf)
    return tuple(sorted(bdfs))


def _find_mediated(table: VmTable, tree: DescribedPci) -> tuple[str, ...]:
    """Mediated devices, by UUID."""
    uuids = [text for text in table.devices if is_uuid(text)]
    for uuid in uuids:
        if uuid not in tree.uuids:
            expected = f"one of {plural(len(tree.uuids), 'mediated device')}"
            raise table.refusal("devices", expected, uuid)
    return tuple(sorted(set(uuids)))
