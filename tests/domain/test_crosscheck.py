"""Cross-checks and findings of a document: what libvirt takes in silence is found."""

import pytest

from homenode.findings import Finding
from homenode.vm.domain.crosscheck import check_document, check_references
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import read_vm
from homenode.vm.plan import Aperture, Plan, with_vm
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import NAMES, sample
from tests.domain_plans import hand_plan

EXPANDER = (
    "<controller type='pci' index='{i}' model='pcie-expander-bus'><target busNr='{nr}'>{node}"
    "</target><address type='pci' bus='0' slot='{i}'/></controller>"
)
PORT = (
    "<controller type='pci' index='{i}' model='pcie-root-port'>"
    "<address type='pci' bus='{bus}' slot='{slot}' function='{fn}'/></controller>"
)
ROOT = "<controller type='pci' index='0' model='pcie-root'/>"


def expander(i: int, nr: int, node: str = "") -> str:
    return EXPANDER.format(i=i, nr=nr, node=node)


def port(i: int, bus: int, slot: int = 0, fn: int = 0) -> str:
    return PORT.format(i=i, bus=bus, slot=slot, fn=fn)


def found(inside: str, devices: str = "", vcpus: int = 4, memory: int = 4) -> dict[str, str]:
    xml = (
        f"<domain type='kvm'><name>d</name><memory unit='GiB'>{memory}</memory>"
        f"<vcpu>{vcpus}</vcpu>{inside}<devices>{devices}</devices></domain>"
    )
    return {
        broken.id: str(broken) for broken in check_references(parse_document(xml.encode(), "d"))
    }


@pytest.mark.parametrize("name", NAMES)
def test_our_samples_hold_together(name: str) -> None:
    assert check_references(parse_document(sample(name), name)) == ()


@pytest.mark.parametrize("dimm", ["2", "8"])
def test_memory_may_be_that_of_the_cells_without_the_memory_devices(dimm: str) -> None:
    device = f"<memory model='dimm'><target><size unit='GiB'>{dimm}</size></target></memory>"
    for memory in (4, 0):  # 0: libvirt adds up the cells
        assert "memory-sum" not in found(cells("0-1", "2-3"), device, memory=memory)


def test_each_cell_is_whole_kib_as_libvirt_rounds_it() -> None:
    inside = "".join(
        f"<cell id='{i}' cpus='{i * 2}-{i * 2 + 1}' memory='{size}' unit='b'/>"
        for i, size in enumerate((2_000_000_001, (4 << 30) - 2_000_000_001))
    )
    assert "memory-sum" not in found(f"<cpu><numa>{inside}</numa></cpu>")
    less = inside.replace("2000000001", "1999990000", 1)
    assert "memory-sum" in found(f"<cpu><numa>{less}</numa></cpu>")


def cells(*spans: str, memory: str = "2") -> str:
    inside = "".join(
        f"<cell id='{i}' cpus='{span}' memory='{memory}' unit='GiB'/>"
        for i, span in enumerate(spans)
    )
    return f"<cpu><numa>{inside}</numa></cpu>"


SOUND = "<sound><address type='pci' bus='1' slot='1'/></sound>"
TUNE = "<cputune>{}</cputune>"
TWICE = "<vcpupin vcpu='1' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/>"
THREAD = "<iothreads>1</iothreads>" + TUNE.format("<iothreadpin iothread='2' cpuset='0'/>")
TOPOLOGY = "<cpu><topology sockets='1' cores='3' threads='2'/></cpu>"
MEMNODE = "<numatune><memnode cellid='2' mode='strict' nodeset='0'/></numatune>"
PAGE = "<memoryBacking><hugepages><page size='2048' nodeset='0'/></hugepages></memoryBacking>"
DISTANCES = cells("0-1", "2-3").replace("/>", "><distances>{}</distances></cell>", 1)
FW_CFG = (
    "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>{}</q:commandline>".format(
        "<q:arg value='{}'/><q:arg value='{}'/>"
    )
)
WINDOW = "name=opt/ovmf/X-PciMmio64Mb,string=65536"
NAMED = port(1, 0, 1).replace("><", "><model name='{}'/><", 1)
CHASSIS = port(1, 0, 1).replace("><", "><target chassis='2'/><", 1) + port(2, 0, 2)
ACPI = "<hostdev type='pci'><source><address bus='1'/></source><acpi nodeset='2'/></hostdev>"
OFF = port(1, 0, 1).replace("function='0'", "function='0' multifunction='off'") + port(2, 0, 1, 1)


