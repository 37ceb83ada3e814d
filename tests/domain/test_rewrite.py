"""Rewriting: a layout's elements change, and every other byte of the document stays."""

import re
from itertools import product

import pytest
from msgspec import structs

from homenode.errors import InputError
from homenode.units import GIB, MIB
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import Document, Element, parse_document
from homenode.vm.domain.edits import NewElement, append, apply, remove_all
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS, GuestPcie
from homenode.vm.model import GuestCache, GuestTopology
from homenode.vm.plan import Plan, with_vm
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import NAMES, sample
from tests.domain_plans import hand_plan
from tests.seeds import part

PAIRS = [
    (name, layout)
    for name in NAMES
    for layout in PRESETS
    if not (name == "i440fx" and PRESETS[layout].pcie is GuestPcie.HOST)
]
TOKEN = re.compile(rb"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<[^>]*>|[^<]+", re.DOTALL)
OWNED = {
    *"""
    vcpu vcpus numatune memory currentMemory maxMemory topology numa hugepages vcpupin emulatorpin
    iothreadpin vcpusched cachetune memorytune address metadata node
""".split()
}
OPENED = {"cpu", "cputune", "memoryBacking", "devices"}  # may gain children, or close up


def planned(name: str, layout: str, **wishes: object) -> tuple[bytes, Plan]:
    xml = sample(name)
    return xml, hand_plan(read_vm(xml, name), layout, **wishes)  # type: ignore[arg-type]


def tuned(name: str, layout: str, **wishes: object) -> Document:
    xml, plan = planned(name, layout, **wishes)
    return parse_document(rewrite(xml, plan, name), name)


def values_of(element: Element) -> list[str]:
    """Every element below with its attributes and text, in any order."""
    each = (f"{e.name} {sorted(e.attributes)} {e.text.strip()}" for e in element.walk())
    return sorted(each)


def kept_tokens(document: Document) -> list[bytes]:
    """What no layout owns, in order: tags, texts and comments outside of OWNED."""
    owned = [
        (e.start, e.end)
        for e in document.root.walk()
        if e.name in OWNED or (e.name == "feature" and e.get("name") == "topoext")
    ]
    containers = [e for e in document.root.walk() if e.name in OPENED]
    owned += [(e.start, e.tag_end) for e in containers]
    owned += [(e.content_end, e.end) for e in containers]
    tokens = []
    for match in TOKEN.finditer(document.text):
        token = match[0].strip()
        # A comment inside an element that a layout replaces as a whole goes with it.
        if token and not any(start <= match.start() < end for start, end in owned):
            tokens.append(token)
    return tokens


@pytest.mark.parametrize(("name", "layout"), part(PAIRS, 1))
def test_a_tuned_document_is_valid_keeps_its_order_and_is_tuned_once(
    name: str, layout: str
) -> None:
    xml, plan = planned(name, layout)
    after = rewrite(xml, plan, name)
    document = parse_document(after, name)
    remaining = iter(token.strip() for token in TOKEN.findall(document.text))
    for token in kept_tokens(parse_document(xml, name)):
        assert token in remaining, f"{token!r} is gone or has moved"
    errors, gap = validate(after)
    assert errors == () or gap is not None, errors
    assert check_references(document) == ()
    assert rewrite(after, plan, name) == after


@pytest.mark.parametrize(("first", "second"), part(list(product(PRESETS, repeat=2)), 2))
def test_one_layout_after_another_leaves_no_pin_or_cell_of_the_first(
    first: str, second: str
) -> None:
    xml, plan = planned("pins-with-comments", first)
    once = rewrite(xml, plan)
    guest = read_vm(once, "once")
    after = parse_document(
        rewrite(once, hand_plan(read_vm(xml, "first"), second, vcpus=guest.vcpus)), "twice"
    )
    assert check_references(after) == ()
    again = read_vm(after.to_bytes(), "twice")
    mirrored = second not in ("default", "pin", "pin-bound")
    assert len(again.cell_vcpus) == (2 if mirrored else 0)
    cputune = after.root.child("cputune")
    assert cputune is not None
    pins = cputune.all("vcpupin")
    assert len(pins) == (0 if second == "default" else guest.vcpus)
    binds = after.root.child("numatune") is not None
    assert binds == (PRESETS[second].memory != "keep"), "ours goes, whoever planned it"


def test_a_clean_document_with_the_default_layout_is_untouched() -> None:
    for name in ("study", "one-line", "crlf", "aarch64-virt", "i440fx", "no-cpu-no-arch"):
        xml, plan = planned(name, "default")
        assert rewrite(xml, plan, name) == xml


