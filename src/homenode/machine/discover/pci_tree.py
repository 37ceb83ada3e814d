"""PCI tree: root complexes, bridges and functions of a snapshot, from sysfs.

The tree follows from the path of each function's directory:
/sys/devices/pci0000:15/0000:15:01.0/... A malformed function or file is a gap and does not stop the
discovery.

Source: Documentation/ABI/testing/sysfs-bus-pci.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.discover.pci_nodes import (
    Locality,
    find_missing_functions,
    find_unknown_fields,
    format_functions,
    list_root_complexes,
)
from homenode.machine.discover.readings import (
    is_hidden,
    link_name,
    parse_address,
    parse_link_speed,
    read_errors,
    read_interrupts,
    read_kernel_registers,
    read_link_width,
    read_number,
    read_pus,
    read_resource,
    read_word,
)
from homenode.machine.pci import (
    NVIDIA,
    PCI_BRIDGE_CLASS,
    UNASSIGNED_CLASS,
    PciBridge,
    PciDevice,
    PciLink,
    PortType,
    RootComplex,
    classify_device,
    port_types_by_structure,
)
from homenode.machine.snapshot.protocol import Snapshot
from homenode.units import parse_whole

_PCIE_CAPABILITY = 0x10
_LINK_CONTROL_2 = 0x30
_SPEED_OF_CODE = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_PORT_TYPES = {
    0x4: PortType.ROOT_PORT,
    0x5: PortType.SWITCH_UPSTREAM,
    0x6: PortType.SWITCH_DOWNSTREAM,
    0x7: PortType.PCI_BRIDGE,
    0x8: PortType.PCI_BRIDGE,  # PCI to PCIe
}


class ConfigHeader(Struct, frozen=True):
    """Fields of a config file."""

    # 24 bits, None if nothing answers. bus numbers, port_type: of bridges only.
    class_code: int | None
    secondary_bus: int | None = None
    subordinate_bus: int | None = None
    # None if the file has only the 64 bytes that everybody may read
    port_type: PortType | None = None
    target_gt_per_s: float | None = None  # target speed in Link Control 2


def parse_config(config: bytes) -> ConfigHeader | None:
    """Return the fields of a configuration space of 64, 256 or 4096 bytes; None if it is too short.

    Source: PCI Local Bus 3.0, 6.1 and 6.7 (capabilities list); PCI-to-PCI Bridge 1.2, 3.2; PCIe
    6.0, 7.5.3.2 (Device/Port Type), 7.5.3.19 (Link Control 2).
    """
    if len(config) < 64:
        return None
    code = int.from_bytes(config[0x09:0x0C], "little")
    class_code = None if code == 0xFFFFFF else code
    is_bridge = config[0x0E] & 0x7F == 1
    if not is_bridge:
        return ConfigHeader(class_code)
    express = _find_express(config)
    if express is None:
        # With the whole first 256 bytes read, no capability means conventional PCI.
        port_type = PortType.PCI_BRIDGE if len(config) >= 256 else None
        return ConfigHeader(class_code, config[0x19], config[0x1A], port_type)
    return ConfigHeader(
        class_code,
        config[0x19],
        config[0x1A],
        _PORT_TYPES.get(config[express + 2] >> 4),
        _read_target_speed(config, express),
    )


def _find_express(config: bytes) -> int | None:
    """Return the offset of the PCI Express capability; None if it is missing or not visible."""
    has_capabilities = config[0x06] & 0x10
    offset = config[0x34] & 0xFC if has_capabilities else 0
    seen_offsets: set[int] = set()
    while offset >= 0x40 and offset + 4 <= len(config) and offset not in seen_offsets:
        seen_offsets.add(offset)
        if config[offset] == _PCIE_CAPABILITY:
            return offset
        offset = config[offset + 1] & 0xFC
    return None


def _read_target_speed(config: bytes, express: int) -> float | None:
    """Return GT/s; None of capabilities of version 1, which have no such register."""
    at = express + _LINK_CONTROL_2
    if config[express + 2] & 0xF < 2 or at >= len(config):
        return None
    return _SPEED_OF_CODE.get(config[at] & 0xF)


PCI = "/sys/bus/pci/devices"

_ROOT = re.compile(r"pci([0-9a-f]{4,8}):([0-9a-f]{2})", re.ASCII)

_Value = TypeVar("_Value")


class PciTree(Struct, frozen=True):
    """Root complexes and functions, ascending."""

    root_complexes: tuple[RootComplex, ...]
    devices: tuple[PciDevice, ...]
    gaps: tuple[Gap, ...]


class TreePlace(Struct, frozen=True):
    """Place of a function in the tree: its directory, root complex and the bridge above it."""

    directory: str
    root_complex: str
    parent: Bdf | None
    is_in_tree: bool = True  # False for a directory instead of a link


class _MalformedFiles(Struct):
    """Collects malformed files of functions: one gap for each file name."""

    files: dict[str, list[tuple[Bdf, str]]] = field(default_factory=dict)

    def try_read(self, bdf: Bdf, path: str, read: Callable[[str], _Value]) -> _Value | None:
        """Return the result of `read` on a function's file; None if it is malformed."""
        try:
            return read(path)
        except ParseError as error:
            name = path.rpartition("/")[2]
            self.files.setdefault(name, []).append((bdf, error.message))
            return None

    def list_gaps(self) -> list[Gap]:
        return [
            Gap(f"{file} of {format_functions([bdf for bdf, _ in of_file])}", of_file[0][1])
            for file, of_file in self.files.items()
        ]


