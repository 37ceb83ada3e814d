"""Graph: nodes, links and paths between GPUs as NCCL computes them from a tree and a file.

A system of CPU nodes (one for each NUMA node with a GPU), switches, GPUs and NVSwitches. Paths are
those of the fewest links and, of these, the fastest. Source: src/graph/{xml.cc,topo.cc,paths.cc}.

What versions of NCCL, and RCCL, do differently was read in NVIDIA/nccl at 2.20.5 (ab2b89c), 2.22.3
(178b6b7), 2.26.2 (f44ac75) and 2.30.7, and in ROCm/rccl. A version between two of these counts as
the older one.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.machine.pci import PciLink
from homenode.nccl.guest_tree import GuestTree, TreeGpu, TreeLink, TreeNic
from homenode.nccl.nets import NetNode, NetPlan, plan_nets
from homenode.nccl.strict_reader import ReadTopology, XmlNode, read_link_speed, read_number
from homenode.nccl.system import LinkGraph, NodeKey, Path, PathType
from homenode.nccl.topology import NcclVariant


class LinkSource(StrEnum):
    """Where the library reads the speed of a GPU's link that no file gives."""

    SYSFS = "the lesser of port and device in sysfs"
    DRIVER = "the driver (NVML)"


class BufferSource(StrEnum):
    """Where host buffers between processes come from."""

    SHARED_FILE = "a file in /dev/shm, on the node of the thread that allocates it"
    HOST_NUMA_ID = "cuMem at the GPU's HOST_NUMA_ID; a negative one becomes node 0"


class Library(Struct, frozen=True, kw_only=True):
    """A version. version: (major, minor), None for RCCL. knows_newer_intel: it has rates for
    Sapphire and Emerald Rapids. knows_c2c: NVLink-C2C is a kind of its own; it was NVLink.
    near_first: paths of a nearer kind come before those of fewer links. shares_nets: GPUs with the
    same NICs begin at different ones by their number among these. gdr_through_c2c: GPUDirect RDMA
    reaches through a CPU that C2C joins, and only GPUs with it relay to a NIC."""

    name: str
    flavour: NcclVariant
    version: tuple[int, int] | None
    link_source: LinkSource
    buffers: BufferSource
    knows_newer_intel: bool
    cpu_link_source: str
    p2p_through_cpus: bool = False
    knows_c2c: bool = False
    near_first: bool = False
    shares_nets: bool = False
    gdr_through_c2c: bool = False

    def gb_per_s_between_cpus(
        self, architecture: str | None, vendor: str | None, family: int | None, model: int | None
    ) -> float:
        """What the library takes the link between two nodes' CPUs for."""
        if architecture == "ppc64":
            return 32.0
        if architecture == "arm64":
            return 6.0
        if architecture != "x86_64":
            return _LOCAL
        if vendor == "AuthenticAMD":
            return 16.0
        if vendor == "CentaurHauls" or vendor == "  Shanghai  ":
            return 9.0 if (family, model) == (7, 0x5B) else 6.0
        if vendor != "GenuineIntel":
            return _LOCAL
        steps = _INTEL if self.knows_newer_intel else _OLDER_INTEL
        return next((gb for least, gb in steps if family == 6 and (model or 0) >= least), 6.0)


_LOCAL = 5000.0
_OLDER_INTEL = ((0x55, 10.0),)
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), *_OLDER_INTEL)
"""Least model number of family 6 -> GB/s: Emerald Rapids, Sapphire Rapids, Skylake on."""

