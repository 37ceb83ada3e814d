"""GpuLines: what gres.conf should say of a host's GPUs: cores by node, and links.

Source: gres.conf(5), Cores, Links.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.pci import LinkKind
from homenode.slurm.cpu_ids import CoreOrder, core_order
from homenode.slurm.gres import GresLine
from homenode.slurm.home_nodes import gpus_in_order, home_node
from homenode.slurm.hostlist import compress_hostlist
from homenode.topology import Host

_NUMBERED = re.compile(r"/dev/nvidia([0-9]{1,3})\Z|/dev/dri/renderD([0-9]{1,3})\Z", re.ASCII)
_FIRST_RENDER_NODE = 128


@dataclass(frozen=True, slots=True)
class RightGpu:
    """What is right for one GPU. node, cores: None where the host does not tell its node.

    cores: Slurm's numbers of all cores of the node. near: of those that the firmware calls local
    where they are fewer. links: to each GPU in order, -1 to itself; None where none are known.
    """

    index: int
    bdf: Bdf
    node: NodeIndex | None
    cores: CpuSet | None
    near: CpuSet | None
    links: tuple[int, ...] | None


def right_gpus(host: Host) -> tuple[RightGpu, ...]:
    """The host's GPUs in the order of their addresses."""
    order = core_order(host)
    gpus = gpus_in_order(host)
    counts = _link_counts(host)
    found = []
    for index, gpu in enumerate(gpus):
        at = home_node(host, gpu)
        node = None if at is None else host.node(at)
        links = tuple(
            -1 if other.bdf == gpu.bdf else counts.get(frozenset((gpu.bdf, other.bdf)), 0)
            for other in gpus
        )
        found.append(
            RightGpu(
                index,
                gpu.bdf,
                at,
                None if node is None else order.numbers(node.pus),
                order.numbers(gpu.local_pus) if gpu.local_pus else None,
                links if counts else None,
            )
        )
    return tuple(found)


def placed_files(lines: Sequence[GresLine]) -> tuple[tuple[GresLine, str | None, int], ...]:
    """(line, device file, the GPU's number) of each GPU that the lines list, in their order.

    /dev/nvidia3 is GPU 3 and /dev/dri/renderD129 GPU 1; any other file is the next one. Drivers
    number by address; a line with Count= alone has no files. The files of MultipleFiles= are one
    device: a GPU, or a MIG slice, which is at its GPU's number.
    """
    found: list[tuple[GresLine, str | None, int]] = []
    for line in lines:
        files: tuple[str | None, ...] = line.files or (None,) * min(line.devices, 1024)
        if line.is_multiple:
            files = (next((file for file in line.files if _NUMBERED.match(file)), line.files[0]),)
        for file in files:
            match = _NUMBERED.match(file) if file else None
            number = len(found)
            if match is not None:
                number = int(match[1]) if match[1] else int(match[2]) - _FIRST_RENDER_NODE
            found.append((line, file, number))
    return tuple(found)


def right_lines(
    names: Sequence[str], lines: Sequence[GresLine], gpus: Sequence[RightGpu], *, links: bool
) -> tuple[str, ...]:
    """Lines that say the same GPUs with the right cores; with `links` a line for each GPU."""
    groups: list[tuple[str | None, CpuSet | None, tuple[int, ...] | None, list[str]]] = []
    for line, file, number in placed_files(lines):
        gpu = gpus[number] if 0 <= number < len(gpus) else None
        if gpu is None or file is None:
            continue
        own = gpu.links if links else None
        key = (line.type, gpu.cores, own)
        if own is None and groups and groups[-1][:3] == key:
            groups[-1][3].append(file)
        else:
            groups.append((*key, [file]))
    return tuple(_line(names, *group) for group in groups)


def looks_like_pus(cores: CpuSet, right: CpuSet, order: CoreOrder) -> bool:
    """True where the numbers are right as PUs and wrong as cores, as nvidia-smi topo -m prints."""
    every = CpuSet.from_bits(_bits(order))
    return cores != right and cores <= every and order.numbers(cores) == right


def _line(
    names: Sequence[str],
    type: str | None,
    cores: CpuSet | None,
    links: tuple[int, ...] | None,
    files: Sequence[str],
) -> str:
    words = [f"NodeName={compress_hostlist(names)}"] if names else []
    words.append("Name=gpu")
    if type is not None:
        words.append(f"Type={type}")
    words.append(f"File={compress_hostlist(files)}")
    if cores is not None:
        words.append(f"Cores={cores}")
    if links is not None:
        words.append(f"Links={','.join(map(str, links))}")
    return " ".join(words)


def _link_counts(host: Host) -> dict[frozenset[Bdf], int]:
    """Bonded links of each pair of GPUs; 1 where the source tells of a link and not how many."""
    counts: dict[frozenset[Bdf], int] = {}
    for link in host.links:
        if link.b is not None and link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            pair = frozenset((link.a, link.b))
            counts[pair] = max(counts.get(pair, 0), link.count or 1)
    return counts


def _bits(order: CoreOrder) -> int:
    bits = 0
    for core in order.pus:
        bits |= core.bits
    return bits
