"""Pins: each vCPU on PUs that exist, alone there, near its memory, and apart from other VMs."""

from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.topology import Host
from homenode.verify.document.neighbour import neighbour, severity_of_neighbour
from homenode.verify.domain_facts import DomainFacts, vcpus_text

SHARED_CORE_COST = "a vCPU on a core with another loses 40 to 75 % (XAPI's measurement)"
_REPLAN = "plan again on this host: homenode plan"


def pins_alone(facts: DomainFacts) -> Iterator[Finding]:
    """What pins say without a host: all vCPUs or none, and no PU twice."""
    floating = CpuSet(i for i, pin in enumerate(facts.vcpu_pins) if not pin)
    if floating and facts.is_pinned:
        yield Finding(
            "vcpu-not-pinned", Severity.WARNING, vcpus_text(floating), "a pin for each vCPU",
            "none", "they run wherever the host's scheduler puts them, away from their memory",
            "add <vcpupin> for them", facts.source,
        )  # fmt: skip
    elif floating:
        yield Finding(
            "unpinned", Severity.INFO, vcpus_text(floating), "pins", "none: all vCPUs float",
            None, "homenode plan --layout pin, or another layout with pins", facts.source,
        )  # fmt: skip
    owners: dict[int, list[int]] = {}
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None and len(pin) == 1:
            owners.setdefault(next(iter(pin)), []).append(vcpu)
    for pu, vcpus in sorted(owners.items()):
        if len(vcpus) > 1:
            yield Finding(
                "pu-shared", Severity.WARNING, vcpus_text(CpuSet(vcpus)), "a PU for each",
                f"all on PU {pu}", "they take turns on it", _REPLAN, facts.source,
            )  # fmt: skip
    single = CpuSet(owners)
    if facts.emulator_pus and not facts.emulator_pus.isdisjoint(single) and facts.is_pinned:
        yield Finding(
            "emulator-on-vcpu", Severity.INFO, "<emulatorpin>", "PUs without vCPUs",
            f"PU {facts.emulator_pus & single}, where vCPUs run too",
            "QEMU's own work interrupts these vCPUs", "homenode plan --emulator auto", facts.source,
        )  # fmt: skip


