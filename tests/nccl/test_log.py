"""What NCCL's log says of the topology file, in the words of its own messages."""

import pytest

from homenode.findings import Severity
from homenode.nccl.log import LogVerdict, read_log

LOADED = """\
node:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>
node:1:1 [0] NCCL INFO NCCL_TOPO_FILE set by environment to /etc/nccl/t.xml
node:1:1 [0] NCCL INFO Loading topology file /etc/nccl/t.xml
node:1:1 [0] NCCL INFO Loading unnamed topology
node:1:1 [0] NCCL INFO Could not find real path of /sys/class/pci_bus/ffff:ff/../../ffff:ff:01.0
node:1:1 [0] NCCL INFO Attribute latency of node net not found
node:1:1 [0] NCCL INFO === System : maxBw 48.0 totalBw 48.0 ===
node:1:2 [1] NCCL INFO Loading topology file /etc/nccl/t.xml
"""


def log(*lines: str) -> LogVerdict:
    return read_log(LOADED + "".join(f"node:1:1 [0] NCCL {line}\n" for line in lines), "nccl.log")


def ids(verdict: LogVerdict) -> dict[str, Severity]:
    return {finding.id: finding.severity for finding in verdict.findings}


def test_a_file_that_was_loaded_in_peace_gives_no_finding() -> None:
    verdict = log()
    assert verdict.loaded == ("/etc/nccl/t.xml",) and not verdict.findings
    assert "loaded 2 times" in verdict.checked[0]


def test_a_log_that_loads_no_file_is_critical_where_there_is_one_to_load() -> None:
    text = "h:1:1 [0] NCCL INFO === System : maxBw 24.0 totalBw 24.0 ===\n"
    verdict = read_log(text, "nccl.log", expects_file=True)
    assert ids(verdict) == {"nccl-log-not-used": Severity.CRITICAL}
    assert ids(read_log(text, "nccl.log")) == {}


def test_a_log_that_says_nothing_either_way_is_inconclusive() -> None:
    for text in ("", "words\n", "h:1:1 [0] NCCL INFO NET/IB : Using mlx5_0\n"):
        verdict = read_log(text, "nccl.log")
        assert ids(verdict) == {"nccl-log-silent": Severity.INCONCLUSIVE}
        assert "NCCL_DEBUG=INFO" in (verdict.findings[0].fix or "")


def test_a_file_that_cannot_be_opened_is_named() -> None:
    text = (
        "h:1:1 [0] NCCL INFO NCCL_TOPO_FILE set by environment to /no\n"
        "h:1:1 [0] NCCL INFO Could not open XML topology file /no : No such file or directory\n"
    )
    verdict = read_log(text, "nccl.log")
    assert ids(verdict) == {"nccl-log-not-opened": Severity.CRITICAL}
    assert verdict.findings[0].subject == "/no"


def test_another_file_than_the_one_asked_for_is_named() -> None:
    verdict = log("INFO NCCL_TOPO_FILE set by environment to /other.xml")
    assert ids(verdict) == {"nccl-log-other-file": Severity.WARNING}


def test_what_the_parser_and_the_reader_complain_of_is_reported() -> None:
    for line in (
        "WARN XML Parse error : expecting '<', got '\t'",
        "WARN XML Parse : expected >, got '?'",
        "WARN XML Mismatch : cpu / pci",
        "WARN XML Topology has wrong version 1, 2 needed",
        "WARN Error : XML parser is limited to 256 nodes",
        "WARN Error : too many XML nodes (max 256)",
        "WARN Attribute class of node pci not found",
    ):
        assert ids(log(line)) == {"nccl-log-broken": Severity.CRITICAL}, line


def test_a_bus_id_that_no_device_has_is_critical_but_not_that_of_a_virtual_switch() -> None:
    line = "INFO Could not find real path of /sys/class/pci_bus/0000:21/../../0000:21:00.0"
    verdict = log(line, line)
    (found,) = verdict.findings
    assert (found.id, found.subject) == ("nccl-log-no-device", "0000:21:00.0")
    assert found.source == f"nccl.log:{LOADED.count(chr(10)) + 1}"


