"""NcclText: where each device is in a topology file, and what NCCL will do."""

from collections import Counter

from homenode.cpuset import CpuSet
from homenode.doc import Doc, Part, Section, Span, Table, Text
from homenode.nccl.assemble import Assembled
from homenode.nccl.explanation import (
    Explanation,
    LibraryView,
    Memory,
    Processes,
    Statement,
    named,
)
from homenode.nccl.network import NetworkView, NicPath


def topology_text(made: Assembled) -> Doc:
    """The cpus with their vCPUs, and every device with its two addresses and its switch."""
    cpus = tuple(
        (
            str(cpu.numa_id),
            str(cpu.affinity),
            str(sum(not pci.children for child in cpu.children for pci in child.walk())),
        )
        for cpu in made.topology.cpus
    )
    devices = tuple(
        (str(one.bdf), str(one.kind), str(one.node), one.bus_id, one.switch or "none")
        for one in made.devices
    )
    heads = ("host BDF", "kind", "host node", "guest bus id", "switch")
    return Doc(
        "",
        (
            Table(heads=("cpu", "vCPUs", "devices"), rows=cpus, folds=("vCPUs",)),
            Table(heads=heads, rows=devices),
        ),
    )


def explanation_text(made: Explanation) -> Doc:
    """What NCCL will do in a machine: a part for each set of libraries that agree."""
    file = "no topology file" if made.file is None else f"topology file {made.file}"
    parts: list[Part] = []
    for view in made.views:
        tables: tuple[Part, ...] = (_gpus(view), _paths(view))
        tables += (_ceilings(view),) if view.ceilings else ()
        tables += () if view.network is None else _network(view.network)
        title = ", ".join(map(named, view.libraries))
        parts.append(Section(title, (*tables, *map(_statement, view.statements))))
    if made.memory is not None:
        parts += [Text(""), Text(f"STREAM: {_memory(made.memory)}", "dim")]
    elif not all(_is_by_nvlink(view) for view in made.views):
        parts += [Text(""), Text("ceiling: not computed; --stream gives STREAM of each node")]
    parts += [Text(f"not known: {gap}", "dim") for gap in made.gaps]
    return Doc(f"{made.machine}, {file}", tuple(parts))


def _statement(one: Statement) -> Text:
    of = f" ({', '.join(one.libraries)})" if one.libraries else ""
    return Text((Span(f"{one.subject}{of}: ", "bold"), one.text, Span(f" [{one.source}]", "dim")))


_BUFFERS = {
    Processes.ONE: "buffers: one process",
    Processes.SEVERAL: "a process each",
    Processes.ONE_ON_FIRST: "bound to the first node",
}


def _gpus(view: LibraryView) -> Table:
    ways = dict.fromkeys(_BUFFERS[one.processes] for one in view.buffers)
    node_of = {gpu: node.numa_id for node in view.nodes for gpu in node.gpus}
    rows = []
    for one in view.bindings:
        places = [
            f"{'node' if len(buffers.nodes) == 1 else 'any of'} {CpuSet(buffers.nodes)}"
            for buffers in view.buffers
            if buffers.gpu == one.gpu
        ]
        cpus = "not bound" if one.cpus is None else str(one.cpus)
        rows.append((str(one.gpu), str(node_of[one.gpu]), cpus, *places))
    folds = ("threads on CPUs", *ways)
    return Table(heads=("GPU", "node", *folds), rows=tuple(rows), folds=folds)


def _paths(view: LibraryView) -> Table:
    heads = ("pairs", "path", "GB/s", "through the host", "GB/s there", "P2P")
    rows = tuple(
        (
            str(len(one.pairs)),
            one.direct,
            f"{one.direct_gb_per_s:g}",
            one.path,
            f"{one.gb_per_s:g}",
            "if the driver allows" if one.peers else f"no: beyond {one.limit}",
        )
        for one in view.pairs
    )
    return Table(heads=heads, rows=rows, folds=heads[-1:])


def _is_by_nvlink(view: LibraryView) -> bool:
    return all(one.peers and one.direct in ("NVL", "NVB") for one in view.pairs)


def _network(seen: NetworkView) -> tuple[Part, ...]:
    """A row for each GPU: the NICs that it uses, and its path to them."""
    rows = []
    for gpu in dict.fromkeys(one.gpu for one in seen.paths):
        used = [one for one in seen.paths if one.gpu == gpu and one.chosen]
        others = Counter(one.path for one in seen.paths if one.gpu == gpu and not one.chosen)
        paths = dict.fromkeys(_way(one) for one in used)
        rest = ", ".join(f"{count} {path}" for path, count in sorted(others.items()))
        nics = ", ".join(str(one.nic) for one in used)
        gdr = "yes" if all(one.gdr for one in used) else f"no: beyond {seen.gdr_limit}"
        rates = dict.fromkeys(f"{one.gb_per_s:g}" for one in used)
        rows.append((str(gpu), nics, ", ".join(paths), ", ".join(rates), gdr, rest or "none"))
    heads = ("GPU", "its NICs", "path", "GB/s", "GPUDirect RDMA", "other NICs")
    total = f"between hosts, over the NICs that GPUs choose: {seen.gb_per_s:g} GB/s"
    return (
        Table(heads=heads, rows=tuple(rows), folds=("its NICs", "other NICs")),
        Text((Span(total, "bold"), f"; the slowest is limited by {seen.limit}")),
    )


def _way(one: NicPath) -> str:
    return one.path if one.relay is None else f"{one.path} by {one.relay}"


def _ceilings(view: LibraryView) -> Table:
    rows = []
    for one in view.ceilings:
        least, most = one.least_bytes_per_s / 1e9, one.most_bytes_per_s / 1e9
        text = f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"
        rows.append((str(one.processes), text))
    head = "bus bandwidth that memory allows"
    head += ", without NVLink" if _is_by_nvlink(view) else ""
    return Table(heads=(head, "GB/s"), rows=tuple(rows))


def _memory(memory: Memory) -> str:
    rates = ", ".join(f"{rate / 1e9:.0f}" for rate in memory.bytes_per_s)
    return f"{rates} GB/s by node ({memory.source})"
