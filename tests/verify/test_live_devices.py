"""Memory devices, vCPUs that are offline, and interrupts of a running VM."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.verify.live.procfs import parse_vfio_interrupts
from homenode.findings import Findings, Severity
from homenode.units import GIB
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.model import MemoryDevice, Vm
from homenode.vm.plan import vm_as_it_runs
from tests.proc_trees import MIB, ProcTree
from tests.verify.test_live import CELLS, EXPECTED, GPU, PAGES, THREADS, ids, judged, pus
from tests.verify_documents import DEVICES, tuned


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path)
    tree.qemu(THREADS, CELLS)
    tree.memory(PAGES)
    return tree


DIMM = MemoryDevice(
    alias="dimm0",
    cell=1,
    size_bytes=128 * MIB,
    plugged_bytes=128 * MIB,
    nodes=pus("1"),
    mode="strict",
)


def with_dimm(tree: ProcTree, pages: str) -> Findings:
    """Judges the VM with a memory device of 128 MiB on cell 1."""
    tree.qemu(THREADS, CELLS, more={"memdimm0": (128, "1")})
    tree.memory((*PAGES, (128, pages)))
    return judged(tree, replace(EXPECTED, memory_devices=(DIMM,)))


def test_memory_devices_are_compared_with_the_node_of_their_cell(tree: ProcTree) -> None:
    good = with_dimm(tree, "bind:1 anon=9 N1=32768 kernelpagesize_kB=4")
    assert good.findings == ()
    assert "memory device dimm0 (cell 1) (node 1): 128 MiB on node 1" in good.checked
    (finding,) = with_dimm(tree, "bind:0 N0=32768 kernelpagesize_kB=4").findings
    assert (finding.id, finding.subject) == ("live-memory", "memory device dimm0 (cell 1)")
    assert finding.observed == "128 MiB on node 0"


def test_memory_devices_bound_elsewhere_or_not_there_are_reported(tree: ProcTree) -> None:
    tree.qemu(THREADS, CELLS, more={"memdimm0": (128, "0")})
    tree.memory((*PAGES, (128, "bind:0 kernelpagesize_kB=4")))
    found = judged(tree, replace(EXPECTED, memory_devices=(DIMM,)))
    assert ids(found)[0] == ("live-binding", "memory device dimm0 (cell 1)")
    tree.qemu(THREADS, CELLS)
    tree.memory(PAGES)
    found = judged(tree, replace(EXPECTED, memory_devices=(DIMM,)))
    assert ids(found) == [("live-memory-unknown", "memory device dimm0 (cell 1)")]


def test_a_document_names_its_memory_devices_and_the_vcpus_that_are_offline() -> None:
    document = (
        b"<domain type='kvm'><name>vm</name><maxMemory slots='1' unit='GiB'>8</maxMemory>"
        b"<memory unit='GiB'>3</memory><vcpu current='1'>2</vcpu>"
        b"<numatune><memnode cellid='0' mode='strict' nodeset='1'/></numatune>"
        b"<os><type arch='x86_64' machine='q35'>hvm</type></os>"
        b"<cpu><numa><cell id='0' cpus='0-1' memory='2' unit='GiB'/></numa></cpu><devices>"
        b"<memory model='dimm'><target><size unit='GiB'>1</size><node>0</node></target>"
        b"<alias name='dimm0'/></memory></devices></domain>"
    )
    found = vm_of(open_domain(document, "vm.xml"))
    piece = found.memory_pieces["memory device dimm0 (cell 0)"]
    assert (piece.memory_bytes, piece.nodes, piece.mode) == (GIB, pus("1"), "strict")
    assert found.offline_vcpus == pus("1")
    one_by_one = document.replace(
        b"<numatune>",
        b"<vcpus><vcpu id='0' enabled='no'/><vcpu id='1' enabled='yes'/></vcpus><numatune>",
    )
    facts = vm_of(open_domain(one_by_one, "vm.xml"))
    assert facts.offline_vcpus == pus("0")


def _bound(vm: Vm) -> dict[str, tuple[object, ...]]:
    return {
        subject: (piece.memory_bytes, piece.nodes, piece.mode, piece.page_bytes)
        for subject, piece in vm.memory_pieces.items()
    }


@pytest.mark.parametrize("layout", ["pin", "pin-numa", "pin-numa-pci"])
def test_a_plan_says_of_a_process_what_its_document_does(layout: str) -> None:
    """And where its devices are on the host; memory devices are the document's alone."""
    tuning = tuned(layout)
    document = vm_of(open_domain(tuning.document, "vm.xml"))
    running = replace(document, memory_devices=(DIMM,), offline_vcpus=pus("3"))
    planned = vm_as_it_runs(tuning.plan, running)
    assert _bound(planned) == _bound(running)
    for field in ("vcpu_pins", "emulator_pus", "iothread_pins", "offline_vcpus"):
        assert getattr(planned, field) == getattr(running, field)
    assert [(str(one.bdf), one.host_node) for one in planned.hostdevs] == [
        (bdf, node) for node, bdf in enumerate(DEVICES)
    ]


