"""Metrics in Prometheus' text format: findings, for node health checks.

Names and units by Prometheus' conventions: seconds, bytes, bytes per second; labels are ids,
addresses, node numbers and VM names, so that the number of series is bounded by the machine.
Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from homenode.findings import Finding, Findings, Severity

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


def prometheus(findings: Findings, labels: Labels) -> str:
    """Counts by severity, 0 included, and one line of value 1 for each finding. labels: of all."""
    counts = Counter(finding.severity for finding in findings.findings)
    by_severity: list[Sample] = [
        ({**labels, "severity": str(one)}, counts[one]) for one in Severity
    ]
    each: list[Sample] = [({**labels, **_of(one)}, 1) for one in findings.findings]
    return exposition(
        (
            Gauge("homenode_findings", "Number of findings by severity.", by_severity),
            Gauge("homenode_finding", "One finding.", each),
        )
    )


def _of(one: Finding) -> Labels:
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
