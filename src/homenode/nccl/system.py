"""LinkGraph: nodes and links as NCCL connects them, and the paths that it finds among them.

A GPU stands for the device and its rank, which NCCL since 2.30 has as two nodes of one place.

Source: src/graph/topo.cc (ncclTopoConnectNodes), src/graph/paths.cc (ncclTopoSetPaths), 2.30.7; up
to 2.29 paths of fewer links came before those of a nearer kind.
"""

from enum import IntEnum

from msgspec import Struct, field


class PathType(IntEnum):
    """NCCL's own words, the nearest first. The libraries' numbers differ; the order does not."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4  # one PCIe switch
    PXB = 5  # several
    P2C = 6  # a CPU that C2C joins
    PXN = 7  # another GPU, by NVLink, and its path to a NIC
    PHB = 8  # a CPU
    SYS = 9  # the link between two nodes' CPUs


class Path(Struct, frozen=True, kw_only=True):
    """links: how many it passes. gb_per_s: of the slowest of them, as NCCL counts."""

    type: PathType
    gb_per_s: float
    links: int


_LOCAL_GB_PER_S = 5000.0

NodeKey = tuple[str, str]
"""("cpu", numa id), ("pci", bus id or key), ("gpu", address), ("nvs", ""), ("nic", address),
("net", number)."""


class SystemLink(Struct, kw_only=True):
    to: NodeKey
    type: PathType
    gb_per_s: float


class LinkGraph(Struct):
    links: dict[NodeKey, list[SystemLink]] = field(default_factory=dict)

    def connect(self, a: NodeKey, b: NodeKey, kind: PathType, gb_per_s: float) -> None:
        """Both ways; links of one kind between two nodes are one, of their sum."""
        for one, other in ((a, b), (b, a)):
            self.add(one, other, kind, gb_per_s)

    def add(self, one: NodeKey, other: NodeKey, kind: PathType, gb_per_s: float) -> None:
        links = self.links.setdefault(one, [])
        self.links.setdefault(other, [])
        for link in links:
            if link.to == other and link.type is kind:
                link.gb_per_s += gb_per_s
                break
        else:
            links.append(SystemLink(to=other, type=kind, gb_per_s=gb_per_s))
        links.sort(key=lambda link: -link.gb_per_s)

    def paths_to(self, base: NodeKey, *, near_first: bool = False) -> dict[NodeKey, Path]:
        """From every node to one. A GPU in between is passed by NVLink alone, and one at most.

        near_first: a nearer kind comes before fewer links, as since 2.30.
        """
        found = {base: Path(type=PathType.LOC, gb_per_s=_LOCAL_GB_PER_S, links=0)}
        nodes = [base]
        while nodes:
            reached: list[NodeKey] = []
            for node in nodes:
                path = found[node]
                for link in self.links.get(node, ()):
                    passes = link.type is PathType.NVL and link.to[0] == "gpu" and path.links <= 1
                    if node != base and node[0] == "gpu" and not passes:
                        continue
                    kind = max(path.type, _step_type(node, link, path))
                    gb_per_s = min(path.gb_per_s, link.gb_per_s)
                    made = Path(type=kind, gb_per_s=gb_per_s, links=path.links + 1)
                    if not _is_better(made, found.get(link.to), near_first):
                        continue
                    found[link.to] = made
                    if link.to not in reached:
                        reached.append(link.to)
            nodes = reached
        return found


def _is_better(path: Path, there: Path | None, near_first: bool) -> bool:
    if there is None:
        return True
    if near_first:
        ours, theirs = ((one.type, -one.gb_per_s, one.links) for one in (path, there))
        return ours < theirs
    return there.links >= path.links and there.gb_per_s < path.gb_per_s


def _step_type(node: NodeKey, link: SystemLink, path: Path) -> PathType:
    if link.type is PathType.PIX:
        if "cpu" in (node[0], link.to[0]):
            return PathType.PHB
        return PathType.PXB if node[0] == link.to[0] == "pci" else PathType.PIX
    is_second = node[0] == "gpu" and path.type is link.type is PathType.NVL and path.links + 1 > 1
    return PathType.NVB if is_second else link.type
