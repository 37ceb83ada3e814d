"""Registry: the targets of homenode by their names, and VM files by their content."""

import re
from importlib import import_module

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.text import command_line
from homenode.vm.domain.read import read_vm as read_domain
from homenode.vm.model import Vm
from homenode.vm.plan import LIBVIRT
from homenode.vm.targets import libvirt
from homenode.vm.targets.hypervisors import NAMES
from homenode.vm.targets.target import Feature, SupportLevel, Target

_DUMP = "virsh dumpxml --inactive NAME > VM.xml"
_KUBEVIRT = re.compile(rb"kubevirt\.io/v1")
TARGETS = NAMES
"""Names of modules in `hypervisors`, whose TARGET is the target."""


def find_target(name: str) -> Target:
    """Return the target. Raises KeyError for an unknown name."""
    if name not in TARGETS:
        raise KeyError(name)
    target = import_module(f"homenode.vm.targets.hypervisors.{name}").TARGET
    assert isinstance(target, Target)
    return target


def has_feature(name: str, feature: Feature) -> bool:
    """Return whether libvirt, or a target, supports a feature."""
    return name == LIBVIRT or find_target(name).support[feature].level is not SupportLevel.LOST


class VmFile(Struct, frozen=True):
    """A VM from a hypervisor's file, or from options alone."""

    kind: str | None  # "libvirt" or the name of a target; None = options alone
    guest: Vm
    content: bytes | None  # None = options alone
    source: str


def runs_qemu(name: str) -> bool:
    """Return whether libvirt, or a target, starts QEMU on Linux."""
    return name == LIBVIRT or find_target(name).runs_qemu


def recognize_target(content: bytes) -> str | None:
    """The target that a file is of, by its content; None for a domain document, and for others."""
    if libvirt.recognizes(content):
        return None
    return next((name for name in TARGETS if find_target(name).recognises(content)), None)


def recognize_kind(content: bytes, source: str, kind_name: str | None = None) -> str:
    """Return the kind of a file by its content. kind_name: the target if the content does not
    tell. Raises InputError for an unknown kind."""
    target = recognize_target(content)
    if target is not None:
        return target
    if libvirt.recognizes(content):
        return LIBVIRT
    if kind_name not in (None, LIBVIRT) and find_target(kind_name).may_be(content):
        return kind_name
    if not content.strip():
        raise InputError(f"{source}: the file is empty", hint=_DUMP)
    if _KUBEVIRT.search(content):
        raise InputError(
            f"{source}: a VM of KubeVirt, not a definition of libvirt, qm or xl",
            hint=command_line("homenode", "kubevirt", "check", source),
        )
    possible = next((name for name in TARGETS if find_target(name).may_be(content)), None)
    with_target = command_line("homenode", "plan", source, "--target", possible)
    raise InputError(
        f"{source}: not a VM: expected libvirt's domain XML, a configuration of qm or xl, or a "
        "script of homenode",
        hint=_DUMP if possible is None else with_target,
    )


def read_vm(content: bytes, source: str, kind_name: str | None = None) -> VmFile:
    """Return the VM of a file. kind_name: as `recognize_kind`. Raises ParseError or InputError."""
    kind = recognize_kind(content, source, kind_name)
    if kind == LIBVIRT:
        return VmFile(kind, read_domain(content, source), content, source)
    return VmFile(kind, find_target(kind).read_vm(content, source), content, source)


def list_other_parts(vm: VmFile) -> tuple[str, ...]:
    """Return the elements or keys of a VM's file that a plan does not have, in its order."""
    guest, content = vm.guest, vm.content
    if content is None or vm.kind is None:
        return ()
    if vm.kind != LIBVIRT:
        return find_target(vm.kind).other_keys(content, vm.source)
    is_model = guest.cpu_mode in ("custom", "host-model")  # a new file has the host's CPU
    changed_parts = {
        "<currentMemory>": guest.ballooned_bytes,
        "<vcpu current=>": guest.offline_vcpus,
        f"CPU model {guest.cpu_model or guest.cpu_mode}": is_model,
    }
    return (
        *libvirt.list_other_parts(content, vm.source),
        *(part for part in changed_parts if changed_parts[part]),
    )


def add_host_facts(vm: VmFile, host: Host) -> VmFile:
    """Return the VM with facts that its file leaves to a host: architecture, whole cards."""
    if vm.kind in (None, LIBVIRT) or vm.content is None:
        return vm
    target = find_target(vm.kind)
    guest = vm.guest
    arm = host.architecture == "aarch64"
    if arm and target.architecture_of_host and b"x86_64" not in vm.content:
        guest = replace(guest, architecture="aarch64", machine="virt")
    return replace(vm, guest=target.on_host(guest, vm.content, vm.source, host))
