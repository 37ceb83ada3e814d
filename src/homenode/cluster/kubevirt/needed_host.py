"""Needed host: the NUMA nodes, the functions of one VM, and the bridges above them.

A hook runs in a container of 64 MiB, so it reads no other functions, and no file that wakes a
device.
"""

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HostError, ParseError
from homenode.machine.discover.nodes import NODE, read_distances
from homenode.machine.discover.pci_nodes import Locality
from homenode.machine.discover.pci_tree import PCI, TreePlace, place_by_path
from homenode.machine.discover.readings import link_name, list_numbers, read_number, read_pus
from homenode.machine.pci import (
    NVIDIA,
    PCI_BRIDGE_CLASS,
    DeviceKind,
    PciBridge,
    PciDevice,
    classify_device,
    port_types_by_structure,
)
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host, NumaNode, make_empty_host
from homenode.plan.shape.guest_numa import GRACE_GPUS, map_initiators

_HINT = "the hook needs the host's /sys, read-only, as KubeVirt's own containers have it"


def read_needed_host(snapshot: Snapshot, devices: tuple[Bdf, ...]) -> Host:
    """Return a host with every node, these functions and the bridges above them, and nothing else.

    Nodes have CPUs and distances, no sizes. Raises HostError if a file of a function is missing in
    /sys; node is None if the firmware does not report it.
    """
    nodes = _read_nodes(snapshot)
    distances, gaps = read_distances(snapshot, nodes, tuple(node.index for node in nodes))
    online = CpuSet(pu for node in nodes for pu in node.pus)
    locality = Locality.from_nodes(nodes, online, distances)
    places = {bdf: _place(snapshot, bdf) for bdf in devices}
    bridges: dict[Bdf, TreePlace] = {}
    for place in places.values():
        current = place
        while current.parent is not None and current.parent not in bridges and len(bridges) < 256:
            upper_place = place_by_path(current.directory.rpartition("/")[0])
            if upper_place is None:
                break
            bridges[current.parent] = upper_place
            current = upper_place
    all_places = bridges | places
    parent_of = {bdf: place.parent for bdf, place in all_places.items()}
    classes = {
        bdf: read_number(snapshot, f"{place.directory}/class", 16) or PCI_BRIDGE_CLASS << 8
        for bdf, place in bridges.items()
        if bdf not in places
    }
    ports = port_types_by_structure(classes, parent_of)
    pci_devices: list[PciDevice] = []
    for bdf, place in sorted(all_places.items()):
        if bdf in places:
            pci_devices.append(_read_function(snapshot, bdf, place, locality))
        else:
            bridge = PciBridge(ports[bdf], 0, 0)
            pci_devices.append(
                PciDevice(
                    bdf=bdf,
                    kind=DeviceKind.BRIDGE,
                    class_code=classes[bdf],
                    vendor_id=None,
                    device_id=None,
                    root_complex=place.root_complex,
                    parent=place.parent,
                    node=None,
                    bridge=bridge,
                )
            )
    return replace(
        make_empty_host(snapshot.name, tuple(gaps)),
        nodes=nodes,
        distances=distances,
        pci_devices=tuple(pci_devices),
    )


def _read_nodes(snapshot: Snapshot) -> tuple[NumaNode, ...]:
    numbers = read_pus(snapshot, f"{NODE}/online")
    if numbers is None:
        numbers = CpuSet(list_numbers(snapshot.list(NODE), "node"))
    if not numbers:
        raise HostError(f"{snapshot.name}: {NODE}: no readable NUMA node", hint=_HINT)
    initiators = read_pus(snapshot, f"{NODE}/has_generic_initiator") or CpuSet()
    return tuple(
        NumaNode(
            index=NodeIndex(int(number)),
            pus=read_pus(snapshot, f"{NODE}/node{number}/cpulist") or CpuSet(),
            memory_bytes=None,
            generic_initiator=number in initiators,
        )
        for number in numbers
    )


def _place(snapshot: Snapshot, bdf: Bdf) -> TreePlace:
    path = f"{PCI}/{bdf}"
    real = snapshot.real_path(path)
    if real is None:
        raise HostError(
            f"{snapshot.name}: {path}: no such PCI function, though the VM holds it",
            hint=_HINT,
        )
    place = place_by_path(real)
    if place is None:  # a tree with directories instead of links
        name = f"pci{bdf.domain:04x}:{bdf.bus:02x}"
        return TreePlace(path, name, None, is_in_tree=False)
    return place


def _read_function(snapshot: Snapshot, bdf: Bdf, place: TreePlace, locality: Locality) -> PciDevice:
    code = read_number(snapshot, f"{place.directory}/class", 16)
    if code is None:
        raise HostError(
            f"{snapshot.name}: {place.directory}/class: no such file",
            hint=_HINT,
        )
    vendor = read_number(snapshot, f"{place.directory}/vendor", 16)
    device = read_number(snapshot, f"{place.directory}/device", 16)
    number = read_number(snapshot, f"{place.directory}/numa_node")
    pus = read_pus(snapshot, f"{place.directory}/local_cpulist")
    physical = link_name(snapshot, f"{place.directory}/physfn")
    return PciDevice(
        bdf=bdf,
        kind=classify_device(code, vendor, device),
        class_code=code,
        vendor_id=vendor,
        device_id=device,
        root_complex=place.root_complex,
        parent=place.parent,
        node=locality.find_node(number, pus),
        firmware_node=locality.firmware_node(number),
        local_pus=pus,
        physical_function=None if not physical else Bdf.parse(physical, place.directory),
    )


def find_initiators(
    snapshot: Snapshot, host: Host, gpus: tuple[PciDevice, ...]
) -> tuple[dict[Bdf, tuple[NodeIndex, ...]], tuple[str, ...]]:
    """The generic initiator nodes of each of these GPUs, and a note for each GPU without any."""
    grace_gpus = _list_grace_gpus(
        snapshot, Locality.from_nodes(host.nodes, CpuSet(), host.distances)
    )
    initiators = map_initiators(host, grace_gpus, gpus)
    notes = [
        f"warning: {gpu.bdf}: expected host nodes of generic initiators to share among the "
        f"{sum(node == gpu.node for _, node in grace_gpus)} Grace GPUs of node {gpu.node}, found "
        "none or an uneven number: the guest's driver cannot bring the GPU's memory online"
        for gpu in gpus
        if gpu.bdf not in initiators
    ]
    return initiators, tuple(notes)


def _list_grace_gpus(
    snapshot: Snapshot, locality: Locality
) -> tuple[tuple[Bdf, NodeIndex | None], ...]:
    """(function, node of CPUs) of every Grace GPU of the host, the VM's or not, ascending."""
    gpus: list[tuple[Bdf, NodeIndex | None]] = []
    for name in snapshot.list(PCI) or ():
        directory = f"{PCI}/{name}"
        if read_number(snapshot, f"{directory}/device", 16) not in GRACE_GPUS:
            continue
        if read_number(snapshot, f"{directory}/vendor", 16) != NVIDIA:
            continue
        try:
            node = locality.find_node(read_number(snapshot, f"{directory}/numa_node"), None)
            gpus.append((Bdf.parse(name), node))
        except ParseError:
            continue  # no name of a function
    return tuple(sorted(gpus))
