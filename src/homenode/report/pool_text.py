"""PoolText: a pool on a terminal, as a table for other programs, and in Prometheus' text format."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from homenode.pool.model import PoolVms
from homenode.pool.outlook import FlavourFit, HostOutlook, MissingResource, PoolOutlook
from homenode.report.terminal_text import AsciiWhereNeeded, TableOrList
from homenode.units import GIB, TIB, format_bytes
from homenode.wording import number_list, plural, printable

MOST_ROWS = 40
"""Hosts of a table for people; of more, those alike are one row."""


def pool_text(outlook: PoolOutlook, *, everything: bool = False) -> RenderableType:
    """The sums, a row for each host or kind of host, and what could not be read."""
    free = outlook.free
    parts: list[RenderableType] = [
        Text(
            f"{plural(len(outlook.hosts), 'host')} of {plural(outlook.shapes, 'kind')}, "
            f"{plural(free.vms, 'VM')}: {free.free_gpus} of {plural(free.gpus, 'GPU')}, "
            f"{free.free_cores} of {plural(free.cores, 'core')}, "
            f"{_memory(free.free_memory_bytes)} of {_memory(free.memory_bytes)} free",
            style="bold",
        )
    ]
    names = [fit.flavour for fit in outlook.fits]
    groups = _groups(outlook.hosts, everything=everything)
    shown = groups[:MOST_ROWS] if not everything else groups
    total = _row("total", (HostOutlook("", free, outlook.fits, ()),))
    rows = [_row(_label_of(group), group) for group in shown]
    parts.append(
        TableOrList(
            ["host", "VMs", "GPUs", "cores", "memory", *names, "stranded"],
            [*rows, [*total[:-1], str(outlook.stranded_gpus)]],
            least=["cores", "memory"],
            shortened=True,
        )
    )
    left = sum(len(group) for group in groups[len(shown) :])
    if left:
        parts.append(Text(f"{plural(left, 'host')} more: --all", style="yellow"))
    sizes = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    alike = " host +N: N more hosts are alike." if len(groups) < len(outlook.hosts) else ""
    parts.append(
        Text(
            f"GPUs: free/all. Cores, memory: free.{alike} {printable(sizes)}: how many more VMs of "
            "that flavour fit with full locality, +N: with less.",
            style="dim",
        )
    )
    parts.append(Text(_stranded_sentence(outlook)))
    if outlook.failures:
        parts.append(Text(f"{plural(len(outlook.failures), 'host')} left out:", style="yellow"))
        parts += [
            Text(printable(f"  {one.source}: {one.reason}")) for one in outlook.failures[:MOST_ROWS]
        ]
        if len(outlook.failures) > MOST_ROWS:
            parts.append(Text(f"  and {len(outlook.failures) - MOST_ROWS} more (--json)"))
    return AsciiWhereNeeded(Group(*parts))


def _groups(hosts: Sequence[HostOutlook], *, everything: bool) -> list[tuple[HostOutlook, ...]]:
    """The hosts of each row: one, or those that take the same VMs where there are many hosts."""
    if everything or len(hosts) <= MOST_ROWS:
        return [(host,) for host in hosts]
    alike: dict[tuple[object, ...], list[HostOutlook]] = {}
    for host in hosts:
        key = (
            host.free.gpus,
            host.free.free_gpus,
            host.fits,
            tuple((one.missing, len(one.gpus)) for one in host.stranded),
        )
        alike.setdefault(key, []).append(host)
    return [
        tuple(group)
        for group in sorted(alike.values(), key=lambda group: (-len(group), group[0].name))
    ]


def _label_of(group: Sequence[HostOutlook]) -> str:
    return group[0].name + (f" +{len(group) - 1}" if len(group) > 1 else "")


def _row(label: str, group: Sequence[HostOutlook]) -> list[str]:
    """The cells of hosts that take the same VMs; what differs between them as a range."""
    first = group[0].free
    stranded = ", ".join(f"{len(one.gpus)} ({one.missing})" for one in group[0].stranded)
    return [
        label,
        _range([host.free.vms for host in group]),
        f"{first.free_gpus}/{first.gpus}",
        _range([host.free.free_cores for host in group]),
        _memory_range([host.free.free_memory_bytes for host in group]),
        *map(_fit, group[0].fits),
        stranded or "0",
    ]


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


def _memory_range(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return "unknown"
    low, high = _memory(min(known)), _memory(max(known))
    if low == high:
        return low
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(f' {unit}')}-{high}"


def _fit(fit: FlavourFit) -> str:
    return f"{fit.local}+{fit.degraded}" if fit.degraded else str(fit.local)


def _memory(size: int | None) -> str:
    if size is None:
        return "unknown"
    step = TIB if size >= 100 * TIB else GIB
    return format_bytes(size // step * step)


_LACKS = {
    "pages": "huge pages",
    "gpus": "more free GPUs with them",
    "gpu-node": "a known NUMA node",
    "flavour": "a flavour that takes such GPUs",
}


def missing_text(stranded: Sequence[MissingResource]) -> str:
    """How many GPUs are stranded, and what they lack; "" where none is.

    >>> missing_text([MissingResource("cores", 3), MissingResource("flavour", 1)])
    '3 lack cores, 1 lacks a flavour that takes such GPUs'
    """
    return ", ".join(
        f"{one.gpus} {'lacks' if one.gpus == 1 else 'lack'} {_LACKS.get(one.missing, one.missing)}"
        for one in stranded
    )


def _stranded_sentence(outlook: PoolOutlook) -> str:
    if not outlook.stranded:
        return "Stranded GPUs: none."
    return f"Stranded GPUs, free but of use to no flavour: {missing_text(outlook.stranded)}."


def pool_csv(outlook: PoolOutlook) -> str:
    """A line for each host (RFC 4180); memory in bytes, empty where unknown."""
    fits = [f"{fit.flavour}_{kind}" for fit in outlook.fits for kind in ("local", "degraded")]
    rows: list[list[object]] = [
        [
            "host",
            "vms",
            "gpus",
            "free_gpus",
            "cores",
            "free_cores",
            "memory_bytes",
            "free_memory_bytes",
            *fits,
            "stranded_gpus",
            "missing",
        ]
    ]
    for host in outlook.hosts:
        free = host.free
        rows.append(
            [
                host.name,
                free.vms,
                free.gpus,
                free.free_gpus,
                free.cores,
                free.free_cores,
                _known(free.memory_bytes),
                _known(free.free_memory_bytes),
                *(count for fit in host.fits for count in (fit.local, fit.degraded)),
                host.stranded_gpus,
                " ".join(one.missing for one in host.stranded),
            ]
        )
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def _cell(value: object) -> str:
    """A cell; a name that a spreadsheet would take for a formula gets an apostrophe.

    >>> _cell(3), _cell("a,b"), _cell("=1+1")
    ('3', '"a,b"', "'=1+1")
    """
    text = printable(str(value))
    if isinstance(value, str) and text[:1] in ("=", "+", "-", "@"):
        text = f"'{text}"
    if any(letter in text for letter in ',"'):
        text = '"' + text.replace('"', '""') + '"'
    return text


def vms_text(found: PoolVms) -> RenderableType:
    """A row for each VM, by host."""
    if not found.vms:
        return Text("no VMs")
    rows = [
        [
            vm.name,
            vm.host,
            vm.state,
            str(vm.vcpus),
            format_bytes(vm.memory_bytes),
            "any" if vm.nodes is None else number_list(vm.nodes),
            str(len(vm.gpus) + len(vm.mediated)) + (f" ({vm.gpus_away} away)" * bool(vm.gpus_away)),
        ]
        for vm in found.vms
    ]
    columns = ["VM", "host", "state", "vCPUs", "memory", "nodes", "GPUs"]
    about = "Nodes: any = the VM is not pinned. Away: GPUs on none of the VM's nodes."
    table = TableOrList(columns, rows, least=["state", "memory"])
    return AsciiWhereNeeded(Group(table, Text(about, style="dim")))


def _known(size: int | None) -> int | str:
    return "" if size is None else size


def pool_prometheus(outlook: PoolOutlook) -> str:
    """Gauges by host. Source: Prometheus documentation, "Exposition formats", 0.0.4."""
    families: dict[str, tuple[str, list[str]]] = {}

    def gauge(name: str, about: str, labels: Iterable[tuple[str, str]], value: int) -> None:
        text = ",".join(f'{key}="{_label(one)}"' for key, one in labels)
        families.setdefault(f"homenode_pool_{name}", (about, []))[1].append(f"{{{text}}} {value}")

    for host in outlook.hosts:
        own, free = [("host", host.name)], host.free
        gauge("gpus", "GPUs of the host.", own, free.gpus)
        gauge("free_gpus", "GPUs that no VM has.", own, free.free_gpus)
        gauge("cores", "Cores of the host.", own, free.cores)
        gauge("free_cores", "Cores on which no VM has threads.", own, free.free_cores)
        if free.memory_bytes is not None:
            gauge("memory_bytes", "Memory of the host.", own, free.memory_bytes)
        if free.free_memory_bytes is not None:
            gauge("free_memory_bytes", "Memory that VMs may get.", own, free.free_memory_bytes)
        gauge("vms", "VMs that run or are planned.", own, free.vms)
        for fit in host.fits:
            for kind, count in (("local", fit.local), ("degraded", fit.degraded)):
                gauge(
                    "fits",
                    "VMs of a flavour that still fit, by locality.",
                    [*own, ("flavour", fit.flavour), ("locality", kind)],
                    count,
                )
        for stranded in host.stranded:
            gauge(
                "stranded_gpus",
                "Free GPUs that no flavour can take with full locality.",
                [*own, ("missing", stranded.missing)],
                len(stranded.gpus),
            )
    gauge("hosts_failed", "Hosts that could not be read.", [], len(outlook.failures))
    lines = []
    for name, (about, samples) in families.items():
        lines += [f"# HELP {name} {about}", f"# TYPE {name} gauge"]
        lines += [f"{name}{sample}".replace("{} ", " ") for sample in samples]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return printable(escaped)
