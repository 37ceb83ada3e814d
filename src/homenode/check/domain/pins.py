"""Pins: whether each vCPU is on existing CPUs, alone, near its memory and apart from other VMs; and
the cost of valid pins with regard to caches, kinds of core, nodes and isolation.
"""

from collections.abc import Iterator
from math import ceil

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, Subject, finding
from homenode.machine.topology import DEFAULT_HOST_RESERVE, CoreKind, Host, RunningDomain
from homenode.text import format_cpus, format_nodes, number_list, plural
from homenode.vm.model import Vm, format_vcpus


def vcpus_subject(vcpus: CpuSet) -> Subject:
    """Return vCPUs as a subject, at the pin of the first."""
    return Subject(format_vcpus(vcpus), "vcpupin", min(vcpus))


def pins_alone(facts: Vm) -> Iterator[Finding]:
    """Check pins without a host: all vCPUs or none are pinned, and no CPU twice."""
    floating = CpuSet(i for i, pin in enumerate(facts.vcpu_pins) if not pin)
    if floating and facts.is_pinned:
        yield finding(
            "vcpu-not-pinned", vcpus_subject(floating), expected="a pin for each", observed="none"
        )
    elif floating:
        yield finding(
            "unpinned",
            vcpus_subject(floating),
            expected="pins",
            observed="none: each vCPU may run on any CPU",
            severity=Severity.INFO,
        )
    owners: dict[int, list[int]] = {}
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None and len(pin) == 1:
            owners.setdefault(next(iter(pin)), []).append(vcpu)
    for pu, vcpus in sorted(owners.items()):
        if len(vcpus) > 1:
            yield finding(
                "cpu-shared",
                vcpus_subject(CpuSet(vcpus)),
                expected="a CPU for each",
                observed=f"all on CPU {pu}",
            )
    single = CpuSet(owners)
    if facts.emulator_pus and not facts.emulator_pus.isdisjoint(single) and facts.is_pinned:
        yield finding(
            "emulator-on-vcpu",
            "<emulatorpin>",
            expected="CPUs without vCPUs",
            observed=f"CPU {facts.emulator_pus & single}, where vCPUs also run",
        )


def pins_on_host(facts: Vm, host: Host) -> Iterator[Finding]:
    """Check vCPUs and pins against this host's CPUs, cores, nodes and other VMs."""
    yield from _check_pin_counts(facts, host)
    yield from _check_existence(facts, host)
    yield from _check_cores(facts, host)
    yield from _check_cells(facts, host)
    yield from _check_helper_cores(facts, host)
    yield from _check_other_vms(facts, host)


