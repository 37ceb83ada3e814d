"""Assemble: the guest's shape on a placement, the changes that its user sees, the complete Plan."""

from collections import Counter
from functools import reduce
from itertools import groupby
from operator import or_

from msgspec import structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, LlcIndex, NodeIndex
from homenode.errors import InputError, UsageError
from homenode.findings import Finding, finding
from homenode.machine.pci import KIND_NAMES, DeviceKind, PciDevice
from homenode.machine.topology import Host
from homenode.plan.allocations import find_device_uuid
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.aperture import ApertureChoice, choose_aperture
from homenode.plan.shape.caches import choose_guest_cache, find_shared_llcs
from homenode.plan.shape.guest_numa import (
    bind_cell,
    build_initiator_cells,
    merge_devices,
    split_device_bytes,
    split_guest_memory,
)
from homenode.plan.shape.guest_topology import (
    build_guest_topology,
    check_online_vcpus,
    choose_numbering,
    format_online,
    list_offline_vcpus,
    may_share_sockets,
)
from homenode.plan.shape.pcie import MirroredPcie, PcieDefinition, mirror_pcie
from homenode.text import plural
from homenode.units import format_bytes
from homenode.vm.gpu_parts import find_mediated_gaps, list_parts
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning
from homenode.vm.model import (
    GuestAddress,
    GuestCellId,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    LayoutRecord,
    MediatedDevice,
    PortModel,
    Vm,
    VmCell,
)
from homenode.vm.plan import RECORDED_DIGITS, Plan, Relaxation
from homenode.vm.plan_options import MemoryMode, Policy


def list_consequences(
    host: Host | None, request: GuestRequest, vm: Vm, cells: tuple[VmCell, ...]
) -> tuple[str, ...]:
    """Sentences in the order in which a user sees the changes. cells: of vm, if flat too."""
    sentences: list[str] = []
    guest = request.guest
    if vm.vcpus != guest.vcpus:
        sentences.append(f"The guest has {plural(vm.vcpus, 'vCPU')} instead of {guest.vcpus}.")
    if request.memory_bytes != guest.memory_bytes:
        sentences.append(
            f"The guest has {format_bytes(request.memory_bytes)} of memory instead of "
            f"{format_bytes(guest.memory_bytes)}."
        )
    sentences += _describe_cells(host, request, cells, vm.offline_vcpus)
    sentences += _describe_topology(host, request, cells, vm.cpu_topology)
    if host is not None:
        before = {hostdev.bdf: hostdev.address for hostdev in guest.hostdevs}
        sentences += _list_address_changes(host.device_at, before, vm.hostdevs)
        sentences += _describe_locality(host.device_at, vm.hostdevs)
    empty = _count_empty_ports(vm.hostdevs, vm.controllers)
    if empty:
        sentences.append(
            f"{plural(empty, 'empty PCIe port')} wait{'s' if empty == 1 else ''} for devices: the "
            "next one of a guest node takes one."
        )
    return tuple(sentences)


def _describe_cells(
    host: Host | None, request: GuestRequest, cells: tuple[VmCell, ...], offline: CpuSet
) -> list[str]:
    if request.layout.cells is GuestCells.SINGLE:
        return []
    sizes = "; ".join(
        f"node {cell.id} with vCPUs {cell.vcpus}{format_online(cell.vcpus, offline)} and "
        f"{format_bytes(cell.memory_bytes)}"
        for cell in cells
    )
    sentences = [f"The guest sees {plural(len(cells), 'NUMA node')}: {sizes}."]
    if len(cells) > 1 and host is not None and not cells[0].distances:
        sentences.append(
            "The guest sees no distances and treats all its NUMA nodes as equally far."
        )
    return sentences


