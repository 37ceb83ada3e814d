"""The picture of a host: legible, safe, complete and the same every time."""

import re
from functools import cache
from pathlib import Path

import pytest
from lxml import etree
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Gap
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import make_empty_host
from homenode.show.device_groups import format_address, has_short_addresses
from homenode.show.svg_canvas import CELL_COLOURS, PICTURE, read_css
from homenode.show.topology_map import draw_topology
from homenode.vm.layout import PRESETS
from homenode.vm.plan import with_vm
from homenode.vm.sources import load_host
from tests.cpu_time import cpu_time_below
from tests.picture_hosts import HOSTS, PLANS, busy_host, h200_host, picture, planned, tiny_host
from tests.seeds import part
from tests.shared_data import SHARED
from tests.svg_geometry import SVG, Box, assert_legible, contrast, rects, text_boxes

NAMES = sorted((*HOSTS, *PLANS))


@cache
def _map_of(name: str) -> str:
    return draw_topology(*picture(name))


def _parsed(svg: str) -> etree._Element:
    return etree.fromstring(svg.encode())


def _texts(svg: str) -> list[str]:
    return [text.text or "" for text in _parsed(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", part(NAMES, 0))
def test_no_text_is_small_or_overlaps_or_leaves_its_box(name: str) -> None:
    assert_legible(_map_of(name))


def test_the_assertion_itself_sees_small_and_overlapping_text() -> None:
    svg = draw_topology(h200_host())
    with pytest.raises(AssertionError, match="at least"):
        assert_legible(svg.replace('font-size="10"', 'font-size="7.9"', 1))
    root = _parsed(svg)
    one, other = [text for text in root.iter(f"{SVG}text") if (text.text or "").isdigit()][:2]
    other.set("y", one.get("y", ""))
    other.set("x", one.get("x", ""))
    with pytest.raises(AssertionError, match="overlap"):
        assert_legible(etree.tostring(root, encoding="unicode"))
    other.text = "999999"
    with pytest.raises(AssertionError, match="crosses"):
        assert_legible(etree.tostring(root, encoding="unicode"))


@pytest.mark.parametrize("name", NAMES)
def test_every_pu_is_named_alone_or_in_a_range(name: str) -> None:
    host, _ = picture(name)
    texts = _texts(_map_of(name))
    named = CpuSet(int(text) for text in texts if text.isdigit())
    joined = " ".join(texts)
    for words in joined.split():
        cleaned = words.rstrip(".,:")
        if cleaned and set(cleaned) <= set("0123456789-,"):
            named |= CpuSet.parse(cleaned)
    missing = [pu.index for pu in host.pus if pu.index not in named]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_every_gpu_and_nic_has_a_card(name: str) -> None:
    host, _ = picture(name)
    joined = " ".join(_texts(_map_of(name)))
    for device in host.pci_devices:
        if device.kind in (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH):
            address = format_address(device.bdf, has_short_addresses(host))
            assert address.partition(".")[0] in joined  # ports of one NIC share a card


def test_each_vcpu_sits_on_its_pu_in_the_colour_of_its_cell() -> None:
    host = h200_host()
    drawn = planned(host, "pin-numa-pci", 88, 7)
    root = _parsed(draw_topology(host, drawn))
    boxes = [box for box in rects(root) if box.what.startswith("pu cell")]
    texts = text_boxes(root)
    seen = {}
    for box in boxes:
        inside = [text.what for text in texts if box.holds(text)]
        if len(inside) == 2:  # the legend's samples hold none
            seen[int(inside[0])] = (int(inside[1]), box.what)
    assert len(seen) == 88
    for cell in drawn.cells:
        for vcpu in cell.vcpus:
            assert seen[vcpu] == (drawn.vcpu_pins[vcpu].first(), f"pu cell{cell.id}")


def test_a_gpu_hangs_below_its_node_and_has_the_colour_of_its_cell() -> None:
    host = h200_host()
    drawn = planned(host, "pin-numa-pci", 88, 7)
    root = _parsed(draw_topology(host, drawn))
    texts = text_boxes(root)
    node_boxes = {
        next(t.what for t in texts if t.what.startswith("node ") and box.holds(t)): box
        for box in rects(root)
        if box.what == "node"
    }
    for number, device in enumerate(drawn.vm.hostdevs):
        # The card's title; the cell's list of devices above has the name too.
        title = [t for t in texts if t.what.split()[:1] == [f"GPU{number}"]][-1]
        box = node_boxes[f"node {device.host_node}"]
        assert title.top > box.bottom
        assert box.left <= title.left and title.right <= box.right
        bands = [b.what for b in rects(root) if b.holds(title) and b.what.startswith("cell")]
        assert bands == [f"cell{device.cell}"]


def test_cores_of_other_vms_are_hatched_and_their_siblings_too() -> None:
    root = _parsed(draw_topology(busy_host()))
    hatched = [
        rect
        for rect in root.iterchildren(f"{SVG}rect")
        if rect.get("style") == "fill:url(#taken)" and rect.find(f"{SVG}title") is not None
    ]
    titles = {rect.findtext(f"{SVG}title") for rect in hatched}
    assert len(hatched) == 12
    assert "CPU 95: used by build-farm" in titles
    assert "CPU 191: used by build-farm" in titles


def test_names_from_outside_are_text_and_nothing_else() -> None:
    host, _ = picture("odd")
    svg = draw_topology(host)
    root = _parsed(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert "<script" not in svg and "\x1b" not in svg and "\x00" not in svg
    names = {etree.QName(element).localname for element in root.iter()}
    assert names <= {*"svg title desc style defs pattern rect text path".split()}
    assert not any("href" in key for element in root.iter() for key in element.attrib)


def test_the_same_host_and_plan_give_the_same_bytes() -> None:
    host, drawn = picture("hgx-pci")
    assert drawn is not None
    assert draw_topology(host, drawn) == draw_topology(load_host("hgx-h100"), replace(drawn))


def test_a_host_of_384_pus_is_drawn_in_less_than_150_ms() -> None:
    host, drawn = picture("epyc-9654-pin")
    with cpu_time_below(0.150):
        draw_topology(host, drawn)


def test_a_source_with_pci_alone_is_drawn_by_node() -> None:
    full = load_host("hgx-h100")
    host = replace(
        make_empty_host("lspci", (Gap("CPUs", "lspci does not show"),)),
        root_complexes=full.root_complexes,
        pci_devices=full.pci_devices,
    )
    svg = draw_topology(host)
    assert_legible(svg)
    assert any("devices of node 1" in text for text in _texts(svg))


def test_pus_whose_node_is_unknown_are_drawn_too() -> None:
    host = tiny_host()
    pus = tuple(structs.replace(pu, node=None) for pu in host.pus)
    svg = draw_topology(structs.replace(host, nodes=(), pus=pus, distances=None))
    assert_legible(svg)
    assert "node unknown" in _texts(svg)


def test_vcpus_that_share_pus_are_counted_on_each() -> None:
    host = tiny_host()
    drawn = with_vm(planned(host, "pin", 2), vcpu_pins=(CpuSet([0, 1]),) * 2)
    svg = draw_topology(host, drawn)
    assert_legible(svg)
    assert _texts(svg).count("2v") == 2


def test_the_emulator_on_a_vcpus_pu_is_marked() -> None:
    host = tiny_host()
    drawn = with_vm(planned(host, "pin", 1), emulator_pus=CpuSet([0]))
    outlines = [box for box in rects(_parsed(draw_topology(host, drawn))) if "outline" in box.what]
    assert len(outlines) == 2  # the CPU and the legend's sample


def test_an_unpinned_plan_colours_no_pu_and_says_why() -> None:
    host = h200_host()
    svg = draw_topology(host, planned(host, "default", 88, 7))
    assert not [box for box in rects(_parsed(svg)) if box.what.startswith("pu cell")]
    assert any("not pinned" in text for text in _texts(svg))


def test_every_layout_gives_a_legible_picture() -> None:
    host = h200_host()
    for name in PRESETS:
        assert_legible(draw_topology(host, planned(host, name, 44, 7)))


def test_the_memory_of_a_cell_is_drawn_to_scale() -> None:
    host = h200_host()
    drawn = planned(host, "pin-numa", 88, memory_bytes=1024 << 30)
    boxes = rects(_parsed(draw_topology(host, drawn)))
    bars = [box for box in boxes if box.what == "bar"]
    parts = [b for b in boxes if b.what == "cell0" and any(_inside(bar, b) for bar in bars)]
    assert [round((b.right - b.left) / (bars[0].right - bars[0].left), 2) for b in parts] == [0.5]


def _inside(bar: Box, part: Box) -> bool:
    return bar.holds(part) and part.bottom - part.top == bar.bottom - bar.top


def test_a_device_of_another_vm_names_it() -> None:
    host, _ = picture("odd")
    assert Bdf.parse("10000:02:00.0") in host.domains[0].devices
    assert any("in use by" in text for text in _texts(draw_topology(host)))


@pytest.mark.parametrize("cell", range(CELL_COLOURS))
def test_text_on_a_cell_has_contrast(cell: int) -> None:
    fills = dict(re.findall(r"\.([a-z-]+\d)\{fill:(#[0-9a-f]{6})\}", read_css(PICTURE)))
    assert contrast(fills[f"cell{cell}"], fills[f"on-cell{cell}"]) >= 4.5


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 1))
def test_every_shipped_host_is_drawn_legibly(name: str) -> None:
    assert_legible(draw_topology(load_host(name)))


CAPTURES = sorted((SHARED / "machines" / "hwloc").glob("*.xml"))
LSPCI = SHARED / "machines" / "lspci" / "gpud-hgx-h100x8-lspci-vvv.txt"


@pytest.mark.skipif(not CAPTURES, reason="the shared captures of real machines are not here")
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_a_real_machine_is_drawn_legibly(path: Path) -> None:
    assert_legible(draw_topology(load_host(str(path))))


@pytest.mark.skipif(not LSPCI.exists(), reason="the shared lspci capture is not here")
def test_a_host_of_517_functions_is_drawn_legibly_alone_and_laid_over_cpus() -> None:
    assert_legible(draw_topology(load_host(str(LSPCI))))
    laid_over = load_host("xeon-2p-cpus", lspci=LSPCI)
    assert_legible(draw_topology(laid_over))
    assert_legible(draw_topology(laid_over, planned(laid_over, "pin-numa-pci", 96, 8)))
