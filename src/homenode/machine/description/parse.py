"""Read a host.toml, or a shipped one by name, as a HostDescription. [I/O]

Format: docs/reference/formats/host-toml.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import fields, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex, PuIndex
from homenode.errors import InputError, unknown
from homenode.findings import NO_VMS_DESCRIBED, Gap
from homenode.machine.description.buses import DescribedPci, number_devices, parse_links
from homenode.machine.description.cores import (
    build_cores,
    build_llcs,
    build_packages,
    list_online_pus,
    map_node_packages,
    map_node_tables,
    parse_cores,
    parse_distances,
    parse_node,
    pus_of_node,
)
from homenode.machine.description.devices import parse_models, parse_roots
from homenode.machine.description.tables import (
    VERSION,
    HostDescription,
    HostDocument,
    NodeTable,
    Size,
    TomlTable,
    VmTable,
    decode_toml,
    decode_value,
)
from homenode.machine.discover.pci_nodes import NAMED_KINDS, Locality
from homenode.machine.pci import is_uuid
from homenode.machine.settings import HostSettings
from homenode.machine.topology import (
    DEFAULT_HOST_RESERVE,
    CpuModel,
    Host,
    HostReserve,
    HostSummary,
    RunningDomain,
    assemble_pus,
    summarise,
)
from homenode.package_data import list_package_names, read_package_text
from homenode.text import plural
from homenode.units import parse_whole


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
    """Return CPUs for the emulators of several VMs."""
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
        vm = _build_vm(table, nodes, online, pus_of_node, tree)
        if vms.setdefault(vm.name, vm) is not vm:
            raise table.make_error("name", "a name that no other [[vm]] has", vm.name)
        devices: tuple[Bdf | str, ...] = (*vm.devices, *vm.mediated)
        for device in devices if vm.planned or vm.running else ():
            owner = owner_of.setdefault(device, vm.name)
            if owner != vm.name:
                expected = f"devices that [[vm]] {owner} does not have"
                raise table.make_error("devices", expected, str(device))
    return tuple(vms.values())


def _build_vm(
    table: VmTable,
    host_nodes: Sequence[int],
    online: CpuSet,
    pus_of_node: Mapping[int | None, CpuSet],
    tree: DescribedPci,
) -> RunningDomain:
    if not table.name or "/" in table.name:
        raise table.make_error("name", "the VM's name, without /", table.name)
    nodes = table.nodes if isinstance(table.nodes, tuple) else (table.nodes,)
    for node in nodes:
        if node not in host_nodes:
            raise table.make_error("nodes", f"nodes of the host ({CpuSet(host_nodes)})", node)
    pins = _list_pins(table, nodes, online, pus_of_node)
    total, sizes = _share_memory(table, host_nodes, nodes or _find_nodes(pins, pus_of_node))
    emulator = _online_pus(table, "emulator", table.emulator, online)
    return RunningDomain(
        name=table.name,
        running=table.state == "running",
        vcpu_pins=pins,
        emulator_pus=emulator or None,
        iothread_pus=_list_pu_sets(table, "iothreads", table.iothreads, online),
        memory_bytes=total,
        memory_bound=bool(sizes),
        memory_by_node=tuple((NodeIndex(node), sizes[node]) for node in sorted(sizes)),
        page_bytes=None if table.page_size is None else int(table.page_size),
        devices=_find_devices(table, tree),
        planned=table.state == "planned",
        mediated=_find_mediated(table, tree),
    )


def _list_pins(
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
            pu_sets = tuple(CpuSet([pu]) for pu in _online_pus(table, "pins", pus, online))
        else:
            pu_sets = _list_pu_sets(table, "pins", pins, online)
        if not pu_sets or (count is not None and count != len(pu_sets)):
            value = pins if isinstance(pins, str) else list(map(str, pins))
            raise table.make_error("pins", f"the CPUs of each of {count or 'its'} vCPUs", value)
        return pu_sets
    if count is None:
        raise table.make_error("vcpus", "a number of vCPUs, or pins", None)
    pus = CpuSet(pu for node in nodes for pu in pus_of_node.get(node, CpuSet()))
    if nodes and not pus:
        raise table.make_error("nodes", "a node with CPUs among them", list(nodes))
    return (pus or None,) * count


def _find_nodes(
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


def _share_memory(
    table: VmTable, host_nodes: Sequence[int], nodes: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """Return bytes in all and by node: as listed, or in equal parts on the VM's nodes."""
    value, key_name = table.memory, table.name_of("memory")
    if isinstance(value, dict):
        sizes: dict[int, int] = {}
        for key, size in value.items():
            node = parse_whole(key)
            if node is None or node not in host_nodes:
                raise table.make_error("memory", f"nodes of the host ({CpuSet(host_nodes)})", key)
            sizes[node] = int(decode_value(size, Size, table.source, f"{key_name}.{key}"))
        return sum(sizes.values()), {node: size for node, size in sizes.items() if size}
    total = 0 if value is None else int(decode_value(value, Size, table.source, key_name))
    if not nodes or not total:
        return total, {}
    share, remainder = divmod(total, len(nodes))
    return total, {node: share + (i < remainder) for i, node in enumerate(sorted(nodes))}