def test_words_and_elements_that_nccl_does_not_know_are_warnings() -> None:
    verdict = log(
        "INFO KV Convert to int : could not find value of '32.0 GT/s' in dictionary, "
        "falling back to 60",
        "INFO Ignoring element nvswitches",
        "INFO XML Parse : Ignoring extra attributes (max 16)",
    )
    assert ids(verdict) == {
        "nccl-log-no-word": Severity.WARNING,
        "nccl-log-ignored": Severity.WARNING,
    }
    assert "'32.0 GT/s'" in [f.subject for f in verdict.findings]


HEALTHY = """\
n:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n:1:2 [0] NCCL INFO === System : maxBw 48.0 totalBw 370.8 ===
n:1:2 [0] NCCL INFO + PCI[48.0] - PCI/0-65000 (1000c03015d9100c)
n:1:2 [0] NCCL INFO              + PCI[48.0] - NIC/0-67000
n:1:2 [0] NCCL INFO GPU/0-68000 :NET/0-c (3/48.0/PIX) NET/0-d (5/24.0/PHB)
n:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [receive] via NET/IB/0/GDRDMA
n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 9[1] [send] via NET/IB/0(1)/GDRDMA
n:1:2 [0] NCCL INFO 16 coll channels, 16 nvls channels, 32 p2p channels
"""


def test_a_healthy_log_is_healthy_and_says_what_it_uses() -> None:
    verdict = read_log(HEALTHY, "nccl.log")
    assert not verdict.findings
    shown = " ".join(verdict.checked)
    assert "GPUDirect RDMA on 2 of 2" in shown and "relaxed ordering on" in shown
    assert "2 NICs by verbs" in shown and "16 channels" in shown


TROUBLES = {
    "nccl-log-slow-link": "+ PCI[0.2] - PCI/0-69000 (104c823200000000)",
    "nccl-log-socket": "Channel 01/0 : 1[1] -> 8[0] [receive] via NET/Socket/0",
    "nccl-log-gdr-off": "Channel 01/0 : 1[1] -> 8[0] [receive] via NET/IB/0",
    "nccl-log-completion": "NET/IB : Got completion from peer fe80::1%ib0<33397> with error 4, "
    "opcode 32611, len 32611, vendor err 81 (Send)",
}


@pytest.mark.parametrize("id", TROUBLES)
def test_each_trouble_of_the_network_is_named_with_its_line_and_nothing_else(id: str) -> None:
    said = f"n:1:2 [0] NCCL INFO {TROUBLES[id]}\n"
    verdict = read_log(f"{HEALTHY}not NCCL's\n{said}{said}", "nccl.log")
    line = HEALTHY.count("\n") + 2
    assert [(one.id, one.source) for one in verdict.findings] == [(id, f"nccl.log:{line}")]


def test_gpudirect_rdma_that_is_off_has_nccls_own_reason() -> None:
    said = {
        "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'": "nvidia-peermem",
        "NET/IB : GPU Direct RDMA Disabled for GPU 1c000 / HCA 0 (distance 8 > 5)": "-o topo.xml",
        "GPU/0-1 :GPU/0-1 (0/5000.0/LOC) NET/0-0 (5/24.0/PHB)\n"
        "n:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 8[0] [send] via NET/IB/0": "-o topo.xml",
    }
    for line, cure in said.items():
        (found,) = read_log(f"n:1:2 [0] NCCL INFO {line}\n", "nccl.log").findings
        assert found.id == "nccl-log-gdr-off" and cure in (found.fix or ""), line
        assert found.source == "nccl.log:1"


def test_other_completion_errors_are_not_put_down_to_acs() -> None:
    line = (
        "NET/IB : Got completion from peer 10.0.0.1<5> with status=12 opcode=0 len=0 vendor err 129"
    )
    assert not read_log(f"{HEALTHY}n:1:2 [0] NCCL WARN {line}\n", "nccl.log").findings


def test_a_long_or_hostile_line_is_shortened() -> None:
    verdict = log("WARN XML Parse " + "x" * 10_000)
    assert len(verdict.findings[0].observed) <= 160
