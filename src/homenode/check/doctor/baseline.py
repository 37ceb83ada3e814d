"""Baseline: differences of a host from its record, which can be any host source, or from most hosts
of its kind.

FACTS has a row for each compared fact, with its reader and the severity of a change. A record lacks
facts that its source does not show. A fact of the record that the host does not show is
inconclusive, except for devices, which count as missing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.devices import list_judged_devices
from homenode.check.doctor.links import IDLE_SPEED
from homenode.findings import Finding, Severity, finding
from homenode.machine.link_path import Link, LinkRate, list_device_paths
from homenode.machine.pci import DeviceKind, PciDevice, are_models_known, make_model_key
from homenode.machine.topology import Host, summarise
from homenode.units import format_bytes

_MEMORY_TOLERANCE = 64
"""Tolerance as a fraction, 1 in this many: kernels reserve different amounts."""

Read = Callable[[Host], Mapping[Any, Any]]
"""Values by what they are of: a device's address, a node, or "" for the host itself."""


class HostFact(NamedTuple):
    id: str  # id of the finding
    label: str
    read: Read
    # of the recorded and the present value, how bad the change is; None = none
    judge: Callable[[Any, Any], Severity | None]
    text: Callable[[Any], str] = str


class LimitingLink(NamedTuple):
    """The slowest link of a device's path."""

    rate: LinkRate
    # the present rate, if a GPU may be idle: then `rate` is for its lanes at the speed of both ends
    idle: LinkRate | None = None

    def __str__(self) -> str:
        idle = "" if self.idle is None else f" at most: it idles at {self.idle}"
        return f"{self.rate.format_with_rate()}{idle}"


def _judge_change(severity: Severity) -> Callable[[Any, Any], Severity | None]:
    return lambda was, now: severity if was != now else None


def _judge_memory_change(was: int, now: int) -> Severity | None:
    return Severity.CRITICAL if abs(now - was) * _MEMORY_TOLERANCE > was else None


def _judge_count(was: int, now: int) -> Severity | None:
    return Severity.CRITICAL if now < was else None


def _judge_link(was: LimitingLink, now: LimitingLink) -> Severity | None:
    if now.rate.bytes_per_s >= was.rate.bytes_per_s:
        return None
    return Severity.CRITICAL if now.idle is None else Severity.INCONCLUSIVE


def _make_host_reader(read: Callable[[Host], Any]) -> Read:
    def values(host: Host) -> dict[str, Any]:
        value = read(host)
        return {} if value is None else {"": value}

    return values


def _count(name: str, host: Host) -> int | None:
    """Return a count of the host, or None if its source cannot show it (lspci lists no CPUs)."""
    if name in _PCI_COUNTS:
        is_given = bool(host.pci_devices) and are_models_known(host.pci_devices)
    else:
        is_given = bool(getattr(host, name, host.pus))
        is_given = is_given and not (host.nodes_assumed and name.endswith("nodes"))
    return int(getattr(summarise(host), name)) if is_given else None


def _sum_memory(host: Host) -> int | None:
    return None if host.nodes_assumed else summarise(host).memory_bytes


def _find_distances(host: Host) -> tuple[tuple[int, ...], ...] | None:
    return None if host.nodes_assumed else host.distances


def _format_matrix(distances: tuple[tuple[int, ...], ...]) -> str:
    return "; ".join(" ".join(map(str, row)) for row in distances)


def _count_huge_pages(host: Host) -> dict[str, int]:
    """Return the reserved pages by node and size, 0 included; free pages are not compared."""
    nodes = () if host.nodes_assumed else host.nodes
    return {
        f"node {node.index}, pages of {format_bytes(pool.page_bytes)}": pool.total_pages
        for node in nodes
        for pool in node.page_pools
    }


def _read_kernel_parameters(host: Host) -> str | None:
    parameters = host.settings.placement_parameters
    return "none that matters" if parameters == "" else parameters


def _judge_kernel_change(was: str, now: str) -> Severity | None:
    """Return a warning; None if at most values differ that one capture redacted."""
    words, new_words = was.split(), now.split()
    if len(words) == len(new_words) and all(map(_may_be_equal, words, new_words)):
        return None
    return Severity.WARNING


def _may_be_equal(word: str, other: str) -> bool:
    """Return whether two words are equal, or differ in a part that one of the captures redacted."""
    for redacted_word, text in ((word, other), (other, word)):
        parts = redacted_word.split("redacted")
        is_as_long = len(text) >= len(parts[0]) + len(parts[-1])
        if parts[1:] and is_as_long and text.startswith(parts[0]) and text.endswith(parts[-1]):
            return True
    return word == other


def _format_iommu(host: Host) -> str | None:
    names = host.settings.iommus
    return None if names is None else "on" if names else "off"