def pins_on_host(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    """What vCPUs and pins say of this host's PUs, cores and nodes, and of other VMs there."""
    yield from _enough(facts, host)
    yield from _existence(facts, host)
    yield from _cores(facts, host)
    yield from _cells_at_home(facts, host)
    yield from _others(facts, host)


def _enough(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    """More vCPUs than PUs: KVM takes that, and the VM has no more than the host. Pins to PUs that
    are not there are named by themselves."""
    online = sum(pu.online for pu in host.pus)
    started = facts.guest.vcpus - len(facts.offline_vcpus)
    if 0 < online < started:
        yield Finding(
            "vcpus-above-pus", Severity.WARNING, f"{started} vCPUs",
            f"at most the {online} PUs of {host.name}", str(started),
            "vCPUs wait for each other, and a guest that holds a lock meanwhile stalls",
            "run it on a larger host (--host SOURCE names the right one), or lower <vcpu>",
            facts.source,
        )  # fmt: skip


def _threads(facts: DomainFacts) -> Iterator[tuple[str, CpuSet]]:
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None:
            yield f"vCPU {vcpu}", pin
    if facts.emulator_pus is not None:
        yield "<emulatorpin>", facts.emulator_pus
    for number, pus in facts.iothread_pins:
        yield f"IOThread {number}", pus


def _existence(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    online = CpuSet(pu.index for pu in host.pus if pu.online)
    allowed = CpuSet(pu.index for pu in host.pus if pu.allowed)
    for who, pin in _threads(facts):
        if not pin <= present:
            yield Finding(
                "pin-of-no-pu", Severity.CRITICAL, who, f"PUs of {host.name}: {present}",
                f"PU {pin - present}, which is not there",
                "libvirt defines it, and the start fails", _REPLAN, facts.source,
            )  # fmt: skip
        elif pin.isdisjoint(online):
            yield Finding(
                "pin-of-offline-pu", Severity.CRITICAL, who, "a PU that is online",
                f"PU {pin}, which is offline", "the start fails",
                "bring it online: echo 1 > /sys/devices/system/cpu/cpuN/online", facts.source,
            )  # fmt: skip
        elif not pin <= online:
            yield Finding(
                "pin-of-offline-pu", Severity.WARNING, who, "PUs that are all online",
                f"PU {pin - online} of {pin}, which is offline",
                "libvirt refuses the start on cgroup v1; else the rest serve alone",
                f"bring it online (echo 1 > /sys/devices/system/cpu/cpu{(pin - online).first()}/"
                "online), or leave it out", facts.source,
            )  # fmt: skip
        elif pin.isdisjoint(allowed):
            yield Finding(
                "pin-of-disallowed-pu", Severity.WARNING, who, "a PU that the cgroup allows",
                f"PU {pin}, which it does not", "the start fails where libvirt has this cgroup",
                "widen the cpuset of the cgroup that libvirt's machines run in", facts.source,
            )  # fmt: skip


def _cores(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    """Two vCPUs on siblings of one core, although the guest takes them for two cores."""
    topology = facts.guest.cpu_topology
    threads = 1 if topology is None else topology[3]
    if threads > 1:
        return
    for core in host.cores:
        on_it = [
            i for i, pin in enumerate(facts.vcpu_pins) if pin and len(pin) == 1 and pin <= core.pus
        ]
        used = CpuSet(pu for i in on_it for pu in facts.vcpu_pins[i] or ())
        if len(used) > 1:
            yield Finding(
                "core-shared", Severity.WARNING, vcpus_text(CpuSet(on_it)),
                "a core for each: the guest is shown no siblings",
                f"core {core.id.core} of package {core.id.package} (PUs {core.pus}) has them all",
                SHARED_CORE_COST, "--layout pin-numa-pci-smt shows siblings as siblings; "
                "pin-numa-pci gives each vCPU a core", facts.source,
            )  # fmt: skip


def _cells_at_home(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    pus_of_node = {int(node.index): node.pus for node in host.nodes}
    for cell in facts.cells:
        homes = [pus_of_node[node] for node in host_nodes(cell.host_nodes, host)]
        near = CpuSet.from_bits(sum({pus.bits for pus in homes}))
        if not near:  # memory on nodes without PUs only
            continue
        far = [
            i for i in cell.vcpus if i < len(facts.vcpu_pins)
            and (pin := facts.vcpu_pins[i]) is not None and pin <= present and not pin <= near
        ]  # fmt: skip
        if far:
            pins = CpuSet(pu for i in far for pu in facts.vcpu_pins[i] or ())
            yield Finding(
                "pin-off-node", Severity.WARNING, f"cell {cell.id}, {vcpus_text(CpuSet(far))}",
                f"PUs of node {cell.host_nodes} ({near}), where the cell's memory is",
                f"PUs {pins}", "every access of theirs to the cell's memory is remote",
                _REPLAN, facts.source,
            )  # fmt: skip


def host_nodes(nodes: CpuSet, host: Host) -> list[int]:
    """Those of the nodes that the host has."""
    return [node.index for node in host.nodes if node.index in nodes]


def _others(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    ours = CpuSet.from_bits(0)
    for pin in facts.vcpu_pins:
        ours |= pin or CpuSet()
    for domain in host.domains:
        if not domain.running or domain.name == facts.guest.name:
            continue
        theirs = CpuSet.from_bits(0)
        for pin in domain.vcpu_pins:
            theirs |= pin or CpuSet()
        both = [c for c in host.cores if not c.pus.isdisjoint(ours & _whole(host, theirs))]
        pinned = any(pin is not None for pin in domain.vcpu_pins)
        if both and pinned and facts.is_pinned:
            pus = CpuSet(pu for core in both for pu in core.pus)
            yield Finding(
                "core-taken", severity_of_neighbour(domain, Severity.WARNING), f"PUs {pus}",
                "cores without other VMs", f"vCPUs of {neighbour(domain)}", SHARED_CORE_COST,
                _REPLAN, facts.source,
            )  # fmt: skip


def _whole(host: Host, pus: CpuSet) -> CpuSet:
    """The whole cores of some PUs."""
    return CpuSet(pu for core in host.cores if not core.pus.isdisjoint(pus) for pu in core.pus)
