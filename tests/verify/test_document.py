"""A document is compared with itself, its host and its plan; every planted fault is named."""

from typing import Any

import pytest
from msgspec.structs import replace

from homenode import formats
from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings, Severity, are_bad
from homenode.machine.topology import Host, PagePool, RunningDomain
from homenode.units import GIB, MIB
from homenode.vm.domain.codec import SINCE
from homenode.vm.layout import PRESETS
from tests.verify_documents import (
    DEVICES,
    PLAIN,
    changed,
    findings_of,
    ids,
    small_host,
    swapped,
    tuned,
)


@pytest.mark.parametrize("layout", PRESETS)
def test_a_tuned_document_has_nothing_wrong(layout: str) -> None:
    tuning = tuned(layout)
    found = findings_of(tuning.document, tuning.plan, small_host())
    assert not are_bad(found), "\n".join(map(str, found))


def test_a_flat_layout_says_what_the_guest_will_miss() -> None:
    tuning = tuned("pin-numa")
    found = findings_of(tuning.document, tuning.plan, small_host())
    assert "devices-without-node" in ids(found)
    assert "device-without-cell" not in ids(found)


def test_without_a_plan_devices_off_their_cell_are_a_warning() -> None:
    assert "device-without-cell" in ids(findings_of(tuned("pin-numa").document, host=small_host()))