def _make_device_reader(read: Callable[[PciDevice], Any]) -> Read:
    def values(host: Host) -> dict[Bdf, Any]:
        value_of = {device.bdf: read(device) for device in list_judged_devices(host)}
        return {bdf: value for bdf, value in value_of.items() if value is not None}

    return values


def _name_model(device: PciDevice) -> str | None:
    """Return the model; None if the source does not name it."""
    if make_model_key(device) is None:
        return None
    number = device.name if device.device_id is None else f"{device.device_id:04x}"
    return f"{device.kind} {device.vendor_id:04x}:{number}"


def _list_nodes(host: Host) -> Mapping[Any, Any]:
    read = _make_device_reader(
        lambda device: None if device.node is None else f"node {device.node}"
    )
    return {} if host.nodes_assumed else read(host)


def _find_links(host: Host) -> dict[Bdf, LimitingLink]:
    """Return the links; paths with an unknown link are omitted, because it may be the slowest."""
    slowest_of: dict[Bdf, LimitingLink] = {}
    for path in list_device_paths(host):
        links = [_present_link(link) for link in path.links]
        known_links = [link for link in links if link is not None]
        if known_links and len(known_links) == len(links):
            slowest_of[path.device.bdf] = min(known_links, key=lambda link: link.rate.bytes_per_s)
    return slowest_of


def _present_link(link: Link) -> LimitingLink | None:
    rate = link.current if link.lower.link and link.lower.link.current_width else None
    capable = link.capable
    if rate is None or capable is None:
        return None
    if link.ends_at_gpu and rate.gt_per_s == IDLE_SPEED:
        return LimitingLink(LinkRate(capable.gt_per_s, rate.width), rate)
    return LimitingLink(rate)


_PCI_COUNTS = {"gpus": "GPUs", "nics": "NICs", "nvswitches": "NVSwitches"}
_COUNTS = {
    **{"packages": "packages", "cores": "cores", "pus": "CPUs", "pus_offline": "offline CPUs"},
    **{"llcs": "LLCs", "numa_nodes": "NUMA nodes", "cpuless_nodes": "nodes without CPUs"},
    **_PCI_COUNTS,
}
"""Name of each count of a host's summary."""
_CRITICAL, _WARNING = _judge_change(Severity.CRITICAL), _judge_change(Severity.WARNING)
_MODEL = HostFact("drift-device", "model", _make_device_reader(_name_model), _CRITICAL)
FACTS = (
    *(
        HostFact(
            "drift-topology",
            label,
            _make_host_reader(partial(_count, name)),
            _CRITICAL,
        )
        for name, label in _COUNTS.items()
    ),
    HostFact(
        "drift-topology",
        "memory",
        _make_host_reader(_sum_memory),
        _judge_memory_change,
        format_bytes,
    ),
    HostFact(
        "drift-topology", "distances", _make_host_reader(_find_distances), _CRITICAL, _format_matrix
    ),
    _MODEL,
    HostFact("drift-device", "node", _list_nodes, _CRITICAL),
    HostFact("drift-link", "link", _find_links, _judge_link),
    HostFact("drift-huge-pages", "huge pages", _count_huge_pages, _judge_count),
    HostFact(
        "drift-host",
        "kernel's command line",
        _make_host_reader(_read_kernel_parameters),
        _judge_kernel_change,
    ),
    HostFact(
        "drift-host", "firmware", _make_host_reader(lambda host: host.settings.firmware), _WARNING
    ),
    HostFact("drift-host", "IOMMU", _make_host_reader(_format_iommu), _CRITICAL),
)

Record = Mapping[tuple[HostFact, Any], Any]
"""Values by their facts and what they are of."""


def record_of(host: Host) -> dict[tuple[HostFact, Any], Any]:
    """Return the record of a host, as far as its source shows it."""
    return {(fact, thing): value for fact in FACTS for thing, value in fact.read(host).items()}


def find_drift(record: Record, host: Host, source: str) -> Iterator[Finding]:
    """Find the differences of a host from a record; faster links and more huge pages do not count.
    source: of the record."""
    present = record_of(host)
    devices, listed_models = (
        {fact_subject: model for (fact, fact_subject), model in facts.items() if fact is _MODEL}
        for facts in (record, present)
    )
    unread: list[tuple[HostFact, Any]] = []
    for fact, fact_subject in dict.fromkeys((*record, *present)):
        was, now = record.get((fact, fact_subject)), present.get((fact, fact_subject))
        severity: Severity | None = None
        absent = "unknown"
        if was is not None and now is not None:
            severity = fact.judge(was, now)
        elif fact is _MODEL:
            is_unread = fact_subject in host.device_at and now is None
            severity = Severity.CRITICAL if devices and listed_models and not is_unread else None
            absent = "no such device"
        elif fact.id == "drift-link":
            severity = (
                Severity.INCONCLUSIVE
                if fact_subject in devices and fact_subject in listed_models and was
                else None
            )
        elif was and fact.id != "drift-device":
            unread.append((fact, fact_subject))
        if severity is not None:
            model = devices.get(fact_subject) or listed_models.get(fact_subject)
            yield finding(
                fact.id,
                fact_subject or fact.label
                if model is None
                else f"{model.partition(' ')[0]} {fact_subject}",
                expected=absent if was is None else fact.text(was),
                observed=absent if now is None else fact.text(now),
                severity=severity,
                source=source,
                devices=() if model is None else (fact_subject,),
            )
    if unread:
        yield finding(
            "drift-topology",
            ", ".join(fact_subject or fact.label for fact, fact_subject in unread),
            expected=", ".join(
                fact.text(record[fact, fact_subject]) for fact, fact_subject in unread
            ),
            observed=f"{host.name} does not report them",
            severity=Severity.INCONCLUSIVE,
            case="not given",
            source=source,
        )


