"""Graph: nodes, links and paths between GPUs as NCCL computes them from a tree and a file.

A system of CPU nodes (one for each NUMA node with a GPU), switches, GPUs and NVSwitches. Paths are
those of the fewest links and, of these, the fastest. Source: src/graph/{xml.cc,topo.cc,paths.cc}.

What versions of NCCL, and RCCL, do differently was read in NVIDIA/nccl at 2.20.5 (ab2b89c), 2.22.3
(178b6b7), 2.26.2 (f44ac75) and 2.30.7, and in ROCm/rccl. A version between two of these counts as
the older one.
"""

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.machine.pci import PciLink
from homenode.nccl.guest_tree import GuestTree, TreeGpu, TreeLink
from homenode.nccl.strict_reader import ReadTopology, XmlNode, read_link_speed, read_number
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
    Sapphire and Emerald Rapids. knows_c2c: NVLink-C2C is a kind of its own; it was NVLink."""

    name: str
    flavour: NcclVariant
    version: tuple[int, int] | None
    link_source: LinkSource
    buffers: BufferSource
    knows_newer_intel: bool
    cpu_link_source: str
    p2p_through_cpus: bool = False
    knows_c2c: bool = False

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


class PathType(IntEnum):
    """NCCL's own words, the nearest first. The libraries' numbers differ; the order does not."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4  # one PCIe switch
    PXB = 5  # several
    P2C = 6  # a CPU that C2C joins
    PHB = 8  # a CPU
    SYS = 9  # the link between two nodes' CPUs


class Path(Struct, frozen=True, kw_only=True):
    """links: how many it passes. gb_per_s: of the slowest of them, as NCCL counts."""

    type: PathType
    gb_per_s: float
    links: int


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
    """What a library makes of a machine. pairs: in the order of gpus."""

    library: Library
    cpus: tuple[CpuNode, ...]
    gpus: tuple[GpuNode, ...]
    pairs: tuple[PairPath, ...]

    def pair(self, a: Bdf, b: Bdf) -> PairPath:
        return next(one for one in self.pairs if {one.a, one.b} == {a, b})


_LOCAL_GB_PER_S = 5000.0
_GEN3_GB_PER_S_LANE = 60 / 80
_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
_C2C_GB_PER_S = 447.12
"""10 links of 44712 MB/s, as NVML gives them of a GH200: more than any path beyond its CPU."""

_MOST_DIRECT_NVLINKS = 18
_NVSWITCH = "NVS"

_Key = tuple[str, str]
"""("cpu", numa id), ("pci", bus id or key), ("gpu", address), ("nvs", "")."""


class _Link(Struct, kw_only=True):
    to: _Key
    type: PathType
    gb_per_s: float


class _System(Struct):
    links: dict[_Key, list[_Link]] = field(default_factory=dict)

    def connect(self, a: _Key, b: _Key, kind: PathType, gb_per_s: float) -> None:
        """Both ways; links of one kind between two nodes are one, of their sum."""
        for one, other in ((a, b), (b, a)):
            self.add(one, other, kind, gb_per_s)

    def add(self, one: _Key, other: _Key, kind: PathType, gb_per_s: float) -> None:
        links = self.links.setdefault(one, [])
        self.links.setdefault(other, [])
        for link in links:
            if link.to == other and link.type is kind:
                link.gb_per_s += gb_per_s
                break
        else:
            links.append(_Link(to=other, type=kind, gb_per_s=gb_per_s))
        links.sort(key=lambda link: -link.gb_per_s)

    def paths_to(self, base: _Key) -> dict[_Key, Path]:
        """From every node to one. A GPU in between is passed by NVLink alone, and one at most."""
        found = {base: Path(type=PathType.LOC, gb_per_s=_LOCAL_GB_PER_S, links=0)}
        nodes = [base]
        while nodes:
            reached: list[_Key] = []
            for node in nodes:
                path = found[node]
                for link in self.links.get(node, ()):
                    passes = link.type is PathType.NVL and link.to[0] == "gpu" and path.links <= 1
                    if node != base and node[0] == "gpu" and not passes:
                        continue
                    there = found.get(link.to)
                    gb_per_s = min(path.gb_per_s, link.gb_per_s)
                    if there is not None and (
                        there.links <= path.links or there.gb_per_s >= gb_per_s
                    ):
                        continue
                    kind = max(path.type, _step_type(node, link, path))
                    found[link.to] = Path(type=kind, gb_per_s=gb_per_s, links=path.links + 1)
                    if link.to not in reached:
                        reached.append(link.to)
            nodes = reached
        return found


def _step_type(node: _Key, link: _Link, path: Path) -> PathType:
    if link.type is PathType.PIX:
        if "cpu" in (node[0], link.to[0]):
            return PathType.PHB
        return PathType.PXB if node[0] == link.to[0] == "pci" else PathType.PIX
    is_second = node[0] == "gpu" and path.type is link.type is PathType.NVL and path.links + 1 > 1
    return PathType.NVB if is_second else link.type


class _Up(Struct, frozen=True, kw_only=True):
    """A switch or a GPU on its way to the CPU. ids: of a switch, as TreeSwitch has them."""

    key: _Key
    gb_per_s: float
    ids: int = 0


