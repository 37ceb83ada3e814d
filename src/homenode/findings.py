"""Findings, gaps (unknown facts), rejections and caveats on results.

The texts of every finding are in findings/PAGE.toml, a table for each id:

    [pcie-link-slow]
    severity = ["critical", "warning"]
    headline = "the links of {subjects} run at {reached} % of their rate"
    meaning = "A link runs below the speed that both of its ends can."
    cost = "{share} % of the path's bandwidth"
    fix = "`homenode doctor retrain {device}`"
    fix_of."low target" = "raise the target speed of port {port} in the firmware setup"

The code passes a value for each `{word}`, and names the case of a text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType, toml
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.errors import DONE, FINDINGS, NOT_KNOWN
from homenode.package_data import read_package_text
from homenode.text import command_line, format_subjects, shorten_list


class Severity(StrEnum):
    """Severity of a finding, worst first."""

    CRITICAL = "critical"  # does not start, or the guest gets something else than was planned
    WARNING = "warning"  # works, but slower or on somebody else's ground
    INFO = "info"  # worth knowing; nothing to do
    INCONCLUSIVE = "inconclusive"  # could not be judged, with the reason in `observed`


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


class Finding(Struct, frozen=True, kw_only=True):
    """One fact that the user may need to act on."""

    id: str  # stable, for tests, filters and documentation
    severity: Severity
    subject: str  # the thing, in the user's words
    expected: str = ""  # with units, as observed; "" if `observed` is sufficient
    observed: str
    cost: str | None = None  # None = unknown
    fix: str | None = None  # the next thing to do, None if there is nothing
    source: str = ""  # the examined files or the author; "" = the plan
    devices: tuple[
        Bdf, ...
    ] = ()  # functions that it is about, the cause first; () = not one by one
    count: int | None = None  # how often it was seen, of what is counted
    headline: str = ""  # its fact in a few words, with the subject; "" = the meaning of its texts
    command: str = ""  # the first homenode command of the fix, "" without one
    # of the definition: its name, and the number of the vCPU, cell or IOThread
    element: tuple[str, int] | None = None

    @property
    def is_bad(self) -> bool:
        """Critical or a warning."""
        return self.severity in (Severity.CRITICAL, Severity.WARNING)

    def __str__(self) -> str:
        return f"{self.severity}: {self.fact}"

    @property
    def fact(self) -> str:
        """The finding without its severity."""
        return f"{self.subject}: {self.comparison} ({self.id})"

    @property
    def comparison(self) -> str:
        """Expected and observed state on one line."""
        if not self.expected:
            return self.observed
        return f"expected {self.expected}, found {self.observed}"


class GapKind(StrEnum):
    OTHER = "other"
    VMS = "vms"  # all VMs of the machine
    VM = "vm"  # a running VM
    LISTING_CUT = "listing-cut"  # the functions behind the end of a listing
    DEVICE_SILENT = "device-silent"  # what the configuration space of `device` holds


class Gap(Struct, frozen=True, order=True, omit_defaults=True):
    """One unknown fact. A gap has the reason for a value that is None."""

    subject: str  # what is unknown, in the user's words: "node 1 free memory"
    reason: str  # "/sys/.../numa_node is -1", "lstopo XML has no link state"
    kind: GapKind = GapKind.OTHER
    device: Bdf | None = None  # the function that it is about, if code needs it

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"


NO_VMS = "VMs"
"""Subject if the source of a host cannot show its VMs: a description, hwloc XML, lspci."""
NO_VMS_DESCRIBED = Gap(NO_VMS, "the description has none")
"""The gap of a description without VMs: a host that runs none."""

_MAX_REASONS = 8


def list_unread_vms(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return the gaps that hide VMs, whose resources may be given to another VM."""
    return tuple(gap for gap in gaps if gap.kind in (GapKind.VMS, GapKind.VM))


def format_gaps(gaps: Iterable[Gap]) -> tuple[str, ...]:
    """Return a line for each reason with its subjects; further reasons share one line."""
    subjects: dict[str, list[str]] = {}
    for gap in dict.fromkeys(gaps):
        subjects.setdefault(gap.reason, []).append(gap.subject)
    lines = [f"{format_subjects(group)}: {reason}" for reason, group in subjects.items()]
    if len(lines) > _MAX_REASONS + 1:
        groups = list(subjects.values())[_MAX_REASONS:]
        subjects_text = "; ".join(map(format_subjects, groups))
        lines[_MAX_REASONS:] = [f"{subjects_text}: homenode show --explain prints the reasons"]
    return tuple(lines)


def format_shared_gaps(gaps_of: Iterable[tuple[str, Iterable[Gap]]]) -> tuple[str, ...]:
    """Return the lines of several hosts, each line once, after the names of its hosts."""
    names: dict[str, list[str]] = {}
    for name, gaps in gaps_of:
        for line in format_gaps(gaps):
            names.setdefault(line, []).append(name)
    return tuple(f"{shorten_list(hosts, 3)}: {line}" for line, hosts in names.items())