def _check_pin_counts(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find more vCPUs than CPUs, which KVM takes; pins to missing CPUs are found elsewhere."""
    online = len(host.online_pus)
    vcpus, pins = facts.vcpus_online, facts.pinned_pus
    if 0 < online < vcpus:
        limit = f"at most the {plural(online, 'CPU')} of {host.name}"
        yield finding("vcpus-above-cpus", plural(vcpus, "vCPU"), limit, str(vcpus))
    elif has_floating_vcpus(facts) and len(pins) < vcpus:
        limit = f"at most the {plural(len(pins), 'CPU')} that they may run on ({pins})"
        yield finding("vcpus-above-cpus", plural(vcpus, "vCPU"), limit, str(vcpus), case="pins")


def has_floating_vcpus(facts: Vm) -> bool:
    """Return whether every vCPU is pinned to a set of CPUs rather than to one."""
    return bool(facts.vcpu_pins) and all(pin and len(pin) > 1 for pin in facts.vcpu_pins)


def _list_threads(facts: Vm) -> Iterator[tuple[str | Subject, CpuSet]]:
    for vcpu, pin in enumerate(facts.vcpu_pins):
        if pin is not None:
            yield Subject(f"vCPU {vcpu}", "vcpupin", vcpu), pin
    if facts.emulator_pus is not None:
        yield "<emulatorpin>", facts.emulator_pus
    for number, pus in facts.iothread_pins:
        yield Subject(f"IOThread {number}", "iothreadpin", number), pus


def _check_existence(facts: Vm, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    online = host.online_pus
    allowed_cpus = CpuSet(pu.index for pu in host.pus if pu.allowed)
    for who, pin in _list_threads(facts):
        if not pin <= present:
            yield finding(
                "pin-unknown-cpu",
                who,
                expected=f"CPUs of {host.name}: {present}",
                observed=f"CPU {pin - present}, which is not there",
            )
        elif pin.isdisjoint(online):
            yield finding(
                "pin-offline-cpu",
                who,
                expected="a CPU that is online",
                observed=f"CPU {pin}, which is offline",
            )
        elif not pin <= online:
            yield finding(
                "pin-offline-cpu",
                who,
                expected="CPUs that are all online",
                observed=f"CPU {pin - online} of {pin}, which is offline",
                severity=Severity.WARNING,
                case="some of a pin",
                values={"pu": (pin - online).first()},
            )
        elif pin.isdisjoint(allowed_cpus):
            yield finding(
                "pin-disallowed-cpu",
                who,
                expected="a CPU that the cgroup allows",
                observed=f"CPU {pin}, which it does not",
            )


def _check_cores(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find two vCPUs on siblings of one core that are two cores in the guest."""
    if facts.threads_per_core > 1:
        return
    for core in host.cores:
        core_vcpus = [
            i for i, pin in enumerate(facts.vcpu_pins) if pin and len(pin) == 1 and pin <= core.pus
        ]
        used = CpuSet(pu for i in core_vcpus for pu in facts.vcpu_pins[i] or ())
        if len(used) > 1:
            yield finding(
                "core-shared",
                Subject(
                    f"{format_vcpus(CpuSet(core_vcpus))} on CPUs {core.pus}",
                    "vcpupin",
                    core_vcpus[0],
                ),
                expected="a core for each: the guest is shown no siblings",
                observed="siblings of one core",
            )


def _check_cells(facts: Vm, host: Host) -> Iterator[Finding]:
    present = CpuSet(pu.index for pu in host.pus)
    for cell in facts.cells:
        near_pus = CpuSet.union(node.pus for node in host.nodes if node.index in cell.nodes)
        if not near_pus:  # memory on nodes without CPUs only
            continue
        ids = [
            i
            for i in cell.vcpus
            if i < len(facts.vcpu_pins)
            and (pin := facts.vcpu_pins[i]) is not None
            and pin <= present
            and not pin <= near_pus
        ]
        if ids:
            pins = CpuSet(pu for i in ids for pu in facts.vcpu_pins[i] or ())
            yield finding(
                "pin-off-node",
                Subject(f"cell {cell.id}, {format_vcpus(CpuSet(ids))}", "vcpupin", ids[0]),
                expected=f"CPUs of node {cell.nodes} ({near_pus}), where the cell's memory is",
                observed=format_cpus(pins),
            )


def _check_helper_cores(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find QEMU's threads off the memory's node, unless homenode planned them so."""
    record = facts.record
    if record is not None and record.host is not None and host.has_fingerprint(record.host):
        return
    nodes = facts.memory_nodes or find_nodes(facts.pinned_pus, host)
    near_pus = CpuSet.union(node.pus for node in host.nodes if node.index in nodes)
    present = CpuSet(pu.index for pu in host.pus)

    def is_far(pin: CpuSet) -> bool:
        return bool(near_pus) and bool(pin) and pin <= present and pin.isdisjoint(near_pus)

    place = "the guest's memory is" if facts.memory_nodes else "its vCPUs are"
    far_pins = {number: pin for number, pin in facts.iothread_pins if is_far(pin)}
    emulator = facts.emulator_pus or CpuSet()
    name = f"IOThread{'s' if len(far_pins) > 1 else ''} {number_list(far_pins)}"
    threads = Subject(name, "iothreadpin", min(far_pins, default=0))
    far_emulator = emulator if is_far(emulator) else CpuSet()
    pins: dict[str | Subject, CpuSet] = {"<emulatorpin>": far_emulator}
    pins[threads] = CpuSet.union(far_pins.values())
    for subject, pus in pins.items():
        if pus:
            yield finding(
                "pin-off-node",
                subject,
                expected=f"CPUs of node {nodes} ({near_pus}), where {place}",
                observed=f"{format_cpus(pus)} of {format_nodes(find_nodes(pus, host))}",
                severity=None if subject is threads else Severity.INFO,
                case="threads of QEMU",
            )


def _check_other_vms(facts: Vm, host: Host) -> Iterator[Finding]:
    vm_pus = facts.pinned_pus
    for domain in host.domains:
        if not domain.running or domain.name == facts.name:
            continue
        other_pus = CpuSet.union(domain.vcpu_pins)
        shared_cpus = host.whole_cores(vm_pus & host.whole_cores(other_pus))
        pinned = any(pin is not None for pin in domain.vcpu_pins)
        if shared_cpus and pinned and facts.is_pinned:
            yield finding(
                "core-taken",
                format_cpus(shared_cpus),
                expected="cores without other VMs",
                observed=f"vCPUs of {name_neighbour(domain)}",
                severity=rate_neighbour(domain),
            )


def name_neighbour(domain: RunningDomain) -> str:
    """Name a running domain; if its name is redacted, it may be the VM itself."""
    doubt = " (name redacted: it may be this very VM)" if domain.has_pseudonym else ""
    return f"running domain {domain.name!r}{doubt}"


def rate_neighbour(domain: RunningDomain) -> Severity | None:
    """Return inconclusive for a domain with a redacted name, else None, the usual one."""
    return Severity.INCONCLUSIVE if domain.has_pseudonym else None


_KIND_WORDS = {CoreKind.PERFORMANCE: "P", CoreKind.EFFICIENCY: "E"}


def check_pins(facts: Vm, host: Host) -> Iterator[Finding]:
    """Straddled LLCs, mixed kinds of core, nodes under a flat guest, helpers, isolation."""
    if facts.is_pinned:
        yield from _check_llcs(facts, host)
        yield from _check_kinds(facts, host)
        yield from _check_host_core(facts, host)
        if not is_flat_by_evidence(facts, host):
            yield from _check_flat_guest(facts, host)
        yield from _check_helpers(facts)
    yield from _check_isolation(facts, host)


def find_nodes(pus: CpuSet, host: Host) -> CpuSet:
    """Return the nodes that have any of these CPUs."""
    return CpuSet(node.index for node in host.nodes if not node.pus.isdisjoint(pus))


def _check_llcs(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find more LLCs than the cores need, per node, because a node's cells cannot leave it."""
    pus = facts.pinned_pus
    used = [core for core in host.cores if not core.pus.isdisjoint(pus)]
    if any(pin is not None and len(pin) > 2 for pin in facts.vcpu_pins):
        return  # the vCPUs float over sets: their CPUs are unknown
    touched_llcs = needed_llcs = 0
    for node in host.nodes:
        llcs = [llc for llc in host.llcs if not llc.pus.isdisjoint(node.pus)]
        cores = [core for core in used if not core.pus.isdisjoint(node.pus)]
        if not llcs or not cores:
            continue
        sizes = sorted(
            (sum(not c.pus.isdisjoint(llc.pus & node.pus) for c in host.cores) for llc in llcs),
            reverse=True,
        )
        touched_llcs += sum(not llc.pus.isdisjoint(pus & node.pus) for llc in llcs)
        needed_llcs += _count_fewest_caches(sizes, len(cores))
    if touched_llcs <= needed_llcs:
        return
    least = max(2 * needed_llcs, needed_llcs + 2)
    yield finding(
        "llc-straddled",
        f"{plural(len(used), 'core')} of vCPUs",
        expected=f"{plural(needed_llcs, 'last-level cache')} for them",
        observed=f"they lie in {touched_llcs}",
        severity=None if touched_llcs >= least else Severity.INFO,
    )


def _count_fewest_caches(sizes: list[int], cores: int) -> int:
    """Count the caches (cores each, largest first) that are needed for a number of cores."""
    for count, size in enumerate(sizes, start=1):
        cores -= size
        if cores <= 0:
            return count
    return len(sizes)


def _check_kinds(facts: Vm, host: Host) -> Iterator[Finding]:
    kind_of = {pu: core.kind for core in host.cores for pu in core.pus if core.kind is not None}
    vcpus: dict[CoreKind, list[int]] = {}
    for vcpu, pin in enumerate(facts.vcpu_pins):
        kinds = {kind_of[pu] for pu in pin or () if pu in kind_of}
        if len(kinds) == 1:
            vcpus.setdefault(kinds.pop(), []).append(vcpu)
    if len(vcpus) < 2:
        return
    text = ", ".join(
        f"vCPUs {CpuSet(numbers)} on {_KIND_WORDS.get(kind, str(kind))} cores"
        for kind, numbers in sorted(vcpus.items(), key=lambda item: item[1])
    )
    pus = facts.pinned_pus
    llcs = sum(not llc.pus.isdisjoint(pus) for llc in host.llcs)
    cache = "; all share one last-level cache, so that is not the cause" if llcs == 1 else ""
    yield finding(
        "core-kinds-mixed",
        "vCPUs",
        expected="cores of one kind: the guest's scheduler treats all vCPUs as equal",
        observed=text + cache,
    )


def _check_host_core(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find vCPUs on every core of the host, if the cores are known and one is reserved."""
    reserve = host.reserve or DEFAULT_HOST_RESERVE
    cores = [core.pus for core in host.cores]
    on_cores = [pin for pin in facts.vcpu_pins if pin and any(pin <= core for core in cores)]
    used = CpuSet.union(on_cores)
    if not cores or not reserve.cores or any(core.isdisjoint(used) for core in cores):
        return
    can_pair = any(len(core) > 1 for core in cores) and len(on_cores) == len(cores)
    yield finding(
        "host-core-taken",
        plural(facts.vcpus, "vCPU"),
        expected="a core without vCPUs, for the host and QEMU's own threads",
        observed=f"vCPUs on each of {plural(len(cores), 'core')}",
        case=None if can_pair else "siblings taken",
    )


def is_flat_by_evidence(facts: Vm, host: Host) -> bool:
    """Return whether `--layout auto` planned this flat guest over several nodes of this host."""
    record = facts.record
    return (
        record is not None
        and record.objective is not None
        and record.host is not None
        and len(facts.cells) < 2
        and len(find_nodes(facts.pinned_pus, host)) > 1
        and host.has_fingerprint(record.host) is True
    )


def _check_flat_guest(facts: Vm, host: Host) -> Iterator[Finding]:
    if facts.cells and len(facts.cells) > 1:
        return
    nodes = find_nodes(facts.pinned_pus, host)
    if len(nodes) < 2:
        return
    devices = (host.find_device(hostdev.bdf) for hostdev in facts.hostdevs)
    device_nodes = {d.node for d in devices if d is not None and d.node is not None}
    cores = [sum(core.pus <= node.pus for core in host.cores) for node in host.nodes]
    if device_nodes:
        cores = [
            n for n, node in zip(cores, host.nodes, strict=True) if {node.index} == device_nodes
        ]
    yield finding(
        "flat-over-nodes",
        plural(facts.vcpus, "vCPU"),
        expected="vCPUs on one host node, or a guest that is shown the nodes",
        observed=f"a flat guest pinned over nodes {nodes}",
        case="one node suffices" if facts.vcpus <= max(cores, default=0) else None,
    )


def _check_helpers(facts: Vm) -> Iterator[Finding]:
    """Check emulator and IOThreads. verify finds pins of the emulator on vCPUs."""
    pus = facts.pinned_pus
    for number, pin in facts.iothread_pins:
        if not pin.isdisjoint(pus) and not pin - pus:
            yield finding(
                "iothread-on-vcpu",
                Subject(f"IOThread {number}", "iothreadpin", number),
                expected="CPUs without vCPUs",
                observed=f"only {format_cpus(pin)}, where vCPUs run",
            )
    single = all(pin is None or len(pin) <= 2 for pin in facts.vcpu_pins)
    if facts.emulator_pus is None and single:
        yield finding(
            "emulator-floats",
            "<emulatorpin>",
            expected="a pin, as the vCPUs have",
            observed="none: QEMU's own threads run anywhere, also on the vCPUs' CPUs",
        )


def _check_isolation(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find threads that float over isolated CPUs, which the kernel does not balance."""
    isolated_cpus = CpuSet(pu.index for pu in host.pus if pu.isolated)
    if not isolated_cpus:
        return
    floating = CpuSet(
        vcpu for vcpu, pin in enumerate(facts.vcpu_pins) if pin and len(pin & isolated_cpus) > 1
    )
    if floating:
        yield finding(
            "floats-on-isolated",
            vcpus_subject(floating),
            expected="one CPU for each vCPU if CPUs are isolated",
            observed=f"sets of isolated CPUs ({isolated_cpus}): the kernel does not balance them",
        )
    emulator = facts.emulator_pus
    if emulator is not None and len(emulator & isolated_cpus) > 1:
        yield finding(
            "emulator-on-isolated",
            "<emulatorpin>",
            expected="CPUs that are not isolated",
            observed=f"isolated {format_cpus(emulator & isolated_cpus)}",
        )
    pus = facts.pinned_pus
    if pus and pus.isdisjoint(isolated_cpus) and len(isolated_cpus) >= ceil(len(pus) / 2):
        yield finding(
            "isolated-unused",
            "vCPUs",
            expected=f"isolated {format_cpus(isolated_cpus)}",
            observed=f"pins on other CPUs: {pus}",
        )