NCCL_2_20 = Library(
    name="2.20",
    flavour=NcclVariant.NCCL,
    version=(2, 20),
    link_source=LinkSource.SYSFS,
    buffers=BufferSource.SHARED_FILE,
    knows_newer_intel=False,
    cpu_link_source="src/graph/topo.cc (ncclTopoAddCpu), 2.20.5",
)
NCCL_2_21 = replace(
    NCCL_2_20, name="2.21", version=(2, 21), cpu_link_source="src/graph/topo.h:20-22, 2.22.3"
)
NCCL_2_26 = replace(
    NCCL_2_20,
    name="2.26",
    version=(2, 26),
    buffers=BufferSource.HOST_NUMA_ID,
    knows_newer_intel=True,
    cpu_link_source="src/graph/topo.h:21-25, 2.26.2",
)
NCCL_2_30 = replace(
    NCCL_2_26,
    name="2.30",
    version=(2, 30),
    link_source=LinkSource.DRIVER,
    cpu_link_source="src/graph/topo.h (ERP_QPI_BW), 2.30.7",
    knows_c2c=True,
    near_first=True,
    shares_nets=True,
    gdr_through_c2c=True,
)
RCCL = replace(
    NCCL_2_20,
    name="RCCL",
    flavour=NcclVariant.RCCL,
    version=None,
    knows_newer_intel=True,
    cpu_link_source="src/graph/topo.h of ROCm/rccl",
    p2p_through_cpus=True,
)

NCCL_LIBRARIES = (NCCL_2_20, NCCL_2_21, NCCL_2_26, NCCL_2_30)

_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})", re.ASCII)


def library_of(version: str) -> Library | None:
    """The library that behaves as this version: the newest known one that is not newer.

    >>> library_of("2.28.9+cuda13.0").name, library_of("2.18.3").name, library_of("new")
    ('2.26', '2.20', None)
    """
    found = _VERSION.match(version)
    if found is None:
        return None
    number = int(found[1]), int(found[2])
    older = [one for one in NCCL_LIBRARIES if one.version is not None and one.version <= number]
    return older[-1] if older else NCCL_LIBRARIES[0]


class CpuNode(Struct, frozen=True, kw_only=True):
    """A node that NCCL sees. numa_id: -1 where no node was given. affinity: CPUs of its mask that
    the machine has; empty where the kernel has no such node. from_file: the file names it."""

    numa_id: int
    affinity: CpuSet
    architecture: str | None
    vendor: str | None
    family: int | None
    model: int | None
    from_file: bool


class GpuNode(Struct, frozen=True, kw_only=True):
    """A GPU. link_gb_per_s: its PCIe link, up. from_file: the file says where it is."""

    address: Bdf
    cpu: CpuNode
    link_gb_per_s: float
    from_file: bool


class PairPath(Struct, frozen=True, kw_only=True):
    """Two GPUs. path: without regard to P2P. is_peer: whether NCCL's distance limit allows P2P;
    limit: that limit. through_host: the path where P2P is not used."""

    a: Bdf
    b: Bdf
    path: Path
    is_peer: bool
    limit: PathType
    through_host: Path


class Graph(Struct, frozen=True, kw_only=True):
    """What a library makes of a machine. pairs: in the order of gpus. nets: of a machine with NICs;
    None for RCCL, whose choice was not read."""

    library: Library
    cpus: tuple[CpuNode, ...]
    gpus: tuple[GpuNode, ...]
    pairs: tuple[PairPath, ...]
    nets: NetPlan | None = None

    def pair(self, a: Bdf, b: Bdf) -> PairPath:
        return next(one for one in self.pairs if {one.a, one.b} == {a, b})


_GEN3_GB_PER_S_LANE = 60 / 80
_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
_C2C_GB_PER_S = 447.12
"""10 links of 44712 MB/s, as NVML gives them of a GH200: more than any path beyond its CPU."""

_MOST_DIRECT_NVLINKS = 18
_NVSWITCH = "NVS"


class _Up(Struct, frozen=True, kw_only=True):
    """A switch or a GPU on its way to the CPU. ids: of a switch, as TreeSwitch has them."""

    key: NodeKey
    gb_per_s: float
    ids: int = 0