def test_a_numatune_that_holds_more_than_ours_or_nothing_of_ours_stays() -> None:
    empty = sample("study").replace(b"  <os", b"  <numatune/>\n  <os", 1)
    assert b"<numatune/>" in rewrite(empty, hand_plan(read_vm(empty, "x"), "pin"))
    own = empty.replace(b"<numatune/>", b"<numatune><memory nodeset='0-1'/></numatune>")
    bound = rewrite(own, hand_plan(read_vm(own, "x"), "pin-bound"))
    assert b"<memory nodeset='0-1'/>" in bound  # strict, as without a mode
    xml, plan = planned("study", "pin-numa")
    assert b"numatune" not in rewrite(rewrite(xml, plan), hand_plan(read_vm(xml, "x"), "pin"))
    noted = rewrite(xml, plan).replace(b"</numatune>", b"<!-- mine --></numatune>")
    without = rewrite(noted, hand_plan(read_vm(noted, "x"), "pin"))
    assert b"<!-- mine --></numatune>" in without and b"<memnode" not in without


@pytest.mark.parametrize("indent", ["      ", "\t"])
def test_a_level_of_indentation_is_that_of_the_lines_that_nest(indent: str) -> None:
    """Of a child that is indented otherwise than its parent, or no further, none can be told."""
    xml = (
        "<domain type='kvm'>\n\t<name>d</name>\n\t<memory unit='GiB'>8</memory>\n\t<vcpu>4</vcpu>"
        "\n\t<os><type arch='x86_64' machine='q35'>hvm</type></os>\n\t<features><acpi/></features>"
        f"\n\t<cpu mode='host-passthrough'>\n{indent}<topology sockets='1' cores='4' threads='1'/>"
        "\n\t</cpu>\n</domain>\n"
    ).encode()
    after = rewrite(xml, hand_plan(read_vm(xml, "x"), "pin-numa")).decode()
    assert f"\n{indent}<numa>\n{indent}\t<cell " in after


