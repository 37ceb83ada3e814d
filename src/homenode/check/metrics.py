"""Metrics in Prometheus' text format: findings for node health checks, and what a watch sees.

Names and units by Prometheus' conventions: seconds, bytes, bytes per second; labels are ids,
addresses, node numbers and VM names, so that the number of series is bounded by the machine.
Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from homenode.check.watch.alert import WatchState
from homenode.findings import Findings, Severity
from homenode.machine.device_path import device_paths
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

Labels = Mapping[str, str]


class Gauge(Struct, frozen=True, kw_only=True):
    """A metric whose value may rise and fall, with its samples: labels and value."""

    name: str
    help: str
    samples: tuple[tuple[Labels, float], ...]


def exposition(gauges: Iterable[Gauge]) -> str:
    """The text of all gauges; one without samples is left out, a repeated sample is there once."""
    lines: list[str] = []
    for gauge in gauges:
        if not gauge.samples:
            continue
        lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} gauge"]
        lines += dict.fromkeys(
            f"{gauge.name}{_labels(labels)} {_number(value)}" for labels, value in gauge.samples
        )
    return "".join(f"{line}\n" for line in lines)


def prometheus(findings: Findings, host: str) -> str:
    """Counts by severity, 0 included, and one line of value 1 for each finding."""
    return exposition(finding_gauges(findings, host))


def finding_gauges(findings: Findings, host: str) -> tuple[Gauge, ...]:
    """The same as gauges."""
    counts = dict.fromkeys(Severity, 0)
    for finding in findings.findings:
        counts[finding.severity] += 1
    return (
        Gauge(
            name="homenode_findings",
            help="Number of findings by severity.",
            samples=tuple(({"host": host, "severity": str(one)}, counts[one]) for one in counts),
        ),
        Gauge(
            name="homenode_finding",
            help="One finding.",
            samples=tuple(
                (
                    {
                        "host": host,
                        "id": one.id,
                        "severity": str(one.severity),
                        "subject": one.subject,
                    },
                    1.0,
                )
                for one in findings.findings
            ),
        ),
    )


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
    for alert in state.alerts:
        by_severity[alert.severity] = by_severity.get(alert.severity, 0) + 1
    troubled = {name for alert in state.alerts for name in alert.domains}
    return exposition(
        (
            Gauge(
                name="homenode_watch_last_run_timestamp_seconds",
                help="When homenode watch ran last.",
                samples=(({}, round(state.time_s, 3)),),
            ),
            Gauge(
                name="homenode_watch_cpu_seconds",
                help="Processor time of the last run.",
                samples=(({}, round(cpu_s, 3)),),
            ),
            Gauge(
                name="homenode_watch_not_read",
                help="Things that the last run could not look at.",
                samples=(({}, len(state.not_read)),),
            ),
            Gauge(
                name="homenode_alerts",
                help="Alerts by severity.",
                samples=tuple(
                    ({"severity": str(one)}, count) for one, count in by_severity.items()
                ),
            ),
            Gauge(
                name="homenode_alert",
                help="One alert; it is absent when it is cleared.",
                samples=tuple(
                    ({"id": one.id, "severity": str(one.severity), "subject": one.subject}, 1)
                    for one in state.alerts[:_MOST]
                ),
            ),
            Gauge(
                name="homenode_domain_as_planned",
                help="1 where a tuned VM runs as planned, else 0.",
                samples=tuple(
                    ({"domain": name}, int(name not in troubled)) for name in state.domains[:_MOST]
                ),
            ),
            *_pages(host),
            *_links(host),
        )
    )


def _pages(host: Host) -> tuple[Gauge, Gauge]:
    pools = [(node, pool) for node in host.nodes for pool in node.page_pools]
    labels = [{"node": str(node.index), "page_bytes": str(pool.page_bytes)} for node, pool in pools]
    return (
        Gauge(
            name="homenode_huge_pages",
            help="Huge pages reserved on a node.",
            samples=tuple(zip(labels, (float(pool.total_pages) for _, pool in pools), strict=True)),
        ),
        Gauge(
            name="homenode_huge_pages_free",
            help="Huge pages of a node that nothing uses.",
            samples=tuple(zip(labels, (float(pool.free_pages) for _, pool in pools), strict=True)),
        ),
    )


def _links(host: Host) -> tuple[Gauge]:
    rates = {
        path.device: min(
            (link.current.bytes_per_s for link in path.links if link.current is not None),
            default=None,
        )
        for path in device_paths(host)
        if path.device.kind in _WATCHED
    }
    return (
        Gauge(
            name="homenode_pcie_path_bytes_per_second",
            help="Rate of the slowest PCIe link between a device and its processor, as it is now.",
            samples=tuple(
                ({"device": str(device.bdf), "kind": str(device.kind)}, rate)
                for device, rate in rates.items()
                if rate is not None
            )[:_MOST],
        ),
    )
