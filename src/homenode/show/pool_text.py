"""PoolText: a pool for people, where VMs of it go; as CSV, and for Prometheus."""

from collections.abc import Sequence

from homenode.cluster.pool.model import PoolVms
from homenode.cluster.pool.outlook import FlavourFit, HostOutlook, MissingResource, PoolOutlook
from homenode.cluster.pool.place import LostFits, RankedPlace, RefusedHosts
from homenode.cluster.pool.rules import Availability
from homenode.doc import Doc, Part, Table, Text
from homenode.units import GIB, TIB, format_bytes
from homenode.wording import csv_text, either, number_list, plural

MOST_ROWS = 40
"""Hosts of a table for people; of more, those alike are one row."""


def pool_text(outlook: PoolOutlook, *, everything: bool = False) -> Doc:
    """The sums, a row for each host or kind of host, and what could not be read."""
    free = outlook.free
    title = (
        f"{plural(len(outlook.hosts), 'host')} of {plural(outlook.shapes, 'kind')}, "
        f"{plural(free.vms, 'VM')}: {free.free_gpus} of {plural(free.gpus, 'GPU')}, "
        f"{free.free_cores} of {plural(free.cores, 'core')}, "
        f"{_memory(free.free_memory_bytes)} of {_memory(free.memory_bytes)} free"
    )
    groups = _groups(outlook.hosts, everything=everything)
    shown = groups[:MOST_ROWS] if not everything else groups
    parts: list[Part] = [pool_table(outlook, shown)]
    left = sum(len(group) for group in groups[len(shown) :])
    if left:
        parts.append(Text(f"{plural(left, 'host')} more: --all", "warn"))
    names = [fit.flavour for fit in outlook.fits]
    sizes = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    alike = " host +N: N more hosts are alike." if len(groups) < len(outlook.hosts) else ""
    about = (
        f"GPUs: free/all. Cores, memory: free.{alike} {sizes}: how many more VMs of that flavour "
        "fit with full locality, +N: with less."
    )
    parts += [Text(about, "dim"), Text(_stranded_sentence(outlook))]
    if outlook.failures:
        parts.append(Text(f"{plural(len(outlook.failures), 'host')} left out:", "warn"))
        parts += [
            Text(f"{one.source}: {one.reason}", indent=2) for one in outlook.failures[:MOST_ROWS]
        ]
        if len(outlook.failures) > MOST_ROWS:
            parts.append(Text(f"and {len(outlook.failures) - MOST_ROWS} more (--json)", indent=2))
    return Doc(title, tuple(parts))


def pool_table(
    outlook: PoolOutlook, groups: Sequence[Sequence[HostOutlook]], *, is_wide: bool = False
) -> Table:
    """A row for each group of hosts that take the same VMs, and one for all. is_wide: with how many
    cores there are next to those that are free."""
    total = _row(
        "total", (HostOutlook(name="", free=outlook.free, fits=outlook.fits, stranded=()),), is_wide
    )
    figures = ("VMs", "GPUs", "cores", "memory", *(fit.flavour for fit in outlook.fits))
    return Table(
        heads=("host", *figures, "stranded"),
        numeric=figures,
        rows=(
            *(_row(_label_of(group), group, is_wide) for group in groups),
            (*total[:-1], str(outlook.stranded_gpus)),
        ),
        least=("cores", "memory"),
        shortened=True,
    )