MEMORY = "<memory mode='preferred' nodeset='1'/>"
DIMMS = "dimms-and-shared-memory"
CASES: list[tuple[str, str, dict[str, object], tuple[str, ...], tuple[str, ...]]] = [
    ("one-line", "pin-numa-pci", {}, ("</vcpu><cputune><emulatorpin cpuset='28,29'/>",), ("\n",)),
    (
        "pins-with-comments",  # elements of <cputune> that are not pins stay
        "pin-numa",
        {},
        (
            "<shares>2048</shares>\n    <emulatorpin ",
            "<emulatorsched ",
            "<vcpusched vcpus='0-7'",
            "<cachetune vcpus='0-3'>",
            "<memorytune vcpus='4-7'>",
        ),
        (),
    ),
    ("pins-with-comments", "pin", {"vcpus": 2}, ("<monitor level='3' vcpus='0,1'/>",), ()),
    ("pins-with-comments", "pin", {"vcpus": 4}, ("<vcpusched vcpus='0-3' s",), ("memorytune",)),
    ("pins-with-comments", "pin", {}, ("<iothreadpin iothread='2'", "iothread='7'"), ()),
    ("gpu-with-audio-and-nics", "pin", {}, (MEMORY,), ("<topology",)),
    ("gpu-with-audio-and-nics", "default", {}, (MEMORY, "<topology"), ()),
    ("study", "pin-numa", {}, ("<topology sockets='2' cores='28' threads='1'/>",), ()),
    ("study", "pin-numa", {}, ("memory='786432' unit='MiB'",), ()),
    (
        "study",
        "pin-numa",
        {"memory_bytes": (8 << 30) + 2048},
        (
            "memory='4194305' unit='KiB'",
            "<memory unit='KiB'>8388610</memory>",
            "<currentMemory unit='KiB'>8388610</currentMemory>",
        ),
        (),
    ),
    ("empty-cputune", "pin", {}, ("<memory mode='strict' placement='auto'/>",), ()),
    ("empty-cputune", "pin-bound", {}, ("<memory mode='strict' nodeset='0,1'/>",), ("auto",)),
    ("earlier-layout", "pin", {}, ("<numatune>", "<target busNr='200'>"), ("memnode", "<node>")),
    ("earlier-layout", "pin-numa", {"distances": False}, (), ("<distances>",)),
    ("hmat-and-cpuless-cell", "pin-numa", {}, (), ("interconnects", "associativity")),
    ("study", "pin-numa", {"page_bytes": GIB}, ("<page size='1' unit='GiB' nodeset='0,1'/>",), ()),
    ("study", "pin", {"page_bytes": 2 * MIB}, ("<page size='2' unit='MiB'/>",), ()),
    ("study", "pin", {"page_bytes": 0}, ("<hugepages/>",), ()),
    (
        DIMMS,
        "pin-numa",
        {"page_bytes": GIB},
        ("<page size='1' unit='GiB' nodeset='0,1'/>", "<source type='memfd'/>"),
        (),
    ),
    (
        DIMMS,
        "pin-numa",
        {"page_bytes": 2 * MIB},
        ("<page size='2048' unit='KiB' nodeset='0-1'/>",),
        (),
    ),
    (
        "qemu-commandline",
        "pin-numa",
        {},
        (
            '<lab:owner xmlns:lab="http://example.org/lab">team "a" &amp; b</lab:owner>',
            '<homenode:layout xmlns:homenode="urn:homenode:layout:1" name="pin-numa"',
        ),
        ("multiplied",),
    ),
    ("tabs-double-quotes", "pin", {}, ('current="2"',), ()),
    ("study", "pin-numa", {"topoext": True}, ("<feature policy='require' name='topoext'/>",), ()),
    (
        "tabs-double-quotes",  # where it was disabled
        "pin-numa",
        {"topoext": True},
        ('<feature policy="require" name="topoext" />',),
        (),
    ),
    (
        DIMMS,  # a flat guest keeps one cell for its memory devices
        "pin",
        {},
        (
            "<cell id='0' cpus='0-7' memory='8192' memAccess='shared' unit='MiB'",
            "<node>0</node>",
            "<page size='2048' unit='KiB' nodeset='0'/>",
        ),
        ("<cell id='1'",),
    ),
    (
        DIMMS,  # counted into <memory>, but not into cells
        "pin-numa",
        {"memory_bytes": 80 * GIB},
        ("<memory unit='GiB'>82</memory>", "<maxMemory slots='16' unit='GiB'>82</maxMemory>"),
        (),
    ),
    (DIMMS, "pin", {"memory_bytes": 4 * GIB}, ("<maxMemory slots='16' unit='GiB'>64<",), ()),
    ("earlier-layout", "pin", {}, ("<topology sockets='4' dies='1' cores='2' threads='1'/>",), ()),
]


@pytest.mark.parametrize(("name", "layout", "wishes", "present", "absent"), CASES)
def test_a_layout_writes_its_own_elements_alone(
    name: str,
    layout: str,
    wishes: dict[str, object],
    present: tuple[str, ...],
    absent: tuple[str, ...],
) -> None:
    after = tuned(name, layout, **wishes).text.decode()
    assert [text for text in present if text not in after] == []
    assert [text for text in absent if text in after] == []


def test_dies_are_written_only_where_there_are_several() -> None:
    xml, plan = planned("study", "pin-numa")
    many = with_vm(plan, cpu_topology=GuestTopology(2, 4, 7, 1))
    assert b"<topology sockets='2' dies='4' cores='7' threads='1'/>" in rewrite(xml, many)


def test_tabs_and_double_quotes_and_line_ends_are_the_documents_own() -> None:
    after = tuned("tabs-double-quotes", "pin-numa").text
    assert b'\n\t\t<vcpupin vcpu="0" cpuset="0"/>\n' in after
    assert b"'" not in after
    after = tuned("crlf", "pin-numa").text
    assert after.count(b"\n") == after.count(b"\r\n")
    for end, step, used in ((b"\r\n", b"\t", b"\t"), (b"\n", b"   ", b"   "), (b"\n", b"", b"  ")):
        children = (b"<a>", step + b"<b/>", b"</a>")
        lines = (b"<domain>", step + end.join(children) + b"</domain>")
        document = parse_document(end.join(lines), "x")
        new = NewElement("c", children=(NewElement("d"),))
        after = apply(document, append(document, document.root, [new])).text
        assert end + step + b"<c>" + end + step + used + b"<d/>" in after
    document = parse_document(b"<domain>\n\t<a>\n    <b/>\n\t</a>\n</domain>", "mixed")
    after = apply(document, append(document, document.root.children[0], [new])).text
    assert b"\n    <c>\n    \t<d/>\n    </c>" in after
    document = parse_document(b"<?xml version='1.0'?>\n<domain><a/></domain>", "one line")
    after = apply(document, append(document, document.root, [new])).text
    assert b"<a/><c><d/></c></domain>" in after