class Rejection(Struct, frozen=True):
    """A rejected placement or change, with the name of the constraint."""

    constraint: str
    nodes: tuple[NodeIndex, ...]  # host nodes of the candidate; () = of all, or of a change
    detail: str  # expected against found, with numbers
    hint: str | None = None  # what would make it fit

    def __str__(self) -> str:
        return f"{self.detail} ({self.constraint})"


class Caveat(Struct, frozen=True, kw_only=True):
    """A caveat on a comparison."""

    id: str  # stable
    subject: str  # the metric, the run or the alternatives
    detail: str
    blocks: bool  # nothing can be concluded before it is resolved
    cause: str  # the likely one
    fix: str  # the next thing to do
    system: str = ""  # the machine, where several were compared, each with itself; else ""


class FindingTexts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The texts of a finding; meaning, cause, source and more are Markdown."""

    severity: tuple[Severity, ...]  # each that it may have, the usual one first
    meaning: str  # one or two sentences
    headline: str = ""  # for line 1 of a screen: "the links of {subjects} run at {reached} %"
    also: tuple[str, ...] = ()  # ids that mean the same
    cause: str = ""
    cost: str = ""  # printed with the finding, as fix is; "" = nothing is printed
    cost_of: Mapping[str, str] = {}  # by case
    fix: str = ""
    fix_of: Mapping[str, str] = {}  # by case
    source: str = ""
    more: str = ""  # for `homenode list findings` and the pages

    def format_markdown(self, heading: str) -> str:
        """Return the section of the finding on its page."""
        severities = ", ".join(self.severity).capitalize()
        return (
            "\n\n".join((heading, f"**{severities}.** {self.meaning}", *self._format_parts()))
            + "\n"
        )

    def _format_parts(self) -> Iterator[str]:
        yield from (f"**Cause.** {self.cause}",) if self.cause else ()
        for part, usual, texts in (
            ("Cost", self.cost, self.cost_of),
            ("Fix", self.fix, self.fix_of),
        ):
            for case, text in {"": usual, **texts}.items():
                if text:
                    sentence = fill_in(text[0].upper() + text[1:], {})
                    yield f"**{', '.join(filter(None, (part, case)))}.** {sentence}."
        yield from filter(None, (self.more,))
        yield from (f"**Source.** {self.source}",) if self.source else ()


class Subject(NamedTuple):
    """A subject that is a numbered element of the definition."""

    text: str  # in the user's words
    element: str
    number: int  # number of the vCPU, cell or IOThread


class Findings(Struct, frozen=True, kw_only=True):
    """The `findings` format, a line each."""

    checked: tuple[str, ...]  # what was looked at, also if all is well
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()  # facts that were not checked, and may be wrong
    not_read: tuple[str, ...] = ()  # a whole requested area that could not be read
    unknown: tuple[str, ...] = ()  # facts that the host's source does not show


Call = Sequence[tuple[str, ...]]
"""The words of a user's command: of each argument, and of each option with its value."""


def with_call(findings: Iterable[Finding], call: Call) -> tuple[Finding, ...]:
    """Return the findings with the VM and its host, as the user named them, in the commands of
    their fixes."""

    def fill_command(text: str) -> str:
        return _CALL.sub(repeat, text)

    def repeat(match: re.Match[str]) -> str:
        omitted_options = (*_OMITTED.get(match[1], ()), *match[2].split())
        kept_words = [words for words in call if words[0] not in omitted_options]
        if match[1] == "homenode show" or "--target" in match[2]:
            kept_words = [words for words in kept_words if len(words) > 1]
        return " ".join((match[1], *(command_line(*words) for words in kept_words))) + match[2]

    return tuple(
        replace(f, fix=f.fix and fill_command(f.fix), command=fill_command(f.command))
        for f in findings
    )


