"""FindingsText: the screen of findings: the answer, a block for equal findings, then labels.

A screen has at most 25 lines of 80 columns; --explain lists each finding. `format_prometheus`
writes findings as metrics for node health checks.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from homenode.check.verify.guest_checks import Check
from homenode.doc import Doc, Part, Span, Text, format_plain
from homenode.findings import Finding, Findings, Severity, find_texts
from homenode.text import number_list, plural, shorten_list
from homenode.units import parse_whole

_LOOKS = {
    Severity.CRITICAL: "critical",
    Severity.WARNING: "warn",
    Severity.INFO: "hint",
    Severity.INCONCLUSIVE: "warn",
}
_BAD = (Severity.CRITICAL, Severity.WARNING)
_COLUMNS, _LINES = 80, 25
_SUBJECT_COLUMN, _VALUE_COLUMN = 10, 12
_NAMED = 3  # subjects up to which a block names all
_ALIKE = 3  # blocks of one id and severity that are merged
_UNKNOWN_LETTERS = 320
_ORDER = (
    *("critical", "warning", "info", "not read", "checked", "equal", "not checked", "unknown"),
    *("test guest", "next", "undo"),
)
_YELLOW = frozenset({"warning", "not read", "not checked", "unknown"})

Group = Sequence[Finding]
"""Findings shown as one block."""


def format_findings(
    findings: Findings,
    subject: str,
    *,
    answer: str | None = None,
    explain: bool = False,
    table: Sequence[Part] = (),
    labels: Mapping[str, str] | None = None,
) -> Doc:
    """Return the screen of findings about a subject. answer: line 1 without findings; None =
    "SUBJECT: 0 findings". table: below line 1. labels: further labels, by name."""
    rows = _list_labels(findings, explain, has_table=bool(table))
    rows |= {label: text for label, text in (labels or {}).items() if text}
    items = [f for f in findings.findings if explain or f.severity in _BAD]
    groups = list(_group_equal_findings(items).values()) if explain else group_findings(items)
    first = Text(_answer(findings, subject, answer), "bold")
    used = 1 + _count_lines(table) + bool(table) + _count_lines(format_labels(rows))
    parts: list[Part] = [first, *((Text(""), *table) if table else ())]
    start, omitted_findings = len(parts), list[Finding]()
    for group in groups:
        block = (Text(""), *_format_block(group, explain))
        used += _count_lines(block)
        if used > _LINES - 4 and len(parts) > start and not explain:
            omitted_findings += group
        else:
            parts += block
    for severity in _BAD:
        if unshown := [f for f in omitted_findings if f.severity is severity]:
            rows[severity] = f"{len(unshown)} more: {_format_ids(unshown)} (--explain)"
    lines = format_labels(rows)
    gap = (Text(""),) if lines and len(parts) > 1 else ()
    return Doc("", (*parts, *gap, *lines))


def format_labels(rows: Mapping[str, str]) -> tuple[Text, ...]:
    """Return a line for each label with its text, in the common order."""
    width = max((len(label) for label, text in rows.items() if text), default=0) + 2
    return tuple(
        Text(
            (Span(label.ljust(width), "warn" if label in _YELLOW else ""), rows[label]), hang=width
        )
        for label in sorted(rows, key=_ORDER.index)
        if rows[label]
    )


def _group_equal_findings(findings: Iterable[Finding]) -> dict[tuple[str, ...], list[Finding]]:
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.id, str(finding.severity), finding.expected, finding.observed)
        groups.setdefault(key, []).append(finding)
    return groups


def group_findings(findings: Iterable[Finding]) -> list[Group]:
    """Group equal findings; three or more of one id with different values are one block too."""
    groups_of: dict[tuple[str, ...], list[list[Finding]]] = {}
    for key, group in _group_equal_findings(findings).items():
        groups_of.setdefault(key[:2], []).append(group)
    blocks: list[Group] = []
    for groups in groups_of.values():
        joined_findings = [finding for group in groups for finding in group]
        blocks += [joined_findings] if len(groups) >= _ALIKE else groups
    return blocks


def format_subjects(group: Group) -> str:
    """Format the subjects of a block: up to three by name, else the first and a count."""
    subjects = list(dict.fromkeys(finding.subject for finding in group))
    if len(subjects) == 1:
        return subjects[0]
    heads = {subject.rpartition(" ")[0] for subject in subjects}
    noun = heads.pop() if len(heads) == 1 else ""
    if not noun or " " in noun:
        return _name_some(subjects)
    names = [subject.rpartition(" ")[2] for subject in subjects]
    numbers = [number for number in map(parse_whole, names) if number is not None]
    text = number_list(numbers) if len(numbers) == len(names) else _name_some(names)
    if noun.endswith("s"):
        return f"{noun} {text}"  # each subject names several already
    return f"{len(names)} {noun}s: {text}"


def _name_some(names: Sequence[str]) -> str:
    if len(names) <= _NAMED:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return shorten_list(names, 1)


def _answer(findings: Findings, subject: str, answer: str | None) -> str:
    bad = [finding for finding in findings.findings if finding.severity in _BAD]
    if bad:
        counts_of = ((severity, sum(f.severity is severity for f in bad)) for severity in _BAD)
        counts = ", ".join(
            plural(count, severity, "warnings" if severity is Severity.WARNING else severity)
            for severity, count in counts_of
            if count
        )
        return _format_headline(subject, group_findings(bad)[0], counts)
    if not findings.checked:
        reason = f": {findings.not_checked[0]}" if findings.not_checked else ""
        return f"nothing was checked{reason}" if reason else f"{subject}: nothing was checked"
    open_ = sum(finding.severity is Severity.INCONCLUSIVE for finding in findings.findings)
    unknown = f", {open_} unknown" if open_ else ""
    if findings.not_read:
        return f"{subject}: 0 findings{unknown}, but VMs were not checked"
    return f"{answer or f'{subject}: 0 findings'}{unknown}"


def _format_headline(subject: str, group: Group, counts: str) -> str:
    """Return line 1: the counts, and the first block, shortened to fit if it can be."""
    finding, texts = group[0], find_texts(group[0].id)
    subjects = format_subjects(group)
    short = subjects.partition(":")[0] if len(group) > 1 else subjects
    words = [finding.headline.replace(finding.subject, name) for name in (subjects, short)]
    meaning = _cut_sentence(texts.meaning)
    words += [meaning, meaning.partition(":")[0]]
    if len(group) == 1:
        words.append(f"{subjects}: expected {finding.expected}, found {finding.observed}")
    words += [meaning.partition(":")[0] or f"{subjects} ({finding.id})"]
    lines = [f"{subject}: {counts}: {text}" for text in reversed(words) if text]
    return next((line for line in reversed(lines) if len(line) <= _COLUMNS), lines[0])


def _cut_sentence(meaning: str) -> str:
    """Return the first sentence of a finding's meaning, within a line; "" if it has a link."""
    text = " ".join(meaning.replace("`", "").split()).partition(". ")[0].rstrip(".")
    if "](" in text:
        return ""
    first_word = text.partition(" ")[0].rstrip(",")
    is_word = first_word.isalpha() and first_word[1:] == first_word[1:].lower()
    return text[0].lower() + text[1:] if is_word else text


