"""A guest's own view and its kernel's messages are compared with its plan."""

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.check.verify.boot.guest_files import check_kernel
from homenode.check.verify.expectation import build_expectation, group_neighbours
from homenode.check.verify.guest_checks import GuestView, view_of_guest
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Severity
from homenode.machine.topology import Host, PagePool
from homenode.units import MIB
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.guest_observation import GuestPath, find_guest_path, map_guest_paths
from homenode.vm.model import (
    GuestAddress,
    GuestCache,
    GuestPciController,
    GuestTopology,
    Vm,
    VmCell,
)
from homenode.vm.plan import Plan, vm_as_it_runs, with_vm
from tests.verify_documents import DEVICES, PLAIN, changed, ids, small_host, tuned
from tests.verify_guests import guest_host


def seen(guest: Host, layout: str = "pin-numa-pci", plan: Plan | None = None) -> GuestView:
    expected = build_expectation((plan or tuned(layout).plan).vm, host=small_host())
    return view_of_guest(expected, guest, small_host())


def test_a_guest_as_planned_has_no_findings() -> None:
    view = seen(guest_host())
    assert not view.findings, "\n".join(map(str, view.findings))
    subjects = {line.subject for line in view.checks}
    assert {"cell 0", "distances from cell 1", "memory of cell 0", "siblings"} <= subjects
    assert {f"device {bdf}" for bdf in DEVICES} <= subjects


FIRST, SLOW = f"device {DEVICES[0]}", guest_host(link='trained = "2.5GT/s x1"')