def graph_of(tree: GuestTree, library: Library, file: ReadTopology | None = None) -> Graph:
    """The graph that a library has of a machine, with the topology file that it is given."""
    in_file = {} if file is None else dict(_places(file))
    cpus: dict[int, CpuNode] = {}
    for element, _, _ in in_file.values():
        node = _cpu_of_file(element, tree)
        cpus.setdefault(node.numa_id, node)
    system = LinkGraph()
    gpus: list[GpuNode] = []
    ways: list[tuple[CpuNode, tuple[_Up, ...]]] = []
    devices: tuple[TreeGpu | TreeNic, ...] = (*tree.gpus, *tree.nics)
    for device in devices:
        place = in_file.get(str(device.address))
        if place is None:
            number = -1 if device.node is None else device.node
            cpu = cpus.setdefault(number, _cpu_of_tree(number, tree))
            up = tuple(_switches_of_tree(device))
            rate = _rate(_read_by(device, library))
        else:
            stated = read_number(place[0].get("numaid"))
            cpu = cpus[-1 if stated is None else stated]
            up = tuple(_switches_of_file(place[1]))
            rate = _rate_of_file(place[2], device, library)
        end = "nic" if isinstance(device, TreeNic) else "gpu"
        if end == "gpu":
            own = GpuNode(
                address=device.address, cpu=cpu, link_gb_per_s=rate, from_file=place is not None
            )
            gpus.append(own)
        ways.append((cpu, (*up, _Up(key=(end, str(device.address)), gb_per_s=rate))))
    every = [cpu for cpu in cpus.values() if any(way[0] is cpu for way in ways)]
    used = [cpu for cpu in every if any(gpu.cpu is cpu for gpu in gpus)]
    _connect_tree(system, ways)
    _connect_nvlinks(system, tree)
    for gpu, own in zip(tree.gpus, gpus, strict=True):
        if gpu.has_c2c:
            kind = PathType.C2C if library.knows_c2c else PathType.NVL
            ends: tuple[NodeKey, NodeKey] = (
                ("gpu", str(gpu.address)),
                ("cpu", str(own.cpu.numa_id)),
            )
            system.connect(*ends, kind, _C2C_GB_PER_S)
    _connect_cpus(system, every, library)
    nets = _nets(tree, ways[len(gpus) :], every)
    for net in nets:
        system.connect(("nic", str(net.address)), net.key, PathType.LOC, net.gb_per_s)
    pairs = tuple(_pairs(system, used, gpus, library))
    return Graph(
        library=library,
        cpus=tuple(used),
        gpus=tuple(gpus),
        pairs=pairs,
        nets=None
        if library.flavour is NcclVariant.RCCL or not nets
        else plan_nets(
            system,
            tuple(gpu.address for gpu in gpus),
            nets,
            tuple(str(cpu.numa_id) for cpu in every),
            library,
        ),
    )


def _nets(
    tree: GuestTree, ways: Sequence[tuple[CpuNode, tuple[_Up, ...]]], cpus: Sequence[CpuNode]
) -> tuple[NetNode, ...]:
    """In the order in which NCCL meets them: by node, then by address. They are numbered by
    address, as the verbs library lists them."""
    made = [
        NetNode(number=number, address=nic.address, gb_per_s=nic.gb_per_s or _UNLIMITED)
        for number, nic in enumerate(tree.nics)
    ]
    order = {id(cpu): at for at, cpu in enumerate(cpus)}
    places = [order[id(cpu)] for cpu, _ in ways]
    return tuple(net for _, net in sorted(zip(places, made, strict=True), key=_by_place))


def _by_place(placed: tuple[int, NetNode]) -> tuple[int, int]:
    return placed[0], placed[1].number


_UNLIMITED = 1000.0
"""GB/s of a port whose speed we do not know: its PCIe path alone limits it."""


def _places(
    file: ReadTopology,
) -> Iterator[tuple[str, tuple[XmlNode, tuple[XmlNode, ...], XmlNode]]]:
    """Bus id -> its <cpu>, the <pci> of the switches above it from the CPU down, and its own."""

    def walk(
        cpu: XmlNode, around: XmlNode, above: tuple[XmlNode, ...]
    ) -> Iterator[tuple[str, tuple[XmlNode, tuple[XmlNode, ...], XmlNode]]]:
        for pci in around.children:
            if pci.name != "pci":
                continue
            inside = (*above, pci)
            yield pci.get("busid") or "", (cpu, above, pci)
            yield from walk(cpu, pci, inside)

    for system in file.systems:
        for cpu in system.children:
            if cpu.name == "cpu":
                yield from walk(cpu, cpu, ())


def _cpu_of_tree(number: int, tree: GuestTree) -> CpuNode:
    affinity = dict(tree.vcpus_of_node).get(number, CpuSet())
    return CpuNode(
        numa_id=number,
        affinity=affinity,
        architecture=tree.architecture,
        vendor=tree.vendor,
        family=tree.family,
        model=tree.model,
        from_file=False,
    )


