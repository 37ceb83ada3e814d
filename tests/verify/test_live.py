"""A running VM, as /proc shows it, against what was planned."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.verify.live.capture import ProcFiles, capture_running_vm
from homenode.check.verify.live.checks import verify_live
from homenode.check.verify.live.procfs import (
    Neighbour,
    RunningVm,
    ThreadKind,
    classify_thread,
    parse_backends,
    parse_numa_maps,
    parse_stat,
    parse_vfio_interrupts,
)
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HostError, InputError
from homenode.findings import Findings, Severity
from homenode.vm.model import GuestHostdev, Vm, VmCell
from tests.proc_trees import BARE, MIB, PID, UUID, ProcTree

GPU = Bdf.parse("0000:41:00.0")
THREADS = {
    "CPU 0/KVM": "1",
    "CPU 1/KVM": "2",
    "CPU 2/KVM": "5",
    "CPU 3/KVM": "6",
    "IO iothread1": "3",
    "call_rcu": "0",
    "IO mon_iothread": "0",
}
CELLS = ((256, "0"), (256, "1"))
PAGES = (
    (256, "bind:0 anon=65536 dirty=65536 N0=65536 kernelpagesize_kB=4"),
    (256, "bind:1 anon=65536 dirty=65536 N1=65536 kernelpagesize_kB=4"),
)


def pus(text: str) -> CpuSet:
    return CpuSet.parse(text)


EXPECTED = Vm(
    name="vm",
    source="plan of layout pin-numa",
    vcpus=4,
    memory_bytes=512 * MIB,
    vcpu_pins=(pus("1"), pus("2"), pus("5"), pus("6")),
    emulator_pus=pus("0"),
    iothread_pins=((1, pus("3")),),
    cells=tuple(
        VmCell(id=n, vcpus=pus(vcpus), memory_bytes=256 * MIB, nodes=pus(str(n)), mode="strict")
        for n, vcpus in enumerate(("0-1", "2-3"))
    ),
    hostdevs=(GuestHostdev(GPU, None, host_node=NodeIndex(1)),),
)


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path)
    tree.qemu(THREADS, CELLS)
    tree.memory(PAGES)
    return tree


def captured(tree: ProcTree, expected: Vm = EXPECTED) -> RunningVm:
    return capture_running_vm(UUID, expected, ProcFiles(str(tree.root)), watched_s=0)


def judged(tree: ProcTree, expected: Vm = EXPECTED) -> Findings:
    return verify_live(expected, captured(tree, expected))


def ids(findings: Findings) -> Sequence[tuple[str, str]]:
    return [(finding.id, finding.subject) for finding in findings.findings]


def test_a_vm_that_is_where_it_was_planned_has_no_findings(tree: ProcTree) -> None:
    findings = judged(tree)
    assert findings.findings == ()
    assert "memory of cell 1 (node 1): 256 MiB on node 1" in findings.checked


def test_each_thread_that_may_run_elsewhere_is_named_with_its_fix(tree: ProcTree) -> None:
    tree.qemu({**THREADS, "CPU 2/KVM": "2", "IO iothread1": "0-15", "call_rcu": "0-3"}, CELLS)
    findings = judged(tree)
    assert ids(findings) == [
        ("live-vcpu", "vCPU 2"),
        ("live-iothread", "IOThread 1"),
        ("live-emulator", "emulator thread 'call_rcu'"),
    ]
    vcpu, iothread, emulator = findings.findings
    assert (vcpu.expected, vcpu.observed) == ("CPU 5", "CPU 2")
    assert vcpu.headline == "vCPU 2 may run on 1 CPU, planned 1"
    fixes = {finding.fix for finding in (vcpu, iothread, emulator)}
    assert fixes == {f"homenode apply {EXPECTED.name} --live-pins"}


def test_a_thread_with_fewer_pus_than_planned_is_where_it_should_be(tree: ProcTree) -> None:
    wide = structs.replace(EXPECTED, vcpu_pins=(pus("0-3"),) * 2 + (pus("4-7"),) * 2)
    assert judged(tree, wide).findings == ()


def test_threads_that_cannot_be_distinguished_are_inconclusive_not_wrong(tree: ProcTree) -> None:
    tree.qemu({"ALL CPUs/TCG": "0-15", "IO iothread1": "3"}, CELLS)
    assert [f.severity for f in judged(tree).findings] == [Severity.INCONCLUSIVE]
    tree = ProcTree(tree.root / "b")
    tree.qemu({"qemu-kvm": "0"}, CELLS)
    tree.memory(PAGES)
    found = {finding.id for finding in judged(tree).findings}
    assert found == {"live-threads", "live-iothread-missing"}


def test_vcpus_of_an_earlier_definition_are_noticed(tree: ProcTree) -> None:
    tree.qemu({**THREADS, "CPU 4/KVM": "1"}, CELLS)
    assert ("live-vcpus", "vm") in ids(judged(tree))
    less = {name: at for name, at in THREADS.items() if name != "CPU 3/KVM"}
    tree = ProcTree(tree.root / "b")
    tree.qemu(less, CELLS)
    tree.memory(PAGES)
    assert ids(judged(tree)) == [("live-vcpu-missing", "vCPU 3")]


def test_pages_on_another_node_are_counted(tree: ProcTree) -> None:
    tree.memory((PAGES[0], (256, "bind:1 anon=65536 N0=16384 N1=49152 kernelpagesize_kB=4")))
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-memory", "memory of cell 1")
    assert finding.severity is Severity.CRITICAL
    assert finding.observed == "192 MiB on node 1 and 64 MiB on node 0"
    assert "25 %" in (finding.cost or "")


def test_swapped_cells_are_found_by_what_qemu_was_asked_for(tree: ProcTree) -> None:
    tree.qemu(THREADS, ((256, "1"), (256, "0")))
    found = ids(judged(tree))
    assert ("live-binding", "memory of cell 0") in found
    assert ("live-memory", "memory of cell 1") in found


def test_preferred_memory_may_spill(tree: ProcTree) -> None:
    cells = tuple(structs.replace(cell, mode="preferred") for cell in EXPECTED.cells)
    tree.memory((PAGES[0], (256, "prefer:1 anon=65536 N0=1 N1=65535 kernelpagesize_kB=4")))
    (finding,) = judged(tree, structs.replace(EXPECTED, cells=cells)).findings
    assert finding.severity is Severity.WARNING


def test_memory_that_nothing_has_touched_is_no_fault(tree: ProcTree) -> None:
    tree.memory((PAGES[0], (256, "bind:1")))
    (finding,) = judged(tree).findings
    assert (finding.id, finding.severity) == ("live-memory-untouched", Severity.INFO)


def test_huge_pages_must_be_used_and_be_of_the_size(tree: ProcTree) -> None:
    cells = tuple(structs.replace(cell, page_bytes=2 * MIB) for cell in EXPECTED.cells)
    expected = structs.replace(EXPECTED, cells=cells)
    file = r"file=/dev/hugepages/libvirt/qemu/1-vm/qemu_back_mem._objects_ram-node{}.x\040(deleted)"
    huge = tuple(
        (256, f"bind:{node} {file.format(node)} huge dirty=128 N{node}=128 kernelpagesize_kB=2048")
        for node in (0, 1)
    )
    tree.memory(huge)
    assert judged(tree, expected).findings == ()
    default = structs.replace(
        EXPECTED, cells=tuple(structs.replace(c, page_bytes=0) for c in EXPECTED.cells)
    )
    assert judged(tree, default).findings == ()
    tree.memory(PAGES)
    assert [f.id for f in judged(tree, expected).findings] == ["live-page-size"] * 2


def test_hugepage_files_tell_their_cells_whatever_the_order(tree: ProcTree) -> None:
    file = r"file=/dev/hugepages/x/qemu_back_mem._objects_ram-node{}.x huge dirty=128 N{}=128"
    tree.qemu(THREADS, ((256, ""), (256, "")))
    places = (file.format(1, 0), file.format(0, 1))
    tree.memory(tuple((256, f"default {place} kernelpagesize_kB=2048") for place in places))
    assert [f.subject for f in judged(tree).findings] == ["memory of cell 0", "memory of cell 1"]


def test_swapped_out_memory_and_unreadable_mappings_are_said(tree: ProcTree) -> None:
    tree.put(f"proc/{PID}/status", "VmSwap:\t   2048 kB\n")
    (swapped,) = judged(tree).findings
    assert (swapped.id, swapped.observed) == ("live-swapped", "2 MiB swapped out")
    (tree.root / f"proc/{PID}/numa_maps").unlink()
    inconclusive = [f for f in judged(tree).findings if f.severity is Severity.INCONCLUSIVE]
    assert [f.fix for f in inconclusive] == ["run as root on the VM's host"]


def test_interrupts_on_another_node_are_reported_once_a_device(tree: ProcTree) -> None:
    tree.put(
        "proc/interrupts",
        "           CPU0       CPU1\n"
        " 24:     0      0  IR-PCI-MSI-0000:41:00.0    0-edge      vfio-msix[0](0000:41:00.0)\n"
        " 25:          0          0  IR-PCI-MSI 1-edge      vfio-msix[1](0000:41:00.0)\n"
        " 26:          0          0  IR-PCI-MSI 2-edge      vfio-msi[0](0000:51:00.0)\n"
        " 27:          0          0  IR-PCI-MSI 2-edge      eth0\nNMI:  0 0 Non-maskable\n",
    )
    for irq, effective in ((24, "2"), (25, "4"), (26, "2")):
        tree.put(f"proc/irq/{irq}/smp_affinity_list", "0-15\n")
        tree.put(f"proc/irq/{irq}/effective_affinity_list", f"{effective}\n")
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-interrupts", "interrupts of 0000:41:00.0")
    assert finding.observed.startswith("1 of 2 served by CPU 2")
    assert "/proc/irq/24/" in (finding.fix or "")
    tree.put("proc/irq/24/effective_affinity_list", "12\n")
    assert judged(tree).findings == ()
    # Without a plan the node is the device's own.
    tree.put("sys/bus/pci/devices/0000:41:00.0/numa_node", "0\n")
    document = structs.replace(EXPECTED, hostdevs=(GuestHostdev(GPU, None),))
    assert [f.id for f in judged(tree, document).findings] == ["live-interrupts"]


def test_only_neighbours_that_matter_are_findings(tree: ProcTree) -> None:
    tree.process(2, {"kthreadd": "0-15", "kworker/1": "1"}, flags=0x208040)
    tree.process(50, {"systemd": "0-15"})
    tree.process(60, {"near but not there": "0,3,8"})
    assert judged(tree).findings == ()
    tree.process(70, {"bound": "9"})  # CPU 9 is the sibling of the VM's CPU 1
    assert ids(judged(tree)) == [("live-pinned-process", "'bound' (process 70)")]


def test_a_process_of_another_root_is_judged_whatever_our_own_number_is(tree: ProcTree) -> None:
    tree.process(os.getpid(), {"bound": "9"})
    assert ids(judged(tree)) == [("live-pinned-process", f"'bound' (process {os.getpid()})")]


def test_another_vm_on_a_core_of_this_one_is_critical_also_as_a_sibling(tree: ProcTree) -> None:
    threads = {"CPU 0/KVM": "9", "CPU 1/KVM": "12"}
    tree.qemu(threads, ((256, "0"),), pid=90, uuid="other", name="other,,vm")
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-shared-core", "domain 'other,vm' (process 90)")
    assert "CPU 9" in finding.observed
    tree.qemu({"CPU 0/KVM": "3", "CPU 1/KVM": "12"}, ((256, "0"),), pid=90, uuid="other")
    assert judged(tree).findings == ()


def test_an_unpinned_vm_is_a_warning(tree: ProcTree) -> None:
    tree.qemu({"CPU 0/KVM": "0-15", "CPU 1/KVM": "0-15"}, ((256, "0"),), pid=90, uuid="other")
    (finding,) = judged(tree).findings
    assert (finding.id, finding.severity) == ("live-floating-vm", Severity.WARNING)
    assert finding.observed.startswith("2 vCPUs that may run anywhere")


def test_a_process_that_keeps_a_pu_busy_is_a_warning(tree: ProcTree) -> None:
    vm = captured(tree)
    busy = Neighbour(77, "stress", None, 1, pus("0-15"), False, True, 0.97)
    (finding,) = verify_live(EXPECTED, replace(vm, neighbours=(busy,))).findings
    assert (finding.id, finding.subject) == ("live-busy-neighbour", "'stress' (process 77)")
    busier = replace(busy, process=78, name="burn", busy_ratio=1.0)
    (both,) = verify_live(EXPECTED, replace(vm, neighbours=(busy, busier))).findings
    assert both.subject == "'burn' (process 78), 'stress' (process 77)"
    assert both.observed == "100 %, 97 % of a CPU over 0 s"
    woken = replace(busy, busy_ratio=0.02)
    assert verify_live(EXPECTED, replace(vm, neighbours=(woken,))).findings == ()


def test_what_may_run_everywhere_is_not_pinned_to_a_vm_that_has_every_core(tree: ProcTree) -> None:
    whole = structs.replace(EXPECTED, vcpu_pins=(pus("0-15"),) * 4)
    idle = Neighbour(77, "daemon", None, 1, pus("0-15"), False, True, 0.0)
    assert verify_live(whole, replace(captured(tree), neighbours=(idle,))).findings == ()
    bound = replace(idle, floats=False)
    (finding,) = verify_live(whole, replace(captured(tree), neighbours=(bound,))).findings
    assert finding.id == "live-pinned-process"


def test_an_unpinned_vm_has_nothing_to_be_compared_with(tree: ProcTree) -> None:
    free = Vm(name="vm", vcpus=4, vcpu_pins=(None,) * 4, memory_bytes=MIB)
    tree.qemu({**THREADS, "CPU 0/KVM": "0-15"}, CELLS)
    assert judged(tree, free).findings == ()


def test_no_process_or_several_are_errors(tree: ProcTree) -> None:
    with pytest.raises(HostError, match="no QEMU process"):
        capture_running_vm("none", BARE, ProcFiles(str(tree.root)))
    # Something that merely says so is not taken for the VM.
    tree.process(99, {"liar": "0"}, ("liar", "-uuid", UUID))
    assert captured(tree).process == PID
    tree.qemu(THREADS, CELLS, pid=9000)
    with pytest.raises(HostError, match="4242, 9000"):
        captured(tree)


def test_thread_names_and_cgroups_tell_what_a_thread_does() -> None:
    assert classify_thread("CPU 12/KVM", "") == (ThreadKind.VCPU, 12)
    assert classify_thread("ALL CPUs/TCG", "") == (ThreadKind.ALL_VCPUS, None)
    assert classify_thread("IO mon_iothread", "") == (ThreadKind.EMULATOR, None)
    cgroup = "4:cpuset:/machine/qemu-1-vm.libvirt-qemu/libvirt/iothread3\n1:cpu:/x\n"
    assert classify_thread("qemu", cgroup) == (ThreadKind.IOTHREAD, 3)
    assert classify_thread("vcpu", "0::/machine/emulator") == (ThreadKind.EMULATOR, None)


def test_every_policy_that_the_kernel_prints_is_read() -> None:
    lines = (
        "7f00 default anon=1 N0=1 kernelpagesize_kB=4\n"
        "7f10 bind=static:0-1 anon=1 N1=1 kernelpagesize_kB=4\n"
        "7f20 prefer (many):0,2 N2=4 kernelpagesize_kB=2048\n"
        "7f30 local heap\n7f40 weighted interleave:0-1\n7f50 interleave=relative|static:1\n"
        r"7f60 default file=/a\040b\040(deleted) mapped=3 mapmax=2 N0=3 kernelpagesize_kB=4"
    )
    found = parse_numa_maps(lines)
    modes = "default,bind,prefer (many),local,weighted interleave,interleave,default"
    assert [policy.mode for policy in found] == modes.split(",")
    assert [str(policy.nodes) for policy in found][:3] == ["", "0-1", "0,2"]
    assert found[2].pages_by_node == ((2, 4),)
    assert found[6].file == "/a b (deleted)"
    for bad in ("7f00", "zz default", "7f00 default N0=x", "7f00 \x1b[31m:1"):
        with pytest.raises(InputError):
            parse_numa_maps(bad)


def test_backends_are_read_in_both_spellings() -> None:
    old = (
        "memory-backend-file,id=ram-node1,mem-path=/a,,b,size=1048576,"
        "host-nodes=0-1,host-nodes=3,policy=bind"
    )
    new = '{"qom-type":"memory-backend-ram","id":"pc.ram","size":4096}'
    argv = ("qemu", "-object", old, "-object", new, "-object", "secret,id=x", "-object", "{bad")
    assert [(b.name, b.size_bytes, str(b.host_nodes), b.policy) for b in parse_backends(argv)] == [
        ("ram-node1", MIB, "0-1,3", "bind"),
        ("pc.ram", 4096, "", None),
    ]


def test_odd_stat_lines_and_interrupt_names_are_read() -> None:
    line = "7 (a) b (c) R 1 " + " ".join(str(i) for i in range(5, 53))
    assert parse_stat(line, "stat").pu == 39
    with pytest.raises(InputError):
        parse_stat("7 (a", "stat")
    assert parse_vfio_interrupts(" 9: 0 PCI vfio-intx(10000:01:00.0)\n") == (
        (Bdf.parse("10000:01:00.0"), 9, "vfio-intx"),
    )
