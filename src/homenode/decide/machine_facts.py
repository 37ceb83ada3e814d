"""MachineFacts: what counts about a machine, next to its figures, for what to run on it."""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.decide.evidence.model import Evidence, Publication, System
from homenode.decide.health import link_health
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.measure.results.model import Origin, Run, host_kind
from homenode.plan.shape.guest_numa import is_grace
from homenode.vm.fingerprint import host_fingerprint


class MachineFacts(Struct, frozen=True, kw_only=True):
    """What counts about a machine in addition to the figures.

    fingerprint, kind: as in the head of its runs; None = unknown. results: the folder that
    its runs name, where they name no host; None where the machine itself is known. nodes: with
    PUs, None = unknown. grace_gpus: it has some, with initiator nodes. systems: of publications,
    that are its kind. findings: about its links.
    """

    name: str
    fingerprint: str | None
    kind: str | None
    results: str | None
    nodes: int | None
    has_siblings: bool
    gpus: int | None
    grace_gpus: bool
    systems: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]


def facts_of_host(host: Host, publications: Sequence[Publication]) -> MachineFacts:
    """The facts of a machine whose topology is known."""
    gpus = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None]
    return MachineFacts(
        name=host.name,
        fingerprint=host_fingerprint(host),
        kind=host_kind(host),
        results=None,
        nodes=sum(bool(node.pus) for node in host.nodes),
        has_siblings=any(len(core.pus) > 1 for core in host.cores),
        gpus=len(gpus),
        grace_gpus=any(map(is_grace, gpus)) and any(node.generic_initiator for node in host.nodes),
        systems=_systems(
            host.name, host.cpu.name or "", [gpu.name or "" for gpu in gpus], publications
        ),
        findings=link_health(host),
    )


def facts_of_runs(
    name: str, runs: Sequence[Run], publications: Sequence[Publication]
) -> MachineFacts:
    """The facts of a machine of which nothing is known but runs; all are of the one machine."""
    head = runs[0].head
    kind = next((run.head.host_kind for run in runs if run.head.host_kind is not None), None)
    return MachineFacts(
        name=name,
        fingerprint=next((run.head.host for run in runs if run.head.host is not None), None),
        kind=kind,
        results=head.system,
        nodes=None,
        has_siblings=True,
        gpus=None,
        grace_gpus=False,
        systems=_systems("", kind or "", [kind or ""], publications),
        findings=(),
    )


def of_host(runs: Sequence[Run], host: Host) -> tuple[Run, ...]:
    """Runs with those that name no host as this host's, where they are all of one machine: whoever
    names a host next to them says so."""
    nameless = [
        run for run in runs if run.head.host is None and run.head.origin is not Origin.PUBLISHED
    ]
    if len({(run.head.system, run.head.host_kind) for run in nameless}) != 1:
        return tuple(runs)
    fingerprint = host_fingerprint(host)
    return tuple(
        Run(structs.replace(run.head, host=fingerprint), run.samples) if run in nameless else run
        for run in runs
    )


def machines_in(evidence: Evidence, hosts: Mapping[str, Host]) -> tuple[MachineFacts, ...]:
    """The machines of the evidence's runs, own ones first; without runs, the published ones."""
    own: dict[tuple[str, str | None], list[Run]] = {}
    printed = {run.head.system for run in evidence.runs if run.head.origin is Origin.PUBLISHED}
    for run in evidence.runs:
        if run.head.origin is not Origin.PUBLISHED:
            own.setdefault((run.head.system, run.head.host or run.head.host_kind), []).append(run)
    several = {system for system, _ in own}
    found = []
    for (system, where), runs in own.items():
        name = system if len(several) == len(own) else f"{system} on {where or 'some host'}"
        found.append(facts_of_runs(name, runs, evidence.publications))
    for publication in evidence.publications:
        for one in publication.systems:
            if one.host is not None and (one.name in printed or not evidence.runs):
                machine = facts_of_host(hosts[one.host], evidence.publications)
                found.append(replace(machine, name=one.name))
    return tuple(found)


def facts_of_measured(
    runs: Sequence[Run], host: Host, publications: Sequence[Publication]
) -> MachineFacts:
    """The facts of the machine of some runs, with those of a host if it is the one they name."""
    machine = facts_of_host(host, publications)
    if any(run.head.host == machine.fingerprint for run in runs):
        return machine
    return facts_of_runs(runs[0].head.system, runs, publications)


def _systems(
    host: str, cpu: str, gpus: Sequence[str], publications: Sequence[Publication]
) -> tuple[tuple[str, str], ...]:
    return tuple(
        (publication.id, system.name)
        for publication in publications
        for system in publication.systems
        if _is_kind(system, host, cpu, gpus)
    )


def _is_kind(system: System, host: str, cpu: str, gpus: Sequence[str]) -> bool:
    """A published system is a machine's kind where processor and GPU bear the published names."""
    if system.host is None:
        return False
    if system.host == host:
        return True
    if system.cpu is None or system.gpu is None:
        return False
    processor = re.search(rf"\b{re.escape(system.cpu.split()[-1])}\b", cpu, re.IGNORECASE)
    card = re.compile(rf"\b{re.escape(system.name)}\b", re.IGNORECASE)
    return processor is not None and any(card.search(name) for name in gpus)
