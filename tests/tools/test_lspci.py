"""lspci's listing: parsed, laid over a host, and standing alone."""

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import HomenodeError, InputError, ParseError
from homenode.machine.discover.host import discover
from homenode.machine.discover.lspci import host_from_lspci, overlay_lspci
from homenode.machine.pci import DeviceKind, PciBar, PciLink, PortType
from homenode.machine.tools.lspci import looks_like_lspci, parse
from homenode.machine.topology import Host, summarise
from homenode.vm.sources import load_host
from tests.shared_data import SHARED
from tests.sysfs_trees import PCI, cpu_files, pci_function, snapshot

HGX = SHARED / "machines" / "lspci" / "gpud-hgx-h100x8-lspci-vvv.txt"
needs_hgx = pytest.mark.skipif(not HGX.is_file(), reason="no shared listings")

SMALL = """\
00:00.0 Host bridge: Intel Corporation Device 09a2 (rev 20)
\tNUMA node: 0
00:01.0 PCI bridge: Intel Corporation Device 352a (rev 04) (prog-if 00 [Normal decode])
\tNUMA node: 0
\tBus: primary=00, secondary=01, subordinate=03, sec-latency=0
\tCapabilities: [40] Express (v2) Root Port (Slot-), MSI 00
01:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=01, secondary=02, subordinate=03, sec-latency=0
\tCapabilities: [68] Express (v2) Upstream Port, IntMsgNum 0
02:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tPhysical Slot: 28
\tBus: primary=02, secondary=03, subordinate=03, sec-latency=0
\tCapabilities: [68] Express (v2) Downstream Port (Slot+), MSI 00
\t\tLnkCtl2: Target Link Speed: 16GT/s, EnterCompliance- SpeedDis-
\tCapabilities: [170 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+
03:00.0 3D controller: NVIDIA Corporation Device 2330 (rev a1)
\tSubsystem: NVIDIA Corporation Device 16c1
\tNUMA node: 0
\tIOMMU group: 12
\tRegion 0: Memory at 214042000000 (64-bit, prefetchable) [size=16M]
\tRegion 2: Memory at 210000000000 (64-bit, prefetchable) [size=128G]
\tRegion 5: I/O ports at f000 [disabled] [size=32]
\tExpansion ROM at 9b000000 [virtual] [disabled] [size=128K]
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <4us
\t\tLnkSta:\tSpeed 16GT/s (downgraded), Width x16 (ok)
\tCapabilities: [250 v1] Single Root I/O Virtualization (SR-IOV)
\t\tInitial VFs: 32, Total VFs: 32, Number of VFs: 2, Function Dependency Link: 00
\t\tRegion 1: Memory at 0000212000000000 (64-bit, prefetchable)
\tKernel driver in use: vfio-pci
\tKernel modules: nvidiafb, nouveau
"""


def _host() -> Host:
    return discover(snapshot(cpu_files()))


def test_a_function_is_read_with_all_that_the_listing_tells() -> None:
    gpu = parse(SMALL)[-1]
    assert (gpu.bdf, gpu.class_code) == (Bdf.parse("03:00.0"), 0x030200)
    assert (gpu.vendor_id, gpu.device_id) == (0x10DE, 0x2330)
    assert (gpu.subsystem_vendor_id, gpu.subsystem_device_id) == (0x10DE, 0x16C1)
    assert gpu.link == PciLink(16.0, 16, 32.0, 16)
    assert gpu.bars == (
        PciBar(0, 16 << 20, True, True),
        PciBar(2, 128 << 30, True, True),
        PciBar(5, 32, False, False, is_memory=False),
        PciBar(6, 128 << 10, False, False),
    )
    assert (gpu.sriov_total_vfs, gpu.sriov_num_vfs) == (32, 2)
    assert (gpu.driver, gpu.iommu_group, gpu.numa_node) == ("vfio-pci", 12, 0)
    port = parse(SMALL)[3]
    assert (port.port_type, port.buses) == (PortType.SWITCH_DOWNSTREAM, (2, 3, 3))
    assert port.acs == frozenset({"SrcValid", "ReqRedir"}) and port.target_gt_per_s == 16.0


