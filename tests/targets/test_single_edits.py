"""Every single edit of a number or a line that a plan owns in a target's file is named."""

import re
from collections.abc import Iterator

import pytest

from homenode.check.verify.target_file import verify_target
from homenode.errors import HomenodeError
from homenode.findings import Severity
from homenode.units import GIB, MIB
from homenode.vm.targets.registry import TARGETS
from tests.targets.examples import EXAMPLES, FILES
from tests.targets.written import edited, host_named, options, written

HOST = "small-2n8c-2gpu"
WANTED = options("pin-numa-pci", memory_bytes=2 * GIB, gpu_count=1, page_bytes=2 * MIB)


def edits(text: str, not_owned: str) -> Iterator[tuple[str, str]]:
    """(line, the text with one number of it raised, or without it)."""
    at = 0
    for line in text.splitlines(keepends=True):
        start, at = at, at + len(line)
        if not line.strip() or re.match(not_owned, line.strip()):
            continue
        for number in re.finditer(r"[0-9]+", line):
            first, last = start + number.start(), start + number.end()
            yield line, f"{text[:first]}{int(number[0]) + 1}{text[last:]}"
        yield line, text[:start] + text[at:]


@pytest.mark.parametrize("target", TARGETS)
def test_a_single_edit_of_what_a_plan_owns_is_named(target: str) -> None:
    made = written(target, HOST, WANTED)
    hook = dict(made.rendering.companions).get(".hook.sh")

    def is_named(text: str) -> bool:
        try:
            found = verify_target(
                text.encode(), "vm", target, made.plan, host=host_named(HOST), hook=hook
            )
        except HomenodeError:
            return True
        return any(finding.severity is not Severity.INFO for finding in found.findings)

    text = made.rendering.document.decode()
    assert not is_named(text)
    values, mark, functions = text.partition("# Reserve the huge pages")
    tried = list(edits(values, EXAMPLES[target].free))
    assert len(tried) > 10
    some = tried[:: max(1, len(tried) // 40)]
    assert [line for line, edit in some if not is_named(edit + mark + functions)] == []


def test_an_edit_of_a_hook_script_is_named_and_lines_of_a_user_are_not() -> None:
    made = written("proxmox", HOST, WANTED)
    hook = dict(made.rendering.companions)[".hook.sh"]

    def subjects(document: bytes, hook: bytes) -> list[str]:
        host = host_named(HOST)
        found = verify_target(document, "vm", "proxmox", made.plan, host=host, hook=hook)
        return [f.subject for f in found.findings if f.severity is not Severity.INFO]

    document = made.rendering.document
    device = str(made.plan.vm.hostdevs[0].bdf).encode()
    assert subjects(document, hook) == []
    assert subjects(document, hook.replace(device, b"0000:ff:00.0")) == ["line of the plan"]
    more = document + b"net0: virtio=BC:24:11:00:11:22,bridge=vmbr0\ntags: gpu\n"
    assert subjects(more, hook) == []


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        ("proxmox", "cpu: host\n", ""),
        ("proxmox", "cpu: host\n", "cpu: host\nkvm: 0\ncpulimit: 1\n"),
        ("xen", 'type = "hvm"\n', 'type = "hvm"\npool = "other"\n'),
        ("qemu", "\npin() ", '\nset -- "$@" -m 512\npin() '),
    ],
)
def test_a_line_that_no_plan_sets_is_named_where_it_is_not_the_users_own(
    target: str, before: str, after: str
) -> None:
    made = written(target, HOST, WANTED)
    hook = dict(made.rendering.companions).get(".hook.sh")
    text = made.rendering.document.decode()
    assert before in text
    for edit, ids in ((text, set()), (text.replace(before, after, 1), {"plan-setting"})):
        found = verify_target(
            edit.encode(), "vm", target, made.plan, host=host_named(HOST), hook=hook
        )
        assert {f.id for f in found.findings if f.severity is not Severity.INFO} == ids


def test_a_change_in_a_users_file_is_named() -> None:
    wanted = options("pin-numa", vcpus=None, memory_bytes=None)
    made = edited(FILES["proxmox"], "hgx-h100", wanted)
    hook = dict(made.rendering.companions).get(".hook.sh")
    text, host = made.rendering.document.decode(), host_named("hgx-h100")
    changed = text.replace("args: ", "args: -no-hpet ", 1)
    assert changed != text
    for one, ids in ((text, set()), (changed, {"plan-setting"})):
        found = verify_target(one.encode(), "vm", "proxmox", made.plan, host=host, hook=hook)
        assert {f.id for f in found.findings if f.severity is not Severity.INFO} == ids
