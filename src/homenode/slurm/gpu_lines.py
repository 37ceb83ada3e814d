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
from homenode.tools.slurm_hostlist import compress_hostlist
from homenode.topology import Host

_NUMBERED = re.compile(r"/dev/nvidia([0-9]{1,3})\Z|/dev/dri/renderD([0-9]{1,3})\Z", re.ASCII)
_FIRST_RENDER_NODE = 128
_OWN_WORDS = frozenset(
    """
    nodename name type file multiplefiles cores cpus links count autodetect
""".split()
)
"""Of a line about GPUs: what right_lines writes itself, or what a line with files needs not."""


@dataclass(frozen=True, slots=True)
class RightGpu:
    """What is right for one GPU. node, cores: None where the host does not give its node.

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


def members_of(
    lines: Sequence[GresLine], gpus: Sequence[RightGpu], *, detected: bool
) -> tuple[int, ...]:
    """Numbers of the GPUs that a node has to Slurm, in its order: all that are detected, or those
    of the lines by hand."""
    if detected:
        return tuple(gpu.index for gpu in gpus)
    return tuple(dict.fromkeys(number for _, _, number in placed_files(lines)))


def links_among(gpu: RightGpu, members: Sequence[int]) -> tuple[int, ...] | None:
    """A GPU's links to each of these; None where none are known."""
    if gpu.links is None or any(not 0 <= number < len(gpu.links) for number in members):
        return None
    return tuple(gpu.links[number] for number in members)


def right_lines(
    names: Sequence[str],
    lines: Sequence[GresLine],
    gpus: Sequence[RightGpu],
    *,
    links: bool,
    detected: bool = False,
) -> tuple[str, ...]:
    """Lines that say the same GPUs with the right cores; with `links` a line for each GPU.

    () where a GPU is not named by a file of the machine's: nothing is left out of a file. What
    lines say next to (Flags=) is kept, and their Cores= where the machine gives none.
    """
    groups: list[tuple[GresLine, CpuSet | None, tuple[int, ...] | None, list[str]]] = []
    members = members_of(lines, gpus, detected=detected)
    for line, file, number in placed_files(lines):
        gpu = gpus[number] if 0 <= number < len(gpus) else None
        if gpu is None or file is None:
            return ()
        own = links_among(gpu, members) if links and not line.is_multiple else None
        cores = line.cores if gpu.cores is None else gpu.cores
        last = groups[-1] if groups else None
        if last and own is None and not line.is_multiple and _alike(last, line, cores):
            last[3].append(file)
        else:
            groups.append((line, cores, own, [file]))
    return tuple(_line(names, *group) for group in groups)


def _alike(
    group: tuple[GresLine, CpuSet | None, tuple[int, ...] | None, list[str]],
    line: GresLine,
    cores: CpuSet | None,
) -> bool:
    first = group[0]
    same = (first.type, _neighbours(first)) == (line.type, _neighbours(line))
    return same and group[1:3] == (cores, None) and not first.is_multiple


def _neighbours(line: GresLine) -> tuple[str, ...]:
    """Words that say nothing of which GPUs there are, as they are to be written."""
    said = [(key, value) for key, value in line.line.words if key not in _OWN_WORDS]
    quoted = ((key, f'"{value}"' if " " in value else value) for key, value in said)
    return tuple(f"{key.capitalize()}={value}" for key, value in quoted)


def looks_like_pus(cores: CpuSet, right: CpuSet, order: CoreOrder) -> bool:
    """True where the numbers are right as PUs and wrong as cores, as nvidia-smi topo -m prints."""
    every = CpuSet.union(order.pus)
    return cores != right and cores <= every and order.numbers(cores) == right


def _line(
    names: Sequence[str],
    line: GresLine,
    cores: CpuSet | None,
    links: tuple[int, ...] | None,
    files: Sequence[str],
) -> str:
    words = [f"NodeName={compress_hostlist(names)}"] if names else []
    words.append("Name=gpu")
    if line.type is not None:
        words.append(f"Type={line.type}")
    if line.is_multiple:
        words.append(f"MultipleFiles={compress_hostlist(line.files)}")
    else:
        words.append(f"File={compress_hostlist(files)}")
    if cores is not None:
        words.append(f"Cores={cores}")
    if links is not None:
        words.append(f"Links={','.join(map(str, links))}")
    words += _neighbours(line)
    return " ".join(words)


def _link_counts(host: Host) -> dict[frozenset[Bdf], int]:
    """Bonded links of each pair of GPUs; 1 where the source shows a link and not how many."""
    counts: dict[frozenset[Bdf], int] = {}
    for link in host.links:
        if link.b is not None and link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            pair = frozenset((link.a, link.b))
            counts[pair] = max(counts.get(pair, 0), link.count or 1)
    return counts
