"""What other VMs of the host have, and which of them is the VM that is planned."""

import pytest
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.machine.topology import DomainMark, RunningDomain
from homenode.plan.allocations import find_allocations, own_domains
from tests.small_hosts import (
    asking,
    even_host,
    floating_domain,
    pinned_domain,
    small_guest,
    small_request,
)

RANGE = CpuSet.parse("0-3")
COPY = replace(pinned_domain("0", running=False), mark=DomainMark.COPY)


@pytest.mark.parametrize(("name", "is_own"), [("vm", True), ("other", False), ("vm/1", False)])
def test_a_domain_of_the_same_name_is_the_vm_itself_unless_captures_gave_both_their_name(
    name: str, is_own: bool
) -> None:
    host = even_host(1, domains=[pinned_domain("0", name=name)])
    request = small_request()
    request = replace(request, guest=small_guest(name="vm/1" if "/" in name else "vm"))
    assert [domain.name for domain in own_domains(host, request)] == [name] * is_own


@pytest.mark.parametrize(("emulator", "service"), [("2-3", "2-3,6-7"), ("0-7", "")])
def test_an_emulator_that_may_run_on_every_cpu_takes_no_core(emulator: str, service: str) -> None:
    host = even_host(1, domains=[pinned_domain("0", emulator=emulator)])
    assert find_allocations(host, small_request()).service_cores == CpuSet.parse(service)


def test_threads_outside_the_range_of_floating_vcpus_take_cores() -> None:
    domain = replace(pinned_domain("0", emulator="3"), iothread_pus=(CpuSet([1]),))
    domain = replace(domain, vcpu_pins=(CpuSet.parse("0-2,4-6"),))
    found = find_allocations(even_host(1, domains=[domain]), small_request())
    assert (str(found.vcpu_cores), str(found.service_cores)) == ("2,6", "3,7")


@pytest.mark.parametrize(
    ("domain", "subjects"),
    [
        (floating_domain(2, memory_bytes=1), ["load of domain 'd'", "memory of domain 'd'"]),
        (floating_domain(2), ["load of domain 'd'"]),  # its memory is not known
        (pinned_domain("0", memory_bytes=1), ["memory of domain 'd'"]),
        (pinned_domain("0", memory_bytes=1, memory_by_node=((0, 1),)), []),
        (replace(pinned_domain("0"), vcpu_pins=(CpuSet([0, 4]), CpuSet([1, 5]))), []),
        (replace(pinned_domain("0"), vcpu_pins=(RANGE,)), ["load of domain 'd'"]),
        (COPY, ["CPUs of domain 'd'"]),
        (replace(COPY, mark=DomainMark.OWN), []),
    ],
)
def test_what_floats_and_memory_that_nothing_binds_are_gaps(
    domain: RunningDomain, subjects: list[str]
) -> None:
    host = even_host(1, domains=[replace(domain, name="d")])
    assert [gap.subject for gap in find_allocations(host, small_request()).gaps] == subjects


def test_vcpus_that_float_over_a_range_have_as_many_cores_at_its_end() -> None:
    ranges = replace(pinned_domain("0,3", emulator="0-2"), vcpu_pins=(RANGE, RANGE))
    host = even_host(1, domains=[pinned_domain("3", name="pinned"), ranges])
    found = find_allocations(host, small_request())
    assert str(found.vcpu_cores) == "1-3,5-7" and not found.service_cores


def test_vms_that_are_shut_off_and_hold_their_place_are_named() -> None:
    own = replace(COPY, mark=DomainMark.OWN)
    domains = own, replace(own, name="planned", planned=True), pinned_domain("1", name="runs")
    found = find_allocations(even_host(1, domains=domains), small_request())
    assert found.shut_off == {"other"}
    assert [cores.domain for cores in found.by_domain] == ["other", "planned", "runs"]
    host = even_host(1, domains=[pinned_domain("0", running=False), *domains[1:]])
    for reserve_defined in (False, True):
        request = asking(small_request(), reserve_defined=reserve_defined)
        names = [cores.domain for cores in find_allocations(host, request).by_domain]
        assert names == ["other"] * reserve_defined + ["planned", "runs"]
