"""Gres: the GPUs of each node in gres.conf and slurm.conf, in their order.

Slurm numbers devices by their place in its own list: IDX of a job, and SLURM_JOB_GPUS. Manual lines
keep their order, file by file; devices of AutoDetect are sorted by PCI address. Seen: 22.05.8,
File=.../gpu[7,5,6,4] before gpu[3,2] and gpu[0-1].
Source: gres.conf(5) of 22.05, AutoDetect, Cores.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from homenode.cluster.slurm.config import GRES_KEYS, ConfigLine, SlurmConfig, reject_misspelt_keys
from homenode.cluster.slurm.scontrol import parse_gpu_types
from homenode.cluster.slurm.slurm_nodes import (
    Hostlists,
    NodeShape,
    compress_hostlist,
    has_slices,
    node_shape,
)
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError

_COUNT = re.compile(r"([0-9]{1,15})([kmgtp]?)\Z", re.IGNORECASE | re.ASCII)


MAX_LOOKS = 10_000_000
"""Lines without NodeName=, times nodes."""


class GresLine(Struct, frozen=True, eq=False):
    line: ConfigLine
    nodes: Mapping[str, None] | None  # whom it is about; None = every node that reads the file
    autodetect: str | None
    name: str | None  # "gpu", "nic", ...; None on a line that only sets AutoDetect
    type: str | None
    files: tuple[str, ...]  # device files in their order
    # Slurm's core numbers (Cores=, or CPUs= as it was once called); None if not given. It is
    # compared by its line: some have thousands of names.
    cores: CpuSet | None
    count: int | None
    is_multiple: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GresLine) and self.line == other.line

    def __hash__(self) -> int:
        return hash(self.line)

    @property
    def devices(self) -> int:
        if self.is_multiple:
            return 1
        return len(self.files) if self.files else self.count if self.count is not None else 1


def parse_gres_lines(config: SlurmConfig) -> tuple[GresLine, ...]:
    """Return the lines of a gres.conf. Raises ParseError that names the line."""
    reject_misspelt_keys(config.lines, GRES_KEYS)
    lists = Hostlists()
    return tuple(_parse_gres_line(line, line.source, lists) for line in config.lines)


def group_lines(lines: tuple[GresLine, ...], nodes: int) -> Callable[[str], tuple[GresLine, ...]]:
    """Return a function from a node's name to the lines that name it or no node, in order.

    It indexes the lines: searching all of them for each node of a large cluster takes minutes.
    nodes: how many will be looked up. Raises ParseError for too many lines that are about all of
    them.
    """
    of_all = [at for at, line in enumerate(lines) if line.nodes is None]
    by_node: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        for node in line.nodes or ():
            by_node.setdefault(node, []).append(at)
    if len(of_all) * nodes > MAX_LOOKS:
        expected = "fewer lines without NodeName= for so many nodes"
        source = lines[of_all[-1]].line
        raise ParseError(source.source, expected, str(len(of_all)), line=source.first)
    return lambda node: tuple(lines[at] for at in sorted((*of_all, *by_node.get(node, ()))))


def find_lines(lines: tuple[GresLine, ...], node: str) -> tuple[GresLine, ...]:
    """Return the lines about the GPUs of one node, in their order."""
    return tuple(
        line for line in lines if line.name == "gpu" and (line.nodes is None or node in line.nodes)
    )


def find_autodetect(lines: tuple[GresLine, ...], node: str) -> str | None:
    """Return the detector of the node's GPUs: its own setting, else that of all nodes; or None."""
    of_all: str | None = None
    for line in lines:
        if line.autodetect is None:
            continue
        if line.nodes is not None and node in line.nodes:
            return None if line.autodetect == "off" else line.autodetect
        # On a line about GPUs it is for all nodes too: it is the line's nodes that count.
        if line.nodes is None and line.name in (None, "gpu"):
            of_all = line.autodetect
    return None if of_all in (None, "off") else of_all


