"""PoolText: a pool on a terminal, as a table for other programs, and in Prometheus' text format."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from homenode.pool.model import Pool
from homenode.pool.moves import MOST_MOVED_TOGETHER, Move, MovePlan
from homenode.pool.outlook import FlavourFit, HostOutlook, PoolOutlook
from homenode.pool.place import LostFits, RankedPlace, RefusedHosts
from homenode.report.terminal_text import AsciiWhereNeeded, ShellCommand, TableOrList
from homenode.units import GIB, format_bytes
from homenode.wording import command_line, nodes_text, plural, printable

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
    rows = _rows(outlook.hosts, everything=everything)
    parts.append(
        TableOrList(
            ["host", "VMs", "GPUs", "cores", "memory", *names, "stranded"],
            [*(_row(label, host) for label, host in rows), _sum_row(outlook)],
        )
    )
    parts.append(
        Text(
            "GPUs, cores, memory: free. By flavour: VMs that fit with full locality, + with less",
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


def _rows(hosts: Sequence[HostOutlook], *, everything: bool) -> list[tuple[str, HostOutlook]]:
    if everything or len(hosts) <= MOST_ROWS:
        return [(host.name, host) for host in hosts]
    alike: dict[tuple[object, ...], list[HostOutlook]] = {}
    for host in hosts:
        key = (
            host.free.gpus,
            host.free.free_gpus,
            host.fits,
            tuple((one.missing, len(one.gpus)) for one in host.stranded),
        )
        alike.setdefault(key, []).append(host)
    groups = sorted(alike.values(), key=lambda group: (-len(group), group[0].name))
    rows = []
    for group in groups[:MOST_ROWS]:
        more = f" and {len(group) - 1} alike" if len(group) > 1 else ""
        rows.append((f"{group[0].name}{more}", group[0]))
    left = sum(len(group) for group in groups[MOST_ROWS:])
    if left:
        rows.append((f"… {left} more (--all)", groups[MOST_ROWS][0]))
    return rows


def _row(label: str, host: HostOutlook) -> list[str]:
    free = host.free
    stranded = ", ".join(f"{len(one.gpus)} ({one.missing})" for one in host.stranded)
    return [
        label,
        str(free.vms),
        f"{free.free_gpus}/{free.gpus}",
        str(free.free_cores),
        _memory(free.free_memory_bytes),
        *map(_fit, host.fits),
        stranded or "0",
    ]


def _sum_row(outlook: PoolOutlook) -> list[str]:
    free = outlook.free
    return [
        "in sum",
        str(free.vms),
        f"{free.free_gpus}/{free.gpus}",
        str(free.free_cores),
        _memory(free.free_memory_bytes),
        *map(_fit, outlook.fits),
        str(outlook.stranded_gpus),
    ]


def _fit(fit: FlavourFit) -> str:
    return f"{fit.local}+{fit.degraded}" if fit.degraded else str(fit.local)


def _memory(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size // GIB * GIB)


def _stranded_sentence(outlook: PoolOutlook) -> str:
    if not outlook.stranded:
        return "stranded GPUs: none"
    listed = ", ".join(f"{one.gpus} for lack of {one.missing}" for one in outlook.stranded)
    return f"stranded GPUs: {outlook.stranded_gpus}: {listed}"


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
        gauge("free_cores", "Cores on which no VM has threads.", own, free.free_cores)
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


def places_text(places: Sequence[RankedPlace], refused: Sequence[RefusedHosts]) -> RenderableType:
    """The first hosts, each with what the choice costs; then why others refuse."""
    parts: list[RenderableType] = []
    if places:
        parts.append(Text("Hosts, the best first", style="bold underline"))
    for number, one in enumerate(places, start=1):
        parts.append(
            Text.assemble(
                f"  {number}. ",
                (printable(one.host.name), "bold"),
                f": {nodes_text(one.placement.nodes)}; {one.placement.fallback}; "
                f"{lost_text(one.lost)}",
            )
        )
    for reason in refused:
        hosts = reason.hosts
        more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
        parts.append(Text(printable(f"  {', '.join(hosts[:3])}{more}: {reason.reason}")))
    return AsciiWhereNeeded(Group(*parts))


def lost_text(lost: Sequence[LostFits]) -> str:
    """What no longer fits in the pool.

    >>> lost_text([LostFits("gpu8", 1), LostFits("gpu1", 2)]), lost_text([])
    ('the pool loses 1 x gpu8, 2 x gpu1', 'the pool loses no other fit')
    """
    if not lost:
        return "the pool loses no other fit"
    return "the pool loses " + ", ".join(f"{one.count} x {one.flavour}" for one in lost)


def drain_text(plan: MovePlan, host: str, pool: Pool, sources: Sequence[str]) -> RenderableType:
    """The moves that empty a host, what stays, and the commands."""
    moves = plan.moves
    if plan.stuck:
        every = plural(len(moves) + len(plan.stuck), "VM")
        head = f"{len(moves)} of {every} can leave {host}"
    elif moves:
        head = f"{plural(len(moves), 'move')} {'empties' if len(moves) == 1 else 'empty'} {host}"
    else:
        head = f"{host} has no VM: nothing to move"
    return _moves_text(head, plan, pool, sources)


def defragment_text(
    plan: MovePlan, flavour: str, pool: Pool, sources: Sequence[str], most: int
) -> RenderableType:
    """The moves after which more VMs of a flavour fit, with what each group gains."""
    before = plan.fits_before or 0
    if not plan.groups:
        head = (
            f"{flavour}: {plural(before, 'VM fits', 'VMs fit')} with full locality; no move of up "
            f"to {MOST_MOVED_TOGETHER} VMs makes it more"
        )
    else:
        after = before + sum(group.gain for group in plan.groups)
        stopped = " (stopped there: --most)" if len(plan.groups) == most else ""
        head = (
            f"{flavour}: {before} fit with full locality, {after} after "
            f"{plural(len(plan.moves), 'move')}{stopped}"
        )
    return _moves_text(head, plan, pool, sources)


def _moves_text(head: str, plan: MovePlan, pool: Pool, sources: Sequence[str]) -> RenderableType:
    parts: list[RenderableType] = [Text(printable(head), style="bold")]
    rows = []
    for number, group in enumerate(plan.groups, start=1):
        for move in group.moves:
            is_last = move is group.moves[-1]
            gain = f"+{group.gain} {group.flavour}" if group.flavour and is_last else ""
            how = "stop, start" if move.restart else "live"
            row = [str(number), move.vm, move.from_host, move.to_host, str(move.gpus), how]
            rows.append([*row, gain] if group.flavour else row)
    columns = ["step", "VM", "from", "to", "GPUs", "how"]
    if any(group.flavour for group in plan.groups):
        columns.append("then fits")
    if rows:
        parts.append(TableOrList(columns, rows))
    parts += [
        Text(printable(f"{one.vm} stays on {one.host}: {one.reason}"), style="yellow")
        for one in plan.stuck
    ]
    if any(move.restart for move in plan.moves):
        parts.append(
            Text(
                "stop, start: the VM has passed-through devices, which cannot migrate live; its "
                "GPUs are chosen again on the new host, other devices have to be named again."
            )
        )
    host_of = {host.name: host for host in pool.hosts}
    for restart, what in ((True, "by stop and start"), (False, "live")):
        first = next((move for move in plan.moves if move.restart == restart), None)
        if first is not None:
            parts.append(Text(f"A move {what}, for example {printable(first.vm)}:", style="bold"))
            uris = host_of[first.from_host].libvirt_uri, host_of[first.to_host].libvirt_uri
            parts += map(ShellCommand, _commands(first, uris, sources))
    return AsciiWhereNeeded(Group(*parts))


def _commands(move: Move, uris: tuple[str, str], sources: Sequence[str]) -> list[str]:
    """What to run for a move; nothing is run here."""
    old, new = uris
    document, tuned = f"{move.vm}.xml", f"{move.vm}-tuned.xml"
    if not move.restart:
        flags = ("--live", "--persistent", "--undefinesource")
        return [
            command_line("virsh", "-c", old, "migrate", *flags, move.vm, new),
            command_line("homenode", "replan", move.vm)
            + f"  # on {printable(move.to_host)}, once the VM is stopped: new pins",
        ]
    pools = [word for source in sources for word in ("--pool", source)]
    gpus = ("--gpus", move.gpus) if move.gpus else ()
    place = ("homenode", "pool", "place", document, *pools, "--on", move.to_host, *gpus)
    return [
        command_line("virsh", "-c", old, "dumpxml", "--inactive", move.vm)
        + f" > {command_line(document)}",
        command_line(*place, "-o", tuned),
        command_line("virsh", "-c", old, "shutdown", move.vm),
        command_line("virsh", "-c", new, "define", tuned),
        command_line("virsh", "-c", new, "start", move.vm),
        command_line("virsh", "-c", old, "undefine", "--keep-nvram", move.vm),
    ]
