"""Hostile documents: whatever is done to a sample, it is read, rewritten, or refused in words."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.check.verify.boot.stand_in import choose_cpu, stand_in_of
from homenode.check.verify.guest.expectation import expectation_of, without_vcpus
from homenode.errors import HostError, InputError
from homenode.vm.domain.document import parse_document
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
from homenode.vm.domain.read import open_domain, read_running_domain, read_vm, vm_of
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.layout import PRESETS
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
        facts = vm_of(document)
        findings_of(xml, host=small_host())
        without_vcpus(expectation_of(facts), facts.offline_vcpus)
        str((facts.pinned_pus, facts.memory_pieces))
        stand_in_of(document, facts, choose_cpu(document, facts, kvm=False), "q35")
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
