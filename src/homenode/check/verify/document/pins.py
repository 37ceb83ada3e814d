"""Pins: each vCPU on PUs that exist, alone there, near its memory, and apart from other VMs."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.machine.topology import Host, RunningDomain
from homenode.vm.model import Vm, vcpus_text


def pins_alone(facts: Vm) -> Iterator[Finding]:
    """What pins say without a host: all vCPUs or none, and no PU twice."""
    floating = CpuSet(i for i, pin in enumerate(facts.vcpu_pins) if not pin)
    if floating and facts.is_pinned:
        yield finding(
            "vcpu-not-pinned",
            vcpus_text(floating),
            expected="a pin for each vCPU",
            observed="none",
            source=facts.source,
        )
    elif floating:
        yield finding(
            "unpinned",
            vcpus_text(floating),
            expected="pins",
            observed="none: each vCPU may run on any PU",
            severity=Severity.INFO,
            source=facts.source,
        )
    owners: dict[int, list[int]] = {}
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None and len(pin) == 1:
            owners.setdefault(next(iter(pin)), []).append(vcpu)
    for pu, vcpus in sorted(owners.items()):
        if len(vcpus) > 1:
            yield finding(
                "pu-shared",
                vcpus_text(CpuSet(vcpus)),
                expected="a PU for each",
                observed=f"all on PU {pu}",
                source=facts.source,
            )
    single = CpuSet(owners)
    if facts.emulator_pus and not facts.emulator_pus.isdisjoint(single) and facts.is_pinned:
        yield finding(
            "emulator-on-vcpu",
            "<emulatorpin>",
            expected="PUs without vCPUs",
            observed=f"PU {facts.emulator_pus & single}, where vCPUs run too",
            source=facts.source,
        )


def pins_on_host(facts: Vm, host: Host) -> Iterator[Finding]:
    """What vCPUs and pins say of this host's PUs, cores and nodes, and of other VMs there."""
    yield from _enough(facts, host)
    yield from _existence(facts, host)
    yield from _cores(facts, host)
    yield from _cells_at_home(facts, host)
    yield from _others(facts, host)


def _enough(facts: Vm, host: Host) -> Iterator[Finding]:
    """More vCPUs than PUs: KVM takes that, and the VM has no more than the host. Pins to PUs that
    are not there are named by themselves."""
    online = sum(pu.online for pu in host.pus)
    started = facts.vcpus - len(facts.offline_vcpus)
    if 0 < online < started:
        yield finding(
            "vcpus-above-pus",
            f"{started} vCPUs",
            expected=f"at most the {online} PUs of {host.name}",
            observed=str(started),
            source=facts.source,
        )


def _threads(facts: Vm) -> Iterator[tuple[str, CpuSet]]:
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None:
            yield f"vCPU {vcpu}", pin
    if facts.emulator_pus is not None:
        yield "<emulatorpin>", facts.emulator_pus
    for number, pus in facts.iothread_pins:
        yield f"IOThread {number}", pus