@pytest.mark.parametrize(
    ("header", "class_code", "ids", "name"),
    [
        (
            "0000:3b:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] "
            "[10de:2330] (rev a1)",
            0x030200,
            (0x10DE, 0x2330),
            "NVIDIA Corporation GH100 [H100 SXM5 80GB]",
        ),
        ("3b:00.0 0302: 10de:2330 (rev a1)", 0x030200, (0x10DE, 0x2330), "10de:2330"),
        (
            "10000:e1:00.0 Non-Volatile memory controller: Samsung Electronics Co Ltd NVMe SSD "
            "Controller PM9A3 (prog-if 02 [NVM Express])",
            0x010802,
            (0x144D, None),
            "Samsung Electronics Co Ltd NVMe SSD Controller PM9A3",
        ),
        (
            "c1:00.0 Processing accelerators: Advanced Micro Devices, Inc. [AMD/ATI] Device 74a1",
            0x120000,
            (0x1002, 0x74A1),
            "Advanced Micro Devices, Inc. [AMD/ATI] Device 74a1",
        ),
        (
            "00:00.4 Generic system peripheral [0807]: Intel Corporation Device 0b23",
            0x080700,
            (0x8086, 0x0B23),
            "Intel Corporation Device 0b23",
        ),
        (
            "00:05.0 Flux capacitor: Brown Enterprises Device 0001",
            None,
            (None, 1),
            "Brown Enterprises Device 0001",
        ),
    ],
)
def test_headers_are_read_in_every_spelling(
    header: str, class_code: int | None, ids: tuple[int | None, int | None], name: str
) -> None:
    (function,) = parse(header + "\n")
    assert function.class_code == class_code
    assert (function.vendor_id, function.device_id) == ids
    assert function.name == name


def test_what_is_not_printed_is_unknown() -> None:
    (function,) = parse(
        "3b:00.0 3D controller: NVIDIA Corporation Device 2330\n\tCapabilities: <access denied>\n"
    )
    assert function.link is None and function.numa_node is None and function.port_type is None
    (down,) = parse(
        "3b:00.0 PCI bridge: PLX Technology, Inc. Device 8747\n"
        "\t\tLnkSta:\tSpeed unknown, Width x0\n\tNUMA node: -1\n"
    )
    assert down.link is None and down.numa_node is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "expected the output of lspci -vvv"),
        ("", "expected the output of lspci -vvv"),
        ("\tNUMA node: 0\n", "expected an address such as 3b:00.0 first"),
        ("3b:00.0 3D controller: x\n\tNUMA node: many\n", r"lspci:2: expected NUMA node: a number"),
        ("3b:00.0 0302: 10de:2330\n3b:00.0 0302: 10de:2330\n", "expected each address once"),
        ("3b:00.0 3D controller: x\nwhat is this\n", r"lspci:2: expected a function"),
        ("3b:00.0 3D controller: x\n0000:4c:00 GPU $ x\n", r"lspci:2: expected a function"),
    ],
)
def test_a_listing_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(text)


FENCED = f"Here it is:\n\n```console\n$ sudo lspci -vvv\n{SMALL}```\n\nThank you!\n"
DUMP = "00: de 10 30 23 46 05 10 00 a1 00 02 03 10 00 00 00\n10: 00 00\nff0: 0c 00\n"


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{SMALL}",
        f"root@gpu7:~# lspci -vvv\n{SMALL}root@gpu7:~# ",
        f"[root@gpu7 ~]# lspci -vvv\n{SMALL}[root@gpu7 ~]# exit\nlogout\n",
        f"$ sudo lspci -nnvvv\n{SMALL}$\n",
        f"Last login: Nov 22 from 10.0.0.1\n03:12:11 up 3 days\n(base) me@h:/tmp$ lspci\n{SMALL}",
        f"\x1b[?2004h\u276f lspci -vvv\n{SMALL}",
        FENCED,
        f"~~~\n{SMALL}~~~",
        SMALL.replace("\n", "\r\n"),
        "".join(f"> {line}\n" for line in SMALL.splitlines()),
        "".join(f"    {line}\n" for line in f"$ lspci\n{SMALL}".splitlines()),
        SMALL.expandtabs(8),
        SMALL.replace("\t", "  "),
        SMALL.replace("00:01.0 PCI", f"{DUMP}\n00:01.0 PCI") + DUMP,
        SMALL.strip(),
    ],
    ids="""
        bom prompt brackets dollar banner codes fence tildes crlf quoted indented spaces two-spaces
        hex-dump stripped
    """.split(),
)
def test_a_listing_is_read_as_people_copied_it(text: str, tmp_path: Path) -> None:
    assert looks_like_lspci(text)
    assert parse(text) == parse(SMALL)
    assert _cut_gaps(text) == []
    path = tmp_path / "pasted.txt"
    path.write_text(text, newline="")
    assert load_host(str(path)).pci_devices == host_from_lspci(SMALL, "x").pci_devices