def read_pci_tree(
    snapshot: Snapshot, locality: Locality, nvidia_gpus: tuple[Bdf, ...] = ()
) -> PciTree:
    """Return the PCI tree of a snapshot; empty if it has none. nvidia_gpus: functions that the
    NVIDIA driver treats as GPUs, for trees without vendor files."""
    gaps: list[Gap] = []
    malformed_files = _MalformedFiles()
    places = _read_places(snapshot, gaps)
    parent_of = {bdf: place.parent for bdf, place in places.items()}
    classes = _read_class_codes(snapshot, places, malformed_files, gaps)
    bridges = {bdf: code for bdf, code in classes.items() if code >> 8 == PCI_BRIDGE_CLASS}
    guessed_types = port_types_by_structure(bridges, parent_of)
    configs = {bdf: _read_config(snapshot, places[bdf].directory) for bdf in bridges}
    untyped = [bdf for bdf, config in configs.items() if config is None or not config.port_type]
    if untyped:
        reason = "config space is not readable beyond 64 bytes (it needs root); taken from the tree"
        gaps.append(Gap(f"port types of {len(untyped)} PCI bridges", reason))
    tree = _FunctionSources(
        snapshot=snapshot,
        locality=locality,
        nvidia_gpus=nvidia_gpus,
        malformed=malformed_files,
        places=places,
        classes=classes,
        configs=configs,
        guessed=guessed_types,
        last_bus=_find_last_buses(parent_of),
    )
    devices = tuple(_read_device(tree, bdf) for bdf in sorted(places))
    roots, root_gaps = list_root_complexes(devices)
    # Only bridges and root complexes have functions below them.
    paths = {place.directory.rpartition("/")[0] for place in places.values() if place.is_in_tree}
    paths |= {places[bdf].directory for bdf in bridges}
    gaps += find_missing_functions(snapshot, sorted(paths), frozenset(places))
    gaps += malformed_files.list_gaps()
    gaps += root_gaps + find_unknown_fields(devices) + locality.find_gaps(snapshot, devices)
    return PciTree(roots, devices, tuple(gaps))


def _read_places(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, TreePlace]:
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
            gaps.append(Gap(f"PCI function {name[:60]!r}", f"{error.message}: omitted"))
            continue
        if real is None:
            dangling.append(bdf)
            continue
        if place is None:  # some trees have directories instead of links
            loose.append(bdf)
            place = TreePlace(path, f"pci{bdf.domain:04x}:{bdf.bus:02x}", None, is_in_tree=False)
        places[bdf] = place
    if dangling:
        reason = f"the link in {PCI} leads nowhere: omitted; capture the host with /sys/devices"
        gaps.append(Gap(format_functions(dangling), reason))
    if loose:
        reason = f"{PCI} holds no links into /sys/devices; each bus counts as a root complex"
        gaps.append(Gap(f"bridges above {len(loose)} PCI functions", reason))
    unlisted_bridges = _find_unlisted_bridges(places)
    if unlisted_bridges:
        reason = f"not in {PCI}, but functions below it are: counted as a bridge"
        gaps.append(Gap(format_functions(sorted(unlisted_bridges)), reason))
    return places | unlisted_bridges


