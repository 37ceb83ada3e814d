"""Saved plans of other VMs count as if those ran on the host (--after)."""

from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cli.plan import hosts_after
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.plan.request import GuestRequest
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan, encode_plan, with_planned
from homenode.units import GIB
from homenode.vm.plan import Plan
from homenode.vm.plan_options import MemoryMode
from tests.guest_shapes import bdfs, hgx_host, placed
from tests.small_hosts import asking, even_host, pinned_domain, small_request

HOST = even_host(2, 1, 1, 8, 2)


def named(request: GuestRequest, name: str) -> GuestRequest:
    return replace(request, guest=structs.replace(request.guest, name=name))


def plan_of(
    name: str = "vm",
    *,
    layout: str = "pin-numa",
    memory_bytes: int = 8 * GIB,
    page_bytes: int | None = None,
    mode: MemoryMode = MemoryMode.STRICT,
) -> Plan:
    request = named(small_request(4, memory_bytes, layout=layout), name)
    request = asking(request, page_bytes=page_bytes, memory_mode=mode)
    return assemble(HOST, request, placed((2, 2), bound=layout != "pin"))


def test_a_plan_takes_its_pins_memory_and_devices() -> None:
    devices = bdfs("19:00.0", "9b:00.0")
    request = named(small_request(4, 8 * GIB, devices=[str(bdf) for bdf in devices]), "a")
    request = replace(request, guest=structs.replace(request.guest, iothread_ids=(1,)))
    placement = replace(
        placed((2, 2), devices=devices),
        emulator_pus=CpuSet([8]),
        iothread_pus=(CpuSet([9]),),
        cell_memory_bytes=(6 * GIB, 2 * GIB),
    )
    domain = domain_of_plan(assemble(hgx_host(), request, placement))
    assert (domain.name, domain.running, domain.planned) == ("a", False, True)
    assert domain.vcpu_pins == tuple(CpuSet([i]) for i in range(4))
    assert (domain.emulator_pus, domain.iothread_pus) == (CpuSet([8]), (CpuSet([9]),))
    assert (domain.memory_bytes, domain.memory_bound) == (8 * GIB, True)
    assert domain.memory_by_node == ((0, 6 * GIB), (1, 2 * GIB))
    assert domain.devices == devices


def test_huge_pages_count_as_they_are_reserved() -> None:
    domain = domain_of_plan(plan_of(page_bytes=GIB, memory_bytes=7 * GIB))
    assert domain.memory_by_node == ((0, 4 * GIB), (1, 3 * GIB)) and domain.page_bytes == GIB


def test_memory_that_nothing_binds_counts_where_the_vcpus_are() -> None:
    domain = domain_of_plan(plan_of(layout="pin"))
    assert not domain.memory_bound
    assert domain.memory_by_node == ((0, 4 * GIB), (1, 4 * GIB))


def test_preferred_memory_may_spill_and_a_vm_without_pins_may_lie_anywhere() -> None:
    assert not domain_of_plan(plan_of(mode=MemoryMode.PREFERRED)).memory_bound
    request = small_request(4, 8 * GIB, layout="default")
    placement = replace(placed((), bound=False), vcpu_nodes=())
    domain = domain_of_plan(assemble(HOST, request, placement))
    assert domain.vcpu_pins == (None,) * 4 and domain.memory_by_node == ()


def test_each_host_of_several_gets_its_own_plans() -> None:
    other = even_host(2, 1, 1, 4, 1)
    found = with_planned([HOST, other], [("a.json", plan_of("a")), ("b.json", plan_of("b"))])
    assert [[one.name for one in host.domains] for host in found] == [["a", "b"], []]


def test_the_plan_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"a\.json: .*even"):
        with_planned([even_host(2, 1, 1, 4, 1)], [("a.json", plan_of("a"))])


def test_a_vm_that_runs_already_counts_once_and_as_it_runs() -> None:
    running = pinned_domain("4-7", name="a")
    shut_off = pinned_domain("8-9", name="b", running=False)
    host = structs.replace(HOST, domains=(running, shut_off))
    (found,) = with_planned([host], [("a", plan_of("a")), ("b", plan_of("b"))])
    assert found.domains == (running, domain_of_plan(plan_of("b")))


def test_two_plans_of_one_vm_or_of_one_device_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^2: .* a "):
        with_planned([HOST], [("1", plan_of("a")), ("2", plan_of("a"))])
    host = hgx_host()
    request = small_request(4, 8 * GIB, devices=["19:00.0"])
    placement = placed((2, 2), devices=bdfs("19:00.0"))
    plans = [(name, assemble(host, named(request, name), placement)) for name in ("a", "b")]
    with pytest.raises(UsageError, match=r"0000:19:00\.0"):
        with_planned([host], plans)


def test_plans_are_read_from_their_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(encode_plan(plan_of("a")))
    (found,) = hosts_after((HOST,), [path])
    assert [one.name for one in found.domains] == ["a"]
    assert hosts_after((HOST,), ()) == (HOST,)
    path.write_text("{}")
    with pytest.raises(InputError, match="expected"):
        hosts_after((HOST,), [path])
