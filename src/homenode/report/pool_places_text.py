"""PoolPlacesText: where VMs of a pool go: ranked hosts, moves, a packing; and what to run then."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from homenode.hypervisor.domain_state import domain_argument
from homenode.pool.model import Pool
from homenode.pool.moves import MOST_MOVED_TOGETHER, Move, MovePlan
from homenode.pool.place import LostFits, RankedPlace, RefusedHosts
from homenode.report.terminal_text import AsciiWhereNeeded, ShellCommand, TableOrList
from homenode.wording import command_line, either, number_list, plural, printable


def places_text(
    vm: str,
    places: Sequence[RankedPlace],
    refused: Sequence[RefusedHosts] = (),
    hint: str | None = None,
) -> RenderableType:
    """The first hosts, each with what the choice costs; or that there is none, and why."""
    parts: list[RenderableType] = []
    if places:
        rows = [
            [
                str(number),
                one.host.name,
                number_list(one.placement.nodes) or "any",
                one.placement.fallback,
                str(len(one.planner.free_gpus(one.step.after))),
                lost_text(one.lost),
            ]
            for number, one in enumerate(places, start=1)
        ]
        columns = ["rank", "host", "nodes", "placement", "GPUs left", "VMs that no longer fit"]
        parts += [
            TableOrList(columns, rows, wraps_last=True),
            Text(
                "Ranked by the VM's locality, then by the VMs of other flavours that no longer fit "
                "in the pool, then by GPUs left on the host.",
                style="dim",
            ),
            Text(""),
        ]
    if not places:
        parts.append(Text(printable(f"{vm}: no host takes it"), style="bold"))
    parts += [Text(printable(f"  {refusal_text(one)}")) for one in refused]
    if hint:
        parts.append(Text(f"hint: {hint}", style="cyan"))
    return AsciiWhereNeeded(Group(*parts))


def refusal_text(refused: RefusedHosts) -> str:
    """How many hosts refuse a VM, why, and how near the nearest of them is.

    >>> refusal_text(RefusedHosts("fewer than 8 free GPUs", ("a", "b"), "b", "7 of 8 free"))
    '2 hosts (a, b): fewer than 8 free GPUs; nearest: b, 7 of 8 free'
    >>> refusal_text(RefusedHosts("too few free cores", ("a",), "a", "needs 40, 16 free"))
    'a: too few free cores: needs 40, 16 free'
    """
    hosts = refused.hosts
    if len(hosts) == 1:
        return ": ".join(filter(None, (hosts[0], refused.reason, refused.detail)))
    names = ", ".join(hosts[:3]) + (", ..." if len(hosts) > 3 else "")
    nearest = f"; nearest: {refused.nearest}, {refused.detail}" if refused.detail else ""
    return f"{plural(len(hosts), 'host')} ({names}): {refused.reason}{nearest}"


def lost_text(lost: Sequence[LostFits]) -> str:
    """What no longer fits in the pool.

    >>> lost_text([LostFits("gpu8", 1), LostFits("gpu1", 2)]), lost_text([])
    ('1 gpu8 or 2 gpu1', 'none')
    """
    return either(f"{one.count} {one.flavour}" for one in lost) or "none"


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
        alike = [move for move in plan.moves if move.restart == restart]
        # Of virsh's operands a number is an id, and what begins with "-" an option.
        first = next((move for move in alike if domain_argument(move.vm, "")), None)
        if alike and first is None:
            about = f"A move {what}, of {alike[0].vm!r}: by its UUID; the name is none to a command"
            parts.append(Text(printable(about), style="yellow"))
        elif first is not None:
            about = f"A move {what}, for example {first.vm}"
            if not first.restart:
                about += f"; the second command on {first.to_host} when the VM is stopped: new pins"
            parts.append(Text(printable(f"{about}:"), style="bold"))
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
            command_line("homenode", "replan", move.vm),
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
