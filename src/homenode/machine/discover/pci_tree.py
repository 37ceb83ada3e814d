"""PCI tree: root complexes, bridges and functions of a snapshot, from sysfs.

The tree is known by where each function's folder lies: /sys/devices/pci0000:15/0000:15:01.0/...
One function, or one of its files, that is not as it should be is a gap and stops nothing.

Source: Documentation/ABI/testing/sysfs-bus-pci.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.discover.device_kinds import (
    NVIDIA,
    PCI_BRIDGE_CLASS,
    device_kind,
    port_types_by_structure,
)
from homenode.machine.discover.pci_fields import (
    ConfigHeader,
    parse_config,
    parse_link_speed,
    read_errors,
    read_interrupts,
    read_link_width,
    read_resource,
)
from homenode.machine.discover.pci_nodes import (
    Locality,
    functions_off_the_bus,
    nodes_of_root_complexes,
    several,
    unknown_fields,
)
from homenode.machine.discover.readings import is_hidden, read_number, read_pus, read_word
from homenode.machine.pci import PciBridge, PciDevice, PciLink, PortType, RootComplex
from homenode.machine.snapshot.protocol import Snapshot

PCI = "/sys/bus/pci/devices"

_ROOT = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})", re.ASCII)
_UNASSIGNED_CLASS = 0xFF0000  # "does not fit any class"

_Value = TypeVar("_Value")


class PciTree(Struct, frozen=True):
    """Root complexes and functions, ascending."""

    root_complexes: tuple[RootComplex, ...]
    devices: tuple[PciDevice, ...]
    gaps: tuple[Gap, ...]


class TreePlace(Struct, frozen=True):
    """Where a function is in the tree: its folder, root complex and the bridge above it.

    is_in_tree: False of a folder that stands where a link should. is_listed: False of a bridge of
    which only the functions below it show.
    """

    folder: str
    root_complex: str
    parent: Bdf | None
    is_in_tree: bool = True
    is_listed: bool = True


class _Malformed(Struct):
    """Files of functions that do not have their form: one gap for each name of a file."""

    found: dict[str, list[tuple[Bdf, str]]] = field(default_factory=dict)

    def attempt(self, bdf: Bdf, path: str, read: Callable[[str], _Value]) -> _Value | None:
        """What `read` gives of a function's file; None where it is malformed."""
        try:
            return read(path)
        except ParseError as error:
            name = path.rpartition("/")[2]
            self.found.setdefault(name, []).append((bdf, error.message))
            return None

    def gaps(self) -> list[Gap]:
        return [
            Gap(f"{file} of {several([bdf for bdf, _ in of_file])}", of_file[0][1])
            for file, of_file in self.found.items()
        ]


def read_pci_tree(
    snapshot: Snapshot, locality: Locality, nvidia_gpus: tuple[Bdf, ...] = ()
) -> PciTree:
    """The PCI tree of a snapshot; empty where it has none.

    nvidia_gpus: functions that the NVIDIA driver calls GPUs, for trees without vendor files.
    """
    gaps: list[Gap] = []
    malformed = _Malformed()
    places = _places(snapshot, gaps)
    parent_of = {bdf: place.parent for bdf, place in places.items()}
    classes = _class_codes(snapshot, places, malformed, gaps)
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
            _bridge(snapshot, bdf, place, configs[bdf], guessed[bdf], last_bus, malformed)
            if bdf in bridges
            else None,
            locality,
            configs.get(bdf),
            bdf in nvidia_gpus,
            malformed,
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
    gaps += malformed.gaps()
    gaps += root_gaps + unknown_fields(devices) + locality.gaps(snapshot, devices)
    return PciTree(roots, devices, tuple(gaps))


def _places(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, TreePlace]:
    names = snapshot.list(PCI)
    if names is None:
        reason = f"{PCI} cannot be read" if is_hidden(snapshot, PCI) else f"{PCI} is absent"
        gaps.append(Gap("PCI functions", reason))
        return {}
    places: dict[Bdf, TreePlace] = {}
    loose: list[Bdf] = []
    dangling: list[Bdf] = []
    for name in names:
        path = f"{PCI}/{name}"
        real = snapshot.real_path(path)
        try:
            bdf = Bdf.parse(name, f"{snapshot.name}: {PCI}")
            place = None if real is None else place_by_path(real)
        except ParseError as error:
            gaps.append(Gap(f"PCI function {name[:60]!r}", f"{error.message}: left out"))
            continue
        if real is None:
            dangling.append(bdf)
            continue
        if place is None:  # some trees hold the folders where the links should be
            loose.append(bdf)
            place = TreePlace(path, f"pci{bdf.domain:04x}:{bdf.bus:02x}", None, is_in_tree=False)
        places[bdf] = place
    if dangling:
        reason = f"the link in {PCI} leads nowhere: left out; capture the host with /sys/devices"
        gaps.append(Gap(several(dangling), reason))
    if loose:
        reason = f"{PCI} holds no links into /sys/devices; each bus counts as a root complex"
        gaps.append(Gap(f"bridges above {len(loose)} PCI functions", reason))
    unlisted = _bridges_not_listed(places)
    if unlisted:
        reason = f"not in {PCI}, but functions below it are: counted as a bridge"
        gaps.append(Gap(several(sorted(unlisted)), reason))
    return places | unlisted