def _format_block(group: Group, explain: bool) -> Iterator[Text]:
    finding, subjects = group[0], format_subjects(group)
    severity = "unknown" if finding.severity is Severity.INCONCLUSIVE else str(finding.severity)
    space = _COLUMNS - _SUBJECT_COLUMN - len(subjects) - len(finding.id)
    words = (
        Span(severity.ljust(_SUBJECT_COLUMN), _LOOKS[finding.severity]),
        Span(subjects + " " * max(2, space), "bold"),
        Span(finding.id, "dim"),
    )
    yield Text(words, hang=_SUBJECT_COLUMN)
    differing = [
        name
        for name in ("expected", "observed")
        if any(getattr(other, name) != getattr(finding, name) for other in group)
    ]
    mark = {differing[0]: f" ({finding.subject}; each: --explain)"} if differing else {}
    names = dict.fromkeys(finding.subject for finding in group)
    values = {
        "subjects": ", ".join(names) if explain and len(names) > _NAMED else None,
        "expected": finding.expected + mark.get("expected", ""),
        "found": finding.observed + mark.get("observed", ""),
        "cost": _find_shared_cost(group),
        "fix": find_shared_fix(group),
        "source": shorten_list(dict.fromkeys(f.source for f in group), 1) if explain else None,
    }
    for label, value in values.items():
        if value:
            line = f"  {label.ljust(_VALUE_COLUMN - 2)}{value}"
            is_last = label == "fix" and value.endswith(finding.command)
            yield Text(line, hang=_VALUE_COLUMN, command=finding.command if is_last else "")


