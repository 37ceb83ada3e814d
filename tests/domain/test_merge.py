"""What a layout put into a document comes out of it again, and later edits stay."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import InputError
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.merge import (
    MergeResult,
    add_libvirt_parts,
    is_same_definition,
    list_added_ports,
    take_out,
)
from homenode.vm.domain.read import open_domain
from homenode.vm.layout import PRESETS
from homenode.vm.plan_options import PlanOptions
from tests.apply_documents import ORIGINAL, tuned
from tests.single_edits import edits, users_vm
from tests.verify_documents import PLAIN, small_host

LAYOUTS = [name for name in PRESETS if name != "default"]
EDITS = {
    "a title": ("</name>", "</name><title>mine</title>"),
    "a description": ("<memory ", "<description>a &lt; b</description><memory "),
    "another password": ("passwd='kept'", "passwd='changed'"),
    "no display": ("<graphics type='vnc' port='-1' passwd='kept'/>", ""),
    "a controller": ("</devices>", "<controller type='scsi' index='0'/></devices>"),
    "a disk": (
        "</devices>",
        "<disk type='file' device='disk'><source file='/d'/><target dev='vdz'/></disk></devices>",
    ),
    "boot order": ("</type>", "</type><boot dev='hd'/>"),
    "what a crash does": ("<devices>", "<on_crash>preserve</on_crash><devices>"),
    "an emulator": ("qemu-system-x86_64<", "mine<"),
}


def merged(original: bytes, applied: bytes, now: bytes) -> MergeResult:
    return take_out(*(parse_document(one, "test") for one in (original, applied, now)))


def edited(document: bytes, names: list[str]) -> bytes:
    for name in names:
        old, new = (text.encode() for text in EDITS[name])
        assert document.count(old) >= 1, name
        document = document.replace(old, new, 1)
    return document


@given(
    st.sampled_from(LAYOUTS),
    st.lists(st.sampled_from(sorted(EDITS)), unique=True).filter(
        lambda names: not {"no display", "another password"} <= set(names)
    ),
)
def test_edits_to_a_tuned_document_end_up_as_the_same_edits_to_the_original(
    layout: str, names: list[str]
) -> None:
    applied = tuned(layout)
    done = merged(ORIGINAL, applied, edited(applied, names))
    assert not done.conflicts
    wanted = edited(ORIGINAL, names)
    assert is_same_definition(
        done.document.to_bytes().replace(b"  <!-- planned -->\n", b""), wanted
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_devices_comes_out_whole(layout: str) -> None:
    plan = plan_file(PLAIN, "vm.xml", PlanOptions(layout=layout), small_host())
    title = re.sub(rb"</name>", b"</name><title>mine</title>", plan.document, count=1)
    done = merged(plan.original, plan.document, title)
    assert not done.conflicts
    wanted = plan.original.replace(b"</name>", b"</name><title>mine</title>", 1)
    assert is_same_definition(done.document.to_bytes(), wanted)


def parts(document: bytes) -> Counter[str]:
    """Each element by itself, without those in it."""
    elements = parse_document(document, "test").root.walk()
    return Counter(f"{e.name} {sorted(e.attributes)} {e.text.strip()}" for e in elements)


def test_no_edit_of_a_tuned_document_is_lost_without_a_conflict() -> None:
    """What was changed of an element is changed in the original, or in conflict, or refused; an
    element that both have and that was removed is gone."""
    tuning = users_vm("2 GPUs")
    original, applied = parts(tuning.original), parts(tuning.document)
    outcomes: Counter[str] = Counter()
    for edit in [one for one in edits(tuning.document) if one.done != "moved"][::3]:
        try:
            open_domain(edit.document, "now")
            done = merged(tuning.original, tuning.document, edit.document)
        except InputError:
            outcomes["refused"] += 1
            continue
        outcomes["conflict" if done.conflicts else "kept"] += 1
        if done.conflicts:
            continue
        now, after = parts(edit.document), parts(done.document.to_bytes())
        if edit.done == "changed":
            assert not (now - applied) - (after - original), edit.said
        elif edit.attribute is None and edit.done == "removed":
            assert not ((applied - now) & original) - (original - after), edit.said
    assert min(outcomes.values()) > 10 and len(outcomes) == 3, outcomes


def test_one_layout_put_over_another_gives_the_first_documents_elements_back() -> None:
    first = tuned("pin-numa")
    second = tuned("pin", first)
    done = merged(first, second, edited(second, ["a title"]))
    assert is_same_definition(done.document.to_bytes(), edited(first, ["a title"]))


def test_what_both_changed_is_a_conflict_by_place_with_all_three_values() -> None:
    applied = tuned("pin")
    now = re.sub(rb"(vcpupin vcpu='1' cpuset=')[^']*", rb"\g<1>9", applied)
    (conflict,) = merged(ORIGINAL, applied, now).conflicts
    assert conflict.startswith("/domain/cputune/vcpupin[1]/@cpuset: original none, applied ")
    assert conflict.endswith(", now 9")


def test_an_element_that_the_layout_changed_and_somebody_removed_is_a_conflict() -> None:
    own = b"  <numatune><memory mode='strict' nodeset='0'/></numatune>\n  <os>"
    plan = plan_file(
        PLAIN.replace(b"  <os>", own, 1), "vm.xml", PlanOptions(layout="pin-numa"), small_host()
    )
    now = re.sub(rb"\s*<numatune>.*?</numatune>", b"", plan.document, flags=re.DOTALL)
    (conflict,) = merged(plan.original, plan.document, now).conflicts
    assert conflict == "/domain/numatune: changed by the layout, removed since"


@pytest.mark.parametrize(
    ("original", "applied", "now", "after"),
    [
        ("<vcpu>3</vcpu>", "<vcpu>4</vcpu>", "<vcpu>4</vcpu><a/>", "<vcpu>3</vcpu><a/>"),
        *(
            ("<vcpu current='1'>3</vcpu>", "<vcpu current='2'>4</vcpu>", *now_after)
            for now_after in (
                ("<vcpu current='2' a='1'>4</vcpu>", "<vcpu current='1' a='1'>3</vcpu>"),
                ("<vcpu current='1'>4</vcpu>", "<vcpu current='1'>3</vcpu>"),
            )
        ),
        (
            "<vcpu>3</vcpu>",
            "<vcpu>3</vcpu><cputune><shares/><quota/></cputune>",
            "<vcpu>3</vcpu><cputune><shares/></cputune>",
            "<vcpu>3</vcpu>",
        ),
    ],
)
def test_what_the_layout_changed_goes_back_and_what_it_did_not_stays(
    original: str, applied: str, now: str, after: str
) -> None:
    documents = (
        f"<domain>{inside}<memory>3</memory></domain>".encode()
        for inside in (original, applied, now, after)
    )
    original_xml, applied_xml, now_xml, after_xml = documents
    done = merged(original_xml, applied_xml, now_xml)
    assert (done.document.to_bytes(), done.conflicts) == (after_xml, ())


def test_a_reference_to_a_cell_of_the_layout_is_named() -> None:
    dimm = b"<memory model='dimm'><target><size>1</size><node>1</node></target></memory></devices>"
    applied = tuned("pin-numa")
    assert merged(ORIGINAL, applied, applied).conflicts == ()
    (broken,) = merged(ORIGINAL, applied, applied.replace(b"</devices>", dimm)).conflicts
    assert "device-unknown-cell" in broken


def test_an_element_put_among_those_of_the_layout_stays() -> None:
    applied = tuned("pin")
    now = applied.replace(b"</cputune>", b"  <shares>7</shares>\n  </cputune>")
    text = merged(ORIGINAL, applied, now).document.to_bytes()
    assert b"<shares>7</shares>" in text
    assert b"vcpupin" not in text
    now = re.sub(rb"\s*<vcpupin vcpu='1'[^>]*>", b"", applied)
    assert b"cputune" not in merged(ORIGINAL, applied, now).document.to_bytes()


@pytest.mark.parametrize("end", [b"/>", b">\n  </cpu>"])
def test_an_element_is_as_empty_as_before_but_for_what_was_put_into_it(end: bytes) -> None:
    cpu = b"<cpu mode='host-model'" + end
    original = ORIGINAL.replace(b"<os>", cpu + b"\n  <os>")
    applied = tuned("pin-numa", original)
    assert cpu in merged(original, applied, applied).document.to_bytes()
    feature = b"<feature policy='require' name='pcid'/>"
    now = applied.replace(b"</cpu>", feature + b"</cpu>")
    assert feature in merged(original, applied, now).document.to_bytes()


def test_a_setting_put_into_an_element_of_the_layout_stays() -> None:
    applied = tuned("pin-numa")
    assert b"<cpu>" in applied and b"<cpu" not in ORIGINAL
    mode = b"<cpu mode='host-model'"
    now = applied.replace(b"<cpu>", mode + b">")
    assert mode in merged(ORIGINAL, applied, now).document.to_bytes()


def test_a_device_plugged_into_the_layouts_bus_loses_its_address_and_is_named() -> None:
    applied = plan_file(
        PLAIN, "vm.xml", PlanOptions(layout="pin-numa-pci", spare_ports=1), small_host()
    )
    buses = {
        int(number)
        for number in re.findall(
            rb"type='pci' index='(\d+)' model='pcie-root-port'", applied.document
        )
    }
    free = next(
        bus for bus in sorted(buses) if f"bus='0x{bus:02x}'".encode() not in applied.document
    )
    nic = (
        "<interface type='user'><mac address='52:54:00:00:00:01'/><address type='pci' "
        f"domain='0x0000' bus='0x{free:02x}' slot='0x00' function='0x0'/></interface></devices>"
    )
    now = applied.document.replace(b"</devices>", nic.encode())
    done = merged(applied.original, applied.document, now)
    assert not done.conflicts
    assert done.moved == ("<interface>[52:54:00:00:00:01]",)
    assert b"<mac address='52:54:00:00:00:01'/></interface>" in done.document.to_bytes()


def test_sizes_and_sets_are_stored_as_libvirt_prints_them() -> None:
    text = (
        "<domain><memory unit='{}'>{}</memory><vcpu cpuset='{}'>2</vcpu><cpu><numa>"
        "<cell id='0' cpus='{}' memory='{}' unit='{}'/></numa></cpu>"
        "<features><smm><tseg unit='MiB'>48</tseg></smm></features></domain>"
    )
    tuning = text.format("GiB", 3, "0,1,2", "0,1", 512, "MiB")
    printed = text.format("KiB", 3 << 20, "0-2", "0-1", 512 << 10, "KiB")
    now = parse_document(printed.encode(), "now")
    assert (
        add_libvirt_parts(parse_document(tuning.encode(), "tuned"), now).to_bytes()
        == printed.encode()
    )
    text = "<domain><cpu><topology sockets='1' cores='1' threads='1'{}/></cpu></domain>"
    tuning = text.format("")
    for dies, printed in ((1, text.format(" dies='1'")), (2, tuning)):  # 2 is an edit
        now = parse_document(text.format(f" dies='{dies}'").encode(), "now")
        parts = add_libvirt_parts(parse_document(tuning.encode(), "tuned"), now)
        assert parts.to_bytes() == printed.encode()


# Path of an element that has a name among its like, and the element, with {} for the name.
NAMED = [
    ("cputune", "<vcpupin vcpu='{}' cpuset='0'/>"),
    ("cputune", "<vcpusched vcpus='{}' scheduler='batch'/>"),
    ("cputune", "<iothreadpin iothread='{}' cpuset='0'/>"),
    ("numatune", "<memnode cellid='{}' mode='strict' nodeset='0'/>"),
    ("cpu/numa/cell id='0' cpus='0' memory='1'/distances", "<sibling id='{}' value='10'/>"),
    ("vcpus", "<vcpu id='{}' enabled='yes'/>"),
    ("cpu", "<feature policy='require' name='{}'/>"),
    ("memoryBacking/hugepages", "<page size='{}' unit='MiB'/>"),
    ("memoryBacking/hugepages", "<page size='2' unit='MiB' nodeset='{}'/>"),
    ("devices", "<controller type='pci' index='{}'/>"),
    ("devices", "<controller type='{}' index='0'/>"),
    ("devices", "<disk><target dev='{}'/></disk>"),
    ("devices", "<filesystem><target dir='{}'/></filesystem>"),
    ("devices", "<interface><mac address='{}'/></interface>"),
    *(
        ("devices", f"<interface><source><address {name}='{{}}'/></source></interface>")
        for name in ("bus", "slot", "function")
    ),
    ("devices", "<hostdev type='{}'/>"),
    *(
        ("devices", f"<hostdev><source><address {name}='{{}}'/></source></hostdev>")
        for name in ("domain", "bus", "slot", "function", "uuid", "device")
    ),
]


@pytest.mark.parametrize(("path", "element"), NAMED)
def test_elements_of_one_kind_are_told_apart_by_what_names_them(path: str, element: str) -> None:
    """Somebody removed the first of two: the layout takes out what is left of its own."""

    def document(*names: int) -> bytes:
        text = "".join(map(element.format, names))
        for parent in reversed(f"domain/{path}".split("/")):
            text = f"<{parent}>{text}</{parent.split()[0]}>"
        return text.replace("<domain>", "<domain><vcpu>3</vcpu><memory>3</memory>").encode()

    done = merged(document(0, 1), document(0, 1, 2), document(1, 2))
    assert is_same_definition(done.document.to_bytes(), document(1)), done


def test_a_port_that_nothing_is_plugged_into_is_an_edit_and_not_libvirts() -> None:
    tuning, printed = (
        parse_document(f"<domain><devices>{devices}</devices></domain>".encode(), "test")
        for devices in (
            "<disk/>",
            "<controller type='pci' index='1'/><controller type='pci' index='2'/>"
            "<disk><address type='pci' bus='2'/></disk>",
        )
    )
    assert list_added_ports(tuning, printed) == {2}


def test_a_controller_of_the_layout_goes_with_libvirts_defaults_and_not_with_an_edit() -> None:
    head = b"<devices><controller type='pci' index='9' model='pcie-expander-bus'>"
    target = b"<target busNr='128'><node>0</node></target></controller>"
    stored_target = b"<model name='pxb-pcie'/>" + target.replace(b"><node", b" hotplug='on'><node")
    applied, stored, mine = (
        ORIGINAL.replace(b"<devices>", head + end)
        for end in (target, stored_target, target.replace(b"0<", b"1<"))
    )
    done = merged(ORIGINAL, applied, stored)
    assert not done.conflicts and is_same_definition(done.document.to_bytes(), ORIGINAL)
    (conflict,) = merged(ORIGINAL, applied, mine).conflicts
    assert "original none, applied 0, now 1" in conflict


def test_a_detached_device_stays_detached() -> None:
    plan = plan_file(PLAIN, "vm.xml", PlanOptions(layout="pin-numa-pci"), small_host())
    now = re.sub(rb"\s*<hostdev.*?</hostdev>", b"", plan.document, count=1, flags=re.DOTALL)
    done = merged(plan.original, plan.document, now)
    assert not done.conflicts
    assert done.document.to_bytes().count(b"<hostdev") == plan.original.count(b"<hostdev") - 1
