"""Cores of a domain: the guest's view against the host, and other users of the cores.

Source: Documentation/admin-guide/kernel-parameters.txt (isolcpus, nohz_full, rcu_nocbs),
Documentation/timers/no_hz.rst: nohz_full= moves the RCU callbacks of its CPUs away as well;
Documentation/core-api/irq/irq-affinity.rst; irqbalance(1): it leaves CPUs of isolcpus= and
nohz_full= alone by itself.
"""

from collections.abc import Iterator

from homenode.check.domain.pins import find_nodes, vcpus_subject
from homenode.check.verify.expectation import group_neighbours
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Severity, Subject, finding
from homenode.machine.pci import DeviceKind, PciDevice, PciInterrupt
from homenode.machine.topology import Host
from homenode.plan.shape.caches import (
    count_llc_threads,
    find_shared_llcs,
    guest_cpu,
    guest_l3_groups,
    read_cache,
    read_topology,
)
from homenode.text import format_cpus, plural, shorten_list
from homenode.vm.domain.document import Document
from homenode.vm.model import GuestCache, Vm

_MANY_SOCKETS = 2
_WINDOWS = "microsoft.com/win"
_WINDOWS_VCPUS = 64
"""vCPUs of one processor group of Windows."""

_ENLIGHTENMENTS = ("relaxed", "vapic", "spinlocks", "vpindex", "synic", "stimer", "tlbflush", "ipi")
"""Enlightenments without which each interrupt, timer and TLB flush exits to the host."""


def check_topology(facts: Vm, document: Document | None, host: Host) -> Iterator[Finding]:
    """Yield the sockets against cells, threads without siblings, caches and AMD's topoext."""
    topology = facts.cpu_topology
    if topology is None:
        if facts.vcpus > _MANY_SOCKETS:
            yield finding(
                "sockets-implicit",
                "<topology>",
                expected="a topology",
                observed=f"missing: libvirt makes it {plural(facts.vcpus, 'socket')} of one core",
            )
        return
    sockets, dies, cores, threads = topology
    if sockets * dies * cores * threads != facts.vcpus:
        return  # libvirt rejects it, and verify reports that
    yield from _check_sockets(facts, dies * cores * threads)
    if threads > 1:
        yield from _check_threads(facts, host, threads)
        if document is not None:
            yield from _check_topoext(facts, host)
    yield from _check_cache(facts, host)


def _check_sockets(facts: Vm, per_socket: int) -> Iterator[Finding]:
    for cell in facts.cells:
        cut = [
            number
            for number, socket in enumerate(group_neighbours(facts.vcpus, per_socket))
            if not socket.isdisjoint(cell.vcpus)
            and not socket <= cell.vcpus
            and not cell.vcpus <= socket
        ]
        if cut:
            yield finding(
                "socket-cut-by-cell",
                Subject(f"cell {cell.id}", "cell", cell.id),
                expected=f"whole sockets of {plural(per_socket, 'vCPU')}",
                observed=f"parts of socket {CpuSet(cut)}",
            )


def _check_threads(facts: Vm, host: Host, threads: int) -> Iterator[Finding]:
    lying: list[int] = []
    for group in group_neighbours(facts.vcpus, threads):
        pins = [facts.vcpu_pins[vcpu] for vcpu in group]
        if any(pin is None for pin in pins):
            continue
        cores = {host.core_at.get(pu) for pin in pins if pin is not None for pu in pin}
        if len(cores) > 1:
            lying += group
    if lying:
        yield finding(
            "threads-not-siblings",
            vcpus_subject(CpuSet(lying)),
            expected=f"each {threads} vCPUs that the guest treats as siblings on one core",
            observed="on several cores",
        )
    elif not facts.is_pinned:
        yield finding(
            "threads-not-siblings",
            "<topology>",
            expected="guest siblings on siblings of the host",
            observed=f"threads={threads} and no pins",
            case="no pins",
        )