def _cpu_of_file(cpu: XmlNode, tree: GuestTree) -> CpuNode:
    """What the file leaves out comes from the machine."""
    number = read_number(cpu.get("numaid"))
    own = _cpu_of_tree(-1 if number is None else number, tree)
    mask = cpu.get("affinity")
    affinity = own.affinity if mask is None else _mask(mask) & tree.vcpus
    # NCCL fills in both where the family is missing.
    has_family = cpu.get("familyid") is not None
    return CpuNode(
        numa_id=own.numa_id,
        affinity=affinity,
        architecture=cpu.get("arch") or own.architecture,
        vendor=cpu.get("vendor") or own.vendor,
        family=read_number(cpu.get("familyid")) if has_family else own.family,
        model=read_number(cpu.get("modelid")) if has_family else own.model,
        from_file=True,
    )


def _mask(text: str) -> CpuSet:
    try:
        return CpuSet.parse_mask(text)
    except ParseError:
        return CpuSet()


def _switches_of_tree(device: TreeGpu | TreeNic) -> Iterator[_Up]:
    for switch in device.switches:
        rate = _rate(_least(switch.link))
        yield _Up(key=("pci", switch.key), gb_per_s=rate, ids=switch.ids)


def _switches_of_file(above: Sequence[XmlNode]) -> Iterator[_Up]:
    for pci in above:
        ids = 0
        for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
            ids = ids << 16 | ((read_number(pci.get(name)) or 0) & 0xFFFF)
        yield _Up(key=("pci", pci.get("busid") or ""), gb_per_s=_rate_of_words(pci), ids=ids)


def _rate_of_words(pci: XmlNode) -> float:
    width = read_number(pci.get("link_width")) or 16
    return _rate((read_link_speed(pci.get("link_speed") or ""), width))


def _rate_of_file(pci: XmlNode, device: TreeGpu | TreeNic, library: Library) -> float:
    """The file's words where it has them; each that it lacks is the machine's."""
    speed, width = _read_by(device, library)
    if pci.get("link_speed") is not None:
        speed = read_link_speed(pci.get("link_speed") or "")
    if pci.get("link_width") is not None:
        width = read_number(pci.get("link_width")) or None
    return _rate((speed, width))


def _read_by(device: TreeGpu | TreeNic, library: Library) -> tuple[float | None, int | None]:
    """Of GPUs some libraries ask their driver; of NICs all read sysfs."""
    link = device.link
    by_driver = library.link_source is LinkSource.DRIVER and isinstance(device, TreeGpu)
    if by_driver and link.own is not None:
        return link.own.max_gt_per_s, link.own.max_width
    return _least(link)


def _least(link: TreeLink) -> tuple[float | None, int | None]:
    """Of port and function; what neither gives is unknown."""
    ends: list[PciLink] = [end for end in (link.own, link.port) if end is not None]
    speeds = [end.max_gt_per_s for end in ends if end.max_gt_per_s]
    widths = [end.max_width for end in ends if end.max_width]
    return min(speeds, default=None), min(widths, default=None)


def _rate(link: tuple[float | None, int | None]) -> float:
    """GB/s as NCCL counts: an unknown speed is Gen3, an unknown width 16."""
    speed, width = link
    lane = _GEN3_GB_PER_S_LANE if speed is None else _LANE.get(speed, 60) / 80
    return lane * (width or 16)


def _connect_tree(system: LinkGraph, ways: Sequence[tuple[CpuNode, tuple[_Up, ...]]]) -> None:
    known: set[tuple[NodeKey, NodeKey]] = set()
    for cpu, way in ways:
        above: NodeKey = ("cpu", str(cpu.numa_id))
        for one in _flattened(way):
            if (above, one.key) not in known:
                known.add((above, one.key))
                system.connect(above, one.key, PathType.PIX, one.gb_per_s)
            above = one.key


