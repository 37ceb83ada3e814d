"""Metrics in Prometheus' text format: findings for node health checks, and what a watch sees.

Names and units by Prometheus' conventions: seconds, bytes, bytes per second; labels are ids,
addresses, node numbers and VM names, so that the number of series is bounded by the machine.
Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from homenode.check.watch.alert import Alert, WatchState
from homenode.check.watch.claim import ClaimState
from homenode.findings import Finding, Findings, Severity
from homenode.input_files import package_text
from homenode.machine.link_path import device_paths
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class Gauge(NamedTuple):
    """A metric with its samples: labels and value. kind: "counter" where it only rises."""

    name: str
    help: str
    samples: Sequence[Sample]
    kind: str = "gauge"


def exposition(gauges: Iterable[Gauge]) -> str:
    """The text of all gauges; one without samples is left out, a repeated sample is there once."""
    lines: list[str] = []
    for gauge in gauges:
        if not gauge.samples:
            continue
        lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} {gauge.kind}"]
        lines += dict.fromkeys(
            f"{gauge.name}{_labels(labels)} {_number(value)}" for labels, value in gauge.samples
        )
    return "".join(f"{line}\n" for line in lines)


def prometheus(findings: Findings, host: str) -> str:
    """Counts by severity, 0 included, and one line of value 1 for each finding."""
    counts = Counter(finding.severity for finding in findings.findings)
    by_severity: list[Sample] = [
        ({"host": host, "severity": str(one)}, counts[one]) for one in Severity
    ]
    each: list[Sample] = [({"host": host, **_of(one)}, 1) for one in findings.findings]
    return exposition(
        (
            Gauge("homenode_findings", "Number of findings by severity.", by_severity),
            Gauge("homenode_finding", "One finding.", each),
        )
    )


def _of(one: Finding | Alert) -> Labels:
    return {"id": one.id, "severity": str(one.severity), "subject": one.subject}


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _number(value: float) -> str:
    """
    >>> _number(1.0), _number(0.25), _number(1e18)
    ('1', '0.25', '1000000000000000000')
    """
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    """
    >>> print(_escaped('a "b"'))
    a \\"b\\"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(letter if letter.isprintable() else "?" for letter in escaped)


_WATCHED = (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH)
_MOST = 256
"""Series of one metric whose number no one has bounded."""


def metrics(state: WatchState, host: Host, cpu_s: float) -> str:
    """The text file of one look."""
    by_severity = {Severity.CRITICAL: 0, Severity.WARNING: 0}
    by_severity |= Counter(alert.severity for alert in state.alerts)
    counts: list[Sample] = [({"severity": str(one)}, n) for one, n in by_severity.items()]
    each: list[Sample] = [(_of(one), 1) for one in state.alerts[:_MOST]]
    stale: list[Sample] = [
        (_of(one), int(one.state is ClaimState.STALE)) for one in state.alerts[:_MOST]
    ]
    claims: list[Sample] = [({"state": one}, getattr(state.claims, one)) for one in ClaimState]
    troubled = {name for alert in state.alerts for name in alert.domains}
    names = state.domains[:_MOST]
    domains: list[Sample] = [({"domain": name}, int(name not in troubled)) for name in names]
    pools = [
        ({"node": str(node.index), "page_bytes": str(pool.page_bytes)}, pool)
        for node in host.nodes
        for pool in node.page_pools
    ]
    reserved: list[Sample] = [(labels, pool.total_pages) for labels, pool in pools]
    free: list[Sample] = [(labels, pool.free_pages) for labels, pool in pools]
    samples: dict[str, Sequence[Sample]] = {
        "watch_last_run_timestamp_seconds": [({}, round(state.time_s, 3))],
        "watch_cpu_seconds": [({}, round(cpu_s, 3))],
        "watch_not_read": [({}, len(state.not_read))],
        "alerts": counts,
        "alert": each,
        "alert_stale": stale,
        "claims": claims,
        "domain_as_planned": domains,
        "huge_pages": reserved,
        "huge_pages_free": free,
        "pcie_path_bytes_per_second": _rates(host)[:_MOST],
    }
    helps = package_text("check", "metrics.txt").splitlines()
    named = (row.partition(" | ") for row in helps if not row.startswith("#"))
    return exposition(Gauge(f"homenode_{name}", text, samples[name]) for name, _, text in named)


def _rates(host: Host) -> list[Sample]:
    found: list[Sample] = []
    for path in device_paths(host):
        device = path.device
        rates = [link.current.bytes_per_s for link in path.links if link.current is not None]
        if rates and device.kind in _WATCHED:
            found.append(({"device": str(device.bdf), "kind": str(device.kind)}, min(rates)))
    return found