def test_a_listing_is_distinguished_from_other_texts() -> None:
    assert looks_like_lspci("lspci: Unable to load libkmod\n" + SMALL)
    assert not looks_like_lspci("# a host\nname = 'x' # 00:01.0 is a bridge\n")
    assert not looks_like_lspci("[host]\nname = 'x'\n")
    assert not looks_like_lspci("")


def test_the_tree_and_its_roots_come_from_the_buses() -> None:
    host = host_from_lspci(SMALL, "listing")
    gpu = Bdf.parse("03:00.0")
    assert host.switch_above(gpu) == Bdf.parse("01:00.0")
    assert [(root.name, root.node) for root in host.root_complexes] == [("pci0000:00", 0)]
    assert host.pus == () and host.nodes == ()
    assert any(gap.subject == "CPUs, cores, LLCs and NUMA nodes" for gap in host.gaps)


def test_bridges_that_lead_to_each_other_do_not_hang() -> None:
    circle = (
        "01:00.0 PCI bridge: x\n\tBus: primary=00, secondary=05, subordinate=05\n"
        "05:00.0 PCI bridge: x\n\tBus: primary=00, secondary=01, subordinate=01\n"
    )
    host = host_from_lspci(circle, "circle")
    assert [device.parent for device in host.pci_devices] == [None, Bdf.parse("01:00.0")]


def test_a_class_that_is_not_known_is_a_gap() -> None:
    host = host_from_lspci("00:05.0 Flux capacitor: Brown Enterprises\n", "x")
    assert host.pci_devices[0].kind is DeviceKind.OTHER
    assert any("Flux capacitor" in gap.reason for gap in host.gaps)


def test_a_listing_over_a_host_gives_it_the_pci_part() -> None:
    host = overlay_lspci(_host(), SMALL)
    counts = summarise(host)
    assert (counts.pus, counts.gpus, counts.pci_functions) == (8, 1, 5)
    assert str(host.device_at[Bdf.parse("03:00.0")].local_pus) == "0-1,4-5"
    assert not any(gap.subject == "PCI functions" for gap in host.gaps)


def test_a_listing_with_nodes_that_the_host_lacks_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected NUMA nodes of a tree \(0, 1\), found 4"):
        overlay_lspci(_host(), SMALL.replace("NUMA node: 0", "NUMA node: 4"))


def test_a_listing_without_a_function_of_the_host_is_rejected() -> None:
    host = load_host("hgx-h100")
    listing = "0000:fe:00.0 3D controller [0302]: NVIDIA Corporation H [10de:2330]\n"
    with pytest.raises(InputError, match="lists none of the 80 PCI functions of hgx-h100"):
        overlay_lspci(host, listing)
    nothing = replace(host, pci_devices=(), root_complexes=(), links=())
    assert len(overlay_lspci(nothing, listing).pci_devices) == 1


def test_the_hosts_own_source_fills_in_and_disagreements_are_gaps() -> None:
    files = {
        **cpu_files(),
        **pci_function("0000:03:00.0", "030200", "10de:2330", node=1),
        **pci_function("0000:07:00.0", "020700", "15b3:1021"),
        f"{PCI}/0000:03:00.0/resource": "0x0000000000000000 0x00000000000fffff 0x0000000000140204",
        f"{PCI}/0000:00:00.0/class": "0x020000\n",
        f"{PCI}/0000:00:00.0/vendor": "0x8086\n",
    }
    host = overlay_lspci(discover(snapshot(files)), SMALL, "listing")
    gpu = host.device_at[Bdf.parse("03:00.0")]
    assert (gpu.node, [bar.size_bytes for bar in gpu.bars]) == (0, [1 << 20])
    reasons = {gap.subject: gap.reason for gap in host.gaps}
    assert "lspci has 0, the host's own source has 1" in reasons["node of 0000:03:00.0"]
    assert "another device there" in reasons["0000:00:00.0"]
    assert "omitted" in reasons["0000:07:00.0"]


def test_laying_the_same_listing_twice_changes_nothing_more() -> None:
    once = overlay_lspci(_host(), SMALL)
    twice = overlay_lspci(once, SMALL)
    assert replace(twice, gaps=()) == replace(once, gaps=())


