"""Commands that are printed to be copied are words of a shell, whatever a name in them says."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.change.apply.definition import find_obstacles
from homenode.errors import InputError
from homenode.findings import finding, same_command, with_call, with_fix
from homenode.text import command_line
from homenode.vm.domain.restore import restore, write_tuned
from homenode.vm.hypervisor.connection import DomainState
from homenode.vm.hypervisor.virsh import Virsh
from tests.source_trees import FILES, SOURCE, nodes

UUID = "3f1c6d3e-0000-4000-8000-000000000001"
HOSTILE = "a b; rm -rf ~ $(id) `id` 'q' \"d\" & | > x #.xml"
PROGRAMS = """
    homenode virsh cp mv rm cat ssh fuser chmod tar sbatch srun qemu-img systemctl setpci lspci
    echo
""".split()
_COMMAND = re.compile(rf"(?:^|[ :;(|])(?:{'|'.join(PROGRAMS)})(?: [A-Za-z0-9./:=_+-]+)* ?\Z")
"""The end of a text behind which the next word of a command follows."""

SAFE = {
    # numbers, addresses of PCI functions and UUIDs, by their types
    "entry.device",
    "i",
    "port.bdf",
    "device.bdf",
    "ports[0]",
    "worst.device.bdf",
    "link.lower.bdf",
    "link.upper.bdf",
    "plan.device",
    "others",
    "near",
    "count_text",
    "wanted_bytes",
    "bdf",
    "record.uuid",
    "state.uuid",
    "uuid",
    "far[0].irq",
    "pin.kind",
    # plain by construction: see domain_state.domain_argument
    "state.argument",
    "done.state.argument",
    "path.device.bdf",
    "near - ours or near",
    "1 << (needs.dma_entries - 1).bit_length()",
    "str(device.bdf).replace(':', '_').replace('.', '_')",
    "_CONTROL",
    "file",  # of /sys, of numbers
    # sentences, and no commands
    "__version__",
    "function.numa_node",
    "value",
    "kind",
    "command",
    "connect",
    "text",
    "subject",
    "json.dumps(said)",
}
QUOTED = ("command_line(", "shlex.quote(", "quote(", "_again(")
NOT_PRINTED = {
    "machine/snapshot/collector.py",
    "cluster/kubevirt/manifests.py",
    "measure/access/remote.py",
    "cluster/slurm/study/scripts.py",
}
"""Scripts that homenode runs; they quote for themselves, and have tests of their own."""


def _unquoted(text: ast.JoinedStr) -> Iterator[str]:
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            shown = ast.unparse(part.value)
            if _COMMAND.search(before) and not shown.startswith(QUOTED):
                yield shown
            before += "x"


def test_no_command_is_printed_with_a_word_that_is_not_quoted() -> None:
    broken = []
    for path in FILES:
        inside = str(path.relative_to(SOURCE))
        if inside in NOT_PRINTED or "/programs/" in inside:
            continue
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                broken += [
                    f"{inside}:{node.lineno}: {one}" for one in _unquoted(node) if one not in SAFE
                ]
    assert not broken, "\n".join(broken)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1)
)
def test_a_command_is_the_words_that_it_was_made_of(words: list[str]) -> None:
    line = command_line(*words)
    assert line.isprintable()
    if all(word.isprintable() for word in words):
        assert shlex.split(line) == words


@pytest.mark.parametrize(
    ("fix", "in_doctor", "in_plan"),
    [
        (
            "`homenode plan --with-nvswitches`, or not",
            "homenode plan 'a vm' --host h.txt --lspci l.txt --with-nvswitches, or not",
            "the same command with --with-nvswitches, or not",
        ),
        (
            "again: `homenode plan VM.xml`",
            "again: homenode plan 'a vm' --host h.txt --lspci l.txt",
            "again: homenode plan VM.xml",
        ),
        (
            "`homenode plan VM --gpus 2` does",
            "homenode plan 'a vm' --host h.txt --lspci l.txt --gpus 2 does",
            "the same command with --gpus 2 does",
        ),
        (
            "`homenode verify VM.xml --guest ssh:HOST`",
            "homenode verify 'a vm' --plan p.json --host h.txt --lspci l.txt --guest ssh:HOST",
            "the same command with --guest ssh:HOST",
        ),
        (
            "`homenode verify --target proxmox --guest ssh:HOST`",
            "homenode verify --plan p.json --host h.txt --lspci l.txt --target proxmox "
            "--guest ssh:HOST",
            "the same command with --target proxmox --guest ssh:HOST",
        ),
        ("`homenode show` lists", "homenode show --host h.txt --lspci l.txt lists", None),
        ("`homenode plan ORIGINAL -o FILE --force`", None, None),
        ("`homenode doctor retrain 41:00.0`", None, None),
    ],
)
def test_a_fix_keeps_what_the_user_named(
    fix: str, in_doctor: str | None, in_plan: str | None
) -> None:
    fault = with_fix(finding("unpinned", "vCPUs"), fix)
    call = [("a vm",), ("--plan", "p.json"), ("--host", "h.txt"), ("--lspci", "l.txt")]
    (named,) = with_call([fault], call)
    assert named.fix == (in_doctor or fault.fix) and named.command in str(named.fix)
    assert same_command([fault])[0].fix == (in_plan or fault.fix)


@pytest.mark.parametrize("word", [HOSTILE, "a\x1b[2J'\\", "\u202e\n\t", "-n", "\udcff", "ü€\x9b"])
def test_bash_takes_a_printed_word_for_the_name_itself(word: str) -> None:
    said = subprocess.run(
        ["bash", "-c", command_line("printf", "%s", word)], capture_output=True, check=True
    )
    assert said.stdout == word.encode("utf-8", "surrogateescape")


def _words(text: str, first: str) -> list[str]:
    """The command in a message that begins with this word, as a shell takes it apart."""
    return shlex.split(text[text.index(f"{first} ") :], comments=False)


def test_what_brings_an_original_back_is_quoted(tmp_path: Path) -> None:
    out = tmp_path / HOSTILE.replace("/", "")
    saved = write_tuned(out, b"<domain/>", b"<domain></domain>")
    with pytest.raises(InputError) as raised:
        write_tuned(out, b"<domain><another/></domain>", b"<domain></domain>")
    hint = str(raised.value.hint)
    assert _words(hint, "homenode")[:3] == ["homenode", "restore", f"{saved.output}"]
    saved.output.write_bytes(b"edited")
    with pytest.raises(InputError) as raised:
        restore(out)
    assert _words(str(raised.value.hint), "cp") == ["cp", f"{saved.original}", f"{saved.output}"]


def test_a_connection_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "qemu+ssh://host/system?command=a&b;$(id)"
    virsh = tmp_path / "virsh"
    virsh.write_text("#!/bin/sh\necho 'error: failed to get domain' >&2\nexit 1\n")
    virsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InputError) as raised:
        Virsh(uri).find_domain("vm7")
    assert _words(str(raised.value.hint), "virsh")[:3] == ["virsh", "-c", uri]


def test_what_stands_against_a_definition_is_quoted() -> None:
    uri = "qemu:///system?x=;id"
    document = b"<domain type='kvm'><name>vm7</name><memory>1</memory><vcpu>1</vcpu></domain>"
    state = DomainState("vm7", UUID, None, "shut off", True, True)
    found = find_obstacles(state, document, {HOSTILE: b"<domainsnapshot/>"}, uri)
    commands = [hint for _, _, hint in found if "virsh" in hint]
    assert len(commands) == 2
    for fix in commands:
        assert _words(fix.partition(", or tune")[0], "virsh")[:3] == ["virsh", "-c", uri]
    assert _words(commands[-1].partition(", or tune")[0], "virsh")[3:] == [
        "snapshot-delete",
        "vm7",
        HOSTILE,
    ]
