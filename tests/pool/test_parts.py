"""Parts of GPUs: mediated devices and vGPUs in flavours, in what still fits and in packings."""

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.division import PackRequest
from homenode.cluster.pool.flavour import Flavour, parse_flavours
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.pack import pack
from homenode.cluster.pool.place import PoolPlaces
from homenode.errors import InputError
from homenode.machine.pci import PartKind
from homenode.machine.topology import Host
from homenode.vm.plan_model import Unplannable
from tests.pool.pools import pool_of, shipped, with_vm

DIVIDED = "x86-2p2n8c8t-divided-gpus"
TEXT = """
format = 1
[[flavour]]
name = "part"
gpus = 1
gpu_profile = "%s"
vcpus = 1
memory = "1GiB"
"""


def _flavour(profile: str) -> Flavour:
    (found,) = parse_flavours(TEXT % profile, "flavours.toml")
    return found


def test_parts_that_no_flavour_takes_are_stranded_for_want_of_one_and_not_of_memory() -> None:
    text = TEXT.replace('gpu_profile = "%s"', 'layout = "default"')
    pool = pool_of([("a", shipped(DIVIDED))])
    (line,) = outlook(pool, parse_flavours(text, "flavours.toml")).hosts
    assert [(one.missing, len(one.gpus)) for one in line.stranded] == [("flavour", 6)]


def _one_at_a_time(host: Host, flavour: Flavour) -> int:
    for number in range(20):
        try:
            host = with_vm(host, flavour, f"vm-{number}")
        except (Unplannable, InputError):
            return number
    raise AssertionError("no end")


def _parts(host: Host, profile: str) -> int:
    return sum(
        part.profile == profile and part.kind in (PartKind.MEDIATED, PartKind.VIRTUAL_FUNCTION)
        for gpu in host.pci_devices
        for part in gpu.parts
    )


@pytest.mark.parametrize("profile", ["NVIDIA A40-12Q", "NVIDIA A40-24C", "NVIDIA H200X-1-18C"])
def test_as_many_vms_fit_as_there_are_parts_of_the_profile(profile: str) -> None:
    host, flavour = shipped(DIVIDED), _flavour(profile)
    found = outlook(pool_of([("a", host)]), [flavour]).hosts[0].fits[0]
    assert _parts(host, profile) > 0
    assert found.local + found.degraded == _one_at_a_time(host, flavour) == _parts(host, profile)


def test_a_mig_instance_that_no_vm_can_have_fits_nowhere() -> None:
    found = outlook(pool_of([("a", shipped(DIVIDED))]), [_flavour("1g.10gb")])
    assert (found.fits[0].local, found.fits[0].degraded) == (0, 0)


def test_a_part_that_a_vm_has_is_given_to_no_other() -> None:
    flavour = _flavour("A40-12Q")
    host = shipped(DIVIDED)
    for number in range(_parts(host, "NVIDIA A40-12Q")):
        host = with_vm(host, flavour, f"vm-{number}")
    assert len({uuid for vm in host.domains for uuid in (*vm.mediated, *vm.devices)}) == 2
    assert next(PoolPlaces(pool_of([("a", host)]), [flavour]).ranked(flavour), None) is None


def test_parts_are_packed_as_often_as_they_are_there() -> None:
    pytest.importorskip("ortools")
    pool = pool_of([("a", shipped(DIVIDED)), ("b", shipped(DIVIDED))])
    kinds = [_flavour("A40-12Q"), replace(_flavour("H200X-1-18C"), name="other")]
    requests = [
        PackRequest(flavour=one, names=tuple(f"{one.name}-{i}" for i in range(5))) for one in kinds
    ]
    found = pack(pool, requests, seconds=5)
    assert (found.value, found.bound) == (8, 8)
    given = {(vm.host, d.uuid or d.bdf) for vm in found.vms for d in vm.plan.vm.hostdevs}
    assert len(given) == 8


def test_a_profile_without_a_number_of_parts_is_refused() -> None:
    with pytest.raises(InputError, match=r"flavour\[0\]\.gpus: expected"):
        parse_flavours(TEXT.replace("gpus = 1\n", "") % "A40-12Q", "flavours.toml")