def _parse_gres_line(line: ConfigLine, source: str, lists: Hostlists) -> GresLine:
    def expand(*keys: str) -> tuple[str, ...]:
        value = line.get(*keys)
        return () if value is None else lists.expand(value, source, line=line.first)

    nodes = line.get("nodename")
    cores = line.get("cores", "cpus")
    count = line.get("count")
    autodetect = line.get("autodetect")
    multiple = expand("multiplefiles")
    files = multiple or expand("file")
    device_count = None if count is None else _count(count, source, line.first)
    if files and not multiple and device_count not in (None, len(files)):
        expected = f"Count={len(files)}, the number of files in File=, or no Count="
        raise ParseError(source, expected, f"Count={count}", line=line.first)
    return GresLine(
        line=line,
        nodes=None
        if nodes is None
        else dict.fromkeys(lists.expand(nodes, source, line=line.first)),
        autodetect=None if autodetect is None else autodetect.lower(),
        name=line.get("name"),
        type=line.get("type"),
        files=files,
        cores=None if cores is None else _parse_cores(cores, source, line.first),
        count=device_count,
        is_multiple=bool(multiple),
    )


def _parse_cores(text: str, source: str, line: int) -> CpuSet:
    """Parse core numbers, in brackets or not: slurmctld accepts both."""
    try:
        has_brackets = text.startswith("[") and text.endswith("]")
        return CpuSet.parse(text[1:-1] if has_brackets else text)
    except ParseError as error:
        raise ParseError(source, "core numbers such as 0-15,32", error.found, line=line) from None


def _count(text: str, source: str, line: int) -> int:
    match = _COUNT.match(text)
    if match is None:
        raise ParseError(source, "a count such as 8 or 10G", text, line=line)
    return int(match[1]) << 10 * " kmgtp".index(match[2].lower() or " ")


_NUMBERED = re.compile(r"/dev/nvidia([0-9]{1,3})\Z|/dev/dri/renderD([0-9]{1,3})\Z", re.ASCII)
_FIRST_RENDER_NODE = 128


def place_files(lines: Sequence[GresLine]) -> tuple[tuple[GresLine, str | None, int], ...]:
    """Return (line, device file, the GPU's number) of each GPU that the lines list, in their order.

    /dev/nvidia3 is GPU 3 and /dev/dri/renderD129 GPU 1; any other file is the next one. Drivers
    number by address; a line with Count= alone has no files. The files of MultipleFiles= are one
    device: a GPU, or a MIG slice, which is at its GPU's number.
    """
    places: list[tuple[GresLine, str | None, int]] = []
    for line in lines:
        files: tuple[str | None, ...] = line.files or (None,) * min(line.devices, 1024)
        if line.is_multiple:
            files = (next((file for file in line.files if _NUMBERED.match(file)), line.files[0]),)
        for file in files:
            match = _NUMBERED.match(file) if file else None
            number = len(places)
            if match is not None:
                number = int(match[1]) if match[1] else int(match[2]) - _FIRST_RENDER_NODE
            places.append((line, file, number))
    return tuple(places)


def _has_several_types(lines: Sequence[GresLine]) -> bool:
    return len({line.type for line in lines}) > 1


class DeviceOrder(Struct, frozen=True):
    """The device order of a cluster's gres.conf."""

    lines: tuple[GresLine, ...]

    def list_numbers(self, node: str, *, sliced: bool = False) -> tuple[int, ...] | None:
        """Return the driver's number of the GPU at each place of a node's list.

        A MIG slice (MultipleFiles) is at its GPU's number; sliced: the job has slices. None if
        the lines give no order, and () where slurm.conf gives it: of several types, Slurm lists the
        first of Gres= first.
        """
        lines = find_lines(self.lines, node)
        has_order = not sliced or any(line.is_multiple for line in lines)
        if not lines or not has_order or find_autodetect(self.lines, node) is not None:
            return None
        if _has_several_types(lines):
            return ()
        file_places = place_files(lines)
        if any(file is None for _, file, _ in file_places):
            return None
        return tuple(number for _, _, number in file_places)

    def list_cores(self, node: str) -> tuple[CpuSet | None, ...]:
        """The Cores= of the device at each position of a node's list; () without an order."""
        lines = find_lines(self.lines, node)
        if find_autodetect(self.lines, node) is not None or _has_several_types(lines):
            return ()
        places = place_files(lines)
        return tuple(line.cores for line, _, _ in places)


