"""Metrics: values in Prometheus' text format, for node health checks.

Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from homenode.findings import Findings, Severity

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
