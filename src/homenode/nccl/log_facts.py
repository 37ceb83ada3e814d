"""LogFacts: what NCCL's own log says of a job: graph, channels, threads, transports, buffers.

Versions: 2.18 to 2.30, and RCCL, whose words are the same. Run with NCCL_DEBUG=INFO and
NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,SHM,P2P,ALLOC. Source: INFO messages of src/{init,proxy}.cc,
src/graph/{topo,paths,search}.cc, src/transport/{p2p,shm,net}.cc, src/misc/shmutils.cc and
src/include/alloc.h; recorded logs in public issues of NVIDIA/nccl, nccl-tests and ROCm/rccl-tests.
"""

import re
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap

_MOST_RANKS = 4096
_MOST_LINE = 8192

_LINE = re.compile(r"NCCL (?:INFO|WARN|TRACE) (.*)")
_VERSION = re.compile(r"(?:NCCL|RCCL) version ?:? ?(\d[\w.+-]{0,40})")
_RANK = re.compile(
    r"rank (\d{1,6}) n[rR]anks (\d{1,6}) cudaDev (\d{1,4})(?: nvmlDev (\d{1,4}))? "
    r"busId ([0-9a-fA-F]{1,12})\b"
)
_CPU_NODE = re.compile(r"CPU/(?:[0-9a-fA-F]+-)?([0-9a-fA-F]+) \((-?\d+)/(-?\d+)/(-?\d+)\)")
_PATHS = re.compile(r"GPU/(?:[0-9a-fA-F]+-)?([0-9a-fA-F]+) :(.*)")
_PATH = re.compile(
    r"(GPU|CPU)/(?:[0-9a-fA-F]+-)?([0-9a-fA-F]+) \((\d{1,4})/([0-9.]+)/([A-Z0-9]{3})\)"
)
_RING = re.compile(r"Channel (\d{1,4})/(\d{1,4}) :((?: *\d{1,6}(?!\d))+)$")
_CHANNELS = re.compile(r"(\d{1,4}) coll channels,")
_PATTERN = re.compile(
    r"Pattern (\d{1,4}), crossNic -?\d+, nChannels (\d{1,4}), (?:bw|speed) ([0-9.]+)/([0-9.]+), "
    r"type ([A-Z0-9]+)/([A-Z0-9]+)"
)
_AFFINITY = re.compile(
    r"(?:\w{1,40}: )?(Setting affinity|Affinity) for GPU (\d{1,4}) (?:to|is) ([0-9a-fA-F,-]+)"
)
_NO_AFFINITY = re.compile(r"(?:\w{1,40}: )?Affinity for GPU (\d{1,4}) is empty")
_TRANSPORT = re.compile(
    r"Channel (\d{1,4})(?:/\d{1,4})? : (\d{1,6})\[[0-9a-fA-F]+\] -> (\d{1,6})\[[0-9a-fA-F]+\]"
    r"(?: \[(?:send|receive)\])? via (P2P/direct pointer|\S+)"
)
_CUMEM_HOST = re.compile(
    r"CUMEM Host Alloc Size (\d{1,20}) pointer \S+ handle \S+ numa (-?\d{1,5})"
    r" dev (\d{1,4})"
)
_CUMEM_SHM = re.compile(r"CUMEM allocated shareable buffer \S+ size (\d{1,20})")
_SHM = re.compile(r"MMAP allocated shareable host buffer (\S+) size (\d{1,20})")
_OLD_SHM = re.compile(r"Allocated (\d{1,20}) bytes of shared memory in (\S+)")
_THREAD = re.compile(r"\[Proxy ([A-Za-z ]{1,20})\] Device (\d{1,4}) CPU core (\d{1,6})")
_LOADED = re.compile(r"Loading topology file (\S.*)")
_VARIABLE = re.compile(r"(NCCL_[A-Z0-9_]{1,60}) set (?:by environment )?to (\S.{0,199})")


class LogRank(Struct, frozen=True, kw_only=True):
    """A rank. device: NVML's number, CUDA's where the log has none."""

    rank: int
    device: int
    address: Bdf | None


