"""Nodes: what Slurm takes the shape of its nodes to be, and nodes of which it says the same."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.errors import InputError, ParseError
from homenode.slurm.config import Config, ConfigLine
from homenode.slurm.gres import (
    GresLine,
    autodetect_for,
    gpu_count,
    gres_lines,
    has_slices,
    lines_for,
)
from homenode.slurm.hostlist import compress_hostlist, expand_hostlist

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


@dataclass(frozen=True, slots=True)
class NodeClass:
    """names: () where the files name no nodes. lines: of gres.conf, about their GPUs.

    autodetect: what detects them. definition: their line of slurm.conf; None where it has none.
    """

    names: tuple[str, ...]
    lines: tuple[GresLine, ...]
    autodetect: str | None
    definition: NodeDefinition | None

    @property
    def subject(self) -> str:
        return compress_hostlist(self.names) if self.names else "every node"

    @property
    def sliced(self) -> bool:
        """True where GPUs are cut into MIG slices, each a device to Slurm."""
        defined = self.definition is not None and self.definition.sliced
        return defined or any(
            line.is_multiple or has_slices(line.type or "") for line in self.lines
        )

    @property
    def owns_lines(self) -> bool:
        """True where no line is about other nodes too, so that it may be rewritten."""
        mine = set(self.names)
        return all(line.nodes is None or set(line.nodes) <= mine for line in self.lines)


def node_classes(gres: Config, slurm: Config, wanted: Sequence[str] = ()) -> tuple[NodeClass, ...]:
    """The GPU nodes of both files, those of which both say the same together.

    wanted: only these; () = all. Raises ParseError that names a line, InputError for a node that
    neither file names.
    """
    lines = gres_lines(gres)
    definitions = node_definitions(slurm)
    defined = {name: one for one in definitions for name in one.names}
    named = [name for name, one in defined.items() if one.gpus is not None]
    named += [name for line in lines if line.name == "gpu" for name in line.nodes or ()]
    names = tuple(dict.fromkeys(wanted or named))
    for name in wanted:
        if name not in defined and name not in named:
            raise InputError(
                f"{slurm.source}: expected a node {name}, found none there or in {gres.source}"
            )
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        one = defined.get(name)
        key = (lines_for(lines, name), autodetect_for(lines, name), one and one.line)
        groups.setdefault(key, []).append(name)
    if not names and any(line.name == "gpu" or line.autodetect for line in lines):
        groups[lines_for(lines, ""), autodetect_for(lines, ""), None] = []
    return tuple(
        NodeClass(
            tuple(own),
            lines_for(lines, own[0] if own else ""),
            autodetect_for(lines, own[0] if own else ""),
            defined.get(own[0]) if own else None,
        )
        for own in groups.values()
    )
