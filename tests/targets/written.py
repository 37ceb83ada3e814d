"""VMs and plans that the tests of targets write files of."""

from functools import cache

from msgspec import structs

from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, make_vm, plan_for_target
from homenode.units import GIB
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import find_target, read_vm
from homenode.vm.targets.target import check_target, list_settings


@cache
def host_named(name: str) -> Host:
    return load_host(name)


def options(layout: str, **more: object) -> PlanOptions:
    plain = PlanOptions(layout=layout, vcpus=4, memory_bytes=4 * GIB)
    return structs.replace(plain, **more)


def written(target: str, host: str, wanted: PlanOptions) -> PlannedFile:
    """A new file for a VM of which only options are known."""
    machine = host_named(host)
    vm = make_vm(wanted, machine.architecture)
    return plan_for_target(vm, wanted, machine, target)


@cache
def _planned(host: str, wanted: PlanOptions) -> PlannedFile:
    return written("qemu", host, wanted)


def rendered(target: str, host: str, wanted: PlanOptions) -> PlannedFile:
    """As `written`, of a plan that is made once for all targets that take its PCI addresses."""
    if target in ("qemu", "proxmox"):
        return _planned(host, wanted) if target == "qemu" else written(target, host, wanted)
    planned = _planned(host, wanted)
    made = planned.plan
    machine = host_named(host)
    guest = make_vm(wanted, machine.architecture).guest
    rendering = find_target(target).render(made, guest, machine, None, "vm")
    return structs.replace(
        planned,
        plan=structs.replace(
            made, kept=list_settings(find_target(target), rendering.document), kept_of=target
        ),
        target=target,
        original=b"",
        rendering=rendering,
        findings=check_target(find_target(target), made),
    )


def edited(content: bytes, host: str, wanted: PlanOptions, source: str = "vm") -> PlannedFile:
    """A file with a plan in it."""
    vm = read_vm(content, source)
    assert vm.kind is not None
    return plan_for_target(vm, wanted, host_named(host), vm.kind)


def again(content: bytes, host: str, wanted: PlanOptions) -> PlannedFile:
    """The same plan into the file that came of it: the VM is what the file says."""
    bare = structs.replace(wanted, vcpus=None, memory_bytes=None, gpu_count=None)
    return edited(content, host, bare)