@pytest.mark.parametrize(
    ("guest", "id", "subject", "observed"),
    [
        (guest_host(distance=42), "guest-distances", "distances from cell 0", "10 42"),
        (guest_host(nodes=(1, 0)), "guest-device-node", FIRST, "numa_node 1"),
        (guest_host(nodes=("unknown", 1)), "guest-device-node", FIRST, "numa_node -1"),
        (guest_host(memory="700MiB"), "guest-node-memory", "memory of cell 1", "700 MiB"),
        (guest_host(cores=1, threads=2), "guest-siblings", "siblings", "2: 0-1  2-3"),
        (guest_host(cores=1), "guest-vcpus", "vCPUs", "0-1"),
        (SLOW, "guest-device-link", f"link of {DEVICES[0]}", "2.5 GT/s"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("guest-") else "",
)
def test_a_difference_is_named(guest: Host, id: str, subject: str, observed: str) -> None:
    found = [f for f in seen(guest).findings if (f.id, f.subject) == (id, subject)]
    assert len(found) == 1, seen(guest).findings
    assert found[0].observed.startswith(observed)
    assert found[0].severity in (Severity.CRITICAL, Severity.WARNING)


def test_memory_that_the_guest_does_not_give_is_unknown_and_not_0_bytes() -> None:
    guest = guest_host()
    nodes = (structs.replace(guest.nodes[0], memory_bytes=None), guest.nodes[1])
    (found,) = seen(structs.replace(guest, nodes=nodes)).findings
    assert (found.subject, found.observed) == ("memory of cell 0", "not given")
    assert found.severity is Severity.INCONCLUSIVE


def without_l3(guest: Host) -> Host:
    """The guest with the L2 of each core as its last cache."""
    return structs.replace(guest, llcs=tuple(structs.replace(llc, level=2) for llc in guest.llcs))


def test_a_flat_guest_is_as_planned_when_its_devices_have_no_node() -> None:
    one = guest_host(nodes=("unknown", "unknown"))
    flat = structs.replace(
        one,
        nodes=(structs.replace(one.nodes[0], pus=CpuSet(range(4)), memory_bytes=3900 * MIB),),
        distances=((10,),),
    )
    view = seen(without_l3(flat), "pin")
    assert not view.findings, view.findings
    assert "numa_node -1, as all 2 of its kind" in {line.observed for line in view.checks}


def test_nodes_are_matched_by_their_vcpus_not_by_their_numbers() -> None:
    guest = guest_host()
    first, second = guest.nodes
    pairs = ((second, first.index), (first, second.index))
    nodes = tuple(structs.replace(node, index=index) for node, index in pairs)
    devices = tuple(
        device if device.node is None else structs.replace(device, node=NodeIndex(1 - device.node))
        for device in guest.pci_devices
    )
    assert not seen(structs.replace(guest, nodes=nodes, pci_devices=devices)).findings


def test_a_device_that_is_not_there_is_missing_and_another_in_its_place_is_named() -> None:
    guest, gpu = guest_host(), Bdf.parse("f1:00.0")
    others = tuple(device for device in guest.pci_devices if device.bdf != gpu)
    assert "guest-device-missing" in ids(seen(structs.replace(guest, pci_devices=others)).findings)
    devices = tuple(
        structs.replace(device, device_id=0x1021) if device.bdf == gpu else device
        for device in guest.pci_devices
    )
    other = structs.replace(guest, pci_devices=devices)
    found = next(f for f in seen(other).findings if f.id == "guest-device-other")
    assert found.observed == "10de:1021"


def unplaced() -> Plan:
    """A plan that does not say where its devices are in the guest."""
    plan = tuned("pin-numa-pci").plan
    devices = tuple(structs.replace(device, address=None) for device in plan.vm.hostdevs)
    return with_vm(plan, hostdevs=devices)


def test_a_device_without_an_address_is_inconclusive_where_its_kind_differs() -> None:
    found = seen(guest_host(), plan=unplaced()).findings
    assert {f.severity for f in found} == {Severity.INCONCLUSIVE}
    assert "virsh dumpxml" in (found[0].fix or "")


def test_llcs_that_are_passed_through_are_those_of_the_pinned_pus() -> None:
    plan = with_vm(tuned("pin-numa-pci").plan, cpu_cache=GuestCache.PASSTHROUGH)
    expected = build_expectation(plan.vm, host=small_host())
    assert expected.l3 == (CpuSet([0, 1]), CpuSet([2, 3]))
    assert build_expectation(plan.vm).l3 is None
    first = plan.vcpu_pins[0]
    pus = small_host().pus
    unknown = tuple(structs.replace(pu, llc=None) if pu.index in first else pu for pu in pus)
    assert build_expectation(plan.vm, host=structs.replace(small_host(), pus=unknown)).l3 is None


def test_a_guest_that_is_to_be_shown_no_l3_is_asked_for_one() -> None:
    plan = with_vm(tuned("pin-numa-pci").plan, cpu_cache=GuestCache.DISABLED)
    guest = guest_host()
    found = [f for f in seen(guest, plan=plan).findings if f.id == "guest-llcs"]
    assert [f.expected for f in found] == ["none"]
    assert not seen(without_l3(guest), plan=plan).findings
    silent = structs.replace(guest, llcs=())
    found = [f for f in seen(silent, plan=plan).findings if f.id == "guest-llcs"]
    assert [f.severity for f in found] == [Severity.INCONCLUSIVE]
    # AMD's siblings need topoext, with which Linux takes the socket for an L3.
    assert plan.vm.cpu_topology is not None
    siblings = with_vm(plan, cpu_topology=plan.vm.cpu_topology._replace(cores=1, threads=2))
    assert build_expectation(siblings.vm).l3 is None


def test_a_device_without_a_node_is_not_at_home_because_its_cell_is_missing() -> None:
    guest = guest_host()
    devices = tuple(structs.replace(device, node=None) for device in guest.pci_devices)
    flat = {"nodes": guest.nodes[:1], "distances": ((10,),), "pci_devices": devices}
    merged = structs.replace(guest, **flat)
    found = [f for f in seen(merged, plan=unplaced()).findings if f.id == "guest-device-node"]
    assert len(found) == 2
    assert {f.severity for f in found} == {Severity.CRITICAL}


def test_the_document_says_where_devices_are_when_the_plan_does_not() -> None:
    facts = build_vm(open_domain(tuned("pin-numa-pci").document, "vm.xml"))
    guest = vm_as_it_runs(unplaced(), facts)
    expected = build_expectation(guest, document=facts, host=small_host())
    assert not view_of_guest(expected, guest_host(), small_host()).findings


def test_a_document_alone_promises_what_it_says() -> None:
    facts = build_vm(open_domain(tuned("pin-numa-pci").document, "vm.xml"))
    expected = build_expectation(facts)
    assert not view_of_guest(expected, guest_host(), None).findings
    found = view_of_guest(expected, guest_host(distance=42), None).findings
    assert ids(found) == {"guest-distances"}


def test_distances_are_of_the_cells_that_the_guest_sees() -> None:
    """Linux makes no node of a cell without vCPUs and memory."""
    rows = (10, 20, 30), (20, 10, 40), (30, 40, 10)
    cells = tuple(
        VmCell(id=i, vcpus=CpuSet(), memory_bytes=size, distances=row)
        for i, (size, row) in enumerate(zip((MIB, 0, MIB), rows, strict=True))
    )
    guest = Vm(name="vm", vcpus=1, memory_bytes=2 * MIB, cells=cells)
    assert build_expectation(guest).distances == ((10, 30), (30, 10))


def facts_of(*pairs: tuple[str, str]) -> Vm:
    xml = changed(tuned("pin-numa-pci").document, *pairs)
    return build_vm(open_domain(xml, "vm.xml"))


def test_vcpus_that_the_document_has_offline_are_not_missed() -> None:
    """The guest has cores 0 and 2 of the four; Linux numbers them 0 and 1."""
    states = (
        "<vcpus><vcpu id='0' enabled='yes'/><vcpu id='1' enabled='no'/>"
        "<vcpu id='2' enabled='yes'/><vcpu id='3' enabled='no'/></vcpus><cputune>"
    )
    facts = facts_of((">4</vcpu>", " current='2'>4</vcpu>"), ("<cputune>", states))
    assert facts.offline_vcpus == CpuSet((1, 3))
    expected = build_expectation(facts)
    view = view_of_guest(expected, guest_host(cores=1), None)
    assert not view.findings, view.findings
    whole = build_expectation(structs.replace(facts, offline_vcpus=CpuSet()))
    assert "guest-vcpus" in ids(view_of_guest(whole, guest_host(cores=1), None).findings)
    plugged = view_of_guest(expected, guest_host(), None)  # by hand, since
    assert not plugged.findings, plugged.findings


def test_memory_devices_and_the_balloon_are_allowed_for() -> None:
    text = "<memory model='dimm'><target><size unit='GiB'>1</size><node>1</node></target></memory>"
    dimm = ("</devices>", f"{text}</devices>")
    facts = facts_of(("<memory unit='GiB'>4<", "<memory unit='GiB'>5<"), dimm)
    expected = build_expectation(facts)
    guest = guest_host()
    grown = structs.replace(guest.nodes[1], memory_bytes=2980 * MIB)
    more = structs.replace(guest, nodes=(guest.nodes[0], grown))
    assert not view_of_guest(expected, more, None).findings
    swapped = structs.replace(
        guest, nodes=(structs.replace(guest.nodes[0], memory_bytes=2980 * MIB), grown)
    )
    (found,) = view_of_guest(expected, swapped, None).findings
    assert (found.id, found.subject) == ("guest-node-memory", "memory of cell 0")
    small = guest_host(memory="700MiB")
    current = "</memory>\n  <currentMemory unit='MiB'>1500</currentMemory>"
    facts = facts_of(("</memory>", current))
    assert facts.ballooned_bytes == (4096 - 1500) * MIB
    assert not view_of_guest(build_expectation(facts), small, None).findings


def test_an_untuned_document_expects_a_flat_guest() -> None:
    expected = build_expectation(build_vm(open_domain(PLAIN, "vm.xml")))
    assert [cell.vcpus for cell in expected.cells] == [CpuSet(range(4))]
    assert expected.distances is None and expected.vm.cpu_topology is None


def test_huge_pages_on_some_nodes_only_are_a_warning() -> None:
    guest = guest_host()
    pools = ((PagePool(2 * MIB, 64, 64),), (PagePool(2 * MIB, 0, 0),))
    nodes = tuple(structs.replace(n, page_pools=p) for n, p in zip(guest.nodes, pools, strict=True))
    found = seen(structs.replace(guest, nodes=nodes)).findings
    assert [(f.id, f.observed) for f in found] == [("guest-huge-pages", "node 0: 64, node 1: 0")]


def test_a_path_leaves_out_the_bus_numbers_that_firmware_gives() -> None:
    controllers = (
        GuestPciController(0, "pcie-root"),
        GuestPciController(1, "pcie-expander-bus", GuestAddress(0, 0, 0x10, 0), 0x80, 0),
        GuestPciController(2, "pcie-root-port", GuestAddress(0, 1, 1, 3)),
        GuestPciController(3, "pcie-switch-upstream-port", GuestAddress(0, 2, 0, 0)),
        GuestPciController(4, "pcie-switch-downstream-port", GuestAddress(0, 3, 2, 0)),
    )
    path = find_guest_path(GuestAddress(0, 4, 0, 1), controllers)
    assert str(path) == "pci0000:80/01.3/00.0/02.0/00.1"
    assert find_guest_path(GuestAddress(0, 0, 2, 0), ()) == GuestPath(0, ((2, 0),))
    assert find_guest_path(GuestAddress(0, 9, 0, 0), controllers) is None
    loop = (GuestPciController(5, "pcie-root-port", GuestAddress(0, 5, 0, 0)),)
    assert find_guest_path(GuestAddress(0, 5, 0, 0), loop) is None


def test_every_function_of_a_guest_has_one_path() -> None:
    paths = map_guest_paths(guest_host())
    assert paths[GuestPath(0xF0, ((0, 0), (0, 0)))] == Bdf.parse("f1:00.0")
    assert len(paths) == len(guest_host().pci_devices)


def test_vcpus_are_dealt_in_runs() -> None:
    topology = GuestTopology(2, 1, 2, 2)
    assert [len(group) for group in group_neighbours(topology.vcpus, topology.threads)] == [2] * 4


GPU, PORT = "0000:81:00.0", "0000:80:00.0"
NAMES = {Bdf.parse(GPU): "0000:19:00.0"}


def log(*lines: str, level: int = 6) -> str:
    return "".join(f"<{level}>[    1.{i:06}] {line}\n" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    "line",
    [
        f"pci {GPU}: BAR 2 [mem size 0x2000000000 64bit pref]: can't assign; no space",
        f"pci {GPU}: BAR 2: no space for [mem size 0x2000000000 64bit pref]",
        f"pci {GPU}: BAR 2: failed to assign [mem size 0x2000000000 64bit pref]",
    ],
)
def test_a_bar_without_room_is_a_finding_of_the_host_device(line: str) -> None:
    bridge = f"pci {PORT}: bridge window [mem size 0x3000000000 64bit pref]: failed to assign"
    (found,) = check_kernel(log(bridge, line), NAMES, "vm.xml")
    assert (found.id, found.severity) == ("guest-bar-unplaced", Severity.CRITICAL)
    assert found.subject == "device 0000:19:00.0"
    assert "0x2000000000" in found.observed


@pytest.mark.parametrize(
    ("device", "count"),
    [
        ("0000:82:00.0: [1b36:0005] type 00 class 0x00ff00", 1),
        ("0000:83:00.0: [1b36:000c] type 01", 0),
    ],
)
def test_a_window_is_missed_only_with_a_device_behind_it(device: str, count: int) -> None:
    lines = (
        f"pci {device}",
        f"pci {PORT}: PCI bridge to [bus 81-82]",
        f"pci {PORT}: bridge window [mem size 0x00200000]: can't assign; no space",
    )
    assert len(list(check_kernel(log(*lines), {}, "vm.xml"))) == count


def test_a_bridge_without_room_is_named_where_no_device_is() -> None:
    bridge = f"pci {PORT}: bridge window [mem size 0x3000000000 64bit pref]: failed to assign"
    (found,) = check_kernel(log(bridge), NAMES, "vm.xml")
    assert PORT in found.subject


IGNORED = "[mem 0x8000000000000-0x9] (ignored, not CPU addressable)"


@pytest.mark.parametrize(
    ("topic", "line", "level"),
    [
        ("topology", "sched: CPU #1's llc-sibling CPU #0 is not on the same node!", 4),
        ("topology", "BUG: arch topology borken", 3),
        ("NUMA nodes", "NUMA: Warning: node ids are out of bound, from=-1 to=-1 distance=10", 4),
        ("PCI", f"acpi PNP0A08:00: host bridge window {IGNORED}", 6),
        ("PCI", "pci_bus 0000:81: busn_res: can not insert [bus 81-ff] under [bus 80]", 6),
        ("NUMA nodes", "pci_bus 0000:80: Unknown NUMA node; performance will be reduced", 6 - 2),
    ],
)
def test_warnings_of_the_kernel_are_findings(topic: str, line: str, level: int) -> None:
    (found,) = check_kernel(log(line, level=level), NAMES, "vm.xml")
    assert found.severity is Severity.WARNING
    assert found.subject.startswith(topic) and line in found.observed


@pytest.mark.parametrize(
    "line",
    [
        f"pci {GPU}: BAR 1: no space for [io  size 0x0100]",
        "APIC calibration not consistent with PM-Timer: 105ms instead of 100ms",
        "pci_bus 0000:00: Unknown NUMA node; performance will be reduced",
        "mitigations disabled",
    ],
)
def test_what_the_emulated_machine_always_says_is_none(line: str) -> None:
    assert not list(check_kernel(log(line, level=4), NAMES, "vm.xml"))


def test_several_warnings_of_a_topic_are_one_finding() -> None:
    lines = [f"NUMA: Warning: node {i}" for i in range(9)]
    (found,) = check_kernel(log(*lines, level=4), NAMES, "vm.xml")
    assert "and 6 more" in found.observed


def test_a_log_of_anything_else_is_no_finding() -> None:
    assert not list(check_kernel("\x00<9>[x] y\n<6>\n" + "<6>[ 1.0] z", NAMES, "vm.xml"))