class LogPath(Struct, frozen=True, kw_only=True):
    """A path of the log's own table. from, to: GPUs."""

    a: Bdf
    b: Bdf
    links: int
    gb_per_s: float
    type: str


class LogGraph(Struct, frozen=True, kw_only=True):
    """What the search came to. pattern: NCCL's number (4 = ring, 1 to 3 = trees, 5 = NVLS)."""

    pattern: int
    channels: int
    gb_per_s: float
    path: str


class LogFacts(Struct, kw_only=True):
    """A log. cpu_nodes: NUMA ids in NCCL's order, -1 for none. rings: ranks of each channel.

    channels: of collectives, None where not given. affinities: CPUs of each device; empty where
    NCCL says that it has none. threads: (device, CPU) that proxy threads started on. transports:
    the channels from a rank to another by a transport ("SHM", "P2P", "NET") and how. buffers and
    sizes, of the host: how many and their bytes, by kind ("shm file", "shm", "cumem"), node and
    device, None where not given.
    """

    version: str | None = None
    ranks: dict[int, LogRank] = field(default_factory=dict)
    rank_count: int | None = None
    cpu_nodes: dict[int, None] = field(default_factory=dict)
    paths: dict[tuple[Bdf, Bdf], LogPath] = field(default_factory=dict)
    graphs: dict[int, LogGraph] = field(default_factory=dict)
    channels: int | None = None
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    affinities: dict[int, CpuSet] = field(default_factory=dict)
    transports: dict[tuple[int, int, str, str], set[str]] = field(default_factory=dict)
    buffers: Counter[tuple[str, int | None, int | None]] = field(default_factory=Counter)
    sizes: Counter[tuple[str, int | None, int | None]] = field(default_factory=Counter)
    threads: dict[tuple[int, int], None] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def has_graph(self) -> bool:
        return bool(self.cpu_nodes)

    def transport_names(self) -> tuple[str, ...]:
        return tuple(sorted({transport for _, _, transport, _ in self.transports}))


def facts_of_log(text: str) -> LogFacts:
    """What a log says, of the first communicator of each rank. Lines of others are skipped.

    Every rank prints the whole graph; equal lines count once.
    """
    found = LogFacts()
    affinities: dict[int, str] = {}
    seen: set[str] = set()
    for line in text.splitlines():
        line = line[:_MOST_LINE]
        version = _VERSION.search(line)
        if version is not None and found.version is None:
            found.version = version[1]
        match = _LINE.search(line)
        if match is None:
            continue
        words = match[1].rstrip()
        _count_buffers(found, words)
        if words not in seen:
            seen.add(words)
            _read(found, words, affinities)
    _read_affinities(found, affinities)
    return found


def _read(found: LogFacts, words: str, affinities: dict[int, str]) -> None:
    if (rank := _RANK.search(words)) is not None:
        number = int(rank[1])
        if number < _MOST_RANKS:
            device = int(rank[4] or rank[3])
            found.ranks.setdefault(
                number, LogRank(rank=number, device=device, address=_address(rank[5]))
            )
            found.rank_count = found.rank_count or int(rank[2])
    elif (cpu := _CPU_NODE.match(words)) is not None:
        found.cpu_nodes[_numa_id(cpu[1])] = None
    elif (paths := _PATHS.match(words)) is not None:
        _read_paths(found, paths[1], paths[2])
    elif (ring := _RING.match(words)) is not None:
        found.rings.setdefault(int(ring[1]), tuple(map(int, ring[3].split()))[:_MOST_RANKS])
    elif (pattern := _PATTERN.match(words)) is not None:
        number = int(pattern[1])
        found.graphs.setdefault(
            number,
            LogGraph(
                pattern=number,
                channels=int(pattern[2]),
                gb_per_s=_float(pattern[3]),
                path=pattern[5],
            ),
        )
    elif (way := _TRANSPORT.match(words)) is not None:
        transport, _, how = way[4].partition("/")
        if transport == "direct":  # "via direct shared memory", before 2.11
            transport, how = "SHM", "direct"
        found.transports.setdefault((int(way[2]), int(way[3]), transport, how), set()).add(way[1])
    elif (none := _NO_AFFINITY.match(words)) is not None:
        affinities.setdefault(int(none[1]), "")
    elif (affinity := _AFFINITY.match(words)) is not None:
        affinities.setdefault(int(affinity[2]), affinity[3])
    elif (thread := _THREAD.match(words)) is not None:
        found.threads[int(thread[2]), int(thread[3])] = None
    elif (loaded := _LOADED.match(words)) is not None:
        found.files[loaded[1].strip()] = None
    elif (variable := _VARIABLE.match(words)) is not None:
        found.variables.setdefault(variable[1], variable[2].rstrip(". "))
    elif found.channels is None and (channels := _CHANNELS.match(words)) is not None:
        found.channels = int(channels[1])


