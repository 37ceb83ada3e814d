"""Expectation: what a host was like when it was certified, and what has drifted since."""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.baseline import FactDrift, Facts, fact_drift, facts_of
from homenode.findings import Finding, Severity
from homenode.machine.link_path import LinkRate, device_paths, gigabytes
from homenode.machine.pci import DeviceKind, PciDevice, are_models_known, model_of
from homenode.machine.topology import Host, summarise
from homenode.toml_text import Count, Line
from homenode.units import GIB, format_bytes

CPU_COUNTS = (
    "packages",
    "cores",
    "pus",
    "pus_offline",
    "llcs",
    "numa_nodes",
    "cpuless_nodes",
)
_PCI_COUNTS = ("gpus", "nics", "nvswitches")
COUNTS = (*CPU_COUNTS, *_PCI_COUNTS)
"""Counts of HostSummary that are certified; memory has a tolerance."""

CERTIFIED_KINDS = (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME)
FLOORS = ("h2d",)
"""Bandwidths that a floor can be given for."""

UNREAD = "unread"
"""In place of a count's name: what the host's source does not say."""

_OF_NODES = frozenset({"numa_nodes", "cpuless_nodes", "memory", "distances"})
_MEMORY_TOLERANCE = 64
"""One part in so many: kernels keep different amounts for themselves."""
_IDLE_SPEED = 2.5


class CertifiedDevice(Struct, frozen=True, kw_only=True):
    """A device as it was. ids: "10de:2330"; node: None where it had none; link: None = unknown."""

    bdf: Bdf
    kind: DeviceKind
    ids: str | None
    node: int | None
    link: LinkRate | None


class Accepted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding of the doctor that the host had when it was certified; no one is alerted about it.

    about: the device, or the subject where it is about none; None = whatever it is about. count:
    how often it had been seen; more of it is an alert.
    """

    id: Line
    about: Line | None = None
    count: Count | None = None

    def covers(self, found: Finding) -> bool:
        if self.id != found.id or self.about not in (None, about(found)):
            return False
        return self.count is None or found.count is None or found.count <= self.count


def about(found: Finding) -> str:
    """What a finding is about, in every look the same: its first device, else its subject."""
    return str(found.devices[0]) if found.devices else found.subject


def accepted_of(findings: Iterable[Finding]) -> tuple[Accepted, ...]:
    """What is certified with the host: all that is critical or a warning."""
    bad = (one for one in findings if one.is_bad)
    found = {Accepted(id=one.id, about=about(one), count=one.count): None for one in bad}
    return tuple(sorted(found, key=lambda one: (one.id, one.about or "")))


class CertifiedHost(Struct, frozen=True, kw_only=True):
    """A certified host. counts: by name of COUNTS. distances: SLIT, None where it had none.

    floors: bytes/s by name of FLOORS. huge_pages: reserved pages by node and page size in bytes.
    accepted: what the doctor found of the host then. facts: as of baseline.facts_of.
    """

    host: str
    counts: Mapping[str, int]
    memory_bytes: int | None
    distances: tuple[tuple[int, ...], ...] | None
    devices: tuple[CertifiedDevice, ...]
    floors: Mapping[str, float]
    huge_pages: Mapping[tuple[int, int], int] = field(default_factory=dict)
    accepted: tuple[Accepted, ...] = ()
    facts: Facts = field(default_factory=dict)


def certify(
    host: Host, floors: Mapping[str, float] | None = None, accepted: tuple[Accepted, ...] = ()
) -> CertifiedHost:
    """What the host is like now. A GPU's link that is idle counts with the speed that it can."""
    summary = summarise(host)
    return CertifiedHost(
        host=host.name,
        counts={name: getattr(summary, name) for name in COUNTS if _states(host, name)},
        memory_bytes=summary.memory_bytes,
        distances=host.distances,
        devices=_certified(host),
        floors=dict(floors or {}),
        huge_pages={
            (int(node.index), pool.page_bytes): pool.total_pages
            for node in host.nodes
            for pool in node.page_pools
            if pool.total_pages
        },
        accepted=accepted,
        facts=facts_of(host),
    )


def _certified(host: Host) -> tuple[CertifiedDevice, ...]:
    links = _links(host)
    return tuple(
        CertifiedDevice(
            bdf=device.bdf,
            kind=device.kind,
            ids=_ids(device),
            node=None if device.node is None else int(device.node),
            link=None if device.bdf not in links else links[device.bdf].rate,
        )
        for device in host.pci_devices
        if device.kind in CERTIFIED_KINDS and device.physical_function is None
    )


def drift(
    expected: CertifiedHost, host: Host, measured_h2d: float | None = None
) -> Iterator[Finding]:
    """Every difference. Links that are faster than certified are none.

    measured_h2d: bytes/s; None = unknown.
    """
    yield from (finding for _, finding in topology_drift(expected, host))
    yield from (one.finding for one in device_drift(expected, host))
    yield from (one.finding for one in baseline_drift(expected, host))
    yield from huge_page_drift(expected, host)
    yield from _floor_drift(expected, measured_h2d)


