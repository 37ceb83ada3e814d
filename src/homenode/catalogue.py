"""Catalogue: every finding by its id, as docs/findings lists them. [I/O]

A page of docs/findings has a section for each finding, or for a few that mean the same:

    ## pcie-link-slow

    **Critical, warning.** A link runs below the speed that both of its ends can.

    **Fix.** `homenode doctor retrain BDF` shows what it would write ...
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from homenode.findings import Severity
from homenode.package_files import package_names, package_text

_FOLDERS = (("finding_pages",), ("..", "..", "docs", "findings"))
"""Where the pages are: as it is built, and in the source tree."""

_SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
_MEANING = re.compile(r"\*\*([A-Za-z, ]+)\.\*\* ([^\n]+(?:\n[^\n]+)*)")
_PART = re.compile(r"^\*\*([A-Z][a-z ]+)\.?\*\*\s+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a finding before it is found.

    ids: with those that mean the same. severities: each that it may have. meaning: one or two
    sentences. parts: by their names: Cause, Cost, Fix, Source, Tested with; Fix is always there.
    """

    ids: tuple[str, ...]
    severities: frozenset[Severity]
    meaning: str
    parts: Mapping[str, str]
    page: str
    text: str


@lru_cache(1)
def catalogue() -> Mapping[str, Entry]:
    """Every finding by its id."""
    folder = next(one for one in _FOLDERS if package_names(*one))
    found: dict[str, Entry] = {}
    for page in package_names(*folder):
        if page.endswith(".md") and page != "README.md":
            for entry in entries(package_text(*folder, page), page):
                found |= dict.fromkeys(entry.ids, entry)
    return found


def entries(text: str, page: str) -> tuple[Entry, ...]:
    """The findings of a page. Raises ValueError for a section of another form."""
    sections = _SECTION.split(text)[1:]
    return tuple(
        _entry(heading, body.strip(), page)
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
    )


def _entry(heading: str, body: str, page: str) -> Entry:
    meaning = _MEANING.match(body)
    if meaning is None:
        raise ValueError(f"{page}: {heading}: expected **Severity.** and what it means first")
    pieces = _PART.split(body[meaning.end() :])
    return Entry(
        ids=tuple(heading.split(", ")),
        severities=frozenset(Severity(word.lower()) for word in meaning[1].split(", ")),
        meaning=meaning[2],
        parts={name: part.strip() for name, part in zip(pieces[1::2], pieces[2::2], strict=True)},
        page=page,
        text=f"# {heading}\n\n{body}\n",
    )
