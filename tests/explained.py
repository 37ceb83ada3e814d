"""What a document says, section by section."""

from typing import NamedTuple

from homenode.doc import Commands, Doc, Section, Table, Text, plain


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
            plain(one.title),
            tuple(" " * t.indent + plain(t.words) for t in one.parts if isinstance(t, Text)),
            next((part for part in one.parts if isinstance(part, Table)), None),
            tuple(line for part in one.parts if isinstance(part, Commands) for line in part.lines),
        )
        for one in doc.parts
        if isinstance(one, Section)
    )
