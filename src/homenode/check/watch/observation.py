"""Observation: a host and its tuned VMs as one look of the watch sees them. [I/O]

Nothing is changed, and no GPU, NIC or drive is woken: only sysfs, /proc and libvirt are read.
"""

import resource
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.check.doctor.expectation import (
    UNREAD,
    CertifiedHost,
    DeviceChange,
    device_drift,
    topology_drift,
)
from homenode.check.watch.alert import (
    WatchedDomain,
    WatchState,
    alerts,
    count_claims,
    with_stale,
)
from homenode.check.watch.claim import Sight
from homenode.errors import HomenodeError
from homenode.findings import Finding, Severity
from homenode.gap import Gap
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.contents import COMMAND_OF_NAME
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import QuietSnapshot, Snapshot
from homenode.machine.topology import Host, RunningDomain
from homenode.wording import first_few

if TYPE_CHECKING:
    from homenode.check.verify.live.capture import ProcFiles
    from homenode.vm.domain.document import Document
    from homenode.vm.model import Vm


OWN_GUESTS = "homenode-verify-"
"""How the names of test guests begin that `verify --boot` starts: they last for seconds."""

COMMANDS = ("virsh-domains", "virsh-version", "uname")


class WatchPass(Struct, frozen=True, kw_only=True):
    """state: what is kept. host: as it was read. cpu_s: processor time of this process
    and the programs that it ran."""

    state: WatchState
    host: Host
    cpu_s: float


def look(
    snapshot: Snapshot,
    expected: CertifiedHost | None,
    connect: str | None,
    before: WatchState | None = None,
) -> WatchPass:
    """One look. connect: libvirt of this machine, whose running VMs are looked into; None = the
    snapshot is of another machine. before: the look before, of which what this one cannot judge
    stands. Raises as discover does."""
    # Of a capture all is read: no device is woken by what was stored.
    is_live = isinstance(snapshot, LiveSnapshot)
    quiet = QuietSnapshot(snapshot, COMMANDS if is_live else COMMAND_OF_NAME)
    host = discover(quiet, _read_domain)
    not_read: list[Gap] = []
    is_listed = quiet.command_output("virsh-domains") is not None
    if not is_listed:
        failures = snapshot.failures if isinstance(snapshot, LiveSnapshot) else {}
        not_read.append(Gap("running VMs", failures.get("virsh-domains", "no output of virsh")))
    known = () if before is None else before.alerts
    unread = _Unread(
        defined=set(() if before is None else before.defined),
        refuted=frozenset(claim.vm for one in known for claim in one.claims if claim.vm),
    )
    domains = _domains(quiet, host, connect, unread)
    not_read += unread.gaps
    sight = replace(
        Sight.of(host, expected),
        running=frozenset(one.name for one in domains) if is_listed else None,
        unread_vms=unread.vms,
        unread_live=unread.live,
    )
    found = alerts(expected, host, domains)
    if before is not None:
        found = with_stale(before.alerts, found, sight)
    if expected is None:
        not_read.append(
            Gap("recorded state", "no file; homenode watch certify -o /etc/homenode/expect.toml")
        )
    else:
        missing = (finding for name, finding in topology_drift(expected, host) if name == UNREAD)
        not_read += [Gap(finding.subject, finding.observed) for finding in missing]
        not_read += _unread_links(expected, host)
    state = WatchState(
        host=host.name,
        time_s=time.time(),
        alerts=found,
        domains=tuple(one.name for one in domains),
        defined=tuple(sorted(unread.defined.intersection(one.name for one in domains))),
        not_read=tuple(not_read),
        claims=count_claims(expected, found, sight),
    )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return WatchPass(state=state, host=host, cpu_s=sum(one.ru_utime + one.ru_stime for one in used))


class _Unread(Struct):
    """What could not be read of VMs, the reasons by VM: its document, its threads and pages.
    defined: see WatchState. refuted: VMs of alerts of the look before."""

    defined: set[str] = field(default_factory=set)
    refuted: frozenset[str] = frozenset()

    gaps: list[Gap] = field(default_factory=list)
    vms: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)


def _unread_links(expected: CertifiedHost, host: Host) -> list[Gap]:
    """One gap for all links that were certified and are not given now; a device that sleeps has
    none, and is no gap."""
    unknown = [
        one.finding.devices[0]
        for one in device_drift(expected, host)
        if one.change is DeviceChange.LINK
        and one.finding.severity is Severity.INCONCLUSIVE
        and one.cause is None
    ]
    if not unknown:
        return []
    return [Gap(f"links of {first_few(map(str, unknown), 4)}", "what they have is not given")]


def _read_domain(xml: bytes, running: bool, source: str) -> RunningDomain:
    from homenode.vm.domain.read import read_running_domain

    return read_running_domain(xml, running, source)