@pytest.mark.parametrize(
    ("inside", "devices", "id", "said"),
    [
        (TUNE.format("<vcpupin vcpu='4' cpuset='0'/>"), "", "pin-unknown-vcpu", "below 4, found 4"),
        (TUNE.format(TWICE), "", "pin-twice", "<vcpupin> for 1: expected one, found 2"),
        (THREAD, "", "pin-unknown-iothread", "one of [1]"),
        ("", "<disk><driver iothread='2'/></disk>", "iothread-unknown", "one of [], found 2"),
        (TOPOLOGY, "", "topology-product", "expected 4 vCPUs, found 1 x 1 x 3 x 2 = 6"),
        (cells("0-2", "2-3"), "", "cells-overlap", "found 2"),
        (cells("0-1", "2-5"), "", "cell-unknown-vcpu", "found 4-5"),
        (cells("0-1", "2"), "", "vcpu-without-cell", "3 in none"),
        (cells("0-1", "2-3", memory="1"), "", "memory-sum", "2147483648 bytes"),
        (cells("0-1", "2-3") + MEMNODE, "", "memnode-unknown-cell", "found 2"),
        (PAGE, "", "page-unknown-cell", "the guest is flat"),
        (DISTANCES.format("<sibling id='2' value='10'/>"), "", "distance-unknown-cell", "found 2"),
        (DISTANCES.format("<sibling id='0' value='10'/>" * 2), "", "distance-twice", "to cell 0"),
        (FW_CFG.format("-fw_cfg", "-s"), "", "fw-cfg-broken", "its value behind it, found -s"),
        (FW_CFG.format("-s", "-fw_cfg"), "", "fw-cfg-broken", "-fw_cfg: expected its value"),
        (FW_CFG.format("-s", WINDOW), "", "fw-cfg-broken", "-fw_cfg before it, found -s"),
        (cells("0-1", "2-3"), ACPI, "device-unknown-cell", "<hostdev>"),
        (cells("0-1", "2-3"), expander(1, 64, "<node>2</node>"), "device-unknown-cell", "below 2"),
        ("", expander(1, 64) + expander(2, 64), "busnr-twice", "found 2"),
        (
            "",
            expander(1, 64) + port(3, 1) + expander(2, 65),
            "bus-window",
            "expander bus 1 at busNr 64: expected 2 buses, found 1, up to 64",
        ),
        ("", expander(1, 255) + port(2, 1), "bus-window", "expected 2 buses, found 1"),
        ("", expander(1, 3) + SOUND.replace("'1'", "'4'", 1), "bus-window", "expected 4 buses"),
        ("", CHASSIS, "chassis-twice", "chassis 2: expected one port, found 2"),
        ("", NAMED.format("pxb-pcie"), "controller-model-name", "pcie-root-port or ioh3420"),
        (
            "",
            expander(1, 2) + port(2, 0, 2) + port(3, 0, 3),
            "bus-window",
            "the root bus: expected 3 buses, found 2",
        ),
        ("", port(1, 0, 1) + port(2, 0, 1), "address-twice", "0000:00:01.0"),
        ("", port(1, 0, 1) + SOUND, "slot-of-port", "slot 0: a port has one slot"),
        ("", expander(1, 64) + SOUND, "endpoint-on-expander", "a root port between"),
        ("", port(1, 0, 1, 1), "function-without-0", "a device at 0000:00:01.0"),
        ("", OFF, "multifunction-off", "multifunction='on'"),
        ("", port(1, 2, 0) + port(2, 1, 0), "controller-loop", "found a loop"),
        ("", port(1, 0, 1) + port(1, 0, 2), "controller-twice", "PCI controller 1"),
    ],
)
def test_each_broken_reference_is_found(inside: str, devices: str, id: str, said: str) -> None:
    broken = found(inside, ROOT + devices if devices else "")
    assert id in broken, broken
    assert said in broken[id]


def test_what_is_at_its_limit_is_not_broken() -> None:
    assert found("", ROOT + expander(1, 1)) == found("", ROOT + expander(1, 255)) == {}
    assert found("", ROOT + NAMED.format("ioh3420")) == {}
    assert found(FW_CFG.format("-fw_cfg", WINDOW)) == {}
    ide = "<controller type='ide'><address type='pci' bus='0' slot='1' function='1'/></controller>"
    assert found("", ROOT.replace("pcie-root", "pci-root") + ide) == {}


def test_a_window_may_be_filled_to_its_last_bus() -> None:
    exact = (
        ROOT
        + expander(1, 250)
        + "".join(port(i, 1, 0, 0).replace("slot='0'", f"slot='{i}'") for i in range(2, 7))
    )
    assert found("", exact) == {}
    assert "bus-window" in found("", exact + port(7, 1, 7))


def _findings(xml: bytes, plan: Plan) -> tuple[Finding, ...]:
    return check_document(xml, rewrite(xml, plan), plan)


def test_a_command_line_of_ours_is_reported_and_one_that_was_there_is_not() -> None:
    space = Aperture(None, None, 262_144, 0, 0)
    xml = sample("study")
    (finding,) = _findings(xml, hand_plan(read_vm(xml, "x"), "pin", aperture=space))
    assert finding.id == "qemu-commandline"
    xml = sample("qemu-commandline")
    plan = hand_plan(read_vm(xml, "x"), "pin", aperture=space)
    assert _findings(xml, plan) == ()


def test_what_attestation_measures_is_compared_with_the_definition_before() -> None:
    xml = sample("study").replace(b"</devices>", b"</devices><launchSecurity type='sev'/>")
    findings = _findings(xml, hand_plan(read_vm(xml, "x"), "pin-numa-smt"))
    (measured,) = (finding for finding in findings if finding.id == "launch-measurement")
    assert "vCPUs 56 to 112" in measured.observed


def test_an_arm_guest_without_acpi_is_reported_for_its_expander_buses_alone() -> None:
    root = ROOT.encode() + b"</devices>"
    xml = sample("aarch64-virt").replace(b"<acpi/>", b"").replace(b"</devices>", root)
    guest = read_vm(xml, "x")
    for layout in ("pin-numa", "pin-numa-pci"):
        plan = hand_plan(guest, layout)
        plan = with_vm(plan, controllers=plan.vm.controllers or guest.controllers)
        ids = [finding.id for finding in _findings(xml, plan)]
        assert ("acpi-missing" in ids) is (layout == "pin-numa-pci")
