"""Catalogue: every finding by its id, as docs/findings lists them; a finding is made from it. [I/O]

A page of docs/findings has a section for each finding, or for a few that say the same:

    ## pcie-link-slow

    **Critical, warning.** A link runs below the speed that both of its ends can.

    **Cost.** The share of the path's bandwidth is in the finding.

    **Fix.** `homenode doctor retrain BDF` shows what it would write.

    Check: `lspci -vvs BDF | grep LnkSta`.

The first severity is the one that a finding has unless the code says another. The first paragraphs
of Cost and Fix are printed with it; what follows is for `homenode explain`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from msgspec import UNSET, UnsetType

from homenode.errors import HostError
from homenode.findings import Finding, Severity
from homenode.package_files import package_names, package_text

_FOLDERS = (("finding_pages",), ("..", "..", "docs", "findings"))
"""Where the pages are: as it is built, and in the source tree."""

_MEANING = re.compile(r"\*\*([A-Za-z, ]+)\.\*\* ([^\n]+(?:\n[^\n]+)*)")
_PART = re.compile(r"^\*\*([A-Z][a-z ]+)\.?\*\*\s+", re.MULTILINE)
_LINK = re.compile(r"\[([^][]+)\]\([^()]+\)")
_NAMES = "Slurm|Linux|Xen|Incus|Proxmox|Nova|Intel"
_SENTENCE = re.compile(rf"(?!(?:{_NAMES})\b)[A-Z][a-z]*\b")
"""A first word whose capital is the sentence's, and not a name's or an abbreviation's."""
_NOTHING = ("None", "Nothing to do")
"""A Cost or a Fix that begins so is not printed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a finding before it is found.

    ids: with those that mean the same. severities: each that it may have, the usual one first.
    meaning: one or two sentences. cost, fix: as they are printed; None = there is none. parts: by
    their names: Cause, Cost, Fix, Source, Tested with; Fix is always there.
    """

    ids: tuple[str, ...]
    severities: tuple[Severity, ...]
    meaning: str
    cost: str | None
    fix: str | None
    parts: Mapping[str, str]
    page: str
    text: str


def finding(
    id: str,
    subject: str,
    expected: str,
    observed: str,
    source: str,
    *,
    severity: Severity | None = None,
    cost: str | UnsetType | None = UNSET,
    fix: str | UnsetType | None = UNSET,
) -> Finding:
    """A finding with the severity, cost and fix of its page, but for those that are given."""
    entry = entry_of(id)
    return Finding(
        id=id,
        severity=severity or entry.severities[0],
        subject=subject,
        expected=expected,
        observed=observed,
        cost=entry.cost if cost is UNSET else cost,
        fix=entry.fix if fix is UNSET else fix,
        source=source,
    )


@cache
def entry_of(id: str) -> Entry:
    """The finding of this id; only its own section is parsed. Raises KeyError for an unknown id."""
    return _entry(*_sections()[id])


@cache
def catalogue() -> Mapping[str, Entry]:
    """Every finding by its id."""
    return {name: entry_of(name) for name in _sections()}


@cache
def _sections() -> Mapping[str, tuple[str, str, str]]:
    """Heading, body and page of every finding, by its id."""
    folder = next((one for one in _FOLDERS if package_names(*one)), None)
    if folder is None:
        raise HostError(
            "homenode: expected the pages of its findings with its modules, found none",
            hint="install homenode again: its modules alone were copied",
        )
    return {
        name: (heading, body, page)
        for page in package_names(*folder)
        if page.endswith(".md") and page != "README.md"
        for heading, body in _split(package_text(*folder, page))
        for name in heading.split(", ")
    }


def entries(text: str, page: str) -> tuple[Entry, ...]:
    """The findings of a page. Raises ValueError for a section of another form."""
    return tuple(_entry(heading, body, page) for heading, body in _split(text))


def _split(text: str) -> Iterator[tuple[str, str]]:
    for section in f"\n{text}".split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        yield heading, body.strip()


def _entry(heading: str, body: str, page: str) -> Entry:
    meaning = _MEANING.match(body)
    if meaning is None:
        raise ValueError(f"{page}: {heading}: expected **Severity.** and what it means first")
    pieces = _PART.split(body[meaning.end() :])
    parts = {name: part.strip() for name, part in zip(pieces[1::2], pieces[2::2], strict=True)}
    return Entry(
        ids=tuple(heading.split(", ")),
        severities=tuple(Severity(word.lower()) for word in meaning[1].split(", ")),
        meaning=meaning[2],
        cost=_printed(parts.get("Cost")),
        fix=_printed(parts.get("Fix")),
        parts=parts,
        page=page,
        text=f"# {heading}\n\n{body}\n",
    )


def _printed(part: str | None) -> str | None:
    """The first paragraph as one line, as messages are written: without a sentence's capital and
    last period, and without the marks of Markdown."""
    if part is None or part.startswith(_NOTHING):
        return None
    paragraph = " ".join(part.partition("\n\n")[0].split())
    if _SENTENCE.match(paragraph):
        paragraph = paragraph[0].lower() + paragraph[1:]
    return _LINK.sub(r"\1", paragraph).replace("`", "").removesuffix(".")
