"""Nets: the NICs in NCCL's graph: paths from each GPU, GPUDirect RDMA, relays, and who uses which.

Source: ncclTopoComputePaths, ncclTopoCheckGdr and addInterStep in src/graph/paths.cc,
ncclTopoGetLocal, ncclTopoGetLocalNet and ncclTopoGetLocalGpu in src/graph/topo.cc, 2.30.7; what
differs in older ones is said by their Library. One NIC has one port, and GPUs can read by GPUDirect
RDMA, as since Ampere.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.nccl.system import LinkGraph, NodeKey, Path, PathType

_CHANNELS = 64
"""MAXCHANNELS of NCCL 2.30."""


class NetRules(Protocol):
    """What of a library decides over NICs."""

    @property
    def near_first(self) -> bool: ...

    @property
    def shares_nets(self) -> bool: ...

    @property
    def gdr_through_c2c(self) -> bool: ...


class NetNode(Struct, frozen=True, kw_only=True):
    """A port of a NIC. number: NCCL's, from 0. gb_per_s: of the port. has_gdr: its driver can do
    GPUDirect RDMA."""

    number: int
    address: Bdf
    gb_per_s: float
    has_gdr: bool = True

    @property
    def key(self) -> NodeKey:
        return "net", str(self.number)


class NetPath(Struct, frozen=True, kw_only=True):
    """From a GPU to a NIC. relay: the GPU that it goes through by NVLink. gdr: by GPUDirect RDMA;
    else through host memory. direct: the path without relay or host memory."""

    gpu: Bdf
    net: int
    path: Path
    direct: Path
    relay: Bdf | None
    gdr: bool


class NetChoice(Struct, frozen=True, kw_only=True):
    """The NICs that a GPU uses, by their numbers: of its first channel, its second, ..."""

    gpu: Bdf
    nets: tuple[int, ...]


class NetPlan(Struct, frozen=True, kw_only=True):
    """nets: ascending by number. paths: of each GPU to each. choices: in the order of GPUs.

    gb_per_s: the most that all hosts of this kind can exchange, in each direction: of each NIC in
    use the lesser of its port and the best path of a GPU that uses it. gdr_limit: the farthest path
    by GPUDirect RDMA without the user's word.
    """

    nets: tuple[NetNode, ...]
    paths: tuple[NetPath, ...]
    choices: tuple[NetChoice, ...]
    gdr_limit: PathType
    gb_per_s: float

    def path(self, gpu: Bdf, net: int) -> NetPath:
        return next(one for one in self.paths if one.gpu == gpu and one.net == net)


class _State(Struct, kw_only=True):
    """Paths as NCCL changes them one after another. From GPU g to NIC n: out[g][n]; back: into."""

    rules: NetRules
    nets: tuple[NetNode, ...]
    out: list[list[Path]]
    into: list[list[Path]]
    relay: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def limit(self) -> PathType:
        return PathType.P2C if self.rules.gdr_through_c2c else PathType.PXB

    def has_gdr(self, gpu: int, net: int) -> bool:
        if not self.nets[net].has_gdr:
            return False
        path = self.out[gpu][net]
        if path.type is PathType.PXN:
            path = self.out[self.relay[gpu, net]][net]
        return path.type <= self.limit

    def chosen(self, gpu: int, channel: int) -> int:
        """The NIC of a channel: of those nearest to the GPU, the GPUs near these begin at different
        ones."""
        local = _local(self.out[gpu])
        sharing = len(_local([row[local[0]] for row in self.into]))
        number = gpu % sharing if self.rules.shares_nets else gpu
        if len(local) & (len(local) - 1) == 0:
            number = _mirrored(number, len(local))
        number += channel % -(-len(local) // sharing)
        return local[number % len(local)]

    def local_gpu(self, net: int) -> int | None:
        """The GPU that relays to a NIC: the first near it that uses it."""
        near = _local([row[net] for row in self.into])
        channels = range(min(_CHANNELS, len(self.nets)))
        return next((g for c in channels for g in near if self.chosen(g, c) == net), None)


def _local(paths: Sequence[Path]) -> list[int]:
    """Indices of the fastest paths, of these the nearest."""
    best = max(path.gb_per_s for path in paths)
    kind = min(path.type for path in paths if path.gb_per_s == best)
    return [at for at, path in enumerate(paths) if (path.gb_per_s, path.type) == (best, kind)]


def _mirrored(number: int, size: int) -> int:
    """The bits of a number below a power of two, in reverse."""
    found, bit, mirror = 0, 1, size >> 1
    while bit < size:
        if number & bit:
            found |= mirror
        bit, mirror = bit << 1, mirror >> 1
    return found


def _over(first: Path, second: Path, kind: PathType | None = None) -> Path:
    """One path after the other."""
    ends = {first.type, second.type}
    joined = PathType.P2C if ends == {PathType.PHB, PathType.C2C} else max(ends)
    return Path(
        type=joined if kind is None else kind,
        gb_per_s=min(first.gb_per_s, second.gb_per_s),
        links=first.links + second.links,
    )


def plan_nets(
    system: LinkGraph,
    gpus: tuple[Bdf, ...],
    nets: tuple[NetNode, ...],
    cpus: tuple[str, ...],
    rules: NetRules,
) -> NetPlan:
    """What NCCL makes of its NICs. gpus: by rank. nets: in NCCL's order. cpus: numa ids."""
    keys: list[NodeKey] = [("gpu", str(gpu)) for gpu in gpus]
    hubs: list[NodeKey] = [("cpu", cpu) for cpu in cpus]
    to_net = [system.paths_to(net.key, near_first=rules.near_first) for net in nets]
    to_gpu = [system.paths_to(key, near_first=rules.near_first) for key in keys]
    to_cpu = [system.paths_to(hub, near_first=rules.near_first) for hub in hubs]
    state = _State(
        rules=rules,
        nets=nets,
        out=[[there[key] for there in to_net] for key in keys],
        into=[[there[net.key] for net in nets] for there in to_gpu],
    )
    direct = [list(row) for row in state.out]
    local_cpu = [_local_cpu([there[key] for there in to_cpu]) for key in keys]
    for gpu, row in enumerate(state.out):
        cpu = to_cpu[local_cpu[gpu]]
        for net in _local(row) if rules.gdr_through_c2c else ():
            if _over(cpu[keys[gpu]], cpu[nets[net].key]).type is PathType.P2C:
                _shorten(state, gpu, net)
    for net, node in enumerate(nets):
        for gpu, key in enumerate(keys):
            _relay(state, gpu, net, [to_gpu[gpu][other] for other in keys])
            if state.out[gpu][net].type < PathType.PHB and not state.has_gdr(gpu, net):
                at = local_cpu[gpu]
                state.out[gpu][net] = _over(to_cpu[at][key], to_net[net][hubs[at]])
                state.into[gpu][net] = _over(to_cpu[at][node.key], to_gpu[gpu][hubs[at]])
    return _plan(state, gpus, direct)