def _list_pu_sets(
    table: VmTable, key: str, pu_sets: Sequence[CpuSet], online: CpuSet
) -> tuple[CpuSet, ...]:
    for pus in pu_sets:
        if not _online_pus(table, key, pus, online):
            raise table.make_error(key, "a list of nonempty CPU lists", "")
    return tuple(pu_sets)


def _online_pus(table: TomlTable, key: str, pus: CpuSet, online: CpuSet) -> CpuSet:
    if not pus <= online:
        raise table.make_error(key, f"some of the online CPUs {online}", str(pus))
    return pus


def _find_devices(table: VmTable, tree: DescribedPci) -> tuple[Bdf, ...]:
    """Return functions by the name of the device or by address."""
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
            raise table.make_error("devices", f"addresses or names of devices ({names})", name)
        bdfs.add(bdf)
    return tuple(sorted(bdfs))


def _find_mediated(table: VmTable, tree: DescribedPci) -> tuple[str, ...]:
    """Return the mediated devices, by UUID."""
    uuids = [text for text in table.devices if is_uuid(text)]
    for uuid in uuids:
        if uuid not in tree.uuids:
            expected = f"one of {plural(len(tree.uuids), 'mediated device')}"
            raise table.make_error("devices", expected, uuid)
    return tuple(sorted(set(uuids)))


def _check_pus(file: HostDocument, online: CpuSet) -> None:
    """Raise InputError if CPUs of a setting are not online ones, or no CPU is allowed."""
    table = file.settings
    for owner, key, pus in (
        (file, "disallowed_pus", file.disallowed_pus),
        (table, "isolated", table.isolated),
        (table, "nohz_full", table.nohz_full),
    ):
        if not pus <= online:
            raise owner.make_error(key, f"some of the online CPUs {online}", str(pus))
    if file.disallowed_pus == online:
        raise file.make_error("disallowed_pus", f"some of the CPUs {online}, not all", str(online))


def parse_settings(file: HostDocument, online: CpuSet, *, smt: bool) -> HostSettings:
    """Return the settings; SMT's and the kernel's command line follow from the rest where not
    given. online: the CPUs that have the governor. smt: whether some core has online siblings."""
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
        pus_of_governor=None if governor is None else ((governor, online),),
        transparent_hugepages=table.transparent_hugepages,
        numa_balancing=table.numa_balancing,
        libvirt_version=None if table.libvirt is None else table.libvirt.numbers,
        qemu_version=None if table.qemu is None else table.qemu.numbers,
    )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def parse_description(text: str, source: str) -> HostDescription:
    """Return the machine that a host.toml describes. source: the file's name, for messages. Raises
    InputError, with the file, the key, what was expected and what was found."""
    # Long because it fills the record of a host, a field a line.
    file = decode_toml(text, HostDocument, source)
    if file.format > VERSION:
        raise InputError(
            f"{source}: format: expected a host.toml up to version {VERSION}, found {file.format}",
            hint="it was written for a newer homenode: update this homenode",
        )
    if not _NAME.match(file.name):
        raise file.make_error("name", "a name of letters, digits, dots, dashes", file.name)
    cpu = CpuModel(file.cpu.vendor, file.cpu.name, file.cpu.family, file.cpu.model)
    node_tables = map_node_tables(file)
    slots = parse_cores(file, node_tables)
    package_of_node = map_node_packages(node_tables, slots)
    online = list_online_pus(file, slots)
    local = pus_of_node(slots, online)
    tree = _build_tree(file, cpu.vendor, tuple(package_of_node), local)
    cores = build_cores(slots, online)
    llcs = build_llcs(slots, online, file.llc_level, _list_llc_sizes(file))
    packages = build_packages(slots, online)
    plain = NodeTable(index=())
    plain.locate(source, "node")
    nodes = tuple(
        parse_node(
            file, node_tables.get(index, plain), index, package, local.get(index), tree.bdf_of_name
        )
        for index, package in package_of_node.items()
    )
    _check_pus(file, online)
    host = Host(
        name=file.name,
        architecture=file.architecture,
        cpu=cpu,
        packages=packages,
        nodes=nodes,
        distances=parse_distances(file, package_of_node, slots),
        llcs=llcs,
        cores=cores,
        pus=assemble_pus(
            CpuSet(pu for slot in slots for pu in slot.pus),
            online,
            cores=cores,
            llcs=llcs,
            nodes=nodes,
            packages=packages,
            die_of_pu={PuIndex(pu): slot.die for slot in slots for pu in slot.pus if pu in online},
            disallowed_pus=file.disallowed_pus,
            isolated_pus=file.settings.isolated,
            nohz_full=file.settings.nohz_full,
        ),
        root_complexes=tree.root_complexes,
        pci_devices=tree.devices,
        links=parse_links(file, tree),
        settings=parse_settings(file, online, smt=any(len(core.pus) > 1 for core in cores)),
        domains=parse_vms(file, tuple(package_of_node), online, local, tree),
        reserve=parse_reserve(file),
        housekeeping_pus=parse_housekeeping(file, online),
        assumed=tuple(file.facts.assumed),
    )
    host = _move_devices_to_cpus(host, online)
    host = replace(host, gaps=tuple(_list_gaps(host, online)))
    _check_counts(file, host)
    return HostDescription(file.about, host)