def _groups(hosts: Sequence[HostOutlook], *, everything: bool) -> list[tuple[HostOutlook, ...]]:
    """The hosts of each row: one, or those that take the same VMs where there are many hosts."""
    if everything or len(hosts) <= MOST_ROWS:
        return [(host,) for host in hosts]
    alike: dict[tuple[object, ...], list[HostOutlook]] = {}
    for host in hosts:
        key = (
            host.availability,
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
    state = group[0].availability
    closed = "" if state is Availability.OPEN else f" ({state})"
    return group[0].name + closed + (f" +{len(group) - 1}" if len(group) > 1 else "")


def _row(label: str, group: Sequence[HostOutlook], is_wide: bool) -> tuple[str, ...]:
    """The cells of hosts that take the same VMs; what differs between them as a range."""
    first = group[0].free
    return (
        label,
        _range([host.free.vms for host in group]),
        f"{first.free_gpus}/{first.gpus}",
        f"{first.free_cores}/{first.cores}"
        if is_wide
        else _range([host.free.free_cores for host in group]),
        _memory_range([host.free.free_memory_bytes for host in group]),
        *map(fit_text, group[0].fits),
        stranded_text(group[0]),
    )


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


def stranded_text(host: HostOutlook) -> str:
    """How many GPUs are stranded, each with what is missing."""
    return ", ".join(f"{len(one.gpus)} ({one.missing})" for one in host.stranded) or "0"


def fit_text(fit: FlavourFit) -> str:
    """How many more VMs fit, +N: with less locality."""
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


_FACTS = {
    "vms": "VMs that run or are planned.",
    "gpus": "GPUs of the host.",
    "free_gpus": "GPUs that no VM has.",
    "cores": "Cores of the host.",
    "free_cores": "Cores on which no VM has threads.",
    "memory_bytes": "Memory of the host.",
    "free_memory_bytes": "Memory that VMs may get.",
}
"""What programs read of a host, by its name in `Free`."""

_GAUGES = _FACTS | {
    "fits": "VMs of a flavour that still fit, by locality.",
    "stranded_gpus": "Free GPUs that no flavour can take with full locality.",
    "hosts_failed": "Hosts that could not be read.",
}


def pool_csv(outlook: PoolOutlook) -> str:
    """A line for each host; memory in bytes, empty where unknown."""
    fits = [f"{fit.flavour}_{kind}" for fit in outlook.fits for kind in ("local", "degraded")]
    rows: list[list[object]] = [["host", *_FACTS, *fits, "stranded_gpus", "missing"]]
    for host in outlook.hosts:
        facts = [getattr(host.free, name) for name in _FACTS]
        counts = [count for fit in host.fits for count in (fit.local, fit.degraded)]
        missing = " ".join(one.missing for one in host.stranded)
        rows.append([host.name, *facts, *counts, host.stranded_gpus, missing])
    return csv_text(rows)


def vms_text(found: PoolVms) -> Doc:
    """A row for each VM, by host."""
    if not found.vms:
        return Doc("", (Text("no VMs"),))
    rows = tuple(
        (
            vm.name,
            vm.host,
            vm.state,
            str(vm.vcpus),
            format_bytes(vm.memory_bytes),
            "any" if vm.nodes is None else number_list(vm.nodes),
            str(len(vm.gpus) + len(vm.mediated)) + (f" ({vm.gpus_away} away)" * bool(vm.gpus_away)),
        )
        for vm in found.vms
    )
    heads = ("VM", "host", "state", "vCPUs", "memory", "nodes", "GPUs")
    about = "Nodes: any = the VM is not pinned. Away: GPUs on none of the VM's nodes."
    return Doc("", (Table(heads=heads, rows=rows, least=("state", "memory")), Text(about, "dim")))


def pool_prometheus(outlook: PoolOutlook) -> str:
    """Gauges by host."""
    from homenode.check.metrics import Gauge, Sample, exposition

    samples: dict[str, list[Sample]] = {name: [] for name in _GAUGES}
    for host in outlook.hosts:
        own = {"host": host.name}
        for name in _FACTS:
            value = getattr(host.free, name)
            if value is not None:
                samples[name].append((own, value))
        for fit in host.fits:
            for kind, count in (("local", fit.local), ("degraded", fit.degraded)):
                labels = {**own, "flavour": fit.flavour, "locality": kind}
                samples["fits"].append((labels, count))
        samples["stranded_gpus"] += [
            ({**own, "missing": one.missing}, len(one.gpus)) for one in host.stranded
        ]
    samples["hosts_failed"].append(({}, len(outlook.failures)))
    return exposition(
        Gauge(f"homenode_pool_{name}", about, samples[name]) for name, about in _GAUGES.items()
    )


def places_text(
    vm: str,
    places: Sequence[RankedPlace],
    refused: Sequence[RefusedHosts] = (),
    hint: str | None = None,
) -> Doc:
    """The first hosts, each with what the choice costs; or that there is none, and why."""
    heads = ("rank", "host", "nodes", "placement", "GPUs left", "VMs that no longer fit")
    rows = tuple(
        (
            str(number),
            one.host.name,
            number_list(one.placement.nodes) or "any",
            one.placement.fallback,
            str(len(one.planner.free_gpus(one.step.after))),
            lost_text(one.lost),
        )
        for number, one in enumerate(places, start=1)
    )
    about = (
        "Ranked by the VM's locality, then by the VMs of all flavours that no longer fit and the "
        "GPUs left without cores, then by GPUs left on the host."
    )
    ranked = (Table(heads=heads, rows=rows, folds=heads[-1:]), Text(about, "dim"), Text(""))
    return Doc(
        "" if places else f"{vm}: no host takes it",
        (
            *(ranked if places else ()),
            *(Text(refusal_text(one), indent=2) for one in refused),
            *((Text(f"hint: {hint}", "hint"),) if hint else ()),
        ),
    )


def refusal_text(refused: RefusedHosts) -> str:
    """How many hosts refuse a VM, why, and how near the nearest of them is.

    >>> few = {"reason": "fewer than 8 free GPUs", "hosts": ("a", "b"), "detail": "7 of 8 free"}
    >>> refusal_text(RefusedHosts(nearest="b", **few))
    '2 hosts (a, b): fewer than 8 free GPUs; nearest: b, 7 of 8 free'
    >>> one = {"reason": "too few free cores", "hosts": ("a",), "detail": "needs 40, 16 free"}
    >>> refusal_text(RefusedHosts(nearest="a", **one))
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