def _describe_topology(
    host: Host | None,
    request: GuestRequest,
    cells: tuple[VmCell, ...],
    topology: GuestTopology | None,
) -> list[str]:
    if topology is None:
        return []
    sentences: list[str] = []
    before = request.guest.cpu_topology
    # Without a topology libvirt makes each vCPU a socket.
    sockets = before.sockets if before else request.guest.vcpus
    if topology.sockets != sockets:
        many = "socket" if topology.sockets == 1 else "sockets"
        instead = f", not {sockets}" if before else f"; without <topology> it would be {sockets}"
        sentences.append(f"Per-socket licences see {topology.sockets} {many}{instead}.")
    if host is not None and request.layout.cells is GuestCells.HOST:
        nodes = host.node_at
        packages = {
            nodes[node].package for cell in cells for node in cell.host_nodes if node in nodes
        }
        if None not in packages and len(packages) < len(cells) == topology.sockets:
            sentences.append(
                f"Each of {len(cells)} guest NUMA nodes is a socket, although the host has them on "
                f"{plural(len(packages), 'package')}."
            )
    if topology.threads > 1:
        sentences.append(f"The guest sees {plural(topology.threads, 'thread')} per core.")
    elif before and before.threads > 1:
        sentences.append(f"The guest sees one thread a core instead of {before.threads}.")
    if topology.dies > 1:
        sentences.append(
            f"The guest is shown {topology.dies} dies a socket, one for each host LLC."
        )
    return sentences


def _list_address_changes(
    by_bdf: dict[Bdf, PciDevice],
    before: dict[Bdf, GuestAddress | None],
    devices: tuple[GuestHostdev, ...],
) -> list[str]:
    sentences: list[str] = []
    nics = 0
    for device in devices:
        if device.address is None or before.get(device.bdf) == device.address:
            continue
        function = by_bdf.get(device.bdf)
        kind = "device" if function is None else KIND_NAMES.get(function.kind, "device")
        nics += function is not None and function.kind is DeviceKind.NIC
        old = before.get(device.bdf)
        origin = f"from guest address {old} to" if old else "to guest address"
        path = f"{origin} {device.address}"
        place = "" if device.cell is None else f", on guest NUMA node {device.cell}"
        sentences.append(f"{kind} {device.bdf} moves {path}{place}.")
    if nics:
        sentences.append(
            f"Names of {plural(nics, 'network interface')} that follow the PCI path (enpXsY) "
            "change in the guest; names by MAC or by altname do not."
        )
    return sentences


def _describe_locality(
    by_bdf: dict[Bdf, PciDevice], devices: tuple[GuestHostdev, ...]
) -> list[str]:
    """Return sentences on how much guest memory is local to GPUs and NICs."""
    shares: dict[tuple[str, float, NodeIndex | None], list[str]] = {}
    for device in devices:
        function = by_bdf.get(device.bdf)
        if function is None or device.local_memory_ratio is None:
            continue
        if function.kind in (DeviceKind.GPU, DeviceKind.NIC):
            key = (KIND_NAMES[function.kind], device.local_memory_ratio, function.node)
            shares.setdefault(key, []).append(str(device.bdf))
    return [
        f"{ratio * 100:.0f} % of the guest's memory is on the node of {kind} "
        f"{', '.join(bdfs[:8])}{' and others' if len(bdfs) > 8 else ''}"
        + (f"; the other {(1 - ratio) * 100:.0f} % is remote." if ratio < 0.995 else ".")
        for (kind, ratio, _), bdfs in shares.items()
    ]


def _count_empty_ports(
    devices: tuple[GuestHostdev, ...], controllers: tuple[GuestPciController, ...]
) -> int:
    used = {device.address.bus for device in devices if device.address is not None}
    parents = {c.address.bus for c in controllers if c.address is not None}
    return sum(
        controller.model != PortModel.EXPANDER_BUS
        and not controller.existing
        and controller.index not in used
        and controller.index not in parents
        for controller in controllers
    )


MAX_VCPUS_WITHOUT_IOMMU = 255
"""Larger VMs need a vIOMMU with extended interrupt mode. Source: libvirt domain XML, <iommu>."""