def _bridges_not_listed(places: Mapping[Bdf, TreePlace]) -> dict[Bdf, TreePlace]:
    """Bridges that the paths of listed functions pass through, and that are not listed."""
    found: dict[Bdf, TreePlace] = {}
    for place in places.values():
        here: TreePlace | None = place
        while here is not None and here.parent is not None:
            parent = here.parent
            if parent in places or parent in found:
                break
            here = place_by_path(here.folder.rpartition("/")[0])
            if here is not None:
                found[parent] = replace(here, is_listed=False)
    return found


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


def _class_codes(
    snapshot: Snapshot, places: Mapping[Bdf, TreePlace], malformed: _Malformed, gaps: list[Gap]
) -> dict[Bdf, int]:
    """The class of each function: by its file, else by its configuration space. What has functions
    below it and gives no class is a bridge; other functions without one are of no known kind."""
    above = {place.parent for place in places.values()}
    codes: dict[Bdf, int] = {}
    unknown: list[Bdf] = []
    for bdf, place in places.items():
        code = malformed.attempt(
            bdf, f"{place.folder}/class", lambda path: read_number(snapshot, path, 16)
        )
        if code is None or not 0 <= code < 1 << 24:
            header = _config(snapshot, place.folder)
            code = None if header is None else header.class_code
        if code is None and bdf not in above:
            unknown.append(bdf)
        if code is None:
            code = PCI_BRIDGE_CLASS << 8 if bdf in above else _UNASSIGNED_CLASS
        codes[bdf] = code
    if unknown:
        reason = "neither a class file nor configuration space: counted as of no known kind"
        gaps.append(Gap(f"class of {several(unknown)}", reason))
    return codes


def _config(snapshot: Snapshot, folder: str) -> ConfigHeader | None:
    text = snapshot.read_text(f"{folder}/config")
    # Bytes that are no UTF-8 come as surrogates (PEP 383), see machine/snapshot/memory.py.
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
    malformed: _Malformed,
) -> PciBridge:
    """Bus numbers by sysfs, else the config header, else what was found below. A bridge with
    nothing below it and no numbers has not been given a bus: (0, 0), as its registers say."""

    def bus(name: str) -> int | None:
        path = f"{place.folder}/{name}_bus_number"
        return malformed.attempt(bdf, path, lambda path: read_number(snapshot, path))

    secondary, subordinate = bus("secondary"), bus("subordinate")
    if secondary is None or subordinate is None:
        below = last_bus.get(bdf, 0)
        header = config or ConfigHeader(None)
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
    malformed: _Malformed,
) -> PciDevice:
    folder = place.folder

    def attempt(file: str, read: Callable[[str], _Value]) -> _Value | None:
        return malformed.attempt(bdf, f"{folder}/{file}", read)

    def decimal(file: str) -> int | None:
        return attempt(file, lambda path: read_number(snapshot, path))

    def hexadecimal(file: str) -> int | None:
        return attempt(file, lambda path: read_number(snapshot, path, 16))

    vendor, device = hexadecimal("vendor"), hexadecimal("device")
    if vendor is None and is_nvidia:
        vendor = NVIDIA
    local_pus = attempt(
        "local_cpulist", lambda path: read_pus(snapshot, path, f"{folder}/local_cpus")
    )
    numa_node = decimal("numa_node")
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
        node=locality.node_of(numa_node, local_pus),
        firmware_node=locality.firmware_node(numa_node),
        local_pus=None if local_pus is None else locality.online(local_pus),
        subsystem_vendor_id=hexadecimal("subsystem_vendor"),
        subsystem_device_id=hexadecimal("subsystem_device"),
        link=attempt("link width", lambda _: _link(snapshot, folder)),
        bridge=bridge,
        driver=_link_name(snapshot, f"{folder}/driver"),
        iommu_group=_group_number(group),
        physical_function=None
        if physical_function is None
        else attempt("physfn", lambda path: Bdf.parse(physical_function, path)),
        sriov_total_vfs=decimal("sriov_totalvfs"),
        sriov_num_vfs=decimal("sriov_numvfs"),
        bars=attempt(
            "resource",
            lambda path: read_resource(snapshot, path, is_bridge=bridge is not None),
        )
        or (),
        target_gt_per_s=None if config is None else config.target_gt_per_s,
        power_state=_power_state(read_word(snapshot, f"{folder}/power_state")),
        iommu_domain=None
        if group is None
        else read_word(snapshot, f"/sys/kernel/iommu_groups/{group}/type"),
        errors=attempt("aer_dev", lambda _: read_errors(snapshot, folder)),
        interrupts=attempt("msi_irqs", lambda _: read_interrupts(snapshot, folder)),
    )


def _group_number(group: str | None) -> int | None:
    known = group is not None and group.isascii() and group.isdigit() and len(group) <= 9
    return int(group) if group is not None and known else None


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
