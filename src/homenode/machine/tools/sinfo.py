"""Sinfo: the nodes of each partition, and what Slurm takes each node for.

    sinfo --noheader --Node --format="%N|%P|%T|%c|%m|%G"
    sinfo --all --noheader --Node --format="%X|%Y|%Z|%c|%N"

Seen: 22.05.8. Source: sinfo(1). Plain columns, not --json: their layout is the same in all
versions. None of these columns is a comment, a reason or a feature.
"""

import re

from msgspec import Struct

from homenode.errors import ParseError
from homenode.machine.tools.scontrol import NodeShape, node_shape

COMMAND = ("sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%G")
SHAPES_COMMAND = ("sinfo", "--all", "--noheader", "--Node", "--format=%X|%Y|%Z|%c|%N")
MAX_LINES = 1_000_000

_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_GRES = re.compile(r"([A-Za-z0-9_.-]+)(?::([A-Za-z0-9_.+-]+))?:(\d{1,6})(?:\(.*\))?", re.ASCII)
# As drivers name profiles: 1g.10gb, 1g.10gb+me, 3g.40gb; Slurm's AutoDetect: a100_1g.10gb.
_SLICE = re.compile(r"(?:\w+_)?\d+g\.\d+gb", re.ASCII)
# As sinfo(1) marks states: "idle*" does not respond, "idle~" is powered down, and so on.
_MARKS = "*~#!%$@^-+"


class ClusterNode(Struct, frozen=True):
    """A node as Slurm declares it. gpus: whole ones; None where it declares none.

    state: as sinfo prints it, in lower case, without its marks. gpu_type: of the whole GPUs, where
    MIG slices stand next to them: else a job that asks for a GPU may get a slice.
    """

    name: str
    partition: str
    is_default: bool
    state: str
    cpus: int
    memory_mib: int
    gpus: int | None
    gpu_type: str | None = None


def parse_nodes(text: str) -> tuple[ClusterNode, ...]:
    """A record for each node and partition. Lines that are none are left out."""
    found = []
    for line in text.split("\n")[:MAX_LINES]:
        fields = line.strip().split("|")
        if len(fields) != 6 or not _NODE_NAME.fullmatch(fields[0]):
            continue
        name, partition, state, cpus, memory, offered = fields
        if not (cpus.isdigit() and memory.rstrip("+").isdigit()):
            continue
        found.append(
            ClusterNode(
                name,
                partition.rstrip("*"),
                partition.endswith("*"),
                state.rstrip(_MARKS).lower(),
                int(cpus),
                int(memory.rstrip("+")),
                *_gpus(offered),
            )
        )
    return tuple(found)


def parse_shapes(text: str) -> dict[str, NodeShape]:
    """Shapes by node name. Raises ParseError for a line that shows none.

    >>> parse_shapes("2|16|2|64|gpu01\\n2|16|2|64|gpu01\\n")
    {'gpu01': NodeShape(sockets=2, cores_per_socket=16, threads_per_core=2, cpus=64)}
    """
    shapes: dict[str, NodeShape] = {}
    for number, line in enumerate(filter(None, text.split("\n")), start=1):
        *sizes, name = line.strip().split("|", 4)
        keys = ("sockets", "corespersocket", "threadspercore", "cpus")
        shape = node_shape(dict(zip(keys, sizes, strict=False)), "sinfo", number)
        if shape is None or not name:
            raise ParseError("sinfo", "SOCKETS|CORES|THREADS|CPUS|NODE", line, line=number)
        shapes[name] = shape
    return shapes


def _gpus(offered: str) -> tuple[int | None, str | None]:
    """Whole GPUs of a text, and their type where MIG slices stand next to them.

    >>> _gpus("gpu:h100:8(S:0-1)"), _gpus("gpu:1g.10gb:7(S:0,1),gpu:a100:6,nic:2")
    ((8, None), (6, 'a100'))
    >>> _gpus("(null)"), _gpus("gpu:4")
    ((None, None), (4, None))
    """
    # A comma inside parentheses lists sockets: gpu:8(S:0,1)
    parts = re.sub(r"\([^()]*\)", "", offered).split(",")
    gpus = [found for part in parts if (found := _GRES.fullmatch(part)) and found[1] == "gpu"]
    slices = [one for one in gpus if one[2] and _SLICE.match(one[2])]
    whole = [one for one in gpus if one not in slices]
    types = {one[2] for one in whole}
    only = types.pop() if slices and len(types) == 1 else None
    return (sum(int(one[3]) for one in whole) if gpus else None), only
