"""Stored plans: bound to their host, rejected on another, and counted as planned VMs."""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode import formats
from homenode.cpuset import NodeIndex
from homenode.errors import InputError, UsageError
from homenode.findings import Rejection
from homenode.machine.topology import Host, RunningDomain
from homenode.text import shorten_list
from homenode.vm.model import MAX_VCPUS, GuestCache, PortModel, Vm
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import MemoryMode


def encode_plan(plan: Plan) -> str:
    """Return the homenode.plan document of a plan."""
    return formats.encode("plan", plan)


class PlanRejection(Struct, frozen=True):
    """The rejections of a request, as a value to store; see Unplannable."""

    message: str
    hint: str | None
    rejections: tuple[Rejection, ...]


def encode_refusal(error: Unplannable) -> str:
    """Return the homenode.refusal document of a failed plan."""
    return formats.encode("refusal", PlanRejection(error.message, error.hint, error.rejections))


def read_plan(text: bytes, source: str) -> Plan:
    """Read the plan of a document. Raises InputError."""
    plan = formats.decode(text, "plan", Plan, source)
    for expected, is_so in _check_vm(plan.vm):
        if not is_so:
            raise InputError(f"{source}: not a valid homenode.plan: expected {expected}")
    return plan


def _check_vm(vm: Vm) -> Iterator[tuple[str, bool]]:
    """Yield facts that a plan requires of its guest, and whether they are present."""
    yield "a layout in vm.record", vm.record is not None
    yield f"vm.vcpus from 1 to {MAX_VCPUS}", 1 <= vm.vcpus <= MAX_VCPUS
    pins = [pin for pin in vm.vcpu_pins if pin is not None]
    are_all = len(vm.vcpu_pins) == vm.vcpus and len(pins) in (0, vm.vcpus)
    yield "vm.vcpu_pins of each vCPU, or of none", are_all
    mode = None if vm.binding is None else vm.binding[0]
    yield (
        f"a mode in vm.binding of {', '.join(MemoryMode)}",
        mode is None or mode in set(MemoryMode),
    )
    caches = set(GuestCache) | {None}
    yield f"vm.cpu_cache of {', '.join(GuestCache)}", vm.cpu_cache in caches
    models = {controller.model for controller in vm.controllers}
    yield f"models in vm.controllers of {', '.join(PortModel)}", models <= set(PortModel)
    plugged = all(controller.address is not None for controller in vm.controllers)
    yield "an address of each of vm.controllers", plugged


def read_plan_for(host: Host, text: bytes, source: str) -> Plan:
    """Read the plan of a document for this host. Raises InputError for another host's plan."""
    plan = read_plan(text, source)
    fingerprint = host.fingerprint
    if plan.host_fingerprint != fingerprint:
        raise InputError(
            f"{source}: a plan for host {plan.host_name} (topology {plan.host_fingerprint[:12]}), "
            f"found host {host.name} (topology {fingerprint[:12]})",
            hint="plan again on this host, or name the plan's host with --host",
        )
    return plan


def domain_of_plan(plan: Plan) -> RunningDomain:
    """Return the resources that the VM of a plan will use on its host.

    Unbound memory counts on the vCPUs' nodes, and memory of several nodes in equal parts; with
    floating vCPUs unbound memory may be on any node.
    """
    return RunningDomain(
        name=plan.vm.name,
        running=False,
        vcpu_pins=plan.vcpu_pins or (None,) * plan.vm.vcpus,
        emulator_pus=plan.vm.emulator_pus,
        iothread_pus=plan.iothread_pus,
        memory_bytes=plan.vm.memory_bytes + plan.vm.memory_device_bytes,
        memory_bound=plan.memory_mode is not None and plan.memory_mode is not MemoryMode.PREFERRED,
        memory_by_node=_sum_node_memory(plan),
        page_bytes=plan.vm.page_bytes,
        devices=tuple(sorted(device.bdf for device in plan.vm.hostdevs if device.uuid is None)),
        mediated=tuple(device.uuid for device in plan.vm.hostdevs if device.uuid is not None),
        planned=True,
    )