def read_device_order(gres: SlurmConfig) -> DeviceOrder:
    """Return the device order of a gres.conf. Raises ParseError that names the line, InputError for
    a file without GPUs."""
    lines = parse_gres_lines(gres)
    if not any(line.name == "gpu" or line.autodetect is not None for line in lines):
        note = "".join(
            f"; Include {other.path} was not read: {other.reason}" for other in gres.not_read[:1]
        )
        raise InputError(f"{gres.source}: no line with Name=gpu or AutoDetect={note}")
    return DeviceOrder(lines)


class NodeDefinition(Struct, frozen=True):
    """A NodeName line of slurm.conf, completed by the NodeName=DEFAULT lines before it."""

    names: tuple[str, ...]
    line: ConfigLine
    shape: NodeShape | None  # None: the line leaves it to slurmd
    gres: str | None  # Gres= as written

    @property
    def gpu_types(self) -> Mapping[str, int]:
        """Number of GPUs of each type in Gres=; empty without GPUs."""
        return {} if self.gres is None else parse_gpu_types(self.gres)


def list_node_definitions(config: SlurmConfig) -> tuple[NodeDefinition, ...]:
    """Return the nodes of a slurm.conf. Raises ParseError that names the line."""
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
    """Nodes with equal entries in both files."""

    names: tuple[str, ...]  # () if the files name no nodes
    lines: tuple[GresLine, ...]  # lines of gres.conf about their GPUs
    autodetect: str | None  # what detects their GPUs
    definition: NodeDefinition | None  # their line of slurm.conf

    @property
    def subject(self) -> str:
        return compress_hostlist(self.names) if self.names else "every node"

    @property
    def is_sliced(self) -> bool:
        """Whether GPUs are divided into MIG slices, each a device to Slurm."""
        gres = "" if self.definition is None else self.definition.gres or ""
        return has_slices(gres) or any(
            line.is_multiple or has_slices(line.type or "") for line in self.lines
        )

    @property
    def configured_gpus(self) -> Mapping[str, int]:
        return {} if self.definition is None else self.definition.gpu_types


def group_nodes(
    gres: SlurmConfig, slurm: SlurmConfig, nodes: Sequence[str] = ()
) -> tuple[NodeClass, ...]:
    """Return the GPU nodes of both files. nodes: only these; () = all nodes with GPUs, else all
    nodes. Raises ParseError that names a line, InputError for a node that is in neither file."""
    lines = parse_gres_lines(gres)
    node_of_name = {name: node for node in list_node_definitions(slurm) for name in node.names}
    named = [name for name, node in node_of_name.items() if node.gpu_types]
    named += [name for line in lines if line.name == "gpu" for name in line.nodes or ()]
    has_lines = any(line.name == "gpu" or line.autodetect for line in lines)
    names = tuple(dict.fromkeys(nodes or named or node_of_name))
    if unknown := [name for name in nodes if name not in node_of_name and name not in named]:
        raise InputError(
            f"no node {compress_hostlist(unknown)} in {slurm.source} or {gres.source}",
            hint=f"--nodes {compress_hostlist(named or node_of_name)[:200]}",
        )
    lines_of = group_lines(lines, len(names))
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names or (("",) if has_lines else ()):
        node_lines = lines_of(name)
        node = node_of_name.get(name)
        key = (find_lines(node_lines, name), find_autodetect(node_lines, name), node and node.line)
        groups.setdefault(key, []).append(name)
    return tuple(
        NodeClass(
            tuple(group) if names else (),
            find_lines(lines_of(group[0]), group[0]),
            find_autodetect(lines_of(group[0]), group[0]),
            node_of_name.get(group[0]),
        )
        for group in groups.values()
    )
