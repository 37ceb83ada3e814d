"""Alert: one thing that an operator must look at, with all findings that have the same cause.

The outcome of one look is kept for the next: what is new, what is repaired, and what this look
could not tell follow from it.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.alike import odd_attribute, odd_attributes
from homenode.check.doctor.baseline import HOST, LINE, OF_PUS, FactDrift, following
from homenode.check.doctor.diagnosis import host_findings
from homenode.check.doctor.expectation import (
    CPU_COUNTS,
    CertifiedHost,
    DeviceChange,
    DeviceDrift,
    baseline_drift,
    device_drift,
    huge_page_drift,
    topology_drift,
)
from homenode.check.watch.claim import (
    LINKS,
    ClaimState,
    Sight,
    WatchClaim,
    certified_claims,
    claim_of,
    unproved,
)
from homenode.findings import Finding, Severity, in_order, merged
from homenode.gap import Gap
from homenode.machine.topology import Host
from homenode.wording import command_line, operands

PRESENCE = frozenset(
    "device-silent pcie-link-unknown board-incomplete devices-uneven nvlinks-few".split()
) | {"device-odd: model", "device-odd: board", "device-odd: NUMA node", *odd_attributes("node")}
_OF_NODES = frozenset({"memory", "siblings"})
_OF_PUS = frozenset({"governor", "frequencies", "smt", "nvme/queue_count"})
_OF_PEERS = frozenset({"nvlinks", "amd-smi/link_status"})
_OF_MEMORY = ("memory module ", "memory controller ", "DIMM ")
"""Facts of the baseline that a changed topology changes; of PUs where the count is another one, of
such parts where the memory is."""

_BASELINE = "drift-baseline"

NODES = frozenset(
    {
        "pus-offline",
        "node-memory-unequal",
        "node-without-memory",
        "gpu-node-unknown",
        "node-spans-packages",
        "distances-asymmetric",
        "parts-uneven",
    }
)
"""What the doctor says of nodes; a changed topology says the same with what was certified."""

_TOPOLOGY = frozenset({*CPU_COUNTS, "memory", "distances"})


class Alert(Struct, frozen=True, kw_only=True):
    """id, severity, subject: of the first finding, which names the cause. findings: all of them.

    claims: what each of the findings refutes, in their order. domains: running VMs that it
    concerns, by name. devices: host addresses that it is about.
    """

    id: str
    severity: Severity
    subject: str
    findings: tuple[Finding, ...]
    domains: tuple[str, ...] = ()
    devices: tuple[Bdf, ...] = ()
    claims: tuple[WatchClaim, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """By which alerts are sorted."""
        return self.id, self.subject

    @property
    def state(self) -> ClaimState:
        """Stale where this look refutes nothing of it."""
        stale = self.claims and all(one.state is ClaimState.STALE for one in self.claims)
        return ClaimState.STALE if stale else ClaimState.REFUTED


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
) -> tuple[Alert, ...]:
    """The alerts on a host and its VMs, the worst first; one for each cause.

    expected: what was certified; None = only what the doctor knows to be wrong on any host.
    """
    found = list(_drifts(expected, host)) if expected is not None else []
    accepted = () if expected is None else expected.accepted
    explained = _explained(found)
    parts = {c.about.rpartition(": ")[0] for a in found for c in a.claims if c.id == _BASELINE}
    bad = [
        one
        for one in host_findings(host)
        if one.is_bad
        and not any(each.covers(one) for each in accepted)
        and not _is_explained(one, explained)
        and not (one.id == "part-odd" and one.subject.rpartition(": ")[0] in parts)
    ]
    for one in _grouped(bad):
        _add_of_device(found, one)
    for domain in domains:
        _add_domain(found, domain)
    return tuple(sorted(found, key=lambda one: (one.severity != Severity.CRITICAL, one.key)))


_Explained = dict[str, frozenset[Bdf] | None]
"""What alerts of the certified state explain: findings about these devices; None = about any."""


def _is_explained(one: Finding, explained: _Explained) -> bool:
    devices = explained.get(odd_attribute(one), frozenset())
    return devices is None or not devices.isdisjoint(one.devices)


_STATES = {
    "bars": ("bar-small", "bar-unassigned", *odd_attributes("bars")),
    "driver": odd_attributes("driver"),
    "frequencies": ("frequency-capped",),
    "governor": ("governor-mixed", "governor-powersave"),
    "iommu-mode": ("iommu-translates", *odd_attributes("domain")),
    "partition": odd_attributes("mode"),
    "turbo": ("turbo-off",),
    "nvlinks": ("nvlinks-few", *odd_attributes("peer links")),
    "subsystem": odd_attributes("board"),
    "ACS": ("p2p-redirected", *odd_attributes("isolation")),
}
"""Of a rule of the baseline: what the doctor says of the same, as of ``odd_attribute``."""


def _odd(fact: str) -> tuple[str, ...]:
    return f"device-odd: {fact}", f"part-odd: {fact.removeprefix('PU ')}"


def _explained(drifts: Sequence[Alert]) -> _Explained:
    links = frozenset(b for alert in drifts if alert.id == "drift-link" for b in alert.devices)
    of_links = (*LINKS, *(name for row in ("link", "port", "path") for name in odd_attributes(row)))
    explained: _Explained = dict.fromkeys(of_links, links)
    if any(alert.id == "drift-device" for alert in drifts):
        explained |= dict.fromkeys(PRESENCE)
    for alert in drifts:
        if aspects := {one.aspect for one in alert.claims if one.id == _BASELINE}:
            names = {name for one in aspects for name in _STATES.get(one, _odd(one))}
            of_any = not alert.devices or "ACS" in aspects  # ports, and who is below them
            explained |= dict.fromkeys(names, None if of_any else frozenset(alert.devices))
    if any(alert.subject == "topology" for alert in drifts):
        explained |= dict.fromkeys(NODES)
    return explained


_ONE_CAUSE = 3
"""So many devices with the same fault have one cause."""


def _grouped(findings: Sequence[Finding]) -> Iterator[Alert]:
    """One alert for what is said of many devices alike, else one for each device."""
    groups: dict[tuple[str, str, str | None, str | None], list[Finding]] = {}
    for one in in_order(findings):
        groups.setdefault((one.id, one.severity, one.cost, one.fix), []).append(one)
    alone: dict[object, list[Finding]] = {}
    for group in groups.values():
        if len(group) < _ONE_CAUSE or group[0].id in LINKS:
            for one in group:
                alone.setdefault(one.devices or (one.id, one.subject), []).append(one)
        else:
            (whole,) = merged(group)
            yield _alert(tuple(group), whole.subject, devices=whole.devices)
    yield from (_alert(tuple(ones), devices=ones[0].devices) for ones in alone.values())


def _drifts(expected: CertifiedHost, host: Host) -> Iterator[Alert]:
    topology = [(name, one) for name, one in topology_drift(expected, host) if one.is_bad]
    devices = [one for one in device_drift(expected, host) if one.finding.is_bad]
    pages = tuple(huge_page_drift(expected, host))
    facts = [one for one in baseline_drift(expected, host) if one.finding.is_bad]
    shape = [(name, one) for name, one in topology if name in _TOPOLOGY]
    is_of_pus = any(name in CPU_COUNTS for name, _ in shape)
    follows = (
        following(expected.facts, host) if any(one.rule.label == LINE for one in facts) else ()
    )
    has_other_memory = "memory" in {*(n for n, _ in shape), *(one.rule.name for one in facts)}
    nodes = [
        one
        for one in facts
        if one.rule.name in _OF_NODES
        or (is_of_pus and (one.rule.name in _OF_PUS or one.rule.name.startswith(OF_PUS)))
        or (has_other_memory and one.about.startswith(_OF_MEMORY))
        or (one.rule.label == LINE and shape and "topology" in follows)
    ]
    counts = [(name, one) for name, one in topology if name not in _TOPOLOGY]
    if shape or nodes:
        # Other nodes mean other nodes of devices, and a node that is gone has no pages: one cause.
        moved = [one for one in devices if _is_of_lost_node(one, expected, host)]
        devices = [one for one in devices if one not in moved]
        there = {f"node {node.index}" for node in host.nodes}
        lost = [one for one in pages if one.subject not in there]
        pages = tuple(one for one in pages if one.subject in there)
        yield _alert(
            (
                *(one for _, one in shape),
                *(one.finding for one in nodes),
                *(one.finding for one in moved),
                *lost,
            ),
            "topology",
            aspects=(
                *(name for name, _ in shape),
                *(one.rule.name for one in nodes),
                *(one.change for one in moved),
            ),
        )
    presence = [one for one in devices if one.change is DeviceChange.PRESENCE]
    if counts and not presence:
        names = tuple(name for name, _ in counts)
        yield _alert(tuple(one for _, one in counts), "devices", aspects=names)
    links = [one for one in facts if presence and one.rule.name in _OF_PEERS]
    was_there = {one.bdf for one in expected.devices}
    if len({one.bdf in was_there for one in presence}) == 2:
        # Some are gone and some are new: cards that were moved, or buses with other numbers.
        devices = [one for one in devices if one not in presence]
        yield _of_devices(presence, "addresses", links)
    for cause in dict.fromkeys(map(_cause, devices)):
        of_cause = [one for one in devices if _cause(one) == cause]
        is_first = presence[:1] == [one for one in of_cause if one in presence][:1]
        yield _of_devices(of_cause, None, links if is_first else ())
    lines = [one for one in facts if one.rule.label == LINE and pages and "huge pages" in follows]
    if pages:
        whole = (*(one.finding for one in lines), *pages)
        yield _alert(whole, "huge pages", aspects=tuple(one.rule.name for one in lines))
    left = [one for one in facts if one not in (*nodes, *lines, *links)]
    yield from _of_facts(left, devices, follows)


def _of_facts(
    facts: Sequence[FactDrift], devices: Sequence[DeviceDrift], follows: Container[str]
) -> Iterator[Alert]:
    """One alert for each topic, and for all topics of the same parts; a device that is another one
    has other facts for that alone. follows: facts that the kernel's command line changed."""
    changed = {one.bdf for one in devices if one.change is DeviceChange.IDENTITY}
    left = [one for one in facts if changed.isdisjoint(one.finding.devices)]
    topics: dict[tuple[str, bool], list[FactDrift]] = {}
    for one in left:
        rule, topic = one.rule, one.rule.topic or one.rule.label
        is_caused = rule.name in follows or rule.label in follows or topic in follows
        key = (LINE, True) if is_caused else (topic, one.about == HOST)
        topics.setdefault(key, []).append(one)
    groups: dict[object, list[tuple[str, bool]]] = {}
    for key, drifts in topics.items():
        places = frozenset(one.about for one in drifts)
        groups.setdefault(key if key[1] else places, []).append(key)
    for keys in groups.values():
        group = [one for key in keys for one in topics[key]]
        ours = tuple(one.finding for one in group)
        bdfs = tuple(dict.fromkeys(bdf for one in ours for bdf in one.devices))
        place = f"{group[0].about}: " if len({one.about for one in group}) == 1 else ""
        subject = None if len(ours) == 1 else f"{place}{', '.join(topic for topic, _ in keys)}"
        yield _alert(ours, subject, devices=bdfs, aspects=tuple(one.rule.name for one in group))


