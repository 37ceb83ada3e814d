"""Hosts of the shapes that pictures and texts must cope with, and plans on them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from msgspec import structs

from homenode.findings import Gap
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, MemoryKind, PagePool
from homenode.plan.planner import plan
from homenode.units import GIB
from homenode.vm.plan import Plan
from homenode.vm.sources import load_host
from tests.small_hosts import (
    DeviceSpec,
    NodeSpec,
    asking,
    even_host,
    host_of,
    pinned_domain,
    small_request,
)


@cache
def h200_host() -> Host:
    """4 nodes with huge pages, of which one LLC serves two, and 8 GPUs."""
    host = load_host("h200-xeon8558")
    pools = (PagePool(2 << 20, 0, 0), PagePool(GIB, 448, 420))
    nodes = (
        structs.replace(node, memory_free_bytes=490 * GIB, page_pools=pools) for node in host.nodes
    )
    return structs.replace(host, nodes=tuple(nodes))


def busy_host() -> Host:
    """The same with a VM that runs."""
    domain = pinned_domain("90-95", name="build-farm", memory_bytes=32 * GIB)
    return structs.replace(h200_host(), domains=(domain,))


def wide_host() -> Host:
    """8 nodes in 2 packages with 256 CPUs each, a GPU and a NIC on each behind a switch."""
    specs = [
        DeviceSpec(f"{0x10 * node + 0x0A + function:02x}:00.0", node, kind, node, 0)
        for node in range(8)
        for function, kind in enumerate((DeviceKind.GPU, DeviceKind.NIC))
    ]
    return even_host(2, 4, 16, 8, 2, memory_bytes=96 * GIB, devices=specs, name="wide")


def tiny_host() -> Host:
    """One node of two cores, nothing else known."""
    host = even_host(1, 1, 1, 2, 1, memory_bytes=None, tells_llcs=False, name="tiny")
    return structs.replace(host, gaps=(Gap("LLCs", "no caches in sysfs"),))


def odd_host() -> Host:
    """Hostile names, SMT4, offline and disallowed CPUs, a memory-less node, an unknown node."""
    nodes = [
        NodeSpec(((4, 4), (4,)), 0, memory_bytes=0),
        NodeSpec(((4, 4, 4),), 1, memory_bytes=8 * GIB),
        NodeSpec((), 1, 7, 16 * GIB, memory_kind=MemoryKind.OTHER),
    ]
    specs = [DeviceSpec("10000:01:00.0", None), DeviceSpec("10000:02:00.0", 7)]
    host = host_of(
        nodes,
        devices=specs,
        offline="23",
        disallowed="4-5",
        tells_distances=False,
        domains=(pinned_domain("0-3", name="<vm>&\"'\x1b[31m\x00", devices=("10000:02:00.0",)),),
        name="odd <host> & \x07" + "very long name " * 12,
    )
    named = tuple(
        structs.replace(device, name="[bold]<script>alert(1)</script>" * 4)
        for device in host.pci_devices
    )
    return structs.replace(host, pci_devices=named)


def planned(
    host: Host, layout: str, vcpus: int, gpus: int = 0, memory_bytes: int = 64 * GIB
) -> Plan:
    """The plan of a VM with the first GPUs, on huge pages where the host has some."""
    cards = [d for d in host.devices_of_kind(DeviceKind.GPU) if d.physical_function is None]
    devices = [str(card.bdf) for card in cards[:gpus]]
    request = small_request(vcpus, memory_bytes, layout=layout, devices=devices, iothreads=1)
    has_pools = any(node.page_pools for node in host.nodes)
    return plan(host, asking(request, page_bytes=GIB) if has_pools else request)


HOSTS: dict[str, Callable[[], Host]] = {
    "h200": busy_host,
    "hgx": partial(load_host, "hgx-h100"),
    "gh200": partial(load_host, "gh200x4"),
    "epyc-9654": partial(load_host, "epyc9654-2p-1node"),
    "wide": wide_host,
    "tiny": tiny_host,
    "odd": odd_host,
}
PLANS: dict[str, tuple[Callable[[], Host], tuple[Any, ...]]] = {
    "h200-pin": (h200_host, ("pin", 88, 7)),
    "h200-pci": (h200_host, ("pin-numa-pci", 88, 7, 1536 * GIB)),
    "h200-smt": (h200_host, ("pin-numa-smt", 56, 7)),
    "h200-default": (h200_host, ("default", 88, 7)),
    "hgx-pci": (HOSTS["hgx"], ("pin-numa-pci", 96, 8)),
    "gh200-pci": (HOSTS["gh200"], ("pin-numa-pci", 70, 1)),
    "epyc-9654-pin": (HOSTS["epyc-9654"], ("pin", 24)),
    "wide-numa": (wide_host, ("pin-numa", 800, 8)),
    "desktop-pin": (partial(load_host, "rtx4080-i9-14900k"), ("pin", 8, 1, 8 * GIB)),
    "nps4-smt": (partial(load_host, "epyc-nps4-gpu-nic"), ("pin-numa-pci-smt", 128, 8)),
    "mi350x-pci": (partial(load_host, "mi350x-epyc9575f"), ("pin-numa-pci", 120, 8)),
    "tiny-pin": (tiny_host, ("pin", 1)),
}
"""Hosts, and what is planned of them, by a name for test output."""


@cache
def picture(name: str) -> tuple[Host, Plan | None]:
    """One of HOSTS, or of PLANS with its plan."""
    if name in HOSTS:
        return HOSTS[name](), None
    make_host, wishes = PLANS[name]
    host = make_host()
    return host, planned(host, *wishes)
