"""The VM part of a host.toml: what VMs have of the host, and what its operator keeps for it."""

from collections.abc import Mapping, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.description.buses import PciTree
from homenode.description.nodes import NodeSlot
from homenode.description.table import Table
from homenode.errors import InputError
from homenode.host_reserve import DEFAULT_HOST_RESERVE, HostReserve
from homenode.indices import NodeIndex
from homenode.pci import is_uuid
from homenode.topology import RunningDomain

VM_KEYS = tuple(
    """
    name state vcpus pins nodes memory page_size emulator iothreads devices
""".split()
)
_RESERVE_KEYS = ("cores", "memory", "housekeeping_pus")
_STATES = ("planned", "running", "shut-off")
_MOST_VCPUS = 8192


def parse_reserve(file: Table) -> HostReserve | None:
    """What [reserve] keeps for the host; None where it keeps what is usual."""
    table = file.table("reserve", _RESERVE_KEYS)
    if "cores" not in table and "memory" not in table:
        return None
    return HostReserve(table.integer("cores", DEFAULT_HOST_RESERVE.cores), table.size("memory"))


def parse_housekeeping(file: Table, online: CpuSet) -> CpuSet:
    """PUs for the emulators of several VMs."""
    table = file.table("reserve", _RESERVE_KEYS)
    return _online(table, "housekeeping_pus", table.pus("housekeeping_pus"), online)


def parse_vms(
    file: Table,
    nodes: Sequence[NodeSlot],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
    tree: PciTree,
) -> tuple[RunningDomain, ...]:
    """The [[vm]] tables, in order. Raises InputError where two have one name or one device."""
    found: list[RunningDomain] = []
    for table in file.tables("vm", VM_KEYS):
        vm = _vm(table, [node.index for node in nodes], online, pus_of_node, tree)
        for other in found:
            if other.name == vm.name:
                raise table.refusal("name", "a name that no other [[vm]] has", vm.name)
            shared = sorted(
                {*other.devices, *other.mediated} & {*vm.devices, *vm.mediated}, key=str
            )
            if shared and not {"shut-off"} & {_state(other), _state(vm)}:
                raise table.refusal(
                    "devices", f"devices that [[vm]] {other.name} has not", str(shared[0])
                )
        found.append(vm)
    return tuple(found)


def _state(vm: RunningDomain) -> str:
    return "planned" if vm.planned else "running" if vm.running else "shut-off"


def _vm(
    table: Table,
    known: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
    tree: PciTree,
) -> RunningDomain:
    name = table.text("name")
    if not name or "/" in name:
        raise table.refusal("name", "the VM's name, without /", name)
    state = table.choice("state", _STATES, "planned")
    nodes = table.integers("nodes") or ()
    for node in nodes:
        if node not in known:
            raise table.refusal("nodes", f"nodes of the host ({CpuSet(known)})", node)
    pins = _pins(table, nodes, online, pus_of_node)
    sizes = _memory(table, known, nodes or _nodes_of(pins, pus_of_node))
    listed = isinstance(table.values.get("memory"), Mapping)
    total = sum(sizes.values()) if listed else table.size("memory") or 0
    emulator = _online(table, "emulator", table.pus("emulator"), online)
    return RunningDomain(
        name=name,
        running=state == "running",
        vcpu_pins=pins,
        emulator_pus=emulator or None,
        iothread_pus=_pu_lists(table, "iothreads", online),
        memory_bytes=total,
        memory_bound=bool(sizes),
        memory_by_node=tuple((NodeIndex(node), sizes[node]) for node in sorted(sizes)),
        page_bytes=table.size("page_size"),
        devices=_devices(table, tree),
        planned=state == "planned",
        mediated=_mediated(table, tree),
    )


def _pins(
    table: Table,
    nodes: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
) -> tuple[CpuSet | None, ...]:
    """PUs of each vCPU: as pinned, or those of the VM's nodes, or None = anywhere."""
    count = table.optional_integer("vcpus", 1, _MOST_VCPUS)
    pins = table.values.get("pins")
    if pins is not None:
        if isinstance(pins, str):
            listed = tuple(CpuSet([pu]) for pu in _online(table, "pins", table.pus("pins"), online))
        else:
            listed = _pu_lists(table, "pins", online)
        if not listed or (count is not None and count != len(listed)):
            raise table.refusal("pins", f"the PUs of each of {count or 'its'} vCPUs", pins)
        return listed
    if count is None:
        raise table.refusal("vcpus", "a number of vCPUs, or pins", None)
    pus = CpuSet(pu for node in nodes for pu in pus_of_node.get(node, CpuSet()))
    if nodes and not pus:
        raise table.refusal("nodes", "a node with PUs among them", list(nodes))
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


def _memory(table: Table, known: Sequence[int], nodes: Sequence[int]) -> dict[int, int]:
    """Bytes on each node: as listed, or the whole in equal parts on the VM's own nodes."""
    value = table.values.get("memory")
    if isinstance(value, Mapping):
        sizes: dict[int, int] = {}
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 6 and int(key) in known):
                raise table.refusal("memory", f"nodes of the host ({CpuSet(known)})", key)
            sizes[int(key)] = Table(table.source, table.key("memory"), value).size(key) or 0
        return {node: size for node, size in sizes.items() if size}
    size = table.size("memory") or 0
    if not nodes or not size:
        return {}
    share, more = divmod(size, len(nodes))
    return {node: share + (i < more) for i, node in enumerate(sorted(nodes))}


def _pu_lists(table: Table, key: str, online: CpuSet) -> tuple[CpuSet, ...]:
    """PU lists of a list of texts, none of them empty."""
    lists = []
    for text in table.list(key):
        one = Table(table.source, table.where, {key: text})
        pus = _online(one, key, one.pus(key), online)
        if not pus:
            raise table.refusal(key, "a list of PU lists, none of them empty", text)
        lists.append(pus)
    return tuple(lists)


def _online(table: Table, key: str, pus: CpuSet, online: CpuSet) -> CpuSet:
    if not pus <= online:
        raise table.refusal(key, f"some of the online PUs {online}", str(pus))
    return pus


def _devices(table: Table, tree: PciTree) -> tuple[Bdf, ...]:
    """Functions by the name of the device or by address."""
    there = {device.bdf for device in tree.devices}
    found: set[Bdf] = set()
    for text in table.list("devices"):
        if is_uuid(str(text)):
            continue
        name = Table(table.source, table.where, {"devices": text}).text("devices")
        bdf = tree.bdf_of_name.get(name)
        if bdf is None:
            try:
                bdf = Bdf.parse(name)
            except InputError:
                bdf = None
        if bdf is None or bdf not in there:
            names = ", ".join(sorted(tree.bdf_of_name)[:20]) or "none"
            raise table.refusal("devices", f"addresses or names of devices ({names})", text)
        found.add(bdf)
    return tuple(sorted(found))


def _mediated(table: Table, tree: PciTree) -> tuple[str, ...]:
    """Mediated devices, by UUID."""
    there = {part.uuid for device in tree.devices for part in device.parts if part.uuid}
    given = [str(text) for text in table.list("devices") if is_uuid(str(text))]
    for uuid in given:
        if uuid not in there:
            raise table.refusal("devices", f"one of {len(there)} mediated devices", uuid)
    return tuple(sorted(set(given)))