def _is_of_lost_node(drift: DeviceDrift, expected: CertifiedHost, host: Host) -> bool:
    if drift.change is DeviceChange.NODE:
        return True
    was = next((one.node for one in expected.devices if one.bdf == drift.bdf), None)
    lost = was is not None and host.node(was) is None
    return lost and drift.change is DeviceChange.PRESENCE


def _of_devices(
    changed: Sequence[DeviceDrift], subject: str | None = None, links: Sequence[FactDrift] = ()
) -> Alert:
    """links: of other devices to those that are gone."""
    return _alert(
        (*(one.finding for one in changed), *(one.finding for one in links)),
        subject,
        devices=tuple(one.bdf for one in changed),
        aspects=(*(one.change for one in changed), *(one.rule.name for one in links)),
    )


def _cause(drift: DeviceDrift) -> tuple[int, int, int]:
    """Functions of one card come and go together, and devices below one slow link are slow."""
    bdf = drift.bdf if drift.cause is None else drift.cause
    return bdf.domain, bdf.bus, bdf.device


def _add_of_device(found: list[Alert], alert: Alert) -> None:
    """What is odd about a device of which a certified fact is another one has that cause."""
    ours = (one.id == _BASELINE and one.devices == alert.devices for one in found)
    place = next((number for number, is_ours in enumerate(ours) if is_ours), None)
    if place is None or not alert.devices or alert.severity is Severity.CRITICAL:
        found.append(alert)
        return
    cause = found[place]
    found[place] = replace(
        cause,
        findings=(*cause.findings, *alert.findings),
        claims=(*cause.claims, *alert.claims),
    )


