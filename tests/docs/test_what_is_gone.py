"""No page and no help names a command, option, format or finding that the program does not have.

docs/limits.md names what left, and decisions say what was once the case.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile

from homenode import formats
from homenode.cli.command import Command
from homenode.cli.help import format_help
from homenode.cli.main import PROGRAM
from homenode.findings import catalogue
from homenode.machine.description.parse import is_made_up, list_shipped_hosts
from tests.command_line import every_command
from tests.doc_pages import ROOT, Page, all_pages, read_page
from tests.source_trees import SOURCE

PAGES = [
    page
    for page in (*all_pages(), read_page("native/README.md"))
    if page.path.parts[:3] != ("docs", "developer", "decisions") and page.path.name != "limits.md"
]
HELPS = [
    Page(ROOT / " ".join(words), format_help(command, " ".join(words)))
    for words, command in every_command()
]
EVERY = (*PAGES, *HELPS)

COMMAND = re.compile(r"(?:^|[`$|(]|sudo|-- )[ \t]*homenode((?: [\w./:@*'=<>-]+)*)", re.MULTILINE)
FORMAT = re.compile(r"homenode\.([a-z][a-z-]*)/")
ID = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`")


def calls(page: Page) -> Iterator[list[str]]:
    """The words behind `homenode` in code, up to a quotation or another program's words."""
    is_help = page in HELPS
    code = [page.text] if is_help else re.findall(r"`([^`\n]+)`", page.prose())
    code += [block.text.replace("\\\n", " ") for block in page.blocks()]
    for text in code:
        for words in COMMAND.findall(text):
            yield list(takewhile(lambda word: word != "--" and word[0] != "'", words.split()))


COMMON = {"--help", "--help-all", "--version", "--show-completion"}


def options_of(command: Command) -> set[str]:
    parameters = command.parameters
    return {n for p in parameters for n in (*p.opt.names, *getattr(p.opt, "off", ()))}


@cache
def source_text() -> str:
    """All of the package, and of the program next to it."""
    paths = (*SOURCE.rglob("*"), *(ROOT / "native").rglob("*.[ch]pp"))
    read = (path for path in paths if path.is_file() and path.suffix != ".pyc")
    return "\n".join(path.read_text(encoding="utf-8") for path in read)


def vocabulary() -> frozenset[str]:
    """Words with a hyphen that the package has anywhere."""
    return frozenset(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", source_text()))


def test_every_named_command_and_its_options_are_there() -> None:
    for page in EVERY:
        for words in calls(page):
            command, call = PROGRAM, f"{page.path}: homenode {' '.join(words)}"
            while words and re.fullmatch("[a-z][a-z-]*", words[0]):
                below = command.subcommands
                if words[0] not in below and (command.record or not below):
                    break
                assert words[0] in below, call
                command = below[words.pop(0)].load_room()
            options = {word.partition("=")[0] for word in words if word[:2] == "--"}
            assert options <= {*COMMON, *options_of(command)}, call


def test_every_option_that_a_help_names_is_there() -> None:
    known = {name for _, command in every_command() for name in options_of(command)}
    for page in HELPS:
        named = set(re.findall(r"`(--[a-z][a-z-]+)`", page.prose()))
        assert named <= known | COMMON, page.path


def test_every_named_format_is_there() -> None:
    known = formats.VERSIONS.keys() | set(FORMAT.findall(source_text()))
    for page in EVERY:
        assert set(FORMAT.findall(page.text)) <= known, page.path


OF_OTHERS = {
    "attach-device",
    "cores-per-socket",
    "numa-affinity-policy",
    "prometheus-node-exporter",
    "strict-cpu-reservation",
    "user-data",
}
"""Names of other programs' commands, packages and settings."""

MADE_UP = re.compile(r"(?:after|before)-run1|pin(?:-numa)?-x|slot-\d|nvidia-558|arrays-near-caches")
"""Names in examples."""


def test_every_named_finding_is_there() -> None:
    """And whatever else stands in backticks and looks as an id does."""
    known = vocabulary() | catalogue().keys() | OF_OTHERS
    for page in EVERY:
        named = {word for word in ID.findall(page.prose()) if not MADE_UP.fullmatch(word)}
        assert named <= known, page.path


def test_no_page_names_a_host_that_only_the_source_tree_has() -> None:
    tree_hosts = re.compile("|".join(filter(is_made_up, list_shipped_hosts())))
    for page in (*EVERY, read_page("CHANGELOG.md"), read_page("demo/run.py")):
        assert not tree_hosts.search(page.text), page.path


PATH = re.compile(r"(?<![\w./-])(?:bench|containers|demo|native|packaging|src|tests)/[\w./*-]+")
PATH_OF_OTHERS = re.compile("src/(graph|test)/|tests/qemu")
"""In NCCL, Proxmox and libvirt."""


def test_every_named_path_of_the_repository_is_there() -> None:
    for page in PAGES:
        directories = (ROOT, (ROOT / page.path).parent)
        for word in PATH.findall(page.text):
            if "NAME" not in word and not PATH_OF_OTHERS.match(word):
                assert any(any(each.glob(word.rstrip("./"))) for each in directories), word