def same_command(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings of a plan with options to add to the user's command in their fixes."""

    def name_options(match: re.Match[str]) -> str:
        return f"the same command with{match[2]}" if match[2] else match[0]

    return tuple(replace(f, fix=f.fix and _CALL.sub(name_options, f.fix)) for f in findings)


def finding(
    id: str,
    subject: str | Bdf | Subject,
    expected: str = "",
    observed: str = "",
    source: str = "",
    *,
    severity: Severity | None = None,
    case: str | None = None,
    values: Mapping[str, object] | None = None,
    cost: str | UnsetType | None = UNSET,
    fix: str | UnsetType | None = UNSET,
    devices: tuple[Bdf, ...] = (),
    count: int | None = None,
) -> Finding:
    """Return a finding with the severity, cost and fix of its texts, but for those that are given.

    subject: an address becomes the device. case: selects the texts. values: replacements for
    `{word}`. source: "" = set later for all findings (add_source). devices, count: as in Finding.
    """
    texts, key, placeholders = find_texts(id), case or "", values or {}
    fix_text = texts.fix_of.get(key, texts.fix) if fix is UNSET else ""
    command = _COMMAND.search(fix_text)
    name = subject.text if isinstance(subject, Subject) else str(subject)
    return Finding(
        id=id,
        severity=severity or texts.severity[0],
        subject=name,
        expected=expected,
        observed=observed,
        cost=format_plain(texts.cost_of.get(key, texts.cost), placeholders)
        if cost is UNSET
        else cost,
        fix=format_plain(fix_text, placeholders) if fix is UNSET else fix,
        source=source,
        devices=(subject,) if isinstance(subject, Bdf) else devices,
        count=count,
        headline=format_plain(texts.headline, {"subjects": name, **placeholders}) or "",
        command="" if command is None else fill_in(command[1], placeholders),
        element=subject[1:] if isinstance(subject, Subject) else None,
    )


def with_fix(finding: Finding, text: str) -> Finding:
    """Return the finding with another fix, in the form of the tables."""
    command = _COMMAND.search(text)
    return replace(
        finding, fix=format_plain(text, {}), command="" if command is None else command[1]
    )


def format_plain(text: str, values: Mapping[str, object]) -> str | None:
    """Cost or fix on one line without the marks of Markdown, None if nothing is printed."""
    return fill_in(" ".join(text.replace("`", "").split()), values) or None


_CALL = re.compile(
    r"\b(homenode (?:plan|verify|show))\b(?: VM(?:\.xml)?\b)?(?! ORIGINAL)"
    r"((?: --[a-z-]{1,30}(?: [A-Za-z0-9.]{1,30})?){0,9})"
)
_OMITTED = {"homenode plan": ("--plan",), "homenode show": ("--plan",)}
"""Options of verify that the command lacks."""
_COMMAND = re.compile(r"`((?:sudo )?homenode [^`]+)`")


class _Values(dict[str, object]):
    def __missing__(self, word: str) -> str:
        return word.upper()


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Return the text with its values.

    >>> fill_in("echo on > {file}; reserve {pages}", {"file": "control"})
    'echo on > control; reserve PAGES'
    """
    return text.format_map(_Values(values))


def find_texts(id: str) -> FindingTexts:
    """Return the texts of a finding. Raises KeyError for an unknown id."""
    for name in GROUPS:
        if id in _format_page(name) and id in page(name):
            return page(name)[id]
    raise KeyError(id)


def catalogue() -> dict[str, FindingTexts]:
    return {key: texts for name in GROUPS for key, texts in page(name).items()}


GROUPS = {
    "links": "PCIe links of a host: speed, width, errors",
    "health": "GPUs, NICs and drives that differ from their peers",
    "hosts": "settings of a host, its firmware and its kernel",
    "drift": "differences of a host from its baseline",
    "pins": "pins of a VM's threads, and the topology of its guest",
    "memory": "where a VM's memory is, and its pages",
    "devices": "passed-through devices of a VM",
    "planning": "notes to a plan that works",
    "definition": "wrong references and sums in a definition",
    "plan": "differences of a definition or target file from its plan",
    "start": "what verify --start reports",
    "live": "threads, memory and interrupts of a running VM",
    "guest": "differences of a guest from its definition and plan",
    "nccl": "topology files for NCCL and RCCL",
    "kubevirt": "KubeVirt's VMs, nodes and clusters",
    "slurm": "Slurm's jobs, configuration and bindings",
    "measuring": "what makes a measurement unreliable",
}
"""Subject of each file of findings/ and page of docs/reference/findings."""


@cache
def _format_page(name: str) -> str:
    return read_package_text("findings", f"{name}.toml")


@cache
def page(name: str) -> Mapping[str, FindingTexts]:
    """Return the findings of a page, by id, in its order."""
    tables = toml.decode(_format_page(name), type=dict[str, FindingTexts])
    return {key: texts for first, texts in tables.items() for key in (first, *texts.also)}


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each finding once, worst first, otherwise in input order."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _RANK[finding.severity]))


def add_source(findings: Iterable[Finding], source: str) -> tuple[Finding, ...]:
    """Return the findings, with this source if they have no source."""
    return tuple(f if f.source else replace(f, source=source) for f in findings)


def are_bad(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is critical or a warning: a command then exits with 1."""
    return any(finding.is_bad for finding in findings)


def exit_code(findings: Findings) -> int:
    """FINDINGS for critical findings or warnings, NOT_KNOWN if not everything was checked."""
    if are_bad(findings.findings):
        return FINDINGS
    return DONE if findings.checked and not findings.not_read else NOT_KNOWN


def add_gaps(findings: Findings, gaps: Sequence[Gap], *, asks_vms: bool | None = None) -> Findings:
    """Return the findings with unknown facts of their host. asks_vms: whether its VMs are the
    question, so that an unread one makes the answer unknown; None = the answer needs no VMs."""
    unread = list_unread_vms(gaps) if asks_vms else ()
    ids = {NO_VMS} if asks_vms is None else set()
    unknown = format_gaps(gap for gap in gaps if gap not in unread and gap.subject not in ids)
    return replace(findings, not_read=format_gaps(unread), unknown=(*findings.unknown, *unknown))
