"""Metrics: findings in Prometheus' text format, for node health checks.

Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from homenode.findings import Findings, Severity


def prometheus(findings: Findings, host: str) -> str:
    """Counts by severity, 0 included, and one line of value 1 for each finding."""
    counts = dict.fromkeys(Severity, 0)
    for finding in findings.findings:
        counts[finding.severity] += 1
    lines = [
        "# HELP homenode_findings Number of findings by severity.",
        "# TYPE homenode_findings gauge",
    ]
    lines += [
        f'homenode_findings{{host="{_label(host)}",severity="{severity}"}} {count}'
        for severity, count in counts.items()
    ]
    lines += ["# HELP homenode_finding One finding.", "# TYPE homenode_finding gauge"]
    lines += dict.fromkeys(
        f'homenode_finding{{host="{_label(host)}",id="{_label(finding.id)}",'
        f'severity="{finding.severity}",subject="{_label(finding.subject)}"}} 1'
        for finding in findings.findings
    )
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """
    >>> print(_label('a "b"'))
    a \\"b\\"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(letter if letter.isprintable() else "?" for letter in escaped)