def _add_domain(found: list[Alert], domain: WatchedDomain) -> None:
    """A VM that suffers from a cause that is an alert already is listed there."""
    bad = tuple(finding for finding in in_order(domain.findings) if finding.is_bad)
    if not bad and not domain.is_foreign:
        return
    for number, alert in enumerate(found):
        is_cause = alert.id == "drift-topology" and alert.subject == "topology"
        if is_cause or set(alert.devices) & set(domain.devices):
            found[number] = replace(
                alert,
                findings=(*alert.findings, *bad),
                domains=(*alert.domains, domain.name),
                claims=(*alert.claims, *(claim_of(one, vm=domain.name) for one in bad)),
            )
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
    found.append(_alert(bad, domain.name, vm=domain.name))


def _alert(
    findings: tuple[Finding, ...],
    subject: str | None = None,
    *,
    vm: str | None = None,
    devices: tuple[Bdf, ...] = (),
    aspects: tuple[str, ...] = (),
) -> Alert:
    named = (*aspects, *[""] * (len(findings) - len(aspects)))
    return Alert(
        id=findings[0].id,
        severity=in_order(findings)[0].severity,
        subject=subject or findings[0].subject,
        findings=findings,
        domains=() if vm is None else (vm,),
        devices=devices,
        claims=tuple(
            claim_of(one, aspect, vm) for one, aspect in zip(findings, named, strict=True)
        ),
    )


