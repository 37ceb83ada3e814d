"""Discovery of the PCI tree: places, port types, links, BARs, kinds and nodes."""

from collections.abc import Mapping

import pytest

from homenode.bdf import Bdf
from homenode.machine.discover.host import discover
from homenode.machine.discover.pci_tree import parse_config
from homenode.machine.pci import DeviceKind, PciBar, PciLink, PortType, classify_device, is_emulated
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.topology import Host
from tests.sysfs_trees import NODE, PCI, cpu_files, pci_function, snapshot

GPU = "0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0"
SWITCHED = {
    **pci_function("0000:00:01.0", "060400", "8086:352a"),
    **pci_function("0000:00:01.0/0000:01:00.0", "060400", "1000:c030"),
    **pci_function("0000:00:01.0/0000:01:00.0/0000:02:00.0", "060400", "1000:c030"),
    **pci_function("0000:00:01.0/0000:01:00.0/0000:02:01.0", "060400", "1000:c030"),
    **pci_function(GPU, "030200", "10de:2330"),
}


def _host(
    files: Mapping[str, str],
    links: Mapping[str, str] | None = None,
    commands: Mapping[str, str] | None = None,
) -> Host:
    return discover(snapshot({**cpu_files(), **files}, links=links, commands=commands))


def test_the_tree_is_read_from_where_the_directories_lie() -> None:
    host = _host(SWITCHED)
    gpu = Bdf.parse("03:00.0")
    above = " ".join(str(bridge.bdf) for bridge in host.bridges_above(gpu))
    assert above == "0000:02:00.0 0000:01:00.0 0000:00:01.0"
    assert host.switch_above(gpu) == Bdf.parse("01:00.0")
    (root,) = host.root_complexes
    assert (root.name, root.domain, root.bus, root.node) == ("pci0000:00", 0, 0, 0)


def test_port_types_without_config_space_come_from_the_tree() -> None:
    host = _host(SWITCHED)
    types = {str(d.bdf): d.bridge.port_type for d in host.pci_devices if d.bridge}
    assert types == {
        "0000:00:01.0": PortType.ROOT_PORT,
        "0000:01:00.0": PortType.SWITCH_UPSTREAM,
        "0000:02:00.0": PortType.SWITCH_DOWNSTREAM,
        "0000:02:01.0": PortType.SWITCH_DOWNSTREAM,
    }
    assert any(gap.subject == "port types of 4 PCI bridges" for gap in host.gaps)


def test_both_ports_of_qemus_switch_are_emulated() -> None:
    upstream, downstream = "0000:00:01.0", "0000:00:01.0/0000:01:00.0"
    files = {
        **pci_function(upstream, "060400", "104c:8232"),
        **pci_function(downstream, "060400", "104c:8233"),
    }
    assert [is_emulated(port) for port in _host(files).pci_devices] == [True, True]


def test_a_bridge_with_a_console_behind_it_is_no_switch() -> None:
    files = {
        **pci_function("0000:00:1c.0", "060400", "8086:1bbe"),
        **pci_function("0000:00:1c.0/0000:02:00.0", "060400", "1a03:1150"),
        **pci_function("0000:00:1c.0/0000:02:00.0/0000:03:00.0", "030000", "1a03:2000"),
        **pci_function("0000:00:1e.0", "060401", "8086:244e"),
    }
    host = _host(files)
    types = {str(d.bdf): d.bridge.port_type for d in host.pci_devices if d.bridge}
    assert types["0000:00:1c.0"] is PortType.ROOT_PORT
    assert types["0000:02:00.0"] is PortType.PCI_BRIDGE
    assert types["0000:00:1e.0"] is PortType.PCI_BRIDGE


def _config(port_type: int | None, length: int = 256) -> bytes:
    config = bytearray(length)
    config[0x06], config[0x0E], config[0x34] = 0x10, 0x01, 0x40
    config[0x18:0x1B] = (0, 3, 7)
    if length > 64:
        config[0x40:0x42] = (0x05, 0x60)  # MSI first
        if port_type is not None:
            config[0x60:0x64] = (0x10, 0x00, port_type << 4 | 2, 0x00)
    return bytes(config)


