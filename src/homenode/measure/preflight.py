"""Preflight: what would spoil a run, found before it begins."""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, in_order
from homenode.measure.environment import STOLEN_SHARE, Environment, Share, share_between
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.topology import Host
from homenode.units import format_bytes

BUSY_SHARE = 0.05
"""More than this of the PUs' time taken while nothing was measured: somebody else is there."""

ONE_PU_SHARE = 0.5
"""Likewise of any single PU: among 448 PUs a neighbour on one of them is 0.2 % of their time. So
high because a second holds the burst of some daemon on every large machine."""

MEMORY_KEPT = 0.90
"""A guest's kernel keeps some of its memory for itself; less than this is a balloon's doing."""

_BUSY_STATES = ("P0", "P1", "P2")


@dataclass(frozen=True, slots=True)
class Looks:
    """Two looks at an idle machine, some time apart, and where it is to be measured."""

    first: Environment
    second: Environment
    pus: CpuSet


def preflight(host: Host, looks: Looks, plan: Plan | None = None) -> tuple[Finding, ...]:
    """Everything found, worst first. plan: of the guest that we are in, if we are in one."""
    found = [
        *_load(looks),
        *_settings(looks.second),
        *_links(host),
        *_neighbours(host, looks.pus),
    ]
    if plan is not None:
        found += _guest(plan, looks.second)
    return in_order(found)


def _load(looks: Looks) -> Iterator[Finding]:
    share = share_between(looks.first, looks.second, looks.pus)
    if share is None:
        yield Finding(
            id="bench-load-unknown",
            severity=Severity.INCONCLUSIVE,
            subject=f"PUs {looks.pus}",
            expected="to be idle",
            observed="no one counts their time",
            source="/proc/stat",
        )
        return
    found = tuple(_busy(looks.pus, share))
    yield from found or _crowded(looks)


def _crowded(looks: Looks) -> Iterator[Finding]:
    """Single PUs that belong to others, where all together hardly show it."""
    shares = [(pu, share_between(looks.first, looks.second, CpuSet((pu,)))) for pu in looks.pus]
    busy = CpuSet(pu for pu, share in shares if share is not None and share.busy > ONE_PU_SHARE)
    stolen = CpuSet(pu for pu, share in shares if share is not None and share.stolen > ONE_PU_SHARE)
    most = f"no PU more than {ONE_PU_SHARE:.0%}"
    if busy:
        yield _busy_finding(looks.pus, f"{most} busy", f"PUs {busy} busy")
    if stolen:
        yield _stolen_finding(looks.pus, f"{most} stolen", f"PUs {stolen} given to other guests")


def _busy(pus: CpuSet, share: Share) -> Iterator[Finding]:
    if share.busy > BUSY_SHARE:
        yield _busy_finding(pus, f"at most {BUSY_SHARE:.0%} busy", f"{share.busy:.0%} busy")
    if share.stolen > STOLEN_SHARE:
        given = f"{share.stolen:.1%} given to other guests"
        yield _stolen_finding(pus, f"at most {STOLEN_SHARE:.0%} stolen", given)


def _busy_finding(pus: CpuSet, expected: str, observed: str) -> Finding:
    return Finding(
        id="bench-busy",
        severity=Severity.WARNING,
        subject=f"PUs {pus}",
        expected=expected,
        observed=observed,
        cost="figures of a busy machine are marked and not compared",
        fix="stop what runs there, or measure on other PUs",
        source="/proc/stat",
    )


def _stolen_finding(pus: CpuSet, expected: str, observed: str) -> Finding:
    return Finding(
        id="bench-stolen",
        severity=Severity.WARNING,
        subject=f"PUs {pus}",
        expected=expected,
        observed=observed,
        cost="the vCPUs share PUs with others",
        fix="pin the guest's vCPUs to PUs of their own: homenode plan",
        source="/proc/stat",
    )


