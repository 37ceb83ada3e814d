"""Hostile documents: each is read, rewritten, or refused in words."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.check.verify.boot.stand_in import build_test_guest, choose_cpu
from homenode.check.verify.expectation import build_expectation, remove_vcpus
from homenode.errors import HostError, InputError
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.document import MAX_ALIKE, MAX_DEVICES, MAX_ELEMENTS, parse_document
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    insert_after,
    insert_before,
    remove,
    set_attribute,
    set_text,
)
from homenode.vm.domain.read import build_vm, open_domain, read_running_domain, read_vm
from homenode.vm.layout import PRESETS
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_shipped_host
from homenode.vm.targets.libvirt import rewrite
from tests.command_line import homenode
from tests.domain_corpus import NAMES, sample
from tests.domain_plans import hand_plan
from tests.verify_documents import findings_of, small_host

ODD_VALUES = st.sampled_from(
    [
        "",
        "-1",
        "0",
        "1",
        "3",
        "0-3",
        "^1",
        "4294967296",
        "0x",
        "08",
        "none",
        "0-99999999",
        "a,b",
        "\t",
        "&lt;",
        "9" * 15,
        "9" * 30,
        "KiB",
        "on",
        "pcie-expander-bus",
        "maximum",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A sample with up to three elements removed, doubled, or given an odd value."""
    xml = sample(draw(st.sampled_from(NAMES)))
    for _ in range(draw(st.integers(1, 3))):
        document = parse_document(xml, "sample")
        elements = list(document.root.walk())
        element = draw(st.sampled_from(elements[1:]))
        kind = draw(st.sampled_from(["remove", "double", "attribute", "text", "child"]))
        if kind == "remove":
            edits = remove(document, element)
        elif kind == "double":
            again = document.text[element.start : element.end]
            edits = [Edit(element.end, element.end, again)]
        elif kind == "attribute" and element.attributes:
            name, _ = draw(st.sampled_from(element.attributes))
            if name.startswith("{"):
                continue
            edits = set_attribute(document, element, name, draw(ODD_VALUES))
        elif kind == "text" and not element.children:
            edits = set_text(document, element, draw(ODD_VALUES))
        else:
            name = draw(st.sampled_from(["cell", "address", "node", "page", "vcpupin", "memory"]))
            edits = append(document, element, [NewElement(name)])
        xml = apply(document, edits).to_bytes()
    return xml


NAMED = re.compile(r"(mutated|domain)(:\d+)?: \S.{9}")
"""An error names the document, its line where it has one, and then the fact."""


@settings(max_examples=100, deadline=None)
@given(mutated(), st.sampled_from(sorted(PRESETS)))
def test_a_mutated_document_is_rewritten_or_refused(xml: bytes, layout: str) -> None:
    try:
        plan = hand_plan(read_vm(xml, "mutated"), layout)
        once = rewrite(xml, plan, "mutated")
    except InputError as error:
        assert NAMED.match(str(error)), error
        return
    assert rewrite(once, plan, "mutated") == once


@settings(max_examples=60, deadline=None)
@given(mutated())
def test_a_mutated_document_is_verified_or_refused(xml: bytes) -> None:
    """Against a host, as a guest's expectation and as a stand-in; numbers of any size cost
    nothing."""
    try:
        document = open_domain(xml, "mutated")
        facts = build_vm(document)
        findings_of(xml, host=small_host())
        remove_vcpus(build_expectation(facts), facts.offline_vcpus)
        str((facts.pinned_pus, facts.memory_pieces))
        build_test_guest(document, facts, choose_cpu(document, facts, kvm=False), "q35")
    except (InputError, HostError) as error:
        assert NAMED.match(str(error)), error


@settings(max_examples=60, deadline=None)
@given(mutated())
def test_a_mutated_document_of_a_running_domain_is_read_or_refused(xml: bytes) -> None:
    try:
        read_running_domain(xml, running=True)
    except InputError as error:
        assert NAMED.match(str(error)), error


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_a_document_cut_or_flipped_anywhere_is_read_or_refused(
    name: str, data: st.DataObject
) -> None:
    xml = sample(name)
    at = data.draw(st.integers(0, len(xml) - 1))
    byte = data.draw(st.binary(max_size=3))
    broken = xml[:at] if not byte else xml[:at] + byte + xml[at + len(byte) :]
    try:
        guest = read_vm(broken, "broken")
        rewrite(broken, hand_plan(guest, "pin-numa"), "broken")
    except InputError as error:
        assert str(error)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_what_is_inserted_can_be_removed_without_a_trace(name: str, data: st.DataObject) -> None:
    document = parse_document(sample(name), name)
    sibling = data.draw(st.sampled_from(list(document.root.walk())[1:]))
    new = [NewElement("added", {"a": "<&'\""}, (NewElement("inner", text="é & x"),))]
    insert = data.draw(st.sampled_from([insert_after, insert_before]))
    after = apply(document, insert(document, sibling, new))
    added = next(e for e in after.root.walk() if e.name == "added")
    assert added.get("a") == "<&'\""
    assert added.children[0].text == "é & x"
    without = after.text[: added.start] + after.text[added.end :]
    assert b"".join(without.split()) == b"".join(document.text.split())


