"""Fenced blocks of pages: the language of each names the reader that must take it."""

import ast
import doctest
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from homenode.cli.command import REQUIRED, find_call
from homenode.cli.main import PROGRAM
from homenode.errors import HomenodeError
from homenode.machine.description.parse import parse_description
from homenode.vm.domain.read import open_domain
from homenode.vm.domain.schema import validate
from tests.command_line import NEEDS_CLUSTER
from tests.doc_pages import ROOT, Block, Page, all_pages, read_page
from tests.stored_records import FORMATS, stored_names

_OPERATORS = "|&;()"
_CALLERS = ("homenode", "srun", "sudo")
_HELPS = {"homenode-probe": "{} --help", "virsh": "help {}", "xl": "help {}"}
"""What prints the options of a program's command, if the program is installed."""
_PROGRAMS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
_MAKEFILES = "".join((ROOT / name).read_text() for name in ("Makefile", "native/Makefile"))


def _lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def _split_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS + "<>")
    lexer.whitespace_split = True
    for is_operator, words in itertools.groupby(lexer, lambda word: word[0] in _OPERATORS):
        if not is_operator:
            kept = list(words)
            while at := next((i for i, word in enumerate(kept) if word[0] in "<>"), None):
                del kept[at : at + 2]
            yield kept


@cache
def _options_of(program: str, command: str) -> str | None:
    """What the program prints of its command; None if it is not installed."""
    path = shutil.which(program, path=_PROGRAMS)
    if path is None:
        return None
    argv = [path, *_HELPS[program].format(command).split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"
    return done.stdout


def _check_call(words: list[str]) -> None:
    """A command of homenode, also behind sudo or srun, of make, or of a program with help."""
    if words[0] in _CALLERS and "homenode" in words:
        arguments = words[words.index("homenode") + 1 :]
        for option, value in itertools.pairwise(arguments):
            if option == "--lspci":
                Path(value).touch()
        if arguments and arguments[0] not in ("--help", "--version", "--show-completion"):
            call = find_call(PROGRAM, arguments, "homenode")
            if not call.help:
                call.read_options()
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert all(re.search(rf"^{name}:", _MAKEFILES, re.MULTILINE) for name in targets), words
    elif words[0] in _HELPS and (text := _options_of(words[0], words[1])) is not None:
        lacking = [word for word in words if word.startswith("-") and word not in text]
        assert not lacking, f"{shlex.join(words)}: no option {lacking}"


def _judge_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in _lines(text):
        assert not line.startswith("$ "), f"{line!r}: a block with prompts is of console"
        for words in _split_commands(line.replace('"$(command -v homenode)"', "homenode")):
            _check_call(words)


def _judge_console(block: Block) -> None:
    """What the commands print is compared in test_docs.py."""
    assert block.text.startswith("$ "), "expected a command"
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)", block.text, re.MULTILINE):
        _judge_shell(command)


def _judge_json(block: Block) -> None:
    """One or more values; … stands for members and elements that are omitted."""
    text = re.sub(r"…\s*,|,?\s*…(?=\s*[]}])", "", block.text)
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        kind = str(value.get("format", "")).removeprefix("homenode.").partition("/")[0]
        if kind in FORMATS:
            lacking = value.keys() - {"format", "summary", *stored_names(FORMATS[kind]).values()}
            assert not lacking, f"{kind} has no field {lacking}"
        text = text[end:].lstrip()


def _judge_toml(block: Block) -> None:
    """A whole description of a host has a name."""
    if "name" in tomllib.loads(block.text):
        parse_description(block.text, "host.toml")


def _judge_xml(block: Block) -> None:
    if ElementTree.fromstring(block.text).tag == "domain":
        open_domain(block.text.encode(), "vm.xml")
        assert not validate(block.text.encode())[0]


def _judge_ini(block: Block) -> None:
    """Slurm's files; slurmd reads them in a test of its own."""
    from homenode.cluster.slurm.config import parse_config

    (name,) = block.words
    assert parse_config(block.text, name).lines


def _judge_python(block: Block) -> None:
    """A session; test_python_interface.py runs its page."""
    examples = doctest.DocTestParser().get_examples(block.text)
    assert examples, "expected >>> before each statement"
    for example in examples:
        ast.parse(example.source)