def check_windows(facts: Vm, document: Document) -> Iterator[Finding]:
    """Find Windows guests without Hyper-V enlightenments; for small guests only timers. Source:
    libvirt's formatdomain.html, hyperv; QEMU's docs/system/i386/hyperv.rst."""
    systems = (
        element.get("id") or "" for element in document.root.walk() if element.name.endswith("}os")
    )
    if not any(_WINDOWS in system for system in systems):
        return
    is_small = facts.vcpus <= _WINDOWS_VCPUS
    features = document.root.find("features/hyperv")
    if features is not None and features.get("mode") == "passthrough":
        return
    missing = [
        name
        for name in _ENLIGHTENMENTS
        if features is None
        or (feature := features.child(name)) is None
        or feature.get("state") != "on"
    ]
    if missing and not (is_small and "stimer" not in missing):
        yield finding(
            "windows-enlightenments",
            "<hyperv>",
            expected=f"{', '.join(_ENLIGHTENMENTS)} for {plural(facts.vcpus, 'vCPU')}",
            observed=f"without {', '.join(missing)}",
            severity=Severity.INFO if is_small else None,
            case="of a small guest" if is_small else None,
        )


def _check_topoext(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find AMD guests without topoext. Named AMD models include the feature; these two omit it on
    purpose. Source: no_autoenable_flags of FEAT_8000_0001_ECX in QEMU's target/i386/cpu.c."""
    modes = ("host-passthrough", "maximum")
    if host.cpu.vendor != "AuthenticAMD" or facts.cpu_mode not in modes or facts.topoext:
        return
    yield finding(
        "topoext-missing",
        "<cpu>",
        expected="<feature policy='require' name='topoext'/>: AMD CPUs expose siblings through it",
        observed="no such feature" if facts.topoext is None else "policy disable",
    )


def _check_cache(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find vCPUs that share an L3 in the guest but are on several LLCs."""
    llcs = find_shared_llcs(host, facts.vcpu_pins)
    if facts.architecture != "x86_64" or not facts.is_pinned or llcs is None:
        return
    cache, shape = read_cache(facts), read_topology(facts, facts.vcpus)
    guest_l3 = guest_l3_groups(cache, shape, guest_cpu(host, facts), count_llc_threads(host, llcs))
    lying = [group for group in guest_l3 or () if not any(group <= llc for llc in llcs.groups)]
    if not lying:
        return
    is_passed = cache == GuestCache.PASSTHROUGH
    yield finding(
        "cache-passthrough-false" if is_passed else "guest-l3-false",
        vcpus_subject(CpuSet.union(lying)),
        expected="vCPUs that the guest sees behind one L3, behind one last-level cache of the host",
        observed="behind several",
    )


_SWITCHED_OFF = frozenset({"off", "forceoff"})
_CONTROL = "/sys/devices/system/cpu/smt/control"


def check_threads(facts: Vm, host: Host) -> Iterator[Finding]:
    """Yield a guest with siblings where SMT is off, and QEMU's own threads on vCPUs' siblings."""
    yield from _find_smt_off(facts, host)
    yield from _check_emulator(facts, host)


def _find_smt_off(facts: Vm, host: Host) -> Iterator[Finding]:
    if host.settings.smt_control not in _SWITCHED_OFF:
        return
    threads = facts.threads_per_core
    offline = host.offline_pus
    asleep = facts.pinned_pus & offline
    if threads < 2 and not asleep:
        return
    words = (host.settings.kernel_command_line or "").split()
    smt_parameter = next(
        (w for w in words if w.partition("=")[0] in ("nosmt", "mitigations")), None
    )
    reason = (
        f" (command line: {smt_parameter})"
        if smt_parameter is not None and "nosmt" in smt_parameter
        else ""
    )
    request = (
        f"threads='{threads}' in <topology>" if threads > 1 else f"pins on {format_cpus(asleep)}"
    )
    yield finding(
        "smt-off",
        "<topology>" if threads > 1 else "<vcpupin>",
        expected="SMT that is on, or a guest without siblings",
        observed=f"{request}, and SMT control is {host.settings.smt_control}{reason}",
        source=_CONTROL,
    )


def _check_emulator(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find emulator threads on siblings of vCPUs while cores without vCPUs are free."""
    emulator, vcpus = facts.emulator_pus, facts.pinned_pus
    if emulator is None or not facts.is_pinned:
        return
    used = host.whole_cores(vcpus)
    free = host.usable_pus - used
    if not free or not emulator <= used or not emulator.isdisjoint(vcpus):
        return
    in_use = [d for d in host.domains if d.running and d.name != facts.name]
    free -= CpuSet(pu for d in in_use for pin in d.vcpu_pins if pin is not None for pu in pin)
    is_bound = facts.binding is not None or any(cell.nodes for cell in facts.cells)
    if facts.page_bytes is not None and is_bound:
        # QEMU allocates the huge pages of a node on CPUs of that node.
        free &= CpuSet.union(n.pus for n in host.nodes if not n.pus.isdisjoint(emulator))
    if free:
        yield finding(
            "emulator-on-sibling",
            "<emulatorpin>",
            expected="a core without vCPUs",
            observed=f"CPUs {emulator}, siblings of vCPUs, although CPUs {free} are not",
        )


_ISOLATED = "/sys/devices/system/cpu/isolated and nohz_full; /proc/cmdline"


def check_isolation(facts: Vm, host: Host) -> Iterator[Finding]:
    """Ticks and RCU callbacks on isolated CPUs of vCPUs, and siblings that were not isolated."""
    isolated_cpus = CpuSet(pu.index for pu in host.pus if pu.isolated)
    vm_pus = facts.pinned_pus & isolated_cpus
    if not vm_pus:
        return
    yield from _check_ticks(vm_pus, host)
    yield from _check_siblings(vm_pus, isolated_cpus, facts.pinned_pus, host)


def read_rcu_nocbs(host: Host) -> CpuSet | None:
    """Return the CPUs whose RCU callbacks are offloaded from boot; None if the command line is
    unknown. A list that only the kernel understands ("all", "N") counts as all CPUs."""
    line = host.settings.kernel_command_line
    if line is None:
        return None
    everything = CpuSet(pu.index for pu in host.pus)
    for word in line.split():
        name, _, value = word.partition("=")
        if name == "rcu_nocbs":
            try:
                return CpuSet.parse(value, "rcu_nocbs")
            except ParseError:
                return everything
    return CpuSet()


def _check_ticks(vm_pus: CpuSet, host: Host) -> Iterator[Finding]:
    ticking = vm_pus - CpuSet(pu.index for pu in host.pus if pu.nohz_full)
    offloaded_cpus = read_rcu_nocbs(host)
    if not ticking or offloaded_cpus is None:
        return
    callbacks = ticking - offloaded_cpus
    text = f"CPUs {ticking} are not in nohz_full="
    if callbacks:
        text += f", and CPUs {callbacks} not in rcu_nocbs="
    yield finding(
        "isolated-with-tick",
        f"vCPUs on isolated {format_cpus(vm_pus)}",
        expected="isolated CPUs without the scheduler's tick and RCU callbacks",
        observed=text,
        values={"pus": vm_pus},
        source=_ISOLATED,
    )


def _check_siblings(
    vm_pus: CpuSet, isolated_cpus: CpuSet, pinned_cpus: CpuSet, host: Host
) -> Iterator[Finding]:
    open_siblings = CpuSet(
        pu
        for core in host.cores
        if not core.pus.isdisjoint(vm_pus)
        for pu in core.pus - isolated_cpus - pinned_cpus
    )
    if open_siblings:
        yield finding(
            "sibling-not-isolated",
            f"vCPUs on isolated {format_cpus(vm_pus)}",
            expected="cores of which all siblings are isolated",
            observed=f"siblings {open_siblings}, on which the host runs other threads",
            source=_ISOLATED,
        )


_MAX_NAMED = 6
_SPREAD_RATIO = 0.75
"""A device whose interrupts reach this share of all CPUs has one for each of them."""

_INTERRUPTS = "/sys/bus/pci/devices/*/msi_irqs; /proc/irq/*/effective_affinity_list"


def check_interrupts(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find host interrupts on vCPUs' CPUs, and interrupts of the VM's devices on other packages."""
    if not any(pin is not None and len(pin) <= 2 for pin in facts.vcpu_pins):
        return  # vCPUs that float over sets move out of the way
    vm_pus = facts.pinned_pus
    yield from _check_host_interrupts(facts, vm_pus, host)
    yield from _check_vm_interrupts(facts, vm_pus, host)


def _is_given_away(device: PciDevice) -> bool:
    return device.driver is None or "vfio" in device.driver or device.driver == "pci-stub"


def _is_spread(interrupts: tuple[PciInterrupt, ...], host: Host) -> bool:
    reached_cpus = CpuSet(pu for interrupt in interrupts for pu in interrupt.pus)
    return len(reached_cpus) >= _SPREAD_RATIO * len(host.online_pus)


def _check_host_interrupts(facts: Vm, vm_pus: CpuSet, host: Host) -> Iterator[Finding]:
    passed_bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    quiet = host.isolated_pus
    on_vcpus: list[tuple[PciDevice, PciInterrupt]] = []
    for device in host.pci_devices:
        interrupts = device.interrupts or ()
        is_guests = device.bdf in passed_bdfs or _is_given_away(device)
        # Ports interrupt for hot plugging and errors: never, on a sound machine.
        if is_guests or device.kind is DeviceKind.BRIDGE or _is_spread(interrupts, host):
            continue
        on_vcpus += [
            (device, interrupt)
            for interrupt in interrupts
            if interrupt.pus and interrupt.pus <= vm_pus
        ]
    disturbing_interrupts = [
        (device, interrupt) for device, interrupt in on_vcpus if not interrupt.pus.isdisjoint(quiet)
    ]
    free = host.online_pus - vm_pus - quiet
    if disturbing_interrupts:
        pus = CpuSet(pu for _, interrupt in disturbing_interrupts for pu in interrupt.pus)
        yield finding(
            "irq-on-isolated",
            format_cpus(pus),
            expected="isolated CPUs that handle no interrupts of the host's devices",
            observed=_format_interrupts(disturbing_interrupts),
            values={"pus": free},
            source=_INTERRUPTS,
        )
    elif on_vcpus and host.settings.irqbalance and free:
        pus = CpuSet(pu for _, interrupt in on_vcpus for pu in interrupt.pus)
        yield finding(
            "irqbalance-on-vcpus",
            format_cpus(pus),
            expected="interrupts of the host's devices next to the vCPUs",
            observed=f"irqbalance runs, and {_format_interrupts(on_vcpus)}",
            values={"pus": vm_pus},
            source=_INTERRUPTS,
        )


def _format_interrupts(interrupts: list[tuple[PciDevice, PciInterrupt]]) -> str:
    texts = (
        f"IRQ {interrupt.number} of {device.bdf} ({device.driver}) on CPU {interrupt.pus}"
        for device, interrupt in interrupts
    )
    return shorten_list(texts, _MAX_NAMED)


def _check_vm_interrupts(facts: Vm, vm_pus: CpuSet, host: Host) -> Iterator[Finding]:
    """Find passed-through devices whose interrupts are all handled by another package."""
    nodes = find_nodes(vm_pus, host)
    packages = {node.package for node in host.nodes if node.index in nodes} - {None}
    near_pus = CpuSet(
        pu for package in host.packages if package.index in packages for pu in package.pus
    )
    passed_bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    for device in host.pci_devices:
        interrupts = device.interrupts or ()
        if device.bdf not in passed_bdfs or not interrupts or not near_pus:
            continue
        if all(interrupt.pus.isdisjoint(near_pus) for interrupt in interrupts):
            numbers = CpuSet(interrupt.number for interrupt in interrupts)
            pus = CpuSet(pu for interrupt in interrupts for pu in interrupt.pus)
            yield finding(
                "irq-far",
                device.bdf,
                expected=f"interrupts handled in the vCPUs' package (CPUs {near_pus})",
                observed=f"IRQs {numbers} on {format_cpus(pus)}",
                values={"device": device.bdf, "pus": near_pus - vm_pus or near_pus},
                source=_INTERRUPTS,
            )