def _existence(facts: Vm, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    online = CpuSet(pu.index for pu in host.pus if pu.online)
    allowed = CpuSet(pu.index for pu in host.pus if pu.allowed)
    for who, pin in _threads(facts):
        if not pin <= present:
            yield finding(
                "pin-of-no-pu",
                who,
                expected=f"PUs of {host.name}: {present}",
                observed=f"PU {pin - present}, which is not there",
                source=facts.source,
            )
        elif pin.isdisjoint(online):
            yield finding(
                "pin-of-offline-pu",
                who,
                expected="a PU that is online",
                observed=f"PU {pin}, which is offline",
                source=facts.source,
            )
        elif not pin <= online:
            yield finding(
                "pin-of-offline-pu",
                who,
                expected="PUs that are all online",
                observed=f"PU {pin - online} of {pin}, which is offline",
                severity=Severity.WARNING,
                case="some of a pin",
                values={"pu": (pin - online).first()},
                source=facts.source,
            )
        elif pin.isdisjoint(allowed):
            yield finding(
                "pin-of-disallowed-pu",
                who,
                expected="a PU that the cgroup allows",
                observed=f"PU {pin}, which it does not",
                source=facts.source,
            )


def _cores(facts: Vm, host: Host) -> Iterator[Finding]:
    """Two vCPUs on siblings of one core, although the guest takes them for two cores."""
    topology = facts.cpu_topology
    threads = 1 if topology is None else topology[3]
    if threads > 1:
        return
    for core in host.cores:
        on_it = [
            i for i, pin in enumerate(facts.vcpu_pins) if pin and len(pin) == 1 and pin <= core.pus
        ]
        used = CpuSet(pu for i in on_it for pu in facts.vcpu_pins[i] or ())
        if len(used) > 1:
            yield finding(
                "core-shared",
                vcpus_text(CpuSet(on_it)),
                expected="a core for each: the guest is shown no siblings",
                observed=f"core {core.id.core} of package {core.id.package} (PUs {core.pus}) "
                "has them all",
                source=facts.source,
            )


def _cells_at_home(facts: Vm, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    pus_of_node = {int(node.index): node.pus for node in host.nodes}
    for cell in facts.cells:
        homes = [pus_of_node[node] for node in host_nodes(cell.nodes, host)]
        near = CpuSet.from_bits(sum({pus.bits for pus in homes}))
        if not near:  # memory on nodes without PUs only
            continue
        far = [
            i
            for i in cell.vcpus
            if i < len(facts.vcpu_pins)
            and (pin := facts.vcpu_pins[i]) is not None
            and pin <= present
            and not pin <= near
        ]
        if far:
            pins = CpuSet(pu for i in far for pu in facts.vcpu_pins[i] or ())
            yield finding(
                "pin-off-node",
                f"cell {cell.id}, {vcpus_text(CpuSet(far))}",
                expected=f"PUs of node {cell.nodes} ({near}), where the cell's memory is",
                observed=f"PUs {pins}",
                source=facts.source,
            )


def host_nodes(nodes: CpuSet, host: Host) -> list[int]:
    """Those of the nodes that the host has."""
    return [node.index for node in host.nodes if node.index in nodes]


def _others(facts: Vm, host: Host) -> Iterator[Finding]:
    ours = CpuSet.union(facts.vcpu_pins)
    for domain in host.domains:
        if not domain.running or domain.name == facts.name:
            continue
        theirs = CpuSet.union(domain.vcpu_pins)
        both = [c for c in host.cores if not c.pus.isdisjoint(ours & _whole(host, theirs))]
        pinned = any(pin is not None for pin in domain.vcpu_pins)
        if both and pinned and facts.is_pinned:
            pus = CpuSet(pu for core in both for pu in core.pus)
            yield finding(
                "core-taken",
                f"PUs {pus}",
                expected="cores without other VMs",
                observed=f"vCPUs of {neighbour(domain)}",
                severity=severity_of_neighbour(domain, Severity.WARNING),
                source=facts.source,
            )


def _whole(host: Host, pus: CpuSet) -> CpuSet:
    """The whole cores of some PUs."""
    return CpuSet(pu for core in host.cores if not core.pus.isdisjoint(pus) for pu in core.pus)


def neighbour(domain: RunningDomain) -> str:
    """What to call a running domain of the host that is not the VM in question, as far as names
    say: where a capture redacted its name it may be the VM itself."""
    doubt = " (name redacted: it may be this very VM)" if domain.has_pseudonym else ""
    return f"running domain {domain.name!r}{doubt}"


def severity_of_neighbour(domain: RunningDomain, severity: Severity) -> Severity:
    """The severity of a clash with it: nothing is sure of a domain whose name is redacted."""
    return Severity.INCONCLUSIVE if domain.has_pseudonym else severity