@pytest.mark.parametrize(
    ("port_type", "expected"),
    [
        (4, PortType.ROOT_PORT),
        (5, PortType.SWITCH_UPSTREAM),
        (6, PortType.SWITCH_DOWNSTREAM),
        (7, PortType.PCI_BRIDGE),
        (8, PortType.PCI_BRIDGE),
        (None, PortType.PCI_BRIDGE),
    ],
)
def test_config_space_tells_the_port_type(port_type: int | None, expected: PortType) -> None:
    header = parse_config(_config(port_type))
    assert header is not None
    assert (header.port_type, header.secondary_bus, header.subordinate_bus) == (expected, 3, 7)


def test_the_first_64_bytes_of_config_space_tell_only_buses() -> None:
    header = parse_config(_config(None, length=64))
    assert header is not None and header.port_type is None and header.secondary_bus == 3
    assert parse_config(b"\x00" * 63) is None


def test_a_circle_of_capabilities_ends() -> None:
    config = bytearray(_config(None))
    config[0x60:0x62] = (0x09, 0x40)
    assert parse_config(bytes(config)) is not None


def test_the_config_file_decides_over_the_tree_and_sysfs_over_its_buses() -> None:
    config = _config(6).decode("utf-8", "surrogateescape")
    files = {
        **pci_function("0000:00:01.0", "060400", "8086:352a"),
        f"{PCI}/0000:00:01.0/config": config,
    }
    bridge = _host(files).pci_devices[0].bridge
    assert bridge is not None and bridge.port_type is PortType.SWITCH_DOWNSTREAM
    assert (bridge.secondary_bus, bridge.subordinate_bus) == (3, 7)
    files |= {
        f"{PCI}/0000:00:01.0/secondary_bus_number": "1\n",
        f"{PCI}/0000:00:01.0/subordinate_bus_number": "2\n",
    }
    bridge = _host(files).pci_devices[0].bridge
    assert bridge is not None and (bridge.secondary_bus, bridge.subordinate_bus) == (1, 2)


def test_buses_that_nothing_tells_are_those_found_below() -> None:
    bridge = _host(SWITCHED).device_at[Bdf.parse("00:01.0")].bridge
    assert bridge is not None and (bridge.secondary_bus, bridge.subordinate_bus) == (1, 3)


def test_links_bars_driver_group_and_sriov_are_read() -> None:
    directory = f"{PCI}/{GPU}"
    empty = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
    resource = (
        f"0x0000214042000000 0x0000214042ffffff 0x000000000014220c\n{empty}"
        f"0x0000210000000000 0x0000211fffffffff 0x000000000014220c\n{empty}"
        "0x000000000000f000 0x000000000000f01f 0x0000000000040101"
    )
    files = {
        **SWITCHED,
        f"{directory}/current_link_speed": "16.0 GT/s PCIe\n",
        f"{directory}/current_link_width": "16\n",
        f"{directory}/max_link_speed": "32.0 GT/s PCIe\n",
        f"{directory}/max_link_width": "16\n",
        f"{directory}/resource": resource,
        f"{directory}/sriov_totalvfs": "32\n",
        f"{directory}/sriov_numvfs": "0\n",
        f"{directory}/subsystem_vendor": "0x10de\n",
        f"{directory}/local_cpulist": "0-1,4-5\n",
    }
    links = {
        f"{directory}/driver": "../../../../../../bus/pci/drivers/vfio-pci",
        f"{directory}/iommu_group": "../../../../../../kernel/iommu_groups/17",
    }
    gpu = _host(files, links=links).device_at[Bdf.parse("03:00.0")]
    assert gpu.link == PciLink(16.0, 16, 32.0, 16)
    assert gpu.bars == (
        PciBar(0, 16 << 20, True, True),
        PciBar(2, 128 << 30, True, True),
        PciBar(4, 32, False, False, is_memory=False),
    )
    assert (gpu.driver, gpu.iommu_group) == ("vfio-pci", 17)
    assert (gpu.sriov_total_vfs, gpu.sriov_num_vfs, gpu.subsystem_vendor_id) == (32, 0, 0x10DE)
    assert str(gpu.local_pus) == "0-1,4-5"


