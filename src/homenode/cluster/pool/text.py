"""PoolText: a pool, and the hosts on which a VM fits, as text."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from homenode.cluster.pool.fits import (
    MAX_COUNTED,
    NodeResources,
    Pool,
    PoolHost,
    SizeCapacity,
    format_model_names,
    sum_of,
)
from homenode.cluster.pool.place import PoolPlace, PoolRanking, RejectingHosts
from homenode.doc import Doc, Part, Table, Text
from homenode.findings import NO_VMS_DESCRIBED, Gap, format_shared_gaps
from homenode.show.explain import format_term
from homenode.show.plan_text import format_fallback, format_locality
from homenode.text import format_nodes, number_list, plural, shorten_list
from homenode.units import format_bytes
from homenode.vm.plan import Plan

MAX_ROWS = 40
"""Hosts of a table; if there are more, hosts with equal values share a row."""

MAX_RANKS = 4
"""Rows of a table of hosts that take a VM; equal hosts are one row."""


def format_pool(pool: Pool, *, by_node: bool = False) -> Doc:
    """Return the sums, a row for each host, or each node with by_node, and what was not read."""
    hosts, total = pool.hosts, sum_of(host.free for host in pool.hosts)
    vms = sum(host.vms or 0 for host in hosts)
    busy = sum((host.vms or 0) > 0 for host in hosts)
    unread = sum(host.vms is None for host in hosts)
    gpus = f"{total.free_gpus} of " if busy and not unread else ""
    gpus = f"{gpus}{plural((total.free_gpus if unread else total.gpus) or 0, 'GPU')}, "
    gpus = gpus if total.gpus else ""
    if unread:
        head = (
            f"{plural(len(hosts), 'host')}, the VMs of {unread} not read: at most "
            f"{gpus}{plural(total.free_cores, 'core')}, "
            f"{_format_memory(total.free_memory_bytes)} free"
        )
    elif busy:
        head = (
            f"{plural(len(hosts), 'host')}, {busy} busy: {gpus}"
            f"{total.free_cores} of {plural(total.cores, 'core')}, "
            f"{_format_memory(total.free_memory_bytes)} free; {plural(vms, 'VM')}"
        )
    else:
        head = (
            f"{plural(len(hosts), 'host')}, all free: {gpus}"
            f"{plural(total.cores, 'core')}, {_format_memory(total.free_memory_bytes)}; 0 VMs"
        )
    parts: list[Part] = [_build_nodes_table(hosts) if by_node else _build_hosts_table(pool)]
    about = "free/all GPUs, free cores and memory"
    if not by_node and hosts[0].fits:
        about += "; how many more VMs of each size fit, local"
    parts.append(Text(about, "dim"))
    if shares := {} if by_node else _format_shares(hosts):
        texts = [f"{share} ({shorten_list(names, 1)})" for share, names in shares.items()]
        text = shorten_list(texts, 3) if len(texts) > 1 else next(iter(shares))
        parts.append(Text(f"for each GPU, a VM has {text}", "dim"))
    parts += [Text(f"not read  {gap}", "warn", hang=10) for gap in pool.unread]
    lines = format_unknown((host.name, host.gaps) for host in hosts)
    parts += [Text(f"unknown  {line}", "dim", hang=9) for line in lines]
    return Doc(head, tuple(parts))


def _format_shares(hosts: Iterable[PoolHost]) -> dict[str, list[str]]:
    """Return the names of the hosts by the vCPUs and memory of a GPU there."""
    shares: dict[str, list[str]] = {}
    for host in hosts:
        for fit in host.fits:
            words = [] if fit.share_vcpus is None else [plural(fit.share_vcpus, "vCPU")]
            words += [] if fit.share_bytes is None else [format_bytes(fit.share_bytes)]
            if words:
                names = shares.setdefault(" and ".join(words), [])
                names += [] if host.name in names else [host.name]
    return shares


def format_unknown(gaps_of: Iterable[tuple[str, Iterable[Gap]]]) -> tuple[str, ...]:
    """Return the unknown facts of hosts; a description without VMs has none."""
    return format_shared_gaps(
        (name, [gap for gap in gaps if gap != NO_VMS_DESCRIBED]) for name, gaps in gaps_of
    )


def _build_hosts_table(pool: Pool) -> Table:
    groups: dict[object, list[PoolHost]] = {}
    for host in pool.hosts:
        is_alone = len(pool.hosts) <= MAX_ROWS
        group_key = host.name if is_alone else (host.free, host.vms, host.fits, host.gpu_models)
        groups.setdefault(group_key, []).append(host)
    rows = []
    for group in groups.values():
        suffix = f" and {len(group) - 1} more" if len(group) > 1 else ""
        first = group[0]
        rows.append(
            (
                first.name + suffix,
                *_format_node(first.free, first.vms, first.gpu_models),
                *map(_fit, first.fits),
            )
        )
    sizes = [fit.size for fit in pool.hosts[0].fits]
    total = sum_of(host.free for host in pool.hosts)
    counts = [
        SizeCapacity(size=size, count=sum(host.fits[at].count or 0 for host in pool.hosts))
        for at, size in enumerate(sizes)
    ]
    is_read = all(host.vms is not None for host in pool.hosts)
    vms = sum(host.vms or 0 for host in pool.hosts) if is_read else None
    rows.append(("total", *_format_node(total, vms), *(str(fit.count) for fit in counts)))
    numeric = ("cores", "memory", "VMs", *sizes)
    return Table(
        heads=("host", "GPUs", *numeric),
        numeric=numeric,
        rows=tuple(rows),
        least=("cores", "memory"),
        shortened=True,
    )


def _build_nodes_table(hosts: Sequence[PoolHost]) -> Table:
    rows = []
    for host in hosts:
        for node in host.nodes:
            name = "unknown" if node.node is None else str(node.node)
            rows.append((host.name, name, *_format_node(node, 0)[:-1]))
    figures = ("cores", "memory")
    heads = ("host", "node", "GPUs", *figures)
    return Table(heads=heads, numeric=("node", *figures), rows=tuple(rows))


def _format_node(free: NodeResources, vms: int | None, models: str = "") -> tuple[str, ...]:
    gpus = f"{free.free_gpus}/{free.gpus} {models}".rstrip() if free.gpus else "-"
    gpus = "unknown" if free.gpus is None else gpus
    count = "unknown" if vms is None else str(vms)
    return gpus, str(free.free_cores), _format_memory(free.free_memory_bytes), count


def _fit(fit: SizeCapacity) -> str:
    if fit.count is None:
        return "-"
    return f"{fit.count}+" if fit.count >= MAX_COUNTED else str(fit.count)


def _format_memory(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


_DECIDED = {
    "vcpus_beyond_cores": "shared cores",
    "device_class": "distance",
    "node_distance": "distance",
    "distance_sum": "distance",
    "device_distance": "distance",
    "unisolated_cores": "isolation",
    "pages_to_reserve": "huge pages",
    "given_up": "relaxed",
    "given_up_for_nearness": "relaxed",
    "packages_spanned": "packages",
    "gpus_away_from_home": "GPUs",
    "gpu_sets_lost": "GPU sets",
    "nodes_spanned": "nodes",
    "llcs_spanned": "LLCs",
    "minus_nodes_spanned": "nodes",
    "unevenness": "evenness",
    "guest_sockets": "sockets",
    "free_cores": "cores",
    "free_memory": "memory",
    "name": "equal",
    "": "-",
}


def format_places(
    ranking: PoolRanking, plan: Plan, planned: Iterable[Part], *, everything: bool = False
) -> Doc:
    """Return the first hosts, the deciding criteria, and the plan for the first. plan: for the
    first host. everything: also the hosts on which the VM does not fit."""
    hosts, refusing = ranking.hosts, ranking.refusing
    count = len(hosts) + sum(len(refusal.names) for refusal in refusing)
    best = hosts[0]
    nodes = format_nodes(best.placement.nodes) if best.placement.nodes else "any node"
    head = f"{plan.vm.name} fits {len(hosts)} of {plural(count, 'host')}; "
    head += f"best: {best.entry.name}, {nodes}"
    local = format_fallback(plan, best.entry.host) or format_locality(plan, best.entry.host)
    head += local and f"; {local}"
    groups: list[list[PoolPlace]] = []
    for pool_place in hosts:
        is_equal = pool_place.decided == "name" and not everything
        if is_equal and _format_places(pool_place) == _format_places(groups[-1][0]):
            groups[-1].append(pool_place)
        else:
            groups.append([pool_place])
    shown_groups = groups if everything else groups[:MAX_RANKS]
    unshown = len(hosts) - sum(map(len, shown_groups))
    numbers = accumulate((len(group) for group in shown_groups), initial=1)
    heads = ("host", "nodes", "LLCs", "GPUs left", "cores left", "memory left", "decided")
    table = Table(
        heads=("rank", *heads),
        numeric=("LLCs", "cores left", "memory left"),
        least=("memory left",),
        rows=tuple(map(_rank_row, numbers, shown_groups)),
    )
    parts: list[Part] = [table]
    more = [plural(unshown, "more host")] if unshown else []
    if everything:
        parts += map(format_refusal, refusing)
    elif refusing:
        names = [name for refusal in refusing for name in refusal.names]
        where = f"; on {names[0]}" if len(names) > 1 else ""
        reason = f"{where}: {refusing[0].reason}" if len(refusing) == 1 else ""
        more.append(f"it does not fit {shorten_list(names, 3)}{reason}")
    if more:
        parts.append(Text(f"{'; '.join(more)} (--explain)", "dim"))
    return Doc(head, (*parts, *planned))


def format_order(best: PoolPlace) -> str:
    """Return the order criteria of the hosts."""
    rule = "pack" if best.packs else "spread"
    if best.options.balance is None:
        rule += f", the default {'with' if best.gpus else 'without'} GPUs"
    return f"locality, then the {'fewest' if best.packs else 'most'} free cores ({rule})"


def _rank_row(number: int, group: Sequence[PoolPlace]) -> tuple[str, ...]:
    suffix = f" and {len(group) - 1} more" if len(group) > 1 else ""
    deciding_term = group[0].decided
    return (
        str(number),
        group[0].entry.name + suffix,
        *_format_places(group[0]),
        _DECIDED.get(deciding_term) or format_term(deciding_term),
    )


def _format_places(pool_place: PoolPlace) -> tuple[str, ...]:
    free, models = pool_place.free, format_model_names(pool_place.entry.host)
    return (
        number_list(pool_place.placement.nodes) or "any",
        str(dict(pool_place.placement.concerns).get("llcs_spanned", 0)),
        "unknown" if free.free_gpus is None else f"{free.free_gpus} {models}".rstrip(),
        str(free.free_cores),
        _format_memory(free.free_memory_bytes),
    )


def format_no_place(vm: str, refusing: Sequence[RejectingHosts]) -> Doc:
    """Return why the VM fits on no host."""
    count = sum(len(refusal.names) for refusal in refusing)
    hints = dict.fromkeys(refusal.hint for refusal in refusing if refusal.hint)
    parts = [
        *map(format_refusal, refusing),
        *(Text(f"hint: {hint}", "hint", indent=2) for hint in hints),
    ]
    return Doc(f"{vm} fits none of {plural(count, 'host')}", tuple(parts))


def format_refusal(rejecting: RejectingHosts) -> Text:
    """Return the hosts that reject a VM, and the reason of the first."""
    names, first = rejecting.names, rejecting.names[0]
    if len(names) == 1:
        return Text(f"{first}: {rejecting.reason}", indent=2)
    who = f"{len(names)} hosts ({shorten_list(names, 3)}), on {first}"
    return Text(f"{who}: {rejecting.reason}", indent=2)
