"""What ethtool, devlink, bridge and nvme say of each device, and lines of the kernel's log."""

import pytest

from homenode.machine.snapshot.contents import UNREAD, kernel_line
from homenode.machine.snapshot.gather import gather
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.tools.device_listings import parse_by_address, parse_listing, parse_vlans

ETHTOOL = """Ring parameters for ens1np0:
Pre-set maximums:
RX:\t\t\t8192
RX Mini:\t\tn/a
Current hardware settings:
RX:\t\t\t1024

Coalesce parameters for ibs2:
Adaptive RX: on  TX: off
rx-usecs:\t8

Settings for ibs2:
\tSupported link modes:   100000baseCR4/Full
\t                        400000baseCR4/Full
\tLink detected: yes
"""
SMART = """Smart Log for NVME device:nvme3 namespace-id:ffffffff
critical_warning\t\t\t: 0x4
media_errors\t\t\t\t: 41
"""
DEVLINK = """{"info": {"pci/0000:3b:00.0": {"driver": "mlx5_core", "versions": {"running":
{"fw.version": "28.39.1002"}}}, "auxiliary/mlx5_core.sf.1": {}}}"""
VLANS = '[{"ifname": "ens1np0", "vlans": [{"vlan": 1, "flags": ["PVID"]}, {"vlan": 200}]}]'


def test_values_are_named_by_their_block_and_part() -> None:
    found = parse_listing(ETHTOOL, "ethtool")
    assert found["ens1np0"] == {
        "ethtool/ring/Pre-set maximums/RX": "8192",
        "ethtool/ring/Pre-set maximums/RX Mini": "n/a",
        "ethtool/ring/Current hardware settings/RX": "1024",
    }
    assert found["ibs2"]["ethtool/coalesce/TX"] == "off"
    modes = found["ibs2"]["ethtool/settings/Supported link modes"]
    assert modes == "100000baseCR4/Full 400000baseCR4/Full"
    assert parse_listing(SMART, "nvme")["nvme3"]["nvme/smart log/media_errors"] == "41"


def test_json_is_read_by_address_and_by_port() -> None:
    assert parse_by_address(DEVLINK, "devlink") == {
        "0000:3b:00.0": {
            "devlink/info/driver": "mlx5_core",
            "devlink/info/versions/running/fw.version": "28.39.1002",
        }
    }
    vlans = parse_vlans(VLANS, "bridge")["ens1np0"]
    assert (vlans["bridge/0/vlan"], vlans["bridge/0/flags"]) == ("1", "1 PVID")
    assert vlans["bridge/1/vlan"] == "200"


@pytest.mark.parametrize(
    "line, about",
    [
        (
            "[1.0] NVRM: Xid (PCI:0000:3B:00): 79, pid=1, name=x",
            ("critical", "GPU", "0000:3b:00.0"),
        ),
        ("[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault", None),
        ("[    1.0][ T123] NVRM: Xid (PCI:0000:3b:00): 79" + ", x" * 200, "critical"),
        ("amdgpu 0000:c1:00.0: [drm] *ERROR* ring gfx timeout", "critical"),
        ("{1}[Hardware Error]: event severity: fatal", "warning"),
        ("[1.0] nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 3", "critical"),
        ("[1.0] mlx5_core 0000:1a:00.0: firmware version: 28.39.1002", None),
        (
            "[1.0] mlx5_core 0000:1a:00.0: Port module event[error]: module 0, Cable error",
            "warning",
        ),
        ("[1.0] pci 0000:3b:00.0: BAR 2: no space for [mem size 0x1000 64bit pref]", "warning"),
        ("[1.0] pci 0000:00:02.0: BAR 14: no space for [mem size 0x00200000]", None),
        ("[1.0] pci 0000:3b:00.0: BAR 2 [mem 0x1-0x2 64bit]: assigned", "undone"),
        ("[1.0] EDAC MC3: 1 CE memory read error on P0_DIMM_A1", "warning"),
        ("[1.0] EDAC MC3: Giving out device to module skx_edac", None),
    ],
)
def test_lines_of_failed_hardware_are_known(line: str, about: tuple[str, ...] | str | None) -> None:
    found = kernel_line(line)
    seen = found and (found[1] if isinstance(about, str) else found[1:4])
    assert seen == about


def test_a_glob_of_all_files_leaves_out_whose_a_device_is() -> None:
    device = "/sys/devices/pci0000:00/0000:00:01.0"
    names = ("address", "ifalias", "tx_queue_len", "a_later_file")
    files = {f"{device}/net/ens1/{name}": "17\n" for name in names}
    links = {"/sys/bus/pci/devices/0000:00:01.0": "../../../devices/pci0000:00/0000:00:01.0"}
    kept = gather(MemorySnapshot("host", files, links, {})).snapshot.files
    assert {path.rpartition("/")[2] for path in kept} == {"tx_queue_len", "a_later_file"}
    assert {"address", "ifalias", "serial", "rom", "vpd", "remove"} <= UNREAD