def assemble(host: Host | None, request: GuestRequest, placement: Placement) -> Plan:
    """Return the plan for a placement. host None: manual mode, without facts of the host.

    Same input, same plan. Raises InputError or UsageError for an impossible request, Unplannable if
    the guest's PCI space does not suffice.
    """
    # Long because it fills the records of a VM and its plan, a field a line.
    layout = request.layout
    numbers = choose_numbering(
        request, placement, may_share_sockets=may_share_sockets(host, request)
    )
    placement = numbers.placement
    memory = split_guest_memory(host, request, placement, numbers.cells)
    cells = memory.cells
    vcpus = sum(len(cell.vcpus) for cell in cells)
    offline = list_offline_vcpus(request, vcpus)

    llcs = find_shared_llcs(host, placement.vcpu_pins) if placement.vcpu_pins else None
    is_x86 = request.guest.architecture == "x86_64"
    topology, topology_findings = build_guest_topology(
        host,
        request,
        numbers,
        llc_vcpus=llcs.run_vcpus if llcs is not None and is_x86 else 0,
        package_vcpus=_count_package_vcpus(host, placement),
        shares_llc=llcs is not None and llcs.cross(numbers.cells),
    )
    cache = choose_guest_cache(host, request, placement, topology, llcs)

    by_bdf = {} if host is None else host.device_at
    pcie = _mirror_pcie(host, request, placement)
    initiators = build_initiator_cells(host, request, placement, cells)
    devices = tuple(
        structs.replace(device, initiator_cells=initiators.cells_of_gpu.get(device.bdf, CpuSet()))
        for device in _list_devices(host, request, placement, cells, by_bdf, pcie)
    )
    has_iommu = request.guest.has_iommu or (is_x86 and vcpus > MAX_VCPUS_WITHOUT_IOMMU)
    window = _choose_aperture(host, request, placement, has_iommu)
    binding = _choose_binding(request, placement)
    guest = request.guest
    fingerprint = "" if host is None else host.fingerprint
    vm = Vm(
        name=guest.name,
        source=f"plan of layout {layout.name}",
        domain_type=guest.domain_type,
        architecture=guest.architecture,
        machine=guest.machine,
        firmware=guest.firmware,
        vcpus=vcpus,
        offline_vcpus=offline,
        cpu_mode=guest.cpu_mode,
        cpu_model=guest.cpu_model,
        cpu_topology=topology,
        cpu_cache=cache.cache,
        topoext=cache.topoext,
        vcpu_pins=placement.vcpu_pins or (None,) * vcpus,
        emulator_pus=placement.emulator_pus,
        iothread_ids=guest.iothread_ids,
        iothread_pins=tuple(zip(guest.iothread_ids, placement.iothread_pus, strict=False)),
        memory_bytes=request.memory_bytes,
        page_bytes=request.page_bytes,
        ballooned_bytes=guest.ballooned_bytes,
        binding=binding,
        memory_devices=merge_devices(guest.memory_device_bytes),
        cells=()
        if layout.cells is GuestCells.SINGLE
        else tuple(
            bind_cell(cell, layout, binding, request.page_bytes) for cell in initiators.cells
        ),
        hostdevs=devices,
        mediated=tuple(
            MediatedDevice(mediated_device.uuid, None)
            for mediated_device in guest.mediated
            if mediated_device.uuid not in {device.uuid for device in (*guest.hostdevs, *devices)}
        ),
        controllers=() if pcie is None else pcie.controllers,
        has_iommu=has_iommu,
        record=LayoutRecord(
            layout=layout,
            host=fingerprint[:RECORDED_DIGITS] or None,
            objective=request.options.objective,
            multiplied=_is_multiplied(request, placement),
        ),
    )
    return Plan(
        vm=vm,
        host_name="" if host is None else host.name,
        host_fingerprint=fingerprint,
        policy=request.options.policy.value,
        nodes=placement.nodes,
        llcs=_list_llcs(host, placement),
        aperture=window.aperture,
        page_reservations=memory.reservations,
        fallback=placement.fallback,
        relaxations=placement.relaxations,
        cost=placement.cost,
        optimal=placement.optimal,
        runners_up=placement.runners_up,
        rejections=placement.rejections,
        findings=(
            *placement.findings,
            *_check_shared_cores(host, request, placement),
            *memory.findings,
            *check_online_vcpus(numbers.cells, offline),
            *topology_findings,
            *cache.findings,
            *(() if pcie is None else pcie.findings),
            *window.findings,
            *initiators.findings,
        ),
        consequences=list_consequences(host, request, vm, cells),
        gaps=(
            *placement.gaps,
            *memory.gaps,
            *cache.gaps,
            *window.gaps,
            *initiators.gaps,
            *find_mediated_gaps(request.guest, host),
            *(() if host is None else host.gaps),
        ),
        mediated_removed=tuple(
            mediated_device.uuid
            for mediated_device in request.guest.hostdevs
            if mediated_device.uuid is not None
            and mediated_device.uuid not in {device.uuid for device in devices}
        ),
    )


