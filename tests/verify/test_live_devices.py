"""Memory devices, vCPUs, interrupts and what slows a VM down, of a running VM."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.domain.verification import check_throttle
from homenode.check.verify.live.capture import ProcFiles, capture_running_vm
from homenode.check.verify.live.checks import check_groups, check_limits
from homenode.check.verify.live.procfs import parse_vfio_interrupts
from homenode.findings import Findings, Severity
from homenode.units import GIB
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.model import MemoryDevice, Vm
from homenode.vm.plan import vm_as_it_runs
from tests.proc_trees import BARE, MIB, PID, UUID, ProcTree
from tests.verify.test_live import CELLS, EXPECTED, GPU, PAGES, THREADS, ids, judged, pus
from tests.verify_documents import DEVICES, tuned


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    tree = ProcTree(tmp_path)
    tree.qemu(THREADS, CELLS)
    tree.memory(PAGES)
    return tree


SIZE, NODE = 128 * MIB, pus("1")
DIMM = MemoryDevice(
    alias="dimm0", cell=1, size_bytes=SIZE, plugged_bytes=SIZE, nodes=NODE, mode="strict"
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
    found = build_vm(open_domain(document, "vm.xml"))
    piece = found.memory_pieces["memory device dimm0 (cell 0)"]
    assert (piece.memory_bytes, piece.nodes, piece.mode) == (GIB, pus("1"), "strict")
    assert found.offline_vcpus == pus("1")
    one_by_one = document.replace(
        b"<numatune>",
        b"<vcpus><vcpu id='0' enabled='no'/><vcpu id='1' enabled='yes'/></vcpus><numatune>",
    )
    facts = build_vm(open_domain(one_by_one, "vm.xml"))
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
    document = build_vm(open_domain(tuning.document, "vm.xml"))
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


# As Linux 6.8 prints them, but for 2 CPUs.
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
    assert finding.observed == "1 of 2 served by CPUs 0-3"
    assert "/proc/irq/131/smp_affinity_list" in (finding.fix or "")


def test_interrupts_that_cannot_be_read_are_inconclusive(tree: ProcTree) -> None:
    tree.put("proc/interrupts", INTERRUPTS)
    (finding,) = judged(tree).findings
    assert (finding.id, finding.severity) == ("live-unread", Severity.INCONCLUSIVE)
    assert finding.subject == f"interrupts of {GPU}" and "root" in (finding.fix or "")
    (tree.root / "proc/interrupts").unlink()
    (finding,) = judged(tree).findings
    assert (finding.id, finding.subject) == ("live-unread", "interrupts")


DOMAIN = "<domain type='kvm'><name>a</name><vcpu>2</vcpu><cputune>{tune}</cputune>{more}</domain>"


@pytest.mark.parametrize(
    ("tune", "named"),
    [
        ("<quota>2000</quota>", ["each vCPU: 2% of a CPU, by <quota>"]),
        ("<period>10000</period><quota>5000</quota>", ["each vCPU: 50% of a CPU, by <quota>"]),
        ("<quota>100000</quota><period>100000</period>", []),
        ("<quota>-1</quota><shares>2</shares>", []),
        ("<global_quota>150000</global_quota>",
         ["all 2 vCPUs together: 150% of a CPU, by <global_quota>"]),
        ("<global_quota>200000</global_quota>", []),
        ("<emulator_quota>1000</emulator_quota>",
         ["the emulator: 1% of a CPU, by <emulator_quota>"]),
        ("<vcpusched vcpus='0' scheduler='idle'/>",
         ["<vcpusched>: idle, after every other program"]),
        ("<vcpusched vcpus='0' scheduler='fifo' priority='1'/>", []),
    ],
)  # fmt: skip
def test_a_document_that_gives_less_than_its_pus_is_named(tune: str, named: list[str]) -> None:
    found = check_throttle(open_domain(DOMAIN.format(tune=tune, more="").encode(), "vm.xml"))
    assert [f"{one.subject}: {one.observed}" for one in found if one.is_bad] == named


def test_a_limit_of_a_disk_is_worth_knowing_and_no_fault() -> None:
    more = (
        "<devices><disk type='file'><target dev='vda'/><iotune>"
        "<total_iops_sec>100</total_iops_sec></iotune></disk></devices>"
    )
    (found,) = check_throttle(open_domain(DOMAIN.format(tune="", more=more).encode(), "vm.xml"))
    assert (found.id, found.subject, found.is_bad) == ("io-limit", "disk vda", False)
    assert found.observed == "<iotune>: total_iops_sec 100"


TWO = b"<domain type='kvm'><name>vm</name><memory unit='MiB'>128</memory><vcpu>2</vcpu></domain>"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, []),
        ({"sys/fs/cgroup/m/vm/vcpu1/cpu.max": "max 100000\n"}, []),
        ({"sys/fs/cgroup/m/vm/vcpu1/cpu.max": "2000 100000\n"},
         [("live-quota", "vCPU 1", "2% of a CPU, by cgroup /m/vm/vcpu1")]),
        ({"sys/fs/cgroup/m/vm/cpu.max": "150000 100000\n"},
         [("live-quota", "vm", "150% of a CPU, by cgroup /m/vm")]),
        ({"sys/fs/cgroup/m/vm/cpu.max": "200000 100000\n"}, []),
        ({"sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_quota_us": "50000\n",
          "sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_period_us": "100000\n"},
         [("live-quota", "vCPU 0", "50% of a CPU, by cgroup /m/vm/vcpu0")]),
        ({"sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_period_us": "100000\n"}, []),
        ({f"proc/{PID}/task/{PID + 2}/stat": "1 (x) S " + " ".join(["0"] * 37 + ["5"] * 12)},
         [("live-scheduler", "vCPU 1", "SCHED_IDLE")]),
    ],
)  # fmt: skip
def test_a_running_vm_that_the_kernel_holds_back_is_named(
    files: dict[str, str], named: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    tree = ProcTree(tmp_path)
    tree.qemu({"CPU 0/KVM": "0", "CPU 1/KVM": "1"}, ((64, "0"), (64, "1")))
    for number in range(2):
        text = f"0::/m/vm/vcpu{number}\n"
        tree.put(f"proc/{PID}/task/{PID + 1 + number}/cgroup", text)
    for path, text in files.items():
        tree.put(path, text)
    seen = capture_running_vm(UUID, BARE, ProcFiles(str(tmp_path)), watched_s=0)
    found = check_limits(read_vm(TWO, "vm.xml"), seen)
    assert [(one.id, one.subject, one.observed) for one in found] == named


IO_MAX = "254:0 rbps=1048576 wbps=max riops=max wiops=max"


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("memory.high", "67108864", [("live-memory-limit", "64 MiB, by memory.high of cgroup {}")]),
        ("memory.max", "134217728", []),
        ("memory.max", "max", []),
        ("io.max", IO_MAX, [("live-io-limit", f"{IO_MAX}, by io.max of cgroup {{}}")]),
        ("io.weight", "default 50", [("live-shares", "50, by io.weight of cgroup {}")]),
        ("cpu.weight", "100", []),
        ("cpu.weight", "1", [("live-shares", "1, by cpu.weight of cgroup {}")]),
    ],
)
@pytest.mark.parametrize("directory", ["/m/vm", "/m"])
def test_a_limit_of_a_cgroup_is_named_with_its_figure_and_one_that_is_none_is_not(
    directory: str, file: str, text: str, named: list[tuple[str, str]], tmp_path: Path
) -> None:
    tree = ProcTree(tmp_path)
    tree.qemu({"CPU 0/KVM": "0", "CPU 1/KVM": "1"}, ((64, "0"), (64, "1")))
    tree.put(f"proc/{PID}/cgroup", "0::/m/vm/emulator\n")
    tree.put(f"sys/fs/cgroup{directory}/{file}", f"{text}\n")
    seen = capture_running_vm(UUID, BARE, ProcFiles(str(tmp_path)), watched_s=0)
    found = check_groups(read_vm(TWO, "vm.xml"), seen)
    assert [(one.id, one.observed) for one in found] == [
        (id_, said.format(directory)) for id_, said in named
    ]