def _find_unlisted_bridges(places: Mapping[Bdf, TreePlace]) -> dict[Bdf, TreePlace]:
    """Bridges that the paths of listed functions pass through, and that are not listed."""
    bridges: dict[Bdf, TreePlace] = {}
    for place in places.values():
        current: TreePlace | None = place
        while current is not None and current.parent is not None:
            parent = current.parent
            if parent in places or parent in bridges:
                break
            directory, root_complex = current.directory.rpartition("/")[0], current.root_complex
            try:
                current = place_by_path(directory)
            except ParseError:  # the directory above it is not named by an address
                current = TreePlace(directory, root_complex, None)
            if current is not None:
                bridges[parent] = current
    return bridges


def place_by_path(real: str) -> TreePlace | None:
    """Return place of a function by its real path. The last root counts: a VMD's domain (10000)
    hangs below a function of domain 0."""
    names = real.split("/")
    for position in range(len(names) - 1, -1, -1):
        if _ROOT.fullmatch(names[position]):
            chain = names[position + 1 : -1]
            return TreePlace(real, names[position], Bdf.parse(chain[-1], real) if chain else None)
    return None


def _read_class_codes(
    snapshot: Snapshot, places: Mapping[Bdf, TreePlace], files: _MalformedFiles, gaps: list[Gap]
) -> dict[Bdf, int]:
    """Return each function's class from its file, else from its configuration space. A function
    without a class is a bridge if it has functions below it; otherwise its kind is unknown."""
    parents = {place.parent for place in places.values()}
    codes: dict[Bdf, int] = {}
    unknown: list[Bdf] = []
    for bdf, place in places.items():
        code = files.try_read(
            bdf, f"{place.directory}/class", lambda path: read_number(snapshot, path, 16)
        )
        if code is None or not 0 <= code < 1 << 24:
            header = _read_config(snapshot, place.directory)
            code = None if header is None else header.class_code
        if code is None and bdf not in parents:
            unknown.append(bdf)
        if code is None:
            code = PCI_BRIDGE_CLASS << 8 if bdf in parents else UNASSIGNED_CLASS
        codes[bdf] = code
    if unknown:
        reason = "neither a class file nor configuration space: counted as of no known kind"
        gaps.append(Gap(f"class of {format_functions(unknown)}", reason))
    return codes


def _read_config(snapshot: Snapshot, directory: str) -> ConfigHeader | None:
    text = snapshot.read_text(f"{directory}/config")
    # Bytes that are no UTF-8 come as surrogates (PEP 383), see machine/snapshot/protocol.py.
    return None if text is None else parse_config(text.encode("utf-8", "surrogateescape"))


def _find_last_buses(parent_of: dict[Bdf, Bdf | None]) -> dict[Bdf, int]:
    """Return the highest bus with functions below each bridge."""
    last: dict[Bdf, int] = {}
    for bdf, parent in parent_of.items():
        ancestor, steps = parent, 0
        while ancestor is not None and steps < 32:
            last[ancestor] = max(last.get(ancestor, 0), bdf.bus)
            ancestor, steps = parent_of.get(ancestor), steps + 1
    return last


class _FunctionSources(Struct, frozen=True, kw_only=True):
    """The sources of functions."""

    snapshot: Snapshot
    locality: Locality
    nvidia_gpus: tuple[Bdf, ...]
    malformed: _MalformedFiles
    places: Mapping[Bdf, TreePlace]
    classes: Mapping[Bdf, int]
    configs: Mapping[Bdf, ConfigHeader | None]  # config headers of bridges
    guessed: Mapping[Bdf, PortType]  # types by structure
    last_bus: Mapping[Bdf, int]