@pytest.mark.parametrize("width", ["0", "255"])
def test_a_link_that_is_down_or_unknown_has_no_speed_and_width(width: str) -> None:
    directory = f"{PCI}/0000:00:01.0"
    files = {
        **pci_function("0000:00:01.0", "060400", "8086:352a"),
        f"{directory}/current_link_speed": "Unknown\n",
        f"{directory}/current_link_width": f"{width}\n",
        f"{directory}/max_link_speed": "8 GT/s\n",
        f"{directory}/max_link_width": "4\n",
    }
    assert _host(files).pci_devices[0].link == PciLink(None, None, 8.0, 4)


def test_a_virtual_function_knows_its_physical_one() -> None:
    files = {
        **pci_function("0000:00:02.0", "020000", "15b3:101d"),
        **pci_function("0000:00:02.1", "020000", "15b3:101e"),
    }
    links = {f"{PCI}/0000:00:02.1/physfn": "../0000:00:02.0"}
    vf = _host(files, links=links).device_at[Bdf.parse("00:02.1")]
    assert vf.physical_function == Bdf.parse("00:02.0")


@pytest.mark.parametrize(
    ("class_code", "vendor", "device", "kind"),
    [
        (0x030200, 0x10DE, 0x2330, DeviceKind.GPU),
        (0x030000, 0x10DE, 0x2684, DeviceKind.GPU),
        (0x038000, 0x1002, 0x7408, DeviceKind.GPU),
        (0x120000, 0x1002, 0x74A1, DeviceKind.GPU),
        (0x030000, 0x1A03, 0x2000, DeviceKind.OTHER),
        (0x030000, 0x102B, 0x0536, DeviceKind.OTHER),
        (0x030000, 0x1002, 0x515E, DeviceKind.OTHER),
        (0x030000, 0x1002, 0x4752, DeviceKind.OTHER),
        (0x030000, None, None, DeviceKind.OTHER),
        (0x020000, 0x8086, 0x1572, DeviceKind.NIC),
        (0x020700, 0x15B3, 0x1021, DeviceKind.NIC),
        (0x020800, 0x8086, 0x24F0, DeviceKind.NIC),
        (0x068000, 0x10DE, 0x22A3, DeviceKind.NVSWITCH),
        (0x068000, 0x1000, 0x02B2, DeviceKind.OTHER),
        (0x010802, 0x144D, 0xA80A, DeviceKind.NVME),
        (0x040300, 0x10DE, 0x22BA, DeviceKind.AUDIO),
        (0x060400, 0x8086, 0x352A, DeviceKind.BRIDGE),
        (0x060000, 0x8086, 0x09A2, DeviceKind.BRIDGE),
        (0x080700, 0x8086, 0x0B23, DeviceKind.OTHER),
    ],
)
def test_class_and_ids_say_what_a_function_is(
    class_code: int, vendor: int | None, device: int | None, kind: DeviceKind
) -> None:
    assert classify_device(class_code, vendor, device) is kind


def test_a_gpu_whose_firmware_gives_no_node_has_none_and_a_gap() -> None:
    files = {**SWITCHED, f"{PCI}/{GPU}/numa_node": "-1\n", f"{PCI}/{GPU}/local_cpulist": "0-7\n"}
    host = _host(files)
    assert host.device_at[Bdf.parse("03:00.0")].node is None
    gap = next(gap for gap in host.gaps if gap.subject == "node of 0000:03:00.0")
    assert gap.reason == "the firmware reports no node: numa_node is -1"


def test_a_node_that_is_not_online_is_no_node() -> None:
    files = {**SWITCHED, f"{PCI}/{GPU}/numa_node": "7\n"}
    host = _host(files)
    assert host.device_at[Bdf.parse("03:00.0")].node is None
    assert any("7, a node that is not online" in gap.reason for gap in host.gaps)


