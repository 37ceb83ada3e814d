"""Pools for tests: hosts with VMs that the ordinary planner has put there."""

import random
from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from homenode.cluster.pool.fits import DEFAULT_SIZES, VmSize
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.stored import domain_of_plan
from homenode.vm.host_sources import NamedHost, NamedHosts
from homenode.vm.plan import Unplannable
from homenode.vm.sources import load_host

GPU1, GPU2, GPU4, GPU8 = DEFAULT_SIZES


@cache
def shipped(name: str) -> Host:
    return load_host(name)


def with_vm(host: Host, size: VmSize, name: str) -> Host:
    """The host with one VM more. Raises Unplannable."""
    request = size.request(host)
    request = replace(request, guest=replace(request.guest, name=name))
    return replace(host, domains=(*host.domains, domain_of_plan(plan(host, request))))


def filled(host: Host, seed: int, most: int = 9) -> Host:
    """The host after random arrivals and departures."""
    rng = random.Random(seed)
    for number in range(rng.randint(0, most)):
        if host.domains and rng.random() < 0.25:
            gone = rng.choice(host.domains)
            host = replace(host, domains=tuple(vm for vm in host.domains if vm is not gone))
            continue
        try:
            host = with_vm(host, rng.choice(DEFAULT_SIZES), f"vm-{seed}-{number}")
        except Unplannable:
            continue
    return host


def with_free_memory(host: Host, bytes_of_node: Sequence[int]) -> Host:
    nodes = zip(host.nodes, bytes_of_node, strict=True)
    return replace(host, nodes=tuple(replace(node, memory_free_bytes=free) for node, free in nodes))


def named(**hosts: Host) -> NamedHosts:
    return NamedHosts(
        tuple(
            NamedHost(name=name, source=f"test {name}", host=replace(host, name=name))
            for name, host in hosts.items()
        ),
        (),
    )
