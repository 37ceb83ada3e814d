"""Findings: what a machine, a document or a guest should be and is not, with cost and remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is, worst first."""

    CRITICAL = "critical"  # does not start, or the guest gets something else than was planned
    WARNING = "warning"  # works, but slower or on somebody else's ground
    INFO = "info"  # worth knowing; nothing to do
    INCONCLUSIVE = "inconclusive"  # could not be judged, with the reason in `observed`


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer that the user asked for.

    id: stable, for tests, filters and documentation. subject: the thing, in the user's words.
    expected, observed: texts with units. cost: what it costs, None where nobody has measured it.
    fix: the next thing to do, None where there is nothing. source: what was looked at, or who says
    so.
    """

    id: str
    severity: Severity
    subject: str
    expected: str
    observed: str
    cost: str | None
    fix: str | None
    source: str

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.subject}: expected {self.expected}, "
            f"found {self.observed} ({self.id})"
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """The `findings` format. checked: what was looked at, one line each, also where all is well."""

    checked: tuple[str, ...]
    findings: tuple[Finding, ...]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the worst first, otherwise as they came."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _RANK[finding.severity]))


def are_bad(findings: Iterable[Finding]) -> bool:
    """True where there is something critical or a warning: a command then exits with 1."""
    return any(f.severity in (Severity.CRITICAL, Severity.WARNING) for f in findings)
