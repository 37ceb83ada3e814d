"""Alert: one thing that an operator must look at, with all findings that have the same cause.

The outcome of one look is kept for the next: what is new follows from it.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.doctor.expectation import (
    CPU_COUNTS,
    CertifiedHost,
    DeviceChange,
    DeviceDrift,
    device_drift,
    huge_page_drift,
    topology_drift,
)
from homenode.findings import Finding, Severity, in_order
from homenode.gap import Gap
from homenode.machine.topology import Host
from homenode.wording import command_line, operands

LINKS = frozenset({"pcie-link-slow", "pcie-link-narrow", "pcie-target-low", "pcie-link-dropped"})
"""What the doctor says of links; a drift of a link says the same with what was certified."""

PRESENCE = frozenset({"device-silent", "pcie-link-unknown", "board-incomplete", "nvlinks-few"})
MEMORY = frozenset({"node-memory-unequal", "node-without-memory"})
_TOPOLOGY = frozenset({*CPU_COUNTS, "memory", "distances"})


class Alert(Struct, frozen=True, kw_only=True):
    """id, severity, subject: of the first finding, which names the cause. findings: all of them.

    domains: running VMs that it concerns, by name. devices: host addresses that it is about.
    """

    id: str
    severity: Severity
    subject: str
    findings: tuple[Finding, ...]
    domains: tuple[str, ...] = ()
    devices: tuple[Bdf, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same alert in the next run."""
        return self.id, self.subject


class WatchedDomain(Struct, frozen=True, kw_only=True):
    """A running VM that homenode has tuned. devices: host functions that it has.

    is_foreign: planned for another host, or for this one before its topology changed.
    findings: of its document and of its threads and pages on this host.
    """

    name: str
    devices: tuple[Bdf, ...]
    is_foreign: bool
    findings: tuple[Finding, ...]


def alerts(
    expected: CertifiedHost | None,
    host: Host,
    domains: Iterable[WatchedDomain] = (),
    site: Iterable[Finding] = (),
) -> tuple[Alert, ...]:
    """The alerts on a host and its VMs, the worst first; one for each cause.

    expected: what was certified; None = only what the doctor knows to be wrong on any host. site:
    what checks of other distributions found on the host.
    """
    found = list(_drifts(expected, host)) if expected is not None else []
    accepted = set() if expected is None else set(expected.accepted)
    explained = set[str]()
    if any(alert.id == "drift-link" for alert in found):
        explained |= LINKS
    if any(alert.id == "drift-device" for alert in found):
        explained |= PRESENCE
    if any(alert.subject == "topology" for alert in found):
        explained |= MEMORY
    found += [
        _alert((finding,))
        for finding in (*diagnose(host).findings, *site)
        if finding.is_bad and finding.id not in accepted | explained
    ]
    for domain in domains:
        _add_domain(found, domain)
    return tuple(sorted(found, key=lambda one: (one.severity != Severity.CRITICAL, one.key)))


def _drifts(expected: CertifiedHost, host: Host) -> Iterator[Alert]:
    topology = [(name, one) for name, one in topology_drift(expected, host) if one.is_bad]
    devices = [one for one in device_drift(expected, host) if one.finding.is_bad]
    shape = [finding for name, finding in topology if name in _TOPOLOGY]
    counts = [finding for name, finding in topology if name not in _TOPOLOGY]
    if shape:
        # Other nodes mean other nodes of devices: the same cause.
        moved = [one for one in devices if one.change is DeviceChange.NODE]
        devices = [one for one in devices if one not in moved]
        yield _alert((*shape, *(one.finding for one in moved)), "topology")
    presence = [one for one in devices if one.change is DeviceChange.PRESENCE]
    if counts and not presence:
        yield _alert(tuple(counts), "devices")
    was_there = {one.bdf for one in expected.devices}
    if len({one.bdf in was_there for one in presence}) == 2:
        # Some are gone and some are new: cards that were moved, or buses with other numbers.
        devices = [one for one in devices if one not in presence]
        yield _of_devices(presence, "addresses")
    for slot in dict.fromkeys(_slot(one) for one in devices):
        yield _of_devices([one for one in devices if _slot(one) == slot])
    pages = tuple(huge_page_drift(expected, host))
    if pages:
        yield _alert(pages, "huge pages")


def _of_devices(changed: Sequence[DeviceDrift], subject: str | None = None) -> Alert:
    findings = tuple(one.finding for one in changed)
    return _alert(findings, subject, devices=tuple(one.bdf for one in changed))


def _slot(drift: DeviceDrift) -> tuple[int, int, int]:
    """Functions of one card come and go together."""
    return drift.bdf.domain, drift.bdf.bus, drift.bdf.device


def _add_domain(found: list[Alert], domain: WatchedDomain) -> None:
    """A VM that suffers from a cause that is an alert already is listed there."""
    bad = tuple(finding for finding in in_order(domain.findings) if finding.is_bad)
    if not bad and not domain.is_foreign:
        return
    for number, alert in enumerate(found):
        is_cause = alert.id == "drift-topology" and alert.subject == "topology"
        if is_cause or set(alert.devices) & set(domain.devices):
            findings, domains = (*alert.findings, *bad), (*alert.domains, domain.name)
            found[number] = replace(alert, findings=findings, domains=domains)
            return
    if domain.is_foreign:
        foreign = finding(
            "plan-of-other-host",
            domain.name,
            expected="a layout planned for this host",
            observed="one planned for another host, or before this host's topology changed",
            values={"domain": command_line(*operands(domain.name))},
            source="the layout's record in the domain's <metadata>",
        )
        bad = (foreign, *bad)
    found.append(_alert(bad, domain.name, domains=(domain.name,)))


def _alert(
    findings: tuple[Finding, ...],
    subject: str | None = None,
    *,
    domains: tuple[str, ...] = (),
    devices: tuple[Bdf, ...] = (),
) -> Alert:
    return Alert(
        id=findings[0].id,
        severity=in_order(findings)[0].severity,
        subject=subject or findings[0].subject,
        findings=findings,
        domains=domains,
        devices=devices,
    )


KIND = "watch"


class WatchState(Struct, frozen=True, kw_only=True):
    """time_s: seconds since 1970 (UTC). domains: tuned VMs that ran. not_read: what could not be
    looked at, with the reason."""

    host: str
    time_s: float
    alerts: tuple[Alert, ...]
    domains: tuple[str, ...] = ()
    not_read: tuple[Gap, ...] = ()


class Changes(Struct, frozen=True, kw_only=True):
    """What differs from the look before, in the order of the alerts."""

    raised: tuple[Alert, ...]
    cleared: tuple[Alert, ...]
    newly_unread: tuple[Gap, ...]

    def __bool__(self) -> bool:
        return bool(self.raised or self.cleared or self.newly_unread)


def changes(before: WatchState | None, now: WatchState) -> Changes:
    """Alerts that are new or gone. An alert whose severity rose is new."""
    old = {} if before is None else {alert.key: alert for alert in before.alerts}
    new = {alert.key: alert for alert in now.alerts}
    known = set() if before is None else set(before.not_read)
    return Changes(
        raised=tuple(
            alert
            for key, alert in new.items()
            if key not in old or old[key].severity != alert.severity
        ),
        cleared=tuple(alert for key, alert in old.items() if key not in new),
        newly_unread=tuple(gap for gap in now.not_read if gap not in known),
    )
