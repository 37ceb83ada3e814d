"""Nodes: what slurm.conf and gres.conf define for each node, grouped by equal definitions."""

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
from homenode.cluster.slurm.tools.scontrol import gpu_types, has_slices
from homenode.cluster.slurm.tools.slurm_nodes import (
    Hostlists,
    NodeShape,
    compress_hostlist,
    node_shape,
)
from homenode.errors import InputError


class NodeDefinition(Struct, frozen=True):
    """A NodeName line of slurm.conf, with what NodeName=DEFAULT lines before it fill in."""

    names: tuple[str, ...]
    line: ConfigLine
    shape: NodeShape | None  # None: the line leaves it to slurmd
    gres: str | None  # Gres= as written

    @property
    def gpu_types(self) -> Mapping[str, int]:
        """How many GPUs of each type Gres= promises; empty where it names none."""
        return {} if self.gres is None else gpu_types(self.gres)


def node_definitions(config: SlurmConfig) -> tuple[NodeDefinition, ...]:
    """The nodes of a slurm.conf. Raises ParseError that names the line."""
    defaults: dict[str, str] = {}
    definitions = []
    lists = Hostlists()
    for line in config.lines:
        name = line.get("nodename")
        if name is None or line.words[0][0] != "nodename":
            continue
        if name.upper() == "DEFAULT":
            defaults |= dict(line.words)
            continue
        values = {**defaults, **dict(line.words)}
        names = lists.expand(name, line.source, line=line.first)
        shape = node_shape(values, line.source, line.first)
        definitions.append(NodeDefinition(names, line, shape, values.get("gres")))
    return tuple(definitions)


class NodeClass(Struct, frozen=True):
    """Nodes of which both files say the same."""

    names: tuple[str, ...]  # () where the files name no nodes
    lines: tuple[GresLine, ...]  # of gres.conf, about their GPUs
    autodetect: str | None  # what detects their GPUs
    definition: NodeDefinition | None  # their line of slurm.conf

    @property
    def subject(self) -> str:
        return compress_hostlist(self.names) if self.names else "every node"

    @property
    def is_sliced(self) -> bool:
        """Whether GPUs are cut into MIG slices, each a device to Slurm."""
        gres = "" if self.definition is None else self.definition.gres or ""
        return has_slices(gres) or any(
            line.is_multiple or has_slices(line.type or "") for line in self.lines
        )

    @property
    def promised_gpus(self) -> Mapping[str, int]:
        return {} if self.definition is None else self.definition.gpu_types

    def owns(self, line: GresLine, group_count: int) -> bool:
        """Whether a line is about no other nodes, so that it may be rewritten."""
        return group_count == 1 if line.nodes is None else set(line.nodes) <= set(self.names)


def node_classes(
    gres: SlurmConfig, slurm: SlurmConfig, nodes: Sequence[str] = ()
) -> tuple[NodeClass, ...]:
    """The GPU nodes of both files. nodes: these only; () = all with GPUs, else all that there are.

    Raises ParseError that names a line, InputError for a node that neither file names.
    """
    lines = gres_lines(gres)
    defined = {name: node for node in node_definitions(slurm) for name in node.names}
    named = [name for name, node in defined.items() if node.gpu_types]
    named += [name for line in lines if line.name == "gpu" for name in line.nodes or ()]
    has_lines = any(line.name == "gpu" or line.autodetect for line in lines)
    names = tuple(dict.fromkeys(nodes or named or defined))
    for name in nodes:
        if name not in defined and name not in named:
            raise InputError(f"no node {name} in {slurm.source} or {gres.source}")
    lines_of = lines_by_node(lines, len(names))
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names or (("",) if has_lines else ()):
        node_lines = lines_of(name)
        node = defined.get(name)
        key = (lines_for(node_lines, name), autodetect_for(node_lines, name), node and node.line)
        groups.setdefault(key, []).append(name)
    return tuple(
        NodeClass(
            tuple(group) if names else (),
            lines_for(lines_of(group[0]), group[0]),
            autodetect_for(lines_of(group[0]), group[0]),
            defined.get(group[0]),
        )
        for group in groups.values()
    )
