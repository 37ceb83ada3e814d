"""What slows a VM down whatever its placement: in its document, and as the kernel has it."""

from pathlib import Path

import pytest

from homenode.check.domain.throttles import throttle_findings
from homenode.check.verify.live.capture import ProcFiles, capture_running_vm
from homenode.check.verify.live.checks import group_findings, limit_findings
from homenode.vm.domain.read import open_domain, read_vm
from tests.proc_trees import BARE, PID, UUID, ProcTree

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
    found = throttle_findings(open_domain(DOMAIN.format(tune=tune, more="").encode(), "vm.xml"))
    assert [f"{one.subject}: {one.observed}" for one in found if one.is_bad] == named


def test_a_limit_of_a_disk_is_worth_knowing_and_no_fault() -> None:
    more = (
        "<devices><disk type='file'><target dev='vda'/><iotune>"
        "<total_iops_sec>100</total_iops_sec></iotune></disk></devices>"
    )
    (found,) = throttle_findings(open_domain(DOMAIN.format(tune="", more=more).encode(), "vm.xml"))
    assert (found.id, found.subject, found.is_bad) == ("io-limit", "disk vda", False)
    assert found.observed == "<iotune>: total_iops_sec 100"


TWO = b"<domain type='kvm'><name>vm</name><memory unit='MiB'>128</memory><vcpu>2</vcpu></domain>"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, []),
        ({"sys/fs/cgroup/m/vm/vcpu1/cpu.max": "max 100000\n"}, []),
        ({"sys/fs/cgroup/m/vm/vcpu1/cpu.max": "2000 100000\n"},
         [("live-quota", "vCPU 1", "2% of a PU, by cgroup /m/vm/vcpu1")]),
        ({"sys/fs/cgroup/m/vm/cpu.max": "150000 100000\n"},
         [("live-quota", "vm", "150% of a PU, by cgroup /m/vm")]),
        ({"sys/fs/cgroup/m/vm/cpu.max": "200000 100000\n"}, []),
        ({"sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_quota_us": "50000\n",
          "sys/fs/cgroup/cpu/m/vm/vcpu0/cpu.cfs_period_us": "100000\n"},
         [("live-quota", "vCPU 0", "50% of a PU, by cgroup /m/vm/vcpu0")]),
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
    found = limit_findings(read_vm(TWO, "vm.xml"), seen)
    assert [(one.id, one.subject, one.observed) for one in found] == named


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("memory.high", "67108864", [("live-memory-limit", "64 MiB, by memory.high of cgroup {}")]),
        ("memory.max", "134217728", []),
        ("memory.max", "max", []),
        (
            "io.max",
            "254:0 rbps=1048576 wbps=max riops=max wiops=max",
            [
                (
                    "live-io-limit",
                    "254:0 rbps=1048576 wbps=max riops=max wiops=max, by io.max of cgroup {}",
                )
            ],
        ),
        ("io.weight", "default 50", [("live-shares", "50, by io.weight of cgroup {}")]),
        ("cpu.weight", "100", []),
        ("cpu.weight", "1", [("live-shares", "1, by cpu.weight of cgroup {}")]),
    ],
)
@pytest.mark.parametrize("folder", ["/m/vm", "/m"])
def test_a_limit_of_a_cgroup_is_named_with_its_figure_and_one_that_is_none_is_not(
    folder: str, file: str, text: str, named: list[tuple[str, str]], tmp_path: Path
) -> None:
    tree = ProcTree(tmp_path)
    tree.qemu({"CPU 0/KVM": "0", "CPU 1/KVM": "1"}, ((64, "0"), (64, "1")))
    tree.put(f"proc/{PID}/cgroup", "0::/m/vm/emulator\n")
    tree.put(f"sys/fs/cgroup{folder}/{file}", f"{text}\n")
    seen = capture_running_vm(UUID, BARE, ProcFiles(str(tmp_path)), watched_s=0)
    found = group_findings(read_vm(TWO, "vm.xml"), seen)
    assert [(one.id, one.observed) for one in found] == [
        (id_, said.format(folder)) for id_, said in named
    ]