def _read_bridge(tree: _FunctionSources, bdf: Bdf) -> PciBridge | None:
    """Return bus numbers from sysfs, else from the config header, else from the functions below. A
    bridge without functions and numbers has no bus: (0, 0), as in its registers."""
    if bdf not in tree.guessed:
        return None
    directory, config = tree.places[bdf].directory, tree.configs[bdf]

    def bus(name: str) -> int | None:
        path = f"{directory}/{name}_bus_number"
        return tree.malformed.try_read(bdf, path, lambda path: read_number(tree.snapshot, path))

    secondary, subordinate = bus("secondary"), bus("subordinate")
    if secondary is None or subordinate is None:
        header = config or ConfigHeader(None)
        secondary, subordinate = header.secondary_bus, header.subordinate_bus
    if secondary is None or subordinate is None:
        secondary = _find_first_bus(tree.snapshot, directory)
        subordinate = tree.last_bus.get(bdf, 0)
    port_type = config.port_type if config is not None and config.port_type else tree.guessed[bdf]
    return PciBridge(port_type, secondary, subordinate)


def _find_first_bus(snapshot: Snapshot, directory: str) -> int:
    bdfs = map(parse_address, snapshot.list(directory) or ())
    return next((bdf.bus for bdf in bdfs if bdf is not None), 0)


def _read_device(tree: _FunctionSources, bdf: Bdf) -> PciDevice:
    snapshot, place, class_code = tree.snapshot, tree.places[bdf], tree.classes[bdf]
    directory, config = place.directory, tree.configs.get(bdf)
    bridge = _read_bridge(tree, bdf)

    def attempt(file: str, read: Callable[[str], _Value]) -> _Value | None:
        return tree.malformed.try_read(bdf, f"{directory}/{file}", read)

    def decimal(file: str) -> int | None:
        return attempt(file, lambda path: read_number(snapshot, path))

    def hexadecimal(file: str) -> int | None:
        return attempt(file, lambda path: read_number(snapshot, path, 16))

    vendor, device = hexadecimal("vendor"), hexadecimal("device")
    if vendor is None and bdf in tree.nvidia_gpus:
        vendor = NVIDIA
    local_pus = attempt(
        "local_cpulist", lambda path: read_pus(snapshot, path, f"{directory}/local_cpus")
    )
    numa_node = decimal("numa_node")
    group = link_name(snapshot, f"{directory}/iommu_group")
    physical_function = link_name(snapshot, f"{directory}/physfn")
    power_state = read_word(snapshot, f"{directory}/power_state")
    return PciDevice(
        bdf=bdf,
        kind=classify_device(class_code, vendor, device),
        class_code=class_code,
        vendor_id=vendor,
        device_id=device,
        root_complex=place.root_complex,
        parent=place.parent,
        node=tree.locality.find_node(numa_node, local_pus),
        firmware_node=tree.locality.firmware_node(numa_node),
        local_pus=None if local_pus is None else tree.locality.keep_online(local_pus),
        subsystem_vendor_id=hexadecimal("subsystem_vendor"),
        subsystem_device_id=hexadecimal("subsystem_device"),
        link=attempt("link width", lambda _: _link(snapshot, directory)),
        bridge=bridge,
        driver=link_name(snapshot, f"{directory}/driver"),
        iommu_group=parse_whole(group),
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
        power_state=None if power_state in ("unknown", "error") else power_state,
        iommu_domain=None
        if group is None
        else read_word(snapshot, f"/sys/kernel/iommu_groups/{group}/type"),
        errors=attempt("aer_dev", lambda _: read_errors(snapshot, directory)),
        interrupts=attempt("msi_irqs", lambda _: read_interrupts(snapshot, directory)),
        registers=attempt("resource", lambda _: read_kernel_registers(snapshot, directory)),
    )


def _link(snapshot: Snapshot, directory: str) -> PciLink | None:
    link = PciLink(
        parse_link_speed(read_word(snapshot, f"{directory}/current_link_speed")),
        read_link_width(snapshot, f"{directory}/current_link_width"),
        parse_link_speed(read_word(snapshot, f"{directory}/max_link_speed")),
        read_link_width(snapshot, f"{directory}/max_link_width"),
    )
    return None if link == PciLink(None, None, None, None) else link