def _domains(
    snapshot: Snapshot, host: Host, connect: str | None, unread: _Unread
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
        if name.startswith(OWN_GUESTS):
            continue
        try:
            document = open_domain(
                etree.tostring(child, encoding="utf-8", with_tail=False), f"domain {name}"
            )
            facts = vm_of(document)
            uuid = facts.uuid if connect is not None else None
            record = facts.record
            is_applied = uuid is not None and _is_applied(uuid, connect or "")
            if record is None and not is_applied:
                if uuid is not None and name in unread.refuted:  # whether it was given up
                    _changed(facts, document, connect or "", uuid, child.get("id"), unread)
                continue
            planned_for = None if record is None else record.host
            is_ours = None if planned_for is None else is_made_for(host, planned_for)
            # Against a host that is not known whole, its nodes and devices would look wrong.
            is_known = record is not None and (is_ours is not None or not host.nodes_assumed)
            findings = domain_findings(facts, document, host) if is_known else []
            if is_ours is None and planned_for is not None:
                reason = "could not read the host's NUMA nodes and PCI functions"
                unread.gaps.append(Gap(f"VM {name}: whether it was planned for this host", reason))
                unread.vms[name] = reason
        except HomenodeError as error:
            unread.gaps.append(Gap(f"VM {name}", error.message))
            unread.vms[name] = error.message
            continue
        if connect is not None and uuid is not None:
            findings += _changed(facts, document, connect, uuid, child.get("id"), unread)
            findings += _live(facts, unread, files)
        devices = tuple(hostdev.bdf for hostdev in facts.hostdevs)
        found.append(
            WatchedDomain(
                name=name, devices=devices, is_foreign=is_ours is False, findings=tuple(findings)
            )
        )
    return tuple(found)


def _changed(
    facts: "Vm",
    document: "Document",
    connect: str,
    uuid: str,
    run_id: str | None,
    unread: _Unread,
) -> Iterable[Finding]:
    """What differs from the document that homenode defined and the pins that it moved since, and
    what the persistent definition will change of it at the next start; where there is no record of
    one, what differs from the persistent definition. Without a layout in that, the plan was given
    up."""
    from homenode.change.apply.live_pins import moved_in_run, run_mark
    from homenode.change.apply.store import DomainStore
    from homenode.change.journal import default_root
    from homenode.change.step import ChangeState
    from homenode.check.domain.diagnosis import (
        definition_drift,
        domain_drift,
        settings_drift,
        undefined,
    )
    from homenode.vm.domain.read import open_domain, vm_of
    from homenode.vm.hypervisor.virsh import Virsh

    name = facts.name
    defined: Document | None = None
    try:
        store, virsh = DomainStore(default_root(), connect, uuid), Virsh(connect)
        is_kept = virsh.domain(uuid).persistent
        applied = store.definition()
        if applied is not None and applied.what is ChangeState.DONE:
            text = store.document(applied.facts.get("found") or applied.after)
            source = f"{name} as homenode defined it"
            unread.defined.add(name)
            defined = open_domain(virsh.definition(uuid), f"the persistent definition of {name}")
        else:
            text = virsh.definition(uuid)
            source = f"the persistent definition of {name}"
        was_defined = open_domain(text, source)
        planned = vm_of(was_defined)
        run = int(run_id) if run_id is not None and run_id.isdecimal() else None
        moved = None if run is None else moved_in_run(store, run, run_mark(uuid))
    except HomenodeError as error:
        unread.gaps.append(Gap(f"VM {name}: what was planned", error.message))
        unread.vms[name] = error.message
        return ()
    if planned.record is None:
        return ()
    found = [
        *domain_drift(planned, facts, () if moved is None else moved[1]),
        *settings_drift(was_defined, document, name, ""),
    ]
    unread.defined |= {name} if is_kept else set()
    if name in unread.defined and not is_kept:
        found.append(undefined(name, uuid))
    elif defined is not None:
        found += definition_drift(planned, vm_of(defined))
        found += settings_drift(was_defined, defined, name, " at its next start")
    return found


def _is_applied(uuid: str, connect: str) -> bool:
    """Whether homenode has defined it, and not restored it."""
    from homenode.change.apply.store import DomainStore
    from homenode.change.journal import default_root
    from homenode.change.step import ChangeState

    try:
        applied = DomainStore(default_root(), connect, uuid).definition()
    except HomenodeError:
        return True  # what cannot be read is named where its plan is
    return applied is not None and applied.what is ChangeState.DONE


def _live(facts: "Vm", unread: _Unread, files: "ProcFiles") -> tuple[Finding, ...]:
    """Its threads and pages, as they are at this moment: nothing is waited for."""
    from homenode.check.verify.live.capture import capture_running_vm, what_to_watch
    from homenode.check.verify.live.checks import verify_live

    try:
        running = capture_running_vm(facts.uuid or "", what_to_watch(facts, seconds=0), files)
    except HomenodeError as error:
        unread.gaps.append(Gap(f"VM {facts.name}: its threads and pages", error.message))
        unread.live[facts.name] = error.message
        return ()
    gaps = [Gap(f"VM {facts.name}: {one.subject}", one.reason) for one in running.gaps]
    unread.gaps += gaps
    if gaps:
        unread.live[facts.name] = str(gaps[0])
    others = (one for one in running.neighbours if not (one.domain or "").startswith(OWN_GUESTS))
    return verify_live(facts, replace(running, neighbours=tuple(others))).findings