def _judge_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict | list)


def _judge_text(block: Block) -> None:
    """Output, pictures and files of no language; a synopsis is held to its command's options."""
    for line in _lines(re.sub(r"\n\s+", " ", block.text)):
        assert not line.startswith(("$ ", "make ", "virsh ", "sudo ")), f"{line!r} is not text"
        if line.startswith("homenode "):
            _check_synopsis(line)


def _check_synopsis(line: str) -> None:
    """Manual pages begin with these lines. What a command cannot do without is in no brackets."""
    command, words = PROGRAM, line.split()[1:]
    while words and words[0] in command.subcommands:
        command = command.subcommands[words.pop(0)].load_room()
    arguments = " ".join(words)
    known = {name for parameter in command.parameters for name in parameter.opt.names}
    stated = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", arguments))
    assert stated <= known, f"{line}: no option {stated - known}"
    outside = set(re.findall(r"--?[a-z][a-z-]*", re.sub(r"\[[^\]]*\]", "", arguments)))
    for parameter in command.parameters:
        names = set(parameter.opt.names)
        if parameter.default is REQUIRED and names:
            assert names & outside, f"{line}: needs {names}"


JUDGES: dict[str, Callable[[Block], None]] = {
    "console": _judge_console,
    "sh": lambda block: _judge_shell(block.text),
    "json": _judge_json,
    "toml": _judge_toml,
    "xml": _judge_xml,
    "ini": _judge_ini,
    "python": _judge_python,
    "yaml": _judge_yaml,
    "text": _judge_text,
}
"""Readers by the language of a block."""

_FAULTS = (AssertionError, HomenodeError, KeyError, SyntaxError, ValueError, yaml.YAMLError)


def _judge(page: Page) -> None:
    assert "```" not in page.prose(), f"{page.path}: a block without end"
    for block in page.blocks():
        try:
            JUDGES[block.language](block)
        except _FAULTS as error:
            raise AssertionError(f"{page.path}:{block.line}: {error!r}") from error


@pytest.mark.parametrize(
    "page", [*all_pages(), read_page("native/README.md")], ids=lambda page: str(page.path)
)
def test_every_block_is_taken_by_the_reader_of_its_language(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _judge(page)


@pytest.mark.parametrize(
    "block",
    [
        "\nhomenode show",
        "yml\na: 1",
        "yaml\na: [1",
        "yaml\na word",
        "console\nhomenode show",
        "console\n$ homenode show --hots x",
        "console\n$ homenode list hosts | grep 'x",
        "console\n$ sudo homenode shwo",
        "sh\n$ homenode show",
        "sh\nsrun homenode plan --gpu x\n",
        "sh\nif true; then",
        "sh\nmake tset",
        "sh\nhomenode-probe smt --pusses 0",
        'json\n{"a": 1 "b"}',
        'json\n{"format": "homenode.plan/1", "no-such-field": 1, …}',
        "toml\na = ",
        'toml\nname = "x"\npackagse = 2',
        "xml\n<a>",
        "xml\n<domain type='kvm'><vcpu>x</vcpu></domain>",
        "python\n>>> if",
        "python\nimport os",
        "text\n$ homenode show",
        "text\nhomenode show --hots NAME",
        "text\nhomenode capture [-o FILE]",
    ],
)
def test_a_planted_fault_is_found(block: str) -> None:
    with pytest.raises(AssertionError):
        _judge(Page(Path("page.md"), f"* item\n\n  ```{block}\n  ```\n"))


@NEEDS_CLUSTER
@pytest.mark.slurm
def test_slurmd_keeps_the_gpus_of_the_files_that_a_page_shows() -> None:
    from tests.conformance import slurmd

    if (reason := slurmd.SLURMD.missing()) is not None:
        pytest.skip(reason)
    blocks = read_page("docs/reference/commands/slurm.md").blocks()
    files = {block.words[0]: f"{block.text}\n" for block in blocks if block.language == "ini"}
    base = slurmd.device_files()
    gres = files["gres.conf"].replace("/dev/nvidia", f"{base}/gpu")
    head = slurmd.HEAD.format(host="gpu01", base=base)
    kept = slurmd.kept_gpus(head + files["slurm.conf"], gres, node="gpu01")
    assert kept is not None
    assert set(kept) == set(range(8))
