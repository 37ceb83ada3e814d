"""lspci: a PCI tree from the listing alone, over another source, or to complete sysfs. The listing
has no tree: a function is below the bridge whose buses contain its own, and root complexes are the
buses without a bridge above.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError, ParseError
from homenode.findings import NO_VMS, Gap, GapKind
from homenode.machine.discover.pci_nodes import Locality, format_functions, list_root_complexes
from homenode.machine.pci import (
    PCI_BRIDGE_CLASS,
    UNASSIGNED_CLASS,
    PciBridge,
    PciDevice,
    PciRegisters,
    PortType,
    classify_device,
    port_types_by_structure,
)
from homenode.machine.tools.lspci import LspciFunction, ends_within_a_line, parse
from homenode.machine.topology import Host, make_empty_host
from homenode.text import plural


def host_from_lspci(text: str, name: str) -> Host:
    """Return a host with only a PCI part: no CPUs, no nodes. Raises ParseError."""
    reason = "lspci shows PCI only"
    unshown = ("CPUs, cores, LLCs and NUMA nodes", "architecture", NO_VMS)
    gaps = tuple(Gap(subject, reason) for subject in unshown)
    return overlay_lspci(make_empty_host(name, gaps), text, name)


def overlay_lspci(host: Host, text: str, source: str = "lspci") -> Host:
    """Return the host with the PCI part that a listing gives.

    The listing decides the functions and their places; a function that the host's own source has
    too (same address, class and ids) keeps values that the listing lacks. There is a gap if both
    differ, and if the listing seems truncated. Raises ParseError for a malformed listing and
    InputError if it names nodes that the host does not have.
    """
    functions = parse(text, source)
    nodes = {node.index: node for node in host.nodes}
    listed_nodes = {f.numa_node for f in functions if f.numa_node is not None}
    if nodes and not listed_nodes <= set(nodes):
        raise InputError(
            f"{source}: expected NUMA nodes of {host.name} ({_join_numbers(nodes)}), found "
            f"{_join_numbers(listed_nodes - set(nodes))}",
            hint="pass --lspci with the host of the listing, or with its description",
        )
    pus_of_node = {index: node.pus for index, node in nodes.items()}
    locality = Locality.from_nodes(host.nodes, CpuSet(), host.distances)
    device_of = {device.bdf: device for device in host.pci_devices}
    gaps = [*_find_cut(functions, text, source), *_find_silent(functions)]
    devices = tuple(
        _merge_device(device, device_of.get(device.bdf), gaps)
        for device in _list_devices(functions, locality, pus_of_node, gaps)
    )
    nodeless = [device.bdf for device in devices if device.node is None]
    if nodeless:
        subject = f"node of {format_functions(nodeless)}"
        gaps.append(Gap(subject, "lspci prints no NUMA node for them"))
    lost_bdfs = sorted(set(device_of) - {device.bdf for device in devices})
    pairs = [(device_of[device.bdf], device) for device in devices if device.bdf in device_of]
    if device_of and not any(_may_be_equal(*pair) for pair in pairs):
        raise InputError(
            f"{source}: lists none of the {plural(len(device_of), 'PCI function')} of {host.name}",
            hint="name the host of the listing with --host",
        )
    if lost_bdfs:
        reason = f"{host.name} has them, {source} does not; omitted"
        gaps.append(Gap(format_functions(lost_bdfs), reason))
    bdfs = {device.bdf for device in devices}
    roots, root_gaps = list_root_complexes(devices)
    return replace(
        host,
        root_complexes=roots,
        pci_devices=devices,
        links=tuple(
            link for link in host.links if link.a in bdfs and (link.b is None or link.b in bdfs)
        ),
        gaps=(*_find_open_gaps(host, devices), *gaps, *root_gaps),
    )


def _find_cut(functions: tuple[LspciFunction, ...], text: str, source: str) -> list[Gap]:
    """Return signs that a listing misses functions: lspci lists by address without a total."""
    gaps = []
    last = functions[-1]
    ends_early = (
        (last.class_code or 0) >> 8 == PCI_BRIDGE_CLASS
        and last.buses is None
        and any(function.buses is not None for function in functions)
    )
    if ends_within_a_line(text) or ends_early:
        position = "in the entry of a bridge" if ends_early else "within a line"
        subject = f"PCI functions after {last.bdf}, and the end of its own entry"
        reason = f"{source} ends {position}, so the listing is truncated: run lspci again"
        gaps.append(Gap(subject, reason, GapKind.LISTING_CUT))
    listed_buses = {(function.bdf.domain, function.bdf.bus) for function in functions}
    bare = [
        function.bdf
        for function in functions
        if function.buses is not None
        and function.buses[1] > 0
        and (function.has_window or function.buses[2] > function.buses[1])
        and not any(
            (function.bdf.domain, bus) in listed_buses
            for bus in range(function.buses[1], function.buses[2] + 1)
        )
    ]
    if bare:
        first = f" ({bare[0]}, ...)" if len(bare) > 1 else f" ({bare[0]})"
        reason = (
            f"they have memory or buses for functions, of which {source} lists none: empty slots, "
            "or a listing that is not whole"
        )
        gaps.append(Gap(f"PCI functions below {plural(len(bare), 'bridge')}{first}", reason))
    return gaps


def _find_silent(functions: Iterable[LspciFunction]) -> Iterable[Gap]:
    """Yield functions whose registers read as all ones: they have left the bus, or are switched
    off."""
    for function in functions:
        if function.is_silent:
            yield Gap(
                f"configuration space of {function.bdf}",
                "lspci reads ones only: nothing answers",
                GapKind.DEVICE_SILENT,
                function.bdf,
            )


def add_lspci(
    devices: tuple[PciDevice, ...], text: str, source: str
) -> tuple[tuple[PciDevice, ...], tuple[Gap, ...]]:
    """Return functions of sysfs with the names and port types of the same host's listing.

    sysfs decides; the listing adds names, and port types if the config space could not be read.
    Functions in only one of the two, and different nodes, are gaps.
    """
    try:
        function_at = {function.bdf: function for function in parse(text, source)}
    except ParseError as error:
        return devices, (Gap("names of PCI functions", str(error)),)
    gaps = [*_find_silent(function_at.values())]
    for bdfs, other_bdfs, place in (
        ({device.bdf for device in devices}, set(function_at), "sysfs"),
        (set(function_at), {device.bdf for device in devices}, "lspci"),
    ):
        if missing := sorted(other_bdfs - bdfs):
            gaps.append(Gap(format_functions(missing), f"{place} does not have them"))
    named_devices: list[PciDevice] = []
    for device in devices:
        function = function_at.get(device.bdf)
        if function is None:
            named_devices.append(device)
            continue
        if function.numa_node is not None and function.numa_node != device.reported_node:
            reason = f"lspci says {function.numa_node}, sysfs says "
            reason += f"{device.reported_node}; used sysfs"
            gaps.append(Gap(f"node of {device.bdf}", reason))
        bridge = device.bridge
        if bridge is not None and function.port_type is not None:
            bridge = replace(bridge, port_type=function.port_type)
        named_devices.append(
            replace(
                device,
                name=device.name or function.name,
                bridge=bridge,
                target_gt_per_s=device.target_gt_per_s or function.target_gt_per_s,
                acs=_sort_flags(function.acs),
                ats_enabled=function.ats_enabled,
                registers=_combine_registers(device.registers, function.registers),
            )
        )
    return tuple(named_devices), tuple(gaps)


def _list_devices(
    functions: tuple[LspciFunction, ...],
    locality: Locality,
    pus_of_node: dict[NodeIndex, CpuSet],
    gaps: list[Gap],
) -> Iterable[PciDevice]:
    by_bdf = {function.bdf: function for function in functions}
    bridge_of_bus = _map_bridges(functions)
    parent_of = {bdf: bridge_of_bus.get((bdf.domain, bdf.bus)) for bdf in by_bdf}
    classes = {bdf: function.class_code for bdf, function in by_bdf.items()}
    bridges = {bdf: code for bdf, code in classes.items() if code and code >> 8 == PCI_BRIDGE_CLASS}
    guessed_types = port_types_by_structure(bridges, parent_of)
    unread = [bdf for bdf in bridges if by_bdf[bdf].port_type is None]
    if unread:
        reason = "capabilities are not in the listing (it needs root); taken from the tree"
        gaps.append(Gap(f"port types of {len(unread)} PCI bridges", reason))
    unclassed_bdfs = [bdf for bdf, code in classes.items() if code is None]
    if unclassed_bdfs:
        name = by_bdf[unclassed_bdfs[0]].class_name
        reason = f"lspci names a class that is not known here ({name!r}); use lspci -nn"
        gaps.append(Gap(f"class of {format_functions(unclassed_bdfs)}", reason))
    for bdf, function in by_bdf.items():
        code = function.class_code if function.class_code is not None else UNASSIGNED_CLASS
        node = None if function.numa_node is None else NodeIndex(function.numa_node)
        firmware_node = locality.firmware_node(node)
        if firmware_node is not None:
            node = locality.find_node(node, None)
        yield PciDevice(
            bdf=bdf,
            kind=classify_device(code, function.vendor_id, function.device_id),
            class_code=code,
            vendor_id=function.vendor_id,
            device_id=function.device_id,
            root_complex=_find_root(bdf, parent_of),
            parent=parent_of[bdf],
            node=node,
            firmware_node=firmware_node,
            local_pus=None if node is None else pus_of_node.get(node),
            subsystem_vendor_id=function.subsystem_vendor_id,
            subsystem_device_id=function.subsystem_device_id,
            name=function.name,
            link=function.link,
            bridge=_build_bridge(function, guessed_types[bdf]) if bdf in bridges else None,
            driver=function.driver,
            iommu_group=function.iommu_group,
            sriov_total_vfs=function.sriov_total_vfs,
            sriov_num_vfs=function.sriov_num_vfs,
            bars=function.bars,
            target_gt_per_s=function.target_gt_per_s,
            acs=_sort_flags(function.acs),
            ats_enabled=function.ats_enabled,
            registers=function.registers,
        )


def _combine_registers(
    kernel: PciRegisters | None, listed_registers: PciRegisters | None
) -> PciRegisters | None:
    """Combine the kernel's and the listing's values: BARs also come from the kernel."""
    if kernel is None or listed_registers is None:
        return listed_registers or kernel
    unplaced_bars = sorted({*kernel.unplaced_bars, *listed_registers.unplaced_bars})
    return replace(listed_registers, unplaced_bars=tuple(unplaced_bars))


def _map_bridges(functions: Iterable[LspciFunction]) -> dict[tuple[int, int], Bdf]:
    """Return the bridge directly above each (domain, bus): of the bridges that contain it, the
    bridge with the fewest buses. Buses below a bridge must be higher than its own, or a listing
    could form a cycle; a bridge without a bus (secondary 0) does not count."""
    spans = [
        (f.buses[2] - f.buses[1], f.bdf, f.buses)
        for f in functions
        if f.buses is not None and f.bdf.bus < f.buses[1] <= f.buses[2]
    ]
    bridge_of_bus: dict[tuple[int, int], Bdf] = {}
    for _, bdf, (_, secondary, subordinate) in sorted(spans, key=lambda span: -span[0]):
        for bus in range(secondary, subordinate + 1):
            bridge_of_bus[bdf.domain, bus] = bdf
    return bridge_of_bus


def _find_root(bdf: Bdf, parent_of: dict[Bdf, Bdf | None]) -> str:
    """Return the name of the root complex above. Each step leads to a lower bus, so it ends."""
    top = bdf
    while (parent := parent_of.get(top)) is not None:
        top = parent
    return f"pci{top.domain:04x}:{top.bus:02x}"


def _build_bridge(function: LspciFunction, guessed_type: PortType) -> PciBridge:
    _, secondary, subordinate = function.buses or (0, 0, 0)
    return PciBridge(function.port_type or guessed_type, secondary, subordinate)


def _merge_device(device: PciDevice, present: PciDevice | None, gaps: list[Gap]) -> PciDevice:
    """Add values that only the host's own source has to a function of the listing."""
    if present is None:
        return device
    ids = ((device.vendor_id, present.vendor_id), (device.device_id, present.device_id))
    is_other = device.class_code >> 8 != present.class_code >> 8
    if (is_other and present.class_code != UNASSIGNED_CLASS) or any(
        a is not None and b is not None and a != b for a, b in ids
    ):
        reason = f"the host's own source has another device there (class {present.class_code:06x})"
        gaps.append(Gap(f"{device.bdf}", f"{reason}; used lspci"))
        return device
    for name, value, present_value in (
        ("node", device.node, present.node),
        ("link", device.link, present.link),
        ("bridge above", device.parent, present.parent),
    ):
        if value is not None and present_value is not None and value != present_value:
            reason = f"lspci has {value}, the host's own source has {present_value}; used lspci"
            gaps.append(Gap(f"{name} of {device.bdf}", reason))
    blanks = {
        name: getattr(present, name)
        for name in PciDevice.__struct_fields__
        if name != "parent" and getattr(device, name) in (None, ())
    }
    return replace(
        replace(device, **blanks),
        kind=classify_device(
            device.class_code,
            device.vendor_id or present.vendor_id,
            device.device_id or present.device_id,
        ),
        firmware_node=present.firmware_node if device.node is None else device.firmware_node,
        bars=present.bars or device.bars,
        registers=_combine_registers(present.registers, device.registers),
    )


def _sort_flags(named_flags: frozenset[str] | None) -> tuple[str, ...] | None:
    return None if named_flags is None else tuple(sorted(named_flags))


def _may_be_equal(own: PciDevice, listed_device: PciDevice) -> bool:
    ids = ((own.vendor_id, listed_device.vendor_id), (own.device_id, listed_device.device_id))
    return all(None in pair or len(set(pair)) == 1 for pair in ids)


def _find_open_gaps(host: Host, devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
    """Return gaps of the host that a listing does not close."""
    closed_subjects = {"PCI functions"} if devices else set()
    closed_subjects |= {f"node of {device.bdf}" for device in devices if device.node is not None}
    return tuple(gap for gap in host.gaps if gap.subject not in closed_subjects)


def _join_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)) or "none"
