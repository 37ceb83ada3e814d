"""PCI tree: root complexes, bridges and functions of a snapshot, from sysfs.

The tree is told by where each function's folder lies: /sys/devices/pci0000:15/0000:15:01.0/...

Source: Documentation/ABI/testing/sysfs-bus-pci.
"""

import re
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.discover.device_kinds import (
    NVIDIA,
    PCI_BRIDGE_CLASS,
    device_kind,
    port_types_by_structure,
)
from homenode.discover.interrupts import read_interrupts
from homenode.discover.pci_config import ConfigHeader, parse_config
from homenode.discover.pci_fields import (
    parse_link_speed,
    parse_resource,
    read_errors,
    read_link_width,
)
from homenode.discover.pci_gaps import functions_off_the_bus, unknown_fields
from homenode.discover.pci_nodes import Locality, nodes_of_root_complexes
from homenode.discover.readings import read_number, read_pus, read_word
from homenode.errors import InputError, ParseError
from homenode.gap import Gap
from homenode.pci import PciBridge, PciDevice, PciLink, PortType, RootComplex
from homenode.snapshot.protocol import Snapshot

PCI = "/sys/bus/pci/devices"

_ROOT = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PciTree:
    """Root complexes and functions, ascending."""

    root_complexes: tuple[RootComplex, ...]
    devices: tuple[PciDevice, ...]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Where a function is in the tree: its folder, root complex and the bridge above it."""

    folder: str
    root_complex: str
    parent: Bdf | None
    is_in_tree: bool = True


def read_pci_tree(
    snapshot: Snapshot, locality: Locality, nvidia_gpus: tuple[Bdf, ...] = ()
) -> PciTree:
    """The PCI tree of a snapshot; empty where it has none.

    nvidia_gpus: functions that the NVIDIA driver calls GPUs, for trees without vendor files.
    Raises InputError where a function has no class, and ParseError for a malformed file.
    """
    gaps: list[Gap] = []
    places = _places(snapshot, gaps)
    parent_of = {bdf: place.parent for bdf, place in places.items()}
    classes = {bdf: _class_code(snapshot, place.folder) for bdf, place in places.items()}
    bridges = {bdf: code for bdf, code in classes.items() if code >> 8 == PCI_BRIDGE_CLASS}
    guessed = port_types_by_structure(bridges, parent_of)
    configs = {bdf: _config(snapshot, places[bdf].folder) for bdf in bridges}
    without = [bdf for bdf, config in configs.items() if config is None or not config.port_type]
    if without:
        reason = "config space is not readable beyond 64 bytes (it needs root); taken from the tree"
        gaps.append(Gap(f"port types of {len(without)} PCI bridges", reason))
    last_bus = _last_buses(parent_of)
    devices = tuple(
        _device(
            snapshot,
            bdf,
            place,
            classes[bdf],
            _bridge(snapshot, bdf, place, configs[bdf], guessed[bdf], last_bus)
            if bdf in bridges
            else None,
            locality,
            configs.get(bdf),
            bdf in nvidia_gpus,
        )
        for bdf, place in sorted(places.items())
    )
    named = sorted({device.root_complex for device in devices})
    node_of_root, root_gaps = nodes_of_root_complexes(devices)
    roots = tuple(
        sorted(
            (RootComplex(name, *_domain_and_bus(name), node_of_root[name]) for name in named),
            key=lambda root: (root.domain, root.bus),
        )
    )
    # Only bridges and root complexes have functions below them.
    above = {place.folder.rpartition("/")[0] for place in places.values() if place.is_in_tree}
    above |= {places[bdf].folder for bdf in bridges}
    gaps += functions_off_the_bus(snapshot, sorted(above), frozenset(places))
    gaps += root_gaps + unknown_fields(devices) + locality.gaps(snapshot, devices)
    return PciTree(roots, devices, tuple(gaps))


def _places(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, TreePlace]:
    names = snapshot.list(PCI)
    if names is None:
        gaps.append(Gap("PCI functions", f"{PCI} is absent"))
        return {}
    places: dict[Bdf, TreePlace] = {}
    loose: list[Bdf] = []
    for name in names:
        bdf = Bdf.parse(name, f"{snapshot.name}: {PCI}")
        path = f"{PCI}/{name}"
        real = snapshot.real_path(path)
        if real is None:
            raise InputError(
                f"{snapshot.name}: {path}: expected a folder, found a link that leads nowhere",
                hint="the tree is incomplete: capture the host again with /sys/devices",
            )
        place = place_by_path(real)
        if place is None:  # some trees hold the folders where the links should be
            loose.append(bdf)
            place = TreePlace(path, f"pci{bdf.domain:04x}:{bdf.bus:02x}", None, is_in_tree=False)
        places[bdf] = place
    if loose:
        reason = f"{PCI} holds no links into /sys/devices; each bus counts as a root complex"
        gaps.append(Gap(f"bridges above {len(loose)} PCI functions", reason))
    lost = [bdf for bdf, place in places.items() if place.parent and place.parent not in places]
    if lost:
        raise InputError(
            f"{snapshot.name}: {PCI}: expected the bridge {places[lost[0]].parent} above "
            f"{lost[0]}, found no such function",
            hint="the tree is incomplete: capture the host again",
        )
    return places


def place_by_path(real: str) -> TreePlace | None:
    """Place of a function by its real path. The last root counts: a VMD's domain (10000) hangs
    below a function of domain 0."""
    names = real.split("/")
    for position in range(len(names) - 1, -1, -1):
        if _ROOT.fullmatch(names[position]):
            above = names[position + 1 : -1]
            return TreePlace(real, names[position], Bdf.parse(above[-1], real) if above else None)
    return None


def _domain_and_bus(root_complex: str) -> tuple[int, int]:
    match = _ROOT.fullmatch(root_complex)
    assert match is not None
    return int(match[1], 16), int(match[2], 16)


def _class_code(snapshot: Snapshot, folder: str) -> int:
    code = read_number(snapshot, f"{folder}/class", 16)
    if code is None or not 0 <= code < 1 << 24:
        raise InputError(
            f"{snapshot.name}: {folder}/class: expected a class code such as 0x030200, found "
            f"{'no such file' if code is None else hex(code)}",
            hint="the tree is incomplete: capture the host again",
        )
    return code


def _config(snapshot: Snapshot, folder: str) -> ConfigHeader | None:
    text = snapshot.read_text(f"{folder}/config")
    # Bytes that are no UTF-8 come as surrogates (PEP 383), see snapshot/memory.py.
    return None if text is None else parse_config(text.encode("utf-8", "surrogateescape"))


def _last_buses(parent_of: dict[Bdf, Bdf | None]) -> dict[Bdf, int]:
    """The highest bus on which something was found below each bridge."""
    last: dict[Bdf, int] = {}
    for bdf, parent in parent_of.items():
        above, steps = parent, 0
        while above is not None and steps < 32:
            last[above] = max(last.get(above, 0), bdf.bus)
            above, steps = parent_of.get(above), steps + 1
    return last


def _bridge(
    snapshot: Snapshot,
    bdf: Bdf,
    place: TreePlace,
    config: ConfigHeader | None,
    guessed: PortType,
    last_bus: dict[Bdf, int],
) -> PciBridge:
    """Bus numbers by sysfs, else the config header, else what was found below. A bridge with
    nothing below it and no numbers has not been given a bus: (0, 0), as its registers say."""
    secondary = read_number(snapshot, f"{place.folder}/secondary_bus_number")
    subordinate = read_number(snapshot, f"{place.folder}/subordinate_bus_number")
    if secondary is None or subordinate is None:
        below = last_bus.get(bdf, 0)
        header = config or ConfigHeader(None, None, None)
        secondary = header.secondary_bus
        subordinate = header.subordinate_bus
        if secondary is None or subordinate is None:
            secondary, subordinate = _first_bus_below(snapshot, place.folder), below
    port_type = config.port_type if config is not None and config.port_type else guessed
    return PciBridge(port_type, secondary, subordinate)


def _first_bus_below(snapshot: Snapshot, folder: str) -> int:
    for name in snapshot.list(folder) or ():
        try:
            return Bdf.parse(name).bus
        except ParseError:
            continue
    return 0


def _device(
    snapshot: Snapshot,
    bdf: Bdf,
    place: TreePlace,
    class_code: int,
    bridge: PciBridge | None,
    locality: Locality,
    config: ConfigHeader | None,
    is_nvidia: bool,
) -> PciDevice:
    folder = place.folder

    def hexadecimal(file: str) -> int | None:
        return read_number(snapshot, f"{folder}/{file}", 16)

    vendor, device = hexadecimal("vendor"), hexadecimal("device")
    if vendor is None and is_nvidia:
        vendor = NVIDIA
    local_pus = read_pus(snapshot, f"{folder}/local_cpulist", f"{folder}/local_cpus")
    group = _link_name(snapshot, f"{folder}/iommu_group")
    physical_function = _link_name(snapshot, f"{folder}/physfn")
    return PciDevice(
        bdf=bdf,
        kind=device_kind(class_code, vendor, device),
        class_code=class_code,
        vendor_id=vendor,
        device_id=device,
        root_complex=place.root_complex,
        parent=place.parent,
        node=locality.node_of(read_number(snapshot, f"{folder}/numa_node"), local_pus),
        local_pus=None if local_pus is None else locality.online(local_pus),
        subsystem_vendor_id=hexadecimal("subsystem_vendor"),
        subsystem_device_id=hexadecimal("subsystem_device"),
        link=_link(snapshot, folder),
        bridge=bridge,
        driver=_link_name(snapshot, f"{folder}/driver"),
        iommu_group=int(group) if group is not None and group.isdigit() else None,
        physical_function=None if physical_function is None else Bdf.parse(physical_function),
        sriov_total_vfs=read_number(snapshot, f"{folder}/sriov_totalvfs"),
        sriov_num_vfs=read_number(snapshot, f"{folder}/sriov_numvfs"),
        bars=parse_resource(
            snapshot.read_text(f"{folder}/resource") or "",
            f"{snapshot.name}: {folder}/resource",
            is_bridge=bridge is not None,
        ),
        target_gt_per_s=None if config is None else config.target_gt_per_s,
        power_state=_power_state(read_word(snapshot, f"{folder}/power_state")),
        iommu_domain=None
        if group is None
        else read_word(snapshot, f"/sys/kernel/iommu_groups/{group}/type"),
        errors=read_errors(snapshot, folder),
        interrupts=read_interrupts(snapshot, folder),
    )


def _power_state(word: str | None) -> str | None:
    return None if word in (None, "unknown", "error") else word


def _link(snapshot: Snapshot, folder: str) -> PciLink | None:
    link = PciLink(
        parse_link_speed(read_word(snapshot, f"{folder}/current_link_speed")),
        read_link_width(snapshot, f"{folder}/current_link_width"),
        parse_link_speed(read_word(snapshot, f"{folder}/max_link_speed")),
        read_link_width(snapshot, f"{folder}/max_link_width"),
    )
    return None if link == PciLink(None, None, None, None) else link


def _link_name(snapshot: Snapshot, path: str) -> str | None:
    """The last name of where a symbolic link points: a driver, a group, a function."""
    target = snapshot.read_link(path)
    return None if target is None else target.rstrip("/").rpartition("/")[2] or None
