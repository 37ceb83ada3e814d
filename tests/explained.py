"""What a document says, section by section."""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from homenode.doc import (
    Cell,
    Commands,
    Doc,
    Gallery,
    Items,
    Part,
    Picture,
    Section,
    Table,
    Text,
    format_plain,
)


def tables(parts: Iterable[Part]) -> tuple[Table, ...]:
    """Every table of these parts and of the sections in them."""
    found: list[Table] = []
    for part in parts:
        if isinstance(part, Section):
            found += tables(part.parts)
        elif isinstance(part, Table):
            found.append(part)
    return tuple(found)


class Explained(NamedTuple):
    """A section: its lines with their indents, its first table, its commands."""

    heading: str
    lines: tuple[str, ...]
    table: Table | None
    commands: tuple[str, ...]


def explained(doc: Doc) -> tuple[Explained, ...]:
    """The sections of a document."""
    return tuple(
        Explained(
            format_plain(one.title),
            tuple(" " * t.indent + format_plain(t.words) for t in one.parts if isinstance(t, Text)),
            next((part for part in one.parts if isinstance(part, Table)), None),
            tuple(line for part in one.parts if isinstance(part, Commands) for line in part.lines),
        )
        for one in doc.parts
        if isinstance(one, Section)
    )


def section(doc: Doc | Section, title: str) -> Section:
    """The first section below that has an id, or begins with a title."""
    for part in doc.parts:
        if isinstance(part, Section):
            if title in (part.id, part.name) or format_plain(part.title).startswith(title):
                return part
            with contextlib.suppress(LookupError):
                return section(part, title)
    raise LookupError(title)


def pictures(of: Doc | Section, title: str = "") -> dict[str, Picture]:
    """The pictures of a section by title; none where there is no such section."""
    if title:
        try:
            of = section(of, title)
        except LookupError:
            return {}
    galleries = [part for part in of.parts if isinstance(part, Gallery)]
    return {format_plain(one.title): one for gallery in galleries for one in gallery.pictures}


def rows(of: Doc | Section, title: str = "") -> list[dict[str, str]]:
    """The rows of all tables below, by the first lines of their heads."""
    part = section(of, title) if title else of
    return [
        dict(zip(map(first, table.heads), map(format_plain, row), strict=False))
        for table in tables(part.parts)
        for row in table.rows
    ]


def first(head: str | Cell) -> str:
    """The first line of a head."""
    return format_plain(head.lines[0]) if isinstance(head, Cell) else head


def items(of: Doc | Section, title: str) -> list[str]:
    """The items of a section."""
    lists = [part for part in section(of, title).parts if isinstance(part, Items)]
    return [format_plain(one) for part in lists for one in part.items]