def with_stale(before: Iterable[Alert], now: Sequence[Alert], sight: Sight) -> tuple[Alert, ...]:
    """The alerts of this look, and what earlier ones refuted and this one neither refutes nor
    proves: a claim that cannot be judged is not repaired."""
    refuted = {claim.key for alert in now for claim in alert.claims}
    gone = {c.about for a in now for c in a.claims if c.aspect == DeviceChange.PRESENCE}
    found = list(now)
    for alert in before:
        stale = tuple(
            (finding, replace(claim, state=ClaimState.STALE, reason=reason))
            for finding, claim in zip(alert.findings, alert.claims, strict=True)
            if not any(one.covers(finding) for one in sight.accepted)
            if claim.key not in refuted and (claim.vm is not None or claim.about not in gone)
            if (reason := unproved(claim, sight)) is not None
        )
        if not stale:
            continue
        ours = {claim.key for claim in alert.claims}
        place = next(
            (i for i, one in enumerate(found) if any(c.key in ours for c in one.claims)), None
        )
        kept = alert if place is None else found[place]
        old = () if place is None else kept.claims
        merged_alert = replace(
            kept,
            findings=(*(() if place is None else kept.findings), *(one for one, _ in stale)),
            claims=(*old, *(one for _, one in stale)),
        )
        if place is None:
            found.append(merged_alert)
        else:
            found[place] = merged_alert
    return tuple(sorted(found, key=lambda one: (one.severity != Severity.CRITICAL, one.key)))


KIND = "watch"


class ClaimCounts(Struct, frozen=True, kw_only=True):
    """How many claims, of the certified state and of tuned VMs, a look came to which state of."""

    proved: int = 0
    refuted: int = 0
    stale: int = 0