def test_vcpus_that_are_offline_by_the_document_are_not_missing(tree: ProcTree) -> None:
    threads = {name: pin for name, pin in THREADS.items() if name != "CPU 3/KVM"}
    tree.qemu(threads, CELLS)
    assert ids(judged(tree)) == [("live-vcpu-missing", "vCPU 3")]
    assert judged(tree, replace(EXPECTED, offline_vcpus=pus("3"))).findings == ()


def test_a_thread_of_kvms_own_is_no_stray(tree: ProcTree) -> None:
    tree.qemu({**THREADS, "kvm-nx-lpage-re": "1"}, CELLS)
    assert judged(tree).findings == ()


# As Linux 6.8 prints them, but for 2 PUs.
INTERRUPTS = """\
            CPU0       CPU1
   0:         44          0  IR-IO-APIC    2-edge      timer
  16:          0          7  IR-IO-APIC   16-fasteoi   vfio-intx(0000:41:00.0), ehci_hcd:usb1
 131:        512          0  IR-PCI-MSIX-0000:41:00.0    0-edge      vfio-msix[0](0000:41:00.0)
 132:          0          3  IR-PCI-MSI-0000:c1:00.0    0-edge      vfio-msi[0](0000:C1:00.0)
 NMI:          0          0   Non-maskable interrupts
"""


def test_interrupts_are_read_as_the_kernel_lists_them(tree: ProcTree) -> None:
    assert [(str(bdf), irq, name) for bdf, irq, name in parse_vfio_interrupts(INTERRUPTS)] == [
        ("0000:41:00.0", 16, "vfio-intx"),
        ("0000:41:00.0", 131, "vfio-msix[0]"),
        ("0000:c1:00.0", 132, "vfio-msi[0]"),
    ]
    tree.put("proc/interrupts", INTERRUPTS)
    tree.put("proc/irq/16/smp_affinity_list", "0-15\n")
    tree.put("proc/irq/16/effective_affinity_list", "4\n")
    tree.put("proc/irq/131/smp_affinity_list", "0-3\n")
    tree.put("proc/irq/131/effective_affinity_list", "\n")
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-interrupts", f"interrupts of {GPU}")
    assert finding.observed == "1 of 2 served by PUs 0-3"
    assert "/proc/irq/131/smp_affinity_list" in (finding.fix or "")


def test_interrupts_that_cannot_be_read_are_inconclusive(tree: ProcTree) -> None:
    tree.put("proc/interrupts", INTERRUPTS)
    (finding,) = judged(tree).findings
    assert (finding.id, finding.severity) == ("live-unread", Severity.INCONCLUSIVE)
    assert finding.subject == f"interrupts of {GPU}" and "root" in (finding.fix or "")
    (tree.root / "proc/interrupts").unlink()
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-unread", "interrupts")