def _count_buffers(found: LogFacts, words: str) -> None:
    """Buffers have addresses or names of their own: equal lines are different buffers."""
    key: tuple[str, int | None, int | None]
    if (host := _CUMEM_HOST.match(words)) is not None:
        key, size = ("cumem", int(host[2]), int(host[3])), int(host[1])
    elif (shared := _CUMEM_SHM.match(words)) is not None:
        # With ALLOC logged as well, each is there a second time, with its node.
        key, size = ("cumem", None, None), int(shared[1])
    elif (mapped := _SHM.match(words)) is not None:
        key, size = ("shm", None, None), int(mapped[2])
    elif (old := _OLD_SHM.match(words)) is not None:
        key, size = ("shm file", None, None), int(old[1])
    else:
        return
    found.buffers[key] += 1
    found.sizes[key] += size


def _read_paths(found: LogFacts, own: str, words: str) -> None:
    one = _address(own)
    if one is None:
        return
    for path in _PATH.finditer(words):
        other = _address(path[2]) if path[1] == "GPU" else None
        if other is not None and other != one:
            there = LogPath(
                a=one, b=other, links=int(path[3]), gb_per_s=_float(path[4]), type=path[5]
            )
            found.paths.setdefault((one, other), there)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _numa_id(text: str) -> int:
    """-1 is printed as ffffffff…, less the bits of the system's number."""
    number = int(text, 16)
    return -1 if number >= 0xFFFF else number


def _address(text: str) -> Bdf | None:
    """0000:1b:00.0 is 1b000: domain, two digits of bus and of device, one of function.

    The newest versions put the rank's place on its GPU above 40 bits.
    """
    number = int(text, 16) & ((1 << 40) - 1)
    domain, bus, device = number >> 20, number >> 12 & 0xFF, number >> 4 & 0xFF
    if domain > 0xFFFF or device > 31:
        return None
    return Bdf(domain, bus, device, number & 0x7)


def _read_affinities(found: LogFacts, texts: dict[int, str]) -> None:
    ranges = _are_ranges([*texts.values()], found.version)
    for device, text in sorted(texts.items()):
        reason = f"{text} may be a mask or a list"
        try:
            if ranges is not None or not text:
                cpus = CpuSet.parse(text) if ranges else CpuSet.parse_mask(text or "0")
                found.affinities[device] = cpus
                continue
        except ParseError as error:
            reason = error.message
        found.gaps.append(Gap(f"affinity of GPU {device}", reason))


def _are_ranges(texts: Sequence[str], version: str | None) -> bool | None:
    """Lists of CPUs since 2.27, masks in groups of eight digits before; one kind in a log.

    None where neither the texts nor the version say which.
    """
    if any("-" in text or re.search(r",[0-9a-fA-F]{1,7}(?:,|$)", text) for text in texts):
        return True
    if any(re.search(r"[a-fA-F]|,[0-9]{8}\b|^[0-9]{8}", text) for text in texts):
        return False
    number = re.match(r"(\d{1,3})\.(\d{1,3})", version or "")
    if number is None:
        return None if any(texts) else False
    return (int(number[1]), int(number[2])) >= (2, 27)
