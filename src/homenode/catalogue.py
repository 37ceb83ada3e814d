"""Catalogue: every finding by its id, as docs/findings lists them; a finding is made from it. [I/O]

A page of docs/findings has a section for each finding, or for a few that say the same:

    ## pcie-link-slow

    **Critical, warning.** A link runs below the speed that both of its ends can.

    **Cost.** The share of the path's bandwidth is in the finding.

    **Fix.** `homenode doctor retrain BDF` shows what it would write.

    Check: `lspci -vvs BDF | grep LnkSta`.

The first severity is the one that a finding has unless the code says another. The first paragraphs
of Cost and Fix are printed with it; what follows is for `homenode list findings`. A `{word}` in
them is a value that the code gives, and DEVICE, its name, where none is given. A part of one case
alone has it in its heading, and the code names the case:

    **Fix, of one device.** `homenode doctor retrain {device}`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from msgspec import UNSET, Struct, UnsetType

from homenode.bdf import Bdf
from homenode.errors import HostError
from homenode.findings import Finding, Severity, filled
from homenode.package_data import package_names, package_text

_FOLDERS = (("finding_pages",), ("..", "..", "docs", "findings"))
"""Where the pages are: as it is built, and in the source tree."""

_MEANING = re.compile(r"\*\*([A-Za-z, ]+)\.\*\* ([^\n]+(?:\n[^\n]+)*)")
_PART = re.compile(r"^\*\*([A-Z][a-z ]+(?:, [\w /-]+)?)\.?\*\*\s+", re.MULTILINE)
_LINK = re.compile(r"\[([^][]+)\]\([^()]+\)")
_NAMES = "Slurm|Linux|Xen|Proxmox|Nova|Intel"
_SENTENCE = re.compile(rf"(?!(?:{_NAMES})\b)[A-Z][a-z]*\b")
"""A first word whose capital is the sentence's, and not a name's or an abbreviation's."""
_NOTHING = ("None", "Nothing to do")
"""A Cost or a Fix that begins so is not printed."""


class CatalogueEntry(Struct, frozen=True, kw_only=True):
    """What is known of a finding before it is found."""

    ids: tuple[str, ...]  # with those that mean the same
    severities: tuple[Severity, ...]  # each that it may have, the usual one first
    meaning: str  # one or two sentences
    parts: Mapping[str, str]  # by their names: Cause, Cost, Fix, Source; Fix is always there
    page: str
    text: str  # the whole section, for `homenode list findings`

    def texts(self, part: str) -> dict[str | None, str | None]:
        """Cost or Fix as it is printed, by case; None = any other case, and no text."""
        own = {None: _printed(self.parts.get(part))}
        return own | {
            name.removeprefix(f"{part}, "): _printed(text)
            for name, text in self.parts.items()
            if name.startswith(f"{part}, ")
        }

    def printed(
        self, part: str, case: str | None = None, values: Mapping[str, object] | None = None
    ) -> str | None:
        """Cost or Fix with its values, of a case where the page has that."""
        texts = self.texts(part)
        text = texts.get(case, texts[None])
        return text and filled(text, values or {})


def finding(
    id: str,
    subject: str,
    expected: str,
    observed: str,
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
    """A finding with the severity, cost and fix of its page, but for those that are given.

    case: which of the page's texts. values: what stands in them for `{word}`. source: "" = what the
    caller's caller says of all that it finds (findings.sourced). devices, count: as in Finding.
    """
    entry = entry_of(id)
    return Finding(
        id=id,
        severity=severity or entry.severities[0],
        subject=subject,
        expected=expected,
        observed=observed,
        cost=entry.printed("Cost", case, values) if cost is UNSET else cost,
        fix=entry.printed("Fix", case, values) if fix is UNSET else fix,
        source=source,
        devices=devices,
        count=count,
    )


@cache
def entry_of(id: str) -> CatalogueEntry:
    """The finding of this id; only its own section is parsed. Raises KeyError for an unknown id."""
    return _entry(*_sections()[id])


def catalogue() -> Mapping[str, CatalogueEntry]:
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
    return _by_id(
        {page: package_text(*folder, page) for page in filter(_is_page, package_names(*folder))}
    )


def _is_page(name: str) -> bool:
    return name.endswith(".md") and name != "README.md"


def _by_id(pages: Mapping[str, str]) -> dict[str, tuple[str, str, str]]:
    """Heading, body and page of every finding, by its id."""
    return {
        name: (heading, body, page)
        for page, text in pages.items()
        for heading, body in _split(text)
        for name in heading.split(", ")
    }


def entries(text: str, page: str) -> tuple[CatalogueEntry, ...]:
    """The findings of a page. Raises ValueError for a section of another form."""
    return tuple(_entry(heading, body, page) for heading, body in _split(text))


def _split(text: str) -> Iterator[tuple[str, str]]:
    for section in f"\n{text}".split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        yield heading, body.strip()


def _entry(heading: str, body: str, page: str) -> CatalogueEntry:
    meaning = _MEANING.match(body)
    if meaning is None:
        raise ValueError(f"{page}: {heading}: expected **Severity.** and what it means first")
    pieces = _PART.split(body[meaning.end() :])
    parts = {name: part.strip() for name, part in zip(pieces[1::2], pieces[2::2], strict=True)}
    return CatalogueEntry(
        ids=tuple(heading.split(", ")),
        severities=tuple(Severity(word.lower()) for word in meaning[1].split(", ")),
        meaning=meaning[2],
        parts=parts,
        page=page,
        text=filled(f"# {heading}\n\n{body}\n", {}),
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
