"""Gres: what gres.conf says of the GPUs of each node.

Source: gres.conf(5) of 22.05.
"""

import re
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.slurm.config import Config, ConfigLine
from homenode.tools.slurm_hostlist import expand_hostlist

_COUNT = re.compile(r"([0-9]{1,15})([kmgtp]?)\Z", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class GresLine:
    """One line of gres.conf.

    nodes: whom it is about; None = every node that reads the file. name: "gpu", "nic", ...; None
    on a line that only sets AutoDetect. files: device files in their order. cores: Slurm's core
    numbers (Cores=, or CPUs= as it was once called); None where not given. links: of the one
    device of the line to each other one.
    """

    line: ConfigLine
    nodes: tuple[str, ...] | None
    autodetect: str | None
    name: str | None
    type: str | None
    files: tuple[str, ...]
    cores: CpuSet | None
    links: tuple[int, ...] | None
    count: int | None
    is_multiple: bool = False

    @property
    def devices(self) -> int:
        """How many devices the line is about."""
        if self.is_multiple:
            return 1
        return len(self.files) if self.files else self.count if self.count is not None else 1


def gres_lines(config: Config) -> tuple[GresLine, ...]:
    """The lines of a gres.conf. Raises ParseError that names the line."""
    return tuple(_gres_line(line, line.source) for line in config.lines)


def lines_for(lines: tuple[GresLine, ...], node: str) -> tuple[GresLine, ...]:
    """The lines about the GPUs of one node, in their order."""
    return tuple(
        line for line in lines if line.name == "gpu" and (line.nodes is None or node in line.nodes)
    )


def autodetect_for(lines: tuple[GresLine, ...], node: str) -> str | None:
    """What detects the node's GPUs: its own setting, else that of all; None where nothing does."""
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


def _gres_line(line: ConfigLine, source: str) -> GresLine:
    def listed(*keys: str) -> tuple[str, ...]:
        value = line.get(*keys)
        return () if value is None else expand_hostlist(value, source, line=line.first)

    nodes = line.get("nodename")
    cores = line.get("cores", "cpus")
    links = line.get("links")
    count = line.get("count")
    autodetect = line.get("autodetect")
    multiple = listed("multiplefiles")
    return GresLine(
        line=line,
        nodes=None if nodes is None else expand_hostlist(nodes, source, line=line.first),
        autodetect=None if autodetect is None else autodetect.lower(),
        name=line.get("name"),
        type=line.get("type"),
        files=multiple or listed("file"),
        cores=None if cores is None else _cores(cores, source, line.first),
        links=None if links is None else _links(links, source, line.first),
        count=None if count is None else _count(count, source, line.first),
        is_multiple=bool(multiple),
    )


def _cores(text: str, source: str, line: int) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except ParseError as error:
        raise ParseError(source, "core numbers such as 0-15,32", error.found, line=line) from None


def _links(text: str, source: str, line: int) -> tuple[int, ...]:
    numbers = []
    for item in text.split(","):
        digits = item.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 5):
            raise ParseError(source, "Links= with a number for each GPU", item, line=line)
        numbers.append(int(item))
    return tuple(numbers)


def _count(text: str, source: str, line: int) -> int:
    match = _COUNT.match(text)
    if match is None:
        raise ParseError(source, "a count such as 8 or 10G", text, line=line)
    return int(match[1]) << 10 * " kmgtp".index(match[2].lower() or " ")
