"""VMs that are planned together: each gets what no other has, in an order in which all fit."""

import pytest

from homenode.cpuset import CpuSet
from homenode.plan.pipeline import FileRequest, plan_several
from homenode.units import GIB
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, PlanOptions
from tests.small_hosts import even_host

HOST = even_host(2, 1, 1, 6, 1, memory_bytes=64 * GIB)


Sizes = tuple[tuple[int, int], ...]


def requests(*sizes: tuple[int, int], balance: Balance | None = None) -> list[FileRequest]:
    """VMs of one node with so many vCPUs and GiB."""
    options = PlanOptions("pin-numa", max_nodes=1, balance=balance)
    return [
        FileRequest(
            name=f"vm{number}",
            original=f"""<domain type='kvm'><name>vm{number}</name>
<memory unit='GiB'>{gib}</memory><vcpu>{vcpus}</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<cpu mode='host-passthrough'/><devices/></domain>""".encode(),
            options=options,
        )
        for number, (vcpus, gib) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "balance"),
    [
        (((1, 20), (1, 20), (1, 20)), None),  # as they are given
        (((1, 30), (1, 30), (1, 60)), None),  # the one with the most memory first
        (((3, 4), (3, 4), (5, 1)), None),  # the one with the most vCPUs first
        # no emulator on a core of its own, where the second VM would have to make room for it
        (((3, 1), (3, 1), (2, 1), (2, 1), (2, 1)), Balance.PACK),
    ],
)
def test_vms_have_no_cpu_and_no_memory_in_common(sizes: Sizes, balance: Balance | None) -> None:
    files = requests(*sizes, balance=balance)
    plans = [planned.plan for planned in plan_several(files, HOST)]
    assert [plan.vm.name for plan in plans] == [file.name for file in files]
    used = [CpuSet.union(plan.vcpu_pins) for plan in plans]
    assert len(CpuSet.union(used)) == sum(vcpus for vcpus, _ in sizes)
    shared = [plan.vm.emulator_pus == pus for plan, pus in zip(plans, used, strict=True)]
    assert set(shared) == {balance is Balance.PACK}
    for node in HOST.nodes:
        assert sum(plan.vm.memory_bytes for plan in plans if plan.nodes == (node.index,)) < 62 * GIB


def test_the_refusal_is_that_of_the_order_in_which_the_most_vms_fit() -> None:
    """By vCPUs the second is the first, and the other one finds its node filled."""
    with pytest.raises(Unplannable) as refusal:
        plan_several(requests((1, 70), (2, 60)), HOST)
    assert refusal.value.rejections[0].detail.endswith(" 1.56 GiB free")
    with pytest.raises(Unplannable, match=r"^vm2 "):  # of orders alike, as given
        plan_several(requests((4, 1), (4, 1), (5, 2)), HOST)