def _check_counts(file: HostDocument, host: Host) -> None:
    """Raise InputError if the file expects other counts than its machine has."""
    counts = summarise(host)
    for count_field in fields(HostSummary):
        expected, count = getattr(file.expect, count_field.name), getattr(counts, count_field.name)
        if expected not in (None, count):
            raise file.make_error(f"expect.{count_field.name}", str(count), int(expected))


def _move_devices_to_cpus(host: Host, online: CpuSet) -> Host:
    """Return the host with devices of a GPU's node (GB200) on the nearest node with CPUs."""
    of_gpus = [node.index for node in host.nodes if node.gpu is not None]
    cpu_node_of = Locality.from_nodes(host.nodes, online, host.distances, of_gpus).cpu_node
    if all(node == cpus for node, cpus in cpu_node_of.items()):
        return host
    return replace(
        host,
        root_complexes=tuple(
            root if root.node is None else replace(root, node=cpu_node_of[root.node])
            for root in host.root_complexes
        ),
        pci_devices=tuple(
            device
            if device.node is None or cpu_node_of[device.node] == device.node
            else replace(device, node=cpu_node_of[device.node], firmware_node=device.node)
            for device in host.pci_devices
        ),
        links=tuple(
            link if link.b_node is None else replace(link, b_node=cpu_node_of[link.b_node])
            for link in host.links
        ),
    )


def _list_gaps(host: Host, online: CpuSet) -> Iterator[Gap]:
    """Yield gaps for facts that the description omits."""
    if not host.domains:
        yield NO_VMS_DESCRIBED
    if pus := online - CpuSet.union(llc.pus for llc in host.llcs):
        yield Gap(f"last-level cache of CPUs {pus}", _LEFT_OUT)
    if host.distances is None:
        yield Gap("distances", _LEFT_OUT)
    for device in host.pci_devices:
        if device.node is None and device.kind in NAMED_KINDS:
            yield Gap(f"node of {device.bdf}", _LEFT_OUT)


_LEFT_OUT = NO_VMS_DESCRIBED.reason


def _convert_to_bytes(size: int | None) -> int | None:
    return None if size is None else int(size)


def _build_tree(
    file: HostDocument,
    cpu_vendor: str | None,
    nodes: Sequence[int],
    local: Mapping[int | None, CpuSet],
) -> DescribedPci:
    models = parse_models(file, cpu_vendor)
    roots = parse_roots(file, models, nodes)
    # A node without cores has no local CPUs, and reports that.
    everywhere: dict[int | None, CpuSet] = {index: CpuSet() for index in nodes}
    everywhere |= local
    return number_devices(file.source, roots, models, everywhere, iommu=file.iommu)


def _list_llc_sizes(file: HostDocument) -> tuple[int | None, ...]:
    """Return the sizes of a package's caches in bytes, in order; one value if they are equal."""
    if not file.llc_sizes:
        return (_convert_to_bytes(file.llc_size),)
    count = len(file.llc_sizes)
    package_llcs = [package.llcs for package in file.package if package.llcs is not None]
    if file.llc_size is not None or count != file.llcs_per_package or package_llcs:
        expected = (
            f"one for each of the {file.llcs_per_package} caches of every package, or llc_size"
        )
        raise file.make_error("llc_sizes", expected, plural(count, "size"))
    return tuple(map(_convert_to_bytes, file.llc_sizes))


_DIRECTORY, _SUFFIX = ("machine", "hosts"), ".toml"
_SHAPE = re.compile(r"-(?:\d+p)?\d+n\d+c", re.ASCII)


def list_shipped_hosts() -> tuple[str, ...]:
    """Return names of the hosts that come with homenode, sorted."""
    names = list_package_names(*_DIRECTORY)
    return tuple(sorted(n.removesuffix(_SUFFIX) for n in names if n.endswith(_SUFFIX)))


def is_made_up(name: str) -> bool:
    """Return whether a shipped host is named by its shape, such as 2p4n48c: in the source tree."""
    return _SHAPE.search(name) is not None


def load_shipped(name: str) -> HostDescription:
    """Return a host that comes with homenode. Raises UsageError for an unknown name."""
    names = list_shipped_hosts()
    if name not in names:
        raise unknown("host", name, names, "homenode list hosts")
    return parse_description(read_package_text(*_DIRECTORY, f"{name}{_SUFFIX}"), f"{name}{_SUFFIX}")