def unread_topology(expected: CertifiedHost, host: Host) -> dict[str, str]:
    """What the host's source does not give of what was certified, by name, and what that was."""
    unread = {
        name: was
        for name, was, now in _differences(expected, host)
        # What a host that counts as one node has of its nodes says nothing of the real ones.
        if now is None or (host.nodes_assumed and name in _OF_NODES)
    }
    pages = sum(expected.huge_pages.values())
    if pages and (host.nodes_assumed or not any(node.page_pools for node in host.nodes)):
        unread["huge_pages"] = f"{pages} pages"
    return unread


def baseline_drift(expected: CertifiedHost, host: Host) -> Iterator[FactDrift]:
    """Facts that changed."""
    return fact_drift(expected.facts, host, f"expectation of {expected.host}")


def topology_drift(expected: CertifiedHost, host: Host) -> Iterator[tuple[str, Finding]]:
    """Differences of counts, memory and distances, each with the name of what differs."""
    source = f"expectation of {expected.host}"
    unread = unread_topology(expected, host)
    differing = [
        (name, was, now)
        for name, was, now in _differences(expected, host)
        if now is not None and name not in unread
    ]
    if unread:
        yield (
            UNREAD,
            finding(
                "drift-topology",
                ", ".join(unread).replace("_", " "),
                expected=", ".join(unread.values()),
                observed=f"{host.name} does not give them",
                severity=Severity.INCONCLUSIVE,
                case="not given",
                source=source,
            ),
        )
    for name, was, now in differing:
        subject = name.replace("_", " ")
        yield name, finding("drift-topology", subject, was, now, source)


def _differences(expected: CertifiedHost, host: Host) -> Iterator[tuple[str, str, str | None]]:
    """Name, what was certified, and what the host has; None = its source does not say."""
    there = certify(host)
    is_known = are_models_known(host.pci_devices)
    for name, count in expected.counts.items():
        found = there.counts.get(name)
        if (found or 0) != count:
            is_given = found is not None and (is_known or name not in _PCI_COUNTS)
            yield name, str(count), str(found) if is_given else None
    was, now = expected.memory_bytes, there.memory_bytes
    if was is not None and (now is None or abs(now - was) * _MEMORY_TOLERANCE > was):
        yield (
            "memory",
            f"about {was / GIB:.1f} GiB",
            None if now is None else f"{now / GIB:.1f} GiB",
        )
    if expected.distances is not None and there.distances != expected.distances:
        matrix = None if there.distances is None else _matrix(there.distances)
        yield "distances", _matrix(expected.distances), matrix


