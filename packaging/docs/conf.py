"""Sphinx configuration of the pages in build/docs: a searchable site, and manual pages.

Run by `make docs` and `make deb`. The pages stay plain Markdown, as a repository's viewer shows
them; what Sphinx needs beyond that (the tables of contents, links out of docs/) is added here.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.writers.manpage import ManualPageTranslator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "build/docs"
COMMANDS = DOCS / "reference/commands"

project = "homenode"
author = "the homenode authors"
copyright = "the homenode authors, Apache-2.0"  # noqa: A001
_INIT = (ROOT / "src/homenode/__init__.py").read_text(encoding="utf-8")
version = release = re.findall(r'__version__ = "([^"]+)"', _INIT)[0]

extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"homenode {release}"
html_show_sphinx = False
highlight_language = "text"
# ```console blocks hold tables and arrows that no lexer of a shell knows.
suppress_warnings = ["misc.highlighting_failure"]
MANUAL = tags.has("manual")  # type: ignore[name-defined]  # noqa: F821
if MANUAL:
    suppress_warnings.append("toc.not_included")


def _summary(page: Path) -> str:
    """The first sentence below a page's title, without links and code marks."""
    paragraph = page.read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", paragraph)
    return plain.split(". ")[0].split(": ")[0].rstrip(".:")


man_pages = [("index", "homenode", "place, check and measure virtual machines", author, 1)] + [
    (f"reference/commands/{page.stem}", f"homenode-{page.stem}", _summary(page), author, 1)
    for page in sorted(COMMANDS.glob("*.md"))
]

CONTENTS = (
    ("Start", ("install", "tutorial", "concepts/*", "troubleshooting", "limits")),
    (
        "How to",
        (
            "howto/place-a-gpu-vm",
            "howto/apply-and-undo",
            "howto/check-a-running-vm",
            "howto/run-a-trial",
            "howto/host-health",
            "howto/*",
        ),
    ),
    ("Commands", ("reference/commands/*",)),
    ("Findings", ("reference/findings/README", "reference/findings/*")),
    ("Formats", ("reference/formats/*",)),
    ("Reference", ("reference/*",)),
    ("For developers", ("developer/*", "developer/formats/*", "developer/decisions/*")),
)


def _without_dead_links(name: str, text: str) -> str:
    """The page with links that lead nowhere as their words alone: those to what is no page
    (native/README.md, a directory), and in a manual page all."""
    directory = (DOCS / name).parent

    def shown(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = (directory / target).resolve()
        inside = path.is_file() and path.is_relative_to(DOCS)
        lives = ":" in target or (inside and not MANUAL)
        return link.group() if lives else words

    return re.sub(r"\[([^\[\]]*)\]\(([^()#\s]+)(?:#[^()\s]*)?\)", shown, text)


def _as_manual(name: str, text: str) -> str:
    """The page in the order of manual pages: synopsis, description, the rest; without pictures."""
    words = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n", "", text, flags=re.MULTILINE)
    title, _, body = words.partition("\n\n")
    calls = "homenode COMMAND [OPTIONS]\n"
    if name.startswith("reference/commands/"):
        blocks = re.findall(r"^```text\n(homenode [^`]*)^```\n", body, re.MULTILINE)
        calls = "".join(blocks)
        body = body.replace(f"```text\n{blocks[0]}```\n", "", 1)
    return f"{title}\n\n## Synopsis\n\n```text\n{calls}```\n\n## Description\n\n{body}"


def _prepare(app: Any, name: str, source: list[str]) -> None:
    """Adds the tables of contents for the side bar, hidden in the page itself."""
    if MANUAL and (name == root_doc or name.startswith("reference/commands/")):
        source[0] = _as_manual(name, source[0])
    source[0] = _without_dead_links(name, source[0])
    if name != root_doc or MANUAL:
        return
    for caption, entries in CONTENTS:
        named = [one for one in entries if "*" not in one and (DOCS / f"{one}.md").exists()]
        globbed = sorted(
            str(path.relative_to(DOCS).with_suffix(""))
            for one in entries
            if "*" in one
            for path in DOCS.glob(f"{one}.md")
        )
        lines = "\n".join(dict.fromkeys([*named, *globbed]))
        source[0] += (
            f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:maxdepth: 1\n:caption: {caption}\n\n"
            f"{lines}\n```\n"
        )


class _ManualPage(ManualPageTranslator):  # type: ignore[misc]
    """Lines are not filled with spaces, and the last column of a table takes all of the line."""

    def header(self) -> str:
        return f".ds AD l\n{super().header()}.ad l\n"  # groff before 1.23 has no AD

    def astext(self) -> str:
        return re.sub(r"^((?:l\|)*)l\.$", r"\1lx.", super().astext(), flags=re.MULTILINE)


def setup(app: Any) -> None:
    app.set_translator("man", _ManualPage)
    app.connect("source-read", _prepare)
