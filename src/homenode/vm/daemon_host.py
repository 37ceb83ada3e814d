"""The host of a libvirt daemon, and whether a plan for a named host may be defined there. [I/O]"""

import re

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, NotKnownError
from homenode.findings import NO_VMS, format_gaps, list_unread_vms
from homenode.machine.tools import virsh_capabilities
from homenode.machine.topology import Host, summarise
from homenode.text import command_line, plural
from homenode.vm.domain.read import read_running_domain
from homenode.vm.hypervisor.connection import DEFAULT, check_host, find_machine, is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from homenode.vm.sources import load_host

_NODE_DEVICE = re.compile(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])\Z")


def load_daemon_host(source: str | None, virsh: Virsh) -> Host:
    """Return the host of a daemon's VMs, with its current allocations.

    source: the user's name for it; an equal machine, such as a capture of this one, is accepted.
    Raises InputError if it is another machine or cannot be compared, UsageError if a remote daemon
    needs a source.
    """
    check_host(source, virsh.connect)
    if not is_local(virsh.connect):
        planned_host = load_host(source)
        _reject_unlike(planned_host, virsh)
        unread = list_unread_vms(planned_host.gaps)
        gaps = tuple(gap for gap in planned_host.gaps if gap not in unread)
        return _add_domains(replace(planned_host, domains=(), gaps=gaps), virsh)
    machine = _read_this_machine()
    if source is not None:
        planned_host = load_host(source)
        has_fingerprint = bool(planned_host.pci_devices) and not planned_host.nodes_assumed
        print_of_planned = planned_host.fingerprint if has_fingerprint else ""
        _reject_other(_format_counts(planned_host), print_of_planned, machine)
        machine = replace(machine, reserve=planned_host.reserve or machine.reserve)
    return machine if virsh.connect == DEFAULT else _add_domains(machine, virsh)


def _add_domains(host: Host, virsh: Virsh) -> Host:
    """Return the host with the domains of a further daemon, not this machine's system daemon."""
    listed_uuids = {domain.uuid for domain in host.domains}
    running = virsh.list_domains(running=True)
    domains = [
        read_running_domain(virsh.live_definition(uuid), running=True, source=name)
        if uuid in running
        else read_running_domain(virsh.read_definition(uuid), running=False, source=name)
        for uuid, name in virsh.list_domains().items()
        if uuid not in listed_uuids
    ]
    all_domains = sorted((*host.domains, *domains), key=lambda domain: domain.name)
    gaps = tuple(gap for gap in host.gaps if gap.subject != NO_VMS)
    return replace(host, domains=tuple(all_domains), gaps=gaps)


def reject_unread_vms(host: Host) -> None:
    """Raise NotKnownError if VMs were not read: a new definition may use their resources."""
    for line in format_gaps(list_unread_vms(host.gaps)):
        raise NotKnownError(
            f"{host.name}: cannot tell which CPUs, memory and devices are free: {line}; nothing "
            "was changed",
            hint="virsh -r -c qemu:///system list --all shows the cause",
        )


def reject_plan_for_other(plan: Plan, machine: Host) -> None:
    """Raise InputError for a saved plan that is not shown to be for the daemon's host."""
    _reject_other(plan.host_name or "a host without a name", plan.host_fingerprint, machine)
    reject_tuned_for_other(plan.vm, machine)


def reject_tuned_for_other(vm: Vm, machine: Host) -> None:
    """Raise InputError for a tuned definition that is not shown to be for the daemon's host, or
    that has devices that this host lacks."""
    record = vm.record
    if record is not None and record.host is not None and not machine.has_fingerprint(record.host):
        raise InputError(
            f"{vm.name} was planned for a host other than {machine.name}, or for it before it "
            "changed; nothing was changed",
            hint=command_line("homenode", "apply", vm.name),
        )
    devices = (device.bdf for device in vm.hostdevs if device.uuid is None)
    missing = sorted(bdf for bdf in devices if bdf not in machine.device_at)
    if missing and machine.pci_devices:
        raise InputError(
            f"{vm.name}: {machine.name} has no device {', '.join(map(str, missing))}; nothing was "
            "changed",
            hint="homenode show lists the devices of this machine",
        )


def _read_this_machine() -> Host:
    return load_host(None)


def _format_counts(host: Host) -> str:
    size = summarise(host)
    cpus = plural(size.pus, "CPU") if size.pus else "CPUs unknown"
    gpus = plural(size.gpus, "GPU") if size.pci_functions else "GPUs unknown"
    return f"{host.name} ({cpus}, {gpus})"


def _reject_other(name: str, fingerprint: str, machine: Host) -> None:
    """name: the name of the plan's host, with its size. fingerprint: "" = missing."""
    if not fingerprint or machine.nodes_assumed or not machine.pci_devices:
        raise InputError(
            f"the plan is for {name}, which cannot be compared with the daemon's host, "
            f"{_format_counts(machine)}, without NUMA nodes and PCI functions; nothing was changed",
            hint="without --host, the plan is made for this machine",
        )
    if not machine.has_fingerprint(fingerprint):
        raise InputError(
            f"the plan is for {name}, not for the daemon's host, {_format_counts(machine)}; "
            "nothing was changed",
            hint="homenode plan VM --host HOST -o tuned.xml writes a file for another host",
        )


def _reject_unlike(host: Host, virsh: Virsh) -> None:
    """Compare a host with the nodes and PCI functions that a daemon elsewhere shows."""
    name = find_machine(virsh.connect)
    cells = virsh_capabilities.parse(virsh.read_capabilities())
    # libvirt gives no siblings of CPUs that are offline.
    remote_pus = {
        cell.node: CpuSet(pu for pu, pus in cell.siblings_of_pu.items() if pus is not None)
        for cell in cells
    }
    host_pus = {node.index: node.pus for node in host.nodes if node.pus or node.memory_bytes}
    expected_bdfs = {device.bdf for device in host.pci_devices if device.physical_function is None}
    missing = sorted(expected_bdfs - _list_functions(virsh))
    if host.nodes_assumed or not expected_bdfs:
        difference = "it shows no NUMA nodes or no PCI functions to compare"
    elif missing:
        difference = f"{name} has no {missing[0]}"
    elif remote_pus != host_pus:
        difference = "its NUMA nodes have other CPUs"
    else:
        return
    raise InputError(
        f"--host {host.name}: not shown to be the daemon's host, {name}: {difference}; nothing "
        "was changed",
        hint=command_line("homenode", "capture", "--ssh", name, "-o", "host.tar.gz"),
    )


def _list_functions(virsh: Virsh) -> set[Bdf]:
    names = map(_NODE_DEVICE.match, virsh.node_devices("pci"))
    return {
        Bdf(*(int(part, 16) for part in match.groups())) for match in names if match is not None
    }