def _sum_node_memory(plan: Plan) -> tuple[tuple[NodeIndex, int], ...]:
    """Return bytes on each node: by reserved pages, else by the cells' binding."""
    sizes: dict[NodeIndex, int] = {}
    if plan.page_reservations:
        for node, page_bytes, pages, _ in plan.page_reservations:
            sizes[node] = sizes.get(node, 0) + page_bytes * pages
        return tuple(sorted(sizes.items()))
    if not plan.vcpu_pins and plan.memory_mode is None:
        return ()
    nodes_of_cell = [cell.host_nodes for cell in plan.cells]
    bytes_of_cell = [cell.memory_bytes for cell in plan.cells]
    # A stored plan has only the sum of its memory devices.
    nodes_of_cell.append(tuple(sorted({node for cell in nodes_of_cell for node in cell})))
    bytes_of_cell.append(plan.vm.memory_device_bytes)
    for nodes, size in zip(nodes_of_cell, bytes_of_cell, strict=True):
        for position, node in enumerate(nodes if size else ()):
            share = size // len(nodes) + (position < size % len(nodes))
            sizes[node] = sizes.get(node, 0) + share
    return tuple(sorted(sizes.items()))


def add_planned(hosts: Sequence[Host], plans: Sequence[tuple[str, Plan]]) -> tuple[Host, ...]:
    """Return the hosts, each with the VMs of its saved plans: (source, plan).

    A VM that runs already counts as it runs. Raises InputError for the plan of another host, or of
    one of several equal hosts of other names; UsageError for two plans of one VM or one device.
    """
    prints = [host.fingerprint for host in hosts]
    added_domains: list[list[RunningDomain]] = [[] for _ in hosts]
    for source, plan in plans:
        if plan.host_fingerprint not in prints:
            pairs = zip(hosts, prints, strict=True)
            names = shorten_list([f"{host.name} (topology {key[:12]})" for host, key in pairs], 2)
            raise InputError(
                f"{source}: a plan for host {plan.host_name or 'unknown'} (topology "
                f"{plan.host_fingerprint[:12] or 'unknown'}), found {names}",
                hint="--after needs plans of these hosts: plan the VM for one of them",
            )
        equals = [at for at, key in enumerate(prints) if key == plan.host_fingerprint]
        position, *others = [at for at in equals if hosts[at].name == plan.host_name] or equals
        if others:
            names = shorten_list([hosts[at].name for at in equals], 2)
            raise InputError(
                f"{source}: a plan for host {plan.host_name or 'unknown'}, found several hosts "
                f"with its topology: {names}",
                hint="name the plan's host as it was named then",
            )
        domain = domain_of_plan(plan)
        _reject_twice(source, domain, added_domains[position])
        if not any(
            running.running and running.name == domain.name for running in hosts[position].domains
        ):
            added_domains[position].append(domain)
    return tuple(
        replace(
            host,
            domains=tuple(
                running
                for running in host.domains
                if running.name not in {vm.name for vm in domains}
            )
            + tuple(domains),
        )
        for host, domains in zip(hosts, added_domains, strict=True)
    )


def _reject_twice(source: str, domain: RunningDomain, domains: Sequence[RunningDomain]) -> None:
    for other in domains:
        if other.name == domain.name:
            raise UsageError(
                f"{source}: expected one plan of each VM, found {domain.name} a second time"
            )
        devices = (*other.devices, *other.mediated)
        shared = [device for device in (*domain.devices, *domain.mediated) if device in devices]
        if shared:
            raise UsageError(
                f"{source}: expected plans that share no device, found {shared[0]} in the plans "
                f"of {other.name} and {domain.name}",
                hint="plan the second VM again, with --after PLAN of the first VM",
            )
