"""Placements on the hosts that are shipped, and on published captures where they are here."""

from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

import homenode
from homenode.cpuset import CpuSet
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import CoreKind
from homenode.plan.search.place import place
from homenode.units import GIB, MIB
from homenode.vm.plan import Unplannable
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared
from tests.small_hosts import asking, small_request

HOSTS = sorted((Path(homenode.__file__).parent / "machine/hosts").glob("*.toml"))


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_a_vm_with_one_gpu_sits_in_the_gpus_package(path: Path) -> None:
    host = load_host(str(path))
    for gpu in host.devices_of_kind(DeviceKind.GPU)[:8]:
        request = small_request(2, GIB, devices=[str(gpu.bdf)])
        placement = place(host, request)
        cost = {term.name: term.value for term in placement.cost}
        home = next((node for node in host.nodes if node.index == gpu.node), None)
        # A node without memory can give a cell none: then the VM lies elsewhere.
        if home is not None and home.package is not None and home.memory_bytes:
            assert cost["device_class"] == 10


@needs_shared
@pytest.mark.parametrize(("vcpus", "llcs"), [(8, 1), (16, 2), (24, 3)])
def test_two_epyc_9654_give_whole_llcs(vcpus: int, llcs: int) -> None:
    host = load_host(str(shared("machines/hwloc/AMD-19h-Zen4-2xEpyc-9654.xml")))
    placement = place(host, small_request(vcpus, 16 * GIB))
    used = CpuSet(pu for pin in placement.vcpu_pins for pu in pin)
    touched = [llc for llc in host.llcs if not llc.pus.isdisjoint(used)]
    assert len(touched) == llcs
    assert all(len(llc.pus & used) == 8 for llc in touched)


@needs_shared
def test_an_i7_1370p_gives_performance_cores_to_vcpus_and_says_when_20_pus_are_too_few() -> None:
    host = load_host(str(shared("machines/hwloc/Intel-RaptorLake-Corei7-1370P.xml")))
    kind_of = {pu: core.kind for core in host.cores for pu in core.pus}
    request = replace(small_request(12, 8 * GIB, layout="pin-numa-smt"), keep_vcpus=True)
    placement = place(host, request)
    assert {kind_of[pu] for pin in placement.vcpu_pins for pu in pin} == {CoreKind.PERFORMANCE}
    assert placement.emulator_pus is not None
    assert {kind_of[pu] for pu in placement.emulator_pus} == {CoreKind.EFFICIENCY}
    for mixed in (False, True):
        with pytest.raises(Unplannable, match="20 free"):
            place(host, asking(request, vcpus=24, mixed_kinds=mixed))


@pytest.mark.parametrize("page_bytes", [None, 2 * MIB, GIB], ids=["4KiB", "2MiB", "1GiB"])
def test_more_memory_than_the_host_has_is_critical_though_nothing_is_pinned(
    page_bytes: int | None,
) -> None:
    host = load_host("rtx4080-i9-14900k")
    for gib, is_short in ((60, False), (1024, True)):
        request = replace(small_request(4, gib * GIB, layout="default"), page_bytes=page_bytes)
        found = [f for f in place(host, request).findings if f.id == "memory-short"]
        assert [f.severity for f in found] == ["critical"] * is_short
    # All 64 GiB are there, and QEMU and the host need some of them.
    request = replace(small_request(4, 64 * GIB, layout="default"), page_bytes=page_bytes)
    (found_one,) = (f for f in place(host, request).findings if f.severity == "critical")
    assert found_one.id == "host-memory-taken"
    nowhere = structs.replace(host, nodes=())
    request = small_request(4, 1024 * GIB, layout="default")
    assert not any(f.id == "memory-short" for f in place(nowhere, request).findings)
