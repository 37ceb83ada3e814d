"""Pages of documentation as values: sections, tables, links, and the commands that they show."""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.command_line import has_cluster
from tests.doc_tree import made_pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELISION = "…"
"""A line that stands for output that a page leaves out."""

DIRECTORY_SHOWN = "/srv/vms"
"""Where the commands of the pages run, as far as a reader is concerned."""

_OF_CLUSTER = re.compile(r"homenode (?:kubevirt|pool|slurm)\b")
_CELL = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]+)`")
_FENCED = re.compile(r"^(?P<indent> *)```(?P<words>.*)\n(?P<text>(?:.*\n)*?) *```$", re.MULTILINE)
"""A fenced block, of a list's item with the item's indentation."""
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    line: int  # that line's number
    language: str  # of the line that opens it
    words: tuple[str, ...]  # of the line that opens it
    text: str


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command of a console block and the output that the page shows for it."""

    line: int
    arguments: tuple[str, ...]  # as a shell would split them
    redirected: str | None  # the file after ">"
    shown: tuple[str, ...]
    checked: bool  # False where the output depends on the machine (a block marked `live`)


@dataclass(frozen=True, slots=True)
class Page:
    """One document."""

    path: Path  # relative to the checkout
    text: str

    def blocks(self) -> Iterator[Block]:
        for opened in _FENCED.finditer(self.text):
            words = opened["words"].split()
            inside = re.sub(f"^{opened['indent']}", "", opened["text"], flags=re.MULTILINE)
            line = self.text.count("\n", 0, opened.start()) + 1
            language = words[0] if words else ""
            yield Block(line, language, tuple(words[1:]), inside.removesuffix("\n"))

    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCED.sub("", self.text)

    def words_in_code(self) -> frozenset[str]:
        """Everything in single backticks, and each of its parts: `-o, --output FILE` gives both."""
        found = set()
        for code in _CODE.findall(self.prose()):
            found.add(code)
            found.update(re.split(r"[\s,=|]+", code))
        return frozenset(found)

    def options_in_code(self) -> frozenset[str]:
        """Options of homenode in backticks: alone, or in a command line of homenode's."""
        found = set()
        for code in _CODE.findall(self.prose()):
            if code.startswith(("-", "homenode ")):
                found.update(re.split(r"[\s,=|]+", code))
        return frozenset(found)

    def sections(self) -> dict[str, str]:
        """Text below each heading of any level, by the heading without # and backticks."""
        parts = re.split(r"^#{1,6} (.*)$", self.prose(), flags=re.MULTILINE)
        return {
            title.replace("`", "").strip(): text
            for title, text in zip(parts[1::2], parts[2::2], strict=True)
        }

    def anchors(self) -> frozenset[str]:
        """Names that a link to a part of this page may use, as GitHub makes them."""
        return frozenset(
            re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in self.sections()
        )

    def links(self) -> Iterator[str]:
        for target in _LINK.findall(self.prose()):
            if "://" not in target:
                yield target

    def commands(self) -> Iterator[ShownCommand]:
        """Lines that begin with "$ " in console blocks, a backslash at the end continuing them."""
        for block in self.blocks():
            if block.language != "console":
                continue
            lines = block.text.split("\n")
            at = 0
            while at < len(lines):
                number, line = block.line + 1 + at, lines[at]
                at += 1
                assert line.startswith("$ "), f"{self.path}:{number}: expected a command, {line!r}"
                while line.endswith("\\"):
                    line = line[:-1] + lines[at]
                    at += 1
                shown = []
                while at < len(lines) and not lines[at].startswith("$ "):
                    shown.append(lines[at])
                    at += 1
                words = shlex.split(line[2:], comments=True)
                target = words[words.index(">") + 1] if ">" in words else None
                kept = words[: words.index(">")] if ">" in words else words
                checked = "live" not in block.words
                yield ShownCommand(number, tuple(kept), target, tuple(shown), checked)

    def files(self) -> Iterator[tuple[str, str]]:
        """(name, content) of the blocks that show a file: their first line names it."""
        for block in self.blocks():
            if block.language != "console" and block.words:
                yield block.words[0], block.text + "\n"


def read_page(path: str | Path) -> Page:
    """A page by its path in the checkout."""
    made = made_pages().get(os.path.normpath(path))
    return Page(Path(path), made or (ROOT / path).read_text(encoding="utf-8"))


def all_pages() -> tuple[Page, ...]:
    """Everything below docs/, and the pages at the top of the checkout; without the room of such
    commands, not those that show them."""
    paths = [*sorted(DOCS.rglob("*.md"))]
    paths += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    names = [*(str(path.relative_to(ROOT)) for path in paths if path.is_file()), *made_pages()]
    pages = map(read_page, dict.fromkeys(names))
    return tuple(page for page in pages if has_cluster() or not _OF_CLUSTER.search(page.text))


def split_row(line: str) -> list[str]:
    """The cells of a table's line, between its bars."""
    return _CELL.split(line.strip())[1:-1]


def first_column(section: str) -> tuple[str, ...]:
    """The code in the first cell of each row of a section's tables, header rows omitted."""
    rows = [line for line in section.splitlines() if line.startswith("|")]
    cells = [_CELL.split(row)[1].strip() for row in rows]
    return tuple(name for cell in cells for name in _CODE.findall(cell))


def missing_output(shown: tuple[str, ...], printed: str) -> str | None:
    """The first line that a page shows and that the command did not print there; None if all is so.

    Lines between two elisions follow each other in the output, and without an elision at an end the
    output begins or ends there. Blank lines and spaces at line ends do not count.
    """
    real = [line.rstrip() for line in printed.splitlines() if line.strip()]
    wanted = [line.rstrip() for line in shown if line.strip()]
    at, anchored = 0, True
    while wanted:
        if wanted[0].strip() == ELISION:
            wanted.pop(0)
            anchored = False
            continue
        run = list(_until_elision(wanted))
        wanted = wanted[len(run) :]
        last = not wanted
        starts = [at] if anchored else range(at, len(real) - len(run) + 1)
        fits = [s for s in starts if real[s : s + len(run)] == run]
        if last:
            fits = [s for s in fits if s + len(run) == len(real)]
        if not fits:
            return next((line for line in run if line not in real[at:]), run[0])
        at, anchored = fits[0] + len(run), True
    return None


def _until_elision(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.strip() == ELISION:
            return
        yield line