def find_majority(records: Iterable[Record]) -> dict[tuple[HostFact, Any], Any]:
    """Return the majority's values by fact; on a tie the larger count and the faster link."""
    members = tuple(records)
    common: dict[tuple[HostFact, Any], Any] = {}
    for key in dict.fromkeys(key for record in members for key in record):
        counts = Counter(record.get(key) for record in members)
        value = max(counts, key=lambda value: (_count_equal(key[0], value, counts), _rank(value)))
        if value is not None:
            common[key] = value
    return common


def _count_equal(fact: HostFact, value: Any, counts: Mapping[Any, int]) -> int:
    if value is None:
        return counts[value]
    return sum(
        count
        for other, count in counts.items()
        if other is not None and fact.judge(value, other) is fact.judge(other, value) is None
    )


def _rank(value: Any) -> float:
    if isinstance(value, LimitingLink):
        return value.rate.bytes_per_s
    return -1.0 if value is None else float(value) if isinstance(value, int) else 0.0


MIN_HOSTS = 3
"""Hosts of one kind; of two that differ neither is known to be right."""


class FleetDifference(Struct, frozen=True, kw_only=True):
    """A difference of some hosts from the other hosts of their kind."""

    kind: str  # see kind_of
    finding: Finding
    hosts: tuple[str, ...]  # their names
    of_hosts: int
    agreeing: int  # hosts of the kind with the expected value

    @property
    def is_tie(self) -> bool:
        """Whether as many hosts have this value as the expected one: no majority."""
        return len(self.hosts) >= self.agreeing

    def make_finding(self) -> Finding:
        """Return a finding whose subject also names the hosts."""
        subject = f"{self.finding.subject} of {', '.join(self.hosts)}"
        tie = ", no majority" if self.is_tie else ""
        cost = f"{len(self.hosts)} of {self.of_hosts} hosts of the kind {self.kind}{tie}"
        return replace(self.finding, subject=subject, cost=cost)


def compare_fleet(
    hosts: Sequence[tuple[str, Host]],
) -> tuple[list[FleetDifference], dict[str, int], list[str]]:
    """Return the differences of hosts from the majority of their kind, the worst severity and most
    hosts first; the number of hosts by kind; and the hosts of kinds with too few to compare. hosts:
    each with its name."""
    kinds: dict[str, list[tuple[str, Host]]] = {}
    for name, host in hosts:
        kinds.setdefault(name_kind(host), []).append((name, host))
    differences: list[FleetDifference] = []
    alone: list[str] = []
    for kind, members in kinds.items():
        if len(members) < MIN_HOSTS:
            alone += [name for name, _ in members]
            continue
        majority = find_majority(record_of(host) for _, host in members)
        groups: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
        for name, host in members:
            for difference in find_drift(majority, host, kind):
                if difference.severity is Severity.INCONCLUSIVE:
                    continue
                key = (difference.id, difference.subject, difference.expected, difference.observed)
                groups.setdefault(key, (difference, []))[1].append(name)
        agreeing = Counter[object]()
        for (*fact, _), (_, names) in groups.items():
            agreeing[*fact] -= len(names)
        differences += [
            FleetDifference(
                kind=kind,
                finding=finding,
                hosts=tuple(names),
                of_hosts=len(members),
                agreeing=len(members) + agreeing[*fact],
            )
            for (*fact, _), (finding, names) in groups.items()
        ]
    severities = list(Severity)
    differences.sort(
        key=lambda difference: (
            severities.index(difference.finding.severity),
            -len(difference.hosts),
        )
    )
    return differences, {kind: len(members) for kind, members in kinds.items()}, alone


def name_kind(host: Host) -> str:
    """Return the models of the processor and of most GPUs; their numbers are compared."""
    models = Counter(
        f"GPU {gpu.vendor_id:04x}:{gpu.device_id:04x}"
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.vendor_id is not None and gpu.device_id is not None
    )
    gpus = [model for model, _ in models.most_common(1)]
    return " with ".join((host.cpu.name or "unknown CPU", *gpus))