@needs_hgx
def test_the_hgx_h100_is_read_whole() -> None:
    host = host_from_lspci(HGX.read_text(), "hgx")
    counts = summarise(host)
    assert (counts.pci_functions, counts.gpus, counts.nvswitches) == (517, 8, 4)
    gpus = host.devices_of_kind(DeviceKind.GPU)
    nodes = [" ".join(f"{d.bdf.bus:02x}" for d in gpus if d.node == node) for node in (0, 1)]
    assert nodes == ["19 3b 4c 5d", "9b bb cb db"]
    # Each GPU shares its switch with the ConnectX-7 on the next bus.
    for gpu in gpus:
        nic = Bdf(0, gpu.bdf.bus + 1, 0, 0)
        assert host.switch_above(gpu.bdf) == host.switch_above(nic) is not None
        assert host.bridges_above(gpu.bdf)[-1].bridge is not None
    assert {d.bridge.port_type for d in host.pci_devices if d.bridge} == set(PortType)
    assert sum(bar.size_bytes for bar in gpus[0].bars) == (128 << 30) + (48 << 20)
    assert len(host.root_complexes) == 24
    assert {root.node for root in host.root_complexes} == {0, 1}
    assert [d.name for d in host.pci_devices if "Matrox" in (d.name or "")] != []


@needs_hgx
def test_mutated_listings_are_read_or_refused_and_nothing_else() -> None:
    base = "\n".join(HGX.read_text().splitlines()[1470:1560]) + "\n" + SMALL
    rng = random.Random(7)
    for _ in range(400):
        characters = list(base)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(characters))
            characters[at] = rng.choice("\n\t 0:[]()x9f\x00é")
        try:
            host_from_lspci("".join(characters), "mutated")
        except HomenodeError:
            continue


def _cut_gaps(text: str) -> list[str]:
    host = host_from_lspci(text, "host")
    return [gap.subject for gap in host.gaps if gap.subject.startswith("PCI functions ")]


def test_a_listing_that_is_cut_anywhere_has_a_gap() -> None:
    """Behind the first two entries, wherever its cut falls: in a line, between lines, blocks."""
    window = "\tMemory behind bridge: 90100000-901fffff [size=1M]\n"
    whole = SMALL.replace("\tBus: primary=02", window + "\tBus: primary=02")
    first, last = whole.index("01:00.0"), whole.index("03:00.0")
    all_listed = whole.index("\n", last) + 1
    modules = whole.rindex("\tKernel modules: ")  # of which nothing is read
    for at in range(first, len(whole), 3):
        between_lines = "\n" in whole[at - 1 : at + 1] or at >= modules + len("\tKernel modules")
        assert _cut_gaps(whole[:at]) or (between_lines and at >= all_listed), whole[:at][-80:]


def test_a_number_that_was_cut_is_not_read() -> None:
    text = SMALL.replace("NUMA node: 0\n\tIOMMU", "NUMA node: 12\n\tIOMMU")
    cut = text[: text.index("NUMA node: 12") + len("NUMA node: 1")]
    assert parse(cut)[-1].bdf == Bdf(0, 3, 0, 0)
    assert parse(cut)[-1].numa_node is None


@pytest.mark.parametrize(
    ("window", "stated"),
    [
        ("Memory behind bridge: 90100000-901fffff [size=1M]", True),
        ("Prefetchable memory behind bridge: 0000000095900000-00000000959fffff", True),
        ("Memory behind bridge: fff00000-000fffff [disabled]", False),
        ("Memory behind bridge: 90100000-901fffff [size=1M] [32-bit]", True),
        ("Prefetchable memory behind bridge: [disabled]", False),
        ("I/O behind bridge: 00001000-00001fff [size=4K]", False),
    ],
)
def test_a_bridge_that_passes_memory_to_nothing_is_a_gap(window: str, stated: bool) -> None:
    bridge = (
        "00:01.0 PCI bridge: Intel Corporation Device 352a\n"
        f"\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0\n\t{window}\n"
    )
    assert bool(_cut_gaps(bridge)) is stated


@needs_hgx
def test_half_of_a_large_listing_is_not_mistaken_for_all_of_it() -> None:
    text = HGX.read_text(errors="replace")
    assert _cut_gaps(text) == []
    for size in range(100_000, len(text), 300_000):
        half = host_from_lspci(text[:size], "host")
        assert (
            any("ends within a line" in gap.reason for gap in half.gaps) or text[size - 1] == "\n"
        )
