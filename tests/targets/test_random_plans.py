"""Files of every target: what is planned is read, edits are named, damage is refused."""

import os
import re
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode.check.verify.verification import verify_target
from homenode.errors import HomenodeError, InputError
from homenode.findings import Severity
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.plan.pipeline import make_vm, plan_for_target
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Unplannable
from homenode.vm.targets.registry import TARGETS, find_target, read_vm
from homenode.vm.targets.target import (
    Feature,
    SupportLevel,
    check_target,
    list_features,
    lost_features,
)
from tests.conformance.vms import planned_cases
from tests.seeds import part
from tests.targets.examples import EXAMPLES, FILES
from tests.targets.test_edited_files import plain
from tests.targets.written import again, edited, host_named, options, rendered, written

CASES = 12


@pytest.mark.parametrize("target", TARGETS)
def test_a_written_file_is_read_as_it_was_planned(target: str) -> None:
    suffix = find_target(target).hook_suffix
    files = (FILES[target],) if target in FILES else ()
    compared = 0
    for case in planned_cases([f"read-{n}" for n in range(CASES)], target, files):
        rendering = case.target_plan.rendering
        hook = dict(rendering.companions).get(suffix or "")
        found = verify_target(
            rendering.document, "vm", target, case.plan, host=case.host, hook=hook
        ).findings
        bad = [one for one in found if one.severity is not Severity.INFO]
        assert bad == [], (case.case, case.about, found)
        compared += 1
    assert compared >= CASES // 4


COUNT = int(os.environ.get("HOMENODE_FUZZ", "15"))
PIECES = (
    b"",
    b"\n",
    b"0",
    b"-1",
    b"99999999999999999999",
    b"[",
    b"]",
    b"{",
    b'"',
    b"'",
    b"\\",
    b"=",
    b":",
    b",",
    b"\x00",
    b"\xff",
    b"#",
    b"$(id)",
    b"\r",
    b"  ",
    b"0-3",
    b"%s",
    b"null",
    b"^1",
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    content = FILES[draw(st.sampled_from(sorted(FILES)))]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 12))
        content = content[:at] + draw(st.sampled_from(PIECES)) + content[at + length :]
    return content


@settings(max_examples=COUNT)
@given(damaged())
def test_a_damaged_file_is_read_or_refused_and_planned_twice_is_once(content: bytes) -> None:
    wanted = plain("pin-numa")
    try:
        assert read_vm(content, "vm").guest.vcpus > 0
        once = edited(content, "hgx-h100", wanted).rendering.document
    except (HomenodeError, Unplannable):
        return
    assert edited(once, "hgx-h100", wanted).rendering.document == once


@pytest.mark.parametrize("target", FILES)
def test_a_file_that_is_cut_anywhere_is_read_or_refused(target: str) -> None:
    content = FILES[target]
    for end in range(0, len(content), 17):
        try:
            read_vm(content[:end], "vm")
        except HomenodeError:
            continue


LARGE = ("x86-2p8n128c256t-64gpu",)
"""Hosts that are planned with one layout here, and with every one in the lab."""

TWICE = ("x86-2p2n16c32t-isolated-pus", "small-2n8c-2gpu", "gh200x4")
"""Hosts on which the file that came of a plan is planned again."""


@pytest.mark.parametrize("name", dict.fromkeys((*TWICE, *LARGE, *part(list_shipped_hosts(), 0))))
def test_a_plan_becomes_a_file_that_says_it_or_a_refusal(name: str) -> None:
    become_files(name, ("pin-numa-pci",) if name in LARGE else tuple(PRESETS))


@pytest.mark.lab
@pytest.mark.parametrize("name", LARGE)
def test_every_layout_of_a_large_host_becomes_a_file_or_a_refusal(name: str) -> None:
    become_files(name, tuple(PRESETS))


def become_files(name: str, layouts: tuple[str, ...]) -> None:
    host = host_named(name)
    gpus = min(len(host.devices_of_kind(DeviceKind.GPU)), 2) or None
    for layout, target in product(layouts, TARGETS):
        wanted = options(layout, gpu_count=gpus)
        try:
            planned = rendered(target, name, wanted)
        except InputError as refusal:
            reasons = EXAMPLES[target].refused_for
            assert any(reason in refusal.message for reason in reasons), refusal.message
            continue
        content = planned.rendering.document
        assert read_vm(content, "vm").kind == target
        hook = dict(planned.rendering.companions).get(".hook.sh")
        found = verify_target(content, "vm", target, planned.plan, host=host, hook=hook).findings
        assert [f for f in found if f.severity is not Severity.INFO] == [], (layout, found)
        if name in TWICE:
            once = again(content, name, wanted)
            assert once.rendering.document == content, (target, layout)


def test_more_vcpus_than_the_machine_type_takes_are_refused_or_said() -> None:
    name = "epyc9654-2p-1node"
    many = options("pin-numa-smt", vcpus=300)
    assert "vcpu-limit-unknown" in {found.id for found in written("qemu", name, many).findings}
    host = host_named(name)
    old = replace(host, settings=replace(host.settings, qemu_version=(7, 2, 0)))
    with pytest.raises(InputError, match="at most 288 vCPUs"):
        plan_for_target(make_vm(many, "x86_64"), many, old, "qemu")


def test_every_target_says_of_every_feature_how_far_it_goes() -> None:
    for name in TARGETS:
        support = find_target(name).support
        assert set(support) == set(Feature)
        for feature, one in support.items():
            assert (one.loses is None) == (one.level is SupportLevel.NATIVE), (name, feature)


@pytest.mark.parametrize("target", TARGETS)
def test_each_loss_of_a_plan_is_a_finding_and_nothing_else_is(target: str) -> None:
    made = written("qemu", "x86-2p2n16c32t-isolated-pus", options("pin-numa-smt")).plan
    module = find_target(target)
    found = check_target(module, made)
    asked = list_features(made)
    assert sum(f.id == "target-lost" for f in found) == len(lost_features(module, made))
    assert len(found) == sum(module.support[f].level is not SupportLevel.NATIVE for f in asked)


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
