"""Nova's table of pinning cases as far as they are ours.

Source: openstack/nova, nova/tests/unit/virt/test_hardware.py (facts only).
"""

import pytest
from msgspec import structs

from homenode.errors import UsageError
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.layout import PRESETS, Pinning, Siblings
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, Policy
from tests.small_hosts import NodeSpec, asking, even_host, host_of, pinned_domain, small_request


def pus_of(host: Host, request: GuestRequest) -> list[int] | None:
    try:
        return [pu for pin in place(host, request).vcpu_pins for pu in pin]
    except Unplannable:
        return None


ALL_PUS = structs.replace(
    PRESETS["pin-numa-smt"],
    name="require",
    cells=PRESETS["pin"].cells,
    memory=PRESETS["pin"].memory,
)


def dedicated(vcpus: int, *, isolate: bool = True) -> GuestRequest:
    """isolate: a core for each vCPU; else every CPU, as Nova's prefer packs them."""
    request = small_request(vcpus, GIB, layout="pin" if isolate else ALL_PUS)
    return asking(
        request, keep_vcpus=True, policy=Policy.CORES_FIRST if isolate else Policy.MEMORY_FIRST
    )


ONE_THREAD = {count: even_host(1, 1, 1, count, 1) for count in (3, 4)}


@pytest.mark.parametrize(
    ("cores", "in_use", "vcpus", "expected"),
    [(3, "", 4, None), (4, "0", 4, None), (3, "", 3, [0, 1, 2]), (4, "1", 3, [0, 2, 3])],
)
def test_without_smt_a_vcpu_takes_each_free_core(
    cores: int, in_use: str, vcpus: int, expected: list[int] | None
) -> None:
    domains = [pinned_domain(in_use)] if in_use else []
    host = structs.replace(ONE_THREAD[cores], domains=tuple(domains))
    assert pus_of(host, dedicated(vcpus)) == expected


def test_a_vm_of_four_on_cores_of_four_threads_takes_one_whole_core() -> None:
    host = even_host(1, 1, 1, 2, 4)
    pus = pus_of(host, dedicated(4, isolate=False))
    assert pus == [0, 2, 4, 6]  # the threads of core 0


def test_no_vcpu_shares_a_core_with_another_vm() -> None:
    # Nova's prefer takes orphaned siblings; here one VM shares no core with another.
    host = even_host(1, 1, 1, 4, 2, domains=[pinned_domain("0,2,5,7")])
    assert pus_of(host, dedicated(4, isolate=False)) is None


@pytest.mark.parametrize(("in_use", "expected"), [("0-2", None), ("0-1", [2, 6, 3, 7])])
def test_whole_sibling_groups_of_untouched_cores_are_found(
    in_use: str, expected: list[int] | None
) -> None:
    host = even_host(1, 1, 1, 4, 2, domains=[pinned_domain(in_use)])
    assert pus_of(host, dedicated(4, isolate=False)) == expected


@pytest.mark.parametrize(("in_use", "expected"), [("1", [0, 2]), ("", [0, 1])])
def test_isolate_takes_untouched_cores_and_siblings_only_where_these_are_too_few(
    in_use: str, expected: list[int]
) -> None:
    domains = [pinned_domain(in_use)] if in_use else []
    host = even_host(1, 1, 1, 2, 2, domains=domains)
    assert pus_of(host, dedicated(2)) == expected


@pytest.mark.parametrize(
    ("balance", "expected"), [(Balance.PACK, (0, 1, 3)), (Balance.SPREAD, (1, 2, 3))]
)
def test_three_cells_go_to_the_fullest_or_emptiest_nodes(
    balance: Balance, expected: tuple[int, ...]
) -> None:
    specs = [NodeSpec(((1,) * 4,), memory_bytes=GIB * (16 if i == 3 else 8)) for i in range(4)]
    # Free cores 1, 2, 4 and 2; node 3 has the most memory.
    host = host_of(specs, domains=[pinned_domain("0-2,4-5,12-13")])
    request = asking(small_request(3, 3 * GIB), balance=balance, policy=Policy.SPREAD, max_nodes=3)
    assert place(host, request).nodes == expected


def test_exposed_siblings_that_are_not_pinned_are_a_usage_error() -> None:
    clash = structs.replace(
        PRESETS["pin-numa"], name="custom", siblings=Siblings.EXPOSED, pinning=Pinning.ONE_PER_CORE
    )
    with pytest.raises(UsageError, match="siblings are exposed"):
        place(even_host(), small_request(2, layout=clash))