def _is_multiplied(request: GuestRequest, placement: Placement) -> bool | None:
    """Return False if all CPUs of the cores were to be pinned, but siblings did not fit."""
    wants_siblings = request.layout.pinning is Pinning.ALL_PUS and not request.keep_vcpus
    is_same = len(placement.vcpu_pins) == request.vcpus and placement.threads_per_core == 1
    return False if wants_siblings and is_same else None


def _mirror_pcie(
    host: Host | None, request: GuestRequest, placement: Placement
) -> MirroredPcie | None:
    """Return the mirrored tree; None if the layout keeps the PCI tree."""
    if request.layout.pcie is GuestPcie.KEEP:
        return None
    if request.layout.cells is GuestCells.SINGLE:
        raise UsageError(
            f"layout {request.layout.name!r}: devices go on the buses of guest NUMA nodes, but the "
            "guest has one node",
            hint="add --guest-nodes host, as pin-numa-pci does",
        )
    if host is None:
        raise UsageError(
            f"layout {request.layout.name!r}: requires a host, whose PCI tree the guest gets",
            hint="name the host with --host, or choose pin, pin-numa or pin-numa-smt",
        )
    return mirror_pcie(host, request, placement)


def _list_devices(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    cells: tuple[VmCell, ...],
    by_bdf: dict[Bdf, PciDevice],
    pcie: MirroredPcie | None,
) -> tuple[GuestHostdev, ...]:
    before = {hostdev.bdf: hostdev.address for hostdev in request.guest.hostdevs}
    if pcie is None:
        address_of: dict[Bdf, GuestAddress] = {}
        cell_of = _find_stated_cells(request, len(cells))
        group_of = _find_stated_groups(before)
    else:
        address_of, cell_of, group_of = pcie.address_of, pcie.cell_of, pcie.group_of
    local = _sum_node_memory(request, placement, cells)
    total_bytes = request.memory_bytes + request.guest.memory_device_bytes
    planned_hostdevs: list[GuestHostdev] = []
    for bdf in placement.devices:
        function = by_bdf.get(bdf)
        node = None if function is None else function.node
        planned_hostdevs.append(
            GuestHostdev(
                bdf=bdf,
                host_node=node,
                cell=cell_of.get(bdf),
                address=address_of.get(bdf, before.get(bdf)),
                group=group_of.get(bdf, bdf),
                local_memory_ratio=(
                    None if node is None or local is None else local.get(node, 0) / total_bytes
                ),
                uuid=find_device_uuid(host, request, bdf),
                managed=not any(part.profile for part in list_parts(by_bdf, bdf)),
            )
        )
    return tuple(planned_hostdevs)


def _find_stated_cells(request: GuestRequest, cells: int) -> dict[Bdf, GuestCellId]:
    """Return cells on whose expander buses the definition has devices already."""
    if request.layout.cells is GuestCells.SINGLE:
        return {}
    document = PcieDefinition(request.guest, cells, ())
    cell_of_device: dict[Bdf, GuestCellId] = {}
    for hostdev in request.guest.hostdevs:
        if hostdev.address is not None:
            expander = document.expander_above(hostdev.address.bus)
            if expander is not None and expander.cell is not None:
                cell_of_device[hostdev.bdf] = GuestCellId(expander.cell)
    return cell_of_device


def _find_stated_groups(before: dict[Bdf, GuestAddress | None]) -> dict[Bdf, Bdf]:
    """Return functions of one host device that the definition has in one guest slot."""
    first: dict[tuple[int, ...], Bdf] = {}
    groups: dict[Bdf, Bdf] = {}
    for bdf in sorted(before):
        at = before[bdf]
        if at is not None:
            slot = (bdf.domain, bdf.bus, bdf.device, at.domain, at.bus, at.device)
            groups[bdf] = first.setdefault(slot, bdf)
    return groups


