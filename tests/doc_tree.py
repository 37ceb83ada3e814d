"""The pages of docs/ with what is made from the source: findings, records, tables of options.

`python -m tests.doc_tree DIRECTORY` writes them; `make docs` and `make deb` build from there.
"""

import re
import shutil
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from homenode.cli.command import Command, Parameter
from homenode.cli.help import format_option
from homenode.cli.main import PROGRAM
from homenode.findings import page
from homenode.option import Arg, Flag
from tests.command_line import has_cluster

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| \[([^]]+)\]\(([a-z]+)\.md\) \| (.+) \|$", re.MULTILINE)
_OPTIONS = re.compile(r"^Options: `homenode ([a-z -]+) --help-all`$", re.MULTILINE)
_NAME = re.compile(r"(--[a-z][a-z-]*)")


@cache
def made_pages() -> dict[str, str]:
    """Texts by their paths in the checkout."""
    from tests.record_page import page as record_page  # which reads pages

    index = (ROOT / "docs/reference/findings/README.md").read_text(encoding="utf-8")
    findings = {
        f"docs/reference/findings/{name}.md": _findings(f"# {title}\n\n{about}.\n", name)
        for title, name, about in _ROW.findall(index)
    }
    commands = {
        str(path.relative_to(ROOT)): _OPTIONS.sub(_filled, path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "docs/reference/commands").glob("*.md"))
    }
    return {**findings, **commands, "docs/reference/records.md": record_page()}


def _findings(head: str, name: str) -> str:
    """A page of findings: those that mean the same have one section."""
    sections = [head]
    for first, texts in page(name).items():
        if first not in texts.also:
            sections.append(texts.format_markdown(f"## {', '.join((first, *texts.also))}"))
    return "\n".join(sections)


def _filled(line: re.Match[str]) -> str:
    command: Command = PROGRAM
    for word in line[1].split():
        command = command.subcommands[word]
        if command.room and not has_cluster():
            return line.group()
        command = command.load_room()
    return "\n\n".join(_tables(command))


def _tables(command: Command) -> Iterator[str]:
    """A table for each panel of a command's options."""
    panels: dict[str, list[Parameter]] = {}
    names = {name for each in command.parameters for name in each.opt.names}
    for each in command.parameters:
        panels.setdefault(each.opt.panel, []).append(each)
    for panel, parameters in panels.items():
        rows = (f"| {_typed(each)} | {_meaning(each, names)} |" for each in parameters)
        title = f"{panel}:\n\n" if panel != "Options" else ""
        yield title + "\n".join(("| option | meaning |", "|---|---|", *rows))


def _typed(each: Parameter) -> str:
    names = ", ".join(sorted(each.opt.names, key=len))
    if isinstance(each.opt, Flag):
        return ", ".join((f"`{names}`", *(f"`{name}`" for name in each.opt.off)))
    metavar = each.opt.metavar if isinstance(each.opt, Arg) else f"{names} {each.opt.metavar}"
    return f"`{metavar}`".replace("|", "\\|")


def _meaning(each: Parameter, names: Collection[str]) -> str:
    """What an option does, with the names of the command's options as code."""
    words = (f"`{word}`" if word in names else word for word in _NAME.split(format_option(each)))
    text = "".join(words).replace("|", "\\|")
    choices = ", ".join(f"`{choice}`" for choice in each.choices)
    return f"{text} ({choices})" if choices else text


def main() -> int:
    directory = Path(sys.argv[1])
    shutil.rmtree(directory / "docs", ignore_errors=True)
    shutil.copytree(ROOT / "docs", directory / "docs")
    for path, text in made_pages().items():
        (directory / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