@pytest.mark.parametrize("name", ["utf16", "latin1"])
def test_the_encoding_stays(name: str) -> None:
    xml, plan = planned(name, "pin")
    after = rewrite(xml, plan, name)
    encoding = "utf-16" if name == "utf16" else "latin-1"
    assert "größe" in after.decode(encoding)
    assert "<emulatorpin cpuset='28,29'/>" in after.decode(encoding)


def test_pins_with_other_values_are_changed_in_place_and_keep_their_comments() -> None:
    xml, plan = planned("pins-with-comments", "pin")
    once = rewrite(xml, plan)
    assert b"<!-- first core -->" in once
    moved = hand_plan(read_vm(once, "once"), "pin", first_core=8)
    before, after = once.splitlines(), rewrite(once, moved).splitlines()
    changed = [line for line, was in zip(after, before, strict=True) if line != was]
    assert len(changed) == 8 + 1 + 2  # vCPUs, emulator, IOThreads
    assert changed[0].strip() == b"<emulatorpin cpuset='36,37'/>"
    first = rewrite(xml.replace(b"<shares>2048</shares>", b""), plan)
    assert first.index(b"<iothreadpin iothread='7'") < first.index(b"<emulatorsched")
    fewer = with_vm(plan, iothread_pins=plan.vm.iothread_pins[:1])
    with pytest.raises(InputError, match="expected 1 IOThread as in the plan, found 2"):
        rewrite(xml, fewer)


def test_pins_that_say_the_same_in_another_spelling_stay() -> None:
    xml, plan = planned("earlier-layout", "pin")
    once = rewrite(xml, plan)
    respelt = once.replace(
        b"<vcpupin vcpu='0' cpuset='0'/>", b"<vcpupin cpuset='0-1,^1' vcpu='0'/>"
    )
    assert respelt != once
    assert rewrite(respelt, plan) == respelt


def test_pages_of_the_planned_size_for_each_cell_by_itself_stay() -> None:
    plan = hand_plan(read_vm(sample(DIMMS), "x"), "pin-numa", page_bytes=2 * MIB)
    page = b"<page size='2048' unit='KiB' nodeset='%b'/>"
    once = rewrite(sample(DIMMS), plan).replace(page % b"0-1", page % b"0" + page % b"1")
    assert once.count(b"<page ") == 2 and rewrite(once, plan) == once


def test_another_vcpu_count_drops_current_cpuset_and_states_of_single_vcpus() -> None:
    vcpu = tuned("tabs-double-quotes", "pin-numa-smt").root.child("vcpu")
    assert vcpu is not None
    assert (vcpu.text, vcpu.attributes) == ("16", (("placement", "static"),))
    assert tuned("pins-with-comments", "pin-numa-smt").root.child("vcpus") is None
    assert tuned("pins-with-comments", "pin").root.child("vcpus") is not None


@pytest.mark.parametrize("setting", [b"memAccess='shared'", b"discard='yes'"])
def test_cells_share_memory_as_the_old_ones_did(setting: bytes) -> None:
    """New ones, and the one that a flat guest keeps for it."""
    xml = sample("earlier-layout").replace(b" memory='2097152'", b" %b memory='2097152'" % setting)
    assert rewrite(xml, hand_plan(read_vm(xml, "four"), "pin")).count(setting) == 1
    xml = (
        sample("dimms-and-shared-memory")
        .replace(b"      <cell id='1' cpus='4-7' memory='4194304' memAccess='shared'/>\n", b"")
        .replace(b"cpus='0-3' memory='4194304' memAccess='shared'", b"memory='8388608' " + setting)
        .replace(b"<node>1</node>", b"<node>0</node>")
        .replace(b"nodeset='0-1'", b"nodeset='0'")
    )
    after = rewrite(xml, hand_plan(read_vm(xml, "one"), "pin-numa"))
    assert after.count(setting) == 2


def test_a_memnode_is_written_once_a_cell() -> None:
    xml, plan = planned("study", "pin-numa")
    once = rewrite(xml, plan)
    (memnode,) = re.findall(rb"<memnode cellid='0'[^>]*>", once)
    assert (
        rewrite(once.replace(memnode, memnode + memnode), plan).count(b"<memnode cellid='0'") == 1
    )