def _sum_node_memory(
    request: GuestRequest, placement: Placement, cells: tuple[VmCell, ...]
) -> dict[NodeIndex, int] | None:
    """Return the guest's bytes on each host node; None if the kernel decides."""
    if not placement.memory_nodes:
        return None
    total: dict[NodeIndex, int] = {}
    devices = split_device_bytes(request.guest, request.layout, len(cells))
    for cell, device_bytes in zip(cells, devices, strict=True):
        total_bytes = cell.memory_bytes + device_bytes
        if len(cell.host_nodes) == 1:
            node = cell.host_nodes[0]
            total[node] = total.get(node, 0) + total_bytes
        elif request.options.memory_mode is MemoryMode.INTERLEAVE:
            for node in cell.host_nodes:
                total[node] = total.get(node, 0) + total_bytes // len(cell.host_nodes)
        else:
            return None
    return total


def _choose_aperture(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    has_iommu: bool,
) -> ApertureChoice:
    if host is None:
        return ApertureChoice(None)
    missing = [str(bdf) for bdf in placement.devices if bdf not in host.device_at]
    if missing:
        raise InputError(
            f"device {', '.join(missing)}: no such PCI function on host {host.name}",
            hint="homenode show --host SOURCE lists the host's devices",
        )
    devices = [host.device_at[bdf] for bdf in placement.devices]
    return choose_aperture(request, devices, has_iommu, host.settings)


def _choose_binding(request: GuestRequest, placement: Placement) -> tuple[str, CpuSet] | None:
    """Return the mode of <numatune>; None = unchanged."""
    if request.layout.memory is MemoryBinding.KEEP or not placement.memory_nodes:
        return None
    return str(request.options.memory_mode), CpuSet(placement.memory_nodes)


def _check_shared_cores(
    host: Host | None, request: GuestRequest, placement: Placement
) -> tuple[Finding, ...]:
    """A finding on cores that run several vCPUs, if whole cores were relaxed or do not count."""
    gave_up = Relaxation.SHARED_CORES in placement.relaxations
    counts_pus = request.options.policy in (Policy.MEMORY_FIRST, Policy.ANY)
    if host is None or not (gave_up or counts_pus):
        return ()
    cores = [core.pus.bits for core in host.cores]
    vcpus_on = Counter(pins.bits for pins in placement.vcpu_pins)
    pus = CpuSet.from_bits(reduce(or_, vcpus_on, 0))
    used_cores = [core for core in cores if core & pus.bits]
    vcpus = len(placement.vcpu_pins)
    if request.layout.pinning is Pinning.NODE:
        shared_cores = [
            core
            for pins, count in vcpus_on.items()
            if count > sum(bool(core & pins) for core in used_cores)
            for core in used_cores
            if core & pins
        ]
        cores_text = plural(len(used_cores), "core")
        sharing = f"they float over {cores_text}, and while all are busy some share one"
    else:
        shared_cores = [
            core for core in used_cores if sum(n for p, n in vcpus_on.items() if p & core) > 1
        ]
        sharing = f"{plural(len(shared_cores), 'core')} of {len(used_cores)} run several"
    if not shared_cores:
        return ()
    case = None if request.layout.pinning is Pinning.NODE else "pinned"
    return (
        finding(
            "vcpus-share-cores",
            f"CPUs {pus & CpuSet.from_bits(reduce(or_, shared_cores))}",
            observed=f"{vcpus} vCPUs have no whole core each: {sharing}. Under full load these are "
            "40 to 75 % slower than on whole cores (published for VMs that XAPI packs onto one "
            "node)",
            case=case if gave_up else "any CPUs",
            values={"cores": len(used_cores)},
        ),
    )


def _count_package_vcpus(host: Host | None, placement: Placement) -> tuple[int, ...]:
    """Return the vCPUs on each host package, in vCPU order; () if not consecutive."""
    packages = [
        next((p.index for p in (host.packages if host else ()) if pins and pins <= p.pus), None)
        for pins in placement.vcpu_pins
    ]
    runs = [(package, len(list(vcpus))) for package, vcpus in groupby(packages)]
    if None in packages or len({package for package, _ in runs}) < len(runs):
        return ()
    return tuple(count for _, count in runs)


def _list_llcs(host: Host | None, placement: Placement) -> tuple[LlcIndex, ...]:
    used = CpuSet.union(placement.vcpu_pins)
    return tuple(llc.index for llc in (host.llcs if host else ()) if not llc.pus.isdisjoint(used))