def _settings(now: Environment) -> Iterator[Finding]:
    slow = [name for name in now.governors or () if name not in ("performance", "schedutil")]
    if slow:
        yield Finding(
            id="bench-governor",
            severity=Severity.WARNING,
            subject="frequency governor",
            expected="performance",
            observed=", ".join(slow),
            cost="clocks follow the load with a delay that short tests see",
            fix="cpupower frequency-set -g performance",
            source="cpufreq/scaling_governor",
        )
    throttled = [f"{name} {count}" for name, count in now.throttles if count]
    if throttled:
        yield Finding(
            id="bench-throttled",
            severity=Severity.INFO,
            subject="PUs",
            expected="no throttling since boot",
            observed=", ".join(throttled),
            fix="look at cooling and power limits",
            source="thermal_throttle",
        )
    if now.transparent_hugepages == "never":
        yield Finding(
            id="bench-no-huge-pages",
            severity=Severity.INFO,
            subject="transparent huge pages",
            expected="madvise or always",
            observed="never",
            cost="bandwidth on ordinary pages was 1.4 to 1.9 times lower on one EPYC guest",
            fix="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            source="/sys/kernel/mm/transparent_hugepage/enabled",
        )


def _links(host: Host) -> Iterator[Finding]:
    for device in host.devices_of_kind(DeviceKind.GPU):
        link = device.link
        if link is None or link.current_gt_per_s is None or link.max_gt_per_s is None:
            continue
        slow = link.current_gt_per_s < link.max_gt_per_s
        narrow = None not in (link.current_width, link.max_width) and (
            (link.current_width or 0) < (link.max_width or 0)
        )
        if not slow and not narrow:
            continue
        # A GPU that rests slows its link down, and a card may sit in a narrower slot by design.
        is_busy = device.performance_state in _BUSY_STATES
        yield Finding(
            id="bench-link",
            severity=Severity.WARNING if is_busy else Severity.INCONCLUSIVE,
            subject=f"GPU {device.bdf}",
            expected=f"{link.max_gt_per_s:g} GT/s x{link.max_width}",
            observed=f"{link.current_gt_per_s:g} GT/s x{link.current_width}"
            + ("" if is_busy else ", perhaps at rest"),
            fix="homenode doctor, which looks at it under load",
            source="link state of the function",
        )


def _neighbours(host: Host, pus: CpuSet) -> Iterator[Finding]:
    for domain in host.domains:
        if not domain.running:
            continue
        shared = CpuSet.union(domain.vcpu_pins) & pus
        floats = any(pins is None for pins in domain.vcpu_pins)
        if shared or floats:
            yield Finding(
                id="bench-neighbour",
                severity=Severity.WARNING,
                subject=f"domain {domain.name}",
                expected=f"no vCPU on PUs {pus}",
                observed=f"vCPUs pinned to {shared}" if shared else "vCPUs that run anywhere",
                cost="its load comes and goes in our figures",
                fix="shut it down, or pin it elsewhere",
                source="running domains",
            )


def _guest(plan: Plan, now: Environment) -> Iterator[Finding]:
    if len(now.online) != plan.vcpus:
        yield Finding(
            id="bench-vcpus",
            severity=Severity.CRITICAL,
            subject="guest",
            expected=f"{plan.vcpus} vCPUs, as planned",
            observed=f"{len(now.online)} online",
            cost="this is not the guest of the plan",
            fix="homenode verify --guest says what differs",
            source="/sys/devices/system/cpu/online",
        )
    planned = plan.memory_bytes
    if now.memory_bytes is not None and now.memory_bytes < planned * MEMORY_KEPT:
        yield Finding(
            id="bench-balloon",
            severity=Severity.WARNING,
            subject="guest",
            expected=f"{format_bytes(planned)}, as planned",
            observed=format_bytes(now.memory_bytes),
            cost="a balloon holds the rest; first touches are faults in the hypervisor",
            fix="virsh setmem NAME to the maximum, and wait",
            source="meminfo of all nodes",
        )
