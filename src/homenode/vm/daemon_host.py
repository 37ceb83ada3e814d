"""The host of a libvirt daemon, and whether a plan for a named host may be defined there. [I/O]"""

import re

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.tools import virsh_capabilities
from homenode.machine.topology import Host
from homenode.vm.domain.read import read_running_domain
from homenode.vm.fingerprint import host_fingerprint, is_made_for
from homenode.vm.hypervisor.connection import check_host, is_local, machine_of
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.sources import load_host
from homenode.wording import command_line

_NODE_DEVICE = re.compile(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])\Z")


def load_daemon_host(source: str | None, virsh: Virsh) -> Host:
    """The host that VMs of a daemon run on, with what is allocated there now.

    source: the host that the user names; it must be the daemon's. An equal machine is accepted, so
    a capture of this one may be planned with. Raises InputError with both names if it is another
    machine, or if nothing shows that it is the same; UsageError if a daemon elsewhere needs one.
    """
    check_host(source, virsh.connect)
    if is_local(virsh.connect):
        here = _this_machine()
        if source is None:
            return here
        planned = load_host(source)
        _refuse_other(planned, here)
        return replace(here, reserve=planned.reserve or here.reserve)
    planned = load_host(source)
    _refuse_unlike(planned, virsh)
    domains = virsh.domains()
    running = virsh.domains(running=True)
    return replace(
        planned,
        domains=tuple(
            read_running_domain(virsh.definition(uuid), uuid in running, name)
            for uuid, name in sorted(domains.items(), key=lambda item: item[1])
        ),
    )


def refuse_tuned_for_other(vm: Vm, virsh: Virsh) -> None:
    """Raise InputError for a tuned definition that is not shown to be for this daemon's host."""
    record = vm.record
    if record is None or record.host is None or not is_local(virsh.connect):
        return
    here = _this_machine()
    if not is_made_for(here, record.host):
        raise InputError(
            f"{vm.name}: nothing shows that its definition was tuned for {here.name}, which the "
            "daemon runs on; nothing was changed",
            hint=command_line("homenode", "apply", vm.name),
        )


def _this_machine() -> Host:
    return load_host(None)


def _refuse_other(planned: Host, here: Host) -> None:
    is_same = is_made_for(here, host_fingerprint(planned))
    if planned.nodes_assumed or not planned.pci_devices:
        is_same = None
    if is_same:
        return
    if is_same is None:
        raise InputError(
            f"--host {planned.name}: cannot be compared with this machine, {here.name}: one of "
            "the two shows no NUMA nodes or no PCI functions; nothing was changed",
            hint="without --host, the plan is made for this machine",
        )
    raise InputError(
        f"--host {planned.name}: not the daemon's host, {here.name}; nothing was changed",
        hint=command_line("homenode", "plan", "--host", planned.name) + " plans for it, to a file",
    )


def _refuse_unlike(planned: Host, virsh: Virsh) -> None:
    """Compare a host with the nodes and PCI functions that a daemon elsewhere shows."""
    name = machine_of(virsh.connect)
    cells = virsh_capabilities.parse(virsh.capabilities())
    # libvirt gives no siblings of CPUs that are offline.
    theirs = {
        cell.node: CpuSet(c.pu for c in cell.cpus if c.siblings is not None) for cell in cells
    }
    ours = {node.index: node.pus for node in planned.nodes if node.pus or node.memory_bytes}
    expected = {device.bdf for device in planned.pci_devices if device.physical_function is None}
    missing = sorted(expected - _functions(virsh))
    if planned.nodes_assumed or not expected:
        difference = "it shows no NUMA nodes or no PCI functions to compare"
    elif missing:
        difference = f"{name} has no {missing[0]}"
    elif theirs != ours:
        difference = "its NUMA nodes have other CPUs"
    else:
        return
    raise InputError(
        f"--host {planned.name}: not shown to be the daemon's host, {name}: {difference}; nothing "
        "was changed",
        hint=command_line("homenode", "capture", "--ssh", name, "-o", "host.tar.gz"),
    )


def _functions(virsh: Virsh) -> set[Bdf]:
    names = map(_NODE_DEVICE.match, virsh.node_devices("pci"))
    return {
        Bdf(*(int(part, 16) for part in match.groups())) for match in names if match is not None
    }