def count_claims(
    expected: CertifiedHost | None, alerts: Sequence[Alert], sight: Sight
) -> ClaimCounts:
    """Every VM counts as one claim in itself; what is refuted beyond the certified counts too."""
    known = {claim.key: claim for alert in alerts for claim in alert.claims}
    troubled = {claim.vm for claim in known.values()}
    states = Counter(claim.state for claim in known.values())
    for claim in () if expected is None else certified_claims(expected):
        if claim.key not in known:
            is_proved = unproved(claim, sight) is None
            states[ClaimState.PROVED if is_proved else ClaimState.STALE] += 1
    for name in sorted(sight.running or ()):
        if name not in troubled:
            is_read = name not in sight.unread_vms and name not in sight.unread_live
            states[ClaimState.PROVED if is_read else ClaimState.STALE] += 1
    return ClaimCounts(
        proved=states[ClaimState.PROVED],
        refuted=states[ClaimState.REFUTED],
        stale=states[ClaimState.STALE],
    )


class WatchState(Struct, frozen=True, kw_only=True):
    """time_s: seconds since 1970 (UTC). domains: tuned VMs that ran. defined: those that libvirt
    kept a definition of, at this look or while they ran before. not_read: what could not be looked
    at, with the reason."""

    host: str
    time_s: float
    alerts: tuple[Alert, ...]
    domains: tuple[str, ...] = ()
    defined: tuple[str, ...] = ()
    not_read: tuple[Gap, ...] = ()
    claims: ClaimCounts = ClaimCounts()


class Changes(Struct, frozen=True, kw_only=True):
    """What differs from the look before, in the order of the alerts.

    raised: with a claim that was not refuted before; news: of each of them the first finding that
    is new. cleared: claims that this look proves; of an alert of which nothing is left the first.
    stale: claims that were refuted, and that this look cannot judge.
    """

    raised: tuple[Alert, ...]
    cleared: tuple[WatchClaim, ...]
    stale: tuple[WatchClaim, ...]
    newly_unread: tuple[Gap, ...]
    news: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.raised or self.cleared or self.stale or self.newly_unread)


def changes(before: WatchState | None, now: WatchState) -> Changes:
    """What is new, repaired or no longer known. An alert whose severity rose is new."""
    was = () if before is None else before.alerts
    old = {claim.key: (claim, alert) for alert in was for claim in alert.claims}
    new = {claim.key: claim for alert in now.alerts for claim in alert.claims}
    known = set() if before is None else set(before.not_read)
    raised = tuple(alert for alert in now.alerts if _is_new(alert, old))
    return Changes(
        raised=raised,
        news=tuple(_first_new(alert, old) for alert in raised),
        cleared=tuple(claim for alert in was for claim in _repaired(alert, new)),
        stale=tuple(
            claim
            for key, claim in new.items()
            if claim.state is ClaimState.STALE
            and key in old
            and old[key][0].state is not ClaimState.STALE
        ),
        newly_unread=tuple(gap for gap in now.not_read if gap not in known),
    )


_Key = tuple[str, str, str, str | None]


def _is_new(alert: Alert, old: Mapping[_Key, tuple[WatchClaim, Alert]]) -> bool:
    if any(one.key not in old for one in alert.claims if one.state is ClaimState.REFUTED):
        return True
    before = [old[one.key][1].severity for one in alert.claims if one.key in old]
    was_worst = Severity.CRITICAL in before or alert.severity in before
    return bool(before) and not was_worst


def _first_new(alert: Alert, old: Mapping[_Key, tuple[WatchClaim, Alert]]) -> Finding:
    pairs = zip(alert.findings, alert.claims, strict=True)
    return next((one for one, claim in pairs if claim.key not in old), alert.findings[0])


def _letters(text: str) -> str:
    """The same of "vCPU 0" and "vCPUs 0-1"."""
    return "".join(letter for letter in text if letter.isalpha()).rstrip("s")


def _repaired(alert: Alert, new: Mapping[_Key, WatchClaim]) -> tuple[WatchClaim, ...]:
    # A VM's finding may name more vCPUs than before: the one about fewer is no repair.
    grown = {(one.id, one.vm, _letters(one.about)) for one in new.values() if one.vm is not None}
    gone = tuple(
        claim
        for claim in alert.claims
        if claim.key not in new and (claim.id, claim.vm, _letters(claim.about)) not in grown
    )
    return gone[:1] if len(gone) == len(alert.claims) else gone
