"""Metrics in Prometheus' text format: findings, for node health checks.

Labels are ids, addresses, node numbers and VM names, so that the number of series is bounded by the
machine. Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from homenode.findings import Findings, Severity

Labels = Mapping[str, str]


def prometheus(findings: Findings, labels: Labels) -> str:
    """Counts by severity, 0 included, and one line of value 1 for each finding. labels: of all."""
    counts = Counter(finding.severity for finding in findings.findings)
    by_severity = [({"severity": severity}, counts[severity]) for severity in Severity]
    samples = [
        ({"id": finding.id, "severity": finding.severity, "subject": finding.subject}, 1)
        for finding in findings.findings
    ]
    unread: list[tuple[Labels, int]] = [({}, len(findings.not_read))]
    return (
        _gauge("homenode_findings", "Number of findings by severity.", labels, by_severity)
        + (_gauge("homenode_finding", "One finding.", labels, samples) if samples else "")
        + _gauge("homenode_not_read", "Areas that could not be read.", labels, unread)
    )


def _gauge(name: str, text: str, labels: Labels, samples: Iterable[tuple[Labels, int]]) -> str:
    """The text of a metric; a repeated sample is there once."""
    lines = [f"# HELP {name} {text}\n", f"# TYPE {name} gauge\n"]
    for sample_labels, value in samples:
        pairs = ((label, _escape(word)) for label, word in {**labels, **sample_labels}.items())
        words = ",".join(f'{label}="{word}"' for label, word in pairs)
        lines.append(f"{name}{{{words}}} {value}\n")
    return "".join(dict.fromkeys(lines))


def _escape(text: str) -> str:
    """
    >>> print(_escape('a "b"'))
    a \\"b\\"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(letter if letter.isprintable() else "?" for letter in escaped)
