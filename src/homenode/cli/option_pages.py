"""Option pages: what each option means, from the tables of docs/commands. [I/O]

A table whose first head ends in "option" has a row for an option, or for a few that say the same:

    | option | meaning | default |
    |---|---|---|
    | `--seed N` | of the order of tests in each round | 1 |

A subcommand has the rows of the section (`## place`) that its name stands in the heading of, then
those of the whole page. `as for [plan](plan.md)`: what the page of `homenode plan` says of it.
"""

import re
from functools import cache
from typing import NamedTuple

from homenode.errors import HostError
from homenode.package_data import package_names, package_text

_FOLDERS = (("command_pages",), ("..", "..", "docs", "commands"))
"""Where the pages are: as it is built, and in the source tree."""

_CELL = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r" \(\[below\]\([^()]+\)\)|\[([^][]+)\]\([^()]+\)")
_AS_FOR = re.compile(r"as for \[[^][]+\]\((?:([a-z-]+)\.md)?(?:#([a-z-]+))?\)")


class Meaning(NamedTuple):
    """What a page says of an option, without the marks of Markdown. default: "" = none."""

    text: str = ""
    default: str = ""


class _Row(NamedTuple):
    heading: frozenset[str]
    names: frozenset[str]
    meaning: str
    default: str


def meaning(words: tuple[str, ...], name: str) -> Meaning:
    """Of an option by its long name, or of an argument by what stands for it.

    words: the command, without `homenode`. Nothing where its page has no row of this name.
    """
    rows = [row for row in rows_of(words[0]) if name in row.names]
    own = [row for row in rows if words[-1] in row.heading]
    if not rows:
        return Meaning()
    row = (own if len(words) > 1 and own else rows)[0]
    other = _AS_FOR.match(row.meaning)
    if other is not None:
        found = meaning((other[1] or words[0], *filter(None, [other[2]])), name)
        return found._replace(default=_plain(row.default) or found.default)
    return Meaning(_sentence(row.meaning), _plain(row.default))


@cache
def rows_of(page: str) -> tuple[_Row, ...]:
    """The rows of a page's tables of options, in order; none where there is no such page."""
    rows: list[_Row] = []
    heads: tuple[str, ...] = ()
    heading: frozenset[str] = frozenset()
    for line in _text(f"{page}.md").split("\n"):
        if line.startswith("## "):
            heading = frozenset(re.split(r"[ ,]+", line))
        cells = tuple(cell.strip() for cell in _CELL.split(line)[1:-1])
        heads = () if not cells else heads or cells
        if cells and heads[0].endswith("option") and heads[1] == "meaning":
            default = cells[2] if len(cells) == 3 else ""
            rows.append(_Row(heading, _names(cells[0]), cells[1], default))
    return tuple(rows)


def _text(page: str) -> str:
    folder = next((one for one in _FOLDERS if package_names(*one)), None)
    if folder is None:
        raise HostError(
            "homenode: expected the pages of its commands with its modules, found none",
            hint="install homenode again: its modules alone were copied",
        )
    return package_text(*folder, page) if page in package_names(*folder) else ""


def _names(cell: str) -> frozenset[str]:
    """Options without what stands for their values; an argument as it is written."""
    found: set[str] = set()
    for code in _CODE.findall(cell):
        options = [word for word in re.split(r"[\s,]+", code) if word.startswith("-")]
        found |= set(options if code.startswith("-") else [code])
    return frozenset(found)


def _plain(text: str) -> str:
    return _LINK.sub(r"\1", text).replace("`", "").replace("\\|", "|")


def _sentence(text: str) -> str:
    """With a sentence's capital, where it does not begin with code, and its period."""
    shown = _plain(text)
    if not text.startswith("`"):
        shown = shown[:1].upper() + shown[1:]
    return f"{shown.removesuffix('.')}." if shown else ""
