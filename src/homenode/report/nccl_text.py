"""NcclText: where each device is in a topology file, and what NCCL will do, on a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.cpuset import CpuSet
from homenode.nccl.assemble import Assembled
from homenode.nccl.explanation import (
    Explanation,
    LibraryView,
    Memory,
    Processes,
    Statement,
    named,
)
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import printable

_SHORT = frozenset(
    {"cpu", "devices", "host BDF", "kind", "host node", "guest bus id", "switch", "GPU", "node"}
)


def topology_text(made: Assembled) -> RenderableType:
    """The cpus with their vCPUs, and every device with its two addresses and its switch."""
    cpus = _table("cpu", "vCPUs", "devices")
    for cpu in made.topology.cpus:
        count = sum(not pci.children for child in cpu.children for pci in child.walk())
        cpus.add_row(str(cpu.numa_id), str(cpu.affinity), str(count))
    devices = _table("host BDF", "kind", "host node", "guest bus id", "switch")
    for device in made.devices:
        devices.add_row(
            str(device.bdf),
            str(device.kind),
            str(device.node),
            device.bus_id,
            device.switch or "none",
        )
    return AsciiWhereNeeded(Group(cpus, devices))


def explanation_text(made: Explanation) -> RenderableType:
    """What NCCL will do in a machine: a part for each set of libraries that agree."""
    file = "no topology file" if made.file is None else f"topology file {made.file}"
    parts: list[RenderableType] = [Text(printable(f"{made.machine}, {file}"), style="bold")]
    for view in made.views:
        parts += [Text(""), Text(", ".join(map(named, view.libraries)), style="bold")]
        parts += [_gpus(view), _paths(view)]
        if view.ceilings:
            parts.append(_ceilings(view))
        parts += map(_statement, view.statements)
    if made.memory is not None:
        parts += [Text(""), Text(printable(f"STREAM: {_memory(made.memory)}"), style="dim")]
    elif any(len(view.nodes) for view in made.views):
        parts += [Text(""), Text("ceiling: not computed; --stream gives STREAM of each node")]
    parts += [Text(printable(f"not known: {gap}"), style="dim") for gap in made.gaps]
    return AsciiWhereNeeded(Group(*parts))


def _statement(one: Statement) -> Text:
    of = f" ({', '.join(one.libraries)})" if one.libraries else ""
    return Text.assemble(
        (printable(f"{one.subject}{of}: "), "bold"),
        printable(one.text),
        (f" [{one.source}]", "dim"),
    )


_BUFFERS = {
    Processes.ONE: "buffers: one process",
    Processes.SEVERAL: "a process each",
    Processes.ONE_ON_FIRST: "bound to the first node",
}


def _gpus(view: LibraryView) -> Table:
    ways = dict.fromkeys(one.processes for one in view.buffers)
    table = _table("GPU", "node", "threads on CPUs", *(_BUFFERS[one] for one in ways))
    node_of = {gpu: node.numa_id for node in view.nodes for gpu in node.gpus}
    for one in view.bindings:
        places = [
            f"{'node' if len(buffers.nodes) == 1 else 'any of'} {CpuSet(buffers.nodes)}"
            for buffers in view.buffers
            if buffers.gpu == one.gpu
        ]
        cpus = "not bound" if one.cpus is None else str(one.cpus)
        table.add_row(str(one.gpu), str(node_of[one.gpu]), cpus, *places)
    return table


def _paths(view: LibraryView) -> Table:
    table = _table("pairs", "path", "GB/s", "through the host", "GB/s", "P2P")
    for one in view.pairs:
        table.add_row(
            str(len(one.pairs)),
            one.direct,
            f"{one.direct_gb_per_s:g}",
            one.path,
            f"{one.gb_per_s:g}",
            "if the driver allows" if one.peers else f"no: beyond {one.limit}",
        )
    return table


def _ceilings(view: LibraryView) -> Table:
    table = _table("bus bandwidth that memory allows", "GB/s")
    for one in view.ceilings:
        least, most = one.least_bytes_per_s / 1e9, one.most_bytes_per_s / 1e9
        text = f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"
        table.add_row(str(one.processes), text)
    return table


def _memory(memory: Memory) -> str:
    rates = ", ".join(f"{rate / 1e9:.0f}" for rate in memory.bytes_per_s)
    return f"{rates} GB/s by node ({memory.source})"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(Text(printable(heading)), no_wrap=heading in _SHORT, overflow="fold")
    return table
