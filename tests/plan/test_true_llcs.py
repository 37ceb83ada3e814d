"""The guest is shown its L3s as its vCPUs have them, or none, whatever its size."""

import pytest
from lxml import etree

from homenode.errors import HomenodeError
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.units import GIB
from homenode.vm.domain.copy import new_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host

EPYC = (
    "epyc-nps4-gpu-nic",
    "epyc9654-2p-1node",
    "mi350x-epyc9575f",
    "rtx4090-epyc7702",
    "rtx5090-epyc7702",
)


def shown_llcs(document: bytes, host: Host) -> tuple[set[frozenset[int]], set[frozenset[int]]]:
    """Sets of vCPUs that share an L3: as an AMD guest is shown them by QEMU, and as they run.

    Written from QEMU's cpu_x86_cpuid and Linux' cacheinfo.c, apart from what plans are made of.
    """
    root = etree.fromstring(document)
    pins = [int(one.get("cpuset", "")) for one in root.findall("cputune/vcpupin")]  # in vCPU order
    llc_of = {int(pu): number for number, llc in enumerate(host.llcs) for pu in llc.pus}
    # Without a topology libvirt makes each vCPU a socket.
    sizes = {"sockets": len(pins), "dies": 1, "cores": 1, "threads": 1}
    for topology in root.findall("cpu/topology"):
        sizes |= {name: int(topology.get(name, "1")) for name in sizes}
    policy = {one.get("name"): one.get("policy") for one in root.findall("cpu/feature")}
    cache = root.find("cpu/cache")
    mode = None if cache is None else cache.get("mode")
    die = sizes["cores"] * sizes["threads"]
    has_topoext = policy.get("topoext") in ("require", "force")
    if mode == "disable":
        assert not has_topoext, "with topoext Linux takes the socket for one L3"
        return set(), set()
    if mode == "passthrough":
        (threads,) = {len(host.llcs[llc_of[pu]].pus) for pu in pins}
        core_bits = (sizes["cores"] - 1).bit_length() + (sizes["threads"] - 1).bit_length()
        shown_by = {
            vcpu: ((vcpu // die) << core_bits | vcpu % die) // (1 << (threads - 1).bit_length())
            for vcpu in range(len(pins))
        }
    else:
        share = die if has_topoext else die * sizes["dies"]
        shown_by = {vcpu: vcpu // share for vcpu in range(len(pins))}
    real = {vcpu: llc_of[pu] for vcpu, pu in enumerate(pins)}

    def sets(key: dict[int, int]) -> set[frozenset[int]]:
        return {frozenset(v for v in key if key[v] == one) for one in key.values()}

    return sets(shown_by), sets(real)


@pytest.mark.parametrize("name", EPYC)
@pytest.mark.parametrize("layout", ["pin-bound", "pin-numa"])
def test_no_size_on_an_epyc_host_leaves_a_false_l3(name: str, layout: str) -> None:
    host = load_host(name)
    for vcpus in range(2, 49):
        document = new_domain(vcpus, 16 * GIB, architecture="x86_64", name="vm")
        try:
            tuned = plan_file(document, "vm", PlanOptions(layout=layout), host)
        except HomenodeError:
            continue
        shown, real = shown_llcs(tuned.document, host)
        assert shown == real, vcpus
