"""GuestTopology: what the guest is shown of sockets, siblings and caches, and what is true.

A guest's scheduler believes all of it.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.plan.shape.caches import (
    guest_cpu,
    llc_threads,
    shared_llcs,
    stated_cache,
    stated_topology,
    told_l3,
)
from homenode.vm.domain.document import Document
from homenode.vm.model import GuestCache, Vm

_MANY_SOCKETS = 2


def topology_findings(facts: Vm, document: Document, host: Host) -> Iterator[Finding]:
    """Sockets against cells, threads without siblings, caches and AMD's topoext."""
    topology = facts.cpu_topology
    if topology is None:
        if facts.vcpus > _MANY_SOCKETS:
            yield finding(
                "sockets-implicit",
                "<topology>",
                expected="a topology",
                observed=f"none: libvirt makes it {facts.vcpus} sockets of one core",
                source=facts.source,
            )
        return
    sockets, dies, cores, threads = topology
    if sockets * dies * cores * threads != facts.vcpus:
        return  # libvirt refuses it; verify says so
    yield from _sockets(facts, dies * cores * threads)
    if threads > 1:
        yield from _threads(facts, host, threads)
        yield from _topoext(facts, document, host)
    yield from _cache(facts, host)


def _groups(vcpus: int, size: int) -> list[CpuSet]:
    return [CpuSet(range(first, first + size)) for first in range(0, vcpus, size)]


def _sockets(facts: Vm, per_socket: int) -> Iterator[Finding]:
    for cell in facts.cells:
        cut = [
            number
            for number, socket in enumerate(_groups(facts.vcpus, per_socket))
            if not socket.isdisjoint(cell.vcpus)
            and not socket <= cell.vcpus
            and not cell.vcpus <= socket
        ]
        if cut:
            yield finding(
                "socket-cut-by-cell",
                f"cell {cell.id}",
                expected=f"whole sockets of {per_socket} vCPUs",
                observed=f"parts of socket {CpuSet(cut)}",
                source=facts.source,
            )


def _threads(facts: Vm, host: Host, threads: int) -> Iterator[Finding]:
    core_of = {pu: core.index for core in host.cores for pu in core.pus}
    lying: list[int] = []
    for group in _groups(facts.vcpus, threads):
        pins = [facts.vcpu_pins[vcpu] for vcpu in group]
        if any(pin is None for pin in pins):
            continue
        cores = {core_of.get(pu) for pin in pins if pin is not None for pu in pin}
        if len(cores) > 1:
            lying += group
    if lying:
        yield finding(
            "threads-not-siblings",
            f"vCPUs {CpuSet(lying)}",
            expected=f"each {threads} vCPUs that the guest takes for siblings on one core",
            observed="on several cores",
            source=facts.source,
        )
    elif not facts.is_pinned:
        yield finding(
            "threads-not-siblings",
            "<topology>",
            expected="siblings that are siblings on the host",
            observed=f"threads={threads} and no pins",
            case="no pins",
            source=facts.source,
        )


def _topoext(facts: Vm, document: Document, host: Host) -> Iterator[Finding]:
    """Named models of AMD's bring the feature along; these two leave it out on purpose.

    Source: no_autoenable_flags of FEAT_8000_0001_ECX in QEMU's target/i386/cpu.c.
    """
    modes = ("host-passthrough", "maximum")
    if host.cpu.vendor != "AuthenticAMD" or facts.cpu_mode not in modes:
        return
    cpu = document.root.child("cpu")
    features = () if cpu is None else cpu.all("feature")
    policy = next((f.get("policy") for f in features if f.get("name") == "topoext"), None)
    if policy in ("require", "force"):
        return
    yield finding(
        "topoext-missing",
        "<cpu>",
        expected="<feature policy='require' name='topoext'/>: AMD gives siblings through it",
        observed="no such feature" if policy is None else f"policy {policy}",
        source=facts.source,
    )


def _cache(facts: Vm, host: Host) -> Iterator[Finding]:
    """vCPUs that the guest takes to share an L3, and that lie on several LLCs."""
    guest = facts
    shared = shared_llcs(host, facts.vcpu_pins)
    if guest.architecture != "x86_64" or not facts.is_pinned or shared is None:
        return
    cache, shape = stated_cache(guest), stated_topology(guest, guest.vcpus)
    told = told_l3(cache, shape, guest_cpu(host, guest), llc_threads(host, shared))
    lying = [
        group for group in told or () if not any(group <= llc_vcpus for llc_vcpus in shared.groups)
    ]
    if not lying:
        return
    is_passed = cache is GuestCache.PASSTHROUGH
    yield finding(
        "cache-passthrough-false" if is_passed else "guest-l3-false",
        f"vCPUs {CpuSet.union(lying)}",
        expected="vCPUs that the guest sees behind one L3, behind one last-level cache of the host",
        observed="behind several",
        source=facts.source,
    )