def graph_of(tree: GuestTree, library: Library, file: ReadTopology | None = None) -> Graph:
    """The graph that a library has of a machine, with the topology file that it is given."""
    in_file = {} if file is None else dict(_places(file))
    cpus: dict[int, CpuNode] = {}
    for element, _, _ in in_file.values():
        node = _cpu_of_file(element, tree)
        cpus.setdefault(node.numa_id, node)
    system = _System()
    gpus: list[GpuNode] = []
    ways: list[tuple[CpuNode, tuple[_Up, ...]]] = []
    for gpu in tree.gpus:
        place = in_file.get(str(gpu.address))
        if place is None:
            number = -1 if gpu.node is None else gpu.node
            cpu = cpus.setdefault(number, _cpu_of_tree(number, tree))
            up = tuple(_switches_of_tree(gpu))
            rate = _rate(_read_by(gpu.link, library))
        else:
            stated = read_number(place[0].get("numaid"))
            cpu = cpus[-1 if stated is None else stated]
            up = tuple(_switches_of_file(place[1]))
            rate = _rate_of_file(place[2], gpu.link, library)
        gpus.append(
            GpuNode(address=gpu.address, cpu=cpu, link_gb_per_s=rate, from_file=place is not None)
        )
        ways.append((cpu, (*up, _Up(key=("gpu", str(gpu.address)), gb_per_s=rate))))
    used = [cpu for cpu in cpus.values() if any(way[0] is cpu for way in ways)]
    _connect_tree(system, ways)
    _connect_nvlinks(system, tree)
    for gpu, (cpu, _) in zip(tree.gpus, ways, strict=True):
        if gpu.has_c2c:
            kind = PathType.C2C if library.knows_c2c else PathType.NVL
            ends: tuple[_Key, _Key] = ("gpu", str(gpu.address)), ("cpu", str(cpu.numa_id))
            system.connect(*ends, kind, _C2C_GB_PER_S)
    _connect_cpus(system, used, library)
    pairs = tuple(_pairs(system, used, gpus, library))
    return Graph(library=library, cpus=tuple(used), gpus=tuple(gpus), pairs=pairs)


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


def _switches_of_tree(gpu: TreeGpu) -> Iterator[_Up]:
    for switch in gpu.switches:
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


def _rate_of_file(pci: XmlNode, link: TreeLink, library: Library) -> float:
    """The file's words where it has them; each that it lacks is the machine's."""
    speed, width = _read_by(link, library)
    if pci.get("link_speed") is not None:
        speed = read_link_speed(pci.get("link_speed") or "")
    if pci.get("link_width") is not None:
        width = read_number(pci.get("link_width")) or None
    return _rate((speed, width))


def _read_by(link: TreeLink, library: Library) -> tuple[float | None, int | None]:
    if library.link_source is LinkSource.DRIVER and link.own is not None:
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


def _connect_tree(system: _System, ways: Sequence[tuple[CpuNode, tuple[_Up, ...]]]) -> None:
    known: set[tuple[_Key, _Key]] = set()
    for cpu, way in ways:
        above: _Key = ("cpu", str(cpu.numa_id))
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


def _connect_nvlinks(system: _System, tree: GuestTree) -> None:
    """A GPU with more links to its neighbours than it can have is on NVSwitches."""
    here = {gpu.address for gpu in tree.gpus}
    for gpu in tree.gpus:
        links = [(other, count or 1) for other, count in gpu.nvlinks if other in here]
        if not links:
            continue
        rate = gpu.link_gb_per_s
        own: _Key = ("gpu", str(gpu.address))
        # All 18 links of a Hopper GPU to one neighbour: it stands for the switch.
        is_switched = any(count >= _MOST_DIRECT_NVLINKS for _, count in links)
        if not gpu.is_amd and (is_switched or sum(n for _, n in links) > _MOST_DIRECT_NVLINKS):
            system.connect(own, ("nvs", _NVSWITCH), PathType.NVL, links[0][1] * rate)
            continue
        for other, count in links:
            system.add(own, ("gpu", str(other)), PathType.NVL, count * rate)


def _connect_cpus(system: _System, cpus: Sequence[CpuNode], library: Library) -> None:
    for cpu in cpus:
        rate = library.gb_per_s_between_cpus(cpu.architecture, cpu.vendor, cpu.family, cpu.model)
        for other in cpus:
            if other is not cpu:
                one, two = ("cpu", str(cpu.numa_id)), ("cpu", str(other.numa_id))
                system.add(one, two, PathType.SYS, rate)


def _pairs(
    system: _System, cpus: Sequence[CpuNode], gpus: Sequence[GpuNode], library: Library
) -> Iterator[PairPath]:
    keys: list[_Key] = [("gpu", str(gpu.address)) for gpu in gpus]
    to_gpu = [system.paths_to(key) for key in keys]
    to_cpu = {cpu.numa_id: system.paths_to(("cpu", str(cpu.numa_id))) for cpu in cpus}
    limit = _limit(cpus, len(gpus), library)
    for a in range(len(gpus)):
        for b in range(a + 1, len(gpus)):
            direct = to_gpu[b][keys[a]]
            near = _nearest(keys[b], cpus, to_cpu)
            up, down = to_cpu[near][keys[a]], to_gpu[b]["cpu", str(near)]
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


def _nearest(gpu: _Key, cpus: Sequence[CpuNode], to_cpu: dict[int, dict[_Key, Path]]) -> int:
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
