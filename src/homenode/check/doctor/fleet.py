"""Fleet: hosts compared with their like: what most of them are is what each should be."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from homenode.check.doctor.expectation import CertifiedDevice, CertifiedHost, certify, drift
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)

LEAST = 3
"""Hosts of one kind; of two that differ neither is known to be right."""


class HostKind(Struct, frozen=True):
    """What makes hosts alike: their processor model and the model that most of their GPUs are."""

    cpu: str | None
    gpu: str | None

    def __str__(self) -> str:
        return " with ".join(one for one in (self.cpu or "unknown CPU", self.gpu) if one)


class FleetDifference(Struct, frozen=True, kw_only=True):
    """One way in which some hosts of a kind differ from the others. hosts: their names."""

    kind: HostKind
    finding: Finding
    hosts: tuple[str, ...]
    of_hosts: int

    @property
    def is_tie(self) -> bool:
        """As many hosts have this as have what the others are compared with: no majority."""
        return 2 * len(self.hosts) >= self.of_hosts

    def as_finding(self) -> Finding:
        """A finding whose subject names the hosts as well."""
        subject = f"{self.finding.subject} of {', '.join(self.hosts)}"
        cost = f"{len(self.hosts)} of {self.of_hosts} hosts of the kind {self.kind}"
        return replace(self.finding, subject=subject, cost=cost)


class Fleet(Struct, frozen=True, kw_only=True):
    """differences: those of most hosts first, within the worst severity first. kinds: hosts of each
    kind. alone: hosts of which there are too few to compare."""

    differences: tuple[FleetDifference, ...]
    kinds: tuple[tuple[HostKind, int], ...]
    alone: tuple[str, ...]


def compare_fleet(hosts: Sequence[tuple[str, Host]]) -> Fleet:
    """Every difference of a host from the majority of its kind. Hosts: each with its name."""
    kinds: dict[HostKind, list[tuple[str, Host]]] = {}
    for name, host in hosts:
        kinds.setdefault(kind_of(host), []).append((name, host))
    found: list[FleetDifference] = []
    alone: list[str] = []
    for kind, members in kinds.items():
        if len(members) < LEAST:
            alone += [name for name, _ in members]
            continue
        expected = majority([certify(host) for _, host in members], str(kind))
        groups: dict[Hashable, tuple[Finding, list[str]]] = {}
        for name, host in members:
            for one in drift(expected, host):
                if one.severity is Severity.INCONCLUSIVE:
                    continue
                key = (one.id, one.subject, one.expected, one.observed)
                groups.setdefault(key, (one, []))[1].append(name)
        found += [
            FleetDifference(kind=kind, finding=finding, hosts=tuple(names), of_hosts=len(members))
            for finding, names in groups.values()
        ]
    severities = list(Severity)
    found.sort(key=lambda one: (severities.index(one.finding.severity), -len(one.hosts)))
    sizes = tuple((kind, len(members)) for kind, members in kinds.items())
    return Fleet(differences=tuple(found), kinds=sizes, alone=tuple(alone))


def kind_of(host: Host) -> HostKind:
    """Its kind. The number of GPUs, nodes and cores is compared and makes no kind."""
    models = Counter(
        f"GPU {gpu.vendor_id:04x}:{gpu.device_id:04x}"
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.vendor_id is not None and gpu.device_id is not None
    )
    gpu = models.most_common(1)[0][0] if models else None
    return HostKind(host.cpu.name, gpu)


def majority(expectations: Sequence[CertifiedHost], name: str) -> CertifiedHost:
    """What most of them have, field by field and device by device; memory by its median.

    Where as many have one as another, the larger count and the faster link.
    """
    devices = {}
    for address in dict.fromkeys(one.bdf for each in expectations for one in each.devices):
        present = [
            next((one for one in each.devices if one.bdf == address), None) for each in expectations
        ]
        chosen = _most(present, _rate)
        if chosen is not None:
            devices[address] = chosen
    memory = sorted(one.memory_bytes for one in expectations if one.memory_bytes is not None)
    return CertifiedHost(
        host=name,
        counts=_mapping(expectations, lambda one: one.counts),
        memory_bytes=memory[len(memory) // 2] if memory else None,
        distances=_most([one.distances for one in expectations]),
        devices=tuple(devices[address] for address in sorted(devices)),
        floors={},
        huge_pages=_mapping(expectations, lambda one: one.huge_pages),
    )


def _mapping(
    expectations: Sequence[CertifiedHost], of: Callable[[CertifiedHost], Mapping[K, int]]
) -> dict[K, int]:
    keys = dict.fromkeys(key for one in expectations for key in of(one))
    values = {
        key: _most([of(one).get(key) for one in expectations], lambda n: n or 0) for key in keys
    }
    return {key: value for key, value in values.items() if value is not None}


def _rate(device: CertifiedDevice | None) -> float:
    return 0.0 if device is None or device.link is None else device.link.bytes_per_s


def _most(values: Iterable[T], rank: Callable[[T], float] = lambda value: 0.0) -> T:
    """The most common; of equals the one with the highest rank, then the first."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], rank(value)))
