"""Nodes: what Slurm takes the shape of its nodes to be.

Source: slurm.conf(5), NODE CONFIGURATION; scontrol(1), show node.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.slurm.config import Config, ConfigLine
from homenode.slurm.gres import gpu_count, has_slices
from homenode.slurm.hostlist import expand_hostlist

_SHOWN = re.compile(r"(?:^|\s)([A-Za-z:]+)=(\S*)")


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Sockets x cores x threads. cpus: Slurm's CPUs; as many as cores where it schedules cores.

    A core has as many abstract ids as threads either way (seen: 22.05.8, CPUs=32 of 2 x 16 x 2,
    where a job of 4 CPUs is given as CPU_IDs=0-7; scontrol counts by ThreadsPerCore alone).
    """

    sockets: int
    cores_per_socket: int
    threads_per_core: int
    cpus: int

    @property
    def cores(self) -> int:
        return self.sockets * self.cores_per_socket

    def __str__(self) -> str:
        return f"{self.sockets} x {self.cores_per_socket} x {self.threads_per_core}"


@dataclass(frozen=True, slots=True)
class NodeDefinition:
    """A NodeName line of slurm.conf. shape: None where the line leaves it to slurmd.

    gpus: how many; None where Gres= names none. sliced: some of these are MIG slices.
    """

    names: tuple[str, ...]
    line: ConfigLine
    shape: NodeShape | None
    gpus: int | None
    sliced: bool = False


def node_definitions(config: Config) -> tuple[NodeDefinition, ...]:
    """The nodes of a slurm.conf; NodeName=DEFAULT lines fill in what later ones leave out.

    Raises ParseError that names the line.
    """
    defaults: dict[str, str] = {}
    found = []
    for line in config.lines:
        name = line.get("nodename")
        if name is None or line.words[0][0] != "nodename":
            continue
        if name.upper() == "DEFAULT":
            defaults |= dict(line.words)
            continue
        values = {**defaults, **dict(line.words)}
        gres = values.get("gres")
        found.append(
            NodeDefinition(
                expand_hostlist(name, line.source, line=line.first),
                line,
                _shape(values, line.source, line.first),
                None if gres is None else gpu_count(gres),
                gres is not None and has_slices(gres),
            )
        )
    return tuple(found)


def shown_shapes(text: str, source: str) -> dict[str, NodeShape]:
    """Shapes by node name from `scontrol show node`, in its usual layout or with --oneliner.

    Raises ParseError for a node whose numbers are no numbers.
    """
    shapes: dict[str, NodeShape] = {}
    for block in _blocks(text, "NodeName="):
        values = {key.lower(): value for key, value in _SHOWN.findall(block)}
        shape = _shape(
            {
                "sockets": values.get("sockets", ""),
                "corespersocket": values.get("corespersocket", ""),
                "threadspercore": values.get("threadspercore", ""),
                "cpus": values.get("cputot", ""),
            },
            source,
            None,
        )
        if shape is not None and values.get("nodename"):
            shapes[values["nodename"]] = shape
    return shapes


def _blocks(text: str, start: str) -> Iterator[str]:
    """The texts that begin with a line that begins so, up to the next such line."""
    owned: list[str] = []
    for line in text.splitlines():
        if line.startswith(start) and owned:
            yield "\n".join(owned)
            owned = []
        if line.startswith(start) or owned:
            owned.append(line)
    if owned:
        yield "\n".join(owned)


def _shape(values: dict[str, str], source: str, line: int | None) -> NodeShape | None:
    """The shape that the values tell; None where they give too little of it."""

    def number(*keys: str) -> int | None:
        text = next((values[key] for key in keys if values.get(key)), None)
        if text is None:
            return None
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not is_number or not 0 < int(text) <= 65_536:
            raise ParseError(source, f"{keys[0]}= with a number from 1", text, line=line)
        return int(text)

    sockets = number("sockets")
    if sockets is None and (of_board := number("socketsperboard")) is not None:
        sockets = of_board * (number("boards") or 1)
    cores, threads = number("corespersocket"), number("threadspercore")
    cpus = number("cpus", "procs")
    if cores is None and sockets is None:
        # Seen: 22.05.8 takes every CPU for a socket then, of one core.
        return None if cpus is None else NodeShape(cpus, 1, 1, cpus)
    cores, threads = cores or 1, threads or 1
    if sockets is None:
        sockets = max(1, (cpus or cores * threads) // (cores * threads))
    return NodeShape(sockets, cores, threads, cpus or sockets * cores * threads)