FAULTS: dict[str, tuple[tuple[tuple[str, str], ...], str, set[str]]] = {
    "pin for a vCPU that is not there": (
        (("vcpu='3' cpuset='5'", "vcpu='9' cpuset='5'"),),
        "<vcpupin> for 9",
        {"pin-unknown-vcpu", "vcpu-not-pinned", "plan-pins"},
    ),
    "a vCPU away from its cell's memory": (
        (("vcpu='3' cpuset='5'", "vcpu='3' cpuset='3'"),),
        "cell 1, vCPU 3",
        {"pin-off-node", "plan-pins"},
    ),
    "cells bound to each other's node": (
        (
            ("cellid='0' mode='strict' nodeset='0'", "cellid='0' mode='strict' nodeset='1'"),
            ("cellid='1' mode='strict' nodeset='1'", "cellid='1' mode='strict' nodeset='0'"),
        ),
        "memory of cell 0",
        {"plan-cell-binding", "pin-off-node", "device-on-other-cell"},
    ),
    "bus numbers without room": (
        (("busNr='248'", "busNr='241'"),),
        "expander bus 1 at busNr 240",
        {"bus-window", "plan-bus-nr"},
    ),
    "one bus number twice": (
        (("busNr='248'", "busNr='240'"),),
        "busNr 240",
        {"busnr-twice", "plan-bus-nr"},
    ),
    "one address twice": (
        (("bus='0x04' slot='0x00'", "bus='0x03' slot='0x00'"),),
        "guest address 0000:03:00.0",
        {"address-twice", "plan-device-address", "device-on-other-cell"},
    ),
    "a wrong distance": (
        (("<sibling id='1' value='20'/>", "<sibling id='1' value='42'/>"),),
        "cell 0",
        {"plan-distances"},
    ),
    "a topology that is no product": (
        (("sockets='2' cores='2'", "sockets='2' cores='3'"),),
        "<topology>",
        {"topology-product", "plan-topology"},
    ),
    "memory that does not add up": (
        (("cpus='2,3' memory='2048'", "cpus='2,3' memory='1024'"),),
        "the memory of all cells",
        {"memory-sum", "plan-cell-memory"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    pairs, subject, expected = FAULTS[fault]
    tuning = tuned("pin-numa-pci")
    found = findings_of(changed(tuning.document, *pairs), tuning.plan, small_host())
    assert expected <= ids(found), "\n".join(map(str, found))
    assert subject in {finding.subject for finding in found}
    assert are_bad(found)


def test_a_device_on_the_other_expander_bus_is_named_with_both_places() -> None:
    tuning = tuned("pin-numa-pci")
    xml = swapped(tuning.document, "bus='0x03' slot", "bus='0x04' slot")
    found = findings_of(xml, tuning.plan, small_host())
    moved = [f for f in found if f.id == "device-on-other-cell"]
    assert [f.subject for f in moved] == ["0000:11:00.0", "0000:81:00.0"]
    assert "cell 0" in moved[0].expected and "cell 1" in moved[0].observed


TUNED = tuned("pin-numa-pci").document
VIOMMU = ("</devices>", "<iommu model='intel'/></devices>")


def on_nodes(*fields: dict[str, Any]) -> Host:
    """The small host with these fields of its nodes."""
    pairs = zip(small_host().nodes, fields, strict=True)
    return replace(small_host(), nodes=tuple(replace(node, **more) for node, more in pairs))


def with_pools(*free: int) -> Host:
    """So many free pages of 2 MiB on each node, and 4 of 1 GiB."""
    gib = PagePool(GIB, 4, 4)
    return on_nodes(*({"page_pools": (PagePool(2 * MIB, 2048, n), gib)} for n in free))


def with_free(*free: int) -> Host:
    return on_nodes(*({"memory_free_bytes": n} for n in free))


HUGE = (
    "<memoryBacking><hugepages><page size='{}' unit='KiB'/></hugepages></memoryBacking>\n  <vcpu "
)


def with_pages(xml: bytes, page_bytes: int) -> bytes:
    return changed(xml, ("<vcpu ", HUGE.format(page_bytes // 1024)))


def with_dimm(xml: bytes, target: str = "<node>1</node>", source: str = "") -> bytes:
    """1 GiB more, plugged in at the start."""
    most = "<maxMemory slots='4' unit='GiB'>16</maxMemory>\n  <memory unit='GiB'>5<"
    size = f"<target><size unit='GiB'>1</size>{target}</target>"
    dimm = f"<memory model='dimm'>{source}{size}</memory></devices>"
    return changed(xml, ("<memory unit='GiB'>4<", most), ("  </devices>", dimm))


OWN_PAGES = "<source><pagesize unit='KiB'>2048</pagesize><nodemask>@</nodemask></source>"
OWN_DIMM = with_dimm(TUNED, source=OWN_PAGES)
PLUGGED = "<node>0</node><block unit='MiB'>2</block><requested unit='KiB'>0</requested>"
VIRTIO_MEM = with_dimm(TUNED, PLUGGED).replace(b"model='dimm'", b"model='virtio-mem'")
DEFAULT_PAGES = changed(TUNED, ("<vcpu ", "<memoryBacking><hugepages/></memoryBacking>\n  <vcpu "))
GIB_PAGES = (PagePool(2 * MIB, 1024, 1024), PagePool(GIB, 1, 1))
ONE_GIB = on_nodes({"page_pools": GIB_PAGES}, {"page_pools": GIB_PAGES})
GIB_DEFAULT = replace(ONE_GIB.settings, kernel_command_line="default_hugepagesz=1G")
SHORT, TWO_GIB = "huge-pages-short node", with_free(2 * GIB, 2 * GIB)

MEMORY: tuple[tuple[bytes, Host, str], ...] = (
    (with_pages(TUNED, 2 * MIB), with_pools(1024, 1024), ""),
    (with_pages(TUNED, 2 * MIB), with_pools(1024, 1000), f"{SHORT} 1: 1024 free pages of 2 MiB"),
    (with_pages(TUNED, 4096), with_pools(0, 0), ""),  # the ordinary page is no huge page
    (with_pages(TUNED, 16 * MIB), with_pools(1024, 1024), "huge-page-size <hugepages>"),
    (DEFAULT_PAGES, ONE_GIB, ""),
    (DEFAULT_PAGES, replace(ONE_GIB, settings=GIB_DEFAULT), f"{SHORT} 0: 2 free pages of 1 GiB"),
    (TUNED, with_free(4 * GIB, GIB), "memory-short node 1: 2 GiB free for the VM"),
    (with_dimm(TUNED), small_host(), ""),
    (with_dimm(TUNED), TWO_GIB, "memory-short node 1: 3 GiB free for the VM"),
    (VIRTIO_MEM, TWO_GIB, ""),  # of which nothing is plugged at the start
    (OWN_DIMM.replace(b"@", b"1"), with_pools(1024, 100), f"{SHORT} 1: 512 free pages of 2 MiB"),
    (OWN_DIMM.replace(b"@", b"6"), with_pools(1024, 100), "memory-unknown-node memory device 0"),
)


@pytest.mark.parametrize(("xml", "host", "expected"), MEMORY, ids=map(str, range(len(MEMORY))))
def test_memory_is_compared_with_the_hosts(xml: bytes, host: Host, expected: str) -> None:
    bad = [finding for finding in findings_of(xml, host=host) if are_bad([finding])]
    stated = "\n".join(f"{one.id} {one.subject}: {one.expected}" for one in bad)
    assert stated.startswith(expected) if expected else not stated
    assert len(bad) == (2 if host.settings == GIB_DEFAULT else bool(expected))


@pytest.mark.parametrize(
    ("xml", "gib", "enough"),
    [
        (tuned("pin").document, 4, 5),
        (with_dimm(tuned("pin-numa").document), 5, 6),
        (changed(with_dimm(tuned("pin-numa").document), VIOMMU), 11, 12),
    ],
    ids=["memory and QEMU", "a memory device too", "each device behind a vIOMMU"],
)
def test_locked_memory_below_what_vfio_needs_is_critical(xml: bytes, gib: int, enough: int) -> None:
    limit = "<memtune><hard_limit unit='GiB'>{}</hard_limit></memtune>\n  <vcpu "
    assert not are_bad(findings_of(changed(xml, ("<vcpu ", limit.format(enough)))))
    found = findings_of(changed(xml, ("<vcpu ", limit.format(gib))))
    stated = [(f.id, f.expected.partition(":")[0]) for f in found if are_bad([f])]
    assert stated == [("memlock-low", f"at least {enough} GiB")]


def test_pages_to_add_are_counted_in_the_fix() -> None:
    (short,) = findings_of(with_pages(TUNED, 2 * MIB), host=with_pools(1024, 1000))
    assert "add 24 to nr_hugepages in /sys/devices/system/node/node1/" in (short.fix or "")


def test_a_running_vm_is_not_compared_with_the_pages_that_it_has_itself() -> None:
    xml, host = with_pages(TUNED, 2 * MIB), with_pools(0, 0)
    running = RunningDomain("vm", True, (), None, (), 4 * GIB, True, (), 2 * MIB, ())
    assert "huge-pages-short" in ids(findings_of(xml, host=host))
    assert not are_bad(findings_of(xml, host=replace(host, domains=(running,))))


def test_what_is_free_decides_nothing_where_the_vm_itself_may_be_running() -> None:
    running = RunningDomain("redacted/vm-1", True, (), None, (), 4 * GIB, True, (), None, ())
    host = replace(with_free(GIB, GIB), domains=(running,))
    found = [f for f in findings_of(TUNED, host=host) if f.id == "memory-short"]
    assert {f.severity for f in found} == {Severity.INCONCLUSIVE} and len(found) == 2
    assert "may be this very VM" in found[0].observed
    small = tuple(replace(node, memory_bytes=GIB) for node in host.nodes)
    host = replace(host, nodes=small)
    found = [f for f in findings_of(TUNED, host=host) if f.id == "memory-short"]
    assert {f.severity for f in found} == {Severity.CRITICAL}
    host = replace(with_pools(0, 0), domains=(running,))
    found = list(findings_of(with_pages(TUNED, 2 * MIB), host=host))
    short = [f for f in found if f.id == "huge-pages-short"]
    assert short and {f.severity for f in short} == {Severity.INCONCLUSIVE}
    assert short[0].headline == "too few free huge pages on node 0"


@pytest.mark.parametrize("mode", ["strict", "restrictive", "preferred", "interleave"])
def test_only_strictly_bound_memory_fails_the_start(mode: str) -> None:
    severity = Severity.CRITICAL if mode in ("strict", "restrictive") else Severity.WARNING
    xml = TUNED.replace(b"mode='strict'", f"mode='{mode}'".encode())
    found = findings_of(xml, host=with_free(4 * GIB, GIB))
    assert [f.severity for f in found if f.id == "memory-short"] == [severity]


def neighbour(pins: tuple[int, ...], devices: tuple[Bdf, ...] = ()) -> RunningDomain:
    sets = tuple(CpuSet([pu]) for pu in pins)
    return RunningDomain("other", True, sets, None, (), GIB, True, (), None, devices)


@pytest.mark.parametrize("name", ["other", "redacted/vm-1"])
def test_cores_and_devices_of_other_running_vms_are_named(name: str) -> None:
    other = replace(neighbour((5, 7), (Bdf.parse("81:00.0"),)), name=name)
    found = findings_of(TUNED, host=replace(small_host(), domains=(other,)))
    assert {"core-taken", "device-in-use"} <= ids(found)
    assert are_bad(found) is (name == "other"), "nothing is sure where the name is redacted"
    in_use = next(f for f in found if f.id == "core-taken")
    assert in_use.subject == "CPU 5" and f"'{name}'" in in_use.observed


def one_group(*drivers: tuple[str, str | None]) -> Host:
    """Both GPUs in one IOMMU group, with these drivers."""
    functions = list(small_host().pci_devices)
    for at, device in enumerate(functions):
        for bdf, driver in drivers:
            if str(device.bdf) == bdf:
                functions[at] = replace(device, iommu_group=7, driver=driver)
    return replace(small_host(), pci_devices=tuple(functions))


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", "nvgrace_gpu_vfio_pci", "pci-stub", None])
def test_a_host_driver_in_the_iommu_group_is_named(driver: str | None) -> None:
    near, far = DEVICES
    hostdev = PLAIN[PLAIN.rindex(b"    <hostdev") : PLAIN.index(b"  </devices>")]
    host = one_group((near, "vfio-pci"), (far, driver))
    found = findings_of(PLAIN.replace(hostdev, b""), host=host)
    stated = [(f.subject, f.observed) for f in found if f.id == "iommu-group-shared"]
    assert stated == ([(near, f"{far} ({driver})")] if driver == "nvidia" else [])


def test_a_group_whose_functions_are_all_passed_is_no_one_elses() -> None:
    host = one_group(*((bdf, "nvidia") for bdf in DEVICES))
    assert "iommu-group-shared" not in ids(findings_of(PLAIN, host=host))


def test_a_pin_that_is_offline_in_part_is_a_warning_and_whole_is_critical() -> None:
    host = small_host()
    pus = tuple(replace(pu, online=pu.index != 5) for pu in host.pus)
    for pin, severity in (("5", Severity.CRITICAL), ("5,7", Severity.WARNING)):
        xml = changed(tuned("pin").document, ("vcpu='3' cpuset='5'", f"vcpu='3' cpuset='{pin}'"))
        found = findings_of(xml, host=replace(host, pus=pus))
        stated = [(f.subject, f.severity) for f in found if f.id == "pin-offline-cpu"]
        assert stated == [("vCPU 3", severity)]


def test_a_node_of_the_whole_binding_must_exist_although_every_cell_has_its_own() -> None:
    xml = changed(tuned("pin-numa").document, ("mode='strict' nodeset='0,1'", "nodeset='0,1,7'"))
    found = findings_of(xml, host=small_host())
    stated = [(f.id, f.subject, f.observed) for f in found if are_bad([f])]
    assert ("memory-unknown-node", "<numatune>", "node 7, which is not there") in stated
    assert not any(what == "memory-short" for what, _, _ in stated)


def test_ports_that_libvirt_adds_for_indices_left_out_need_buses_too() -> None:
    """As libvirt 9.0 does: a device on bus 248 makes it add a port for each index below."""
    xml = changed(TUNED, ("bus='0x03' slot", "bus='0xf8' slot"))
    found = [f for f in findings_of(xml) if f.id == "bus-window"]
    assert [(f.subject, f.expected) for f in found] == [("the root bus", "245 buses")]


def test_a_controller_index_beyond_all_reason_costs_nothing() -> None:
    index = f"type='pci' index='{10**15}' model='pcie-root-port'"
    xml = changed(TUNED, ("type='pci' index='3' model='pcie-root-port'", index))
    assert "bus-window" in ids(findings_of(xml))


def test_versions_that_are_too_old_are_named_by_element() -> None:
    settings = replace(small_host().settings, libvirt_version=(3, 9, 0), qemu_version=(2, 5, 0))
    found = findings_of(TUNED, host=replace(small_host(), settings=settings))
    old = {(f.subject, f.expected.split()[0]) for f in found if f.id == "too-old"}
    assert ("<cell><distances>", "libvirt") in old
    assert ("<controller model='pcie-expander-bus'>", "QEMU") in old


def test_a_machine_of_another_architecture_than_the_hosts_is_named() -> None:
    def of(architecture: str, kind: str = "kvm") -> set[str]:
        pairs = (("arch='x86_64'", f"arch='{architecture}'"), ("type='kvm'", f"type='{kind}'"))
        return ids(findings_of(changed(tuned("pin").document, *pairs), host=small_host()))

    assert "other-architecture" in of("aarch64")
    assert "other-architecture" not in of("aarch64", "qemu") | of("x86_64") | of("i686")


NEEDS = (
    ("<numa><cell>", "<cpu><numa><cell id='0' cpus='0-1' memory='1' unit='GiB'/></numa></cpu>"),
    ("<topology dies=>", "<cpu><topology sockets='1' dies='2' cores='1' threads='1'/></cpu>"),
    ("<feature name='topoext'>", "<cpu><feature policy='require' name='topoext'/></cpu>"),
    ("<cpu><cache>", "<cpu><cache mode='passthrough'/></cpu>"),
    ("<maxphysaddr>", "<cpu><maxphysaddr mode='passthrough'/></cpu>"),
    ("<iothreadpin>", "<cputune><iothreadpin iothread='1' cpuset='0'/></cputune>"),
    (
        "<hugepages><page>",
        "<memoryBacking><hugepages><page size='2' unit='MiB'/></hugepages></memoryBacking>",
    ),
    (
        "<memnode>",
        "<numatune><memnode cellid='0' mode='strict' nodeset='0'/></numatune>"
        "<cpu><numa><cell id='0' cpus='0-1' memory='1' unit='GiB'/></numa></cpu>",
    ),
    (
        "<iommu><driver eim=>",
        "<devices><iommu model='intel'><driver intremap='on' eim='on'/></iommu></devices>",
    ),
)


@pytest.mark.parametrize(("name", "element"), NEEDS, ids=[name for name, _ in NEEDS])
def test_each_element_is_used_from_its_first_version_on(name: str, element: str) -> None:
    need = next(row for row in SINCE if row.element == name)
    xml = f"""<domain type='kvm'><name>vm</name><memory unit='GiB'>1</memory><vcpu>2</vcpu>
      <iothreads>1</iothreads><os><type arch='x86_64' machine='q35'>hvm</type></os>{element}
      </domain>""".encode()

    def old(libvirt: tuple[int, int, int], qemu: tuple[int, int, int] | None) -> set[str]:
        settings = replace(small_host().settings, libvirt_version=libvirt, qemu_version=qemu)
        found = findings_of(xml, host=replace(small_host(), settings=settings))
        return {f.subject for f in found if f.id == "too-old"}

    assert need.element not in old(need.libvirt, need.qemu)
    assert need.element in old(just_before(need.libvirt), None)
    if need.qemu is not None:
        assert need.element in old(need.libvirt, just_before(need.qemu))


def just_before(version: tuple[int, int, int]) -> tuple[int, int, int]:
    major, minor, micro = version
    return (major, minor, micro - 1) if micro else (major, minor - 1, 99)


def test_a_document_tuned_for_another_host_says_so() -> None:
    host = replace(small_host(), architecture="riscv64")
    assert "tuned-for-other-host" in ids(findings_of(tuned("pin").document, host=host))


def test_an_untuned_document_is_not_bad_only_unpinned() -> None:
    found = findings_of(PLAIN, host=small_host())
    assert ids(found) == {"unpinned"} and not are_bad(found)


SATA = (
    "<controller type='sata' index='0'>"
    "<address type='pci' domain='0x0000' bus='0x00' slot='0x1f' function='0x2'/></controller>\n    "
    "<controller type='pci' index='0'"
)


def test_functions_next_to_the_chipsets_own_are_nothing_wrong() -> None:
    xml = changed(tuned("pin").document, ("<controller type='pci' index='0'", SATA))
    assert not are_bad(findings_of(xml))
    alone = changed(xml, ("slot='0x1f' function='0x2'", "slot='0x07' function='0x2'"))
    assert ids(findings_of(alone)) == {"function-without-0"}


def test_the_worst_comes_first_and_what_is_stored_can_be_read() -> None:
    tuning = tuned("pin-numa-pci")
    xml = changed(tuning.document, ("cpuset='2,6'", "cpuset='0'"), ("busNr='248'", "busNr='240'"))
    found = findings_of(xml, tuning.plan, small_host())
    order = list(Severity)
    ranks = [order.index(finding.severity) for finding in found]
    assert ranks == sorted(ranks) and len(set(ranks)) > 1
    stored = formats.encode("findings", Findings(checked=("vm.xml",), findings=found))
    assert '"format": "homenode.findings/1"' in stored
    assert formats.decode(stored, "findings", Findings, "f.json").findings == found


def test_a_finding_says_what_was_expected_and_found() -> None:
    finding = Finding(
        id="x", severity=Severity.WARNING, subject="node 1", expected="4", observed="3", source="a"
    )
    assert str(finding) == "warning: node 1: expected 4, found 3 (x)"


@pytest.mark.parametrize("layout", PRESETS)
def test_layouts_with_cells_add_acpi_and_say_so(layout: str) -> None:
    without = changed(PLAIN, ("    <acpi/>\n", ""))
    tuning = tuned(layout, without)
    is_mirrored = PRESETS[layout].cells == "host"
    assert (b"<acpi/>" in tuning.document) is is_mirrored
    assert any("(acpi-added)" in note for note in tuning.notes) is is_mirrored
    assert not any("(acpi-added)" in note for note in tuned(layout).notes)
    lost = changed(tuned(layout).document, ("    <acpi/>\n", ""))
    assert ("acpi-missing" in ids(findings_of(lost))) is is_mirrored


def test_an_aarch64_guest_needs_acpi_for_its_expander_buses_alone() -> None:
    def arm(layout: str) -> bytes:
        virt = ("arch='x86_64' machine='q35'", "arch='aarch64' machine='virt'")
        return changed(tuned(layout).document, ("    <acpi/>\n", ""), virt)

    assert "acpi-missing" not in ids(findings_of(arm("pin-numa")))
    assert "acpi-missing" in ids(findings_of(arm("pin-numa-pci")))
