"""HostInterrupts: interrupts of devices against the PUs of vCPUs.

Queues for which the kernel made an interrupt on every PU are left out: one fires only where the
work was asked for, and a PU that runs a vCPU asks for little.

Source: Documentation/core-api/irq/irq-affinity.rst; irqbalance(1): it leaves PUs of isolcpus= and
nohz_full= alone by itself.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.doctor.guest.pins import nodes_of
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind, PciDevice, PciInterrupt
from homenode.machine.topology import Host
from homenode.vm.model import Vm

_MOST_NAMED = 6
_SPREAD_RATIO = 0.75
"""A device whose interrupts reach this share of all PUs has one for each of them."""

_SOURCE = "/sys/bus/pci/devices/*/msi_irqs; /proc/irq/*/effective_affinity_list"


def interrupt_findings(facts: Vm, host: Host) -> Iterator[Finding]:
    """Interrupts of the host where vCPUs run, and of the VM's devices where they do not."""
    if not any(pin is not None and len(pin) <= 2 for pin in facts.vcpu_pins):
        return  # vCPUs that float over sets move out of the way
    ours = facts.pinned_pus
    yield from _of_the_host(facts, ours, host)
    yield from _of_the_vm(facts, ours, host)


def _is_given_away(device: PciDevice) -> bool:
    return device.driver is None or "vfio" in device.driver or device.driver == "pci-stub"


def _is_spread(interrupts: tuple[PciInterrupt, ...], host: Host) -> bool:
    reached = CpuSet(pu for each in interrupts for pu in each.pus)
    return len(reached) >= _SPREAD_RATIO * sum(pu.online for pu in host.pus)


def _of_the_host(facts: Vm, ours: CpuSet, host: Host) -> Iterator[Finding]:
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    quiet = CpuSet(pu.index for pu in host.pus if pu.isolated or pu.nohz_full)
    here: list[tuple[PciDevice, PciInterrupt]] = []
    for device in host.pci_devices:
        interrupts = device.interrupts or ()
        is_guests = device.bdf in passed or _is_given_away(device)
        # Ports interrupt for hot plugging and errors: never, on a sound machine.
        if is_guests or device.kind is DeviceKind.BRIDGE or _is_spread(interrupts, host):
            continue
        here += [(device, each) for each in interrupts if each.pus and each.pus <= ours]
    loud = [(device, each) for device, each in here if not each.pus.isdisjoint(quiet)]
    others = CpuSet(pu.index for pu in host.pus if pu.online) - ours - quiet
    if loud:
        pus = CpuSet(pu for _, each in loud for pu in each.pus)
        yield finding(
            "irq-on-isolated",
            f"PUs {pus}",
            expected="isolated PUs that handle no interrupts of the host's devices",
            observed=_words(loud),
            values={"pus": others},
            source=_SOURCE,
        )
    elif here and host.settings.irqbalance and others:
        pus = CpuSet(pu for _, each in here for pu in each.pus)
        yield finding(
            "irqbalance-on-vcpus",
            f"PUs {pus}",
            expected="interrupts of the host's devices next to the vCPUs",
            observed=f"irqbalance runs, and {_words(here)}",
            values={"pus": ours},
            source=_SOURCE,
        )


def _words(interrupts: list[tuple[PciDevice, PciInterrupt]]) -> str:
    named = ", ".join(
        f"IRQ {each.number} of {device.bdf} ({device.driver}) on PU {each.pus}"
        for device, each in interrupts[:_MOST_NAMED]
    )
    more = len(interrupts) - _MOST_NAMED
    return named + (f" and {more} more" if more > 0 else "")


def _of_the_vm(facts: Vm, ours: CpuSet, host: Host) -> Iterator[Finding]:
    """Interrupts of passed devices, all of which another package handles."""
    nodes = nodes_of(ours, host)
    packages = {node.package for node in host.nodes if node.index in nodes} - {None}
    near = CpuSet(
        pu for package in host.packages if package.index in packages for pu in package.pus
    )
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    for device in host.pci_devices:
        interrupts = device.interrupts or ()
        if device.bdf not in passed or not interrupts or not near:
            continue
        if all(each.pus.isdisjoint(near) for each in interrupts):
            numbers = CpuSet(each.number for each in interrupts)
            pus = CpuSet(pu for each in interrupts for pu in each.pus)
            yield finding(
                "irq-far",
                f"device {device.bdf}",
                expected=f"interrupts handled in the vCPUs' package (PUs {near})",
                observed=f"IRQs {numbers} on PUs {pus}",
                values={"device": device.bdf, "pus": near - ours or near},
                source=_SOURCE,
            )