def _find_shared_cost(group: Group) -> str | None:
    """Return the first finding's cost, with its subject if other costs differ."""
    cost = group[0].cost
    is_shared = len({finding.cost for finding in group}) == 1
    return cost if is_shared or cost is None else f"{cost} ({group[0].subject})"


def find_shared_fix(group: Group) -> str | None:
    """Return the first finding's fix, also for the others if only the device differs."""
    finding, other_count = group[0], len(group) - 1
    fixes = {other.fix for other in group}
    name = next((str(bdf) for bdf in finding.devices), finding.subject)
    if len(fixes) == 1 or finding.fix is None or name not in finding.fix:
        return finding.fix
    return finding.fix.replace(
        name, f"{name}, then the {f'{other_count} others' if other_count > 1 else 'other'}", 1
    )


def _list_labels(findings: Findings, explain: bool, *, has_table: bool) -> dict[str, str]:
    bad = any(finding.severity in _BAD for finding in findings.findings)
    infos = [f for f in findings.findings if f.severity is Severity.INFO]
    open_ = [f for f in findings.findings if f.severity is Severity.INCONCLUSIVE]
    unknown = [f"{format_subjects(group)}: {group[0].observed}" for group in group_findings(open_)]
    entries = [*(() if explain else unknown), *findings.unknown]
    return {
        "info": f"{len(infos)}: {_format_ids(infos)} (--explain)" if infos and not explain else "",
        "not read": "; ".join(findings.not_read),
        "checked": "; ".join(findings.checked) if explain or not (bad or has_table) else "",
        "not checked": "; ".join(findings.not_checked) if findings.checked else "",
        "unknown": "; ".join(entries) if explain else _first_entries(entries),
        "next": "" if bad or not open_ else open_[0].command,
    }


def _first_entries(entries: Sequence[str]) -> str:
    """Return the entries that fit in a few lines, and a count of the rest."""
    for count in range(len(entries), 0, -1):
        text = "; ".join(entries[:count])
        if len(text) <= _UNKNOWN_LETTERS or count == 1:
            rest_count = len(entries) - count
            return f"{text}; {rest_count} more (--explain)" if rest_count else text
    return ""


def _format_ids(findings: Iterable[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.id for finding in findings))


def _count_lines(parts: Iterable[Part]) -> int:
    """Return the number of 80-column lines of these parts."""
    height = 0
    for part in parts:
        if isinstance(part, Text):
            text = format_plain(part.words)
            lines = textwrap.wrap(text[part.hang :], _COLUMNS - part.hang) if part.hang else [text]
            height += max(1, len(lines))
        else:
            height += 2 + len(getattr(part, "rows", ()))
    return height


_LONGEST = 30  # characters for the values of several facts

_FACTS = {
    "node-vcpus": "vCPUs of {} nodes",
    "distances": "distances of {} nodes",
    "node-memory": "memory of {} nodes",
    **dict.fromkeys(("device-node", "device-missing", "device-other"), "nodes of {} devices"),
    "device-link": "links of {} devices",
}
"""Names of several facts, by their id."""

_GROUPS = {"siblings": "cores", "llcs": "L3"}
"""Groups of vCPUs that a CPU model may hide, by id, and their unit."""


def build_checks_table(checks: Sequence[Check], *, explain: bool = False) -> tuple[Part, ...]:
    """Return a row per kind of fact, without equal facts if any differs; explain: per fact. Facts
    unknown for the same reason are one row."""
    kinds: dict[tuple[str, str], list[Check]] = {}
    differ = any(_format_status(check) == "differs" for check in checks)
    for number, check in enumerate(checks):
        status = _format_status(check)
        if differ and status == "equal" and not explain:
            continue
        kind = str(number) if explain else _FACTS.get(check.id, check.subject)
        if status == "unknown" and check.id in _GROUPS and not explain:
            kind = ", ".join(_GROUPS)
        kinds.setdefault((kind, status), []).append(check)
    rows = [_format_row(status, group) for (_, status), group in kinds.items()]
    return tuple(table_lines(("fact", "planned", "guest"), rows))


