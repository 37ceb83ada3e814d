"""Observation: a host and its tuned VMs as one look of the watch sees them. [I/O]

Nothing is changed, and no GPU, NIC or drive is woken: only sysfs, /proc and libvirt are read.
"""

import resource
import time
from dataclasses import dataclass

from homenode.discover.host import discover
from homenode.doctor.expectation import Expectation
from homenode.errors import HomenodeError
from homenode.findings import Finding
from homenode.gap import Gap
from homenode.snapshot.protocol import QuietSnapshot, Snapshot
from homenode.topology import Host, RunningDomain
from homenode.watch.alert import DomainState, alerts
from homenode.watch.state import WatchState

COMMANDS = ("virsh-domains", "virsh-version", "uname")


@dataclass(frozen=True, slots=True)
class Look:
    """state: what is kept. host: as it was read. cpu_s: processor time of this process
    and the programs that it ran."""

    state: WatchState
    host: Host
    cpu_s: float


def look(snapshot: Snapshot, expected: Expectation | None, connect: str | None) -> Look:
    """One look. connect: libvirt of this machine, whose running VMs are looked into; None = the
    snapshot is of another machine. Raises as discover does."""
    quiet = QuietSnapshot(snapshot, COMMANDS)
    host = discover(quiet, _read_domain)
    not_read: list[Gap] = []
    domains = _domains(quiet, host, connect, not_read)
    found = alerts(expected, host, domains)
    if expected is None:
        not_read.append(Gap("what was certified", "no expectation; write one: homenode expect -o"))
    state = WatchState(
        host.name,
        time.time(),
        found,
        tuple(one.name for one in domains),
        tuple(not_read),
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Look(state, host, sum(one.ru_utime + one.ru_stime for one in used))


def _read_domain(xml: bytes, running: bool, source: str) -> RunningDomain:
    from homenode.domain.read import read_running_domain

    return read_running_domain(xml, running, source)


def _domains(
    snapshot: Snapshot, host: Host, connect: str | None, not_read: list[Gap]
) -> tuple[DomainState, ...]:
    """The running domains that carry the record of a layout."""
    listed = snapshot.command_output("virsh-domains")
    if listed is None:
        not_read.append(Gap("running VMs", "virsh is not there or did not answer"))
        return ()
    if not listed.strip():
        return ()
    # Most of the work of a host without VMs would be to load these.
    from lxml import etree

    from homenode.doctor.guest.domain import domain_findings
    from homenode.domain.metadata import read_record
    from homenode.domain.read import open_domain
    from homenode.plan.fingerprint import host_fingerprint
    from homenode.tools.xml_text import parse_xml
    from homenode.verify.domain_facts import domain_facts

    found: list[DomainState] = []
    fingerprint = host_fingerprint(host)
    for child in parse_xml(listed, "domains", f"{snapshot.name}: virsh dumpxml"):
        if child.get("id") is None:  # libvirt gives only active domains an id
            continue
        name = child.findtext("name") or "a domain without a name"
        try:
            document = open_domain(
                etree.tostring(child, encoding="utf-8", with_tail=False), f"domain {name}"
            )
            record = read_record(document)
            if record is None:
                continue
            facts = domain_facts(document)
            findings = domain_findings(facts, document, host)
            devices = tuple(hostdev.source for hostdev in facts.guest.hostdevs)
        except HomenodeError as error:
            not_read.append(Gap(f"VM {name}", error.message))
            continue
        if connect is not None:
            findings += _live(child.findtext("uuid") or name, connect, not_read)
        is_foreign = record.host is not None and not fingerprint.startswith(record.host)
        found.append(DomainState(name, devices, is_foreign, tuple(findings)))
    return tuple(found)


def _live(uuid: str, connect: str, not_read: list[Gap]) -> list[Finding]:
    from homenode.verify.live.domain import verify_running_domain

    try:
        return list(verify_running_domain(uuid, connect).findings)
    except HomenodeError as error:
        not_read.append(Gap(f"VM {uuid}: its threads and pages", error.message))
        return []