def huge_page_drift(expected: CertifiedHost, host: Host) -> Iterator[Finding]:
    """Nodes with fewer reserved huge pages than certified; free ones are not compared."""
    if "huge_pages" in unread_topology(expected, host):  # said of the counts
        return
    for (node, size), pages in expected.huge_pages.items():
        found = pages_of(host, node, size)
        if found is not None and found < pages:
            yield finding(
                "drift-huge-pages",
                f"node {node}",
                expected=f"{pages} pages of {format_bytes(size)}",
                observed=str(found),
                values={"pages": pages, "node": node, "kilobytes": size // 1024},
                source=f"expectation of {expected.host}",
            )


def pages_of(host: Host, index: int, size: int) -> int | None:
    """Reserved huge pages of a node, 0 without the node; None where the source does not say."""
    node = host.node(index)
    pools = () if node is None else node.page_pools
    found = [pool.total_pages for pool in pools if pool.page_bytes == size]
    return found[0] if found else 0 if node is None and host.nodes else None


def _floor_drift(expected: CertifiedHost, measured_h2d: float | None) -> Iterator[Finding]:
    source = f"expectation of {expected.host}"
    floor = expected.floors.get("h2d")
    if floor is None:
        return
    if measured_h2d is None:
        yield finding(
            "drift-bandwidth",
            "host to device",
            expected=gigabytes(floor),
            observed="not measured",
            severity=Severity.INCONCLUSIVE,
            case="not measured",
            source=source,
        )
    elif measured_h2d < floor:
        yield finding(
            "drift-bandwidth",
            "host to device",
            expected=f"at least {gigabytes(floor)}",
            observed=gigabytes(measured_h2d),
            values={"share": f"{(1 - measured_h2d / floor) * 100:.0f}"},
            source=source,
        )


def _states(host: Host, count: str) -> bool:
    """Whether the host's source gives a count at all: lspci knows no PUs, some trees no devices."""
    if count in _PCI_COUNTS:
        return bool(host.pci_devices)
    return bool(getattr(host, count, host.pus))


class DeviceChange(StrEnum):
    """What is no longer as certified."""

    PRESENCE = "presence"
    IDENTITY = "identity"
    NODE = "node"
    LINK = "link"


class DeviceDrift(Struct, frozen=True, kw_only=True):
    """One difference of one device. cause: of a link, the function below the one that limits."""

    bdf: Bdf
    change: DeviceChange
    finding: Finding
    cause: Bdf | None = None


def device_drift(expected: CertifiedHost, host: Host) -> Iterator[DeviceDrift]:
    """Differences of GPUs, NICs, NVSwitches and NVMe drives, by address."""
    if not host.pci_devices:  # said of the counts
        return
    source = f"expectation of {expected.host}"
    links = _links(host)
    was = {device.bdf: device for device in expected.devices}
    now = {device.bdf: device for device in _certified(host)}

    def differs(
        device: CertifiedDevice, change: DeviceChange, before: str, after: str
    ) -> DeviceDrift:
        found = finding(
            "drift-device",
            f"{device.kind} {device.bdf}",
            before,
            after,
            source,
            devices=(device.bdf,),
        )
        return DeviceDrift(bdf=device.bdf, change=change, finding=found)

    for bdf in sorted(was.keys() | now.keys()):
        old, new = was.get(bdf), now.get(bdf)
        before, after = (
            "no such device" if one is None else f"{one.kind} {one.ids}" for one in (old, new)
        )
        if old is None or new is None:
            if bdf in host.device_at and model_of(host.device_at[bdf]) is None:
                continue  # what it is is not read
            present = was.get(bdf) or now[bdf]
            yield differs(present, DeviceChange.PRESENCE, before, after)
            continue
        if old.kind is not new.kind or (old.ids and new.ids and old.ids != new.ids):
            yield differs(old, DeviceChange.IDENTITY, before, after)
            continue
        nodes = {old.node, new.node}
        if len(nodes) == 2 and None not in nodes and not host.nodes_assumed:
            yield differs(old, DeviceChange.NODE, f"node {old.node}", f"node {new.node}")
        for found in _link(old, links.get(bdf), source):
            cause = links[bdf].lower if bdf in links else None
            yield DeviceDrift(bdf=bdf, change=DeviceChange.LINK, finding=found, cause=cause)


def _link(old: CertifiedDevice, found: "_Slowest | None", source: str) -> Iterator[Finding]:
    if old.link is None:
        return
    if found is None:
        yield finding(
            "drift-link",
            str(old.bdf),
            expected=str(old.link),
            observed="not known",
            severity=Severity.INCONCLUSIVE,
            case="not known",
            source=source,
            devices=(old.bdf,),
        )
    elif found.rate.bytes_per_s < old.link.bytes_per_s:
        idle = "" if found.idle is None else f" at most: it idles at {found.idle}"
        lost = (1 - found.rate.bytes_per_s / old.link.bytes_per_s) * 100
        yield finding(
            "drift-link",
            f"{old.kind} {old.bdf}",
            expected=old.link.with_rate(),
            observed=f"{found.rate.with_rate()}{idle}",
            severity=None if found.idle is None else Severity.INCONCLUSIVE,
            values={"share": f"{lost:.0f}"},
            source=source,
            devices=(old.bdf,),
        )


class _Slowest(Struct, frozen=True):
    """The slowest link of a path. idle: what it has, where it may just be idle; then rate is that
    of the lanes that it has at the speed that both ends can. lower: the function below it."""

    rate: LinkRate
    idle: LinkRate | None
    lower: Bdf


def unproved_links(host: Host) -> dict[Bdf, str]:
    """Devices whose path shows neither health nor a fault now, each with the reason."""
    found: dict[Bdf, str] = {}
    known = _links(host)
    for path in device_paths(host):
        bdf = path.device.bdf
        own = [link.lower.link for link in path.links]
        if bdf not in known or any(one is None or one.current_gt_per_s is None for one in own):
            found[bdf] = "what its link has is not read"
        elif any(
            link.ends_at_gpu and link.current and link.current.gt_per_s == _IDLE_SPEED
            for link in path.links
        ):
            found[bdf] = f"its link may be idle at {_IDLE_SPEED:g} GT/s"
    return found


def _links(host: Host) -> dict[Bdf, _Slowest]:
    """The slowest link on each device's path; idle links of GPUs by the speed that both ends can.

    A path of which some link does not say what it has is left out: the slowest may be that one.
    """
    found: dict[Bdf, _Slowest] = {}
    for path in device_paths(host):
        rates: list[_Slowest] = []
        for link in path.links:
            rate = link.current if link.lower.link and link.lower.link.current_width else None
            if rate is None:
                rates.clear()
                break
            capable = link.capable
            if link.ends_at_gpu and rate.gt_per_s == _IDLE_SPEED and capable is not None:
                fast = LinkRate(capable.gt_per_s, rate.width)
                rates.append(_Slowest(fast, rate, link.lower.bdf))
            else:
                rates.append(_Slowest(rate, None, link.lower.bdf))
        if rates:
            found[path.device.bdf] = min(rates, key=lambda each: each.rate.bytes_per_s)
    return found


def _ids(device: PciDevice) -> str | None:
    if device.vendor_id is None or device.device_id is None:
        return None
    return f"{device.vendor_id:04x}:{device.device_id:04x}"


def _matrix(distances: tuple[tuple[int, ...], ...] | None) -> str:
    if distances is None:
        return "none"
    return "; ".join(" ".join(map(str, row)) for row in distances)
