"""Pools for tests: shipped hosts with VMs that the ordinary planner has put there."""

import random
from collections.abc import Sequence
from functools import cache

from msgspec import structs
from msgspec.structs import replace

from homenode.cluster.pool.flavour import DEFAULT_LAYOUT, Flavour, default_flavours
from homenode.cluster.pool.model import NodeMemoryState, Pool, PoolBuilder
from homenode.machine.topology import Host, RunningDomain
from homenode.plan.planner import plan
from homenode.plan.stored import domain_of_plan
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host


@cache
def shipped(name: str) -> Host:
    return load_host(name)


def with_vm(host: Host, flavour: Flavour, name: str) -> Host:
    """The host with one VM more. Raises Unplannable."""
    request = flavour.request(host)
    request = replace(request, guest=structs.replace(request.guest, name=name))
    return structs.replace(host, domains=(*host.domains, domain_of_plan(plan(host, request))))


def filled(host: Host, seed: int, most: int = 9) -> Host:
    """The host after random arrivals and departures."""
    rng = random.Random(seed)
    flavours = default_flavours()
    for number in range(rng.randint(0, most)):
        if host.domains and rng.random() < 0.25:
            gone = rng.choice(host.domains)
            host = structs.replace(host, domains=tuple(vm for vm in host.domains if vm is not gone))
            continue
        try:
            host = with_vm(host, rng.choice(flavours), f"vm-{seed}-{number}")
        except Unplannable:
            continue
    return host


def sized(
    name: str,
    gpus: int = 0,
    vcpus: int | None = None,
    memory_bytes: int | None = None,
    *,
    page_bytes: int | None = None,
    gpu_model: str | None = None,
    value: int | None = None,
    options: PlanOptions | None = None,
) -> Flavour:
    """A flavour of this size."""
    options = structs.replace(
        options or PlanOptions(DEFAULT_LAYOUT),
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        page_bytes=page_bytes,
        gpu_count=gpus or None,
    )
    return Flavour(name=name, options=options, gpu_model=gpu_model, value=value)


def pool_of(hosts: Sequence[tuple[str, Host]]) -> Pool:
    builder = PoolBuilder()
    for name, host in hosts:
        builder.add(host, name, f"test {name}")
    return builder.pool()


def with_free_memory(pool: Pool, sizes: Sequence[Sequence[int]]) -> Pool:
    """The pool with other free memory by host and node."""
    hosts = tuple(
        structs.replace(
            host,
            nodes=tuple(
                NodeMemoryState(
                    memory_bytes=node.memory_bytes,
                    memory_free_bytes=free,
                    page_pools=node.page_pools,
                )
                for node, free in zip(host.nodes, frees, strict=True)
            ),
        )
        for host, frees in zip(pool.hosts, sizes, strict=True)
    )
    return structs.replace(pool, hosts=hosts)


def pus_used(vm: RunningDomain) -> int:
    bits = 0
    for pin in vm.vcpu_pins:
        assert pin is not None
        bits |= pin.bits
    return bits