def test_distances_to_cells_that_are_no_more_go() -> None:
    xml, plan = planned("study", "pin-numa")
    once = rewrite(xml, plan)
    last = len(plan.cells) - 1
    (sibling,) = set(re.findall(rb"<sibling id='%d' value='10'/>" % last, once))
    gone = b"<sibling id='%d' value='21'/>" % (last + 1)
    assert rewrite(once.replace(sibling, sibling + gone), plan).count(gone) == 0


@pytest.mark.parametrize("name", ["study", "tabs-double-quotes"])
@pytest.mark.parametrize(
    "value",
    """
    sibling id=.1. value=.(\\d+) | cell id=[^>]*cpus=.([\\d,-]+) | cell id=[^>]*memory=.(\\d+)
    vcpupin vcpu=.1. cpuset=.(\\d+) | emulatorpin cpuset=.([\\d,]+) | vcpu[^>]*>(\\d+)<
    memnode [^>]*nodeset=.(\\d) | memory [^>]*nodeset=.([\\d,]+) | topology [^>]*cores=.(\\d+)
    target [^>]*busNr=.(\\d+) | <node>(\\d) | memory unit=[^>]*>(\\d+)
    """.replace("|", "\n").split("\n")[1:-1],
)
def test_a_value_that_was_changed_since_is_written_again(name: str, value: str) -> None:
    xml, plan = planned(name, "pin-numa-pci-smt")
    once = rewrite(xml, plan)
    found = re.search(value.strip().encode(), once)
    assert found is not None
    number = b"3" if found[1] != b"3" else b"2"
    assert rewrite(once[: found.start(1)] + number + once[found.end(1) :], plan) == once


@pytest.mark.parametrize("name", ["study", "tabs-double-quotes"])
@pytest.mark.parametrize(
    "element", ["vcpupin", "emulatorpin", "memnode", "distances", "topology", "numatune", "cputune"]
)
def test_an_element_that_was_removed_since_is_written_again(name: str, element: str) -> None:
    xml, plan = planned(name, "pin-numa-pci-smt")
    once = parse_document(rewrite(xml, plan), name)
    removed = next(each for each in once.root.walk() if each.name == element)
    again = parse_document(rewrite(remove_all(once, [removed]).to_bytes(), plan), name)
    assert values_of(again.root) == values_of(once.root)


def test_cells_are_read_by_their_ids() -> None:
    xml, plan = planned("study", "pin-numa")
    once = rewrite(xml, plan)
    first, second = re.findall(rb"<cell .*?</cell>", once, re.DOTALL)
    swapped = once.replace(first, b"?").replace(second, first).replace(b"?", second)
    assert read_vm(swapped, "swapped").cells == read_vm(once, "once").cells


def test_a_single_cell_keeps_its_distance_to_itself() -> None:
    flat = rewrite(sample(DIMMS), hand_plan(read_vm(sample(DIMMS), "x"), "pin"))
    own = re.sub(
        rb"(<cell [^>]*)/>", rb"\1><distances><sibling id='0' value='10'/></distances></cell>", flat
    )
    assert own != flat and rewrite(own, hand_plan(read_vm(own, "x"), "pin")) == own


def test_latencies_of_cells_that_stay_as_they_are_stay() -> None:
    xml, plan = planned("study", "pin-numa")
    latency = b"<latency initiator='0' target='0' type='access' value='5'/>"
    known = rewrite(xml, plan).replace(
        b"</numa>", b"<interconnects>" + latency + b"</interconnects></numa>"
    )
    assert rewrite(known, plan) == known
    assert latency not in rewrite(known, planned("study", "pin")[1])


def test_pages_of_several_sizes_are_not_guessed_at() -> None:
    xml = sample("dimms-and-shared-memory").replace(
        b"<page size='2048' unit='KiB' nodeset='0-1'/>",
        b"<page size='2048' unit='KiB' nodeset='0'/><page size='1' unit='G' nodeset='1'/>",
    )
    with pytest.raises(InputError, match="huge pages of one size"):
        rewrite(xml, hand_plan(read_vm(xml, "two"), "pin"))