def _local_cpu(paths: Sequence[Path]) -> int:
    return min(_local(paths), key=lambda at: paths[at].links)


def _shorten(state: _State, gpu: int, net: int) -> None:
    """A NIC below a CPU that C2C joins to the GPU is nearer than its path says."""
    for rows in (state.out, state.into):
        path = rows[gpu][net]
        kind = min(PathType.P2C, path.type)
        rows[gpu][net] = Path(type=kind, gb_per_s=path.gb_per_s, links=path.links)


def _relay(state: _State, gpu: int, net: int, peers: Sequence[Path]) -> None:
    """Through a GPU near the NIC that NVLink leads to, where that is faster or avoids the CPU.

    peers: paths of the other GPUs to this one.
    """
    peer = state.local_gpu(net)
    if peer is None or peer == gpu or peers[peer].type > PathType.NVL:
        return
    theirs, ours = state.out[peer][net], state.out[gpu][net]
    newer = state.rules.gdr_through_c2c
    if theirs.type > (PathType.P2C if newer else PathType.PXB):
        return
    if newer and not state.has_gdr(peer, net):
        return
    beyond = PathType.PXN if newer else PathType.PXB
    if theirs.gb_per_s > ours.gb_per_s or ours.type > beyond:
        state.out[gpu][net] = _over(peers[peer], theirs, PathType.PXN)
        state.relay[gpu, net] = peer


def _plan(state: _State, gpus: tuple[Bdf, ...], direct: list[list[Path]]) -> NetPlan:
    chosen = [
        tuple(dict.fromkeys(state.chosen(g, c) for c in range(_CHANNELS))) for g in range(len(gpus))
    ]
    used: dict[int, float] = {}
    for at, numbers in enumerate(chosen):
        for number in numbers:
            used[number] = max(used.get(number, 0.0), state.out[at][number].gb_per_s)
    paths = []
    for g, gpu in enumerate(gpus):
        for n, net in enumerate(state.nets):
            relay = state.relay.get((g, n))
            paths.append(
                NetPath(
                    gpu=gpu,
                    net=net.number,
                    path=state.out[g][n],
                    direct=direct[g][n],
                    relay=None if relay is None else gpus[relay],
                    gdr=state.has_gdr(g, n),
                )
            )
    return NetPlan(
        nets=tuple(sorted(state.nets, key=lambda net: net.number)),
        paths=tuple(paths),
        choices=tuple(
            NetChoice(gpu=gpu, nets=tuple(state.nets[at].number for at in places))
            for gpu, places in zip(gpus, chosen, strict=True)
        ),
        gdr_limit=state.limit,
        gb_per_s=sum(used.values()),
    )
