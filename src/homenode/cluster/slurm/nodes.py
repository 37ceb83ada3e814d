"""Nodes: what Slurm takes the shape of its nodes to be, and nodes of which it says the same."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from homenode.cluster.slurm.config import ConfigLine, SlurmConfig
from homenode.cluster.slurm.gres import (
    GresLine,
    autodetect_for,
    gres_lines,
    lines_by_node,
    lines_for,
)
from homenode.errors import InputError, ParseError
from homenode.machine.tools.scontrol import gpu_types, has_slices
from homenode.machine.tools.slurm_nodes import Hostlists, NodeShape, compress_hostlist, node_shape


class NodeDefinition(Struct, frozen=True):
    """A NodeName line of slurm.conf. shape: None where the line leaves it to slurmd.

    gpu_types: how many GPUs of each type Gres= promises; empty where it names none. sliced: some
    of these are MIG slices. memory_mib: RealMemory=; None where it is not given.
    """

    names: tuple[str, ...]
    line: ConfigLine
    shape: NodeShape | None
    gpu_types: Mapping[str, int]
    sliced: bool = False
    memory_mib: int | None = None

    @property
    def gpus(self) -> int | None:
        """How many; None where Gres= names none."""
        return sum(self.gpu_types.values()) if self.gpu_types else None


def node_definitions(config: SlurmConfig) -> tuple[NodeDefinition, ...]:
    """The nodes of a slurm.conf; NodeName=DEFAULT lines fill in what later ones leave out.

    Raises ParseError that names the line.
    """
    defaults: dict[str, str] = {}
    found = []
    lists = Hostlists()
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
                lists.expand(name, line.source, line=line.first),
                line,
                node_shape(values, line.source, line.first),
                {} if gres is None else gpu_types(gres),
                gres is not None and has_slices(gres),
                _memory(values.get("realmemory"), line),
            )
        )
    return tuple(found)


def defines_nodes(config: SlurmConfig) -> bool:
    """Whether a slurm.conf, as far as it was read, has lines about nodes."""
    return any(line.words[0][0] == "nodename" for line in config.lines)


def _memory(text: str | None, line: ConfigLine) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ParseError(line.source, "RealMemory= with a number of MiB", text, line=line.first)
    return int(text)


class NodeClass(Struct, frozen=True):
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


def node_classes(
    gres: SlurmConfig, slurm: SlurmConfig, wanted: Sequence[str] = ()
) -> tuple[NodeClass, ...]:
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
    lines_of = lines_by_node(lines, len(names))
    for name in names:
        one, of = defined.get(name), lines_of(name)
        key = (lines_for(of, name), autodetect_for(of, name), one and one.line)
        groups.setdefault(key, []).append(name)
    if not names and any(line.name == "gpu" or line.autodetect for line in lines):
        groups[lines_for(lines, ""), autodetect_for(lines, ""), None] = []
    return tuple(
        NodeClass(
            tuple(own),
            lines_for(lines_of(own[0] if own else ""), own[0] if own else ""),
            autodetect_for(lines_of(own[0] if own else ""), own[0] if own else ""),
            defined.get(own[0]) if own else None,
        )
        for own in groups.values()
    )