@pytest.mark.parametrize(
    ("local", "node"), [("2-3,6-7", 1), ("2-3", 1), ("0", 0), ("0,2", None), ("", None)]
)
def test_where_only_local_pus_are_known_they_give_the_node(local: str, node: int | None) -> None:
    files = {**SWITCHED, f"{PCI}/{GPU}/local_cpulist": f"{local}\n"}
    del files[f"{PCI}/{GPU}/numa_node"]
    for numa_node in ({}, {f"{PCI}/{GPU}/numa_node": "-1\n"}):
        assert _host({**files, **numa_node}).device_at[Bdf.parse("03:00.0")].node == node


def test_a_volume_management_device_has_a_root_complex_of_its_own() -> None:
    vmd = "0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    files = {
        **pci_function("0000:00:0e.0", "010400", "8086:467f"),
        **pci_function("0000:00:0e.0/pci10000:e0/10000:e0:06.0", "060400", "8086:a733"),
        **pci_function(vmd, "010802", "144d:a80a"),
    }
    host = _host(files)
    disk = host.device_at[Bdf.parse("10000:e1:00.0")]
    assert (disk.kind, disk.root_complex) == (DeviceKind.NVME, "pci10000:e0")
    assert disk.parent == Bdf.parse("10000:e0:06.0")
    assert [root.name for root in host.root_complexes] == ["pci0000:00", "pci10000:e0"]


def test_root_complexes_on_two_nodes_have_no_node() -> None:
    files = {
        **pci_function("0000:00:01.0", "060400", "8086:352a", node=0),
        **pci_function("0000:00:02.0", "060400", "8086:352a", node=1),
    }
    host = _host(files)
    assert host.root_complexes[0].node is None
    assert any(gap.subject == "node of root complex pci0000:00" for gap in host.gaps)


def test_a_function_without_a_class_is_of_no_known_kind() -> None:
    directory = f"{PCI}/0000:00:02.0"
    link = {"/sys/bus/pci/devices/0000:00:02.0": directory}
    host = _host({**SWITCHED, f"{directory}/vendor": "0x8086\n"}, links=link)
    assert len(host.pci_devices) == len(_host(SWITCHED).pci_devices) + 1
    odd = host.device_at[Bdf.parse("00:02.0")]
    assert (odd.kind, odd.vendor_id) == (DeviceKind.OTHER, 0x8086)
    assert "class of 0000:00:02.0" in {gap.subject for gap in host.gaps}


def test_configuration_space_stands_in_for_a_class_that_is_missing_or_malformed() -> None:
    directory = f"{PCI}/{GPU}"
    config = bytearray(64)
    config[0x09:0x0C] = bytes((0x00, 0x02, 0x03))
    files = {**SWITCHED, f"{directory}/config": config.decode("utf-8", "surrogateescape")}
    host = _host({**files, f"{directory}/class": "banana\n"})
    assert host.device_at[Bdf.parse("03:00.0")].kind is DeviceKind.GPU


@pytest.mark.parametrize(
    ("name", "target", "subject"),
    [
        ("0000:00:09.0", "0000:00:09.0", "0000:00:09.0"),
        ("banana", "0000:00:01.0", "PCI function 'banana'"),
    ],
)
def test_a_link_to_nowhere_or_without_an_address_is_a_gap(
    name: str, target: str, subject: str
) -> None:
    host = _host(SWITCHED, links={f"/sys/bus/pci/devices/{name}": f"{PCI}/{target}"})
    assert host.pci_devices == _host(SWITCHED).pci_devices
    assert subject in {gap.subject for gap in host.gaps}


@pytest.mark.parametrize("gone", ["0000:00:01.0", "0000:01:00.0", "0000:02:00.0"])
def test_a_bridge_that_only_the_functions_below_it_tell_of_is_a_bridge(gone: str) -> None:
    whole = _host(SWITCHED)
    kept = {key: text for key, text in SWITCHED.items() if f"{gone}/class" not in key}
    host = _host(kept)
    assert [device.bdf for device in host.pci_devices] == [d.bdf for d in whole.pci_devices]
    gpu = Bdf.parse("03:00.0")
    assert [b.bdf for b in host.bridges_above(gpu)] == [b.bdf for b in whole.bridges_above(gpu)]
    assert host.switch_above(gpu) == whole.switch_above(gpu)
    assert gone in {gap.subject for gap in host.gaps}