@pytest.mark.parametrize(
    ("nodesets", "page_bytes", "page"),
    [
        (("0-3",), 2 * MIB, b"<page size='2' unit='MiB' nodeset='0,1'/>"),
        (("0", "1-3"), None, b"<page size='2048' unit='KiB' nodeset='0,1'/>"),
    ],
)
def test_pages_are_those_of_the_cells_that_exist(
    nodesets: tuple[str, ...], page_bytes: int | None, page: bytes
) -> None:
    element = "<page size='2048' unit='KiB' nodeset='{}'/>"
    pages = "".join(element.format(nodeset) for nodeset in nodesets).encode()
    xml = sample("dimms-and-shared-memory").replace(element.format("0-1").encode(), pages)
    written = rewrite(xml, hand_plan(read_vm(xml, "vm"), "pin-numa", page_bytes=page_bytes))
    assert re.findall(rb"<page .*?/>", written) == [page]
    xml, plan = planned("study", "pin", page_bytes=0)
    sized = hand_plan(read_vm(xml, "vm"), "pin", page_bytes=2 * MIB)
    assert b"<page size='2' unit='MiB'/>" in rewrite(rewrite(xml, plan), sized)


def test_a_share_of_removed_vcpus_goes_with_its_monitors() -> None:
    xml = sample("pins-with-comments")
    xml = xml.replace(b"<cachetune vcpus='0-3'>", b"<cachetune vcpus='4-7'>")
    xml = re.sub(rb"(<monitor level='3' vcpus=)'[^']*'", rb"\1'4-7'", xml)
    assert xml.count(b"'4-7'") == 3
    written = rewrite(xml, hand_plan(read_vm(xml, "vm"), "pin", vcpus=4))
    assert not re.search(rb"cachetune|memorytune|monitor", written)


def test_topoext_needs_a_cpu_with_a_mode_or_a_model() -> None:
    with pytest.raises(InputError, match="a mode or a model"):
        tuned("no-cpu-no-arch", "pin-numa", topoext=True)


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        (b"<cpu mode='host-passthrough'/>", None),
        (b"<cpu mode='host-passthrough'><feature name='topoext'/></cpu>", "disable"),
        (b"<cpu mode='maximum'><feature policy='forbid' name='topoext'/></cpu>", "forbid"),
        (b"<cpu mode='host-model'/>", "disable"),
        (b"<cpu mode='custom'><model>EPYC-Milan</model></cpu>", "disable"),
        (b"<cpu/>", None),
    ],
)
def test_topoext_is_off_where_a_guest_is_shown_no_l3_and_its_cpu_might_have_it(
    cpu: bytes, expected: str | None
) -> None:
    xml, plan = planned("no-cpu-no-arch", "pin-numa")
    xml = xml.replace(b"</domain>", cpu + b"</domain>")
    off = with_vm(plan, cpu_cache=GuestCache.DISABLED, topoext=False)
    after = parse_document(rewrite(xml, off), "after").root
    shown = after.child("cpu")
    assert shown is not None
    features = [feature.get("policy") for feature in shown.all("feature")]
    assert features == ([] if expected is None else [expected])
    cache = after.find("cpu/cache")
    assert cache is not None and (cache.get("mode"), cache.get("level")) == ("disable", None)
    assert rewrite(rewrite(xml, off), off) == rewrite(xml, off)


def test_caches_are_shown_as_the_plan_says() -> None:
    xml, plan = planned("study", "pin-numa")
    emulated = rewrite(xml, with_vm(plan, cpu_cache=GuestCache.EMULATED))
    assert b"<cache level='3' mode='emulate'/>" in emulated
    passed = with_vm(plan, cpu_cache=GuestCache.PASSTHROUGH)
    for mode in (b"host-passthrough", b"maximum"):
        cpu = xml.replace(b"host-passthrough", mode)
        assert b"<cache mode='passthrough'/>" in rewrite(cpu, passed)
    xml, plan = planned("i440fx", "pin-numa")
    with pytest.raises(InputError, match="host-passthrough"):
        rewrite(xml, with_vm(plan, cpu_cache=GuestCache.PASSTHROUGH))


def test_a_document_says_that_its_vcpus_are_sibling_pairs_already() -> None:
    assert read_vm(tuned("study", "pin-numa-smt").to_bytes(), "x").threads_per_core == 2
    assert read_vm(tuned("study", "pin-numa").to_bytes(), "x").threads_per_core == 1


def test_a_broken_result_is_refused_whole() -> None:
    xml, plan = planned("study", "pin-numa-pci")
    squeezed = tuple(
        structs.replace(controller, bus_nr=64 if controller.cell == 0 else 65)
        if controller.bus_nr
        else controller
        for controller in plan.vm.controllers
    )
    with pytest.raises(InputError, match=r"expander bus 1 at busNr 64: expected 2 buses, found 1"):
        rewrite(xml, with_vm(plan, controllers=squeezed))
