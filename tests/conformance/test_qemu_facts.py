"""What is wrong in a script for QEMU is seen in QEMU's own tables, and named."""

import re
from functools import cache

import pytest
from msgspec import structs

from homenode.plan.pipeline import PlannedFile, make_vm, plan_for_target
from homenode.units import MIB
from tests.conformance.qemu import missing, planned_of_script, read_of_script
from tests.conformance.qemu_machine import QemuError
from tests.targets.written import host_named, options

pytestmark = pytest.mark.qemu

PLANTED = [
    (r"dst=1,val=20", "dst=1,val=42", {"distances"}),
    (r"(numa_node=)0", r"\g<1>1", {"cell of each device"}),
    (r"nodeid=0,cpus=0-1(.*)nodeid=1,cpus=2-3", r"nodeid=0,cpus=2-3\1nodeid=1,cpus=0-1", {"cells"}),
    (r"host-nodes=1,policy=bind", "host-nodes=0,policy=bind", {"bound memory"}),
    (r"host-nodes=1,policy=bind", "host-nodes=1,policy=preferred", {"bound memory"}),
    (r"hugetlb=on,hugetlbsize=2M,", "", {"huge pages"}),
    (r"sockets=2,cores=2", "sockets=1,cores=4", {"topology"}),
    (r"(vcpu_pus=\(\n  )0\n", r"\g<1>2\n", {"pins"}),
    (r"emulator_pus=\S+", "emulator_pus=3", {"emulator"}),
    (r"(iothread_pus=\(\n  )\S+", r"\g<1>7", {"IOThreads"}),
    (r"#     -device VGA,bus=pcie.0\n", "", {"devices there"}),
    (r"(id=hostdev0,bus=)pci.\d+,addr=0x0", r"\g<1>pcie.0,addr=0x1e", {"cell of each device"}),
    (r"(id=hostdev0,bus=)pci.\d+", r"\g<1>pci.1", {"refused"}),
]


@cache
def made() -> PlannedFile:
    wanted = options("pin-numa-pci", gpu_count=2, page_bytes=2 * MIB)
    vm = make_vm(wanted, "x86_64")
    vm = structs.replace(vm, guest=structs.replace(vm.guest, iothread_ids=(1,)))
    return plan_for_target(vm, wanted, host_named("small-2n8c-2gpu"), "qemu")


def differing(text: str) -> set[str]:
    planned = planned_of_script(made().plan)
    try:
        read = read_of_script(text, 2)
    except QemuError:
        return {"refused"}
    return {name for name in planned if planned[name] != read[name]}


@pytest.mark.parametrize(("found", "slip", "facts"), [("\\A", "", set()), *PLANTED])
def test_a_planted_slip_is_a_difference_of_its_fact(found: str, slip: str, facts: set[str]) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    text = made().rendering.document.decode()
    wrong = re.sub(found, slip, text, count=1, flags=re.DOTALL)
    assert wrong != text or not facts
    assert differing(wrong) == facts