def test_a_directory_that_is_no_address_ends_the_way_up() -> None:
    host = _host(
        {
            key.replace("/0000:00:01.0/", "/banana/"): text
            for key, text in SWITCHED.items()
            if "0000:01:00.0/class" not in key
        }
    )
    gpu = Bdf.parse("03:00.0")
    assert str(host.bridges_above(gpu)[-1].bdf) == "0000:01:00.0"


@pytest.mark.parametrize(
    "file",
    """
        vendor numa_node resource current_link_width local_cpulist aer_dev_fatal sriov_numvfs class
    """.split(),
)
def test_a_malformed_file_of_one_function_is_a_gap(file: str) -> None:
    host = _host({**SWITCHED, f"{PCI}/{GPU}/{file}": "what 0x\n"})
    whole = {device.bdf: device for device in _host(SWITCHED).pci_devices}
    gpu = Bdf.parse("03:00.0")
    assert [d for d in host.pci_devices if d.bdf != gpu] == [
        d for bdf, d in whole.items() if bdf != gpu
    ]
    assert host.find_device(gpu) is not None
    assert any(f"/{file}" in gap.reason and "found 'what 0x'" in gap.reason for gap in host.gaps)


def test_an_unreadable_directory_of_pci_functions_is_not_called_absent() -> None:
    host = discover(MemorySnapshot("a tree", {**cpu_files(), "/sys/bus/pci/devices": ""}))
    (gap,) = (gap for gap in host.gaps if gap.subject == "PCI functions")
    assert "cannot be read" in gap.reason


def test_a_tree_without_pci_says_so() -> None:
    host = _host({})
    assert host.pci_devices == ()
    assert any(gap.subject == "PCI functions" for gap in host.gaps)


def test_lspci_of_the_same_host_adds_names_and_finds_differences() -> None:
    listing = (
        "0000:00:01.0 PCI bridge [0604]: Intel Corporation Device [8086:352a] (rev 04)\n"
        "\tCapabilities: [40] Express (v2) Root Port (Slot-), MSI 00\n\n"
        "0000:03:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100] [10de:2330] (rev a1)\n"
        "\tNUMA node: 1\n\n"
        "0000:09:00.0 VGA compatible controller [0300]: ASPEED [1a03:2000]\n"
    )
    host = _host(SWITCHED, commands={"lspci": listing})
    gpu = host.device_at[Bdf.parse("03:00.0")]
    assert (gpu.name, gpu.node) == ("NVIDIA Corporation GH100 [H100]", 0)
    reasons = {gap.subject: gap.reason for gap in host.gaps}
    assert reasons["node of 0000:03:00.0"] == "lspci says 1, sysfs says 0; used sysfs"
    assert reasons["0000:09:00.0"] == "sysfs does not have them"
    assert reasons["3 PCI functions (0000:01:00.0, ...)"] == "lspci does not have them"


def test_the_node_directory_may_be_absent_on_a_host_with_pci() -> None:
    host = discover(snapshot({**cpu_files(), **SWITCHED}, without=(NODE,)))
    assert {device.node for device in host.pci_devices} == {0}


def test_a_function_that_the_bus_does_not_list_is_a_gap() -> None:
    whole = snapshot({**cpu_files(), **SWITCHED})
    links = {p: to for p, to in whole.links.items() if not p.endswith("0000:03:00.0")}
    host = discover(MemorySnapshot("a tree", whole.files, links))
    assert host.find_device(Bdf.parse("03:00.0")) is None
    gap = next(gap for gap in host.gaps if gap.subject == "0000:03:00.0")
    assert "not in /sys/bus/pci/devices" in gap.reason


def test_fields_that_a_gpu_lacks_are_gaps() -> None:
    subjects = {gap.subject for gap in _host(SWITCHED).gaps}
    assert {f"{name} of 0000:03:00.0" for name in ("link", "BARs", "IOMMU group")} <= subjects