def _flattened(way: Sequence[_Up]) -> list[_Up]:
    """Without the lower half of Broadcom's two-level switches. Source:
    ncclTopoFlattenBcmSwitches."""
    kept: list[_Up] = []
    for one in way:
        generation = _broadcom(kept[-1].ids, 0) if kept else 0
        if generation and one.ids and _broadcom(one.ids, 1) == generation:
            continue
        kept.append(one)
    return kept


def _broadcom(ids: int, level: int) -> int:
    start = ids & 0xFFFFFFFFFFFFF000
    if start == 0x1000C0101000A000:
        return 4
    return 5 if start == 0x1000C03010000000 | level * 0x1000 else 0


def _connect_nvlinks(system: LinkGraph, tree: GuestTree) -> None:
    """A GPU with more links to its neighbours than it can have is on NVSwitches."""
    here = {gpu.address for gpu in tree.gpus}
    for gpu in tree.gpus:
        links = [(other, count or 1) for other, count in gpu.nvlinks if other in here]
        if not links:
            continue
        rate = gpu.link_gb_per_s
        own: NodeKey = ("gpu", str(gpu.address))
        # All 18 links of a Hopper GPU to one neighbour: it stands for the switch.
        is_switched = any(count >= _MOST_DIRECT_NVLINKS for _, count in links)
        if not gpu.is_amd and (is_switched or sum(n for _, n in links) > _MOST_DIRECT_NVLINKS):
            system.connect(own, ("nvs", _NVSWITCH), PathType.NVL, links[0][1] * rate)
            continue
        for other, count in links:
            system.add(own, ("gpu", str(other)), PathType.NVL, count * rate)


def _connect_cpus(system: LinkGraph, cpus: Sequence[CpuNode], library: Library) -> None:
    for cpu in cpus:
        rate = library.gb_per_s_between_cpus(cpu.architecture, cpu.vendor, cpu.family, cpu.model)
        for other in cpus:
            if other is not cpu:
                one, two = ("cpu", str(cpu.numa_id)), ("cpu", str(other.numa_id))
                system.add(one, two, PathType.SYS, rate)


def _pairs(
    system: LinkGraph, cpus: Sequence[CpuNode], gpus: Sequence[GpuNode], library: Library
) -> Iterator[PairPath]:
    keys: list[NodeKey] = [("gpu", str(gpu.address)) for gpu in gpus]
    near = library.near_first
    to_gpu = [system.paths_to(key, near_first=near) for key in keys]
    to_cpu = {
        cpu.numa_id: system.paths_to(("cpu", str(cpu.numa_id)), near_first=near) for cpu in cpus
    }
    limit = _limit(cpus, len(gpus), library)
    for a in range(len(gpus)):
        for b in range(a + 1, len(gpus)):
            direct = to_gpu[b][keys[a]]
            local = _nearest(keys[b], cpus, to_cpu)
            up, down = to_cpu[local][keys[a]], to_gpu[b]["cpu", str(local)]
            kind = max(up.type, down.type)
            if {up.type, down.type} == {PathType.PHB, PathType.C2C}:
                kind = PathType.P2C
            host = Path(
                type=kind, gb_per_s=min(up.gb_per_s, down.gb_per_s), links=up.links + down.links
            )
            is_peer = direct.type <= limit
            yield PairPath(
                a=gpus[a].address,
                b=gpus[b].address,
                path=direct,
                is_peer=is_peer,
                limit=limit,
                through_host=host,
            )


def _nearest(gpu: NodeKey, cpus: Sequence[CpuNode], to_cpu: dict[int, dict[NodeKey, Path]]) -> int:
    """The CPU node of the fewest links; the first of several."""
    return min(cpus, key=lambda cpu: to_cpu[cpu.numa_id][gpu].links).numa_id


def _limit(cpus: Sequence[CpuNode], gpus: int, library: Library) -> PathType:
    """The farthest path that P2P takes without the user's word."""
    first = cpus[0]
    if library.p2p_through_cpus:
        is_old_intel = first.vendor == "GenuineIntel" and (first.model or 0) < 0x55
        return PathType.PXB if first.architecture == "arm64" or is_old_intel else PathType.SYS
    is_amd = first.architecture == "x86_64" and first.vendor == "AuthenticAMD"
    return PathType.SYS if is_amd and gpus <= 2 else PathType.PXB