DOCUMENT = (Path(__file__).parents[2] / "demo" / "gpu-vm.xml").read_text()


def within(*around: str) -> Callable[[str], str]:
    """A document with a text in new elements, one in the other, behind <vcpu>."""

    def document(text: str) -> str:
        for name in reversed(around):
            text = f"<{name}>{text}</{name}>"
        return DOCUMENT.replace("</vcpu>", f"</vcpu>{text}", 1)

    return document


def in_devices(text: str) -> str:
    return DOCUMENT.replace("</devices>", f"{text}</devices>", 1)


PCI = "<source><address domain='0' bus='{0}' slot='0' function='0'/></source>"
ELEMENTS = {
    "vcpupin": (within("cputune"), "<vcpupin vcpu='{0}' cpuset='0'/>", MAX_ALIKE),
    "iothreadpin": (within("cputune"), "<iothreadpin iothread='{0}' cpuset='0'/>", MAX_ALIKE),
    "vcpusched": (within("cputune"), "<vcpusched vcpus='{0}' scheduler='fifo'/>", MAX_ALIKE),
    "cachetune": (within("cputune"), "<cachetune vcpus='{0}'/>", MAX_ALIKE),
    "memnode": (within("numatune"), "<memnode cellid='{0}' mode='strict'/>", MAX_ALIKE),
    "cell": (within("cpu", "numa"), "<cell id='{0}' cpus='{0}' memory='1'/>", 128),
    "vcpu": (within("vcpus"), "<vcpu id='{0}' enabled='yes'/>", MAX_ALIKE),
    "iothread": (within("iothreadids"), "<iothread id='{0}'/>", MAX_ALIKE),
    "page": (within("memoryBacking", "hugepages"), "<page size='{0}'/>", MAX_ALIKE),
    "feature": (within("features"), "<feature name='{0}'/>", MAX_ALIKE),
    "of a foreign name": (within("metadata"), "<a:b xmlns:a='u'/>", MAX_ALIKE),
    "sibling": (within("cpu", "numa"), "<sibling id='{0}' value='10'/>", 16_384),
    "hostdev": (in_devices, f"<hostdev mode='subsystem' type='pci'>{PCI}</hostdev>", MAX_DEVICES),
    "controller": (in_devices, "<controller type='pci' index='{0}'/>", MAX_DEVICES),
    "disk": (in_devices, "<disk type='file'><target dev='vd{0}'/></disk>", MAX_DEVICES),
    "memory": (in_devices, "<memory model='dimm'/>", MAX_DEVICES),
    "of any name": (within(), "<n{0}/>", MAX_ELEMENTS),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_more_than_a_machine_has_is_refused_by_its_number(name: str) -> None:
    document, element, most = ELEMENTS[name]
    text = document("".join(element.format(number) for number in range(most + 1)))
    with pytest.raises(InputError, match=rf"expected at most .*{most}\b.* found more") as refused:
        parse_document(text.encode(), "vm.xml")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("command", ["plan", "verify", "doctor"])
def test_100_000_pins_are_one_message(tmp_path: Path, command: str) -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(100_000))
    path = tmp_path / "vm.xml"
    path.write_text(within("cputune")(pins))
    done = homenode(command, path, "--host", "hgx-h100", whole=True)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2
    assert "expected at most 4096 elements <vcpupin>" in done.stderr


@pytest.mark.parametrize("attribute", ["a{0}='1'", "xmlns:a{0}='u{0}'"])
def test_attributes_by_the_thousand_are_refused_before_virsh_compares_them(attribute: str) -> None:
    text = within()("<x " + " ".join(map(attribute.format, range(1000))) + "/>")
    with pytest.raises(InputError, match="expected at most 256 attributes of an element"):
        parse_document(text.encode(), "vm.xml")


def test_a_guest_of_4096_vcpus_with_a_pin_for_each_is_read() -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(4096))
    vcpus = "".join(f"<vcpu id='{number}' enabled='yes'/>" for number in range(4095))
    text = within("cputune")(pins).replace("<cputune>", f"<vcpus>{vcpus}</vcpus><cputune>", 1)
    assert open_domain(text.encode(), "vm.xml").root.child("vcpus") is not None


def test_a_thousand_broken_references_are_a_few_lines() -> None:
    pins = "".join(f"<vcpupin vcpu='{number}' cpuset='0'/>" for number in range(1000))
    document = within("cputune")(pins).encode()
    notes = plan_file(
        document, "vm.xml", PlanOptions(layout="pin"), load_shipped_host("hgx-h100")
    ).notes
    assert len([one for one in notes if "pin-unknown-vcpu" in one]) == 9
    assert any("904 more of this kind (pin-unknown-vcpu)" in one for one in notes)
