"""Findings: what a machine, a document or a guest should be and is not, with cost and remedy."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import DONE, FINDINGS, NOT_KNOWN


class Severity(StrEnum):
    """How bad it is, worst first."""

    CRITICAL = "critical"  # does not start, or the guest gets something else than was planned
    WARNING = "warning"  # works, but slower or on somebody else's ground
    INFO = "info"  # worth knowing; nothing to do
    INCONCLUSIVE = "inconclusive"  # could not be judged, with the reason in `observed`


_MERGED_FROM = 3
"""So many findings that differ in their subject only are one finding with many subjects."""

_LONGEST_LIST = 16

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

_RANK = {severity: rank for rank, severity in enumerate(Severity)}


class Finding(Struct, frozen=True, kw_only=True):
    """One answer that the user asked for.

    id: stable, for tests, filters and documentation. subject: the thing, in the user's words.
    expected, observed: texts with units. cost: what it costs, None = unknown.
    fix: the next thing to do, None where there is nothing. source: what was looked at, or who says
    so. devices: host functions that it is about, the cause first; () = none, or not one by one.
    count: how often it was seen, of what is counted.
    """

    id: str
    severity: Severity
    subject: str
    expected: str
    observed: str
    cost: str | None = None
    fix: str | None = None
    source: str
    devices: tuple[Bdf, ...] = ()
    count: int | None = None

    @property
    def is_bad(self) -> bool:
        """Critical or a warning."""
        return self.severity in (Severity.CRITICAL, Severity.WARNING)

    def __str__(self) -> str:
        return (
            f"{self.severity}: {self.subject}: expected {self.expected}, "
            f"found {self.observed} ({self.id})"
        )


class Findings(Struct, frozen=True, kw_only=True):
    """The `findings` format. checked: what was looked at, one line each, also where all is well.
    not_checked: what was not, and may be wrong all the same."""

    checked: tuple[str, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()


def filled(text: str, values: Mapping[str, object]) -> str:
    """The text of a page with its values.

    >>> filled("echo on > {file}; reserve {pages}", {"file": "control"})
    'echo on > control; reserve PAGES'
    """
    return _PLACEHOLDER.sub(lambda m: str(values.get(m[1], m[1].upper())), text)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each finding once, the worst first, otherwise as they came."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _RANK[finding.severity]))


def sourced(findings: Iterable[Finding], source: str) -> tuple[Finding, ...]:
    """The same; those that name no source of their own get this one."""
    return tuple(one if one.source else replace(one, source=source) for one in findings)


def are_bad(findings: Iterable[Finding]) -> bool:
    """True where there is something critical or a warning: a command then exits with 1."""
    return any(finding.is_bad for finding in findings)


def exit_code(findings: Findings) -> int:
    """The exit code of a command that answers with findings: NOT_KNOWN if nothing was checked."""
    if are_bad(findings.findings):
        return FINDINGS
    return DONE if findings.checked else NOT_KNOWN


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with those joined that say the same of several subjects, in the order of the first.

    The joined finding shows what was expected and observed of the first.
    """
    groups: dict[tuple[str, str, str | None, str | None], list[Finding]] = {}
    for finding in findings:
        key = (finding.id, finding.severity, finding.cost, finding.fix)
        groups.setdefault(key, []).append(finding)
    joined: list[Finding] = []
    for group in groups.values():
        first = group[0]
        if len(group) < _MERGED_FROM or first.id.startswith("pcie-link"):
            joined += group
            continue
        subjects = list(dict.fromkeys(finding.subject for finding in group))
        more = len(subjects) - _LONGEST_LIST
        tail = f" and {more} more" if more > 0 else ""
        joined.append(
            replace(
                first,
                subject=", ".join(subjects[:_LONGEST_LIST]) + tail,
                expected=_of_all(group, [finding.expected for finding in group]),
                observed=_of_all(group, [finding.observed for finding in group]),
                devices=tuple(dict.fromkeys(bdf for finding in group for bdf in finding.devices)),
                count=None,
            )
        )
    return tuple(joined)


def _of_all(group: list[Finding], texts: list[str]) -> str:
    """The text where all have the same, else that of the first with its subject."""
    alike = len(set(texts)) == 1
    return texts[0] if alike else f"{group[0].subject}: {texts[0]}; and so on"
