"""Fleet: hosts compared with their like: what most of them are is what each should be."""

from collections import Counter
from collections.abc import Hashable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.check.doctor.baseline import drift, majority, record_of
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

LEAST = 3
"""Hosts of one kind; of two that differ neither is known to be right."""


class HostKind(Struct, frozen=True):
    """What makes hosts alike: their processor model and the model that most of their GPUs are."""

    cpu: str | None
    gpu: str | None

    def __str__(self) -> str:
        return " with ".join(part for part in (self.cpu or "unknown CPU", self.gpu) if part)


class FleetDifference(Struct, frozen=True, kw_only=True):
    """One way in which some hosts of a kind differ from the others."""

    kind: HostKind
    finding: Finding
    hosts: tuple[str, ...]  # their names
    of_hosts: int

    @property
    def is_tie(self) -> bool:
        """As many hosts have this as have what the others are compared with: no majority."""
        return 2 * len(self.hosts) >= self.of_hosts

    def as_finding(self) -> Finding:
        """A finding whose subject names the hosts as well."""
        subject = f"{self.finding.subject} of {', '.join(self.hosts)}"
        tie = ", no majority" if self.is_tie else ""
        cost = f"{len(self.hosts)} of {self.of_hosts} hosts of the kind {self.kind}{tie}"
        return replace(self.finding, subject=subject, cost=cost)


class Fleet(Struct, frozen=True, kw_only=True):
    """Differences between hosts of one kind."""

    # those of most hosts first, within the worst severity first
    differences: tuple[FleetDifference, ...]
    kinds: tuple[tuple[HostKind, int], ...]  # hosts of each kind
    alone: tuple[str, ...]  # hosts of which there are too few to compare


def compare_fleet(hosts: Sequence[tuple[str, Host]]) -> Fleet:
    """Every difference of a host from the majority of its kind. Hosts: each with its name."""
    kinds: dict[HostKind, list[tuple[str, Host]]] = {}
    for name, host in hosts:
        kinds.setdefault(kind_of(host), []).append((name, host))
    differences: list[FleetDifference] = []
    alone: list[str] = []
    for kind, members in kinds.items():
        if len(members) < LEAST:
            alone += [name for name, _ in members]
            continue
        expected = majority(record_of(host) for _, host in members)
        groups: dict[Hashable, tuple[Finding, list[str]]] = {}
        for name, host in members:
            for difference in drift(expected, host, str(kind)):
                if difference.severity is Severity.INCONCLUSIVE:
                    continue
                key = (difference.id, difference.subject, difference.expected, difference.observed)
                groups.setdefault(key, (difference, []))[1].append(name)
        differences += [
            FleetDifference(kind=kind, finding=finding, hosts=tuple(names), of_hosts=len(members))
            for finding, names in groups.values()
        ]
    severities = list(Severity)
    differences.sort(
        key=lambda difference: (
            severities.index(difference.finding.severity),
            -len(difference.hosts),
        )
    )
    sizes = tuple((kind, len(members)) for kind, members in kinds.items())
    return Fleet(differences=tuple(differences), kinds=sizes, alone=tuple(alone))


def kind_of(host: Host) -> HostKind:
    """Its kind. The number of GPUs, nodes and cores is compared and makes no kind."""
    models = Counter(
        f"GPU {gpu.vendor_id:04x}:{gpu.device_id:04x}"
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.vendor_id is not None and gpu.device_id is not None
    )
    gpu = models.most_common(1)[0][0] if models else None
    return HostKind(host.cpu.name, gpu)
