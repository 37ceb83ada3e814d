"""Observation: a host and its tuned VMs as one look of the watch sees them. [I/O]

Nothing is changed, and no GPU, NIC or drive is woken: only sysfs, /proc and libvirt are read.
"""

import resource
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from homenode.check.doctor.diagnosis import site_findings
from homenode.check.doctor.expectation import UNREAD, CertifiedHost, topology_drift
from homenode.check.watch.alert import WatchedDomain, WatchState, alerts
from homenode.errors import HomenodeError, InputError
from homenode.findings import Finding
from homenode.gap import Gap
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import QuietSnapshot, Snapshot
from homenode.machine.topology import Host, RunningDomain

if TYPE_CHECKING:
    from homenode.check.verify.live.capture import ProcFiles
    from homenode.vm.model import Vm


COMMANDS = ("virsh-domains", "virsh-version", "uname")


class WatchPass(Struct, frozen=True, kw_only=True):
    """state: what is kept. host: as it was read. cpu_s: processor time of this process
    and the programs that it ran."""

    state: WatchState
    host: Host
    cpu_s: float


def look(snapshot: Snapshot, expected: CertifiedHost | None, connect: str | None) -> WatchPass:
    """One look. connect: libvirt of this machine, whose running VMs are looked into; None = the
    snapshot is of another machine. Raises as discover does."""
    quiet = QuietSnapshot(snapshot, COMMANDS)
    host = discover(quiet, _read_domain)
    not_read: list[Gap] = []
    if quiet.command_output("virsh-domains") is None:
        failures = snapshot.failures if isinstance(snapshot, LiveSnapshot) else {}
        not_read.append(Gap("running VMs", failures.get("virsh-domains", "no output of virsh")))
    domains = _domains(quiet, host, connect, not_read)
    site: tuple[Finding, ...] = ()
    try:
        site = tuple(site_findings(host))
    except InputError as error:  # the other alerts are no less needed
        not_read.append(Gap("checks of other distributions", error.message))
    found = alerts(expected, host, domains, site)
    if expected is None:
        not_read.append(Gap("recorded state", "no file; write one: homenode watch certify -o"))
    else:
        unread = (finding for name, finding in topology_drift(expected, host) if name == UNREAD)
        not_read += [Gap(finding.subject, finding.observed) for finding in unread]
    state = WatchState(
        host=host.name,
        time_s=time.time(),
        alerts=found,
        domains=tuple(one.name for one in domains),
        not_read=tuple(not_read),
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return WatchPass(state=state, host=host, cpu_s=sum(one.ru_utime + one.ru_stime for one in used))


def _read_domain(xml: bytes, running: bool, source: str) -> RunningDomain:
    from homenode.vm.domain.read import read_running_domain

    return read_running_domain(xml, running, source)


def _domains(
    snapshot: Snapshot, host: Host, connect: str | None, not_read: list[Gap]
) -> tuple[WatchedDomain, ...]:
    """The running domains that carry the record of a layout."""
    listed = snapshot.command_output("virsh-domains")
    if listed is None or not listed.strip():
        return ()
    # Most of the work of a host without VMs would be to load these.
    from lxml import etree

    from homenode.check.domain.diagnosis import domain_findings
    from homenode.check.verify.live.capture import ProcFiles
    from homenode.machine.tools.xml_text import parse_xml
    from homenode.vm.domain.read import open_domain, vm_of
    from homenode.vm.fingerprint import is_made_for

    found: list[WatchedDomain] = []
    files = ProcFiles()
    for child in parse_xml(listed, "domains", f"{snapshot.name}: virsh dumpxml"):
        if child.get("id") is None:  # libvirt gives only active domains an id
            continue
        name = child.findtext("name") or "a domain without a name"
        try:
            document = open_domain(
                etree.tostring(child, encoding="utf-8", with_tail=False), f"domain {name}"
            )
            facts = vm_of(document)
            if facts.record is None:
                continue
            planned_for = facts.record.host
            is_ours = None if planned_for is None else is_made_for(host, planned_for)
            # Against a host that is not known whole, its nodes and devices would look wrong.
            is_known = is_ours is not None or not host.nodes_assumed
            findings = domain_findings(facts, document, host) if is_known else []
            if is_ours is None and planned_for is not None:
                reason = "could not read the host's NUMA nodes and PCI functions"
                not_read.append(Gap(f"VM {name}: whether it was planned for this host", reason))
        except HomenodeError as error:
            not_read.append(Gap(f"VM {name}", error.message))
            continue
        uuid = child.findtext("uuid")
        if connect is not None and uuid is not None:
            findings += _changed(facts, connect, uuid, child.get("id"), not_read)
            findings += _live(facts, uuid, files, not_read)
        devices = tuple(hostdev.bdf for hostdev in facts.hostdevs)
        found.append(
            WatchedDomain(
                name=name, devices=devices, is_foreign=is_ours is False, findings=tuple(findings)
            )
        )
    return tuple(found)


def _changed(
    facts: "Vm", connect: str, uuid: str, run_id: str | None, not_read: list[Gap]
) -> Iterable[Finding]:
    """What differs from the document that homenode defined and the pins that it moved since; where
    it has no record of one, from the persistent definition. Without a layout in that, the plan was
    given up."""
    from homenode.change.apply.live_pins import moved_in_run, run_mark
    from homenode.change.apply.store import DomainStore
    from homenode.change.journal import default_root
    from homenode.change.step import ChangeState
    from homenode.check.domain.diagnosis import domain_drift
    from homenode.vm.domain.read import open_domain, vm_of
    from homenode.vm.hypervisor.virsh import Virsh

    name = facts.name
    try:
        store = DomainStore(default_root(), connect, uuid)
        applied = store.definition()
        if applied is not None and applied.what is ChangeState.DONE:
            text = store.document(applied.facts.get("found") or applied.after)
            source = f"{name} as homenode defined it"
        else:
            text = Virsh(connect).definition(uuid)
            source = f"the persistent definition of {name}"
        planned = vm_of(open_domain(text, source))
        run = int(run_id) if run_id is not None and run_id.isdecimal() else None
        moved = None if run is None else moved_in_run(store, run, run_mark(uuid))
    except HomenodeError as error:
        not_read.append(Gap(f"VM {name}: what was planned", error.message))
        return ()
    if planned.record is None:
        return ()
    return domain_drift(planned, facts, () if moved is None else moved[1])


def _live(facts: "Vm", uuid: str, files: "ProcFiles", not_read: list[Gap]) -> Iterable[Finding]:
    """Its threads and pages, as they are at this moment: nothing is waited for."""
    from homenode.check.verify.live.capture import capture_running_vm, what_to_watch
    from homenode.check.verify.live.checks import verify_live

    try:
        running = capture_running_vm(uuid, what_to_watch(facts, seconds=0), files)
    except HomenodeError as error:
        not_read.append(Gap(f"VM {facts.name}: its threads and pages", error.message))
        return ()
    not_read += [Gap(f"VM {facts.name}: {one.subject}", one.reason) for one in running.gaps]
    return verify_live(facts, running).findings