def format_counts(checks: Sequence[Check]) -> str:
    """Count the facts: "23 facts equal, 2 unknown, 0 different"."""
    counts = {"equal": 0, "unknown": 0, "differs": 0}
    for check in checks:
        counts[_format_status(check)] += 1
    equal, unknown, different = counts.values()
    return f"{equal} facts equal, {unknown} unknown, {different} different"


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[Text]:
    """Yield a plain table; the last column may wrap."""
    lines = [heads, *rows]
    widths = [max(len(line[at]) for line in lines) + 2 for at in range(len(heads) - 1)]
    for line in lines:
        start = "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        look = "bold" if line is heads else ""
        yield Text((Span(start, look), Span(line[-1], look)), hang=sum(widths))


def _format_status(check: Check) -> str:
    if check.finding is None:
        return "equal"
    return "unknown" if check.finding.severity is Severity.INCONCLUSIVE else "differs"


def _format_row(status: str, group: Sequence[Check]) -> tuple[str, str, str]:
    fact, planned = group[0].subject, _format_values(check.expected for check in group)
    observed = _format_values(check.observed for check in group)
    if len(group) > 1:
        subjects = ", ".join(check.subject for check in group)
        fact = _FACTS.get(group[0].id, subjects).format(len(group))
    if status == "unknown":
        if len(group) > 1 and group[0].id in _GROUPS:
            planned = ", ".join(f"{check.groups} {_GROUPS[check.id]}" for check in group)
        return fact, planned, f"unknown: {group[0].reason}"
    if status == "differs":
        return fact, _shorten(planned), _shorten(observed)
    if group[0].id == "device-node" and len(group) > 1:
        return fact, "each on its cell's node", "equal, by numa_node"
    is_same = all(check.expected == check.observed for check in group)
    return fact, planned, "equal" if is_same else f"equal: {observed}"


def _shorten(text: str) -> str:
    """Shorten a value; its finding has the full text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _format_values(values: Iterable[str]) -> str:
    """Format different values in a list, as a range of sizes, or as the first and a count."""
    distinct = list(dict.fromkeys(value.removeprefix("vCPUs ") for value in values))
    sizes = [value.split(" ") for value in distinct]
    if len(distinct) > 1 and len({tuple(size[1:]) for size in sizes}) == 1 < len(sizes[0]):
        numbers = [float(size[0]) for size in sizes if re.fullmatch(r"[\d.]+", size[0])]
        if len(numbers) == len(sizes) and len(sizes[0]) == 2:
            return f"{min(numbers):.0f} to {max(numbers):.0f} {sizes[0][1]}"
    joined_values, rest_count = "  ".join(distinct), len(distinct) - 1
    return (
        joined_values
        if not rest_count or len(joined_values) <= _LONGEST
        else f"{distinct[0]} and {rest_count} more"
    )


Labels = Mapping[str, str]


def format_prometheus(findings: Findings, labels: Labels) -> str:
    """Return counts by severity, 0 included, and a sample per finding. labels: of all samples."""
    counts = Counter(finding.severity for finding in findings.findings)
    by_severity = [({"severity": severity}, counts[severity]) for severity in Severity]
    samples = [
        ({"id": finding.id, "severity": finding.severity, "subject": finding.subject}, 1)
        for finding in findings.findings
    ]
    unread: list[tuple[Labels, int]] = [({}, len(findings.not_read))]
    return (
        _format_gauge("homenode_findings", "Number of findings by severity.", labels, by_severity)
        + (_format_gauge("homenode_finding", "One finding.", labels, samples) if samples else "")
        + _format_gauge("homenode_not_read", "Areas that could not be read.", labels, unread)
    )


def _format_gauge(
    name: str, text: str, labels: Labels, samples: Iterable[tuple[Labels, int]]
) -> str:
    """Return the text of a metric without duplicate samples."""
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
    escaped_text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(letter if letter.isprintable() else "?" for letter in escaped_text)
